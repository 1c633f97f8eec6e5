//! [`StagePart`]: what a worker loads; [`StageLayers`]: its layers, checked against what crosses from layer to layer;
//! [`VocabularyPart`]: its rows of the embedding and the lm_head.

use std::ops::Range;
use std::sync::Arc;

use ferrule_kernels::arch::LANES;

use super::tensor_parallel::TensorParallelGroup;
use crate::spec::{LayerSpec, ModelSpec};

/// The layers of a pipeline stage are invalid.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum StageError {
    /// The range is empty or exceeds the model.
    #[error("layers of a pipeline stage must be a non-empty range within 0..{layers}, got {first}..{end}")]
    Range {
        /// First layer of the range.
        first: usize,
        /// Layer after the last one of the range.
        end: usize,
        /// Number of layers of the model.
        layers: usize,
    },
    /// A layer of the stage reads something of a layer before the stage that is not in the hidden states.
    #[error(
        "a pipeline stage of this model cannot begin at layer {first}, because layer {layer} reads the {what} of layer \
         {owner}"
    )]
    Crossing {
        /// First layer of the stage.
        first: usize,
        /// Layer that reads.
        layer: usize,
        /// Thing that is read.
        what: &'static str,
        /// Layer that it is read from.
        owner: usize,
    },
    /// The stage is not one of the stages.
    #[error("index of a pipeline stage must be below {stages}, the number of stages, got {index}")]
    Index {
        /// Index of the stage.
        index: usize,
        /// Number of stages.
        stages: usize,
    },
    /// The model cannot be divided into this many stages.
    #[error(
        "pipeline_parallel_size must be in 1..={most} for this model, got {stages} ({layers} layers, of which {most} \
         can begin a stage)"
    )]
    Stages {
        /// Number of stages.
        stages: usize,
        /// Largest number of stages.
        most: usize,
        /// Number of layers of the model.
        layers: usize,
    },
}

/// Consecutive layers that one worker holds. The first stage also has what precedes the layers, and the last one what
/// follows them, except for the matrices of the embedding and the lm_head; see [`VocabularyPart`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct StageLayers {
    range: Range<usize>,
    /// Number of layers of the model.
    count: usize,
}

impl StageLayers {
    /// Returns all layers of a model.
    pub fn whole(spec: &ModelSpec) -> Self {
        let count = spec.layers.len();
        Self { range: 0..count, count }
    }

    /// Checks that `range` can be a stage: its layers read nothing of earlier layers but the hidden states.
    ///
    /// # Errors
    /// [`StageError::Range`] or [`StageError::Crossing`].
    pub fn new(spec: &ModelSpec, range: Range<usize>) -> Result<Self, StageError> {
        let (count, first) = (spec.layers.len(), range.start);
        if range.is_empty() || range.end > count {
            return Err(StageError::Range { first, end: range.end, layers: count });
        }
        for layer in range.clone() {
            if let Some((owner, what)) = reads(&spec.layers[layer]).find(|(owner, _)| *owner < first) {
                return Err(StageError::Crossing { first, layer, what, owner });
            }
        }
        Ok(Self { range, count })
    }

    pub fn range(&self) -> Range<usize> {
        self.range.clone()
    }

    /// Returns whether the stage embeds the tokens.
    pub fn is_first(&self) -> bool {
        self.range.start == 0
    }

    /// Returns whether the stage computes the logits.
    pub fn is_last(&self) -> bool {
        self.range.end == self.count
    }
}

/// Rows of the embedding and of the lm_head that one worker holds. Each worker of a stage of a pipeline has about as many
/// panels of them as the others of the stage. A worker of a single stage has all rows, or those of its
/// [`TensorParallelGroup`].
///
/// Between its logits of a batch and the next layers for it, the first stage waits until tokens are sampled and looked up.
/// So it has fewer rows than other stages: then stages with the same number of layers, if these are alike, need about the
/// same time for a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct VocabularyPart {
    /// Index of the worker among all workers.
    worker: usize,
    /// Number of workers of each stage.
    ranks: usize,
    /// Number of stages that divide the rows.
    stages: usize,
}

impl VocabularyPart {
    /// The part that is not divided among stages.
    pub const WHOLE: Self = Self { worker: 0, ranks: 1, stages: 1 };

    /// Share of a worker of the first stage in the division of the rows, relative to the others. The second one of two stages
    /// has at most 6 of 11 rows, so that stages with equal layers have at most 0.55 of the weights, however many of these are
    /// rows.
    const FIRST_SHARE: usize = 5;
    /// Share of a worker of another stage.
    const SHARE: usize = 6;

    /// Returns the part of worker `worker` of all workers of a pipeline with several stages of `ranks` workers.
    pub fn new(worker: usize, ranks: usize, stages: usize) -> Self {
        Self { worker, ranks, stages }
    }

    /// Returns whether the rows are divided among stages.
    pub fn is_divided(self) -> bool {
        self.stages > 1
    }

    /// Returns the panels of a matrix of `rows` rows that the worker has; none if there are too few.
    pub fn panels(self, rows: usize) -> Range<usize> {
        if !self.is_divided() {
            return 0..rows.div_ceil(LANES);
        }
        let before = |worker: usize| {
            let of_first = worker.min(self.ranks);
            Self::FIRST_SHARE * of_first + Self::SHARE * (worker - of_first)
        };
        let first = |worker: usize| rows.div_ceil(LANES) * before(worker) / before(self.ranks * self.stages);
        first(self.worker)..first(self.worker + 1)
    }

    /// Returns the rows that the worker has of a matrix of `rows` rows.
    pub fn rows(self, rows: usize) -> Range<usize> {
        let panels = self.panels(rows);
        panels.start * LANES..rows.min(panels.end * LANES)
    }
}

/// The part of a model that a worker loads: layers, and its rows of their matrices.
pub struct StagePart {
    /// Layers of the stage. The first stage also has everything before the layers (positions, token types and the
    /// beginning of the residual streams), and the last stage has everything after them. The rows of the embedding and
    /// the lm_head are divided among all workers of several stages.
    pub layers: Range<usize>,
    /// Index of the stage.
    pub stage: usize,
    /// Number of stages.
    pub stages: usize,
    /// Workers that divide the rows of the stage's matrices; `None` if this worker has all rows.
    pub group: Option<TensorParallelGroup>,
}

/// A [`StagePart`] that was checked against the model.
#[derive(Clone)]
pub(crate) struct LoadedPart {
    pub layers: StageLayers,
    pub vocabulary: VocabularyPart,
    pub group: Option<Arc<TensorParallelGroup>>,
}

impl LoadedPart {
    /// Checks that the layers of a part can be a stage; see [`StageLayers::new`].
    ///
    /// # Errors
    /// [`StageError`].
    pub fn new(spec: &ModelSpec, part: StagePart) -> Result<Self, StageError> {
        let StagePart { layers, stage, stages, group } = part;
        if stage >= stages {
            return Err(StageError::Index { index: stage, stages });
        }
        let count = spec.layers.len();
        if stages > count {
            return Err(StageError::Stages { stages, most: count, layers: count });
        }
        let (rank, ranks) = group.as_ref().map_or((0, 1), |group| (group.rank(), group.ranks()));
        let vocabulary = match stages {
            1 => VocabularyPart::WHOLE,
            _ => VocabularyPart::new(stage * ranks + rank, ranks, stages),
        };
        Ok(Self { layers: StageLayers::new(spec, layers)?, vocabulary, group: group.map(Arc::new) })
    }
}

impl From<StageLayers> for LoadedPart {
    fn from(layers: StageLayers) -> Self {
        Self { layers, vocabulary: VocabularyPart::WHOLE, group: None }
    }
}

/// Returns the earlier layers that a layer reads something of besides the hidden states, with what it reads.
pub(super) fn reads(layer: &LayerSpec) -> impl Iterator<Item = (usize, &'static str)> {
    let attentions = layer.attentions().flat_map(|attention| {
        [(attention.kv_layer, "keys and values"), (attention.selection_layer, "choice of tokens")]
    });
    let weights = layer.blocks.iter().map(|block| (block.weights_of, "weights"));
    attentions.chain(weights).filter_map(|(owner, what)| Some((owner?, what)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_vocabulary_is_divided_among_all_workers_of_all_stages() {
        for (ranks, stages) in [(1, 2), (1, 5), (2, 2), (3, 4)] {
            for rows in [1, 16, 40, 101, 4_096, 128_256] {
                let part = |worker| VocabularyPart::new(worker, ranks, stages).rows(rows);
                assert!((0..ranks * stages).flat_map(part).eq(0..rows), "{ranks} x {stages} workers, {rows} rows");
            }
        }
        let rows = |worker| VocabularyPart::new(worker, 2, 2).rows(128_000).len();
        assert_eq!([0, 1, 2, 3].map(rows), [29_088, 29_088, 34_912, 34_912]);
    }
}
