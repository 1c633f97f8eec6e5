//! Pages of int8 codes: both products are sums of bytes' products in i32, which are exact in any order.
//!
//! A row's Q becomes codes with one scale for each group of [`GROUP`] columns. Its probabilities are multiplied with the
//! scales of V and become codes of two digits, `first + second / 128`, with one scale for the block: 15 bits below the
//! block's largest. With 7 bits the many tokens of a long context that weigh less than a 254th of the largest would
//! vanish, and together they can be most of the sum.

// Plain counting loops over small arrays of registers: iterators over several arrays at once hide what is computed.
#![allow(clippy::needless_range_loop)]

use super::block::{Arithmetic, BLOCK_PAGES, Digits, TileBlock, prefetch, registers};
use super::record;
use crate::arch::{ByteLine, LANES, Simd};
use crate::kv::int8::{CodePage, LARGEST, QUAD, encode, inverse, key_quads, largest};
use crate::kv::{KvStore, PAGE_TOKENS, PageId};
use crate::math::{exp2, load_padded};

/// Columns of Q that share a scale. Their products' sum stays below 2^24, where every i32 is an f32.
const GROUP: usize = 256;

const GROUP_QUADS: usize = GROUP / QUAD;

const _: () = assert!(GROUP * 255 * 127 < 1 << 24);
const _: () = assert!(BLOCK_PAGES * PAGE_TOKENS * 255 * 127 < 1 << 24);

/// The second digit's steps in one of the first.
const STEPS: f32 = 128.0;

/// Quads of tokens of a page.
const PAGE_QUADS: usize = PAGE_TOKENS / QUAD;

/// Products of codes.
pub(super) struct Codes;

impl Arithmetic for Codes {
    type Page<'a> = CodePage<'a>;

    fn page(store: &KvStore, layer: usize, page: PageId, head: usize) -> CodePage<'_> {
        store.codes(layer, page, head)
    }

    fn query_words(key_dim: usize) -> usize {
        key_quads(key_dim) + 2 * key_dim.div_ceil(GROUP)
    }

    /// `[key_quads][row]` quads of codes, `[group][row]` scales, `[group][row]` sums of codes.
    #[inline(always)]
    fn pack<S: Simd>(simd: S, query: &[f32], scale: f32, row: usize, rows: usize, tile: &mut [f32]) {
        let (quads, groups) = tile.split_at_mut(key_quads(query.len()) * rows);
        let (scales, sums) = groups.split_at_mut(query.len().div_ceil(GROUP) * rows);
        let quads: &mut [[i8; QUAD]] = bytemuck::cast_slice_mut(quads);
        let sums: &mut [i32] = bytemuck::cast_slice_mut(sums);
        for (group, query) in query.chunks(GROUP).enumerate() {
            let largest = largest(simd, query) / LARGEST;
            let factor = inverse(largest);
            let mut sum = 0;
            let quads = &mut quads[group * GROUP_QUADS * rows..];
            let mut quads = quads[row..].iter_mut().step_by(rows);
            for numbers in query.chunks(LANES) {
                let count = numbers.len().div_ceil(QUAD);
                // Where Q is not finite the scale says so.
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

    #[inline(always)]
    fn run<S: Simd, const R: usize>(simd: S, mut block: Block<'_, '_, R>) {
        let max = all_scores(simd, &mut block);
        let weights = softmax(simd, &mut block, max);
        let mut vector = 0;
        while vector < block.value_vectors {
            let two = 2 * 2 <= registers::<S>() && block.value_vectors - vector >= 2;
            let mut row = 0;
            while row < R {
                // Both digits of a row have accumulators of their own.
                if two && const { 4 <= R && 4 * 2 * 2 <= registers::<S>() } {
                    values::<S, R, 4, 2>(simd, &mut block, &weights, row, vector);
                    row += 4;
                } else if two && const { 2 <= R && 2 * 2 * 2 <= registers::<S>() } {
                    values::<S, R, 2, 2>(simd, &mut block, &weights, row, vector);
                    row += 2;
                } else if !two && const { 2 <= R && 2 * 2 <= registers::<S>() } {
                    values::<S, R, 2, 1>(simd, &mut block, &weights, row, vector);
                    row += 2;
                } else if two {
                    values::<S, R, 1, 2>(simd, &mut block, &weights, row, vector);
                    row += 1;
                } else {
                    values::<S, R, 1, 1>(simd, &mut block, &weights, row, vector);
                    row += 1;
                }
                block.prefetch = false;
            }
            vector += if two { 2 } else { 1 };
        }
    }
}

type Block<'a, 's, const R: usize> = TileBlock<'a, 's, Codes, R>;

/// What the digits of a row's weights stand for.
#[derive(Clone, Copy, Default)]
struct Weights {
    /// Of the first digit.
    scale: f32,
    /// Of both digits' codes.
    sums: [i32; 2],
}

/// What a sum of products begins with to end without the bias.
#[inline(always)]
fn start<S: Simd>(simd: S, sum: i32) -> S::I32 {
    // The digits of a row that is NaN, and so their sum, may be anything.
    simd.splat_i32((-i32::from(S::WEIGHT_BIAS)).wrapping_mul(sum))
}

/// Scores of all pages that some row sees, -inf where a row does not see a token, and each row's largest by lanes.
#[inline(always)]
fn all_scores<S: Simd, const R: usize>(simd: S, block: &mut Block<'_, '_, R>) -> [S::F32; R] {
    let mut max = [simd.splat(f32::NEG_INFINITY); R];
    let mut page = block.sight.pages.start;
    while page < block.sight.pages.end {
        let left = block.sight.pages.end - page;
        if R * 4 <= registers::<S>() && left >= 4 {
            scores::<S, R, 4>(simd, block, page, &mut max);
            page += 4;
        } else if R * 2 <= registers::<S>() && left >= 2 {
            scores::<S, R, 2>(simd, block, page, &mut max);
            page += 2;
        } else {
            scores::<S, R, 1>(simd, block, page, &mut max);
            page += 1;
        }
    }
    max
}

/// Scores of `P` pages.
#[inline(always)]
fn scores<S: Simd, const R: usize, const P: usize>(
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
    let masked = block.sight.masks(first, P);
    for (group, quads) in quads.chunks(GROUP_QUADS).enumerate() {
        let mut keys: [&[ByteLine]; P] = [&[]; P];
        let mut ahead: [&[ByteLine]; P] = [&[]; P];
        for p in 0..P {
            keys[p] = &block.pages.pages[first + p].keys[group * GROUP_QUADS..][..quads.len()];
            ahead[p] = block.pages.pages[first + p].values;
        }
        let mut sums = [[simd.splat_i32(0); P]; R];
        for r in 0..R {
            sums[r] = [start(simd, query_sums[group][r]); P];
        }
        for (index, quad) in quads.iter().enumerate() {
            let mut key = [simd.splat_byte(0); P];
            for p in 0..P {
                key[p] = simd.load_bytes(&keys[p][index].0);
                if block.prefetch {
                    prefetch(simd, ahead[p], group * GROUP_QUADS + index);
                }
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
            let key_scale = simd.load_bf16(&block.pages.pages[first + p].scales[0]);
            for r in 0..R {
                let mut score = simd.mul(simd.to_f32(sums[r][p]), simd.splat(scales[group][r]));
                if group > 0 {
                    score = simd.add(simd.load(&block.room.scores[r][first + p].0), score);
                }
                if last {
                    score = block.finish_score(simd, r, first + p, masked, simd.mul(score, key_scale));
                    // The maximum second: it is kept where the score is NaN, and the score makes the sum NaN.
                    max[r] = simd.max(score, max[r]);
                }
                simd.store(score, &mut block.room.scores[r][first + p].0);
            }
        }
    }
}

/// Turns scores into digits of 2^(score - maximum) times V's scale and writes the heads of the records.
#[inline(always)]
fn softmax<S: Simd, const R: usize>(simd: S, block: &mut Block<'_, '_, R>, max: [S::F32; R]) -> [Weights; R] {
    let record_lines = 1 + block.value_vectors;
    let mut weights = [Weights::default(); R];
    for r in 0..R {
        if block.sight.rows[r].is_empty() {
            block.records[r * record_lines] = record::head(f32::NEG_INFINITY, 0.0);
            continue;
        }
        let max = simd.reduce_max(max[r]);
        let (mut sum, mut heaviest) = (simd.splat(0.0), simd.splat(0.0));
        // An attention sink would begin the sum here.
        for page in block.sight.pages.clone() {
            let line = &mut block.room.scores[r][page].0;
            let probability = exp2(simd, simd.sub(simd.load(line), simd.splat(max)));
            sum = simd.add(sum, probability);
            let mut weight = simd.mul(probability, simd.load_bf16(&block.pages.pages[page].scales[1]));
            if block.sight.masks(page, 1) {
                // Where nothing was written yet the scale may be anything.
                weight = block.sight.select(simd, r, page, weight, 0.0);
            }
            heaviest = simd.max(weight, heaviest);
            simd.store(weight, line);
        }
        block.records[r * record_lines] = record::head(max, simd.reduce_add(sum));
        let scale = simd.reduce_max(heaviest) / LARGEST;
        let sums = digits(simd, &block.room.scores[r], block.sight.pages.clone(), scale, &mut block.room.digits[r]);
        weights[r] = Weights { scale, sums };
    }
    weights
}

/// Digits of a row's weights, and their sums where a bias has to be taken off.
#[inline(always)]
fn digits<S: Simd>(
    simd: S,
    weights: &[record::Line; BLOCK_PAGES],
    pages: std::ops::Range<usize>,
    scale: f32,
    digits: &mut Digits,
) -> [i32; 2] {
    let factor = simd.splat(inverse(scale));
    let mut sums = [simd.splat_i32(0); 2];
    for page in pages {
        let weight = simd.mul(simd.load(&weights[page].0), factor);
        let first = simd.to_i32(weight);
        let rest = simd.sub(weight, simd.to_f32(first));
        let second = simd.to_i32(simd.mul(rest, simd.splat(STEPS)));
        for (index, digit) in [first, second].into_iter().enumerate() {
            simd.store_i8(digit, &mut digits[index][page]);
            if S::WEIGHT_BIAS > 0 {
                sums[index] = simd.add_i32(sums[index], digit);
            }
        }
    }
    sums.map(|sum| {
        let mut lanes = [0; LANES];
        simd.store_i32(sum, &mut lanes);
        lanes.into_iter().fold(0, i32::wrapping_add)
    })
}

/// `C` vectors of output columns from `first` on of `N` rows from `row` on.
#[inline(always)]
fn values<S: Simd, const R: usize, const N: usize, const C: usize>(
    simd: S,
    block: &mut Block<'_, '_, R>,
    weights: &[Weights; R],
    row: usize,
    first: usize,
) {
    let mut sums = [[[simd.splat_i32(0); C]; 2]; N];
    for n in 0..N {
        for digit in 0..2 {
            sums[n][digit] = [start(simd, weights[row + n].sums[digit]); C];
        }
    }
    let rows: &[Digits; N] = block.room.digits[row..].first_chunk().expect("digits of every row");
    for page in block.sight.pages.clone() {
        let next = &block.pages.next[page];
        let ahead = if block.prefetch { next.keys.len().div_ceil(PAGE_QUADS) } else { 0 };
        prefetch(simd, next.scales, 0);
        let lines = block.pages.pages[page].values.chunks_exact(block.value_vectors);
        for (quad, lines) in lines.enumerate().take(PAGE_QUADS) {
            for index in 0..ahead {
                prefetch(simd, next.keys, quad * ahead + index);
            }
            let Some((lines, _)) = lines[first..].split_first_chunk::<C>() else { break };
            for n in 0..N {
                for digit in 0..2 {
                    let weight = simd.splat_quad(rows[n][digit][page].as_chunks().0[quad]);
                    for c in 0..C {
                        let value = simd.load_bytes(&lines[c].0);
                        sums[n][digit][c] = simd.dot(sums[n][digit][c], value, weight);
                    }
                }
            }
        }
    }
    let record_lines = 1 + block.value_vectors;
    for n in 0..N {
        let scale = weights[row + n].scale;
        for c in 0..C {
            let second = simd.mul(simd.to_f32(sums[n][1][c]), simd.splat(scale / STEPS));
            let sum = simd.mul_add(simd.to_f32(sums[n][0][c]), simd.splat(scale), second);
            simd.store(sum, &mut block.records[(row + n) * record_lines + 1 + first + c].0);
        }
    }
}
