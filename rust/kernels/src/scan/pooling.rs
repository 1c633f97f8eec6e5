//! Softmax pooling: for every channel, the mean of the values of a block of tokens, weighted by the softmax of their gates.
//!
//! The lanes of a vector are channels. The state of a channel is the weighted sum of its values, the sum of the weights,
//! and the largest gate, which both sums are relative to. Blocks that overlap have two of them: that of the block, and
//! that of the next one.

use std::f32::consts::LOG2_E;

use super::wkv::shares;
use super::{Part, Segment, Step, for_steps};
use crate::arch::{Kernel, LANES, Simd};
use crate::math::{load_up_to, store_up_to};
use crate::rows::{Rows, RowsMut};
use crate::{Exec, PoolError};

/// Number of channels of a part: a few cache lines of each row.
const PART_CHANNELS: usize = 8 * LANES;

/// Shape and weights of [`softmax_pooling`].
#[derive(Debug, Clone, Copy)]
pub struct SoftmaxPooling<'a> {
    /// Number of channels of a mean.
    pub channels: usize,
    /// Number of tokens of a block, counted from position 0.
    pub block: usize,
    /// Whether the mean of a block is also over the tokens of the block before it. Values and gates then have two series
    /// of channels: first those for the mean of the next block, then those for the mean of the token's own.
    pub overlap: bool,
    /// Number added to the gates by the place of a token in its block: `[block, series * channels]`.
    pub bias: &'a [f32],
}

impl SoftmaxPooling<'_> {
    /// Returns the number of columns of values and gates.
    fn columns(&self) -> usize {
        self.channels * if self.overlap { 2 } else { 1 }
    }

    /// Returns the number of f32 of the state of some channels.
    fn state_len(&self, channels: usize) -> usize {
        softmax_pooling_state_len(channels, self.overlap)
    }
}

/// Returns the number of f32 of a state of [`softmax_pooling`].
#[must_use]
pub fn softmax_pooling_state_len(channels: usize, overlap: bool) -> usize {
    3 * channels * if overlap { 2 } else { 1 }
}

/// Computes the means of blocks (DeepSeek-V4, 2026): the row whose token ends a block gets `sum over tokens t of
/// softmax(gates[t] + bias[t % block]) * values[t]`, with a softmax over the tokens for each channel.
///
/// `values` and `gates` have a column per channel of each series, and `out` one per channel. `positions` has the position
/// of each row; the first row of a sequence is at position 0. `states` holds a slot per row; the state starts at the first
/// column of the view. Rows of `out` whose tokens end no block, or that belong to no segment, are unchanged.
///
/// # Errors
/// [`PoolError`] if the run was cancelled or a task panicked.
///
/// # Panics
/// If shapes do not match, the block is 0, or slots or rows are out of bounds or overlap.
///
/// # Examples
/// ```
/// use std::num::NonZeroUsize;
///
/// use ferrule_kernels::arch::Isa;
/// use ferrule_kernels::scan::{Segment, SoftmaxPooling, softmax_pooling, softmax_pooling_state_len};
/// use ferrule_kernels::{Cancel, Exec, Pool, Rows, RowsMut};
///
/// let (pool, cancel) = (Pool::new(NonZeroUsize::MIN), Cancel::new());
/// let exec = Exec { isa: Isa::best(), pool: &pool, cancel: &cancel };
/// let pooling = SoftmaxPooling { channels: 1, block: 2, overlap: false, bias: &[0.0, 0.0] };
/// let len = softmax_pooling_state_len(1, false);
/// let (mut states, mut out) = (vec![0.0; len], [0.0; 2]);
///
/// let start = Segment { first_row: 0, rows: 2, old: None, new: 0 };
/// let inputs = [&[3.0, 6.0], &[1.0, 1.0]].map(|column| Rows::new(column, 1, 0));
/// softmax_pooling(&exec, inputs, &pooling, &[0, 1], &[start], RowsMut::new(&mut states, len, 0), &mut out)?;
/// assert_eq!(out, [0.0, 4.5]);
/// # Ok::<(), ferrule_kernels::PoolError>(())
/// ```
pub fn softmax_pooling(
    exec: &Exec<'_>,
    [values, gates]: [Rows<'_>; 2],
    pooling: &SoftmaxPooling<'_>,
    positions: &[usize],
    segments: &[Segment],
    states: RowsMut<'_>,
    out: &mut [f32],
) -> Result<(), PoolError> {
    let SoftmaxPooling { channels, block, bias, .. } = *pooling;
    assert!(block > 0, "block must be >= 1, got 0");
    assert_eq!(bias.len(), block * pooling.columns(), "bias must have a row for each token of a block");
    let part = |first: usize| {
        let columns = first..channels.min(first + PART_CHANNELS);
        Part { state: pooling.state_len(columns.start)..pooling.state_len(columns.end), columns }
    };
    let parts: Vec<_> = (0..channels).step_by(PART_CHANNELS).map(part).collect();
    // An exponential for three elements of the state.
    let work = 4;
    for_steps(exec, segments, states, out, channels, (&parts, work), |step| {
        exec.isa.run(Advance { values, gates, pooling, positions, step });
    })
}

struct Advance<'a> {
    values: Rows<'a>,
    gates: Rows<'a>,
    pooling: &'a SoftmaxPooling<'a>,
    positions: &'a [usize],
    step: Step<'a>,
}

impl Kernel for Advance<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Self { values, gates, pooling, positions, step: Step { rows, old, new, mut out } } = self;
        let SoftmaxPooling { channels, block, overlap, bias, .. } = *pooling;
        let (columns, all) = (out.columns(), pooling.columns());
        new.copy_from_slice(old);
        let (own, next) = new.split_at_mut(3 * columns.len());
        for (index, row) in rows.enumerate() {
            let (position, place) = (positions[row], positions[row] % block);
            let inputs = |series: usize| {
                let at = series * channels + columns.start..series * channels + columns.end;
                [values.row(row, all), gates.row(row, all), &bias[place * all..][..all]].map(|x| &x[at.clone()])
            };
            let is_first = place == 0 && !(overlap && position >= block);
            accumulate(simd, inputs(usize::from(overlap)), own, is_first);
            if overlap {
                accumulate(simd, inputs(0), next, place == 0);
            }
            if place + 1 == block {
                divide(simd, own, out.row(index));
                if overlap {
                    own.copy_from_slice(next);
                }
            }
        }
    }
}

/// Adds the values of a token to a state `[3, channels]`: sums, sums of weights, and largest gates in base 2.
#[inline(always)]
fn accumulate<S: Simd>(simd: S, [values, gates, bias]: [&[f32]; 3], state: &mut [f32], is_first: bool) {
    let width = values.len();
    let (sums, others) = state.split_at_mut(width);
    let (totals, maxima) = others.split_at_mut(width);
    for first in (0..width).step_by(LANES) {
        let at = first..width.min(first + LANES);
        let load = |from: &[f32]| load_up_to(simd, &from[at.clone()]);
        let value = load(values);
        let gate = simd.mul(simd.splat(LOG2_E), simd.add(load(gates), load(bias)));
        let (sum, total, max) = if is_first {
            (value, simd.splat(1.0), gate)
        } else {
            let max = load(maxima);
            let [before, now] = shares(simd, max, gate);
            let sum = simd.mul_add(now, value, simd.mul(before, load(sums)));
            (sum, simd.mul_add(before, load(totals), now), simd.max(max, gate))
        };
        store_up_to(simd, sum, &mut sums[at.clone()]);
        store_up_to(simd, total, &mut totals[at.clone()]);
        store_up_to(simd, max, &mut maxima[at.clone()]);
    }
}

/// Writes the means of a state.
#[inline(always)]
fn divide<S: Simd>(simd: S, state: &[f32], out: &mut [f32]) {
    let width = out.len();
    for first in (0..width).step_by(LANES) {
        let at = first..width.min(first + LANES);
        let (sum, total) = (load_up_to(simd, &state[at.clone()]), load_up_to(simd, &state[width..][at.clone()]));
        store_up_to(simd, simd.div(sum, total), &mut out[at]);
    }
}
