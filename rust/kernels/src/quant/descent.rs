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
const SWEEPS: usize = 2;

/// Number of inputs of a group whose gradients are summed at a time, in registers.
const SUMMED: usize = 8;

/// Improves quantized panels, which share cached rows of R.
#[inline(always)]
pub(super) fn improve<S: Simd, F: IntegerFormat>(
    grid: &Grid<S, F>,
    factor: &HessianFactor,
    panels: &mut [CalibratedPanel<'_>],
) {
    let groups = panels.first().map_or(0, |panel| panel.groups.len());
    // Rows of R of a group, transposed: `[input][GROUP]` from the first input of the group on.
    let mut rows = Vec::with_capacity(groups * GROUP);
    for group in (0..SWEEPS).flat_map(|_| 0..groups) {
        let first = group * GROUP;
        rows.clear();
        rows.resize(groups * GROUP - first, [0.0; GROUP]);
        for index in 0..GROUP {
            let row = &factor.row(first + index)[first..];
            rows.iter_mut().zip(row).for_each(|(column, value)| column[index] = *value);
        }
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
    for (residual, row) in residuals.iter_mut().zip(rows) {
        let mut sum = simd.load(residual);
        for (change, factor) in changes.iter().zip(row) {
            sum = simd.mul_add(*change, simd.splat(*factor), sum);
        }
        simd.store(sum, residual);
    }
}

/// Returns half of the gradient of the loss with respect to the errors of a group.
#[inline(always)]
fn gradient<S: Simd>(simd: S, rows: &[[f32; GROUP]], residuals: &[Column]) -> [S::F32; GROUP] {
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
