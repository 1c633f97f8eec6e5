//! RMS normalization and layer normalization of rows, and normalization of heads to unit length.
//!
//! Sums are accumulated in four vectors, which are added in a fixed order, so the result of a row depends only on its
//! width and values.

use crate::arch::{Kernel, LANES, Simd};
use crate::math::load_padded;
use crate::rows::{RowsMut, for_row_chunks, whole_rows};
use crate::{Exec, PoolError};

/// Weights of a norm.
#[derive(Debug, Clone, Copy)]
pub struct NormWeights<'a> {
    /// Factor of each normalized element, by column. `None` means 1.
    pub weight: Option<&'a [f32]>,
    /// Bias of each element, by column. `None` means 0.
    pub bias: Option<&'a [f32]>,
    /// Offset added to every weight: 1 in models that store weights around zero.
    pub weight_offset: f32,
    /// Epsilon added to the mean square or the variance.
    pub eps: f32,
}

impl<'a> NormWeights<'a> {
    /// Panics unless weight and bias have one of these lengths.
    fn check(&self, lengths: &[usize]) {
        for vector in [self.weight, self.bias].into_iter().flatten() {
            let length = vector.len();
            assert!(lengths.contains(&length), "weight and bias must have a length in {lengths:?}, got {length}");
        }
    }

    /// Returns the weights of head `head`: its own, or those shared by all heads.
    fn of_head(&self, head: usize, head_dim: usize) -> Self {
        let part =
            |vector: &'a [f32]| if vector.len() == head_dim { vector } else { &vector[head * head_dim..][..head_dim] };
        Self { weight: self.weight.map(part), bias: self.bias.map(part), ..*self }
    }
}

/// Applies RMSNorm (Zhang and Sennrich 2019) to every row of `x: [m, width]`:
/// `out = x / rms(x) * (weight + weight_offset) + bias` with `rms(x) = sqrt(mean(x^2) + eps)` and `out: [m, width]`.
///
/// # Errors
/// [`PoolError`] if the run was cancelled or a task panicked.
///
/// # Panics
/// If the shapes do not match.
pub fn rms_norm(
    exec: &Exec<'_>,
    x: &[f32],
    width: usize,
    weights: &NormWeights<'_>,
    out: &mut [f32],
) -> Result<(), PoolError> {
    norm_rows::<false>(exec, x, width, weights, out)
}

/// Applies LayerNorm (Ba et al. 2016) to every row of `x: [m, width]`:
/// `out = (x - mean(x)) / sqrt(variance(x) + eps) * (weight + weight_offset) + bias` with `out: [m, width]`.
///
/// # Errors
/// [`PoolError`] if the run was cancelled or a task panicked.
///
/// # Panics
/// If the shapes do not match.
pub fn layer_norm(
    exec: &Exec<'_>,
    x: &[f32],
    width: usize,
    weights: &NormWeights<'_>,
    out: &mut [f32],
) -> Result<(), PoolError> {
    norm_rows::<true>(exec, x, width, weights, out)
}

/// Applies [`rms_norm`] in place to each of `heads` heads of `head_dim` columns in every row of `x`. Weights and biases
/// are `[head_dim]`, shared by all heads, or `[heads, head_dim]`.
///
/// # Errors
/// [`PoolError`] if the run was cancelled or a task panicked.
///
/// # Panics
/// If the shapes do not match.
pub fn rms_norm_heads(
    exec: &Exec<'_>,
    x: RowsMut<'_>,
    heads: usize,
    head_dim: usize,
    weights: &NormWeights<'_>,
) -> Result<(), PoolError> {
    norm_heads::<false>(exec, x, heads, head_dim, weights)
}

/// Applies [`layer_norm`] in place to each head; see [`rms_norm_heads`].
///
/// # Errors
/// [`PoolError`] if the run was cancelled or a task panicked.
///
/// # Panics
/// If the shapes do not match.
pub fn layer_norm_heads(
    exec: &Exec<'_>,
    x: RowsMut<'_>,
    heads: usize,
    head_dim: usize,
    weights: &NormWeights<'_>,
) -> Result<(), PoolError> {
    norm_heads::<true>(exec, x, heads, head_dim, weights)
}

/// Divides each of `heads` heads of `head_dim` columns in every row of `x` by its Euclidean length, in place:
/// `x = x * scale / sqrt(sum(x^2) + eps)`.
///
/// # Errors
/// [`PoolError`] if the run was cancelled or a task panicked.
///
/// # Panics
/// If the columns are out of bounds.
pub fn l2_norm_heads(
    exec: &Exec<'_>,
    x: RowsMut<'_>,
    heads: usize,
    head_dim: usize,
    eps: f32,
    scale: f32,
) -> Result<(), PoolError> {
    let RowsMut { data, stride, first: column } = x;
    let width = heads * head_dim;
    assert!(column + width <= stride, "columns {column}..{} are out of bounds for rows of {stride}", column + width);
    for_row_chunks(exec, data, stride, work::<false>(width), &|_, rows| {
        for row in rows.chunks_exact_mut(stride) {
            for head in row[column..][..width].chunks_exact_mut(head_dim) {
                exec.isa.run(L2Norm { head, eps, scale });
            }
        }
    })
}

/// Normalizes every row of `x` into `out`, by LayerNorm if `CENTERED`, else by RMSNorm.
fn norm_rows<const CENTERED: bool>(
    exec: &Exec<'_>,
    x: &[f32],
    width: usize,
    weights: &NormWeights<'_>,
    out: &mut [f32],
) -> Result<(), PoolError> {
    assert_eq!(x.len(), out.len(), "x and out must have the same length");
    whole_rows(x.len(), width);
    weights.check(&[width]);
    for_row_chunks(exec, out, width, work::<CENTERED>(width), &|first, out| {
        for (out, x) in out.chunks_exact_mut(width).zip(x[first * width..].chunks_exact(width)) {
            exec.isa.run(Norm::<CENTERED> { x: Some(x), weights: *weights, out });
        }
    })
}

/// Normalizes every head of every row of `x` in place, by LayerNorm if `CENTERED`, else by RMSNorm.
fn norm_heads<const CENTERED: bool>(
    exec: &Exec<'_>,
    x: RowsMut<'_>,
    heads: usize,
    head_dim: usize,
    weights: &NormWeights<'_>,
) -> Result<(), PoolError> {
    let RowsMut { data, stride, first: column } = x;
    let width = heads * head_dim;
    assert!(column + width <= stride, "columns {column}..{} are out of bounds for rows of {stride}", column + width);
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

/// Returns the cost of a norm of `width` elements, in elements of a simple operation.
fn work<const CENTERED: bool>(width: usize) -> usize {
    if CENTERED { 2 * width } else { width }
}

/// Returns the sum of `x - center` or of its squares. Four accumulators hide the latency of additions.
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

/// Returns `1 / sqrt(mean((x - center)^2) + eps)`.
#[inline(always)]
fn inverse_deviation<S: Simd>(simd: S, x: &[f32], center: f32, eps: f32) -> f32 {
    1.0 / (sum::<S, true>(simd, x, center) / x.len() as f32 + eps).sqrt()
}

/// Kernel that normalizes one row or head.
struct Norm<'a, const CENTERED: bool> {
    /// Input; `None` to normalize `out` in place.
    x: Option<&'a [f32]>,
    weights: NormWeights<'a>,
    out: &'a mut [f32],
}

impl<const CENTERED: bool> Kernel for Norm<'_, CENTERED> {
    type Output = ();

    /// LayerNorm takes two passes, first the mean and then the variance around it, to avoid cancellation when the mean is
    /// large. The remaining loops are plain, and the compiler vectorizes them.
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

/// Kernel that divides one head by its Euclidean length.
struct L2Norm<'a> {
    head: &'a mut [f32],
    eps: f32,
    scale: f32,
}

impl Kernel for L2Norm<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let factor = self.scale / (sum::<S, true>(simd, self.head, 0.0) + self.eps).sqrt();
        for x in self.head {
            *x *= factor;
        }
    }
}
