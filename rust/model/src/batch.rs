//! What the engine asks of a model: the seam that fakes stand in for.

use std::ops::Range;

use ferrule_kernels::{Cancel, PoolError, kv::PageId};

use crate::adapter::Adapter;
use crate::spec::Pooling;

/// The layers that share a page table, and what a page of theirs holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KvGroup {
    /// Layers whose keys and values lie in the group's pages.
    pub layers: usize,
    /// A row sees this many positions, its own among them; pages wholly outside are never read again.
    pub window: Option<usize>,
    /// Bytes of one page, all layers of the group together.
    pub page_bytes: u64,
}

/// The rows of a chunk whose logits, or hidden states, are wanted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LogitRows {
    /// None: a prompt's chunk before its last.
    None,
    /// The first token's.
    First,
    /// The last token's.
    Last,
    /// Every token's.
    All,
}

impl LogitRows {
    /// Which rows of a chunk of `count` tokens these are.
    #[must_use]
    pub fn of(self, count: usize) -> Range<usize> {
        match self {
            Self::None => 0..0,
            Self::First => 0..1,
            Self::Last => count - 1..count,
            Self::All => 0..count,
        }
    }
}

/// Consecutive tokens of one sequence: a piece of a prompt, or the one token of a decode step.
#[derive(Debug, Clone, Copy)]
pub struct SequenceChunk<'a> {
    /// The tokens, at positions `first_position ..`.
    pub tokens: &'a [u32],
    /// Position of the first token in its sequence; all earlier positions are in the pages already.
    pub first_position: usize,
    /// Tokens of the sequence's prompt, fixed at admission: the rotation of dynamic RoPE depends on it.
    pub prompt_len: usize,
    /// For each [`KvGroup`] the page of every `PAGE_TOKENS` positions, long enough for this chunk.
    /// Pages wholly outside the group's window are not looked at.
    pub pages: &'a [Vec<PageId>],
    /// The kind of each token, below [`Abilities::token_types`]; empty where all are of the first.
    pub token_types: &'a [u32],
    /// Which logits to compute.
    pub logits: LogitRows,
    /// What is added to the model for this sequence; one of the model's own adapters.
    pub adapter: Option<&'a Adapter>,
}

impl SequenceChunk<'_> {
    /// The positions of the chunk's tokens.
    #[must_use]
    pub fn positions(&self) -> Range<usize> {
        self.first_position..self.first_position + self.tokens.len()
    }
}

/// Chunks of several sequences, computed together.
#[derive(Debug, Clone, Copy)]
pub struct Batch<'a> {
    /// Chunks of different sequences, in any mix of prefill and decode.
    pub sequences: &'a [SequenceChunk<'a>],
}

impl<'a> Batch<'a> {
    /// The tokens of all chunks: the rows of the batch.
    pub fn tokens(self) -> impl Iterator<Item = u32> + 'a {
        self.sequences.iter().flat_map(|sequence| sequence.tokens).copied()
    }

    /// The kinds of these tokens.
    pub fn token_types(self) -> impl Iterator<Item = u32> + 'a {
        self.sequences.iter().flat_map(|SequenceChunk { tokens, token_types, .. }| {
            token_types.iter().copied().chain(std::iter::repeat_n(0, tokens.len() - token_types.len()))
        })
    }
}

/// Why a forward pass did not finish. The pages of its new positions hold nothing of use; all others are untouched.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ForwardError {
    /// The cancel flag was up.
    #[error("the forward pass was cancelled")]
    Cancelled,
    /// A worker panicked: a defect of ferrule.
    #[error("a worker panicked in the forward pass: {0}")]
    Panicked(String),
}

impl From<PoolError> for ForwardError {
    fn from(error: PoolError) -> Self {
        match error {
            PoolError::Cancelled => Self::Cancelled,
            PoolError::Panicked(message) => Self::Panicked(message),
        }
    }
}

/// What a model can be asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Abilities {
    /// Whether a token sees only those before it and itself. Where it sees all, a sequence is computed whole, in one
    /// chunk, and its pages are of no use to another.
    pub causal: bool,
    /// Whether there are logits that tokens can be sampled from.
    pub logits: bool,
    /// Numbers of a hidden state.
    pub hidden_size: usize,
    /// Numbers of an embedding.
    pub embedding_size: usize,
    /// Kinds of tokens; 1 where the model makes no difference.
    pub token_types: usize,
    /// Its classifier, if it has one.
    pub classifier: Option<Classifies>,
}

/// What a classifier reads and gives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Classifies {
    /// The hidden state that it reads.
    pub pooling: Pooling,
    /// Scores that it gives.
    pub labels: usize,
}

/// A model as the engine sees it: token ids and pages in, logits or hidden states out.
pub trait LanguageModel {
    /// Logits of a row.
    fn vocab_size(&self) -> usize;

    /// What it can be asked for.
    fn abilities(&self) -> Abilities;

    /// The groups of layers that share a page table.
    fn kv_groups(&self) -> &[KvGroup];

    /// How many leading positions of a sequence with so long a prompt have keys and values that depend on its tokens
    /// up to there and on nothing else: the pages of those may be shared with any sequence that begins alike.
    fn shareable_tokens(&self, prompt_len: usize) -> usize;

    /// Copies a page of a group, in all its layers.
    fn copy_page(&mut self, group: usize, from: PageId, to: PageId);

    /// The bytes of a page of a group, in all its layers: [`KvGroup::page_bytes`] of them.
    fn page(&self, group: usize, page: PageId) -> &[u8];

    /// Overwrites a page of a group with bytes that [`LanguageModel::page`] gave under the same fingerprint.
    ///
    /// # Panics
    /// If `bytes` are not as many as a page has.
    fn set_page(&mut self, group: usize, page: PageId, bytes: &[u8]);

    /// Names everything on which the bits of keys and values depend besides the tokens and the adapter: bytes of pages are exchanged
    /// only between models of the same fingerprint. Reads all weights, so it is not for every step.
    fn fingerprint(&self) -> [u8; 32];

    /// Computes a batch. `logits` is overwritten with `[wanted rows, vocab_size]`, in the order of the batch.
    /// Keys and values of the chunks' positions are in their pages afterwards.
    ///
    /// # Errors
    /// [`ForwardError`]; the batch can be given again.
    ///
    /// # Panics
    /// If logits are wanted of a model that has none.
    fn forward(&mut self, batch: Batch<'_>, cancel: &Cancel, logits: &mut Vec<f32>) -> Result<(), ForwardError>;

    /// As [`LanguageModel::forward`], but gives hidden states after the last norm: `[wanted rows, hidden_size]`.
    ///
    /// # Errors
    /// [`ForwardError`]; the batch can be given again.
    fn hidden_states(&mut self, batch: Batch<'_>, cancel: &Cancel, hidden: &mut Vec<f32>) -> Result<(), ForwardError>;

    /// The embeddings `[texts, embedding_size]` of pooled hidden states `[texts, hidden_size]`.
    ///
    /// # Errors
    /// [`ForwardError`].
    fn embeddings(&self, pooled: &[f32], cancel: &Cancel) -> Result<Vec<f32>, ForwardError>;

    /// The classifier's scores `[texts, labels]` of pooled hidden states `[texts, hidden_size]`.
    ///
    /// # Errors
    /// [`ForwardError`].
    ///
    /// # Panics
    /// If there is no classifier.
    fn scores(&self, pooled: &[f32], cancel: &Cancel) -> Result<Vec<f32>, ForwardError>;
}
