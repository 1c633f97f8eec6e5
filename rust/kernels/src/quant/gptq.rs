//! GPTQ: quantization that minimizes the error of outputs on calibration data (<https://arxiv.org/abs/2210.17323>).
//!
//! Weights are quantized input by input, and later weights compensate the error of earlier ones, as given by the factor R
//! of the Hessian ([`HessianFactor`]). When a super-block is reached, its weights are first replaced by their targets
//! after all earlier errors; its block scale is searched as without calibration. The sub-scale of a group is chosen when
//! the group is reached: several candidates are tried, each with its codes and the errors within the group. Formats with
//! sub-scales are then improved by [`descent`](super::descent).
//!
//! Sixteen rows are quantized at once, one per lane.

use std::marker::PhantomData;

use super::descent;
use super::integer::{BLOCK_GROUPS, BlockScales, GROUP, IntegerFormat, SUPER};
use super::quantize::{Grid, Rotate, not_finite};
use crate::arch::{ByteLine, Isa, Kernel, LANES, Simd};
use crate::hessian::feedback::{Column, Feedback, correct, subtract};
use crate::hessian::{HessianFactor, InputStatistics};

/// Panel during quantization.
pub(crate) struct CalibratedPanel<'a> {
    /// Rotated weights.
    pub(super) feedback: Feedback,
    pub(super) block_scales: &'a mut [BlockScales],
    /// Output lines, initially zero.
    pub(super) lines: &'a mut [ByteLine],
    pub(super) groups: Vec<CodedGroup>,
    /// Elements of `e R`, `[input][row]`.
    pub(super) residuals: Vec<Column>,
    /// Sum of the squares of `e R` of each row.
    pub loss: Column,
}

/// Bytes of a panel for each input.
pub(crate) const PANEL_INPUT_BYTES: usize = 3 * size_of::<Column>() + size_of::<CodedGroup>() / GROUP;

/// Codes and sub-scales of a group of inputs of sixteen rows.
#[derive(Clone)]
pub(super) struct CodedGroup {
    /// Codes, `[input][row]`.
    pub codes: [Column; GROUP],
    pub scales: Column,
}

impl<'a> CalibratedPanel<'a> {
    /// Creates a panel from `rows: [16, cols]`.
    pub fn new(isa: Isa, rows: &[f32], block_scales: &'a mut [BlockScales], lines: &'a mut [ByteLine]) -> Self {
        let mut feedback = Feedback::new(rows);
        isa.run(Rotate(&mut feedback.weights));
        let size = feedback.weights.len();
        let zero = CodedGroup { codes: [[0.0; LANES]; GROUP], scales: [0.0; LANES] };
        let (groups, residuals) = (vec![zero; size / GROUP], vec![[0.0; LANES]; size]);
        Self { feedback, block_scales, lines, groups, residuals, loss: [0.0; LANES] }
    }

    /// Returns the rotated weights, `[inputs][row]`.
    pub fn weights_mut(&mut self) -> &mut [Column] {
        &mut self.feedback.weights
    }

    /// Stores codes and sub-scales in the output lines, and sums up the loss.
    #[inline(always)]
    fn finish<S: Simd, F: IntegerFormat>(&mut self, simd: S) {
        let mut narrow = [0; LANES];
        for (index, group) in self.groups.iter().enumerate() {
            let mut codes = [[0; LANES]; GROUP];
            for (codes, column) in codes.iter_mut().zip(&group.codes) {
                simd.store_i8(simd.to_i32(simd.load(column)), codes);
            }
            simd.store_i8(simd.to_i32(simd.load(&group.scales)), &mut narrow);
            let scales = narrow.map(i8::cast_unsigned);
            F::store(self.lines, index / BLOCK_GROUPS, index % BLOCK_GROUPS, &codes, &scales);
        }
        self.sum_loss(simd);
    }

    /// Sums up the loss of each row.
    #[inline(always)]
    pub(super) fn sum_loss<S: Simd>(&mut self, simd: S) {
        let mut loss = simd.splat(0.0);
        for column in &self.residuals {
            let residual = simd.load(column);
            loss = simd.add(loss, simd.mul(residual, residual));
        }
        simd.store(loss, &mut self.loss);
    }
}

impl AsMut<Feedback> for CalibratedPanel<'_> {
    fn as_mut(&mut self) -> &mut Feedback {
        &mut self.feedback
    }
}

/// Kernel that quantizes several panels, which share cached parts of R.
pub(crate) struct PackCalibrated<'a, 'p, F> {
    pub statistics: &'a InputStatistics,
    pub panels: &'a mut [CalibratedPanel<'p>],
    /// Number of sweeps of the descent.
    pub sweeps: usize,
    /// Returns whether to leave the panels incomplete. Called for each super-block and, in a sweep, for each group.
    pub is_cancelled: &'a dyn Fn() -> bool,
    pub format: PhantomData<F>,
}

impl<F: IntegerFormat> Kernel for PackCalibrated<'_, '_, F> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Self { statistics: InputStatistics { importance, factor, .. }, panels, sweeps, is_cancelled, .. } = self;
        let grid = Grid::<S, F>::new(simd);
        for (index, importance) in importance.chunks(SUPER).enumerate() {
            if is_cancelled() {
                return;
            }
            let block = SuperBlock { grid: &grid, index, importance, factor: factor.as_ref() };
            // A loop rather than a closure: closures are compiled without the instruction set unless they are inlined.
            for panel in &mut *panels {
                block.quantize(panel);
            }
            if let Some(factor) = factor {
                correct(simd, factor, index, panels);
            }
        }
        if let Some(factor) = factor
            && const { F::SCALES[0] != F::SCALES[1] }
        {
            descent::improve(&grid, factor, panels, sweeps, is_cancelled);
        }
        for panel in panels {
            panel.finish::<S, F>(simd);
        }
    }
}

/// Super-block during quantization.
struct SuperBlock<'a, S: Simd, F> {
    grid: &'a Grid<S, F>,
    index: usize,
    /// Weight of the squared error of each input.
    importance: &'a [f32],
    factor: Option<&'a HessianFactor>,
}

/// Cost of errors e in the weights of a group: the squares of `e R`, for an upper triangular R.
pub(super) struct GroupCost<'a> {
    /// Squares of R's diagonal.
    pub importance: [f32; GROUP],
    /// Rows of the inverse of R, each from the first input of the group on. Empty if R is diagonal.
    pub inverse: [&'a [f32]; GROUP],
}

/// Quantized group of inputs.
pub(super) struct QuantizedGroup<S: Simd> {
    pub scale: S::F32,
    pub codes: [S::F32; GROUP],
    /// Elements of `e R` for the inputs of the group.
    residuals: [S::F32; GROUP],
    /// Sum of the squares of the residuals.
    pub loss: S::F32,
}

impl<S: Simd> QuantizedGroup<S> {
    /// Creates a group of the given codes without errors.
    #[inline(always)]
    pub fn exact(simd: S, scale: S::F32, codes: [S::F32; GROUP]) -> Self {
        let zero = simd.splat(0.0);
        Self { scale, codes, residuals: [zero; GROUP], loss: zero }
    }

    /// Replaces the rows that have less loss in `other`.
    #[inline(always)]
    pub fn replace_worse(&mut self, simd: S, other: &Self) {
        let least = self.loss;
        self.scale = simd.select_greater(least, other.loss, other.scale, self.scale);
        self.loss = simd.select_greater(least, other.loss, other.loss, least);
        for k in 0..GROUP {
            self.codes[k] = simd.select_greater(least, other.loss, other.codes[k], self.codes[k]);
            self.residuals[k] = simd.select_greater(least, other.loss, other.residuals[k], self.residuals[k]);
        }
    }
}

impl<S: Simd, F: IntegerFormat> SuperBlock<'_, S, F> {
    /// Quantizes the super-block of a panel and replaces its weights by their errors.
    #[inline(always)]
    fn quantize(&self, panel: &mut CalibratedPanel<'_>) {
        let Self { grid, index, importance, factor } = self;
        let simd = grid.simd;
        let (first, width) = (index * SUPER, importance.len());
        let importance = importance.as_chunks::<GROUP>().0;
        let mut targets = [[0.0; LANES]; SUPER];
        let targets = &mut targets[..width];
        panel.feedback.targets(simd, *factor, *index, targets);
        let weights = &mut panel.feedback.weights[first..first + width];
        let residuals = &mut panel.residuals[first..first + width];
        let coded_groups = &mut panel.groups[first / GROUP..(first + width) / GROUP];
        let groups = targets.as_chunks::<GROUP>().0;
        let (block_scale, _) =
            grid.block_scale_and_sub_scales(groups, &grid.ideal_scales(groups, importance), importance);
        simd.store_f16(simd.add(block_scale, not_finite(simd, groups)), &mut panel.block_scales[*index]);

        for (group, importance) in importance.iter().enumerate() {
            let inputs = group * GROUP..(group + 1) * GROUP;
            let now: &[Column; GROUP] = targets[inputs.start..].first_chunk().expect("a group");
            let rows: [&[f32]; GROUP] = match factor {
                Some(factor) => {
                    let mut rows = factor.inverse(*index).skip(inputs.start);
                    std::array::from_fn(|_| rows.next().map_or(&[][..], |row| &row[inputs.start..]))
                }
                None => [&[]; GROUP],
            };
            let cost = GroupCost { importance: *importance, inverse: rows };
            let best = self.group(now, &cost, block_scale);
            if factor.is_some() {
                subtract(simd, &mut targets[inputs.end..], &best.residuals, &rows.map(|row| &row[GROUP..]));
            }
            let coded = &mut coded_groups[group];
            simd.store(best.scale, &mut coded.scales);
            let weights = weights[inputs.clone()].iter_mut().zip(&mut coded.codes);
            for (k, ((weight, code), residual)) in weights.zip(&mut residuals[inputs]).enumerate() {
                simd.store(best.codes[k], code);
                simd.store(best.residuals[k], residual);
                let error = simd.sub(simd.load(weight), simd.mul(best.codes[k], simd.mul(best.scale, block_scale)));
                simd.store(error, weight);
            }
        }
    }

    /// Quantizes a group with the sub-scale of the least loss.
    #[inline(always)]
    fn group(&self, targets: &[Column; GROUP], cost: &GroupCost<'_>, block_scale: S::F32) -> QuantizedGroup<S> {
        let grid = &self.grid;
        let simd = grid.simd;
        let importance = std::slice::from_ref(&cost.importance);
        let [ideal, ..] = grid.ideal_scales(std::slice::from_ref(targets), importance);
        let nearest = simd.round(grid.clamp_scale(simd.mul(ideal, grid.inverse(block_scale))));
        let mut best = grid.quantize_group(targets, cost, nearest, block_scale);
        if const { F::SCALES[0] != F::SCALES[1] } {
            for offset in [-1.0, 1.0] {
                let scale = grid.clamp_scale(simd.add(nearest, simd.splat(offset)));
                best.replace_worse(simd, &grid.quantize_group(targets, cost, scale, block_scale));
            }
        }
        best
    }
}

impl<S: Simd, F: IntegerFormat> Grid<S, F> {
    /// Quantizes a group with the given scales, input by input.
    #[inline(always)]
    pub(super) fn quantize_group(
        &self,
        targets: &[Column; GROUP],
        cost: &GroupCost<'_>,
        scale: S::F32,
        block_scale: S::F32,
    ) -> QuantizedGroup<S> {
        let simd = self.simd;
        let step = simd.mul(scale, block_scale);
        let inverse = self.inverse(step);
        let mut targets = simd.load_vectors(targets);
        let mut coded = QuantizedGroup::exact(simd, scale, [simd.splat(0.0); GROUP]);
        for k in 0..GROUP {
            let code = self.code(targets[k], inverse);
            let error = simd.sub(targets[k], simd.mul(code, step));
            let residual = simd.mul(error, simd.splat(cost.importance[k].sqrt()));
            for (target, factor) in targets.iter_mut().zip(cost.inverse[k]).skip(k + 1) {
                *target = simd.sub(*target, simd.mul(residual, simd.splat(*factor)));
            }
            coded.loss = simd.add(coded.loss, simd.mul(residual, residual));
            (coded.codes[k], coded.residuals[k]) = (code, residual);
        }
        coded
    }
}
