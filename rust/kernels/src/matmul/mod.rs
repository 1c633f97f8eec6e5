//! Matrix multiplication of activations with packed weights: `out[m, n] = sum over k of x[m, k] * w[n, k]`.
//!
//! There are two algorithms: [`float`] for floating-point formats, [`integer`] for integer and grouped formats. In both,
//! the floating-point operations behind an output element depend on the weight format, the instruction set and K alone,
//! not on the number of rows.

mod activations;
mod float;
mod grouped;
mod integer;
mod panels;
mod tile;
pub(crate) mod unroll;

use crate::arch::LANES;
use crate::matrix::PackedMatrix;
use crate::quant::{FloatFormat, Format, FormatVisitor, GroupedFormat, IntegerFormat};
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

    /// Returns the format of the weights, or `None` if there is nothing to multiply.
    fn format(&self) -> Option<Format> {
        self.w.formats().next().filter(|_| !self.out.is_empty() && self.w.cols() > 0).map(|(format, _)| format)
    }

    /// Returns the number of steps of k that all panels have together.
    fn lines(&self) -> usize {
        self.w.rows().div_ceil(LANES) * self.w.cols()
    }
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

/// Computes all products with one fork and join of the threads, or two where activations are quantized. Each result is
/// bitwise that of [`matmul`]. Activations that several products share are quantized once.
///
/// # Errors
/// [`PoolError`] if `exec` was cancelled or a task panicked; the contents of all outputs are then unspecified.
///
/// # Panics
/// If the activations and outputs of a product do not have the same number of whole rows, or if the matrices are neither
/// all in integer and grouped formats nor all in the same floating-point format.
pub fn matmul_each(exec: &Exec<'_>, products: &mut [Product<'_>]) -> Result<(), PoolError> {
    let mut first_format = None;
    for product in &mut *products {
        product.check();
        if product.w.cols() == 0 {
            product.out.fill(0.0);
        }
        if let Some(format) = product.format() {
            let first_format = *first_format.get_or_insert(format);
            let alike = format == first_format || format.is_integer() && first_format.is_integer();
            assert!(
                alike,
                "{} and {} cannot be combined in one call: use one floating-point format, or only quantized formats",
                first_format.name(),
                format.name()
            );
        }
    }
    first_format.map_or(Ok(()), |format| format.visit(Multiply { exec, products }))
}

struct Multiply<'a, 'p> {
    exec: &'a Exec<'a>,
    products: &'a mut [Product<'p>],
}

impl FormatVisitor for Multiply<'_, '_> {
    type Output = Result<(), PoolError>;

    fn float<F: FloatFormat>(self) -> Self::Output {
        float::multiply::<F>(self.exec, self.products)
    }

    fn integer<F: IntegerFormat>(self) -> Self::Output {
        integer::multiply(self.exec, self.products)
    }

    fn grouped<F: GroupedFormat>(self) -> Self::Output {
        integer::multiply(self.exec, self.products)
    }
}

/// Returns the products that have something to multiply.
fn to_multiply<'a, 'p>(products: &'a mut [Product<'p>]) -> impl Iterator<Item = &'a mut Product<'p>> {
    products.iter_mut().filter(|product| product.format().is_some())
}

/// Task sizes that partition the weights of all products into tasks of about the same size.
struct TaskSizes {
    lines: usize,
}

impl TaskSizes {
    /// Computes the size for `tasks` tasks.
    fn new(products: &mut [Product<'_>], tasks: usize) -> Self {
        let lines: usize = to_multiply(products).map(|product| product.lines()).sum();
        Self { lines: lines.div_ceil(tasks) }
    }

    /// Returns the number of panels of a task of `product`: at most `most`, and a multiple of `streams`, so that only the
    /// last task has panels left over.
    fn panels(&self, product: &Product<'_>, streams: usize, most: usize) -> usize {
        self.lines.div_ceil(product.w.cols()).next_multiple_of(streams).min(most)
    }
}
