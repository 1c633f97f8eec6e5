//! Matrix multiplication of activations with packed weights: `out[m, n] = sum over k of x[m, k] * w[n, k]`.
//!
//! There are two algorithms: [`float`] for floating-point formats, [`integer`] for integer and grouped formats. In both,
//! the floating-point operations behind an output element depend on the weight format, the instruction set and K alone,
//! not on the number of rows.

mod activations;
pub(crate) mod float;
mod grouped;
pub(crate) mod integer;
mod panels;
mod prefetch;
pub(crate) mod sparse;
mod tile;
mod unit;
pub(crate) mod unroll;

use crate::arch::LANES;
use crate::matrix::{Bands, PackedMatrix};
use crate::{Exec, PoolError};

/// One of several products that [`matmul_each`] computes together: `out[m, n] = x[m, k] * w[n, k]`, all row-major and
/// contiguous; m may be any number.
pub struct Product<'a> {
    /// Activations, `[m, k]`; several products may share them.
    pub x: &'a [f32],
    /// Weights, `[n, k]`.
    pub w: &'a PackedMatrix,
    /// Outputs, `[m, n]`; overwritten.
    pub out: &'a mut [f32],
}

impl Product<'_> {
    /// Returns the number of rows of activations.
    fn m(&self) -> usize {
        self.out.len().checked_div(self.w.rows()).unwrap_or(0)
    }

    /// Panics if the shapes do not match.
    fn check(&self) {
        let (m, n, k) = (self.m(), self.w.rows(), self.w.cols());
        let (inputs, outputs) = (self.x.len(), self.out.len());
        assert!(outputs == m * n, "out must be a whole number of rows of {n}, got {outputs} elements");
        assert!(n == 0 || inputs == m * k, "x must have {} elements ({m} rows of {k}), got {inputs}", m * k);
    }
}

/// Product with something to multiply, and the weights of its matrix as its family of formats has them.
pub(crate) struct Part<'a, W> {
    x: &'a [f32],
    /// Numbers of rows, outputs and inputs.
    m: usize,
    n: usize,
    k: usize,
    weights: W,
    /// Whether the weights probably are in the last-level cache.
    in_cache: bool,
    out: &'a mut [f32],
}

/// Computes `out[m, n] = x[m, k] * w[n, k]`, all row-major and contiguous; m may be any number.
///
/// ```
/// use std::num::NonZeroUsize;
///
/// use ferrule_kernels::arch::Isa;
/// use ferrule_kernels::{Cancel, Exec, Format, PackedMatrix, Pool, RowSource, matmul};
///
/// /// Row i of this matrix is `[i, i, ...]`.
/// struct Rows;
///
/// impl RowSource for Rows {
///     fn read_row(&self, row: usize, out: &mut [f32]) {
///         out.fill(row as f32);
///     }
/// }
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let (pool, cancel) = (Pool::new(NonZeroUsize::MIN), Cancel::new());
/// let exec = Exec { isa: Isa::best(), pool: &pool, cancel: &cancel };
/// let (n, k) = (3, 2);
/// let w = PackedMatrix::pack(&exec, &[(Format::F32, n)], k, &Rows)?;
///
/// let x = [1.0, 2.0, 10.0, 20.0]; // two rows of k activations
/// let mut out = [0.0; 6];
/// matmul(&exec, &x, &w, &mut out)?;
/// assert_eq!(out, [0.0, 3.0, 6.0, 0.0, 30.0, 60.0]);
/// # Ok(())
/// # }
/// ```
///
/// # Errors
/// [`PoolError`] if `exec` was cancelled or a task panicked; the contents of `out` are then unspecified.
///
/// # Panics
/// If `x` and `out` do not have the same number of whole rows.
pub fn matmul(exec: &Exec<'_>, x: &[f32], w: &PackedMatrix, out: &mut [f32]) -> Result<(), PoolError> {
    matmul_each(exec, &mut [Product { x, w, out }])
}

/// Computes all products with one fork and join of the threads, or two where activations are quantized. Products in other
/// floating-point formats are computed after each other, and those in quantized formats last. Each result is bitwise that
/// of [`matmul`]. Activations that several products share are quantized once.
///
/// # Errors
/// [`PoolError`] if `exec` was cancelled or a task panicked; the contents of all outputs are then unspecified.
///
/// # Panics
/// If the activations and outputs of a product do not have the same number of whole rows.
pub fn matmul_each(exec: &Exec<'_>, products: &mut [Product<'_>]) -> Result<(), PoolError> {
    let (mut float, mut quantized) = (Vec::new(), Vec::new());
    for product in products {
        product.check();
        let (m, n, k) = (product.m(), product.w.rows(), product.w.cols());
        let Product { x, w, out } = product;
        if k == 0 {
            out.fill(0.0);
        } else if !out.is_empty() {
            let in_cache = w.record_read();
            match w.bands() {
                Bands::Float(format, band) => float.push(Part { x, m, n, k, weights: (*format, band), in_cache, out }),
                Bands::Quantized(bands) => quantized.push(Part { x, m, n, k, weights: &bands[..], in_cache, out }),
            }
        }
    }
    for parts in float.chunk_by_mut(|a, b| a.weights.1.format == b.weights.1.format) {
        let (format, _) = parts[0].weights;
        format.multiply(exec, parts)?;
    }
    if quantized.is_empty() { Ok(()) } else { integer::multiply(exec, &mut quantized) }
}

/// Task sizes that partition the weights of all products into tasks of about the same size.
struct TaskSizes {
    /// Number of steps of k of a task, over all its panels.
    lines: usize,
}

impl TaskSizes {
    /// Computes the size for `tasks` tasks.
    fn new<W>(parts: &[Part<'_, W>], tasks: usize) -> Self {
        let lines: usize = parts.iter().map(|part| part.n.div_ceil(LANES) * part.k).sum();
        Self { lines: lines.div_ceil(tasks) }
    }

    /// Returns the number of panels of a task over `k` inputs: at most `most`, and a multiple of `streams`, so that only
    /// the last task has panels left over.
    fn panels(&self, k: usize, streams: usize, most: usize) -> usize {
        self.lines.div_ceil(k).next_multiple_of(streams).min(most)
    }
}
