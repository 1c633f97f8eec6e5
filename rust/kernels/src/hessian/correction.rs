//! Correction of weights for errors of their inputs (GPTAQ, asymmetric calibration,
//! <https://arxiv.org/abs/2504.02692>).
//!
//! A linear layer of the quantized model gets inputs x' where that of the exact model gets x. The change C of its
//! weights W that minimizes the sum of `|W x - (W + C) x'|^2` over all rows is `V H^-1`, where V is the sum of `e x'^T`
//! over the errors `e = W x - W x'` of the outputs. H is damped, so C does not grow in directions that the inputs do
//! not contain. With the factor R of H, two triangular solves compute C: `Y R^T = V` and `C R = Y`.
//!
//! The fewer rows there are for each input, the more C fits what only this text has, so a part of it is added: see
//! [`correction_share`].

use super::HessianFactor;
use super::feedback::{CORRECTED, Column, Feedback, correct};
use super::rank_update::{DEPTH, PANEL, product_update};
use crate::arch::{Kernel, LANES, Simd};
use crate::disjoint::Tiles;
use crate::matrix::MAX_TASK_PANELS;
use crate::memory::{AllocError, PageSlice};
use crate::quant::integer::SUPER;
use crate::quant::rotation::SHRINK;
use crate::{Exec, PoolError};

/// Shrinkage of a correction: its share is `1 / (1 + SHRINKAGE * inputs / rows)`. With 8,192 tokens, it lowers the divergence
/// of SmolLM2-135M in int4 by 18 %, and that of the embedded model at 4.25 bits, with 65,536 tokens, by 3 %
/// (`benches/record/2026-11-30-amd-epyc-zen5/calibration-shrinkage.txt`).
const SHRINKAGE: f32 = 16.0;

/// Returns the share of a correction that is added to the weights.
fn correction_share(inputs_per_row: f32) -> f32 {
    1.0 / (1.0 + SHRINKAGE * inputs_per_row)
}

/// Running sums of `e x^T` over rotated inputs x and the errors e of their outputs.
pub(super) struct OutputErrors {
    pub outputs: usize,
    /// Number of inputs, padded to whole half blocks.
    size: usize,
    /// `[padded outputs][size]`
    sums: PageSlice<f32>,
    /// Errors of the pending rows of the Hessian, `[output panels][DEPTH][PANEL]`.
    pending: PageSlice<f32>,
}

impl OutputErrors {
    /// Creates zero sums for `outputs` outputs over `size` padded inputs.
    pub fn zeroed(outputs: usize, size: usize) -> Result<Self, AllocError> {
        let zeroed =
            |count: Option<usize>| PageSlice::zeroed_in_huge_pages(count.ok_or(AllocError { bytes: u64::MAX })?);
        let padded = outputs.next_multiple_of(PANEL);
        let (sums, pending) = (zeroed(padded.checked_mul(size))?, zeroed(padded.checked_mul(DEPTH))?);
        Ok(Self { outputs, size, sums, pending })
    }

    /// Returns the bytes of the sums, or `None` if they overflow.
    pub fn bytes_for(outputs: usize, size: usize) -> Option<u64> {
        let padded = outputs.checked_next_multiple_of(PANEL)? as u64;
        padded.checked_mul((size as u64).checked_add(DEPTH as u64)?)?.checked_mul(size_of::<f32>() as u64)
    }

    /// Adds `errors: [rows, outputs]` to the pending rows from row `first` on.
    pub fn add(&mut self, exec: &Exec<'_>, errors: &[f32], first: usize) -> Result<(), PoolError> {
        let outputs = self.outputs;
        let panels = Tiles::row_blocks(&mut self.pending, DEPTH * PANEL, 1);
        exec.run(panels.len(), |index| {
            let columns = index * PANEL..outputs.min((index + 1) * PANEL);
            let mut panel = panels.take(index);
            let lines = panel.contiguous().as_chunks_mut::<PANEL>().0;
            for (line, errors) in lines[first..].iter_mut().zip(errors.chunks_exact(outputs)) {
                line[..columns.len()].copy_from_slice(&errors[columns.clone()]);
            }
        })
    }

    /// Adds the first `count` pending rows to the sums, with the pending inputs `[input panels][DEPTH][PANEL]`.
    pub fn flush(&mut self, exec: &Exec<'_>, inputs: &[f32], count: usize) -> Result<(), PoolError> {
        product_update(exec, &mut self.sums, self.size, (&self.pending, inputs), count)
    }

    /// Computes the correction with the factor of the Hessian, which was multiplied by `scale`.
    pub fn correction(
        self,
        exec: &Exec<'_>,
        factor: &HessianFactor,
        scale: f32,
        inputs_per_row: f32,
    ) -> Result<Correction, PoolError> {
        let Self { outputs, size, sums: mut columns, .. } = self;
        let rows = Tiles::row_blocks(&mut columns, size, MAX_TASK_PANELS * LANES);
        exec.run(rows.len(), |index| {
            let mut rows = rows.take(index);
            let rows = rows.contiguous();
            // Rotated weights are larger than weights by the same factor as the products of rotated inputs.
            let factor_of_sums = correction_share(inputs_per_row) * scale / SHRINK;
            let panels = rows.chunks_exact(LANES * size).map(|rows| {
                let mut panel = Feedback::new(rows);
                std::mem::swap(&mut panel.weights, &mut panel.corrections);
                panel.corrections.as_flattened_mut().iter_mut().for_each(|sum| *sum *= factor_of_sums);
                panel
            });
            let mut panels: Vec<_> = panels.collect();
            exec.isa.run(Solve { factor, panels: &mut panels });
            for (rows, Feedback { weights, .. }) in rows.chunks_exact_mut(LANES * size).zip(&panels) {
                rows.copy_from_slice(weights.as_flattened());
            }
        })?;
        drop(rows);
        Ok(Correction { outputs, size, columns })
    }
}

/// Change of the rotated weights of a linear layer.
pub(crate) struct Correction {
    pub outputs: usize,
    size: usize,
    /// `[row panels][size][LANES]`
    columns: PageSlice<f32>,
}

impl Correction {
    /// Returns whether no change is NaN or infinite.
    pub fn is_finite(&self) -> bool {
        self.columns.iter().all(|change| change.is_finite())
    }

    /// Adds the change to the rotated weights of panel `index`.
    pub fn add_to(&self, index: usize, weights: &mut [Column]) {
        let columns = self.columns[index * LANES * self.size..].as_chunks::<LANES>().0;
        for (weights, change) in weights.iter_mut().zip(&columns[..self.size]) {
            weights.iter_mut().zip(change).for_each(|(weight, change)| *weight += change);
        }
    }
}

/// Solves `C R R^T = V` for panels whose corrections are V. Their weights become C.
struct Solve<'a> {
    factor: &'a HessianFactor,
    panels: &'a mut [Feedback],
}

impl Kernel for Solve<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Self { factor, panels } = self;
        let blocks = factor.size().div_ceil(SUPER);
        for index in (0..blocks).rev() {
            // A loop rather than a closure: closures are compiled without the instruction set unless they are inlined.
            for panel in &mut *panels {
                solve_transposed(simd, factor, index, &mut panel.corrections);
            }
        }
        for index in 0..blocks {
            let first = index * SUPER;
            for Feedback { weights, corrections } in &mut *panels {
                for (j, inverse) in factor.inverse(index).enumerate() {
                    let value = simd.load(&corrections[first + j]);
                    for (weight, element) in weights[first + j..].iter_mut().zip(&inverse[j..]) {
                        simd.store(simd.mul_add(value, simd.splat(*element), simd.load(weight)), weight);
                    }
                }
            }
            correct(simd, factor, index, panels);
        }
    }
}

/// Replaces super-block `index` of V by that of Y, where `Y R^T = V`, and subtracts its products from earlier inputs.
#[inline(always)]
fn solve_transposed<S: Simd>(simd: S, factor: &HessianFactor, index: usize, columns: &mut [Column]) {
    let first = index * SUPER;
    let (earlier, from_first) = columns.split_at_mut(first);
    let width = from_first.len().min(SUPER);
    let block = &mut from_first[..width];
    for (k, inverse) in factor.inverse(index).enumerate() {
        let mut sum = simd.splat(0.0);
        for (value, element) in block[k..].iter().zip(&inverse[k..]) {
            sum = simd.mul_add(simd.load(value), simd.splat(*element), sum);
        }
        // Later inputs of the block do not read this one.
        simd.store(sum, &mut block[k]);
    }
    for (number, targets) in earlier.as_chunks_mut::<CORRECTED>().0.iter_mut().enumerate() {
        let rows: [&[f32]; CORRECTED] =
            std::array::from_fn(|row| &factor.row(number * CORRECTED + row)[first..first + width]);
        let mut sums = [simd.splat(0.0); CORRECTED];
        for (sum, target) in sums.iter_mut().zip(&*targets) {
            *sum = simd.load(target);
        }
        for (j, value) in block.iter().enumerate() {
            let value = simd.sub(simd.splat(0.0), simd.load(value));
            for (sum, row) in sums.iter_mut().zip(&rows) {
                *sum = simd.mul_add(value, simd.splat(row[j]), *sum);
            }
        }
        for (target, sum) in targets.iter_mut().zip(sums) {
            simd.store(sum, target);
        }
    }
}
