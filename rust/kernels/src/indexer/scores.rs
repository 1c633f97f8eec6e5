//! Scores of the keys in one page: the lanes of a vector are the tokens of the page.

// Index loops over small arrays of registers are more readable here than iterators over several arrays.
#![allow(clippy::needless_range_loop)]

use crate::arch::{Kernel, LANES, Simd};
use crate::kv::KvElement;

/// Products of one query with the keys of a page.
pub(super) struct Scores<'a, E: KvElement> {
    /// `[index_dim][token]`
    pub keys: &'a [[E::Stored; LANES]],
    /// `[index_dim]`
    pub query: &'a [f32],
}

impl<E: KvElement> Kernel for Scores<'_, E> {
    type Output = [f32; LANES];

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) -> [f32; LANES] {
        let [sum] = products::<S, E, 1>(simd, self.keys, self.query);
        simd.to_array(sum)
    }
}

/// Sums over heads of `weight * relu(query . key)` for the keys of a page.
pub(super) struct Combined<'a, E: KvElement> {
    /// `[index_dim][token]`
    pub keys: &'a [[E::Stored; LANES]],
    /// `[heads, index_dim]`
    pub queries: &'a [f32],
    /// `[heads]`
    pub weights: &'a [f32],
}

impl<E: KvElement> Kernel for Combined<'_, E> {
    type Output = [f32; LANES];

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) -> [f32; LANES] {
        let dim = self.keys.len();
        let mut score = simd.splat(0.0);
        let mut head = 0;
        while head < self.weights.len() {
            let queries = &self.queries[head * dim..];
            let weights = &self.weights[head..];
            if const { S::TILE_ROWS * S::TILE_PANELS >= 16 } && weights.len() >= 8 {
                score = combined::<S, E, 8>(simd, self.keys, queries, weights, score);
                head += 8;
            } else if weights.len() >= 4 {
                score = combined::<S, E, 4>(simd, self.keys, queries, weights, score);
                head += 4;
            } else {
                score = combined::<S, E, 1>(simd, self.keys, queries, weights, score);
                head += 1;
            }
        }
        simd.to_array(score)
    }
}

/// Adds the weighted products of the first `H` heads to `score`, head by head.
#[inline(always)]
fn combined<S: Simd, E: KvElement, const H: usize>(
    simd: S,
    keys: &[[E::Stored; LANES]],
    queries: &[f32],
    weights: &[f32],
    score: S::F32,
) -> S::F32 {
    let sums = products::<S, E, H>(simd, keys, queries);
    let mut score = score;
    for head in 0..H {
        // The product is the second operand, which is kept if it is NaN.
        let product = simd.max(simd.splat(0.0), sums[head]);
        score = simd.mul_add(simd.splat(weights[head]), product, score);
    }
    score
}

/// Returns the products of `H` queries with the keys: each is one chain over the columns.
#[inline(always)]
fn products<S: Simd, E: KvElement, const H: usize>(
    simd: S,
    keys: &[[E::Stored; LANES]],
    queries: &[f32],
) -> [S::F32; H] {
    let mut rows: [&[f32]; H] = [&[]; H];
    for head in 0..H {
        rows[head] = &queries[head * keys.len()..][..keys.len()];
    }
    let mut sums = [simd.splat(0.0); H];
    for (column, key) in keys.iter().enumerate() {
        let key = E::widen(simd, key);
        for head in 0..H {
            sums[head] = simd.mul_add(simd.splat(rows[head][column]), key, sums[head]);
        }
    }
    sums
}
