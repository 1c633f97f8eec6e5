//! Triangular factor of the Hessian: `H = R R^T` with R upper triangular.
//!
//! An error e in the weights of one output costs `e H e^T`, the sum of the squares of `e R`. Element k of `e R` depends
//! only on the errors of inputs 0 to k. Quantizing input by input minimizes these elements one after the other: the
//! target of weight k follows from the errors before it. This is GPTQ (<https://arxiv.org/abs/2210.17323>) without the
//! inverse of H; <https://arxiv.org/abs/2307.13304> shows that both are equivalent. R overwrites H.
//!
//! The factorization processes super-blocks of inputs from the last to the first: diagonal blocks in f64, the rest by
//! rank updates in f32.

use super::rank_update::{DEPTH, PANEL, Sign, rank_update};
use super::{Basis, Correction, Hessian, padded};
use crate::arch::{Kernel, LANES, Simd};
use crate::disjoint::{Tile, Tiles};
use crate::memory::PageSlice;
use crate::quant::integer::{GROUP, SUPER};
use crate::quant::trellis::{SEGMENT, by_segment, descent_segments};
use crate::{Exec, PoolError};

/// Least damping that is added to the diagonal, as a fraction of its mean (as in GPTQ). It prevents large errors in
/// directions that the calibration data does not contain.
const DAMPING: f32 = 0.01;

/// Damping for quantization as a multiple of inputs / rows, where that is more than [`DAMPING`]: the fewer rows, the less they
/// say of other texts (`benches/record/2026-11-30-amd-epyc-zen5/calibration-shrinkage.txt`).
const DAMPING_BY_INPUTS: f32 = 0.5;

/// Reason that statistics could not be computed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CalibrationError {
    /// An input is NaN or infinite.
    #[error("calibration input is not finite (NaN or infinity)")]
    NotFinite,
    /// The run was cancelled, or a worker thread panicked.
    #[error(transparent)]
    Pool(#[from] PoolError),
}

/// Statistics of the inputs of a linear layer, for [`PackedMatrix::pack_calibrated`](crate::PackedMatrix) and
/// [`PrunedMatrix`](crate::PrunedMatrix).
pub struct InputStatistics {
    pub(super) cols: usize,
    /// Basis of the inputs.
    pub(crate) basis: Basis,
    /// Weight of the squared error of each input after error feedback: the squares of R's diagonal.
    pub(crate) importance: Vec<f32>,
    /// Factor of the Hessian for error feedback; `None` if there were fewer rows than inputs.
    pub(crate) factor: Option<HessianFactor>,
    /// Correction of the weights, if there is a factor and the Hessian had errors of outputs.
    pub(crate) correction: Option<Correction>,
}

impl InputStatistics {
    /// Returns the number of inputs.
    #[must_use]
    pub fn cols(&self) -> usize {
        self.cols
    }
}

/// Factor R of the Hessian, with the inverses of its diagonal super-blocks.
pub(crate) struct HessianFactor {
    size: usize,
    /// R, `[size][size]`.
    r: PageSlice<f32>,
    /// Inverses of the diagonal super-blocks of R, each `[width][width]`, upper triangular.
    inverses: Vec<Vec<f32>>,
    /// Inverses of the factors of the diagonal blocks of H of each group of inputs, `[groups][GROUP][GROUP]`, upper
    /// triangular.
    group_inverses: Vec<f32>,
    /// The same as `group_inverses`, for [`descent_segments`].
    segment_inverses: Vec<f32>,
    /// The same as `inverses`, with the inputs of each super-block in the order of [`by_segment`].
    inverses_by_segment: Vec<Vec<f32>>,
}

impl HessianFactor {
    /// Returns the number of inputs, padded to whole half blocks.
    pub fn size(&self) -> usize {
        self.size
    }

    /// Returns the rows of the inverse of diagonal super-block `index` of R, one for each input.
    pub fn inverse(&self, index: usize) -> std::slice::ChunksExact<'_, f32> {
        let width = (self.size - index * SUPER).min(SUPER);
        self.inverses[index].chunks_exact(width)
    }

    /// Returns the inverse of the factor of the diagonal block of H of group `group`.
    pub fn group_inverse(&self, group: usize) -> &[[f32; GROUP]; GROUP] {
        let rows = self.group_inverses.as_chunks().0;
        &rows.as_chunks().0[group]
    }

    /// Returns the inverse of the factor of the diagonal block of H of segment `segment` of [`descent_segments`].
    pub fn segment_inverse(&self, segment: usize) -> &[[f32; SEGMENT]; SEGMENT] {
        let rows = self.segment_inverses.as_chunks().0;
        &rows.as_chunks().0[segment]
    }

    /// Returns the rows of the inverse of the factor of super-block `index` whose inputs are in the order of [`by_segment`].
    pub fn inverse_by_segment(&self, index: usize) -> std::slice::ChunksExact<'_, f32> {
        let width = (self.size - index * SUPER).min(SUPER);
        self.inverses_by_segment[index].chunks_exact(width)
    }

    /// Returns row `input` of R.
    pub fn row(&self, input: usize) -> &[f32] {
        &self.r[input * self.size..][..self.size]
    }
}

impl Hessian {
    /// Factors the Hessian. Returns `None` if no rows were added or all inputs are zero.
    ///
    /// # Errors
    /// [`CalibrationError`] if an input is not finite, the run was cancelled, or a task panicked.
    pub fn statistics(mut self, exec: &Exec<'_>) -> Result<Option<InputStatistics>, CalibrationError> {
        self.flush(exec)?;
        let (cols, basis, size) = (self.cols, self.basis, padded(self.cols));
        let diagonal: Vec<f32> = (0..size).map(|i| self.sums[i * size + i]).collect();
        let mean = diagonal.iter().map(|x| f64::from(*x)).sum::<f64>() / size as f64;
        if !mean.is_finite() {
            return Err(CalibrationError::NotFinite);
        }
        if mean < f64::from(f32::MIN_POSITIVE) {
            return Ok(None);
        }
        let scale = mean.recip() as f32;
        // With fewer rows than inputs, correlations do not generalize, so only the diagonal is used. It is mixed with
        // the identity in proportion to the number of rows.
        if self.rows < size as u64 {
            let share = self.rows as f32 / size as f32;
            let importance = diagonal.into_iter().map(|x| share * x * scale + (1.0 - share)).collect();
            return Ok(Some(InputStatistics { cols, basis, importance, factor: None, correction: None }));
        }
        let inputs_per_row = size as f32 / self.rows as f32;
        let damping = match basis {
            Basis::Rotated => DAMPING.max(DAMPING_BY_INPUTS * inputs_per_row),
            Basis::Plain => DAMPING,
        };
        // The mean of the diagonal is 1 after damping too.
        let [scale, damping] = [scale, damping].map(|x| x / (1.0 + damping));
        let Self { mut sums, pending, errors, .. } = self;
        let scaled = Tiles::row_blocks(&mut sums, size, 1);
        exec.run(size, |row| {
            let mut tile = scaled.take(row);
            let elements = tile.contiguous();
            elements[row..].iter_mut().for_each(|x| *x *= scale);
            elements[row] += damping;
        })?;
        drop(scaled);
        let factor = factor(exec, sums, size, pending)?;
        let correction = errors.map(|errors| errors.correction(exec, &factor, scale, inputs_per_row)).transpose()?;
        if correction.as_ref().is_some_and(|correction| !correction.is_finite()) {
            return Err(CalibrationError::NotFinite);
        }
        let importance = (0..size).map(|input| {
            let diagonal = factor.row(input)[input];
            diagonal * diagonal
        });
        let importance = importance.collect();
        Ok(Some(InputStatistics { cols, basis, importance, factor: Some(factor), correction }))
    }
}

/// Factors `h: [size][size]`, given by its upper triangle, whose smallest eigenvalue is at least that of the damping.
/// `panels` is a buffer for a super-block of rows.
fn factor(
    exec: &Exec<'_>,
    mut h: PageSlice<f32>,
    size: usize,
    mut panels: PageSlice<f32>,
) -> Result<HessianFactor, PoolError> {
    let inverse_of = |h: &[f32], inputs: &[usize]| inverse(&diagonal_factor(h, size, inputs), inputs.len());
    let [groups, segments] = [Vec::from_iter(0..size), Vec::from_iter(by_segment(size))];
    let group_inverses = groups.chunks_exact(GROUP).flat_map(|inputs| inverse_of(&h, inputs)).collect();
    let segment_inverses = descent_segments(size).flat_map(|inputs| inverse_of(&h, &inputs)).collect();
    let (mut inverses, mut inverses_by_segment) = (Vec::new(), Vec::new());
    for first in (0..size).step_by(SUPER).rev() {
        let width = (size - first).min(SUPER);
        let diagonal = diagonal_factor(&h, size, &Vec::from_iter(first..first + width));
        inverses_by_segment.push(inverse_of(&h, &segments[first..first + width]));
        for (row, values) in (first..).zip(diagonal.chunks_exact(width)) {
            h[row * size + first..][..width].iter_mut().zip(values).for_each(|(to, value)| *to = *value as f32);
        }
        let inverse = inverse(&diagonal, width);
        let blocks = Tiles::new(&mut h, size, first..first + width, PANEL, width);
        let outputs = Tiles::row_blocks(&mut panels, DEPTH * PANEL, 1);
        exec.run(first / PANEL, |index| {
            let (block, panel) = (blocks.take(index), outputs.take(index));
            exec.isa.run(SolvePanel { inverse: &inverse, width, block, panel });
        })?;
        drop((blocks, outputs));
        rank_update(exec, &mut h, size, first, &panels, width, Sign::Minus)?;
        inverses.push(inverse);
    }
    inverses.reverse();
    inverses_by_segment.reverse();
    Ok(HessianFactor { size, r: h, inverses, group_inverses, segment_inverses, inverses_by_segment })
}

/// Factors the block of `h: [size][size]`, given by its upper triangle, of some inputs in the given order: `[width][width]`,
/// upper triangular.
fn diagonal_factor(h: &[f32], size: usize, inputs: &[usize]) -> Vec<f64> {
    let width = inputs.len();
    let element = |row: usize, column: usize| f64::from(h[row.min(column) * size + row.max(column)]);
    let mut r: Vec<f64> =
        inputs.iter().flat_map(|row| inputs.iter().map(move |column| element(*row, *column))).collect();
    for k in (0..width).rev() {
        let (above, from_k) = r.split_at_mut(k * width);
        let row = &mut from_k[..width];
        row[..k].fill(0.0);
        let square = row[k] - dot(&row[k + 1..], &row[k + 1..]);
        // In exact arithmetic the square is at least the damping; rounding may make it smaller.
        row[k] = square.max(f64::from(DAMPING / (1.0 + DAMPING))).sqrt();
        for other in above.chunks_exact_mut(width) {
            other[k] = (other[k] - dot(&other[k + 1..], &row[k + 1..])) / row[k];
        }
    }
    r
}

/// Returns the inverse of an upper triangular matrix `r: [width][width]`.
fn inverse(r: &[f64], width: usize) -> Vec<f32> {
    // Transposed, so that dot products read contiguous memory: row k is column k of the inverse.
    let mut transposed = vec![0.0; width * width];
    for (k, column) in transposed.chunks_exact_mut(width).enumerate() {
        column[k] = r[k * width + k].recip();
        for i in (0..k).rev() {
            let row = &r[i * width..][..width];
            column[i] = -dot(&row[i + 1..=k], &column[i + 1..=k]) / row[i];
        }
    }
    (0..width * width).map(|at| transposed[at % width * width + at / width] as f32).collect()
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// Triangular solve for rows of R that precede a diagonal super-block: multiplies the rows of H by the inverse of the
/// diagonal block of R.
struct SolvePanel<'a> {
    /// Inverse of the diagonal block, `[width][width]`.
    inverse: &'a [f32],
    width: usize,
    /// Rows `[PANEL][width]` of H, overwritten with those of R.
    block: Tile<'a, f32>,
    /// Output: the transposed rows of R, `[DEPTH][PANEL]`.
    panel: Tile<'a, f32>,
}

impl Kernel for SolvePanel<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, simd: S) {
        let width = self.width;
        let mut transposed = vec![[0.0; PANEL]; width];
        for row in 0..PANEL {
            transposed.iter_mut().zip(&*self.block.row(row)).for_each(|(line, value)| line[row] = *value);
        }
        let lines = self.panel.contiguous().as_chunks_mut::<PANEL>().0;
        for ((k, line), inverse) in lines.iter_mut().enumerate().zip(self.inverse.chunks_exact(width)) {
            for (lane, out) in line.as_chunks_mut::<LANES>().0.iter_mut().enumerate() {
                let mut sum = simd.splat(0.0);
                for (factor, line) in inverse[k..].iter().zip(&transposed[k..]) {
                    sum = simd.mul_add(simd.splat(*factor), simd.load(&line.as_chunks().0[lane]), sum);
                }
                simd.store(sum, out);
            }
        }
        for row in 0..PANEL {
            self.block.row(row).iter_mut().zip(&*lines).for_each(|(value, line)| *value = line[row]);
        }
    }
}
