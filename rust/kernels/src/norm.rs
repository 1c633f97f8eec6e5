//! Root-mean-square and layer normalization of rows.
//!
//! Sums run over four vectors of lanes in turn, which are then added in one fixed order, so that a row's result
//! depends on its width and values alone.

use crate::arch::{Kernel, LANES, Simd};
use crate::math::load_padded;
use crate::rows::{RowsMut, for_row_runs, whole_rows};
use crate::{Exec, PoolError};

/// `out = x / rms(x) * (weight + weight_offset)` for every row of `x: [m, h]`, with `weight: [h]`, `out: [m, h]` and
/// `rms(x) = sqrt(mean(x^2) + eps)`.
///
/// # Errors
/// [`PoolError`] if the run was cancelled or a task panicked.
///
/// # Panics
/// If the shapes do not fit.
pub fn rms_norm(
    exec: &Exec<'_>,
    x: &[f32],
    weight: &[f32],
    weight_offset: f32,
    eps: f32,
    out: &mut [f32],
) -> Result<(), PoolError> {
    let width = weight.len();
    assert_eq!(x.len(), out.len(), "as many inputs as outputs");
    whole_rows(x.len(), width);
    for_row_runs(exec, out, width, width, &|first, out| {
        for (out, x) in out.chunks_exact_mut(width).zip(x[first * width..].chunks_exact(width)) {
            exec.isa.run(RmsNorm { x, weight, weight_offset, eps, out });
        }
    })
}

/// [`rms_norm`] in place on each of `heads` heads of `weight.len()` columns, side by side in every row of `x`.
///
/// # Errors
/// [`PoolError`] if the run was cancelled or a task panicked.
///
/// # Panics
/// If the shapes do not fit.
pub fn rms_norm_in_place(
    exec: &Exec<'_>,
    x: RowsMut<'_>,
    heads: usize,
    weight: &[f32],
    weight_offset: f32,
    eps: f32,
) -> Result<(), PoolError> {
    let RowsMut { data, stride, first: column } = x;
    let width = heads * weight.len();
    assert!(column + width <= stride, "the heads end beyond the row");
    for_row_runs(exec, data, stride, width, &|_, rows| {
        for row in rows.chunks_exact_mut(stride) {
            for x in row[column..][..width].chunks_exact_mut(weight.len()) {
                exec.isa.run(RmsNormInPlace { x, weight, weight_offset, eps });
            }
        }
    })
}

/// `out = (x - mean(x)) / sqrt(variance(x) + eps) * weight + bias` for every row of `x: [m, h]`, with `weight: [h]`,
/// `bias: [h]` and `out: [m, h]`.
///
/// # Errors
/// [`PoolError`] if the run was cancelled or a task panicked.
///
/// # Panics
/// If the shapes do not fit.
pub fn layer_norm(
    exec: &Exec<'_>,
    x: &[f32],
    weight: &[f32],
    bias: Option<&[f32]>,
    eps: f32,
    out: &mut [f32],
) -> Result<(), PoolError> {
    let width = weight.len();
    assert_eq!(x.len(), out.len(), "as many inputs as outputs");
    assert!(bias.is_none_or(|bias| bias.len() == width), "as many biases as weights");
    whole_rows(x.len(), width);
    for_row_runs(exec, out, width, 2 * width, &|first, out| {
        for (out, x) in out.chunks_exact_mut(width).zip(x[first * width..].chunks_exact(width)) {
            exec.isa.run(LayerNorm { x, weight, bias, eps, out });
        }
    })
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

struct RmsNorm<'a> {
    x: &'a [f32],
    weight: &'a [f32],
    weight_offset: f32,
    eps: f32,
    out: &'a mut [f32],
}

impl Kernel for RmsNorm<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let scale = inverse_deviation(simd, self.x, 0.0, self.eps);
        for ((out, x), weight) in self.out.iter_mut().zip(self.x).zip(self.weight) {
            *out = x * scale * (weight + self.weight_offset);
        }
    }
}

struct RmsNormInPlace<'a> {
    x: &'a mut [f32],
    weight: &'a [f32],
    weight_offset: f32,
    eps: f32,
}

impl Kernel for RmsNormInPlace<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let scale = inverse_deviation(simd, self.x, 0.0, self.eps);
        for (x, weight) in self.x.iter_mut().zip(self.weight) {
            *x = *x * scale * (weight + self.weight_offset);
        }
    }
}

struct LayerNorm<'a> {
    x: &'a [f32],
    weight: &'a [f32],
    bias: Option<&'a [f32]>,
    eps: f32,
    out: &'a mut [f32],
}

impl Kernel for LayerNorm<'_> {
    type Output = ();

    /// Two passes: the mean first, then the variance about it, so that a large mean does not cancel the variance.
    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Self { x, weight, bias, eps, out } = self;
        let mean = sum::<S, false>(simd, x, 0.0) / x.len() as f32;
        let scale = inverse_deviation(simd, x, mean, eps);
        for ((out, x), weight) in out.iter_mut().zip(x).zip(weight) {
            *out = (x - mean) * scale * weight;
        }
        if let Some(bias) = bias {
            for (out, bias) in out.iter_mut().zip(bias) {
                *out += bias;
            }
        }
    }
}
