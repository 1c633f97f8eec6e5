//! Activations times weights: `out[m, n] = sum over k of x[m, k] * w[n, k]`.
//!
//! Two algorithms, for the two kinds of formats: [`float`] and [`integer`]. What they share is the promise: the
//! operations behind an output depend on the format, the instruction set and K alone, for one row and for a thousand.

mod activations;
mod float;
mod integer;
mod tile;
pub(crate) mod unroll;

use crate::matrix::PackedMatrix;
use crate::quant::{FloatFormat, FormatVisitor, IntegerFormat};
use crate::{Exec, PoolError};

/// `out[m, n] = x[m, k] * w[n, k]`, all dense and row by row; m is any number.
///
/// # Errors
/// [`PoolError`] if `exec` was cancelled or a task panicked; `out` then holds anything.
///
/// # Panics
/// If `x` and `out` have not the same number of whole rows.
pub fn matmul(exec: &Exec<'_>, x: &[f32], w: &PackedMatrix, out: &mut [f32]) -> Result<(), PoolError> {
    let (n, k) = (w.rows(), w.cols());
    let m = out.len().checked_div(n).unwrap_or(0);
    assert_eq!(out.len(), m * n, "outputs of {n} columns");
    assert!(n == 0 || x.len() == m * k, "{} activations for {m} rows of {k}", x.len());
    if k == 0 {
        out.fill(0.0);
        return Ok(());
    }
    match w.formats().next() {
        Some((format, _)) if !out.is_empty() => format.visit(Matmul { exec, x, w, out }),
        _ => Ok(()),
    }
}

struct Matmul<'a> {
    exec: &'a Exec<'a>,
    x: &'a [f32],
    w: &'a PackedMatrix,
    out: &'a mut [f32],
}

impl FormatVisitor for Matmul<'_> {
    type Output = Result<(), PoolError>;

    fn float<F: FloatFormat>(self) -> Self::Output {
        float::multiply::<F>(self.exec, self.x, self.w, self.out)
    }

    fn integer<F: IntegerFormat>(self) -> Self::Output {
        integer::multiply(self.exec, self.x, self.w, self.out)
    }
}

/// One of several products that are computed together.
pub struct Product<'a> {
    /// `[m, k]`
    pub x: &'a [f32],
    /// `[n, k]`
    pub w: &'a PackedMatrix,
    /// `[m, n]`
    pub out: &'a mut [f32],
}

/// `out = x w^T` for every product.
pub fn matmul_each(exec: &Exec<'_>, products: &mut [Product<'_>]) -> Result<(), PoolError> {
    products.iter_mut().try_for_each(|Product { x, w, out }| matmul(exec, x, w, out))
}
