//! From floating-point weights to codes, where it is known what errors cost (<https://arxiv.org/abs/2210.17323>).
//!
//! Weights are quantized input by input, and what each loses is made up for by those that follow: the error of the
//! output is what counts, not that of the weights. The factor R of the inputs' Hessian says how ([`Feedback`]). When a
//! super-block is reached, its weights are first set to what is best after all errors before it; its step is searched
//! for as without statistics. A group's sub-scale is chosen when it is reached: several are tried, each with the codes
//! and the errors that it leads to within the group.
//!
//! Sixteen rows are done side by side, a row a lane.

use std::marker::PhantomData;

use super::integer::{self, BLOCK, BLOCK_GROUPS, GROUP, IntegerFormat, SUPER, Steps};
use super::quantize::{Grid, Rotate, not_finite};
use crate::arch::{ByteLine, Isa, Kernel, LANES, Simd};
use crate::hessian::{Feedback, InputStatistics};

/// Later inputs that are corrected at a time: sums in registers.
const CORRECTED: usize = 8;

/// Later inputs whose numbers in R are copied together: of a row so many lie side by side. Rows are often a power of two
/// apart and share their place in the cache.
const STRIP: usize = 8 * CORRECTED;

/// Sixteen rows at one input.
type Column = [f32; LANES];

/// Sixteen rows that are quantized.
pub(crate) struct CalibratedPanel<'a> {
    /// The weights, rotated, in whole blocks of inputs.
    weights: Vec<Column>,
    /// For each input what the errors before it take off: `-e R`.
    taken: Vec<Column>,
    steps: &'a mut [Steps],
    /// Zero so far.
    lines: &'a mut [ByteLine],
}

impl<'a> CalibratedPanel<'a> {
    /// Of `rows: [16, cols]`.
    pub fn new(isa: Isa, rows: &[f32], steps: &'a mut [Steps], lines: &'a mut [ByteLine]) -> Self {
        let cols = rows.len() / LANES;
        let mut weights = vec![[0.0; LANES]; integer::blocks(cols) * BLOCK];
        for (row, values) in rows.chunks_exact(cols).enumerate() {
            weights.iter_mut().zip(values).for_each(|(column, value)| column[row] = *value);
        }
        isa.run(Rotate(weights.as_chunks_mut().0));
        let taken = vec![[0.0; LANES]; weights.len()];
        Self { weights, taken, steps, lines }
    }
}

/// Quantizes panels: several, since what they read of R comes into the cache once for all of them.
pub(crate) struct PackCalibrated<'a, 'p, F> {
    pub statistics: &'a InputStatistics,
    pub panels: &'a mut [CalibratedPanel<'p>],
    pub format: PhantomData<F>,
}

impl<F: IntegerFormat> Kernel for PackCalibrated<'_, '_, F> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let InputStatistics { importance, feedback, .. } = self.statistics;
        for (index, importance) in importance.chunks(SUPER).enumerate() {
            let block = SuperBlock { grid: Grid::new::<F>(simd), index, importance, feedback: feedback.as_ref() };
            // Not in a closure, which would be compiled for any machine.
            for panel in &mut *self.panels {
                block.quantize::<F>(panel);
            }
            if let Some(feedback) = feedback {
                correct(simd, feedback, index, self.panels);
            }
        }
    }
}

/// What is known of a super-block.
struct SuperBlock<'a, S: Simd> {
    grid: Grid<S>,
    index: usize,
    /// Of each of its inputs.
    importance: &'a [f32],
    feedback: Option<&'a Feedback>,
}

/// A group of inputs that was quantized.
struct Coded<S: Simd> {
    codes: [S::F32; GROUP],
    /// What the codes leave of `e R`.
    left: [S::F32; GROUP],
    /// The sum of the squares of that.
    loss: S::F32,
}

impl<S: Simd> SuperBlock<'_, S> {
    /// Quantizes the super-block of a panel; its weights become their errors.
    #[inline(always)]
    fn quantize<F: IntegerFormat>(&self, panel: &mut CalibratedPanel<'_>) {
        let Self { grid, index, importance, feedback } = self;
        let simd = grid.simd;
        let (first, width) = (index * SUPER, importance.len());
        let weights = &mut panel.weights[first..first + width];
        let importance = importance.as_chunks::<GROUP>().0;

        let mut targets = [[0.0; LANES]; SUPER];
        let targets = &mut targets[..width];
        targets.copy_from_slice(weights);
        if let Some(feedback) = feedback {
            let given = panel.taken[first..].iter().zip(feedback.inverse(*index));
            for (k, (taken, inverse)) in given.enumerate() {
                subtract(simd, &mut targets[k..], &[simd.load(taken)], &[&inverse[k..]]);
            }
        }
        let groups = targets.as_chunks::<GROUP>().0;
        let (step, _) = grid.step_and_scales::<F>(groups, &grid.ideal_scales(groups, importance), importance);
        simd.store_f16(simd.add(step, not_finite(simd, groups)), &mut panel.steps[*index]);

        for (group, importance) in importance.iter().enumerate() {
            let inputs = group * GROUP..(group + 1) * GROUP;
            let now: &[Column; GROUP] = targets[inputs.start..].first_chunk().expect("a group");
            let rows: [&[f32]; GROUP] = match feedback {
                Some(feedback) => {
                    let mut rows = feedback.inverse(*index).skip(inputs.start);
                    std::array::from_fn(|_| rows.next().map_or(&[][..], |row| &row[inputs.start..]))
                }
                None => [&[]; GROUP],
            };
            let (scale, coded) = self.group::<F>(now, importance, &rows, step);
            if feedback.is_some() {
                subtract(simd, &mut targets[inputs.end..], &coded.left, &rows.map(|row| &row[GROUP..]));
            }
            let mut codes = [[0; LANES]; GROUP];
            let of_group = coded.codes.into_iter().zip(&mut codes).zip(&mut weights[inputs]);
            for ((code, narrow), weight) in of_group {
                simd.store_i8(simd.to_i32(code), narrow);
                let error = simd.sub(simd.load(weight), simd.mul(code, simd.mul(scale, step)));
                simd.store(error, weight);
            }
            let mut scales = [0; LANES];
            simd.store_i8(simd.to_i32(scale), &mut scales);
            let block = first / BLOCK + group / BLOCK_GROUPS;
            F::store(panel.lines, block, group % BLOCK_GROUPS, &codes, &scales.map(i8::cast_unsigned));
        }
    }

    /// The sub-scale of a group with which the least is lost, and what it leads to. `rows` are those of the inverse of
    /// R, from the group's first input on.
    #[inline(always)]
    fn group<F: IntegerFormat>(
        &self,
        targets: &[Column; GROUP],
        importance: &[f32; GROUP],
        rows: &[&[f32]; GROUP],
        step: S::F32,
    ) -> (S::F32, Coded<S>) {
        let grid = &self.grid;
        let simd = grid.simd;
        let [ideal, ..] = grid.ideal_scales(std::slice::from_ref(targets), std::slice::from_ref(importance));
        let nearest = simd.round(grid.clamp_scale(simd.mul(ideal, grid.inverse(step))));
        let mut best_scale = nearest;
        let mut best = self.code(targets, importance, rows, simd.mul(nearest, step));
        if const { F::SCALES[0] != F::SCALES[1] } {
            for offset in [-1.0, 1.0] {
                let scale = grid.clamp_scale(simd.add(nearest, simd.splat(offset)));
                let coded = self.code(targets, importance, rows, simd.mul(scale, step));
                let choose = |new, old| simd.select_greater(best.loss, coded.loss, new, old);
                best_scale = choose(scale, best_scale);
                best = Coded {
                    codes: std::array::from_fn(|k| choose(coded.codes[k], best.codes[k])),
                    left: std::array::from_fn(|k| choose(coded.left[k], best.left[k])),
                    loss: choose(coded.loss, best.loss),
                };
            }
        }
        (best_scale, best)
    }

    /// The codes of a group with a scale.
    #[inline(always)]
    fn code(
        &self,
        targets: &[Column; GROUP],
        importance: &[f32; GROUP],
        rows: &[&[f32]; GROUP],
        scale: S::F32,
    ) -> Coded<S> {
        let grid = &self.grid;
        let simd = grid.simd;
        let inverse = grid.inverse(scale);
        let mut targets: [S::F32; GROUP] = std::array::from_fn(|k| simd.load(&targets[k]));
        let zero = simd.splat(0.0);
        let mut coded = Coded { codes: [zero; GROUP], left: [zero; GROUP], loss: zero };
        for k in 0..GROUP {
            let code = grid.code(targets[k], inverse);
            let error = simd.sub(targets[k], simd.mul(code, scale));
            let left = simd.mul(error, simd.splat(importance[k].sqrt()));
            if self.feedback.is_some() {
                for j in k + 1..GROUP {
                    targets[j] = simd.sub(targets[j], simd.mul(left, simd.splat(rows[k][j])));
                }
            }
            coded.loss = simd.add(coded.loss, simd.mul(left, left));
            (coded.codes[k], coded.left[k]) = (code, left);
        }
        coded
    }
}

/// Takes off the targets what errors before them cost: `targets -= left rows`, with a row from the first target on for
/// each number of `left`.
#[inline(always)]
fn subtract<S: Simd, const N: usize>(simd: S, targets: &mut [Column], left: &[S::F32; N], rows: &[&[f32]; N]) {
    for (j, target) in targets.iter_mut().enumerate() {
        let mut sum = simd.load(target);
        for (left, row) in left.iter().zip(rows) {
            sum = simd.sub(sum, simd.mul(*left, simd.splat(row[j])));
        }
        simd.store(sum, target);
    }
}

/// Takes off later inputs what the errors of super-block `index` come to there.
#[inline(always)]
fn correct<S: Simd>(simd: S, feedback: &Feedback, index: usize, panels: &mut [CalibratedPanel<'_>]) {
    let Some(CalibratedPanel { weights, .. }) = panels.first() else { return };
    let inputs = index * SUPER..weights.len().min((index + 1) * SUPER);
    // `[tiles of a strip][inputs][CORRECTED]`
    let mut strip = vec![[0.0; CORRECTED]; STRIP / CORRECTED * inputs.len()];
    for first in (inputs.end..weights.len()).step_by(STRIP) {
        for (index, input) in inputs.clone().enumerate() {
            let row: &[f32; STRIP] = feedback.row(input)[first..].first_chunk().expect("whole blocks");
            for (tile, factors) in row.as_chunks().0.iter().enumerate() {
                strip[tile * inputs.len() + index] = *factors;
            }
        }
        for CalibratedPanel { weights, taken, .. } in &mut *panels {
            let tiles = taken[first..first + STRIP].as_chunks_mut::<CORRECTED>().0;
            for (taken, rows) in tiles.iter_mut().zip(strip.chunks_exact(inputs.len())) {
                let mut sums = [simd.splat(0.0); CORRECTED];
                for (sum, taken) in sums.iter_mut().zip(&*taken) {
                    *sum = simd.load(taken);
                }
                for (error, row) in weights[inputs.clone()].iter().zip(rows) {
                    let error = simd.sub(simd.splat(0.0), simd.load(error));
                    for (sum, factor) in sums.iter_mut().zip(row) {
                        *sum = simd.mul_add(error, simd.splat(*factor), *sum);
                    }
                }
                for (taken, sum) in taken.iter_mut().zip(sums) {
                    simd.store(sum, taken);
                }
            }
        }
    }
}

/// Strips end with blocks.
const _: () = assert!(BLOCK.is_multiple_of(STRIP));
