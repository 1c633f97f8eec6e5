//! Descent for [`trellis`](super::trellis) formats: improves the symbols that [`trellis_gptq`](super::trellis_gptq) chose.
//!
//! As in [`descent`](super::descent), but the parts that are chosen again are segments, between the symbols before them and
//! their own last ones, on which the weights after them depend.

use super::descent::{add_errors, gradient, transpose};
use super::gptq::CalibratedPanel;
use super::integer::{GROUP, SUPER};
use super::trellis::{CHAINS, SEGMENT, Trellis, descent_segments};
use super::trellis_gptq::{TINY, replace_rows, states};
use super::viterbi::{SegmentCost, Viterbi};
use crate::arch::{LANES, Simd};
use crate::hessian::HessianFactor;
use crate::hessian::feedback::Column;

/// Number of sweeps over all segments (`benches/record/2026-11-30-intel-avx512vnni/allocation-search.txt`).
pub(super) const SWEEPS: usize = 2;

/// Segments share the functions of [`descent`](super::descent) with groups.
const _: () = assert!(SEGMENT == GROUP);

/// Improves quantized panels, which share cached rows of R, until `is_cancelled` returns true.
#[inline(always)]
pub(super) fn improve<S: Simd, T: Trellis>(
    viterbi: &mut Viterbi<S, T>,
    factor: &HessianFactor,
    panels: &mut [CalibratedPanel<'_>],
    sweeps: usize,
    is_cancelled: &dyn Fn() -> bool,
) {
    let size = panels.first().map_or(0, |panel| panel.residuals.len());
    let mut rows = Vec::new();
    for (segment, inputs) in (0..sweeps).flat_map(|_| descent_segments(size).enumerate()) {
        if is_cancelled() {
            return;
        }
        transpose(factor, inputs[0], inputs.iter().copied(), &mut rows);
        let inverse = factor.segment_inverse(segment);
        let cost = SegmentCost::of_inverse(SEGMENT, |row, column| inverse[row][column]);
        // A loop rather than a closure: closures are compiled without the instruction set unless they are inlined.
        for panel in &mut *panels {
            improve_segment(viterbi, &cost, inverse, (&inputs, &rows), panel);
        }
    }
}

/// Searches a segment again, and keeps the symbols of rows whose loss decreases. `rows` are its rows of R, transposed.
#[inline(always)]
fn improve_segment<S: Simd, T: Trellis>(
    viterbi: &mut Viterbi<S, T>,
    cost: &SegmentCost,
    inverse: &[[f32; SEGMENT]; SEGMENT],
    (inputs, rows): (&[usize; SEGMENT], &[[f32; SEGMENT]]),
    panel: &mut CalibratedPanel<'_>,
) {
    let simd = viterbi.simd;
    let starts = states::<T>(panel, inputs[0]);
    let next = inputs[SEGMENT - 1] + CHAINS;
    let ends = (next < panel.residuals.len()).then(|| states::<T>(panel, next));
    let block_scale = simd.load_f16(&panel.block_scales[inputs[0] / SUPER]);
    let inverse_scale = simd.div(simd.splat(1.0), simd.max(block_scale, simd.splat(TINY)));
    let residuals = &mut panel.residuals[inputs[0]..];
    let gradient = gradient(simd, rows, residuals);

    let mut now = [[0; LANES]; SEGMENT];
    for (symbols, input) in now.iter_mut().zip(inputs) {
        *symbols = panel.groups[input / GROUP].codes[input % GROUP].map(|symbol| symbol as u8);
    }
    let before = viterbi.segment_weights(&starts, &now);
    let mut targets = before;
    let mut least = simd.splat(0.0);
    for (k, row) in inverse.iter().enumerate() {
        // The residual of input k in the basis of the segment, by which its errors can decrease the loss.
        let mut residual = simd.splat(0.0);
        for (gradient, factor) in gradient.iter().zip(row).skip(k) {
            residual = simd.mul_add(*gradient, simd.splat(*factor), residual);
        }
        residual = simd.mul(residual, inverse_scale);
        for (target, factor) in targets.iter_mut().zip(row).skip(k) {
            simd.store(simd.mul_add(residual, simd.splat(*factor), simd.load(target)), target);
        }
        least = simd.add(least, simd.mul(residual, residual));
    }
    let mut found = now;
    viterbi.search(&targets, (&starts, ends.as_ref()), cost, &mut found);
    let after = viterbi.segment_weights(&starts, &found);
    let loss = loss(simd, &targets, &after, cost, inverse);
    let is_better = simd.to_array(simd.select_greater(least, loss, simd.splat(1.0), simd.splat(0.0)));

    let mut changes = [simd.splat(0.0); SEGMENT];
    for (k, input) in inputs.iter().enumerate() {
        let changed = simd.sub(simd.load(&before[k]), simd.load(&after[k]));
        let changed = simd.select_greater(least, loss, changed, simd.splat(0.0));
        changes[k] = simd.mul(changed, block_scale);
        replace_rows(&mut now[k], &found[k], &is_better);
        panel.groups[input / GROUP].codes[input % GROUP] = now[k].map(f32::from);
    }
    add_errors(simd, &changes, rows, residuals);
}

/// Returns the loss of the weights of a segment.
#[inline(always)]
fn loss<S: Simd>(
    simd: S,
    targets: &[Column; SEGMENT],
    weights: &[Column; SEGMENT],
    cost: &SegmentCost,
    inverse: &[[f32; SEGMENT]; SEGMENT],
) -> S::F32 {
    let mut left = simd.load_vectors(targets);
    let mut loss = simd.splat(0.0);
    for (k, row) in inverse.iter().enumerate() {
        let error = simd.sub(left[k], simd.load(&weights[k]));
        let residual = simd.mul(error, simd.splat(cost.diagonal[k]));
        for (target, factor) in left.iter_mut().zip(row).skip(k + 1) {
            *target = simd.sub(*target, simd.mul(residual, simd.splat(*factor)));
        }
        loss = simd.add(loss, simd.mul(residual, residual));
    }
    loss
}
