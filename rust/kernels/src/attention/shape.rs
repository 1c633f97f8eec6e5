//! Arguments of attention: the rows of each sequence, and the attention variant of a layer.

use std::ops::Range;

use crate::indexer::Selection;
use crate::kv::PageId;

/// Consecutive rows of one sequence.
#[derive(Debug, Clone, Copy)]
pub struct AttentionSequence<'a> {
    /// First row of the sequence in Q and in the output.
    pub first_row: usize,
    /// Number of rows of the sequence.
    pub rows: usize,
    /// Position of the first row. K and V of all rows must be in the pages already.
    pub first_position: usize,
    /// Page table: one entry per [`PAGE_TOKENS`](crate::kv::PAGE_TOKENS) positions. Pages completely out of the window
    /// are not read and may be [`PAGE_NONE`](crate::kv::PAGE_NONE).
    pub pages: &'a [PageId],
}

impl AttentionSequence<'_> {
    /// Returns the number of tokens up to the last row. With bidirectional attention this is the whole sequence.
    pub(super) fn tokens(&self) -> usize {
        self.first_position + self.rows
    }
}

/// Shape and variant of the attention of a layer.
#[derive(Debug, Clone, Copy)]
pub struct AttentionShape<'a> {
    /// Number of heads of Q; head h reads head `h / (heads / kv_heads)` of K and V.
    pub heads: usize,
    /// Number of heads of K and V.
    pub kv_heads: usize,
    /// Columns of a head of Q and K.
    pub key_dim: usize,
    /// Columns of a head of V and of the output.
    pub value_dim: usize,
    /// Factor that scores are multiplied by.
    pub scale: f32,
    /// Whether rows also attend to later tokens (encoders). The sequence must end with its last row.
    pub bidirectional: bool,
    /// Sliding window: the row at position p attends to positions `p - window + 1 ..= p`, or
    /// `p - window + 1 ..= p + window - 1` if bidirectional. `None` means no limit.
    pub window: Option<usize>,
    /// Chunked attention (Llama 4): the row at position p attends to no position before `p / chunk * chunk`.
    pub chunk: Option<usize>,
    /// Logit soft-capping: scores s become `softcap * tanh(s / softcap)`.
    pub softcap: Option<f32>,
    /// ALiBi slopes (Press et al. 2022), `[heads]`: `slope * (key position - query position)` is added to the scaled and
    /// capped score.
    pub slopes: Option<&'a [f32]>,
    /// Attention sinks (gpt-oss), `[heads]`: a logit per head that takes part in the softmax and adds no value to the
    /// output.
    pub sinks: Option<&'a [f32]>,
    /// Tokens that an indexer chose for each row, which attends to no others. Excludes slopes.
    pub selection: Option<&'a Selection>,
}

impl AttentionShape<'_> {
    /// Returns the positions that row `row` of the sequence attends to, at least its own. Both ends are non-decreasing
    /// over rows.
    pub(super) fn visible(&self, sequence: &AttentionSequence<'_>, row: usize) -> Range<usize> {
        let position = sequence.first_position + row;
        // The window includes the row's own position, on both sides.
        let before = self.window.map_or(position, |window| position.min(window - 1));
        let before = self.chunk.map_or(before, |chunk| before.min(position % chunk));
        let end = match (self.bidirectional, self.window) {
            (false, _) => position + 1,
            (true, None) => sequence.tokens(),
            (true, Some(window)) => sequence.tokens().min(position.saturating_add(window)),
        };
        position - before..end
    }
}
