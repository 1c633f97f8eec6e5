//! The interface between engine and model, which test fakes implement too.

use std::ops::Range;

use ferrule_kernels::{Cancel, PoolError, kv::PageId};

use crate::adapter::Adapter;
use crate::features::Features;
use crate::spec::Pooling;

/// Sequence memory of some layers: pages, which share a page table, or state.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KvGroup {
    /// Number of layers whose memory is in the group.
    pub layers: usize,
    /// Kind of memory.
    pub kind: GroupKind,
    /// Bytes of one page, or of the state of one sequence, for all layers of the group together.
    pub page_bytes: u64,
}

/// Kind of sequence memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GroupKind {
    /// Keys and values of every token, in pages of `PAGE_TOKENS` tokens.
    Pages {
        /// Number of positions that a row attends to, including its own. Pages wholly outside of the window are not read
        /// again.
        window: Option<usize>,
    },
    /// A fixed number of bytes that depends on all tokens so far: convolution tails and recurrent states. A page of the
    /// group is the state after some token. A forward pass reads one and writes another, so that a batch can be
    /// retried.
    State,
}

impl KvGroup {
    /// Returns the attention window of a group of pages.
    #[must_use]
    pub fn window(&self) -> Option<usize> {
        match self.kind {
            GroupKind::Pages { window } => window,
            GroupKind::State => None,
        }
    }

    /// Returns whether the group is state.
    #[must_use]
    pub fn is_state(&self) -> bool {
        self.kind == GroupKind::State
    }
}

/// Rows of a chunk whose logits or hidden states are computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LogitRows {
    /// No row: a prefill chunk that is not the last one of its prompt.
    None,
    /// The first token.
    First,
    /// The last token.
    Last,
    /// The last token. Only its largest logit is needed, the first one among equals: negative infinity may stand for all
    /// others.
    LastLargest,
    /// Every token.
    All,
}

impl LogitRows {
    /// Returns the wanted rows of a chunk of `count` tokens.
    #[must_use]
    pub fn of(self, count: usize) -> Range<usize> {
        match self {
            Self::None => 0..0,
            Self::First => 0..1,
            Self::Last | Self::LastLargest => count - 1..count,
            Self::All => 0..count,
        }
    }
}

/// Consecutive tokens of one sequence: a prefill chunk, or the token of a decode row.
#[derive(Debug, Clone, Copy)]
pub struct SequenceChunk<'a> {
    /// Tokens, at positions `first_position ..`.
    pub tokens: &'a [u32],
    /// Position of the first token in its sequence. All earlier positions are in the pages already.
    pub first_position: usize,
    /// Number of prompt tokens of the sequence, fixed at admission: dynamic RoPE depends on it.
    pub prompt_len: usize,
    /// For each [`KvGroup`] of pages, the page of every `PAGE_TOKENS` positions, long enough for this chunk. Pages
    /// wholly outside of the group's window are not read.
    ///
    /// For each group of state, the page with the state before the chunk (any page if the chunk starts at position 0),
    /// and the page that the state after the chunk is written to. A third page is a snapshot: it gets the state after
    /// the last multiple of `PAGE_TOKENS` positions that the chunk reaches.
    pub pages: &'a [Vec<PageId>],
    /// Type of each token, below [`Capabilities::token_types`]; empty if all are of type 0.
    pub token_types: &'a [u32],
    /// Features of the sequence, at its positions, each as wide as [`Capabilities::feature_width`] says.
    pub features: &'a [Features],
    /// Rows whose logits are computed.
    pub logits: LogitRows,
    /// LoRA adapter of this sequence, loaded for this model.
    pub adapter: Option<&'a Adapter>,
}

impl SequenceChunk<'_> {
    /// Returns the positions of the chunk's tokens.
    #[must_use]
    pub fn positions(&self) -> Range<usize> {
        self.first_position..self.first_position + self.tokens.len()
    }
}

/// Chunks of several sequences that are computed together.
#[derive(Debug, Clone, Copy)]
pub struct Batch<'a> {
    /// Chunks of different sequences, in any mix of prefill and decode.
    pub sequences: &'a [SequenceChunk<'a>],
}

impl<'a> Batch<'a> {
    /// Returns the tokens of all chunks, which are the rows of the batch.
    pub fn tokens(self) -> impl Iterator<Item = u32> + Clone + 'a {
        self.sequences.iter().flat_map(|sequence| sequence.tokens).copied()
    }

    /// Returns the types of these tokens.
    pub fn token_types(self) -> impl Iterator<Item = u32> + 'a {
        self.sequences.iter().flat_map(|SequenceChunk { tokens, token_types, .. }| {
            token_types.iter().copied().chain(std::iter::repeat_n(0, tokens.len() - token_types.len()))
        })
    }
}

/// A forward pass did not finish. The pages of its new positions have undefined contents; other pages are unchanged.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ForwardError {
    /// The cancel flag was set.
    #[error("the forward pass was cancelled")]
    Cancelled,
    /// A worker thread panicked, which is a bug in ferrule.
    #[error("a worker thread panicked in the forward pass: {0}")]
    Panicked(String),
    /// A worker of a pipeline stage failed or cannot be reached. The batch cannot be retried.
    #[error("{reason}")]
    StageLost {
        /// Index of the stage.
        stage: usize,
        /// Message with the worker and the cause.
        reason: String,
    },
}

impl From<PoolError> for ForwardError {
    fn from(error: PoolError) -> Self {
        match error {
            PoolError::Cancelled => Self::Cancelled,
            PoolError::Panicked(message) => Self::Panicked(message),
        }
    }
}

/// Capabilities of a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Capabilities {
    /// Whether a token attends only to itself and the tokens before it. If not, a sequence is computed in one chunk and
    /// its pages cannot be shared.
    pub causal: bool,
    /// Whether the model has logits to sample tokens from.
    pub logits: bool,
    /// Length of a hidden state.
    pub hidden_size: usize,
    /// Length of an embedding.
    pub embedding_size: usize,
    /// Number of token types; 1 if the model does not distinguish any.
    pub token_types: usize,
    /// Number of floats in a row of [`Features`]; `None` if the model takes token ids alone.
    pub feature_width: Option<usize>,
    /// Whether tokens have embeddings. If not, all tokens need features.
    pub embeds_tokens: bool,
    /// Number of hidden states that make one embedding in [`LanguageModel::embeddings`].
    pub merged_rows: usize,
    /// Classifier, if the model has one.
    pub classifier: Option<ClassifierInfo>,
}

/// Input and output of a classifier.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ClassifierInfo {
    /// Pooling of the hidden states.
    pub pooling: Pooling,
    /// Number of labels.
    pub labels: usize,
}

/// A model as the engine sees it: token ids and pages in, logits or hidden states out.
pub trait LanguageModel {
    /// Returns the number of logits per row.
    fn vocab_size(&self) -> usize;

    /// Returns what the model supports.
    fn capabilities(&self) -> Capabilities;

    /// Returns the groups of layers that share a page table.
    fn kv_groups(&self) -> &[KvGroup];

    /// Returns the number of leading positions whose keys and values depend only on the tokens up to there, for a
    /// sequence with a prompt of `prompt_len` tokens. Pages of these positions can be shared with any sequence that has
    /// the same prefix.
    fn shareable_tokens(&self, prompt_len: usize) -> usize;

    /// Copies a page of a group, in all of its layers.
    fn copy_page(&mut self, group: usize, from: PageId, to: PageId);

    /// Returns the bytes of a page of a group, in all of its layers: [`KvGroup::page_bytes`] of them.
    fn page(&self, group: usize, page: PageId) -> &[u8];

    /// Overwrites a page of a group with bytes from [`LanguageModel::page`] of a model with the same fingerprint.
    ///
    /// # Panics
    /// If the number of bytes is not [`KvGroup::page_bytes`].
    fn set_page(&mut self, group: usize, page: PageId, bytes: &[u8]);

    /// Returns whether [`LanguageModel::page`], [`LanguageModel::set_page`] and [`LanguageModel::fingerprint`] can be
    /// called, because the pages are in this process.
    fn has_local_pages(&self) -> bool {
        true
    }

    /// Returns the fingerprint of everything that affects the KV cache contents besides tokens and adapter. Pages can
    /// be exchanged only between models with the same fingerprint. Reads all weights, so it is slow on first use.
    fn fingerprint(&self) -> [u8; 32];

    /// Computes a batch: overwrites `logits` with `[wanted rows, vocab_size]`, in the order of the batch, and writes
    /// keys and values of the chunks' positions to their pages. Logits that [`LogitRows`] says are not needed may be
    /// negative infinity.
    ///
    /// # Errors
    /// [`ForwardError`]; the batch can be retried.
    ///
    /// # Panics
    /// If logits are requested from a model that has none.
    fn forward(&mut self, batch: Batch<'_>, cancel: &Cancel, logits: &mut Vec<f32>) -> Result<(), ForwardError>;

    /// Does the same as [`LanguageModel::forward`], but returns hidden states after the final norm: `[wanted rows,
    /// hidden_size]`.
    ///
    /// # Errors
    /// [`ForwardError`]; the batch can be retried.
    fn hidden_states(&mut self, batch: Batch<'_>, cancel: &Cancel, hidden: &mut Vec<f32>) -> Result<(), ForwardError>;

    /// Returns the queue of a model that computes several batches at the same time; `None` for a model that computes one
    /// after another.
    fn batch_queue(&mut self) -> Option<&mut dyn BatchQueue> {
        None
    }

    /// Computes embeddings `[texts, embedding_size]` from pooled hidden states `[texts, merged_rows * hidden_size]`.
    ///
    /// # Errors
    /// [`ForwardError`].
    fn embeddings(&self, pooled: &[f32], cancel: &Cancel) -> Result<Vec<f32>, ForwardError>;

    /// Computes the classifier's scores `[texts, labels]` from pooled hidden states `[texts, hidden_size]`.
    ///
    /// # Errors
    /// [`ForwardError`].
    ///
    /// # Panics
    /// If the model has no classifier.
    fn scores(&self, pooled: &[f32], cancel: &Cancel) -> Result<Vec<f32>, ForwardError>;
}

/// Batches in flight in a model that computes several at the same time, such as the stages of a pipeline.
///
/// Page copies and batches read and write pages in the order in which they were requested. So pages of a batch in flight
/// can be given to later ones. No other forward pass of the model can run while batches are in flight.
pub trait BatchQueue {
    /// Returns the number of batches that keep all parts of the model busy.
    fn capacity(&self) -> usize;

    /// Begins to compute a batch as [`LanguageModel::forward`] does, and returns without waiting for it. A sequence may
    /// have a chunk in a batch in flight: the new one begins where that one ends, and reads the pages that it writes.
    ///
    /// # Errors
    /// [`ForwardError`]; the batch is not in flight then.
    fn begin(&mut self, batch: Batch<'_>) -> Result<(), ForwardError>;

    /// Waits for the oldest batch in flight, and overwrites `logits` as [`LanguageModel::forward`] does.
    ///
    /// # Errors
    /// [`ForwardError`]. After [`ForwardError::Cancelled`] the batch is still in flight.
    ///
    /// # Panics
    /// If no batch is in flight.
    fn finish(&mut self, cancel: &Cancel, logits: &mut Vec<f32>) -> Result<(), ForwardError>;
}
