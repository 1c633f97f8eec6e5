//! Descent: improves the codes and sub-scales that [`gptq`](super::gptq) chose, one group of inputs at a time.
//!
//! GPTQ chooses the codes of an input before those of later inputs, which then have to compensate its error. A sweep
//! visits each group again, while all other groups stay as they are: the loss of a row is then a quadratic function of
//! the errors of the group, with the diagonal block of the Hessian. The group is quantized for it with the sub-scales
//! next to its own, and keeps its codes where none of them has less loss, so no step increases the loss of a row. This
//! is the coordinate descent of CDQuant (<https://arxiv.org/abs/2406.17542>) with groups that also change their scales.
//!
//! The sums `e R` of a row are up to date throughout. Their product with the rows of R of a group is half of the
//! gradient of the loss with respect to its errors.

use super::gptq::{CalibratedPanel, CodedGroup, GroupCost, QuantizedGroup};
use super::integer::{GROUP, IntegerFormat, SUPER};
use super::quantize::Grid;
use crate::arch::{LANES, Simd};
use crate::hessian::HessianFactor;
use crate::hessian::feedback::Column;

/// Number of sweeps over all groups. A third one makes no measurable difference (`benches/quality`).
pub(super) const SWEEPS: usize = 2;

/// Bytes of the transposed rows of R of a group for each input.
pub(crate) const ROWS_INPUT_BYTES: usize = size_of::<[f32; GROUP]>();

/// Number of inputs of a group whose gradients are summed at a time, in registers.
const SUMMED: usize = 8;

/// Improves quantized panels, which share cached rows of R, until `is_cancelled` returns true.
#[inline(always)]
pub(super) fn improve<S: Simd, F: IntegerFormat>(
    grid: &Grid<S, F>,
    factor: &HessianFactor,
    panels: &mut [CalibratedPanel<'_>],
    sweeps: usize,
    is_cancelled: &dyn Fn() -> bool,
) {
    let groups = panels.first().map_or(0, |panel| panel.groups.len());
    let mut rows = Vec::new();
    for group in (0..sweeps).flat_map(|_| 0..groups) {
        if is_cancelled() {
            return;
        }
        let first = group * GROUP;
        transpose(factor, first, first..first + GROUP, &mut rows);
        let inverse = factor.group_inverse(group);
        let importance = std::array::from_fn(|k| (inverse[k][k] * inverse[k][k]).recip());
        let cost = GroupCost { importance, inverse: inverse.each_ref().map(<[f32; GROUP]>::as_slice) };
        // A loop rather than a closure: closures are compiled without the instruction set unless they are inlined.
        for panel in &mut *panels {
            let block_scale = grid.simd.load_f16(&panel.block_scales[first / SUPER]);
            improve_group(grid, &cost, &rows, block_scale, &mut panel.groups[group], &mut panel.residuals[first..]);
        }
    }
}

/// Quantizes a group again. `residuals` are the elements of `e R` that it changes, and `rows` its rows of R, transposed.
#[inline(always)]
fn improve_group<S: Simd, F: IntegerFormat>(
    grid: &Grid<S, F>,
    cost: &GroupCost<'_>,
    rows: &[[f32; GROUP]],
    block_scale: S::F32,
    coded: &mut CodedGroup,
    residuals: &mut [Column],
) {
    let simd = grid.simd;
    let gradient = gradient(simd, rows, residuals);
    let scale = simd.load(&coded.scales);
    let step = simd.mul(scale, block_scale);
    let codes = simd.load_vectors(&coded.codes);
    let mut targets = codes.map(|code| simd.mul(code, step));
    let mut now = QuantizedGroup::exact(simd, scale, codes);
    for (k, row) in cost.inverse.iter().enumerate() {
        // The residual of input k in the basis of the group, by which its errors can decrease the loss.
        let mut residual = simd.splat(0.0);
        for (gradient, factor) in gradient.iter().zip(*row).skip(k) {
            residual = simd.mul_add(*gradient, simd.splat(*factor), residual);
        }
        for (target, factor) in targets.iter_mut().zip(*row).skip(k) {
            *target = simd.mul_add(residual, simd.splat(*factor), *target);
        }
        now.loss = simd.add(now.loss, simd.mul(residual, residual));
    }
    let mut columns = [[0.0; LANES]; GROUP];
    columns.iter_mut().zip(targets).for_each(|(column, target)| simd.store(target, column));
    for offset in [0.0, -1.0, 1.0] {
        let scale = grid.clamp_scale(simd.add(scale, simd.splat(offset)));
        now.replace_worse(simd, &grid.quantize_group(&columns, cost, scale, block_scale));
    }

    let new_step = simd.mul(now.scale, block_scale);
    let mut changes = [simd.splat(0.0); GROUP];
    for (k, change) in changes.iter_mut().enumerate() {
        *change = simd.sub(simd.mul(codes[k], step), simd.mul(now.codes[k], new_step));
        simd.store(now.codes[k], &mut coded.codes[k]);
    }
    simd.store(now.scale, &mut coded.scales);
    add_errors(simd, &changes, rows, residuals);
}

/// Transposes the rows of R of some inputs, which start at `first`: `[input][GROUP]` from `first` on.
pub(super) fn transpose(
    factor: &HessianFactor,
    first: usize,
    inputs: impl Iterator<Item = usize>,
    to: &mut Vec<[f32; GROUP]>,
) {
    to.clear();
    for (index, input) in inputs.enumerate() {
        let row = &factor.row(input)[first..];
        to.resize(row.len(), [0.0; GROUP]);
        to.iter_mut().zip(row).for_each(|(column, value)| column[index] = *value);
    }
}

/// Adds the product of errors and rows of R to the elements of `e R`.
#[inline(always)]
pub(super) fn add_errors<S: Simd>(simd: S, errors: &[S::F32; GROUP], rows: &[[f32; GROUP]], residuals: &mut [Column]) {
    for (residual, row) in residuals.iter_mut().zip(rows) {
        let mut sum = simd.load(residual);
        for (error, factor) in errors.iter().zip(row) {
            sum = simd.mul_add(*error, simd.splat(*factor), sum);
        }
        simd.store(sum, residual);
    }
}

/// Returns half of the gradient of the loss with respect to the errors of the inputs of some rows of R.
#[inline(always)]
pub(super) fn gradient<S: Simd>(simd: S, rows: &[[f32; GROUP]], residuals: &[Column]) -> [S::F32; GROUP] {
    let mut gradient = [simd.splat(0.0); GROUP];
    for (part, sums) in gradient.as_chunks_mut::<SUMMED>().0.iter_mut().enumerate() {
        for (row, residual) in rows.iter().zip(residuals) {
            let (factors, residual) = (&row.as_chunks::<SUMMED>().0[part], simd.load(residual));
            for (sum, factor) in sums.iter_mut().zip(factors) {
                *sum = simd.mul_add(residual, simd.splat(*factor), *sum);
            }
        }
    }
    gradient
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::marker::PhantomData;
    use std::num::NonZeroUsize;

    use super::*;
    use crate::arch::{ByteLine, Isa, LINE};
    use crate::hessian::{Basis, Hessian, InputStatistics};
    use crate::quant::gptq::PackCalibrated;
    use crate::quant::int2::Int2;
    use crate::quant::int3::Int3;
    use crate::quant::int4::Int4;
    use crate::quant::int5::Int5;
    use crate::quant::int6::Int6;
    use crate::quant::integer::halves;
    use crate::quant::trellis::{Trellis, Trellised};
    use crate::quant::trellis_gptq::PackTrellis;
    use crate::quant::trellis2::TwoBits;
    use crate::quant::trellis3::ThreeBits;
    use crate::quant::trellis4::FourBits;
    use crate::quant::trellis5::FiveBits;
    use crate::{Cancel, Exec, Pool};

    const COLS: usize = 320;

    /// Returns pseudorandom numbers from -0.5 to 0.5.
    fn random(seed: u64, count: usize) -> Vec<f32> {
        let mut state = seed;
        let next = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 40) as f32 / (1 << 24) as f32 - 0.5
        };
        std::iter::repeat_with(next).take(count).collect()
    }

    /// Quantizes sixteen rows of [`COLS`] inputs with a number of sweeps, and returns the loss of each.
    fn losses<F: IntegerFormat>(
        isa: Isa,
        rows: &[f32],
        statistics: &InputStatistics,
        (sweeps, is_cancelled): (usize, &dyn Fn() -> bool),
    ) -> Column {
        let mut block_scales = vec![[0; LANES]; COLS.div_ceil(SUPER)];
        let mut lines = vec![ByteLine([0; LINE]); F::lines(halves(COLS))];
        let panels = &mut [CalibratedPanel::new(isa, rows, &mut block_scales, &mut lines)];
        isa.run(PackCalibrated::<F> { statistics, panels, sweeps, is_cancelled, format: PhantomData });
        panels[0].loss
    }

    /// The same as [`losses`] for a trellis format.
    fn trellis_losses<T: Trellis>(
        isa: Isa,
        rows: &[f32],
        statistics: &InputStatistics,
        (sweeps, is_cancelled): (usize, &dyn Fn() -> bool),
    ) -> Column {
        let mut block_scales = vec![[0; LANES]; COLS.div_ceil(SUPER)];
        let mut lines = vec![ByteLine([0; LINE]); Trellised::<T>::lines(halves(COLS))];
        let panels = &mut [CalibratedPanel::new(isa, rows, &mut block_scales, &mut lines)];
        let statistics = Some(statistics);
        isa.run(PackTrellis::<T> { statistics, panels, sweeps, is_cancelled, format: PhantomData });
        panels[0].loss
    }

    /// Quantization of sixteen rows: [`losses`] or [`trellis_losses`].
    type Losses = fn(Isa, &[f32], &InputStatistics, (usize, &dyn Fn() -> bool)) -> Column;

    #[test]
    fn quantization_ends_at_a_cancelled_check() {
        let (pool, cancel) = (Pool::new(NonZeroUsize::MIN), Cancel::new());
        let exec = Exec { isa: Isa::best(), pool: &pool, cancel: &cancel };
        let mut hessian = Hessian::zeroed(COLS, Basis::Rotated).unwrap();
        hessian.add(&exec, &random(1, COLS * (COLS + 100))).unwrap();
        let statistics = &hessian.statistics(&exec).unwrap().unwrap();
        let rows = random(4, LANES * COLS);
        // Two super-blocks, and then, in each sweep, twenty groups, or twelve segments between half blocks and twenty in them.
        for (losses, each) in [(losses::<Int4> as Losses, 20), (trellis_losses::<ThreeBits>, 32)] {
            for allowed in [0, 1, 2, 12, 1 + 2 * each] {
                let calls = Cell::new(0);
                let is_cancelled = || calls.replace(calls.get() + 1) == allowed;
                losses(exec.isa, &rows, statistics, (2, &is_cancelled));
                assert_eq!(calls.get(), allowed + 1);
            }
            let calls = Cell::new(0);
            losses(exec.isa, &rows, statistics, (2, &|| calls.replace(calls.get() + 1) > 1000));
            assert_eq!(calls.get(), 2 + 2 * each);
        }
    }

    fn check(isa: Isa, rows: &[f32], statistics: &InputStatistics, quantize: Losses, least_gain: f32) {
        let losses = [0, 1, 2, 3].map(|sweeps| quantize(isa, rows, statistics, (sweeps, &|| false)));
        for (sweep, pair) in losses.windows(2).enumerate() {
            for (row, (before, after)) in pair[0].iter().zip(&pair[1]).enumerate() {
                // Rounding of f32 sums.
                assert!(after - before <= 1e-5 * before, "{}, sweep {sweep}, row {row}: {before}, {after}", isa.name());
            }
        }
        let [greedy, _, improved, _] = losses.map(|of_rows| of_rows.iter().sum::<f32>());
        assert!(improved < (1.0 - least_gain) * greedy, "{}: {improved} after {greedy}", isa.name());
    }

    #[test]
    fn no_sweep_increases_the_loss_of_a_row() {
        let (pool, cancel) = (Pool::new(NonZeroUsize::MIN), Cancel::new());
        // Inputs with twenty common directions.
        let (basis, count) = (random(1, 20 * COLS), 16 * COLS);
        let (shares, mut inputs) = (random(2, 20 * count), random(3, COLS * count));
        for (input, shares) in inputs.chunks_exact_mut(COLS).zip(shares.chunks_exact(20)) {
            for (direction, share) in basis.chunks_exact(COLS).zip(shares) {
                input.iter_mut().zip(direction).for_each(|(x, direction)| *x += 10.0 * share * direction);
            }
        }
        let rows = random(4, LANES * COLS);
        for isa in Isa::available() {
            let exec = Exec { isa, pool: &pool, cancel: &cancel };
            let mut hessian = Hessian::zeroed(COLS, Basis::Rotated).unwrap();
            hessian.add(&exec, &inputs).unwrap();
            let statistics = hessian.statistics(&exec).unwrap().unwrap();
            let all: [Losses; 5] = [losses::<Int2>, losses::<Int3>, losses::<Int4>, losses::<Int5>, losses::<Int6>];
            all.into_iter().for_each(|losses| check(isa, &rows, &statistics, losses, 0.03));
            let all: [Losses; 4] = [
                trellis_losses::<TwoBits>,
                trellis_losses::<ThreeBits>,
                trellis_losses::<FourBits>,
                trellis_losses::<FiveBits>,
            ];
            all.into_iter().for_each(|losses| check(isa, &rows, &statistics, losses, 0.01));
        }
    }
}
