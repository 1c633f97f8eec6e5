//! What a call of attention is about: whose rows, and what is computed of them.

use std::ops::Range;

use crate::kv::PageId;

/// Consecutive rows of one sequence.
#[derive(Debug, Clone, Copy)]
pub struct AttentionSequence<'a> {
    /// The sequence's first row in Q and in the output.
    pub first_row: usize,
    /// How many rows it has there.
    pub rows: usize,
    /// Position of the first of them. K and V of all rows are in the pages already.
    pub first_position: usize,
    /// The page of every [`PAGE_TOKENS`](crate::kv::PAGE_TOKENS) positions. Pages wholly outside the window are not
    /// looked at and may be [`PAGE_NONE`](crate::kv::PAGE_NONE).
    pub pages: &'a [PageId],
}

impl AttentionSequence<'_> {
    /// Tokens of the sequence up to the last of these rows: where they see what comes after them, all there are.
    pub(super) fn tokens(&self) -> usize {
        self.first_position + self.rows
    }
}

/// What one layer's attention computes.
#[derive(Debug, Clone, Copy)]
pub struct AttentionShape<'a> {
    /// Heads of Q; head h reads K and V of head `h / (heads / kv_heads)`.
    pub heads: usize,
    /// Heads of K and V.
    pub kv_heads: usize,
    /// Columns of a head of Q and K.
    pub key_dim: usize,
    /// Columns of a head of V and of the output.
    pub value_dim: usize,
    /// Factor of the scores.
    pub scale: f32,
    /// Whether a row also sees the tokens after it (encoders): the sequence ends with its last row.
    pub bidirectional: bool,
    /// The row at position p sees positions `p - window + 1 ..= p`, or all up to p; where it also sees the tokens after
    /// it, `p - window + 1 ..= p + window - 1`, or all.
    pub window: Option<usize>,
    /// Scores s become `softcap * tanh(s / softcap)`.
    pub softcap: Option<f32>,
    /// ALiBi (Press et al. 2022): `slope * (position of the key - position of the query)` is added to the scaled and
    /// capped score. `[heads]`
    pub slopes: Option<&'a [f32]>,
    /// Attention sinks (gpt-oss): a logit of each head that takes part in the softmax beside the scores and adds no
    /// value to the output. `[heads]`
    pub sinks: Option<&'a [f32]>,
}

impl AttentionShape<'_> {
    /// Positions that row `row` of the sequence sees: its own at least. Neither end decreases from row to row.
    pub(super) fn visible(&self, sequence: &AttentionSequence<'_>, row: usize) -> Range<usize> {
        let position = sequence.first_position + row;
        // Its own position is the first of the window on either side.
        let before = self.window.map_or(position, |window| position.min(window - 1));
        let end = match (self.bidirectional, self.window) {
            (false, _) => position + 1,
            (true, None) => sequence.tokens(),
            (true, Some(window)) => sequence.tokens().min(position.saturating_add(window)),
        };
        position - before..end
    }
}
