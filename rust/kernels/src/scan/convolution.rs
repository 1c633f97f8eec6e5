//! Causal depthwise convolution over the tokens of sequences. The state is the last `taps - 1` inputs.

use super::{Part, Segment, Step, for_steps, load_up_to, store_up_to};
use crate::activation::Activation;
use crate::arch::{Kernel, LANES, Simd};
use crate::math::Lanewise;
use crate::rows::{Rows, RowsMut};
use crate::{Exec, PoolError};

/// Number of channels of a part: several cache lines of each row, and few enough that the rows of all taps stay in the
/// first-level cache.
const PART_CHANNELS: usize = 256;

/// Factors of inputs without gates.
const ONES: [f32; PART_CHANNELS] = [1.0; PART_CHANNELS];

/// Parameters of [`causal_convolution`].
#[derive(Debug, Clone, Copy)]
pub struct CausalConvolution<'a> {
    /// Number of channels, which are the columns of inputs and outputs.
    pub channels: usize,
    /// Weights, `[taps, channels]`; the last tap multiplies the present row.
    pub weights: &'a [f32],
    /// Bias of each channel.
    pub bias: Option<&'a [f32]>,
    /// Activation of the sum.
    pub activation: Option<Activation>,
    /// Factors of inputs and outputs.
    pub gates: Option<InputOutputGates<'a>>,
}

/// Factors of inputs and outputs of a convolution, as in LFM2; views with the columns of the inputs.
#[derive(Debug, Clone, Copy)]
pub struct InputOutputGates<'a> {
    /// Factors of the inputs. The products are convolved and kept in the state.
    pub input: Rows<'a>,
    /// Factors of the outputs.
    pub output: Rows<'a>,
}

impl CausalConvolution<'_> {
    /// Returns the number of f32 of a state.
    #[must_use]
    pub fn state_len(&self) -> usize {
        (self.taps() - 1) * self.channels
    }

    fn taps(&self) -> usize {
        let (elements, channels) = (self.weights.len(), self.channels);
        assert!(
            channels > 0 && elements > 0 && elements.is_multiple_of(channels),
            "weights must be a whole number of taps of {channels} channels, got {elements} elements"
        );
        elements / channels
    }
}

/// Computes the causal depthwise convolution of the columns of `x`: column c of row t of `out: [rows, channels]` is
/// `activation(bias[c] + sum over k of weights[k][c] * x[t - taps + 1 + k][c])`, where rows before a segment are those of
/// its state. Taps are added from the oldest on.
///
/// `states` holds a slot per row; the state starts at the first column of the view. Rows of `out` that belong to no
/// segment are unchanged.
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
/// use ferrule_kernels::scan::{CausalConvolution, Segment, causal_convolution};
/// use ferrule_kernels::{Cancel, Exec, Pool, Rows, RowsMut};
///
/// let (pool, cancel) = (Pool::new(NonZeroUsize::MIN), Cancel::new());
/// let exec = Exec { isa: Isa::best(), pool: &pool, cancel: &cancel };
/// let weights = [10.0, 1.0]; // two taps of one channel
/// let convolution = CausalConvolution { channels: 1, weights: &weights, bias: None, activation: None, gates: None };
/// let mut states = [0.0; 2]; // two slots
/// let mut out = [0.0; 2];
///
/// let start = Segment { first_row: 0, rows: 2, old: None, new: 1 };
/// let states = RowsMut::new(&mut states, 1, 0);
/// causal_convolution(&exec, Rows::new(&[2.0, 3.0], 1, 0), &convolution, &[start], states, &mut out)?;
/// assert_eq!(out, [2.0, 23.0]);
/// # Ok::<(), ferrule_kernels::PoolError>(())
/// ```
pub fn causal_convolution(
    exec: &Exec<'_>,
    x: Rows<'_>,
    convolution: &CausalConvolution<'_>,
    segments: &[Segment],
    states: RowsMut<'_>,
    out: &mut [f32],
) -> Result<(), PoolError> {
    let (channels, taps) = (convolution.channels, convolution.taps());
    assert!(convolution.bias.is_none_or(|bias| bias.len() == channels), "bias must have an element per channel");
    let part = |first: usize| {
        let columns = first..channels.min(first + PART_CHANNELS);
        Part { state: columns.start * (taps - 1)..columns.end * (taps - 1), columns }
    };
    let parts: Vec<_> = (0..channels).step_by(PART_CHANNELS).map(part).collect();
    // An activation costs about as much as a dozen additions.
    let work = if convolution.activation.is_some() { 8 } else { 1 };
    for_steps(exec, segments, states, out, channels, (&parts, work), |step| {
        exec.isa.run(Convolve { x, convolution, taps, step });
    })
}

struct Convolve<'a> {
    x: Rows<'a>,
    convolution: &'a CausalConvolution<'a>,
    taps: usize,
    step: Step<'a>,
}

impl Convolve<'_> {
    /// Returns the sum over the taps for `len` channels of the part from `at` on. `inputs` holds the input and its factor
    /// of each tap.
    #[inline(always)]
    fn sum<S: Simd>(&self, simd: S, inputs: &[[&[f32]; 2]], at: usize, len: usize) -> S::F32 {
        let CausalConvolution { channels, weights, bias, gates, .. } = *self.convolution;
        let channel = self.step.out.columns().start + at;
        let mut sum = match bias {
            Some(bias) => load_up_to(simd, &bias[channel..][..len]),
            None => simd.splat(0.0),
        };
        for (weights, [x, factors]) in weights.chunks_exact(channels).zip(inputs) {
            let mut x = load_up_to(simd, &x[at..][..len]);
            if gates.is_some() {
                x = simd.mul(x, load_up_to(simd, &factors[at..][..len]));
            }
            sum = simd.mul_add(load_up_to(simd, &weights[channel..][..len]), x, sum);
        }
        sum
    }
}

impl Kernel for Convolve<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, simd: S) {
        let Convolve { x, convolution, taps, .. } = self;
        let (columns, rows) = (self.step.out.columns(), self.step.rows.clone());
        let (channels, width) = (convolution.channels, columns.len());
        let gates = convolution.gates;
        let input = |row: usize| {
            let factors = gates.map_or(&ONES[..width], |gates| &gates.input.row(row, channels)[columns.clone()]);
            [&x.row(row, channels)[columns.clone()], factors]
        };
        let Step { old, ref mut new, .. } = self.step;
        let new = std::mem::take(new);
        let mut inputs: Vec<[&[f32]; 2]> = old.chunks_exact(width).map(|x| [x, &ONES[..width]]).collect();
        inputs.extend(rows.clone().map(input));
        for (index, (inputs, row)) in inputs.windows(taps).zip(rows).enumerate() {
            let output = gates.map(|gates| &gates.output.row(row, channels)[columns.clone()]);
            let mut at = 0;
            while at < width {
                let len = LANES.min(width - at);
                let mut value = self.sum(simd, inputs, at, len);
                if let Some(activation) = convolution.activation {
                    value = activation.apply(simd, value);
                }
                if let Some(factors) = output {
                    value = simd.mul(value, load_up_to(simd, &factors[at..][..len]));
                }
                store_up_to(simd, value, &mut self.step.out.row(index)[at..][..len]);
                at += len;
            }
        }
        // The inputs that the next row reads.
        let last = &inputs[inputs.len() + 1 - taps..];
        for (new, [x, factors]) in new.chunks_exact_mut(width).zip(last) {
            for ((new, x), factor) in new.iter_mut().zip(*x).zip(*factors) {
                *new = x * factor;
            }
        }
    }
}
