//! Attention over floating-point pages: both products are chains of multiply-adds with all accumulators in registers.

// Index loops over small arrays of registers are more readable here than iterators over several arrays.
#![allow(clippy::needless_range_loop)]

use std::marker::PhantomData;

use super::block::{Arithmetic, Prefetch, TileBlock, largest_lane, prefetch, registers, widest_tile};
use super::softmax_state;
use crate::arch::{Isa, Kernel, LANES, Simd};
use crate::kv::{KvElement, KvStore, PAGE_TOKENS, PageId};
use crate::math::exp2;

/// Arithmetic of pages stored as `E`, computed in f32.
pub(super) struct Float<E>(PhantomData<E>);

/// K and V of one head in one page.
pub(super) struct FloatPage<'a, E: KvElement> {
    /// K, `[key_dim][token]`.
    keys: &'a [[E::Stored; LANES]],
    /// V, `[token][value_vectors]`.
    values: &'a [[E::Stored; LANES]],
}

impl<E: KvElement> Clone for FloatPage<'_, E> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<E: KvElement> Copy for FloatPage<'_, E> {}

impl<E: KvElement> Default for FloatPage<'_, E> {
    fn default() -> Self {
        Self { keys: &[], values: &[] }
    }
}

impl<E: KvElement> Arithmetic for Float<E> {
    type Page<'a> = FloatPage<'a, E>;

    fn page(store: &KvStore, layer: usize, page: PageId, head: usize) -> FloatPage<'_, E> {
        FloatPage { keys: store.keys::<E>(layer, page, head), values: store.values::<E>(layer, page, head) }
    }

    fn query_words(key_dim: usize) -> usize {
        key_dim
    }

    /// Packs Q as `[key_dim][row]`.
    #[inline(always)]
    fn pack<S: Simd>(_: S, query: &[f32], scale: f32, row: usize, rows: usize, tile: &mut [f32]) {
        for (to, value) in tile[row..].iter_mut().step_by(rows).zip(query) {
            *to = value * scale;
        }
    }

    fn run<const R: usize>(isa: Isa, block: Block<'_, '_, E, R>) {
        isa.run(block);
    }
}

type Block<'a, 's, E, const R: usize> = TileBlock<'a, 's, Float<E>, R>;

impl<E: KvElement, const R: usize> Kernel for Block<'_, '_, E, R> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, simd: S) {
        // No code is generated for tile sizes that an instruction set does not use.
        if const { R > widest_tile::<S>() } {
            unreachable!("a tile of {R} rows");
        }
        let max = all_scores(simd, &mut self);
        softmax(simd, &mut self, max);
        let mut vector = 0;
        while vector < self.value_vectors {
            let left = self.value_vectors - vector;
            if const { R * 8 <= registers::<S>() } && left >= 8 {
                values::<S, E, R, 8>(simd, &mut self, vector);
                vector += 8;
            } else if const { R * 4 <= registers::<S>() } && left >= 4 {
                values::<S, E, R, 4>(simd, &mut self, vector);
                vector += 4;
            } else if const { R * 2 <= registers::<S>() } && left >= 2 {
                values::<S, E, R, 2>(simd, &mut self, vector);
                vector += 2;
            } else {
                values::<S, E, R, 1>(simd, &mut self, vector);
                vector += 1;
            }
            self.prefetch = false;
        }
    }
}

/// Computes the scores of all visible pages, with -inf for masked tokens, and returns the lane-wise maximum of each row.
#[inline(always)]
fn all_scores<S: Simd, E: KvElement, const R: usize>(simd: S, block: &mut Block<'_, '_, E, R>) -> [S::F32; R] {
    let mut max = [simd.splat(f32::NEG_INFINITY); R];
    let mut page = block.mask.pages.start;
    while page < block.mask.pages.end {
        let left = block.mask.pages.end - page;
        if const { R * 4 <= registers::<S>() } && left >= 4 {
            scores::<S, E, R, 4>(simd, block, page, &mut max);
            page += 4;
        } else if const { R * 2 <= registers::<S>() } && left >= 2 {
            scores::<S, E, R, 2>(simd, block, page, &mut max);
            page += 2;
        } else {
            scores::<S, E, R, 1>(simd, block, page, &mut max);
            page += 1;
        }
    }
    max
}

/// Computes the scores of `P` pages.
#[inline(always)]
fn scores<S: Simd, E: KvElement, const R: usize, const P: usize>(
    simd: S,
    block: &mut Block<'_, '_, E, R>,
    first: usize,
    max: &mut [S::F32; R],
) {
    let mut keys: [&[[E::Stored; LANES]]; P] = [&[]; P];
    let mut ahead: [&[[E::Stored; LANES]]; P] = [&[]; P];
    for p in 0..P {
        keys[p] = &block.pages[first + p].keys[..block.key_dim];
        ahead[p] = block.pages[first + p].values;
    }
    let mut sums = [[simd.splat(0.0); P]; R];
    let rows: &[[f32; R]] = block.q.as_chunks().0;
    for (column, q) in rows.iter().enumerate() {
        let mut key = [simd.splat(0.0); P];
        for p in 0..P {
            key[p] = E::widen(simd, &keys[p][column]);
            prefetch(simd, ahead[p], column);
        }
        for r in 0..R {
            let q = simd.splat(q[r]);
            for p in 0..P {
                sums[r][p] = simd.mul_add(q, key[p], sums[r][p]);
            }
        }
    }
    let masked = block.mask.is_partial(first, P);
    for r in 0..R {
        for p in 0..P {
            let score = block.finish_score(simd, r, first + p, masked, sums[r][p]);
            // The maximum is the second operand, which is kept if the score is NaN. The NaN score makes the sum NaN.
            max[r] = simd.max(score, max[r]);
            simd.store(score, &mut block.buffers.scores[r][first + p].0);
        }
    }
}

/// Replaces scores by 2^(score - maximum) and writes the headers of the states.
#[inline(always)]
fn softmax<S: Simd, E: KvElement, const R: usize>(simd: S, block: &mut Block<'_, '_, E, R>, max: [S::F32; R]) {
    let state_lines = 1 + block.value_vectors;
    for r in 0..R {
        if block.mask.is_empty(r) {
            block.states[r * state_lines] = softmax_state::header(f32::NEG_INFINITY, 0.0);
            continue;
        }
        let max = simd.splat(largest_lane(simd, max[r]));
        let mut sum = simd.splat(0.0);
        for page in block.mask.pages.clone() {
            let next = block.next[page].keys;
            Prefetch::new(next, 0, R, block.prefetch).prefetch(simd, next, r);
            let line = &mut block.buffers.scores[r][page].0;
            let probability = exp2(simd, simd.sub(simd.load(line), max));
            sum = simd.add(sum, probability);
            simd.store(probability, line);
        }
        block.states[r * state_lines] = softmax_state::header(simd.to_array(max)[0], simd.reduce_add(sum));
    }
}

/// Computes `C` vectors of output columns from `first` on. Every row sums its tokens in order.
#[inline(always)]
fn values<S: Simd, E: KvElement, const R: usize, const C: usize>(
    simd: S,
    block: &mut Block<'_, '_, E, R>,
    first: usize,
) {
    let mut sums = [[simd.splat(0.0); C]; R];
    for page in block.mask.pages.clone() {
        let tokens = block.pages[page].values.chunks_exact(block.value_vectors);
        let next = block.next[page].keys;
        let ahead = Prefetch::new(next, 1, PAGE_TOKENS, block.prefetch);
        let masked = block.mask.is_partial(page, 1);
        for (token, values) in tokens.enumerate().take(PAGE_TOKENS) {
            ahead.prefetch(simd, next, token);
            let Some((values, _)) = values[first..].split_first_chunk::<C>() else { break };
            let mut value = [simd.splat(0.0); C];
            for c in 0..C {
                value[c] = E::widen(simd, &values[c]);
            }
            for r in 0..R {
                // Masked tokens are skipped rather than multiplied by 0, because they may be infinite or NaN.
                if masked && !block.mask.sees(r, page, token) {
                    continue;
                }
                let probability = simd.splat(block.buffers.scores[r][page].0[token]);
                for c in 0..C {
                    sums[r][c] = simd.mul_add(probability, value[c], sums[r][c]);
                }
            }
        }
    }
    let state_lines = 1 + block.value_vectors;
    for r in 0..R {
        for c in 0..C {
            simd.store(sums[r][c], &mut block.states[r * state_lines + 1 + first + c].0);
        }
    }
}
