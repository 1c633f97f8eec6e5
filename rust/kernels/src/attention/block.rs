//! One block of tokens for a tile of rows: what is the same however numbers are stored.

use std::ops::Range;

use super::ATTENTION_BLOCK;
use super::record::Line;
use crate::arch::{Kernel, LANES, LINE, Simd};
use crate::kv::{KvStore, PAGE_TOKENS, PageId};
use crate::math::tanh;

/// Pages of a block.
pub(super) const BLOCK_PAGES: usize = ATTENTION_BLOCK / PAGE_TOKENS;

/// Vectors that accumulators may take, so that operands still find registers.
pub(super) const fn registers<S: Simd>() -> usize {
    S::TILE_ROWS * S::TILE_PANELS
}

/// The most rows of a tile: as many as leave registers for K and V.
pub(super) const fn widest_tile<S: Simd>() -> usize {
    match registers::<S>() {
        16.. => 8,
        4.. => 4,
        _ => 2,
    }
}

/// How Q meets K and probabilities meet V.
pub(super) trait Arithmetic: Sized + Send + Sync + 'static {
    /// K and V of one head in one page; the default where there is none.
    type Page<'a>: Copy + Default + Send + Sync;

    /// One head in one page.
    fn page(store: &KvStore, layer: usize, page: PageId, head: usize) -> Self::Page<'_>;

    /// Words of a row of a tile's Q.
    fn query_words(key_dim: usize) -> usize;

    /// Lays out `query`, a head of Q, times `scale` as row `row` of a tile of `rows`.
    fn pack<S: Simd>(simd: S, query: &[f32], scale: f32, row: usize, rows: usize, tile: &mut [f32]);

    /// Computes the records of a block.
    fn run<S: Simd, const R: usize>(simd: S, block: TileBlock<'_, '_, Self, R>);
}

/// K and V of one head in the pages of a block; empty where no row of the task looks.
pub(super) type BlockPages<'s, A> = [<A as Arithmetic>::Page<'s>; BLOCK_PAGES];

/// Probabilities of a row as codes of two digits: the first and the second of every token.
pub(super) type Digits = [[[i8; LANES]; BLOCK_PAGES]; 2];

/// Buffers of a tile, for as many rows as it has or more.
pub(super) struct Room<'a> {
    /// Scores and then probabilities.
    pub(super) scores: &'a mut [[Line; BLOCK_PAGES]],
    pub(super) digits: &'a mut [Digits],
}

/// Computes the records of `R` rows over one block.
pub(super) struct TileBlock<'a, 's, A: Arithmetic, const R: usize> {
    pub(super) pages: &'a BlockPages<'s, A>,
    /// Pages whose K is to be fetched while these are worked on.
    pub(super) next: &'a BlockPages<'s, A>,
    /// The tile's Q, as [`Arithmetic::pack`] laid it out.
    pub(super) q: &'a [f32],
    pub(super) key_dim: usize,
    pub(super) sight: Sight<R>,
    pub(super) softcap: Option<f32>,
    pub(super) bias: Option<Bias<R>>,
    pub(super) value_vectors: usize,
    pub(super) room: Room<'a>,
    /// `R` records, overwritten.
    pub(super) records: &'a mut [Line],
    /// Whether this tile is the first to touch the block.
    pub(super) prefetch: bool,
}

impl<A: Arithmetic, const R: usize> Kernel for TileBlock<'_, '_, A, R> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        // Code for tiles that an instruction set does not use is not even made.
        if const { R <= widest_tile::<S>() } {
            A::run(simd, self);
        } else {
            unreachable!("a tile of {R} rows");
        }
    }
}

impl<A: Arithmetic, const R: usize> TileBlock<'_, '_, A, R> {
    /// What becomes of a raw score: cap, bias and mask.
    #[inline(always)]
    pub(super) fn finish_score<S: Simd>(
        &self,
        simd: S,
        row: usize,
        page: usize,
        masked: bool,
        score: S::F32,
    ) -> S::F32 {
        let mut score = score;
        if let Some(cap) = self.softcap {
            let factor = simd.splat(cap * std::f32::consts::LOG2_E);
            score = simd.mul(factor, tanh(simd, simd.div(score, simd.splat(cap))));
        }
        if let Some(bias) = &self.bias {
            score = bias.add(simd, row, page, score);
        }
        if masked {
            score = self.sight.select(simd, row, page, score, f32::NEG_INFINITY);
        }
        score
    }
}

/// ALiBi: what is added to the scores of a block by how far its tokens are from each row of a tile.
pub(super) struct Bias<const R: usize> {
    /// Of each row's head, in units of the scores: of log2.
    pub(super) slopes: [f32; R],
    /// Position of the block's first token less that of each row. Distances rather than positions are multiplied, so
    /// that no digit is lost far from the start of a sequence.
    pub(super) starts: [f32; R],
}

impl<const R: usize> Bias<R> {
    #[inline(always)]
    fn add<S: Simd>(&self, simd: S, row: usize, page: usize, score: S::F32) -> S::F32 {
        const TOKENS: [f32; PAGE_TOKENS] =
            [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0, 11.0, 12.0, 13.0, 14.0, 15.0];
        let start = self.starts[row] + (page * PAGE_TOKENS) as f32;
        let distance = simd.add(simd.splat(start), simd.load(&TOKENS));
        simd.mul_add(simd.splat(self.slopes[row]), distance, score)
    }
}

/// Which tokens of a block the rows of a tile see.
pub(super) struct Sight<const R: usize> {
    /// Tokens that each row sees; 0..0 where it sees none.
    pub(super) rows: [Range<usize>; R],
    /// Pages that some row sees.
    pub(super) pages: Range<usize>,
    /// Pages that every row sees in full.
    shared: Range<usize>,
}

impl<const R: usize> Sight<R> {
    pub(super) fn new(rows: [Range<usize>; R]) -> Self {
        let (mut first_start, mut last_start) = (ATTENTION_BLOCK, 0);
        let (mut first_end, mut last_end) = (ATTENTION_BLOCK, 0);
        for row in &rows {
            if !row.is_empty() {
                first_start = first_start.min(row.start);
            }
            last_start = last_start.max(row.start);
            first_end = first_end.min(row.end);
            last_end = last_end.max(row.end);
        }
        Self {
            rows,
            pages: first_start / PAGE_TOKENS..last_end.div_ceil(PAGE_TOKENS),
            shared: last_start.div_ceil(PAGE_TOKENS)..first_end / PAGE_TOKENS,
        }
    }

    /// Whether some row does not see all of these pages.
    #[inline(always)]
    pub(super) fn masks(&self, first: usize, pages: usize) -> bool {
        first < self.shared.start || first + pages > self.shared.end
    }

    /// Tokens of a page as a row sees them: `hidden` where it does not.
    #[inline(always)]
    pub(super) fn select<S: Simd>(&self, simd: S, row: usize, page: usize, tokens: S::F32, hidden: f32) -> S::F32 {
        let start = page * PAGE_TOKENS;
        let Range { start: from, end: to } = self.rows[row];
        simd.select_range(from.saturating_sub(start), to.saturating_sub(start), tokens, simd.splat(hidden))
    }
}

/// Asks for element `index` of a slice, or for what lies there where it has not that many.
#[inline(always)]
pub(super) fn prefetch<S: Simd, T>(simd: S, slice: &[T], index: usize) {
    simd.prefetch(slice.as_ptr().wrapping_add(index).cast());
}

/// Half of the cache lines of the next pages, asked for in equal steps. While scores are computed V of these pages is
/// on its way; of the next K one half comes during the softmax and the other beside V, so that memory never rests.
#[derive(Clone, Copy)]
pub(super) struct Ahead {
    first: usize,
    step: usize,
}

impl Ahead {
    /// Of a page's K, half 0 or 1. Nothing where `wanted` is false.
    pub(super) fn new<T>(keys: &[T], half: usize, steps: usize, wanted: bool) -> Self {
        let lines = size_of_val(keys).div_ceil(LINE).div_ceil(2);
        Self { first: half * lines, step: if wanted { lines.div_ceil(steps) } else { 0 } }
    }

    /// Step `index` of the half in `keys`.
    #[inline(always)]
    pub(super) fn prefetch<S: Simd, T>(self, simd: S, keys: &[T], index: usize) {
        let first = self.first + index * self.step;
        for line in first..first + self.step {
            simd.prefetch(keys.as_ptr().cast::<u8>().wrapping_add(line * LINE));
        }
    }
}

/// The largest lane, none of which is NaN.
#[inline(always)]
pub(super) fn largest_lane<S: Simd>(simd: S, value: S::F32) -> f32 {
    let mut lanes = simd.to_array(value);
    for half in [8, 4, 2, 1] {
        for i in 0..half {
            lanes[i] = if lanes[i] > lanes[i + half] { lanes[i] } else { lanes[i + half] };
        }
    }
    lanes[0]
}
