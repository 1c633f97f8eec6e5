//! GPTQ: quantization that minimizes the error of outputs on calibration data (<https://arxiv.org/abs/2210.17323>).
//!
//! Weights are quantized input by input, and later weights compensate the error of earlier ones, as given by the factor R
//! of the Hessian ([`HessianFactor`]). When a super-block is reached, its weights are first replaced by their targets
//! after all earlier errors; its block scale is searched as without calibration. The sub-scale of a group is chosen when
//! the group is reached: several candidates are tried, each with its codes and the errors within the group.
//!
//! Sixteen rows are quantized at once, one per lane.

use std::marker::PhantomData;

use super::integer::{BLOCK, BLOCK_GROUPS, BlockScales, GROUP, IntegerFormat, SUPER};
use super::quantize::{Grid, Rotate, not_finite};
use crate::arch::{ByteLine, Isa, Kernel, LANES, Simd};
use crate::hessian::feedback::{Column, Feedback, correct, subtract};
use crate::hessian::{HessianFactor, InputStatistics};

/// Panel during quantization.
pub(crate) struct CalibratedPanel<'a> {
    /// Rotated weights.
    feedback: Feedback,
    block_scales: &'a mut [BlockScales],
    /// Output lines, initially zero.
    lines: &'a mut [ByteLine],
    /// Sum of the squares of `e R` of each row.
    pub loss: Column,
}

impl<'a> CalibratedPanel<'a> {
    /// Creates a panel from `rows: [16, cols]`.
    pub fn new(isa: Isa, rows: &[f32], block_scales: &'a mut [BlockScales], lines: &'a mut [ByteLine]) -> Self {
        let mut feedback = Feedback::new(rows);
        isa.run(Rotate(&mut feedback.weights));
        Self { feedback, block_scales, lines, loss: [0.0; LANES] }
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
    pub format: PhantomData<F>,
}

impl<F: IntegerFormat> Kernel for PackCalibrated<'_, '_, F> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let InputStatistics { importance, factor, .. } = self.statistics;
        for (index, importance) in importance.chunks(SUPER).enumerate() {
            let block = SuperBlock { grid: Grid::<S, F>::new(simd), index, importance, factor: factor.as_ref() };
            // A loop rather than a closure: closures are compiled without the instruction set unless they are inlined.
            for panel in &mut *self.panels {
                block.quantize(panel);
            }
            if let Some(factor) = factor {
                correct(simd, factor, index, self.panels);
            }
        }
    }
}

/// Super-block during quantization.
struct SuperBlock<'a, S: Simd, F> {
    grid: Grid<S, F>,
    index: usize,
    /// Weight of the squared error of each input.
    importance: &'a [f32],
    factor: Option<&'a HessianFactor>,
}

/// Quantized group of inputs.
struct QuantizedGroup<S: Simd> {
    codes: [S::F32; GROUP],
    /// Elements of `e R` for the inputs of the group.
    residuals: [S::F32; GROUP],
    /// Sum of the squares of the residuals.
    loss: S::F32,
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
            let (scale, coded) = self.group(now, importance, &rows, block_scale);
            simd.store(simd.add(simd.load(&panel.loss), coded.loss), &mut panel.loss);
            if factor.is_some() {
                subtract(simd, &mut targets[inputs.end..], &coded.residuals, &rows.map(|row| &row[GROUP..]));
            }
            let mut codes = [[0; LANES]; GROUP];
            let of_group = coded.codes.into_iter().zip(&mut codes).zip(&mut weights[inputs]);
            for ((code, narrow), weight) in of_group {
                simd.store_i8(simd.to_i32(code), narrow);
                let error = simd.sub(simd.load(weight), simd.mul(code, simd.mul(scale, block_scale)));
                simd.store(error, weight);
            }
            let mut scales = [0; LANES];
            simd.store_i8(simd.to_i32(scale), &mut scales);
            let block = first / BLOCK + group / BLOCK_GROUPS;
            F::store(panel.lines, block, group % BLOCK_GROUPS, &codes, &scales.map(i8::cast_unsigned));
        }
    }

    /// Returns the sub-scale of a group with the least loss, and the quantized group. `rows` are the rows of the inverse
    /// of R, from the first input of the group on.
    #[inline(always)]
    fn group(
        &self,
        targets: &[Column; GROUP],
        importance: &[f32; GROUP],
        rows: &[&[f32]; GROUP],
        block_scale: S::F32,
    ) -> (S::F32, QuantizedGroup<S>) {
        let grid = &self.grid;
        let simd = grid.simd;
        let [ideal, ..] = grid.ideal_scales(std::slice::from_ref(targets), std::slice::from_ref(importance));
        let nearest = simd.round(grid.clamp_scale(simd.mul(ideal, grid.inverse(block_scale))));
        let mut best_scale = nearest;
        let mut best = self.code(targets, importance, rows, simd.mul(nearest, block_scale));
        if const { F::SCALES[0] != F::SCALES[1] } {
            for offset in [-1.0, 1.0] {
                let scale = grid.clamp_scale(simd.add(nearest, simd.splat(offset)));
                let coded = self.code(targets, importance, rows, simd.mul(scale, block_scale));
                let least = best.loss;
                best_scale = simd.select_greater(least, coded.loss, scale, best_scale);
                best.loss = simd.select_greater(least, coded.loss, coded.loss, least);
                for k in 0..GROUP {
                    best.codes[k] = simd.select_greater(least, coded.loss, coded.codes[k], best.codes[k]);
                    best.residuals[k] = simd.select_greater(least, coded.loss, coded.residuals[k], best.residuals[k]);
                }
            }
        }
        (best_scale, best)
    }

    /// Quantizes a group with the given scale.
    #[inline(always)]
    fn code(
        &self,
        targets: &[Column; GROUP],
        importance: &[f32; GROUP],
        rows: &[&[f32]; GROUP],
        scale: S::F32,
    ) -> QuantizedGroup<S> {
        let grid = &self.grid;
        let simd = grid.simd;
        let inverse = grid.inverse(scale);
        let mut targets = simd.load_vectors(targets);
        let zero = simd.splat(0.0);
        let mut coded = QuantizedGroup { codes: [zero; GROUP], residuals: [zero; GROUP], loss: zero };
        for k in 0..GROUP {
            let code = grid.code(targets[k], inverse);
            let error = simd.sub(targets[k], simd.mul(code, scale));
            let residual = simd.mul(error, simd.splat(importance[k].sqrt()));
            if self.factor.is_some() {
                for j in k + 1..GROUP {
                    targets[j] = simd.sub(targets[j], simd.mul(residual, simd.splat(rows[k][j])));
                }
            }
            coded.loss = simd.add(coded.loss, simd.mul(residual, residual));
            (coded.codes[k], coded.residuals[k]) = (code, residual);
        }
        coded
    }
}
