//! [`StagePart`]: what a worker loads; [`StageLayers`]: its layers, checked against what crosses from layer to layer.

use std::ops::Range;
use std::sync::Arc;

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

/// Consecutive layers that one worker holds. The first stage has the embedding too; the last one has the final norm,
/// the lm_head and the classifier. Of an embedding that the lm_head is tied to, the last stage has the matrix.
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

    /// Returns whether the stage has the matrix of the embedding and looks up the rows of the tokens: the last stage if it
    /// multiplies with that matrix, because the lm_head is tied to it; else the first stage.
    pub fn looks_up_tokens(&self, spec: &ModelSpec) -> bool {
        if spec.has_tied_lm_head() { self.is_last() } else { self.is_first() }
    }
}

/// The part of a model that a worker loads: layers, and its rows of their matrices.
pub struct StagePart {
    /// Layers of the stage. The first stage also has everything before the layers (the embedding and the beginning of the
    /// residual streams), and the last stage has everything after them. If the lm_head is tied to the embedding, the
    /// matrix is in the last stage only, which looks up its rows for the first one.
    pub layers: Range<usize>,
    /// Workers that divide the rows of the stage's matrices; `None` if this worker has all rows.
    pub group: Option<TensorParallelGroup>,
}

impl From<Range<usize>> for StagePart {
    fn from(layers: Range<usize>) -> Self {
        Self { layers, group: None }
    }
}

/// A [`StagePart`] that was checked against the model.
#[derive(Clone)]
pub(crate) struct LoadedPart {
    pub layers: StageLayers,
    pub group: Option<Arc<TensorParallelGroup>>,
}

impl LoadedPart {
    /// Checks that the layers of a part can be a stage; see [`StageLayers::new`].
    pub fn new(spec: &ModelSpec, part: StagePart) -> Result<Self, StageError> {
        Ok(Self { layers: StageLayers::new(spec, part.layers)?, group: part.group.map(Arc::new) })
    }
}

impl From<StageLayers> for LoadedPart {
    fn from(layers: StageLayers) -> Self {
        Self { layers, group: None }
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
