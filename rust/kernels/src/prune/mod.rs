//! Pruning: setting the weights of a matrix to zero that matter least. The others are kept as numbers, or quantized in the
//! same sweep ([`CodeGrid`]), so that later weights compensate both errors.
//!
//! The statistics of the inputs decide what happens (one sweep over the inputs of each row):
//! - With the factor R of the Hessian of the inputs, it is SparseGPT (<https://arxiv.org/abs/2301.00774>). When a group of
//!   inputs is reached, its weights are first replaced by their targets after all earlier errors. Those with the least
//!   `(target * R_kk)^2`, the squared error of the outputs that remains after later weights compensated for it, become
//!   zero. This is the criterion of the paper, `w^2 / [H^-1]_kk`, in terms of R.
//! - With the norms of the inputs only, it is Wanda (<https://arxiv.org/abs/2306.11695>): weights with the least magnitude
//!   times norm become zero, and the others stay as they are.
//! - Without statistics, weights with the least magnitude become zero.
//!
//! Weights are compared within a group of inputs of one row, so that every row has the same number of zeros. Sixteen rows
//! are pruned at once, one per lane; later inputs are corrected as in GPTQ ([`feedback`](crate::hessian::feedback)).

mod grid;
mod sparsity;

pub use grid::CodeGrid;
pub use sparsity::{Sparsity, SparsityError};

use half::f16;

use crate::arch::{Kernel, LANES, Simd};
use crate::disjoint::Tiles;
use crate::hessian::feedback::{Column, Feedback, correct, subtract};
use crate::hessian::{Basis, HessianFactor, InputStatistics};
use crate::matrix::{MAX_TASK_PANELS, Source, TASKS_PER_THREAD};
use crate::memory::{AllocError, PageSlice};
use crate::quant::integer::{self, BLOCK, SUPER};
use crate::{Exec, PackError, RowSource};

/// Number of inputs that are pruned together; their errors correct later inputs at once.
const STEP: usize = 4;

/// Matrix in f32, `[rows, cols]`, some of whose weights were set to zero.
///
/// # Examples
/// ```
/// use std::num::NonZeroUsize;
///
/// use ferrule_kernels::arch::Isa;
/// use ferrule_kernels::{Cancel, Exec, Pool, PrunedMatrix, RowSource, Sparsity};
///
/// struct Row;
///
/// impl RowSource for Row {
///     fn read_row(&self, _: usize, out: &mut [f32]) {
///         out.copy_from_slice(&[0.5, -3.0, 2.0, 1.0]);
///     }
/// }
///
/// let (pool, cancel) = (Pool::new(NonZeroUsize::MIN), Cancel::new());
/// let exec = Exec { isa: Isa::best(), pool: &pool, cancel: &cancel };
/// let pruned = PrunedMatrix::new(&exec, 1, 4, &Row, Sparsity::TWO_OF_FOUR, None, None)?;
/// let mut row = [1.0; 4];
/// pruned.read_row(0, &mut row);
/// assert_eq!(row, [0.0, -3.0, 2.0, 0.0]);
/// # Ok::<(), ferrule_kernels::PackError>(())
/// ```
pub struct PrunedMatrix {
    rows: usize,
    cols: usize,
    /// `[rows padded to panels][cols]`
    weights: PageSlice<f32>,
    /// Grid of the weights, and scales `[rows padded to panels][groups of inputs]`.
    scales: Option<(CodeGrid, PageSlice<f32>)>,
}

impl PrunedMatrix {
    /// Prunes the rows of `source`, and rounds the other weights to `grid` if there is one. Exactly [`Sparsity::zeros`]
    /// weights of a row are set to zero, besides those that are rounded to zero. A weight that is not finite is kept
    /// while there are finite ones to prune, and the kept weights that depend on it become NaN: with the factor of a
    /// Hessian those after it in its row, and with a grid those that share its scale.
    ///
    /// # Errors
    /// [`PackError`] if allocation fails, `exec` was cancelled, or the source panicked.
    ///
    /// # Panics
    /// If the sparsity or the grid does not fit the columns, or the statistics have another number of inputs or rotated
    /// ones.
    pub fn new(
        exec: &Exec<'_>,
        rows: usize,
        cols: usize,
        source: &dyn RowSource,
        sparsity: Sparsity,
        statistics: Option<&InputStatistics>,
        grid: Option<CodeGrid>,
    ) -> Result<Self, PackError> {
        assert!(sparsity.fits(cols), "{cols} columns are not a multiple of the inputs of a group for {sparsity}");
        if let Some(statistics) = statistics {
            assert_eq!(statistics.cols(), cols, "statistics must have as many inputs as the matrix");
            assert_eq!(statistics.basis, Basis::Plain, "pruned weights are not rotated");
        }
        let panels = rows.div_ceil(LANES);
        let length = (panels * LANES).checked_mul(cols).ok_or(AllocError { bytes: u64::MAX })?;
        let mut weights = PageSlice::zeroed_in_huge_pages(length)?;
        let groups = grid.map_or(0, |grid| cols / grid.inputs);
        assert!(
            grid.is_none_or(|grid| cols == groups * grid.inputs),
            "{cols} columns are not whole groups of {grid:?}"
        );
        let mut scales = PageSlice::zeroed(panels * LANES * groups)?;
        let task_panels = (panels / (TASKS_PER_THREAD * exec.pool.threads())).clamp(1, MAX_TASK_PANELS);
        let tiles = Tiles::row_blocks(&mut weights, LANES * cols, task_panels);
        let scale_tiles = Tiles::row_blocks(&mut scales, LANES * groups, task_panels);
        exec.run(tiles.len(), |index| {
            let mut tile = tiles.take(index);
            let first = tile.rows().start;
            let values = tile.contiguous();
            let numbers = |panel| Source { source, cols }.numbers((first + panel) * LANES..rows);
            let mut panels: Vec<_> =
                (0..values.len() / (LANES * cols)).map(|panel| Panel::new(&numbers(panel))).collect();
            exec.isa.run(Prune { cols, sparsity, statistics, grid, panels: &mut panels });
            for (panel, values) in panels.iter().zip(values.chunks_exact_mut(LANES * cols)) {
                transpose(&panel.values, values);
            }
            if groups > 0 {
                let mut tile = scale_tiles.take(index);
                for (panel, scales) in panels.iter().zip(tile.contiguous().chunks_exact_mut(LANES * groups)) {
                    transpose(&panel.scales, scales);
                }
            }
        })?;
        drop((tiles, scale_tiles));
        Ok(Self { rows, cols, weights, scales: grid.map(|grid| (grid, scales)) })
    }
}

impl PrunedMatrix {
    /// Returns the number of rows.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.rows
    }
}

impl RowSource for PrunedMatrix {
    fn read_row(&self, row: usize, out: &mut [f32]) {
        out.copy_from_slice(&self.weights[row * self.cols..][..self.cols]);
    }

    /// Writes blocks of the grid: a little-endian f16 scale, and one signed byte for the code of each input.
    ///
    /// # Panics
    /// If the matrix has no grid, or rows of another number of bytes.
    fn read_stored(&self, first: usize, row_bytes: usize, out: &mut [u8]) {
        let (grid, scales) = self.scales.as_ref().expect("a pruned matrix that is quantized");
        let block_bytes = size_of::<f16>() + grid.inputs;
        assert_eq!(row_bytes, self.cols / grid.inputs * block_bytes, "bytes of a row");
        let weights = self.weights[first * self.cols..].chunks_exact(grid.inputs);
        let scales = &scales[first * self.cols / grid.inputs..];
        for ((block, weights), scale) in out.chunks_exact_mut(block_bytes).zip(weights).zip(scales) {
            let (scale_bytes, codes) = block.split_at_mut(size_of::<f16>());
            scale_bytes.copy_from_slice(&f16::from_f32(*scale).to_le_bytes());
            for (code, weight) in codes.iter_mut().zip(weights) {
                // Weights are exact multiples of the scale. A code of a zero or invalid scale is 0.
                *code = ((weight / scale).round() as i8).cast_unsigned();
            }
        }
    }
}

/// Writes columns as `rows: [16, cols]`.
fn transpose(columns: &[Column], rows: &mut [f32]) {
    for (lane, row) in rows.chunks_exact_mut(rows.len() / LANES).enumerate() {
        row.iter_mut().zip(columns).for_each(|(value, column)| *value = column[lane]);
    }
}

/// Sixteen rows while they are pruned.
struct Panel {
    feedback: Feedback,
    /// Pruned weights.
    values: Vec<Column>,
    /// Scale of each group of inputs, if they are quantized.
    scales: Vec<Column>,
}

impl AsMut<Feedback> for Panel {
    fn as_mut(&mut self) -> &mut Feedback {
        &mut self.feedback
    }
}

impl Panel {
    /// Creates a panel from `rows: [16, cols]`.
    fn new(rows: &[f32]) -> Self {
        let feedback = Feedback::new(rows);
        let values = vec![[0.0; LANES]; feedback.weights.len()];
        Self { feedback, values, scales: Vec::new() }
    }
}

/// Kernel that prunes several panels, which share cached parts of R.
struct Prune<'a> {
    cols: usize,
    sparsity: Sparsity,
    statistics: Option<&'a InputStatistics>,
    grid: Option<CodeGrid>,
    panels: &'a mut [Panel],
}

impl Kernel for Prune<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Self { cols, sparsity, statistics, grid, panels } = self;
        let factor = statistics.and_then(|statistics| statistics.factor.as_ref());
        let size = integer::padded(cols);
        let ones = vec![1.0; size];
        let importance = statistics.map_or(&ones, |statistics| &statistics.importance);
        for (index, importance) in importance.chunks(SUPER).enumerate() {
            let block = SuperBlock { simd, index, cols, sparsity, grid, importance, factor };
            // A loop rather than a closure: closures are compiled without the instruction set unless they are inlined.
            for panel in &mut *panels {
                block.prune(panel);
            }
            if let Some(factor) = factor {
                correct(simd, factor, index, panels);
            }
        }
    }
}

/// Super-block during pruning.
struct SuperBlock<'a, S: Simd> {
    simd: S,
    index: usize,
    /// Number of inputs of the matrix.
    cols: usize,
    sparsity: Sparsity,
    grid: Option<CodeGrid>,
    /// Weight of the squared error of each input.
    importance: &'a [f32],
    factor: Option<&'a HessianFactor>,
}

impl<S: Simd> SuperBlock<'_, S> {
    /// Prunes the super-block of a panel and replaces its weights by their errors.
    #[inline(always)]
    fn prune(&self, panel: &mut Panel) {
        let Self { simd, index, cols, sparsity, grid, importance, factor } = *self;
        let (first, width) = (index * SUPER, importance.len());
        let mut targets = [[0.0; LANES]; SUPER];
        let targets = &mut targets[..width];
        panel.feedback.targets(simd, factor, index, targets);
        let Panel { feedback: Feedback { weights, .. }, values, scales } = panel;
        let weights = &mut weights[first..first + width];
        let values = &mut values[first..first + width];
        // 1 for weights that are kept, 0 for others and for padding.
        let mut kept = [[0.0; LANES]; SUPER];
        let end = width.min(cols - first);
        let (mut scale, mut inverse) = (simd.splat(1.0), simd.splat(1.0));
        for start in (0..end).step_by(STEP) {
            // A scale covers several groups of 2:4, which are chosen again when they are reached.
            let scaled = grid.map(|grid| grid.inputs).filter(|inputs| start.is_multiple_of(*inputs)).unwrap_or(0);
            for group in (start..end.min(start + scaled.max(1))).step_by(sparsity.group) {
                if group.is_multiple_of(sparsity.group) {
                    let inputs = group..end.min(group + sparsity.group);
                    choose(&targets[inputs.clone()], &importance[inputs.clone()], sparsity, &mut kept[inputs]);
                }
            }
            if let Some(grid) = grid.filter(|_| scaled > 0) {
                let inputs = start..start + scaled;
                scale = grid.scale(simd, &targets[inputs.clone()], &kept[inputs.clone()], &importance[inputs]);
                inverse = grid::inverse(simd, scale);
                scales.push(simd.to_array(scale));
            }
            let rows: [&[f32]; STEP] = match factor {
                Some(factor) => {
                    let mut rows = factor.inverse(index).skip(start);
                    std::array::from_fn(|_| rows.next().map_or(&[][..], |row| &row[start..]))
                }
                None => [&[]; STEP],
            };
            let now: &[Column; STEP] = targets[start..].first_chunk().expect("whole blocks");
            let mut now = simd.load_vectors(now);
            let mut residuals = [simd.splat(0.0); STEP];
            for k in 0..STEP {
                let keeps = simd.load(&kept[start + k]);
                let rounded = match grid {
                    Some(grid) => simd.mul(grid.code(simd, now[k], inverse), scale),
                    None => now[k],
                };
                let value = simd.select_greater(keeps, simd.splat(0.5), rounded, simd.splat(0.0));
                residuals[k] = simd.mul(simd.sub(now[k], value), simd.splat(importance[start + k].sqrt()));
                if factor.is_some() {
                    for j in k + 1..STEP {
                        now[j] = simd.sub(now[j], simd.mul(residuals[k], simd.splat(rows[k][j])));
                    }
                }
                simd.store(value, &mut values[start + k]);
            }
            if factor.is_some() {
                subtract(simd, &mut targets[start + STEP..], &residuals, &rows.map(|row| &row[STEP..]));
            }
        }
        for (weight, value) in weights.iter_mut().zip(&*values) {
            simd.store(simd.sub(simd.load(weight), simd.load(value)), weight);
        }
    }
}

/// Sets `kept` to 1 for the weights of a group that are kept: in each row, all but those with the least scores. Of equal
/// scores the first are pruned. A score that is NaN, of a weight that is not finite, is the greatest.
fn choose(targets: &[Column], importance: &[f32], sparsity: Sparsity, kept: &mut [Column]) {
    let zeros = sparsity.zeros_of_group(targets.len());
    kept.fill([1.0; LANES]);
    if zeros == 0 {
        return;
    }
    let mut order = [0; BLOCK];
    let order = &mut order[..targets.len()];
    for lane in 0..LANES {
        let score = |input: usize| {
            let error = targets[input][lane].powi(2) * importance[input];
            if error.is_nan() { f32::INFINITY } else { error }
        };
        order.iter_mut().zip(0..).for_each(|(place, input)| *place = input);
        order.select_nth_unstable_by(zeros - 1, |a, b| score(*a).total_cmp(&score(*b)).then(a.cmp(b)));
        order[..zeros].iter().for_each(|input| kept[*input][lane] = 0.0);
    }
}
