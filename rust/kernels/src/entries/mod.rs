//! Attention to a window of tokens and to entries, each of which stands for a block of tokens (DeepSeek-V4, 2026).
//!
//! One vector per token or entry is both key and value, for all heads. Vectors are f32 and lie row by row in pages that
//! cover [`PAGE_TOKENS`] positions, as those of [`crate::kv`] do: an entry is in the page of the last token of its block.
//! A row attends to the tokens of its window and to the entries of the blocks that are complete at its position, all of
//! them or those that an indexer chose ([`choose_entries`]), in one softmax ([`attend_entries`]).
//!
//! A product is one chain of multiply-adds per lane over the columns, whose lanes are then added; an output column is one
//! chain over the tokens and then the entries. Results depend only on a row's position, the shape and the data.

mod attention;
mod choice;

pub use attention::{Entries, EntryAttention, EntryBuffers, attend_entries, attention_bytes};
pub use choice::{EntryChoice, EntryIndex, buffer_bytes, choose_entries};

use std::ops::Range;

use crate::arch::{LANES, Simd};
use crate::kv::{PAGE_TOKENS, PageId};
use crate::math::load_up_to;
use crate::rows::Rows;

/// Returns the number of rows that a page has if each row stands for `block` tokens, which divide a page or are a multiple
/// of one.
#[must_use]
pub const fn rows_per_page(block: usize) -> usize {
    if block < PAGE_TOKENS { PAGE_TOKENS / block } else { 1 }
}

/// Rows in pages, each of which stands for a block of tokens.
#[derive(Debug, Clone, Copy)]
pub struct PagedRows<'a> {
    /// Pages, one per row of the view: `[pages, rows_per_page * dim]`.
    pub pages: Rows<'a>,
    /// Length of a row.
    pub dim: usize,
    /// Number of tokens that a row stands for.
    pub block: usize,
}

impl<'a> PagedRows<'a> {
    /// Returns row `index` of a sequence.
    #[inline]
    fn row(&self, pages: &[PageId], index: usize) -> &'a [f32] {
        &self.pages.data[self.start(pages, index)..][..self.dim]
    }

    /// Returns the place in `pages.data` of row `index` of a sequence.
    #[inline]
    fn start(&self, pages: &[PageId], index: usize) -> usize {
        let last = (index + 1) * self.block - 1;
        let start = self.pages.first + last % PAGE_TOKENS / self.block * self.dim;
        assert!(start + self.dim <= self.pages.stride, "pages of {} floats are too short", self.pages.stride);
        pages[last / PAGE_TOKENS] as usize * self.pages.stride + start
    }

    /// Finds rows of a sequence. Returns them, with their places in the first of `starts`, and the unused rest of it.
    fn find<'s>(
        &self,
        pages: &[PageId],
        rows: impl Iterator<Item = usize>,
        starts: &'s mut [usize],
    ) -> (Vectors<'s>, &'s mut [usize])
    where
        'a: 's,
    {
        let found = starts.iter_mut().zip(rows).map(|(start, row)| *start = self.start(pages, row)).count();
        let (found, rest) = starts.split_at_mut(found);
        (Vectors { data: self.pages.data, starts: found }, rest)
    }
}

/// Rows anywhere in pages.
#[derive(Debug, Clone, Copy, Default)]
struct Vectors<'a> {
    data: &'a [f32],
    /// Place of each row.
    starts: &'a [usize],
}

impl<'a> Vectors<'a> {
    /// Returns the given columns of each row.
    #[inline(always)]
    fn rows(&self, columns: Range<usize>) -> impl Iterator<Item = &'a [f32]> {
        let data = self.data;
        self.starts.iter().map(move |start| &data[start + columns.start..start + columns.end])
    }
}

/// Returns the products of `key` with `H` queries of the same length, one after the other.
#[inline(always)]
fn products<S: Simd, const H: usize>(simd: S, key: &[f32], queries: &[f32]) -> [f32; H] {
    let dim = key.len();
    let mut sums = [simd.splat(0.0); H];
    for first in (0..dim).step_by(LANES) {
        let end = dim.min(first + LANES);
        let key = load_up_to(simd, &key[first..end]);
        for (head, sum) in sums.iter_mut().enumerate() {
            let query = load_up_to(simd, &queries[head * dim..][first..end]);
            *sum = simd.mul_add(query, key, *sum);
        }
    }
    sums.map(|sum| simd.reduce_add(sum))
}
