//! Attention of a tile of rows over one block of tokens: the parts that do not depend on the KV format.

use std::ops::Range;

use super::ATTENTION_BLOCK;
use super::softmax_state::Line;
use crate::arch::{Isa, LANES, LINE, Simd};
use crate::kv::{KvStore, PAGE_TOKENS, PageId};
use crate::math::tanh;

/// Number of pages of a block.
pub(super) const BLOCK_PAGES: usize = ATTENTION_BLOCK / PAGE_TOKENS;

/// Returns the number of vector registers for accumulators, which leaves enough for operands.
pub(super) const fn registers<S: Simd>() -> usize {
    S::TILE_ROWS * S::TILE_PANELS
}

/// Returns the maximum number of rows of a tile, which leaves registers for K and V.
pub(super) const fn widest_tile<S: Simd>() -> usize {
    match registers::<S>() {
        16.. => 8,
        4.. => 4,
        _ => 2,
    }
}

/// Arithmetic of the products Q x K and probabilities x V for a KV format.
pub(super) trait Arithmetic: Sized + Send + Sync + 'static {
    /// K and V of one head in one page; the default value if there is no page.
    type Page<'a>: Copy + Default + Send + Sync;

    /// Returns one head in one page.
    fn page(store: &KvStore, layer: usize, page: PageId, head: usize) -> Self::Page<'_>;

    /// Returns the number of f32 words of a packed row of Q.
    fn query_words(key_dim: usize) -> usize;

    /// Packs `query`, a head of Q, times `scale` as row `row` of a tile of `rows` rows.
    fn pack<S: Simd>(simd: S, query: &[f32], scale: f32, row: usize, rows: usize, tile: &mut [f32]);

    /// Computes the softmax states of a block.
    fn run<const R: usize>(isa: Isa, block: TileBlock<'_, '_, Self, R>);
}

/// K and V of one head in the pages of a block. Pages that no row of the task attends to are empty.
pub(super) type BlockPages<'s, A> = [<A as Arithmetic>::Page<'s>; BLOCK_PAGES];

/// Some tokens of a block: one bit for each token of a page.
pub(super) type TokenBits = [u16; BLOCK_PAGES];

/// Quantized probabilities of a row: two int8 digits for every token, `[digit][page][token]`.
pub(super) type Digits = [[[i8; LANES]; BLOCK_PAGES]; 2];

/// Buffers for at least the rows of a tile.
pub(super) struct TileBuffers<'a> {
    /// Scores, later probabilities.
    pub(super) scores: &'a mut [[Line; BLOCK_PAGES]],
    pub(super) digits: &'a mut [Digits],
}

/// Computes the softmax states of `R` rows over one block.
pub(super) struct TileBlock<'a, 's, A: Arithmetic, const R: usize> {
    pub(super) pages: &'a BlockPages<'s, A>,
    /// Pages whose K is prefetched while `pages` are processed.
    pub(super) next: &'a BlockPages<'s, A>,
    /// Q of the tile, packed by [`Arithmetic::pack`].
    pub(super) q: &'a [f32],
    pub(super) key_dim: usize,
    pub(super) mask: BlockMask<R>,
    pub(super) softcap: Option<Softcap>,
    pub(super) bias: Option<AlibiBias<R>>,
    pub(super) value_vectors: usize,
    pub(super) buffers: TileBuffers<'a>,
    /// Output: `R` softmax states.
    pub(super) states: &'a mut [Line],
    /// Whether to prefetch: true for the first tile of a block.
    pub(super) prefetch: bool,
}

impl<A: Arithmetic, const R: usize> TileBlock<'_, '_, A, R> {
    /// Applies softcap, ALiBi bias and mask to a raw score.
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
        if let Some(Softcap { cap, factor }) = self.softcap {
            score = simd.mul(simd.splat(factor), tanh(simd, simd.div(score, simd.splat(cap))));
        }
        if let Some(bias) = &self.bias {
            score = bias.add(simd, row, page, score);
        }
        if masked {
            score = self.mask.select(simd, row, page, score, f32::NEG_INFINITY);
        }
        score
    }
}

/// Soft cap of scores. The factor is computed once for a tile: the compiler would move the product out of the branch and
/// multiply whatever the memory of an absent cap holds, and products of denormal numbers take a hundred times as long.
#[derive(Clone, Copy)]
pub(super) struct Softcap {
    cap: f32,
    /// Factor of the tanh, which includes log2(e).
    factor: f32,
}

impl Softcap {
    pub(super) fn new(cap: f32) -> Self {
        Self { cap, factor: cap * std::f32::consts::LOG2_E }
    }
}

/// ALiBi bias of the scores of a block, by the distance of its tokens from each row of a tile.
pub(super) struct AlibiBias<const R: usize> {
    /// Slope of each row's head, times log2(e).
    pub(super) slopes: [f32; R],
    /// Position of the first token of the block minus the position of each row. Slopes are multiplied by distances rather
    /// than positions, which keeps precision far from the start of a sequence.
    pub(super) starts: [f32; R],
}

impl<const R: usize> AlibiBias<R> {
    #[inline(always)]
    fn add<S: Simd>(&self, simd: S, row: usize, page: usize, score: S::F32) -> S::F32 {
        const TOKENS: [f32; PAGE_TOKENS] =
            [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0, 11.0, 12.0, 13.0, 14.0, 15.0];
        let start = self.starts[row] + (page * PAGE_TOKENS) as f32;
        let distance = simd.add(simd.splat(start), simd.load(&TOKENS));
        simd.mul_add(simd.splat(self.slopes[row]), distance, score)
    }
}

/// Attention mask of the rows of a tile over the tokens of a block.
pub(super) struct BlockMask<const R: usize> {
    /// Visible tokens of each row; 0..0 if there are none.
    rows: [Range<usize>; R],
    /// Visible tokens of each row, one bit for each token of a page, if an indexer chose them.
    chosen: Option<[TokenBits; R]>,
    /// Pages that are visible to some row.
    pub(super) pages: Range<usize>,
    /// Pages that are completely visible to every row.
    shared: Range<usize>,
}

impl<const R: usize> BlockMask<R> {
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
            chosen: None,
            pages: first_start / PAGE_TOKENS..last_end.div_ceil(PAGE_TOKENS),
            shared: last_start.div_ceil(PAGE_TOKENS)..first_end / PAGE_TOKENS,
        }
    }

    /// Creates the mask of rows that attend to chosen tokens of the first `pages` pages.
    pub(super) fn chosen(tokens: [TokenBits; R], pages: usize) -> Self {
        let rows = std::array::from_fn(|row| if tokens[row] == [0; BLOCK_PAGES] { 0..0 } else { 0..ATTENTION_BLOCK });
        Self { rows, chosen: Some(tokens), pages: 0..pages, shared: 0..0 }
    }

    /// Returns whether a row sees no token.
    #[inline(always)]
    pub(super) fn is_empty(&self, row: usize) -> bool {
        self.rows[row].is_empty()
    }

    /// Returns whether a row sees a token of a page.
    #[inline(always)]
    pub(super) fn sees(&self, row: usize, page: usize, token: usize) -> bool {
        match &self.chosen {
            Some(chosen) => chosen[row][page] >> token & 1 == 1,
            None => self.rows[row].contains(&(page * PAGE_TOKENS + token)),
        }
    }

    /// Returns whether any token of these pages is masked for some row.
    #[inline(always)]
    pub(super) fn is_partial(&self, first: usize, pages: usize) -> bool {
        first < self.shared.start || first + pages > self.shared.end
    }

    /// Replaces the lanes of masked tokens of a page by `masked`.
    #[inline(always)]
    pub(super) fn select<S: Simd>(&self, simd: S, row: usize, page: usize, tokens: S::F32, masked: f32) -> S::F32 {
        if let Some(chosen) = &self.chosen {
            return simd.select_lanes(chosen[row][page], tokens, simd.splat(masked));
        }
        let start = page * PAGE_TOKENS;
        let Range { start: from, end: to } = self.rows[row];
        simd.select_range(from.saturating_sub(start), to.saturating_sub(start), tokens, simd.splat(masked))
    }
}

/// Prefetches element `index` of a slice. The index may be out of bounds.
#[inline(always)]
pub(super) fn prefetch<S: Simd, T>(simd: S, slice: &[T], index: usize) {
    simd.prefetch(slice.as_ptr().wrapping_add(index).cast());
}

/// Prefetch of one half of the K of the next pages, in equal steps. While scores are computed, V of the current pages is
/// prefetched; of the next K, one half is prefetched during the softmax and the other with the product with V. Memory is
/// thus always busy.
#[derive(Clone, Copy)]
pub(super) struct Prefetch {
    first: usize,
    step: usize,
}

impl Prefetch {
    /// Plans the prefetch of half 0 or 1 of the K of a page in `steps` steps. Does nothing unless `enabled`.
    pub(super) fn new<T>(keys: &[T], half: usize, steps: usize, enabled: bool) -> Self {
        let lines = size_of_val(keys).div_ceil(LINE).div_ceil(2);
        Self { first: half * lines, step: if enabled { lines.div_ceil(steps) } else { 0 } }
    }

    /// Prefetches step `index`.
    #[inline(always)]
    pub(super) fn prefetch<S: Simd, T>(self, simd: S, keys: &[T], index: usize) {
        let first = self.first + index * self.step;
        for line in first..first + self.step {
            simd.prefetch(keys.as_ptr().cast::<u8>().wrapping_add(line * LINE));
        }
    }
}

/// Returns the largest lane. No lane may be NaN.
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
