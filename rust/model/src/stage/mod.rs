//! Pipeline stages: a model divided by layers among processes.
//!
//! A stage holds consecutive layers, with their weights and their sequence memory. It reads the hidden states that the
//! stage before wrote, and all stages in a row compute what the whole model computes, bit by bit. Each of them gets the
//! same [`Batch`]: token ids, positions and pages are those of the whole model.
//!
//! Between two stages, a token has all residual streams, side by side, and its embedding if a later layer reads it.
//! If a layer reads anything else of an earlier layer, such as its keys and values, both must be in the same stage; see
//! [`StageError::Crossing`].
//!
//! The rows of the embedding and of the lm_head are divided among all workers of all stages (vocabulary parallelism,
//! <https://arxiv.org/abs/2411.05288>), so that the stages can have the same number of layers. Each worker looks up its rows
//! of tokens for the first stage. The last stage computes the hidden states whose logits are needed, and each worker
//! multiplies them with its rows of the lm_head. The rows are independent of each other, so the logits have the bits of the
//! whole model. The first stage has fewer rows than the others, as it also waits until tokens are sampled and looked up.
//!
//! With two stages, layers L, their part of the lm_head H, and two batches A and B in flight:
//!
//! ```text
//! stage 0 | L(A) | L(B) | H(A) | L(A) | H(B) | L(B) | H(A) | ...
//! stage 1 |      | L(A) | H(A) | L(B) | H(B) | L(A) | H(A) | ...
//! ```
//!
//! Several workers may divide the rows of a stage's matrices (tensor parallelism); see [`TensorParallelGroup`]. Each of
//! them gets the same hidden states and computes the same ones.

mod divide;
mod layers;
mod link;
mod logit_words;
mod pipeline;
mod queues;
mod serve;
mod step;
mod tensor_parallel;
mod token_rows;
mod workers;

use std::ops::Range;
use std::sync::Arc;

use ferrule_kernels::kv::{KvFormat, PageId};
use ferrule_kernels::{Cancel, Pool};

pub use divide::divide_layers;
pub(crate) use layers::{LoadedPart, StageLayers, VocabularyPart};
pub use layers::{StageError, StagePart};
pub use link::{LinkError, StageInfo, StageLink};
pub use pipeline::{Pipeline, PipelineError};
pub use serve::serve_stage;
use step::StepLimits;
pub use step::{PageCopy, StageSequence, StageStep, StepError};
use tensor_parallel::GatherError;
pub use tensor_parallel::TensorParallelGroup;
use token_rows::TokenRows;
pub use workers::Worker;

use crate::batch::{Batch, ForwardError, KvGroup, LanguageModel};
use crate::fingerprint::math_fingerprint;
use crate::needs::{Needs, measure_part};
use crate::quantization::Quantization;
use crate::spec::ModelSpec;
use crate::transformer::{LoadOptions, Transformer};
use crate::weights::{LoadError, Progress, Source, WeightSizes};

/// A stage cannot run a batch.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum StageRunError {
    /// The hidden states of the stage before do not fit the batch.
    #[error("hidden states of a batch of {tokens} tokens must have {expected} numbers, got {found}")]
    Input {
        /// Number of tokens of the batch.
        tokens: usize,
        /// Numbers that the stage reads.
        expected: usize,
        /// Numbers found.
        found: usize,
    },
    /// The hidden states for the lm_head are not whole rows.
    #[error("hidden states for the lm_head must have a multiple of {width} numbers, got {found}")]
    LogitInput {
        /// Numbers of a row.
        width: usize,
        /// Numbers found.
        found: usize,
    },
    /// The worker has no rows of the lm_head.
    #[error("got {found} numbers for the lm_head, of which this worker has no rows")]
    NoLmHead {
        /// Numbers found.
        found: usize,
    },
    /// A sequence has an adapter.
    #[error("sequence {sequence} of the batch has an adapter, which pipeline stages do not support")]
    Adapter {
        /// Index of the sequence in the batch.
        sequence: usize,
    },
    /// The connection to another worker of the stage ended.
    #[error("tensor-parallel rank {rank} is lost")]
    RankLost {
        /// Rank of the worker.
        rank: usize,
    },
    /// Another worker of the stage has computed another number of outputs than this one needs.
    #[error(
        "tensor-parallel rank {rank} has sent {found} numbers in an all-gather, expected {expected}: the workers run \
         different steps or models"
    )]
    Gather {
        /// Rank of the other worker.
        rank: usize,
        /// Numbers that this worker needs.
        expected: usize,
        /// Numbers that the other worker has sent.
        found: u64,
    },
    /// The step is invalid.
    #[error(transparent)]
    Step(#[from] StepError),
    /// The forward pass did not finish.
    #[error(transparent)]
    Forward(#[from] ForwardError),
}

impl From<GatherError> for StageRunError {
    fn from(error: GatherError) -> Self {
        match error {
            GatherError::Lost { rank } => Self::RankLost { rank },
            GatherError::Count { rank, expected, found } => Self::Gather { rank, expected, found },
            GatherError::Pool(error) => Self::Forward(error.into()),
        }
    }
}

/// Output of the last stage, for the requested rows of a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LastOutput {
    /// Logits, `[wanted rows, vocab_size]`, as [`LanguageModel::forward`]. If the rows of the lm_head are divided among
    /// stages, what is multiplied with them: `[wanted rows, embedding_width]`; see [`Stage::logits`].
    Logits,
    /// Hidden states after the final norm, `[wanted rows, hidden_size]`, as [`LanguageModel::hidden_states`].
    HiddenStates,
}

/// Consecutive layers of a model, or a worker's rows of their matrices, with their sequence memory and thread pool.
pub struct Stage {
    model: Transformer,
    /// Number of pages of each group.
    pages: Vec<usize>,
}

impl Stage {
    /// Loads a part of a model, and reads no other weights. Of several workers that divide the rows of matrices, each has
    /// its heads of keys and values, if their number is divisible, and all small matrices, vectors and states. The
    /// sequence memory is empty until [`Stage::allocate_kv`].
    ///
    /// # Errors
    /// [`LoadError`] if the layers are not a valid stage, the files do not fit the spec, memory is too small, or the load
    /// is cancelled.
    pub fn load(
        spec: ModelSpec,
        part: StagePart,
        source: Source<'_>,
        options: LoadOptions,
        pool: Arc<Pool>,
        cancel: &Cancel,
        progress: Progress<'_>,
    ) -> Result<Self, LoadError> {
        let part = LoadedPart::new(&spec, part)?;
        let model = Transformer::load_part(spec, part, source, options, pool, cancel, progress)?;
        Ok(Self { model, pages: Vec::new() })
    }

    /// Computes the memory that a part of a model needs, as [`crate::measure`] does for all of it.
    ///
    /// # Errors
    /// [`LoadError`] if the layers are not a valid stage, or the files do not fit the spec.
    pub fn measure(
        spec: &ModelSpec,
        part: StagePart,
        source: Source<'_>,
        quantization: Quantization,
        kv_format: KvFormat,
    ) -> Result<Needs, LoadError> {
        measure_part(spec, LoadedPart::new(spec, part)?, source, quantization, kv_format)
    }

    /// Allocates `pages[i]` empty pages for group `i`, as [`Transformer::allocate_kv`] does.
    ///
    /// # Errors
    /// [`LoadError::Memory`] if the address space is too small.
    pub fn allocate_kv(&mut self, pages: &[usize]) -> Result<(), LoadError> {
        self.model.allocate_kv(pages)?;
        self.pages = pages.to_vec();
        Ok(())
    }

    /// Returns the layers of the stage.
    #[must_use]
    pub fn layers(&self) -> Range<usize> {
        self.model.stage().range()
    }

    /// Returns the groups of sequence memory. They are those of the whole model, with the bytes of this worker's part,
    /// so that one page table serves all stages; a group that has no layer here has pages of 0 bytes.
    #[must_use]
    pub fn kv_groups(&self) -> &[KvGroup] {
        self.model.kv_groups()
    }

    /// Returns the sizes of the stage's weights. Tables that stay in their file are counted in each stage.
    #[must_use]
    pub fn weight_sizes(&self) -> WeightSizes {
        self.model.weight_sizes()
    }

    /// Returns the bytes of weights in a mapped file, as [`Transformer::mapped_bytes`].
    #[must_use]
    pub fn mapped_bytes(&self) -> u64 {
        self.model.mapped_bytes()
    }

    /// Returns the fingerprint of everything that affects the pages of this stage, as [`LanguageModel::fingerprint`].
    #[must_use]
    pub fn fingerprint(&self) -> [u8; 32] {
        self.model.fingerprint()
    }

    /// Copies a page of a group, in all layers of the stage.
    pub fn copy_page(&mut self, group: usize, from: PageId, to: PageId) {
        self.model.copy_page(group, from, to);
    }

    /// Returns the numbers per token that the stage reads. The first stage reads the rows of the tokens that
    /// [`Stage::look_up`] of all stages returns, or 0 numbers if it has all rows of the embedding.
    #[must_use]
    pub fn input_width(&self) -> usize {
        let spec = self.model.spec();
        match self.model.stage().is_first() {
            true if self.model.vocabulary().is_divided() => spec.embedding_width(),
            true => 0,
            false => spec.boundary_width(self.layers().start),
        }
    }

    /// Returns the numbers per token that the stage writes for the next one: 0 for the last stage, which writes logits
    /// or hidden states.
    #[must_use]
    pub fn output_width(&self) -> usize {
        if self.model.stage().is_last() { 0 } else { self.model.spec().boundary_width(self.layers().end) }
    }

    /// Runs a batch: reads `input: [tokens, input_width]` and overwrites `output` with `[tokens, output_width]`, or in
    /// the last stage with what `last` says. All workers of a stage have the same output.
    ///
    /// # Errors
    /// [`StageRunError`]. After a [`StageRunError::Forward`] the batch can be retried, unless other workers divide the
    /// rows of the stage's matrices: they may have finished it, so each later batch has the same error.
    ///
    /// # Panics
    /// If logits are requested from a model that has none.
    pub fn forward(
        &mut self,
        batch: Batch<'_>,
        input: &[f32],
        last: LastOutput,
        cancel: &Cancel,
        output: &mut Vec<f32>,
    ) -> Result<(), StageRunError> {
        self.check(batch, input)?;
        if let Some(failure) = self.model.group().and_then(TensorParallelGroup::failure) {
            return Err(failure.into());
        }
        let is_divided = self.model.vocabulary().is_divided();
        let done = self.model.run_layers(batch, input, cancel).and_then(|()| {
            match (self.model.stage().is_last(), last) {
                (false, _) => self.model.copy_boundary(batch, output),
                (true, LastOutput::Logits) if is_divided => self.model.lm_head_input(batch, cancel, output)?,
                (true, LastOutput::Logits) => self.model.logits(batch, cancel, output)?,
                (true, LastOutput::HiddenStates) => self.model.last_hidden(batch, cancel, output)?,
            }
            Ok(())
        });
        done.map_err(|error| match self.model.group() {
            Some(group) => group.fail(error).into(),
            None => StageRunError::Forward(error.into()),
        })
    }

    /// Returns the tokens whose rows of the embedding and the lm_head this worker has, if the rows are divided among
    /// stages; else nothing.
    #[must_use]
    pub fn own_tokens(&self) -> Range<usize> {
        let vocabulary = self.model.vocabulary();
        if vocabulary.is_divided() { vocabulary.rows(self.model.spec().vocab_size) } else { 0..0 }
    }

    /// Computes the logits of [`Stage::own_tokens`] from rows that the last stage wrote for [`LastOutput::Logits`]:
    /// overwrites `logits` with `[rows, own tokens]`.
    ///
    /// # Errors
    /// [`StageRunError::LogitInput`] if `rows` are not `[rows, embedding_width]`, [`StageRunError::NoLmHead`] if this worker
    /// has no rows of an lm_head; [`StageRunError::Forward`].
    pub fn logits(&self, rows: &[f32], cancel: &Cancel, logits: &mut Vec<f32>) -> Result<(), StageRunError> {
        let spec = self.model.spec();
        let (width, found) = (spec.embedding_width(), rows.len());
        if spec.lm_head.is_none() || self.own_tokens().is_empty() {
            return Err(StageRunError::NoLmHead { found });
        }
        if !found.is_multiple_of(width) {
            return Err(StageRunError::LogitInput { width, found });
        }
        self.model.own_logits(rows, cancel, logits).map_err(|error| StageRunError::Forward(error.into()))
    }

    /// Looks up the rows of tokens among [`Stage::own_tokens`] in the matrix of the embedding: `[tokens,
    /// embedding_width]`.
    ///
    /// # Errors
    /// [`StepError::Number`] for another token.
    pub fn look_up(&self, tokens: &[u32]) -> Result<Vec<f32>, StepError> {
        self.token_rows().read(tokens)
    }

    /// Returns this worker's rows of the embedding's matrix.
    fn token_rows(&self) -> TokenRows {
        TokenRows::new(self.model.shared_weights(), self.own_tokens(), self.model.spec().embedding_width())
    }

    /// Returns whether this worker sends its logits after a step without a request for them: the last stage has what is
    /// multiplied.
    fn continues_with_logits(&self, step: &StageStep) -> bool {
        self.model.stage().is_last() && step.last == LastOutput::Logits && !self.own_tokens().is_empty()
    }

    /// Runs a step from another process: copies pages, then runs the batch as [`Stage::forward`] does.
    ///
    /// # Errors
    /// [`StageRunError`]. A step with a number outside of its limits changes nothing.
    pub fn step(
        &mut self,
        step: &StageStep,
        input: &[f32],
        cancel: &Cancel,
        output: &mut Vec<f32>,
    ) -> Result<(), StageRunError> {
        let (groups, spec) = (self.kv_groups(), self.model.spec());
        step.check(&StepLimits {
            groups,
            pages: &self.pages,
            vocab_size: spec.vocab_size,
            positions: spec.max_position_embeddings,
            capabilities: spec.capabilities(),
        })?;
        for &PageCopy { group, from, to } in &step.copies {
            self.copy_page(group, from, to);
        }
        self.forward(Batch { sequences: &step.chunks() }, input, step.last, cancel, output)
    }

    /// Returns the rank of this worker among those that divide the rows of the stage's matrices.
    pub(crate) fn rank(&self) -> usize {
        self.model.group().map_or(0, TensorParallelGroup::rank)
    }

    /// Returns the number of workers that divide the rows of the stage's matrices.
    pub(crate) fn ranks(&self) -> usize {
        self.model.group().map_or(1, TensorParallelGroup::ranks)
    }

    /// Returns the fingerprint of the system's math library.
    pub(crate) fn math_fingerprint(&self) -> [u8; 32] {
        math_fingerprint(self.model.spec())
    }

    /// Returns the fingerprint of what each of those workers has: all of the model but the matrices.
    pub(crate) fn shared_fingerprint(&self) -> [u8; 32] {
        self.model.shared_fingerprint()
    }

    /// Returns the options with which the stage was loaded.
    pub(crate) fn options(&self) -> LoadOptions {
        self.model.options()
    }

    /// Checks that the stage can run a batch and that `input` belongs to it.
    fn check(&self, batch: Batch<'_>, input: &[f32]) -> Result<(), StageRunError> {
        if let Some(sequence) = batch.sequences.iter().position(|sequence| sequence.adapter.is_some()) {
            return Err(StageRunError::Adapter { sequence });
        }
        let tokens = batch.tokens().count();
        let (expected, found) = (tokens * self.input_width(), input.len());
        if found == expected { Ok(()) } else { Err(StageRunError::Input { tokens, expected, found }) }
    }
}
