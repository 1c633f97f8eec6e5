//! Sums of matrices and of a matrix and a row; numbers that are scaled, capped and cut.

use crate::arch::{Kernel, Simd};
use crate::math::{InPlace, Lanewise, clamp, tanh};
use crate::rows::{RowsMut, for_row_chunks, whole_rows};
use crate::{Exec, PoolError};

/// `x += y`, element by element.
///
/// # Errors
/// [`PoolError`] if the run was cancelled or a task panicked.
///
/// # Panics
/// If the lengths differ.
pub fn add(exec: &Exec<'_>, x: &mut [f32], y: &[f32]) -> Result<(), PoolError> {
    assert_eq!(x.len(), y.len(), "summands have the same shape");
    for_row_chunks(exec, x, 1, 1, &|first, x| exec.isa.run(Add { x, y: &y[first..] }))
}

/// `x += factor * y`, element by element. The product is rounded and then the sum, on every instruction set.
///
/// # Errors
/// [`PoolError`] if the run was cancelled or a task panicked.
///
/// # Panics
/// If the lengths differ.
pub fn add_scaled(exec: &Exec<'_>, x: &mut [f32], y: &[f32], factor: f32) -> Result<(), PoolError> {
    assert_eq!(x.len(), y.len(), "summands have the same shape");
    for_row_chunks(exec, x, 1, 1, &|first, x| exec.isa.run(AddScaled { x, y: &y[first..], factor }))
}

/// `x += factor * y` on the first `width` columns of the view, with `y: [rows, width]`; rounded as by [`add_scaled`].
///
/// # Errors
/// [`PoolError`] if the run was cancelled or a task panicked.
///
/// # Panics
/// If the columns end beyond the row, or `y` has other rows than the view.
pub fn add_scaled_columns(
    exec: &Exec<'_>,
    x: RowsMut<'_>,
    y: &[f32],
    width: usize,
    factor: f32,
) -> Result<(), PoolError> {
    assert_eq!(y.len(), x.rows() * width, "summands have the same shape");
    let RowsMut { data, stride, first: column } = x;
    assert!(column + width <= stride, "{width} columns from {column} on end beyond rows of {stride}");
    for_row_chunks(exec, data, stride, width, &|first, rows| {
        for (row, index) in rows.chunks_exact_mut(stride).zip(first..) {
            exec.isa.run(AddScaled { x: &mut row[column..][..width], y: &y[index * width..], factor });
        }
    })
}

/// `x += bias` on every row of `x: [m, n]`, with `bias: [n]`.
///
/// # Errors
/// [`PoolError`] if the run was cancelled or a task panicked.
///
/// # Panics
/// If `x` is not made of whole rows.
pub fn add_bias(exec: &Exec<'_>, x: &mut [f32], bias: &[f32]) -> Result<(), PoolError> {
    let width = bias.len();
    whole_rows(x.len(), width);
    for_row_chunks(exec, x, width, width, &|_, rows| {
        for row in rows.chunks_exact_mut(width) {
            exec.isa.run(Add { x: row, y: bias });
        }
    })
}

/// `x *= factor`, element by element.
///
/// # Errors
/// [`PoolError`] if the run was cancelled or a task panicked.
pub fn scale(exec: &Exec<'_>, x: &mut [f32], factor: f32) -> Result<(), PoolError> {
    for_row_chunks(exec, x, 1, 1, &|_, x| exec.isa.run(Scale { x, factor }))
}

/// `x = cap * tanh(x / cap)`, element by element. NaN stays NaN.
///
/// # Errors
/// [`PoolError`] if the run was cancelled or a task panicked.
pub fn softcap(exec: &Exec<'_>, x: &mut [f32], cap: f32) -> Result<(), PoolError> {
    // A tanh is worth a dozen additions.
    for_row_chunks(exec, x, 1, 8, &|_, x| exec.isa.run(InPlace { x, function: Softcap { cap } }))
}

/// Cuts the first `width` columns of the view to ±`limit`. NaN stays NaN.
///
/// # Errors
/// [`PoolError`] if the run was cancelled or a task panicked.
///
/// # Panics
/// If the columns end beyond the row.
pub fn clip(exec: &Exec<'_>, x: RowsMut<'_>, width: usize, limit: f32) -> Result<(), PoolError> {
    let RowsMut { data, stride, first: column } = x;
    assert!(column + width <= stride, "{width} columns from {column} on end beyond rows of {stride}");
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

    /// A plain loop: the compiler makes vectors of it.
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

    /// A plain loop, which the compiler may not fuse.
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

/// cap * tanh(x / cap)
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

/// x cut to ±limit.
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
