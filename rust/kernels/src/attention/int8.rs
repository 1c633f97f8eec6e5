//! Attention over int8 pages: both products are i32 sums of byte products, which are exact in any order.
//!
//! Q of a row is quantized with one scale for each group of [`GROUP`] columns. Probabilities are multiplied by the scales
//! of V and quantized as two digits, `first + second / 127`, with one scale for the block: 14 bits relative to the
//! largest in the block. With 7 bits, tokens with less than 1/254 of the largest weight would be lost; in a long context
//! they can make up most of the sum. Both digits are in 0..=127, so they need no bias.

// Index loops over small arrays of registers are more readable here than iterators over several arrays.
#![allow(clippy::needless_range_loop)]

use super::block::{
    Arithmetic, BLOCK_PAGES, Digits, Prefetch, TileBlock, largest_lane, prefetch, registers, widest_tile,
};
use super::softmax_state;
use crate::arch::{ByteLine, Dot, DotKernel, Isa, LANES, Simd};
use crate::kv::int8::{CodePage, MAX_CODE, QUAD, encode, inverse, key_quads, largest};
use crate::kv::{KvStore, PAGE_TOKENS, PageId};
use crate::math::{exp2, load_padded};

/// Number of columns of Q that share a scale. The sum of their products stays below 2^24, so it is exact in f32.
const GROUP: usize = 256;

/// Number of quads of columns in a group.
const GROUP_QUADS: usize = GROUP / QUAD;

const _: () = assert!(GROUP * 255 * 127 < 1 << 24);
const _: () = assert!(BLOCK_PAGES * PAGE_TOKENS * 127 * 127 < 1 << 24);

/// Weight of the first digit relative to the second.
const DIGIT_BASE: f32 = 127.0;

/// Offset subtracted before rounding to nearest, which makes the first digit a floor. It is just under 1/2, so that the
/// remainder is in -1/512 ..= 511/512 and the second digit in 0..=127, never -1.
const ROUND_DOWN: f32 = 0.5 - 1.0 / 512.0;

/// Number of quads of tokens in a page.
const PAGE_QUADS: usize = PAGE_TOKENS / QUAD;

/// Arithmetic of int8 pages.
pub(super) struct Int8;

impl Arithmetic for Int8 {
    type Page<'a> = CodePage<'a>;

    fn page(store: &KvStore, layer: usize, page: PageId, head: usize) -> CodePage<'_> {
        store.codes(layer, page, head)
    }

    fn query_words(key_dim: usize) -> usize {
        key_quads(key_dim) + 2 * key_dim.div_ceil(GROUP)
    }

    /// Packs Q as `[key_quads][row]` quads of codes, `[group][row]` scales, `[group][row]` sums of codes.
    #[inline(always)]
    fn pack<S: Simd>(simd: S, query: &[f32], scale: f32, row: usize, rows: usize, tile: &mut [f32]) {
        let (quads, groups) = tile.split_at_mut(key_quads(query.len()) * rows);
        let (scales, sums) = groups.split_at_mut(query.len().div_ceil(GROUP) * rows);
        let quads: &mut [[i8; QUAD]] = bytemuck::cast_slice_mut(quads);
        let sums: &mut [i32] = bytemuck::cast_slice_mut(sums);
        for (group, query) in query.chunks(GROUP).enumerate() {
            let largest = largest(simd, query) / MAX_CODE;
            let factor = inverse(largest);
            let mut sum = 0;
            let quads = &mut quads[group * GROUP_QUADS * rows..];
            let mut quads = quads[row..].iter_mut().step_by(rows);
            for numbers in query.chunks(LANES) {
                let count = numbers.len().div_ceil(QUAD);
                // If Q is not finite, the scale is NaN or infinite and the codes do not matter.
                let codes =
                    if largest.is_finite() { encode(simd, load_padded(simd, numbers), factor) } else { [0; LANES] };
                for (quad, to) in codes.as_chunks::<QUAD>().0[..count].iter().zip(&mut quads) {
                    *to = *quad;
                    sum += quad.iter().map(|code| i32::from(*code)).sum::<i32>();
                }
            }
            scales[group * rows + row] = largest * scale;
            sums[group * rows + row] = sum;
        }
    }

    fn run<const R: usize>(isa: Isa, block: Block<'_, '_, R>) {
        isa.run_dot(block);
    }
}

type Block<'a, 's, const R: usize> = TileBlock<'a, 's, Int8, R>;

impl<const R: usize> DotKernel for Block<'_, '_, R> {
    type Output = ();

    #[inline(always)]
    fn run<S: Dot>(mut self, simd: S) {
        // No code is generated for tile sizes that an instruction set does not use.
        if const { R > widest_tile::<S>() } {
            unreachable!("a tile of {R} rows");
        }
        let max = all_scores(simd, &mut self);
        let scales = softmax(simd, &mut self, max);
        let mut vector = 0;
        while vector < self.value_vectors {
            let two = const { 2 * 2 <= registers::<S>() } && self.value_vectors - vector >= 2;
            let mut row = 0;
            while row < R {
                // Each digit of a row needs its own accumulators.
                if two && const { 4 <= R && 4 * 2 * 2 <= registers::<S>() } {
                    values::<S, R, 4, 2>(simd, &mut self, &scales, row, vector);
                    row += 4;
                } else if two && const { 2 <= R && 2 * 2 * 2 <= registers::<S>() } {
                    values::<S, R, 2, 2>(simd, &mut self, &scales, row, vector);
                    row += 2;
                } else if !two && const { 2 <= R && 2 * 2 <= registers::<S>() } {
                    values::<S, R, 2, 1>(simd, &mut self, &scales, row, vector);
                    row += 2;
                } else if two {
                    values::<S, R, 1, 2>(simd, &mut self, &scales, row, vector);
                    row += 1;
                } else {
                    values::<S, R, 1, 1>(simd, &mut self, &scales, row, vector);
                    row += 1;
                }
                self.prefetch = false;
            }
            vector += if two { 2 } else { 1 };
        }
    }
}

/// Computes the scores of all visible pages, with -inf for masked tokens, and returns the lane-wise maximum of each row.
#[inline(always)]
fn all_scores<S: Dot, const R: usize>(simd: S, block: &mut Block<'_, '_, R>) -> [S::F32; R] {
    let mut max = [simd.splat(f32::NEG_INFINITY); R];
    let mut page = block.mask.pages.start;
    while page < block.mask.pages.end {
        let left = block.mask.pages.end - page;
        if const { R * 4 <= registers::<S>() } && left >= 4 {
            scores::<S, R, 4>(simd, block, page, &mut max);
            page += 4;
        } else if const { R * 2 <= registers::<S>() } && left >= 2 {
            scores::<S, R, 2>(simd, block, page, &mut max);
            page += 2;
        } else {
            scores::<S, R, 1>(simd, block, page, &mut max);
            page += 1;
        }
    }
    max
}

/// Computes the scores of `P` pages.
#[inline(always)]
fn scores<S: Dot, const R: usize, const P: usize>(
    simd: S,
    block: &mut Block<'_, '_, R>,
    first: usize,
    max: &mut [S::F32; R],
) {
    let (quads, groups) = block.q.split_at(key_quads(block.key_dim) * R);
    let (scales, query_sums) = groups.split_at(groups.len() / 2);
    let quads: &[[[i8; QUAD]; R]] = bytemuck::cast_slice(quads).as_chunks().0;
    let scales: &[[f32; R]] = scales.as_chunks().0;
    let query_sums: &[[i32; R]] = bytemuck::cast_slice(query_sums).as_chunks().0;
    let masked = block.mask.is_partial(first, P);
    for (group, quads) in quads.chunks(GROUP_QUADS).enumerate() {
        let mut keys: [&[ByteLine]; P] = [&[]; P];
        let mut ahead: [&[ByteLine]; P] = [&[]; P];
        for p in 0..P {
            keys[p] = &block.pages[first + p].keys[group * GROUP_QUADS..][..quads.len()];
            ahead[p] = block.pages[first + p].values;
        }
        let mut sums = [[simd.splat_i32(0); P]; R];
        for r in 0..R {
            sums[r] = [simd.splat_i32(-i32::from(S::WEIGHT_BIAS) * query_sums[group][r]); P];
        }
        for (index, quad) in quads.iter().enumerate() {
            let mut key = [simd.splat_byte(0); P];
            for p in 0..P {
                key[p] = simd.load_bytes(&keys[p][index].0);
                prefetch(simd, ahead[p], group * GROUP_QUADS + index);
            }
            for r in 0..R {
                let query = simd.splat_quad(quad[r]);
                for p in 0..P {
                    sums[r][p] = simd.dot(sums[r][p], key[p], query);
                }
            }
        }
        let last = group + 1 == scales.len();
        for p in 0..P {
            let key_scale = simd.load_bf16(&block.pages[first + p].scales[0]);
            for r in 0..R {
                let mut score = simd.mul(simd.to_f32(sums[r][p]), simd.splat(scales[group][r]));
                if group > 0 {
                    score = simd.add(simd.load(&block.buffers.scores[r][first + p].0), score);
                }
                if last {
                    score = block.finish_score(simd, r, first + p, masked, simd.mul(score, key_scale));
                    // The maximum is the second operand, which is kept if the score is NaN. The NaN score makes the sum
                    // NaN.
                    max[r] = simd.max(score, max[r]);
                }
                simd.store(score, &mut block.buffers.scores[r][first + p].0);
            }
        }
    }
}

/// Quantizes 2^(score - maximum) times the scale of V into digits and writes the headers of the states. Returns the scale
/// of the first digit for each row.
#[inline(always)]
fn softmax<S: Simd, const R: usize>(simd: S, block: &mut Block<'_, '_, R>, max: [S::F32; R]) -> [f32; R] {
    let state_lines = 1 + block.value_vectors;
    let mut scales = [0.0; R];
    for r in 0..R {
        if block.mask.is_empty(r) {
            block.states[r * state_lines] = softmax_state::header(f32::NEG_INFINITY, 0.0);
            continue;
        }
        let max = simd.splat(largest_lane(simd, max[r]));
        let (mut sum, mut heaviest) = (simd.splat(0.0), simd.splat(0.0));
        for page in block.mask.pages.clone() {
            let next = &block.next[page];
            prefetch(simd, next.scales, 0);
            Prefetch::new(next.keys, 0, R, block.prefetch).prefetch(simd, next.keys, r);
            let line = &mut block.buffers.scores[r][page].0;
            let probability = exp2(simd, simd.sub(simd.load(line), max));
            sum = simd.add(sum, probability);
            let mut weight = simd.mul(probability, simd.load_bf16(&block.pages[page].scales[1]));
            if block.mask.is_partial(page, 1) {
                // The scale of an unwritten slot is unspecified.
                weight = block.mask.select(simd, r, page, weight, 0.0);
            }
            heaviest = simd.max(weight, heaviest);
            simd.store(weight, line);
        }
        block.states[r * state_lines] = softmax_state::header(simd.to_array(max)[0], simd.reduce_add(sum));
        scales[r] = largest_lane(simd, heaviest) / MAX_CODE;
        let factor = simd.splat(inverse(scales[r]));
        let digits = &mut block.buffers.digits[r];
        for page in block.mask.pages.clone() {
            let weight = simd.mul(simd.load(&block.buffers.scores[r][page].0), factor);
            let first = simd.to_i32(simd.sub(weight, simd.splat(ROUND_DOWN)));
            simd.store_i8(first, &mut digits[0][page]);
            let rest = simd.sub(weight, simd.to_f32(first));
            simd.store_i8(simd.to_i32(simd.mul(rest, simd.splat(DIGIT_BASE))), &mut digits[1][page]);
        }
    }
    scales
}

/// Computes `C` vectors of output columns from `first` on, for `N` rows from `row` on.
#[inline(always)]
fn values<S: Dot, const R: usize, const N: usize, const C: usize>(
    simd: S,
    block: &mut Block<'_, '_, R>,
    scales: &[f32; R],
    row: usize,
    first: usize,
) {
    let mut sums = [[[simd.splat_i32(0); C]; 2]; N];
    let rows: &[Digits; N] = block.buffers.digits[row..].first_chunk().expect("digits of every row");
    for page in block.mask.pages.clone() {
        let next = block.next[page].keys;
        let ahead = Prefetch::new(next, 1, PAGE_QUADS, block.prefetch);
        let lines = &block.pages[page].values[first..];
        for quad in 0..PAGE_QUADS {
            ahead.prefetch(simd, next, quad);
            let lines: &[ByteLine; C] = lines[quad * block.value_vectors..].first_chunk().expect("whole lines");
            for n in 0..N {
                for digit in 0..2 {
                    let weight = simd.splat_quad(rows[n][digit][page].as_chunks().0[quad]);
                    for c in 0..C {
                        let value = simd.load_bytes(&lines[c].0);
                        sums[n][digit][c] = simd.dot(sums[n][digit][c], weight, value);
                    }
                }
            }
        }
    }
    let state_lines = 1 + block.value_vectors;
    for n in 0..N {
        let scale = scales[row + n];
        for c in 0..C {
            let second = simd.mul(simd.to_f32(sums[n][1][c]), simd.splat(scale / DIGIT_BASE));
            let sum = simd.mul_add(simd.to_f32(sums[n][0][c]), simd.splat(scale), second);
            simd.store(sum, &mut block.states[(row + n) * state_lines + 1 + first + c].0);
        }
    }
}
