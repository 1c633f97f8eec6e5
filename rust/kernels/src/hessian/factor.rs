//! The triangular factor of Hessian: `H = R R^T` with R upper triangular.
//!
//! An error e of one output's weights costs `e H e^T`, the sum of the squares of `e R`. Number k of `e R` depends on the
//! errors of inputs 0 to k alone: whoever quantizes input by input makes each of them small in its turn, and what
//! weight k should be follows from the errors before it. That is GPTQ (<https://arxiv.org/abs/2210.17323>) without the
//! inverse of H (<https://arxiv.org/abs/2307.13304> shows that both are one). R takes the place of H.
//!
//! Goes by super-blocks of inputs, from the last to the first: the diagonal in f64, the rest by rank updates in f32.

use super::rank_update::{DEPTH, PANEL, Sign, rank_update};
use super::{Hessian, padded};
use crate::arch::{Kernel, LANES, Simd};
use crate::disjoint::{Tile, Tiles};
use crate::memory::PageSlice;
use crate::quant::integer::SUPER;
use crate::{Exec, PoolError};

/// What is added to the diagonal, in shares of its mean: as in GPTQ. Keeps errors from being put where the text at hand
/// had nothing.
const DAMPING: f32 = 0.01;

/// Why there are no statistics.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CalibrationError {
    /// An infinity or NaN is among the inputs.
    #[error("an input is not a finite number")]
    NotFinite,
    /// Cancelled, or a worker panicked.
    #[error(transparent)]
    Pool(#[from] PoolError),
}

/// What quantizing knows of a linear map's inputs.
pub struct InputStatistics {
    cols: usize,
    /// What the squared error of an input costs, after those before it were made up for: the squares of R's diagonal.
    pub(crate) importance: Vec<f32>,
    /// What goes together; None where too few rows were seen.
    pub(crate) feedback: Option<Feedback>,
}

impl InputStatistics {
    /// Of how many inputs.
    #[must_use]
    pub fn cols(&self) -> usize {
        self.cols
    }
}

/// R, in parts.
pub(crate) struct Feedback {
    size: usize,
    /// `[size][size]`; the super-blocks on the diagonal hold what is left of H.
    r: PageSlice<f32>,
    /// The inverses of R's super-blocks on the diagonal, each `[width][width]`, upper triangular.
    inverses: Vec<Vec<f32>>,
}

impl Feedback {
    /// The inverse of R's super-block `index` on the diagonal: a row for each input.
    pub fn inverse(&self, index: usize) -> std::slice::ChunksExact<'_, f32> {
        let width = (self.size - index * SUPER).min(SUPER);
        self.inverses[index].chunks_exact(width)
    }

    /// Row `input` of R, whole.
    pub fn row(&self, input: usize) -> &[f32] {
        &self.r[input * self.size..][..self.size]
    }
}

impl Hessian {
    /// Factors the sums. `None` of no rows, or where all inputs are zero.
    ///
    /// # Errors
    /// [`CalibrationError`].
    pub fn statistics(mut self, exec: &Exec<'_>) -> Result<Option<InputStatistics>, CalibrationError> {
        self.flush(exec)?;
        let (cols, size) = (self.cols, padded(self.cols));
        let diagonal: Vec<f32> = (0..size).map(|i| self.sums[i * size + i]).collect();
        let mean = diagonal.iter().map(|x| f64::from(*x)).sum::<f64>() / size as f64;
        if !mean.is_finite() {
            return Err(CalibrationError::NotFinite);
        }
        if mean < f64::from(f32::MIN_POSITIVE) {
            return Ok(None);
        }
        let scale = mean.recip() as f32;
        let diagonal = diagonal.into_iter().map(|x| x * scale);
        // Fewer rows than inputs say nothing of what goes together that others will confirm; and the fewer they are, the
        // less of which inputs are large.
        if self.rows < size as u64 {
            let share = self.rows as f32 / size as f32;
            let importance = diagonal.map(|x| share * x + (1.0 - share)).collect();
            return Ok(Some(InputStatistics { cols, importance, feedback: None }));
        }
        let Self { mut sums, pending, .. } = self;
        let scaled = Tiles::row_blocks(&mut sums, size, 1);
        exec.run(size, |row| {
            let mut row_of_sums = scaled.take(row);
            let numbers = row_of_sums.contiguous();
            numbers[row..].iter_mut().for_each(|x| *x *= scale);
            numbers[row] += DAMPING;
        })?;
        drop(scaled);
        let feedback = factor(exec, sums, size, pending)?;
        let importance = (0..size).map(|input| {
            // 1 / r, since what is in the middle of R is left as it was.
            let of_super = input % SUPER;
            feedback.inverse(input / SUPER).nth(of_super).map_or(0.0, |row| (row[of_super] * row[of_super]).recip())
        });
        Ok(Some(InputStatistics { cols, importance: importance.collect(), feedback: Some(feedback) }))
    }
}

/// Factors `h: [size][size]`, of which the upper triangle is there and whose smallest eigenvalue is [`DAMPING`] or more.
/// `panels` is room for a super-block of rows.
fn factor(
    exec: &Exec<'_>,
    mut h: PageSlice<f32>,
    size: usize,
    mut panels: PageSlice<f32>,
) -> Result<Feedback, PoolError> {
    let mut inverses = Vec::new();
    for first in (0..size).step_by(SUPER).rev() {
        let width = (size - first).min(SUPER);
        let inverse = inverse_of_diagonal(&h, size, first, width);
        let blocks = Tiles::new(&mut h, size, first..first + width, PANEL, width);
        let room = Tiles::row_blocks(&mut panels, DEPTH * PANEL, 1);
        exec.run(first / PANEL, |index| {
            let (block, panel) = (blocks.take(index), room.take(index));
            exec.isa.run(SolvePanel { inverse: &inverse, width, block, panel });
        })?;
        drop((blocks, room));
        rank_update(exec, &mut h, size, first, &panels, width, Sign::Minus)?;
        inverses.push(inverse);
    }
    inverses.reverse();
    Ok(Feedback { size, r: h, inverses })
}

/// The inverse of R's super-block on the diagonal, which begins at `first`: `[width][width]`.
fn inverse_of_diagonal(h: &[f32], size: usize, first: usize, width: usize) -> Vec<f32> {
    let mut r: Vec<f64> =
        (first..first + width).flat_map(|row| h[row * size + first..][..width].iter().map(|x| f64::from(*x))).collect();
    let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
    for k in (0..width).rev() {
        let (above, from_k) = r.split_at_mut(k * width);
        let row = &mut from_k[..width];
        let square = row[k] - dot(&row[k + 1..], &row[k + 1..]);
        // What input k does not share with those after it is no less than the damping, but for rounding.
        row[k] = square.max(f64::from(DAMPING)).sqrt();
        for other in above.chunks_exact_mut(width) {
            other[k] = (other[k] - dot(&other[k + 1..], &row[k + 1..])) / row[k];
        }
    }
    // Turned, so that what is added up lies side by side: row k is column k of the inverse.
    let mut turned = vec![0.0; width * width];
    for (k, column) in turned.chunks_exact_mut(width).enumerate() {
        column[k] = r[k * width + k].recip();
        for i in (0..k).rev() {
            let row = &r[i * width..][..width];
            column[i] = -dot(&row[i + 1..=k], &column[i + 1..=k]) / row[i];
        }
    }
    (0..width * width).map(|at| turned[at % width * width + at / width] as f32).collect()
}

/// Some rows of R above a super-block on the diagonal: what of H stands there, times the inverse of the diagonal's R.
struct SolvePanel<'a> {
    /// `[width][width]`
    inverse: &'a [f32],
    width: usize,
    /// `[PANEL][width]` of H, and then of R.
    block: Tile<'a, f32>,
    /// Gets the same, turned: `[DEPTH][PANEL]`.
    panel: Tile<'a, f32>,
}

impl Kernel for SolvePanel<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, simd: S) {
        let width = self.width;
        let mut turned = vec![[0.0; PANEL]; width];
        for row in 0..PANEL {
            turned.iter_mut().zip(&*self.block.row(row)).for_each(|(line, value)| line[row] = *value);
        }
        let lines = self.panel.contiguous().as_chunks_mut::<PANEL>().0;
        for ((k, line), inverse) in lines.iter_mut().enumerate().zip(self.inverse.chunks_exact(width)) {
            for (lane, out) in line.as_chunks_mut::<LANES>().0.iter_mut().enumerate() {
                let products = inverse[k..].iter().zip(&turned[k..]);
                let sum = products.fold(simd.splat(0.0), |sum, (factor, line)| {
                    simd.mul_add(simd.splat(*factor), simd.load(&line.as_chunks().0[lane]), sum)
                });
                simd.store(sum, out);
            }
        }
        for row in 0..PANEL {
            self.block.row(row).iter_mut().zip(&*lines).for_each(|(value, line)| *value = line[row]);
        }
    }
}
