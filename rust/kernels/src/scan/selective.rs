//! Selective scan of Mamba 1: every channel has a row of the state, and every element of the state its own decay.
//!
//! The lanes of a vector are channels. A part is eight vectors of channels: long enough runs of each row of the inputs,
//! and a state that stays in the first-level cache beside the rates.

use super::{Part, Segment, Step, for_steps, prefetch};
use crate::arch::{Kernel, LANES, Simd};
use crate::math::{exp2, load_up_to, store_up_to};
use crate::rows::{Rows, RowsMut};
use crate::{Exec, PoolError};

/// Number of channels of a part.
const PART_CHANNELS: usize = 8 * LANES;

/// Weights of [`selective_scan`].
#[derive(Debug, Clone)]
pub struct SelectiveScan {
    channels: usize,
    states: usize,
    /// Rates times log2(e), `[channel panel, state, LANES]`, zero-padded.
    rates: Vec<f32>,
    /// `[channels]`
    skip: Vec<f32>,
}

impl SelectiveScan {
    /// Packs the rates A, `[channels, states]`, at most 0 (`-exp(A_log)`), and the skip factors D, `[channels]`.
    ///
    /// # Panics
    /// If the rates are not a whole number of rows.
    #[must_use]
    pub fn new(rates: &[f32], skip: &[f32]) -> Self {
        let (elements, channels) = (rates.len(), skip.len());
        assert!(
            elements > 0 && channels > 0 && elements.is_multiple_of(channels),
            "rates must be a row for each of {channels} channels, got {elements} elements"
        );
        let states = elements / channels;
        let mut packed = vec![0.0; selective_scan_state_len(channels, states)];
        for (channel, rates) in rates.chunks_exact(states).enumerate() {
            let panel = &mut packed[channel / LANES * LANES * states..];
            for (rate, to) in rates.iter().zip(panel[channel % LANES..].iter_mut().step_by(LANES)) {
                *to = (f64::from(*rate) * std::f64::consts::LOG2_E) as f32;
            }
        }
        Self { channels, states, rates: packed, skip: skip.to_vec() }
    }

    /// Returns the number of f32 of a state.
    #[must_use]
    pub fn state_len(&self) -> usize {
        self.rates.len()
    }

    /// Returns the vectors of the weights, as they are packed.
    #[must_use]
    pub fn vectors(&self) -> [&Vec<f32>; 2] {
        [&self.rates, &self.skip]
    }

    /// Returns the range of some channels in the state and in the packed rates.
    fn packed(&self, first: usize, end: usize) -> std::ops::Range<usize> {
        first * self.states..end.next_multiple_of(LANES) * self.states
    }
}

/// Returns the number of f32 of a state of a selective scan; channels are padded to whole vectors.
#[must_use]
pub fn selective_scan_state_len(channels: usize, states: usize) -> usize {
    channels.next_multiple_of(LANES) * states
}

/// Computes a selective scan (Gu and Dao 2023): for each row and channel, with the input x, the step size dt, and b and c
/// of the row,
///
/// ```text
/// h[n] = exp(rates[n] dt) h[n] + b[n] (dt x);   out = skip x + sum over n of c[n] h[n]
/// ```
///
/// `x`, `steps` and `out` have a column per channel, `b` and `c` a column per element n of the state. `states` holds a slot
/// per row; the state starts at the first column of the view. Rows of `out` that belong to no segment are unchanged.
///
/// # Errors
/// [`PoolError`] if the run was cancelled or a task panicked.
///
/// # Panics
/// If shapes do not match, or slots or rows are out of bounds or overlap.
///
/// # Examples
/// ```
/// use std::num::NonZeroUsize;
///
/// use ferrule_kernels::arch::Isa;
/// use ferrule_kernels::scan::{Segment, SelectiveScan, selective_scan};
/// use ferrule_kernels::{Cancel, Exec, Pool, Rows, RowsMut};
///
/// let (pool, cancel) = (Pool::new(NonZeroUsize::MIN), Cancel::new());
/// let exec = Exec { isa: Isa::best(), pool: &pool, cancel: &cancel };
/// let scan = SelectiveScan::new(&[-1.0], &[10.0]); // one channel with one element
/// // x, dt, b and c of one token.
/// let inputs = [3.0, 0.5, 2.0, 1.0];
/// let [x, steps, b, c] = [0, 1, 2, 3].map(|first| Rows::new(&inputs, 4, first));
/// let mut states = vec![0.0; scan.state_len()];
/// let states = RowsMut::new(&mut states, scan.state_len(), 0);
/// let mut out = [0.0];
///
/// let start = Segment { first_row: 0, rows: 1, old: None, new: 0 };
/// selective_scan(&exec, [x, steps, b, c], &scan, &[start], states, &mut out)?;
/// assert_eq!(out, [33.0]);
/// # Ok::<(), ferrule_kernels::PoolError>(())
/// ```
pub fn selective_scan(
    exec: &Exec<'_>,
    [x, steps, b, c]: [Rows<'_>; 4],
    scan: &SelectiveScan,
    segments: &[Segment],
    states: RowsMut<'_>,
    out: &mut [f32],
) -> Result<(), PoolError> {
    let channels = scan.channels;
    let part = |first: usize| {
        let end = channels.min(first + PART_CHANNELS);
        Part { state: scan.packed(first, end), columns: first..end }
    };
    let parts: Vec<_> = (0..channels).step_by(PART_CHANNELS).map(part).collect();
    // An exponential costs about as much as half a dozen multiply-adds.
    let work = 8;
    for_steps(exec, segments, states, out, channels, (&parts, work), |step| {
        exec.isa.run(Advance { x, steps, b, c, scan, step });
    })
}

struct Advance<'a> {
    x: Rows<'a>,
    steps: Rows<'a>,
    b: Rows<'a>,
    c: Rows<'a>,
    scan: &'a SelectiveScan,
    step: Step<'a>,
}

impl Kernel for Advance<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Self { x, steps, b, c, scan, step: Step { rows, old, new, mut out } } = self;
        let SelectiveScan { channels, states, ref rates, ref skip } = *scan;
        let columns = out.columns();
        let (rates, _) = rates[scan.packed(columns.start, columns.end)].as_chunks::<LANES>();
        new.copy_from_slice(old);
        let (state, _) = new.as_chunks_mut::<LANES>();
        let skip = &skip[columns.clone()];
        for (index, row) in rows.clone().enumerate() {
            let inputs = |row| [x, steps].map(|view| &view.row(row, channels)[columns.clone()]);
            if row + 1 < rows.end {
                for next in inputs(row + 1) {
                    prefetch(simd, next);
                }
            }
            let [x, steps] = inputs(row);
            let (b, c) = (b.row(row, states), c.row(row, states));
            let panels = x.chunks(LANES).zip(steps.chunks(LANES)).zip(skip.chunks(LANES));
            let panels = panels.zip(out.row(index).chunks_mut(LANES));
            let panels = panels.zip(rates.chunks_exact(states)).zip(state.chunks_exact_mut(states));
            for (((((x, dt), skip), out), rates), state) in panels {
                let (x, dt) = (load_up_to(simd, x), load_up_to(simd, dt));
                let update = simd.mul(dt, x);
                let mut sum = simd.mul(load_up_to(simd, skip), x);
                for (((rate, h), b), c) in rates.iter().zip(state).zip(b).zip(c) {
                    let decay = exp2(simd, simd.mul(simd.load(rate), dt));
                    let value = simd.mul_add(simd.splat(*b), update, simd.mul(decay, simd.load(h)));
                    simd.store(value, h);
                    sum = simd.mul_add(simd.splat(*c), value, sum);
                }
                store_up_to(simd, sum, out);
            }
        }
    }
}
