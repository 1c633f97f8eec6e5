//! Activations times weights: `out[m, n] = sum over k of x[m, k] * w[n, k]`.
//!
//! Two algorithms: [`float`], and [`integer`] for both kinds of formats with codes. What they share is the promise: the
//! operations behind an output depend on the format, the instruction set and K alone, for one row and for a thousand.

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

    /// How the weights are stored; none where there is nothing to multiply.
    fn format(&self) -> Option<Format> {
        self.w.formats().next().filter(|_| !self.out.is_empty() && self.w.cols() > 0).map(|(format, _)| format)
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
/// in integer and grouped formats nor all in the same floating-point format.
pub fn matmul_each(exec: &Exec<'_>, products: &mut [Product<'_>]) -> Result<(), PoolError> {
    let mut of_all = None;
    for product in &mut *products {
        product.check();
        if product.w.cols() == 0 {
            product.out.fill(0.0);
        }
        if let Some(format) = product.format() {
            let of_all = *of_all.get_or_insert(format);
            let alike = format == of_all || format.is_integer() && of_all.is_integer();
            assert!(alike, "{} and {} in one product", of_all.name(), format.name());
        }
    }
    of_all.map_or(Ok(()), |format| format.visit(Multiply { exec, products }))
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

/// Those products that have something to multiply.
fn to_multiply<'a, 'p>(products: &'a mut [Product<'p>]) -> impl Iterator<Item = &'a mut Product<'p>> {
    products.iter_mut().filter(|product| product.format().is_some())
}

/// Cuts the weights of all products into shares of about the same size.
struct Shares {
    lines: usize,
}

impl Shares {
    /// A share for each of `tasks` tasks.
    fn new(products: &mut [Product<'_>], tasks: usize) -> Self {
        let lines: usize = to_multiply(products).map(|product| product.lines()).sum();
        Self { lines: lines.div_ceil(tasks) }
    }

    /// The panels of a task of `product`: at most `most`, and whole groups of `streams`, which keeps tails away.
    fn panels(&self, product: &Product<'_>, streams: usize, most: usize) -> usize {
        self.lines.div_ceil(product.w.cols()).next_multiple_of(streams).min(most)
    }
}
