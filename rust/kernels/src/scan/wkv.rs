//! Recurrence of RWKV 4: for every channel, a mean of the values of all tokens whose weights decay.
//!
//! The lanes of a vector are channels. The state of a channel is the weighted sum of its values, the sum of the weights,
//! and the logarithm of a factor that both sums are divided by, so that no weight overflows.

use super::{Part, Segment, Step, for_steps, prefetch};
use crate::arch::{Kernel, LANES, Simd};
use crate::math::{exp2, load_up_to, store_up_to};
use crate::rows::{Rows, RowsMut};
use crate::{Exec, PoolError};

/// Number of channels of a part: several cache lines of each row, and a state that stays in the first-level cache.
const PART_CHANNELS: usize = 16 * LANES;

/// Logarithm of the factor of a state without tokens: small enough that its weight is 0 beside that of any key.
const EMPTY: f32 = -1e38;

/// Weights of [`wkv`].
#[derive(Debug, Clone)]
pub struct Wkv {
    /// Rates times log2(e), `[channels]`.
    rates: Vec<f32>,
    /// Bonuses times log2(e), `[channels]`.
    bonuses: Vec<f32>,
}

impl Wkv {
    /// Takes the rates of decay, at most 0 (`-exp(time_decay)`), and what is added to the key of the present token
    /// (`time_first`), both `[channels]`.
    ///
    /// # Panics
    /// If they are not equally long.
    #[must_use]
    pub fn new(rates: &[f32], bonuses: &[f32]) -> Self {
        assert_eq!(rates.len(), bonuses.len(), "rates and bonuses must have an element per channel");
        let binary = |of: &[f32]| of.iter().map(|x| (f64::from(*x) * std::f64::consts::LOG2_E) as f32).collect();
        Self { rates: binary(rates), bonuses: binary(bonuses) }
    }

    /// Returns the number of f32 of a state.
    #[must_use]
    pub fn state_len(&self) -> usize {
        wkv_state_len(self.rates.len())
    }

    /// Returns the vectors of the weights, as they are packed.
    #[must_use]
    pub fn vectors(&self) -> [&Vec<f32>; 2] {
        [&self.rates, &self.bonuses]
    }
}

/// Returns the number of f32 of a state of [`wkv`].
#[must_use]
pub fn wkv_state_len(channels: usize) -> usize {
    3 * channels
}

/// Computes the WKV of RWKV 4 (Peng et al. 2023): for each row t and channel, with the key k and the value v,
///
/// ```text
/// out = (exp(bonus + k[t]) v[t] + sum over i < t of exp(rate (t - 1 - i) + k[i]) v[i]) / (the same without v)
/// ```
///
/// `k`, `v` and `out` have a column per channel. `states` holds a slot per row; the state starts at the first column of
/// the view. Rows of `out` that belong to no segment are unchanged.
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
/// use ferrule_kernels::scan::{Segment, Wkv, wkv};
/// use ferrule_kernels::{Cancel, Exec, Pool, Rows, RowsMut};
///
/// let (pool, cancel) = (Pool::new(NonZeroUsize::MIN), Cancel::new());
/// let exec = Exec { isa: Isa::best(), pool: &pool, cancel: &cancel };
/// let weights = Wkv::new(&[-1.0], &[0.0]); // one channel
/// let mut states = vec![0.0; weights.state_len()];
/// let mut out = [0.0; 2];
///
/// let start = Segment { first_row: 0, rows: 2, old: None, new: 0 };
/// let inputs = [&[0.0, 0.0], &[3.0, 6.0]].map(|column| Rows::new(column, 1, 0));
/// let states = RowsMut::new(&mut states, weights.state_len(), 0);
/// wkv(&exec, inputs, &weights, &[start], states, &mut out)?;
/// assert_eq!(out, [3.0, 4.5]);
/// # Ok::<(), ferrule_kernels::PoolError>(())
/// ```
pub fn wkv(
    exec: &Exec<'_>,
    [k, v]: [Rows<'_>; 2],
    weights: &Wkv,
    segments: &[Segment],
    states: RowsMut<'_>,
    out: &mut [f32],
) -> Result<(), PoolError> {
    let channels = weights.rates.len();
    let part = |first: usize| {
        let columns = first..channels.min(first + PART_CHANNELS);
        Part { state: wkv_state_len(columns.start)..wkv_state_len(columns.end), columns }
    };
    let parts: Vec<_> = (0..channels).step_by(PART_CHANNELS).map(part).collect();
    // Two exponentials and a division for three elements of the state.
    let work = 8;
    for_steps(exec, segments, states, out, channels, (&parts, work), |step| {
        exec.isa.run(Advance { k, v, weights, step });
    })
}

struct Advance<'a> {
    k: Rows<'a>,
    v: Rows<'a>,
    weights: &'a Wkv,
    step: Step<'a>,
}

impl Kernel for Advance<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Self { k, v, weights: Wkv { rates, bonuses }, step: Step { rows, old, new, mut out } } = self;
        let (columns, channels) = (out.columns(), rates.len());
        let width = columns.len();
        let (rates, bonuses) = (&rates[columns.clone()], &bonuses[columns.clone()]);
        new.copy_from_slice(old);
        let (sums, others) = new.split_at_mut(width);
        let (totals, maxima) = others.split_at_mut(width);
        for (index, row) in rows.clone().enumerate() {
            let inputs = |row| [k, v].map(|view| &view.row(row, channels)[columns.clone()]);
            if row + 1 < rows.end {
                for next in inputs(row + 1) {
                    prefetch(simd, next);
                }
            }
            let [keys, values] = inputs(row);
            let out = out.row(index);
            for first in (0..width).step_by(LANES) {
                let at = first..width.min(first + LANES);
                let load = |from: &[f32]| load_up_to(simd, &from[at.clone()]);
                let (key, value) = (simd.mul(simd.splat(std::f32::consts::LOG2_E), load(keys)), load(values));
                let (sum, total) = (load(sums), load(totals));
                // The state before the first token is zeros, and has no weight.
                let max = simd.select_greater(total, simd.splat(0.0), load(maxima), simd.splat(EMPTY));

                let [before, now] = shares(simd, max, simd.add(load(bonuses), key));
                let numerator = simd.mul_add(now, value, simd.mul(before, sum));
                let mean = simd.div(numerator, simd.mul_add(before, total, now));
                store_up_to(simd, mean, &mut out[at.clone()]);

                let max = simd.add(max, load(rates));
                let [before, now] = shares(simd, max, key);
                let sum = simd.mul_add(now, value, simd.mul(before, sum));
                store_up_to(simd, sum, &mut sums[at.clone()]);
                store_up_to(simd, simd.mul_add(before, total, now), &mut totals[at.clone()]);
                store_up_to(simd, simd.max(max, key), &mut maxima[at.clone()]);
            }
        }
    }
}

/// Returns 2^a and 2^b, divided by the larger of both.
#[inline(always)]
pub(super) fn shares<S: Simd>(simd: S, a: S::F32, b: S::F32) -> [S::F32; 2] {
    let (zero, one) = (simd.splat(0.0), simd.splat(1.0));
    let difference = simd.sub(b, a);
    let smaller = exp2(simd, simd.min(simd.sub(zero, difference), difference));
    [simd.select_greater(difference, zero, smaller, one), simd.select_greater(difference, zero, one, smaller)]
}
