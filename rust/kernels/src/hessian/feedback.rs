//! Error feedback: when weights change input by input, later weights compensate the errors of earlier ones, as given by
//! the factor R of the Hessian ([`HessianFactor`]).

use super::HessianFactor;
use crate::arch::{LANES, Simd};
use crate::quant::integer::{self, HALF, SUPER};

/// Number of later inputs that are corrected at a time, with sums in registers.
pub(super) const CORRECTED: usize = 8;

/// Number of later inputs whose elements of R are copied together. The copy is contiguous, while rows of R are often a
/// power of two apart and map to the same cache sets.
const STRIP: usize = 8 * CORRECTED;

/// Weights of sixteen rows at one input.
pub(crate) type Column = [f32; LANES];

/// Weights of sixteen rows, of which those of finished super-blocks are replaced by their errors.
pub(crate) struct Feedback {
    /// Weights, padded to whole half blocks of inputs.
    pub weights: Vec<Column>,
    /// Correction of each input by the errors of earlier super-blocks: `-e R`.
    pub corrections: Vec<Column>,
}

impl Feedback {
    /// Creates the state from `rows: [16, cols]`.
    pub fn new(rows: &[f32]) -> Self {
        let cols = rows.len() / LANES;
        let mut weights = vec![[0.0; LANES]; integer::padded(cols)];
        for (row, values) in rows.chunks_exact(cols).enumerate() {
            weights.iter_mut().zip(values).for_each(|(column, value)| column[row] = *value);
        }
        let corrections = vec![[0.0; LANES]; weights.len()];
        Self { weights, corrections }
    }

    /// Fills `targets` with the targets of super-block `index` after all earlier errors.
    #[inline(always)]
    pub fn targets<S: Simd>(&self, simd: S, factor: Option<&HessianFactor>, index: usize, targets: &mut [Column]) {
        let inputs = index * SUPER..index * SUPER + targets.len();
        targets.copy_from_slice(&self.weights[inputs.clone()]);
        if let Some(factor) = factor {
            for (k, (corrections, inverse)) in self.corrections[inputs].iter().zip(factor.inverse(index)).enumerate() {
                subtract(simd, &mut targets[k..], &[simd.load(corrections)], &[&inverse[k..]]);
            }
        }
    }
}

impl AsMut<Feedback> for Feedback {
    fn as_mut(&mut self) -> &mut Feedback {
        self
    }
}

/// Computes `targets -= residuals * rows`. Each residual has a row that starts at the first target.
#[inline(always)]
pub(crate) fn subtract<S: Simd, const N: usize>(
    simd: S,
    targets: &mut [Column],
    residuals: &[S::F32; N],
    rows: &[&[f32]; N],
) {
    for (j, target) in targets.iter_mut().enumerate() {
        let mut sum = simd.load(target);
        for (residual, row) in residuals.iter().zip(rows) {
            sum = simd.sub(sum, simd.mul(*residual, simd.splat(row[j])));
        }
        simd.store(sum, target);
    }
}

/// Corrects later inputs for the errors of super-block `index`, which replaced its weights.
#[inline(always)]
pub(crate) fn correct<S: Simd>(simd: S, factor: &HessianFactor, index: usize, panels: &mut [impl AsMut<Feedback>]) {
    let Some(panel) = panels.first_mut() else { return };
    let size = panel.as_mut().weights.len();
    let inputs = index * SUPER..size.min((index + 1) * SUPER);
    // Strip of R: `[tiles][inputs][CORRECTED]`.
    let mut strip = vec![[0.0; CORRECTED]; STRIP / CORRECTED * inputs.len()];
    for first in (inputs.end..size).step_by(STRIP) {
        for (index, input) in inputs.clone().enumerate() {
            let row: &[f32; STRIP] = factor.row(input)[first..].first_chunk().expect("whole strips");
            for (tile, factors) in row.as_chunks().0.iter().enumerate() {
                strip[tile * inputs.len() + index] = *factors;
            }
        }
        for panel in &mut *panels {
            let Feedback { weights, corrections } = panel.as_mut();
            let tiles = corrections[first..first + STRIP].as_chunks_mut::<CORRECTED>().0;
            for (corrections, rows) in tiles.iter_mut().zip(strip.chunks_exact(inputs.len())) {
                let mut sums = [simd.splat(0.0); CORRECTED];
                for (sum, corrections) in sums.iter_mut().zip(&*corrections) {
                    *sum = simd.load(corrections);
                }
                for (error, row) in weights[inputs.clone()].iter().zip(rows) {
                    let error = simd.sub(simd.splat(0.0), simd.load(error));
                    for (sum, factor) in sums.iter_mut().zip(row) {
                        *sum = simd.mul_add(error, simd.splat(*factor), *sum);
                    }
                }
                for (corrections, sum) in corrections.iter_mut().zip(sums) {
                    simd.store(sum, corrections);
                }
            }
        }
    }
}

/// Half blocks are whole strips.
const _: () = assert!(HALF.is_multiple_of(STRIP));
