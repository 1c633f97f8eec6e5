//! Errors of outputs that compensate each other.
//!
//! An error in the outputs of a linear layer costs more in some directions than in others. With G, the sum of `g g^T` over
//! the gradients g of the loss with respect to the outputs, errors E of the weights cost about the trace of `G E H E^T`
//! (Tseng et al. 2025, <https://arxiv.org/abs/2505.22988>). Rows are quantized from the first to the last, and the targets of
//! later rows compensate the errors of earlier ones, as those of later inputs do: with the factor R of G, row k costs
//! `sum over r <= k of R[r, k] e_r`, measured by H.
//!
//! Only rows of a part compensate each other: the gradients of all rows of a wide layer would take more memory than its
//! weights, and parts are quantized at the same time.

use std::ops::Range;

use super::factor::inverse;
use super::feedback::Column;
use super::{Basis, CalibrationError, Hessian, HessianFactor, InputStatistics};
use crate::arch::{Kernel, LANES, Simd};
use crate::memory::AllocError;
use crate::quant::integer::{GROUP, SUPER, padded};
use crate::{Exec, PoolError};

/// Running sums of `g g^T` over the gradients g of the outputs of a linear layer.
pub struct OutputGradients {
    outputs: usize,
    most_panels: usize,
    parts: Vec<(Range<usize>, Hessian)>,
}

impl OutputGradients {
    /// Creates zero sums for the outputs of a matrix whose bands have these numbers of rows. `most_panels` is the maximum
    /// number of panels of sixteen rows whose errors compensate each other. There should be many times as many gradients as
    /// rows of a part: others say little about correlations.
    ///
    /// # Errors
    /// [`AllocError`] if allocation fails.
    pub fn zeroed(bands: &[usize], most_panels: usize) -> Result<Self, AllocError> {
        let parts = parts(bands, most_panels).into_iter().map(|part| {
            let hessian = Hessian::zeroed(part.len(), Basis::Plain)?;
            Ok((part, hessian))
        });
        Ok(Self { outputs: bands.iter().sum(), most_panels, parts: parts.collect::<Result<_, _>>()? })
    }

    /// Returns the bytes of memory of the sums for such a matrix, and of what factoring them adds.
    #[must_use]
    pub fn bytes_for(bands: &[usize], most_panels: usize) -> u64 {
        // Inverses of diagonal blocks of the factor, in two orders.
        let inverses = |rows: usize| (2 * (SUPER + GROUP) * size_of::<f32>()) as u64 * padded(rows) as u64;
        let bytes = |part: Range<usize>| {
            Hessian::bytes_for(part.len()).unwrap_or(u64::MAX).saturating_add(inverses(part.len()))
        };
        parts(bands, most_panels).into_iter().map(bytes).fold(0, u64::saturating_add)
    }

    /// Adds the rows of `gradients: [rows, outputs]`.
    ///
    /// # Errors
    /// [`PoolError`] if the run was cancelled or a task panicked. The sums are then invalid.
    pub fn add(&mut self, exec: &Exec<'_>, gradients: &[f32]) -> Result<(), PoolError> {
        let mut of_part = Vec::new();
        for (part, hessian) in &mut self.parts {
            of_part.clear();
            gradients.chunks_exact(self.outputs).for_each(|row| of_part.extend_from_slice(&row[part.clone()]));
            hessian.add(exec, &of_part)?;
        }
        Ok(())
    }

    /// Factors the sums.
    ///
    /// # Errors
    /// [`CalibrationError`] if a gradient is not finite, the run was cancelled, or a task panicked.
    pub fn statistics(self, exec: &Exec<'_>) -> Result<OutputStatistics, CalibrationError> {
        let factored = self.parts.into_iter().map(|(part, hessian)| {
            let statistics = hessian.statistics(exec)?;
            Ok((part, statistics.and_then(|statistics| statistics.factor)))
        });
        let parts = factored.collect::<Result<_, CalibrationError>>()?;
        Ok(OutputStatistics { most_panels: self.most_panels, parts })
    }
}

/// Returns the rows of each part.
fn parts(bands: &[usize], most_panels: usize) -> Vec<Range<usize>> {
    let (mut parts, mut first) = (Vec::new(), 0);
    for rows in bands {
        let (end, each) = (first + rows, LANES * part_panels(rows.div_ceil(LANES), most_panels));
        parts.extend((first..end).step_by(each).map(|first| first..end.min(first + each)));
        first = end;
    }
    parts
}

/// Returns the number of panels of each part of a band of `panels` panels: as few parts as possible, of about equal size, so
/// that threads finish together.
fn part_panels(panels: usize, most: usize) -> usize {
    panels.div_ceil(panels.div_ceil(most).max(1)).max(1)
}

/// Statistics of the gradients of the outputs of a linear layer.
pub struct OutputStatistics {
    /// Maximum number of panels of a part.
    most_panels: usize,
    /// Rows of each part, with their factor; `None` if there were fewer gradients than rows, or all are zero.
    parts: Vec<(Range<usize>, Option<HessianFactor>)>,
}

impl OutputStatistics {
    /// Returns the number of panels of each part of a band of `panels` panels.
    pub(crate) fn part_panels(&self, panels: usize) -> usize {
        part_panels(panels, self.most_panels)
    }

    /// Returns the factor of the part that begins with row `first`, if there is one.
    pub(crate) fn part(&self, first: usize) -> Option<&HessianFactor> {
        self.parts.iter().find(|(part, _)| part.start == first)?.1.as_ref()
    }
}

impl InputStatistics {
    /// Sets the statistics of the gradients of the outputs.
    pub fn set_outputs(&mut self, outputs: OutputStatistics) {
        self.outputs = Some(outputs);
    }
}

/// Adds what compensates the errors of the first panels of a part to the weights of the next one.
pub(crate) struct CompensateRows<'a> {
    /// Factor of the gradients of the part.
    pub factor: &'a HessianFactor,
    /// Errors of the panels before.
    pub errors: &'a [Vec<Column>],
    pub weights: &'a mut [Column],
}

impl Kernel for CompensateRows<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Self { factor, errors, weights } = self;
        let coefficients = coefficients(factor, errors.len());
        for (input, weights) in weights.iter_mut().enumerate() {
            let mut sum = simd.load(weights);
            for (errors, coefficients) in errors.iter().zip(coefficients.as_chunks::<LANES>().0) {
                for (error, coefficients) in errors[input].iter().zip(coefficients) {
                    sum = simd.mul_add(simd.splat(*error), simd.load(coefficients), sum);
                }
            }
            simd.store(sum, weights);
        }
    }
}

/// Returns the shares of the errors of earlier rows that each row of panel `panel` compensates: the rows of R before the
/// panel times the inverse of its diagonal block, `[earlier rows][LANES]`.
fn coefficients(factor: &HessianFactor, panel: usize) -> Vec<Column> {
    let first = panel * LANES;
    let block = (first..first + LANES).flat_map(|row| &factor.row(row)[first..first + LANES]);
    let inverse = inverse(&block.map(|value| f64::from(*value)).collect::<Vec<_>>(), LANES);
    let row = |row: usize| {
        let values = &factor.row(row)[first..first + LANES];
        let mut sums = [0.0; LANES];
        for (value, inverse) in values.iter().zip(inverse.chunks_exact(LANES)) {
            sums.iter_mut().zip(inverse).for_each(|(sum, inverse)| *sum += value * inverse);
        }
        sums
    };
    (0..first).map(row).collect()
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroUsize;

    use super::*;
    use crate::arch::Isa;
    use crate::{Cancel, Pool};

    /// Numbers from -1 to 1.
    fn random(seed: u64, count: usize) -> Vec<f32> {
        let mut state = seed;
        let next = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            ((state as i64) >> 40) as f32 / (1 << 23) as f32
        };
        std::iter::repeat_with(next).take(count).collect()
    }

    /// The cost is a quadratic function of the errors of the last panel, whose minimum the targets must be.
    #[test]
    fn the_last_panel_minimizes_the_cost_of_the_errors_before() {
        const ROWS: usize = 3 * LANES;
        let (pool, cancel) = (Pool::new(NonZeroUsize::MIN), Cancel::new());
        let (count, mut gradients) = (5 * ROWS, random(1, 5 * ROWS * ROWS));
        // Neighbours are correlated.
        gradients.chunks_exact_mut(ROWS).for_each(|row| (1..ROWS).for_each(|k| row[k] += 0.9 * row[k - 1]));
        let errors: Vec<Vec<Column>> = (0..2).map(|panel| random(panel, 4 * LANES).as_chunks().0.to_vec()).collect();
        for isa in Isa::available() {
            let exec = Exec { isa, pool: &pool, cancel: &cancel };
            let mut sums = OutputGradients::zeroed(&[ROWS], 3).unwrap();
            gradients.chunks(7 * ROWS).for_each(|gradients| sums.add(&exec, gradients).unwrap());
            let statistics = sums.statistics(&exec).unwrap();
            let factor = statistics.part(0).expect("more gradients than rows");
            let mut weights = vec![[0.0; LANES]; 4];
            isa.run(CompensateRows { factor, errors: &errors, weights: &mut weights });

            let squares: f64 = gradients.iter().map(|x| f64::from(x * x)).sum::<f64>();
            for (input, targets) in weights.iter().enumerate() {
                // The errors of the last panel are the targets, negated.
                let of_all: Vec<f64> = errors.iter().flat_map(|panel| panel[input]).map(f64::from).collect();
                let of_all: Vec<f64> = of_all.into_iter().chain(targets.iter().map(|x| -f64::from(*x))).collect();
                let mut slopes = [0.0; LANES];
                for row in gradients.chunks_exact(ROWS) {
                    let change: f64 = row.iter().zip(&of_all).map(|(g, e)| f64::from(*g) * e).sum();
                    slopes.iter_mut().zip(&row[2 * LANES..]).for_each(|(slope, g)| *slope += change * f64::from(*g));
                }
                // The factor is that of damped sums; they were padded to 64 rows, of which the mean is taken.
                let damping = 0.01 * squares / 64.0;
                for (slope, error) in slopes.iter().zip(&of_all[2 * LANES..]) {
                    let slope = slope + damping * error;
                    assert!(slope.abs() < 1e-4 * count as f64, "{}: {slope}", isa.name());
                }
            }
        }
    }

    #[test]
    fn parts_do_not_cross_bands() {
        assert_eq!(parts(&[80, 16, 0, 100], 3), [0..48, 48..80, 80..96, 96..144, 144..192, 192..196]);
    }
}
