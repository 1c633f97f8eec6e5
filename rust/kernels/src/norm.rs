//! Root-mean-square and layer normalization of rows.
//!
//! Sums run over four vectors of lanes in turn, which are then added in one fixed order, so that a row's result
//! depends on its width and values alone.

use crate::arch::{Kernel, LANES, Simd};
use crate::math::load_padded;
use crate::rows::{RowsMut, for_row_chunks, whole_rows};
use crate::{Exec, PoolError};

/// What makes one norm differ from another of its kind.
#[derive(Debug, Clone, Copy)]
pub struct NormWeights<'a> {
    /// What each normalized element is multiplied with, by column; none means one.
    pub weight: Option<&'a [f32]>,
    /// What is then added, by column.
    pub bias: Option<&'a [f32]>,
    /// Added to every weight: 1 in models that store weights about zero.
    pub weight_offset: f32,
    /// Added to the mean square or the variance.
    pub eps: f32,
}

impl<'a> NormWeights<'a> {
    /// Refuses weights and biases of any but these lengths.
    fn check(&self, lengths: &[usize]) {
        for vector in [self.weight, self.bias].into_iter().flatten() {
            assert!(lengths.contains(&vector.len()), "{} weights or biases, not {lengths:?}", vector.len());
        }
    }

    /// The weights of head number `head`: its own, or those that all heads share.
    fn of_head(&self, head: usize, head_dim: usize) -> Self {
        let part =
            |vector: &'a [f32]| if vector.len() == head_dim { vector } else { &vector[head * head_dim..][..head_dim] };
        Self { weight: self.weight.map(part), bias: self.bias.map(part), ..*self }
    }
}

/// `out = x / rms(x) * (weight + weight_offset) + bias` for every row of `x: [m, width]`, with `out: [m, width]` and
/// `rms(x) = sqrt(mean(x^2) + eps)`; Zhang and Sennrich 2019.
///
/// # Errors
/// [`PoolError`] if the run was cancelled or a task panicked.
///
/// # Panics
/// If the shapes do not fit.
pub fn rms_norm(
    exec: &Exec<'_>,
    x: &[f32],
    width: usize,
    weights: &NormWeights<'_>,
    out: &mut [f32],
) -> Result<(), PoolError> {
    norm_rows::<false>(exec, x, width, weights, out)
}

/// `out = (x - mean(x)) / sqrt(variance(x) + eps) * (weight + weight_offset) + bias` for every row of
/// `x: [m, width]`, with `out: [m, width]`; Ba et al. 2016.
///
/// # Errors
/// [`PoolError`] if the run was cancelled or a task panicked.
///
/// # Panics
/// If the shapes do not fit.
pub fn layer_norm(
    exec: &Exec<'_>,
    x: &[f32],
    width: usize,
    weights: &NormWeights<'_>,
    out: &mut [f32],
) -> Result<(), PoolError> {
    norm_rows::<true>(exec, x, width, weights, out)
}

/// [`rms_norm`] in place on each of `heads` heads of `head_dim` columns, side by side in every row of `x`. Weights and
/// biases are `[head_dim]`, the same for all heads, or `[heads, head_dim]`.
///
/// # Errors
/// [`PoolError`] if the run was cancelled or a task panicked.
///
/// # Panics
/// If the shapes do not fit.
pub fn rms_norm_heads(
    exec: &Exec<'_>,
    x: RowsMut<'_>,
    heads: usize,
    head_dim: usize,
    weights: &NormWeights<'_>,
) -> Result<(), PoolError> {
    norm_heads::<false>(exec, x, heads, head_dim, weights)
}

/// [`layer_norm`] in place on heads, as [`rms_norm_heads`].
///
/// # Errors
/// [`PoolError`] if the run was cancelled or a task panicked.
///
/// # Panics
/// If the shapes do not fit.
pub fn layer_norm_heads(
    exec: &Exec<'_>,
    x: RowsMut<'_>,
    heads: usize,
    head_dim: usize,
    weights: &NormWeights<'_>,
) -> Result<(), PoolError> {
    norm_heads::<true>(exec, x, heads, head_dim, weights)
}

/// Every row of `x` to its row of `out`; about its mean if `CENTERED`.
fn norm_rows<const CENTERED: bool>(
    exec: &Exec<'_>,
    x: &[f32],
    width: usize,
    weights: &NormWeights<'_>,
    out: &mut [f32],
) -> Result<(), PoolError> {
    assert_eq!(x.len(), out.len(), "as many inputs as outputs");
    whole_rows(x.len(), width);
    weights.check(&[width]);
    for_row_chunks(exec, out, width, work::<CENTERED>(width), &|first, out| {
        for (out, x) in out.chunks_exact_mut(width).zip(x[first * width..].chunks_exact(width)) {
            exec.isa.run(Norm::<CENTERED> { x: Some(x), weights: *weights, out });
        }
    })
}

/// Every head of every row of `x` in place; about its mean if `CENTERED`.
fn norm_heads<const CENTERED: bool>(
    exec: &Exec<'_>,
    x: RowsMut<'_>,
    heads: usize,
    head_dim: usize,
    weights: &NormWeights<'_>,
) -> Result<(), PoolError> {
    let RowsMut { data, stride, first: column } = x;
    let width = heads * head_dim;
    assert!(column + width <= stride, "the heads end beyond the row");
    weights.check(&[head_dim, width]);
    for_row_chunks(exec, data, stride, work::<CENTERED>(width), &|_, rows| {
        for row in rows.chunks_exact_mut(stride) {
            for head in 0..heads {
                let out = &mut row[column + head * head_dim..][..head_dim];
                exec.isa.run(Norm::<CENTERED> { x: None, weights: weights.of_head(head, head_dim), out });
            }
        }
    })
}

/// What a norm of `width` elements is worth in simple ones.
fn work<const CENTERED: bool>(width: usize) -> usize {
    if CENTERED { 2 * width } else { width }
}

/// The sum of `x - center`, or of its squares: four running vectors are enough independent additions to hide their
/// latency.
#[inline(always)]
fn sum<S: Simd, const SQUARED: bool>(simd: S, x: &[f32], center: f32) -> f32 {
    let center = simd.splat(center);
    let mut sums = [simd.splat(0.0); 4];
    let mut quads = x.chunks_exact(4 * LANES);
    for quad in &mut quads {
        for (sum, chunk) in sums.iter_mut().zip(quad.as_chunks::<LANES>().0) {
            let x = simd.sub(simd.load(chunk), center);
            *sum = if SQUARED { simd.mul_add(x, x, *sum) } else { simd.add(*sum, x) };
        }
    }
    for (sum, chunk) in sums.iter_mut().zip(quads.remainder().chunks(LANES)) {
        let x = simd.sub(load_padded(simd, chunk), center);
        let x = simd.select_range(0, chunk.len(), x, simd.splat(0.0));
        *sum = if SQUARED { simd.mul_add(x, x, *sum) } else { simd.add(*sum, x) };
    }
    let [a, b, c, d] = sums;
    simd.reduce_add(simd.add(simd.add(a, b), simd.add(c, d)))
}

/// `1 / sqrt(mean((x - center)^2) + eps)`
#[inline(always)]
fn inverse_deviation<S: Simd>(simd: S, x: &[f32], center: f32, eps: f32) -> f32 {
    1.0 / (sum::<S, true>(simd, x, center) / x.len() as f32 + eps).sqrt()
}

/// One row or head.
struct Norm<'a, const CENTERED: bool> {
    /// What is normalized, unless it is `out` itself.
    x: Option<&'a [f32]>,
    weights: NormWeights<'a>,
    out: &'a mut [f32],
}

impl<const CENTERED: bool> Kernel for Norm<'_, CENTERED> {
    type Output = ();

    /// Two passes for what is centered: the mean first, then the variance about it, so that a large mean does not cancel
    /// the variance. What follows are plain loops, of which the compiler makes vectors.
    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Self { x, weights: NormWeights { weight, bias, weight_offset, eps }, out } = self;
        let from = x.unwrap_or(out);
        let center = if CENTERED { sum::<S, false>(simd, from, 0.0) / from.len() as f32 } else { 0.0 };
        let scale = inverse_deviation(simd, from, center, eps);
        let normalized = |x: f32| (x - center) * scale;
        match (x, weight) {
            (Some(x), Some(weight)) => {
                for ((out, x), weight) in out.iter_mut().zip(x).zip(weight) {
                    *out = normalized(*x) * (weight + weight_offset);
                }
            }
            (Some(x), None) => {
                for (out, x) in out.iter_mut().zip(x) {
                    *out = normalized(*x);
                }
            }
            (None, Some(weight)) => {
                for (x, weight) in out.iter_mut().zip(weight) {
                    *x = normalized(*x) * (weight + weight_offset);
                }
            }
            (None, None) => {
                for x in &mut *out {
                    *x = normalized(*x);
                }
            }
        }
        if let Some(bias) = bias {
            for (out, bias) in out.iter_mut().zip(bias) {
                *out += bias;
            }
        }
    }
}
