//! Activations times weights: `out[m, n] = sum over k of x[m, k] * w[n, k]`.
//!
//! Two algorithms, for the two kinds of formats: [`float`] and [`integer`]. What they share is the promise: the
//! operations behind an output depend on the format, the instruction set and K alone, for one row and for a thousand.

mod activations;
mod float;
mod integer;
mod tile;
pub(crate) mod unroll;

use crate::arch::LANES;
use crate::matrix::PackedMatrix;
use crate::quant::{FloatFormat, FormatVisitor, IntegerFormat};
use crate::{Exec, PoolError};

/// One of several products that are computed together: `out[m, n] = x[m, k] * w[n, k]`, all dense and row by row; m is
/// any number.
pub struct Product<'a> {
    /// `[m, k]`; several products may share it.
    pub x: &'a [f32],
    /// `[n, k]`
    pub w: &'a PackedMatrix,
    /// `[m, n]`
    pub out: &'a mut [f32],
}

impl Product<'_> {
    /// Rows of activations.
    fn m(&self) -> usize {
        self.out.len().checked_div(self.w.rows()).unwrap_or(0)
    }

    /// Refuses shapes that do not fit.
    fn check(&self) {
        let (m, n, k) = (self.m(), self.w.rows(), self.w.cols());
        assert_eq!(self.out.len(), m * n, "outputs of {n} columns");
        assert!(n == 0 || self.x.len() == m * k, "{} activations for {m} rows of {k}", self.x.len());
    }

    /// Steps of k that all panels have together.
    fn lines(&self) -> usize {
        self.w.rows().div_ceil(LANES) * self.w.cols()
    }
}

/// `out[m, n] = x[m, k] * w[n, k]`, all dense and row by row; m is any number.
///
/// # Errors
/// [`PoolError`] if `exec` was cancelled or a task panicked; `out` then holds anything.
///
/// # Panics
/// If `x` and `out` have not the same number of whole rows.
pub fn matmul(exec: &Exec<'_>, x: &[f32], w: &PackedMatrix, out: &mut [f32]) -> Result<(), PoolError> {
    matmul_each(exec, &mut [Product { x, w, out }])
}

/// All products with one fork and join of the threads, two where activations are quantized: bit for bit what [`matmul`]
/// gives for each. Of products that share their activations, these are quantized once.
///
/// # Errors
/// [`PoolError`] if `exec` was cancelled or a task panicked; all outputs then hold anything.
///
/// # Panics
/// If the activations and outputs of a product have not the same number of whole rows. If the matrices are neither all
/// in integer formats nor all in the same floating-point format.
pub fn matmul_each(exec: &Exec<'_>, products: &mut [Product<'_>]) -> Result<(), PoolError> {
    let mut work = Vec::with_capacity(products.len());
    let mut format = None;
    for product in products {
        product.check();
        if product.w.cols() == 0 {
            product.out.fill(0.0);
        } else if let Some((of_this, _)) = product.w.formats().next().filter(|_| !product.out.is_empty()) {
            let of_all = *format.get_or_insert(of_this);
            assert!(
                of_this == of_all || of_this.is_integer() && of_all.is_integer(),
                "{} and {} in one product",
                of_all.name(),
                of_this.name()
            );
            work.push(product);
        }
    }
    format.map_or(Ok(()), |format| format.visit(Multiply { exec, products: &mut work }))
}

struct Multiply<'a, 'p> {
    exec: &'a Exec<'a>,
    /// None of them is empty.
    products: &'a mut [&'a mut Product<'p>],
}

impl FormatVisitor for Multiply<'_, '_> {
    type Output = Result<(), PoolError>;

    fn float<F: FloatFormat>(self) -> Self::Output {
        float::multiply::<F>(self.exec, self.products)
    }

    fn integer<F: IntegerFormat>(self) -> Self::Output {
        integer::multiply(self.exec, self.products)
    }
}

/// Cuts the weights of all products into shares of about the same size, one for each of `tasks` tasks.
struct Shares {
    lines: usize,
}

impl Shares {
    fn new(products: &[&mut Product<'_>], tasks: usize) -> Self {
        let lines: usize = products.iter().map(|product| product.lines()).sum();
        Self { lines: lines.div_ceil(tasks) }
    }

    /// The panels of a task of `product`: at most `most`, and whole groups of `streams`, which keeps tails away.
    fn panels(&self, product: &Product<'_>, streams: usize, most: usize) -> usize {
        self.lines.div_ceil(product.w.cols()).next_multiple_of(streams).min(most)
    }
}
