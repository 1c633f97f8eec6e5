//! The matrix of a head of linear attention, and the passes over it.

// Index loops over small arrays of registers are more readable here than iterators over several arrays.
#![allow(clippy::needless_range_loop)]

use std::ops::RangeInclusive;

use super::load_vectors;
use crate::arch::{LANES, Simd};

/// Scales of a state. Elements are divided by the scale, and 2^64 leaves room for elements and for sums of them.
const SCALES: RangeInclusive<f32> = 1.0 / (1u128 << 64) as f32..=(1u128 << 64) as f32;

/// Inputs of one row for one part.
#[derive(Clone, Copy)]
pub struct Token<'a> {
    pub q: &'a [f32],
    pub k: &'a [f32],
    pub v: &'a [f32],
    /// One factor, or one for each row of the state.
    pub decay: &'a [f32],
    /// Factor of the update.
    pub factor: f32,
}

impl<'a> Token<'a> {
    /// Returns the update by the rule [`UpdateRule::Add`](super::UpdateRule::Add), divided by the scale of the state.
    #[inline(always)]
    pub fn added<S: Simd, const P: usize>(&self, simd: S, scale: Scale) -> [S::F32; P] {
        scaled(simd, Scale(self.factor / scale.0), load_vectors(simd, self.v))
    }

    /// Returns the factors that elements of the state are multiplied by before the token: one, or one for each row.
    #[inline(always)]
    pub fn factors<'f, const KEYS: bool>(&self, factor: &'f Option<f32>) -> &'f [f32]
    where
        'a: 'f,
    {
        if KEYS { self.decay } else { factor.as_ref().map_or(&[1.0], std::slice::from_ref) }
    }
}

/// Factor of all elements of a state. Its updates are divided by it.
#[derive(Clone, Copy)]
pub struct Scale(pub f32);

impl Scale {
    /// Returns the elements of a part of a state, and the scale before them. The state before the first token is zeros.
    #[inline(always)]
    pub fn split<const P: usize>(state: &[f32]) -> (&[[[f32; LANES]; P]], Self) {
        let (scale, elements) = state.split_at(LANES);
        (elements.as_chunks::<LANES>().0.as_chunks::<P>().0, Self(if scale[0] == 0.0 { 1.0 } else { scale[0] }))
    }

    /// Returns the elements of a part of a state, to be written, and the place of its scale.
    #[inline(always)]
    pub fn split_mut<const P: usize>(state: &mut [f32]) -> (&mut [[[f32; LANES]; P]], &mut [f32]) {
        let (scale, elements) = state.split_at_mut(LANES);
        (elements.as_chunks_mut::<LANES>().0.as_chunks_mut::<P>().0, scale)
    }

    /// Multiplies the scale by the decay of a token. Returns the factor that elements must be multiplied by before the
    /// token, if the scale would leave its range. Factors of each key are not part of the scale.
    #[inline(always)]
    pub fn decay<const KEYS: bool>(&mut self, token: &Token<'_>) -> Option<f32> {
        if KEYS {
            return None;
        }
        let scale = self.0 * token.decay[0];
        let fits = SCALES.contains(&scale);
        self.0 = if fits { scale } else { 1.0 };
        (!fits).then_some(scale)
    }
}

/// Multiplies vectors by a scale.
#[inline(always)]
pub fn scaled<S: Simd, const P: usize>(simd: S, scale: Scale, mut vectors: [S::F32; P]) -> [S::F32; P] {
    for vector in &mut vectors {
        *vector = simd.mul(simd.splat(scale.0), *vector);
    }
    vectors
}

/// Multiplies the state by `factor` if it is `SCALED`, then decays it and adds the update `k u^T` for each of T tokens.
/// Returns the product of the state after each token with the query of the token.
#[inline(always)]
pub fn decay_and_add<S: Simd, const P: usize, const KEYS: bool, const SCALED: bool, const T: usize>(
    simd: S,
    state: &mut [[[f32; LANES]; P]],
    factor: f32,
    tokens: &[Token<'_>; T],
    u: &[[S::F32; P]; T],
) -> [[S::F32; P]; T] {
    let mut sums = [[simd.splat(0.0); P]; T];
    let factor = simd.splat(factor);
    let rows = state.len();
    let (mut keys, mut queries) = ([tokens[0].k; T], [tokens[0].q; T]);
    for t in 0..T {
        (keys[t], queries[t]) = (&tokens[t].k[..rows], &tokens[t].q[..rows]);
    }
    for (i, s) in state.iter_mut().enumerate() {
        let mut values = simd.load_vectors(s);
        if SCALED {
            for p in 0..P {
                values[p] = simd.mul(factor, values[p]);
            }
        }
        for t in 0..T {
            let (k, q) = (simd.splat(keys[t][i]), simd.splat(queries[t][i]));
            for p in 0..P {
                if KEYS {
                    values[p] = simd.mul(simd.splat(tokens[t].decay[i]), values[p]);
                }
                values[p] = simd.mul_add(k, u[t][p], values[p]);
                sums[t][p] = simd.mul_add(q, values[p], sums[t][p]);
            }
        }
        for p in 0..P {
            simd.store(values[p], &mut s[p]);
        }
    }
    sums
}

/// Decays an `old` state and adds the update `k u^T`, into a `new` one. Returns the product of the new state with the query
/// of `token`. A state that is `complete` is written past the caches: the next step reads it after all weights.
#[inline(always)]
pub fn decay_and_add_to<S: Simd, const P: usize, const KEYS: bool>(
    simd: S,
    old: &[[[f32; LANES]; P]],
    new: &mut [[[f32; LANES]; P]],
    token: &Token<'_>,
    factors: &[f32],
    u: [S::F32; P],
    complete: bool,
) -> [S::F32; P] {
    let mut sums = [simd.splat(0.0); P];
    let same = simd.splat(factors[0]);
    for (i, (((old, new), k), q)) in old.iter().zip(new).zip(token.k).zip(token.q).enumerate() {
        let factor = if KEYS { simd.splat(factors[i]) } else { same };
        let (k, q) = (simd.splat(*k), simd.splat(*q));
        for p in 0..P {
            let value = simd.mul_add(k, u[p], simd.mul(factor, simd.load(&old[p])));
            if complete {
                simd.store_nontemporal(value, &mut new[p]);
            } else {
                simd.store(value, &mut new[p]);
            }
            sums[p] = simd.mul_add(q, value, sums[p]);
        }
    }
    simd.fence();
    sums
}

/// Returns the products of the decayed state with the key and with the query of `token`.
#[inline(always)]
pub fn decay_and_read<S: Simd, const P: usize, const KEYS: bool>(
    simd: S,
    state: &[[[f32; LANES]; P]],
    token: &Token<'_>,
    factors: &[f32],
) -> [[S::F32; P]; 2] {
    let mut products = [[simd.splat(0.0); P]; 2];
    let same = simd.splat(factors[0]);
    for (i, ((s, k), q)) in state.iter().zip(token.k).zip(token.q).enumerate() {
        let factor = if KEYS { simd.splat(factors[i]) } else { same };
        let (k, q) = (simd.splat(*k), simd.splat(*q));
        for p in 0..P {
            let value = simd.mul(factor, simd.load(&s[p]));
            products[0][p] = simd.mul_add(k, value, products[0][p]);
            products[1][p] = simd.mul_add(q, value, products[1][p]);
        }
    }
    products
}

/// Adds the update `k u^T` to the state if it is `PENDING`, then decays the state if it is `SCALED`. Returns the products
/// of the state with the key and with the query of `token`.
#[inline(always)]
pub fn add_decay_and_read<S: Simd, const P: usize, const KEYS: bool, const SCALED: bool, const PENDING: bool>(
    simd: S,
    state: &mut [[[f32; LANES]; P]],
    token: &Token<'_>,
    factors: &[f32],
    (k, u): (&[f32], [S::F32; P]),
) -> [[S::F32; P]; 2] {
    let mut products = [[simd.splat(0.0); P]; 2];
    let same = simd.splat(factors[0]);
    for (i, (((s, k), next_k), next_q)) in state.iter_mut().zip(k).zip(token.k).zip(token.q).enumerate() {
        let factor = if KEYS { simd.splat(factors[i]) } else { same };
        let (k, next_k, next_q) = (simd.splat(*k), simd.splat(*next_k), simd.splat(*next_q));
        for p in 0..P {
            let mut value = simd.load(&s[p]);
            if PENDING {
                value = simd.mul_add(k, u[p], value);
            }
            if SCALED {
                value = simd.mul(factor, value);
            }
            simd.store(value, &mut s[p]);
            products[0][p] = simd.mul_add(next_k, value, products[0][p]);
            products[1][p] = simd.mul_add(next_q, value, products[1][p]);
        }
    }
    products
}

/// Returns the dot product of two vectors, summed in two chains of vectors.
#[inline(always)]
pub fn dot<S: Simd>(simd: S, a: &[f32], b: &[f32]) -> f32 {
    let [mut even, mut odd] = [simd.splat(0.0); 2];
    let (a, b) = (a.chunks(2 * LANES), b.chunks(2 * LANES));
    for (a, b) in a.zip(b) {
        let ([a, a_odd], [b, b_odd]) = (load_vectors::<S, 2>(simd, a), load_vectors::<S, 2>(simd, b));
        even = simd.mul_add(a, b, even);
        odd = simd.mul_add(a_odd, b_odd, odd);
    }
    simd.reduce_add(simd.add(even, odd))
}
