//! Elementwise operations: sums, bias, scaling, softcap and clipping.

use crate::arch::{Kernel, Simd};
use crate::math::{InPlace, Lanewise, clamp, tanh};
use crate::rows::{RowsMut, for_row_chunks, whole_rows};
use crate::{Exec, PoolError};

/// Computes `x += y` elementwise.
///
/// # Errors
/// [`PoolError`] if the run was cancelled or a task panicked.
///
/// # Panics
/// If the lengths differ.
pub fn add(exec: &Exec<'_>, x: &mut [f32], y: &[f32]) -> Result<(), PoolError> {
    assert_eq!(x.len(), y.len(), "summands must have the same length");
    for_row_chunks(exec, x, 1, 1, &|first, x| exec.isa.run(Add { x, y: &y[first..] }))
}

/// Computes `x += factor * y` elementwise. Product and sum are rounded separately on every instruction set (no FMA).
///
/// # Errors
/// [`PoolError`] if the run was cancelled or a task panicked.
///
/// # Panics
/// If the lengths differ.
pub fn add_scaled(exec: &Exec<'_>, x: &mut [f32], y: &[f32], factor: f32) -> Result<(), PoolError> {
    assert_eq!(x.len(), y.len(), "summands must have the same length");
    for_row_chunks(exec, x, 1, 1, &|first, x| exec.isa.run(AddScaled { x, y: &y[first..], factor }))
}

/// Computes `x += factor * y` on the first `width` columns of the view, with `y: [rows, width]`. Rounds like
/// [`add_scaled`].
///
/// # Errors
/// [`PoolError`] if the run was cancelled or a task panicked.
///
/// # Panics
/// If the columns are out of bounds, or `y` does not have the rows of the view.
pub fn add_scaled_columns(
    exec: &Exec<'_>,
    x: RowsMut<'_>,
    y: &[f32],
    width: usize,
    factor: f32,
) -> Result<(), PoolError> {
    assert_eq!(y.len(), x.rows() * width, "summands must have the same shape");
    let RowsMut { data, stride, first: column } = x;
    assert!(column + width <= stride, "columns {column}..{} are out of bounds for rows of {stride}", column + width);
    for_row_chunks(exec, data, stride, width, &|first, rows| {
        for (row, index) in rows.chunks_exact_mut(stride).zip(first..) {
            exec.isa.run(AddScaled { x: &mut row[column..][..width], y: &y[index * width..], factor });
        }
    })
}

/// Row of a matrix, with its weight in a sum; see [`weighted_sums`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct WeightedRow {
    /// Index of the row.
    pub row: usize,
    /// Factor of the row.
    pub weight: f32,
}

/// Computes each row of `out: [m, width]` as the sum of its terms among `terms: [m, n]`, weighted rows of `x: [rows,
/// width]`. Terms are added in their order, beginning at zero, and rounded like [`add_scaled`].
///
/// # Errors
/// [`PoolError`] if the run was cancelled or a task panicked.
///
/// # Panics
/// If `out` is not a whole number of rows, `terms` does not have as many rows, or `x` lacks the row of a term.
pub fn weighted_sums(
    exec: &Exec<'_>,
    x: &[f32],
    width: usize,
    terms: &[WeightedRow],
    out: &mut [f32],
) -> Result<(), PoolError> {
    let rows = whole_rows(out.len(), width);
    let each = terms.len() / rows.max(1);
    assert_eq!(terms.len(), rows * each, "each row must have the same number of terms");
    for_row_chunks(exec, out, width, each * width, &|first, out| {
        for (row, index) in out.chunks_exact_mut(width).zip(first..) {
            row.fill(0.0);
            for &WeightedRow { row: term, weight } in &terms[index * each..][..each] {
                exec.isa.run(AddScaled { x: row, y: &x[term * width..][..width], factor: weight });
            }
        }
    })
}

/// Adds `bias: [n]` to every row of `x: [m, n]`.
///
/// # Errors
/// [`PoolError`] if the run was cancelled or a task panicked.
///
/// # Panics
/// If `x` is not a whole number of rows.
pub fn add_bias(exec: &Exec<'_>, x: &mut [f32], bias: &[f32]) -> Result<(), PoolError> {
    let width = bias.len();
    whole_rows(x.len(), width);
    for_row_chunks(exec, x, width, width, &|_, rows| {
        for row in rows.chunks_exact_mut(width) {
            exec.isa.run(Add { x: row, y: bias });
        }
    })
}

/// Multiplies the first `width` columns of each row of the view by the row's factor.
///
/// # Errors
/// [`PoolError`] if the run was cancelled or a task panicked.
///
/// # Panics
/// If the columns are out of bounds, or there is not one factor per row.
pub fn scale_rows(exec: &Exec<'_>, x: RowsMut<'_>, width: usize, factors: &[f32]) -> Result<(), PoolError> {
    assert_eq!(factors.len(), x.rows(), "there must be one factor per row");
    let RowsMut { data, stride, first: column } = x;
    assert!(column + width <= stride, "columns {column}..{} are out of bounds for rows of {stride}", column + width);
    for_row_chunks(exec, data, stride, width, &|first, rows| {
        for (row, factor) in rows.chunks_exact_mut(stride).zip(&factors[first..]) {
            exec.isa.run(Scale { x: &mut row[column..][..width], factor: *factor });
        }
    })
}

/// Computes `x *= factor` elementwise.
///
/// # Errors
/// [`PoolError`] if the run was cancelled or a task panicked.
pub fn scale(exec: &Exec<'_>, x: &mut [f32], factor: f32) -> Result<(), PoolError> {
    for_row_chunks(exec, x, 1, 1, &|_, x| exec.isa.run(Scale { x, factor }))
}

/// Computes `x = cap * tanh(x / cap)` elementwise (logit soft-capping). Propagates NaN.
///
/// # Errors
/// [`PoolError`] if the run was cancelled or a task panicked.
pub fn softcap(exec: &Exec<'_>, x: &mut [f32], cap: f32) -> Result<(), PoolError> {
    // tanh costs about as much as a dozen additions.
    for_row_chunks(exec, x, 1, 8, &|_, x| exec.isa.run(InPlace { x, function: Softcap { cap } }))
}

/// Clamps the first `width` columns of the view to ±`limit`. Propagates NaN.
///
/// # Errors
/// [`PoolError`] if the run was cancelled or a task panicked.
///
/// # Panics
/// If the columns are out of bounds.
pub fn clip(exec: &Exec<'_>, x: RowsMut<'_>, width: usize, limit: f32) -> Result<(), PoolError> {
    let RowsMut { data, stride, first: column } = x;
    assert!(column + width <= stride, "columns {column}..{} are out of bounds for rows of {stride}", column + width);
    for_row_chunks(exec, data, stride, width, &|_, rows| {
        for row in rows.chunks_exact_mut(stride) {
            exec.isa.run(InPlace { x: &mut row[column..][..width], function: Clip { limit } });
        }
    })
}

struct Add<'a> {
    x: &'a mut [f32],
    y: &'a [f32],
}

impl Kernel for Add<'_> {
    type Output = ();

    /// Plain loop, which the compiler vectorizes.
    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        for (x, y) in self.x.iter_mut().zip(self.y) {
            *x += y;
        }
    }
}

struct AddScaled<'a> {
    x: &'a mut [f32],
    y: &'a [f32],
    factor: f32,
}

impl Kernel for AddScaled<'_> {
    type Output = ();

    /// Plain loop, which the compiler vectorizes but must not fuse into FMA.
    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        for (x, y) in self.x.iter_mut().zip(self.y) {
            *x += self.factor * y;
        }
    }
}

struct Scale<'a> {
    x: &'a mut [f32],
    factor: f32,
}

impl Kernel for Scale<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        for x in self.x {
            *x *= self.factor;
        }
    }
}

/// Softcap function: cap * tanh(x / cap).
#[derive(Clone, Copy)]
struct Softcap {
    cap: f32,
}

impl Lanewise for Softcap {
    #[inline(always)]
    fn apply<S: Simd>(self, simd: S, x: S::F32) -> S::F32 {
        let cap = simd.splat(self.cap);
        simd.mul(cap, tanh(simd, simd.div(x, cap)))
    }
}

/// Clip function: x clamped to ±limit.
#[derive(Clone, Copy)]
struct Clip {
    limit: f32,
}

impl Lanewise for Clip {
    #[inline(always)]
    fn apply<S: Simd>(self, simd: S, x: S::F32) -> S::F32 {
        clamp(simd, x, self.limit)
    }
}
