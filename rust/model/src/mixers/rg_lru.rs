//! RG-LRU, the real-gated linear recurrent unit of Griffin (De et al. 2024; RecurrentGemma).
//!
//! Values pass a causal convolution u. Two gates i and r of each head read the head's part of u. Channels decay by
//! `a = exp(-8 r softplus(p))`, and `h = a h + sqrt(1 - a^2) i u`; the factor is 1 for the first token. The output is
//! multiplied by an activated projection of the input.
//!
//! This is the recurrence of Mamba with one element per channel, steps `s = -ln a`, and inputs divided by s.

use ferrule_kernels::activation::apply_gate;
use ferrule_kernels::scan::{SelectiveScan, causal_convolution, selective_scan, selective_scan_state_len};
use ferrule_kernels::{PackedMatrix, PoolError, Rows, Scratch};
use serde::{Deserialize, Serialize};

use super::convolution::Convolution;
use super::{At, Mixer, MixerPass};
use crate::layer::{adapted, adapted_output, for_rows};
use crate::limits::{SpecError, require, size};
use crate::memory::{Memory, MemoryNeed};
use crate::rope::RopeSpec;
use crate::spec::ActivationSpec;
use crate::weights::{Linear, LoadError, Loader, Packer, Tensors};

/// RG-LRU with its convolution and the gate of its output.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct RgLruSpec {
    /// Number of channels of values, gate and output, a multiple of `heads`.
    pub channels: usize,
    /// Number of heads, whose gates read only the head.
    pub heads: usize,
    /// Number of rows that a row of the convolution depends on, its own included.
    pub taps: usize,
    /// Activation of the gate of the output.
    pub activation: ActivationSpec,
}

/// Factor of the logarithm of the decay.
const DECAY: f32 = 8.0;

/// Weights of an RG-LRU.
pub(crate) struct RgLru<M = PackedMatrix> {
    /// Rows: values, gate of the output.
    input: Linear<M>,
    convolution: Convolution,
    /// For each head, rows: gate of the input, gate of the decay.
    heads: Vec<Linear<M>>,
    /// Step of each channel where the gate of the decay is 1.
    steps: Vec<f32>,
    scan: SelectiveScan,
    output: Linear<M>,
}

/// Buffers of an RG-LRU. Shapes: `[rows, width]`.
#[derive(Default)]
pub(crate) struct Buffers {
    projected: Scratch<f32>,
    convolved: Scratch<f32>,
    /// Values of one head.
    head: Scratch<f32>,
    /// Gates of all heads: `[heads, rows, 2 * head width]`.
    gates: Scratch<f32>,
    /// Inputs and steps of the scan.
    inputs: Scratch<f32>,
    mixed: Scratch<f32>,
}

impl RgLruSpec {
    /// Returns the channels of a head.
    fn head_width(&self) -> usize {
        self.channels / self.heads
    }

    /// Returns the floats of the states of all channels.
    fn states(&self) -> usize {
        selective_scan_state_len(self.channels, 1)
    }

    /// Computes the inputs of the scan, then its steps: `[rows, 2 * channels]`.
    fn scan_inputs(
        &self,
        pass: &MixerPass<'_>,
        full_steps: &[f32],
        (values, gates): (&[f32], &[f32]),
        out: &mut [f32],
    ) -> Result<(), PoolError> {
        let (rows, channels, width) = (pass.rows.count, self.channels, self.head_width());
        let mut is_first = vec![false; rows];
        let starts = pass.segments().iter().filter(|segment| segment.old.is_none() && segment.rows > 0);
        starts.for_each(|segment| is_first[segment.first_row] = true);
        let sigmoid = |x: f32| 1.0 / (1.0 + (-x).exp());
        for_rows(&pass.exec, rows, out, 2 * channels, |row, out| {
            let (inputs, steps) = out.split_at_mut(channels);
            for channel in 0..channels {
                let (head, place) = (channel / width, channel % width);
                let gates = &gates[(head * rows + row) * 2 * width..][..2 * width];
                let step = (full_steps[channel] * sigmoid(gates[width + place])).max(f32::MIN_POSITIVE);
                let factor = if is_first[row] { 1.0 } else { (-(-2.0 * step).exp_m1()).sqrt() };
                inputs[channel] = values[row * channels + channel] * sigmoid(gates[place]) * (factor / step);
                steps[channel] = step;
            }
        })
    }
}

impl Mixer for RgLruSpec {
    type Weights<M> = RgLru<M>;
    type Buffers = Buffers;

    fn check(&self, path: &str, _: &[RopeSpec], _: usize) -> Result<(), SpecError> {
        size(&format!("{path}.channels"), self.channels)?;
        size(&format!("{path}.heads"), self.heads)?;
        require(&format!("{path}.heads"), self.heads, self.channels.is_multiple_of(self.heads), || {
            format!("a divisor of channels ({})", self.channels)
        })?;
        Convolution::check(path, self.taps)
    }

    fn load<P: Packer>(
        &self,
        loader: &Loader<'_>,
        packer: &mut P,
        At { prefix: at, .. }: At<'_>,
    ) -> Result<RgLru<P::Matrix>, LoadError> {
        let Self { channels, heads, taps, .. } = *self;
        let (hidden, usual, fine) = (loader.hidden_size(), loader.usual(), loader.values());
        let width = self.head_width();
        let gates = [("input_gate", width, fine), ("decay_gate", width, fine)];
        let heads = (0..heads).map(|head| loader.linear(packer, &format!("{at}heads.{head}."), &gates, width, true));
        let heads = heads.collect::<Result<_, _>>()?;
        let mut steps = loader.vector(&format!("{at}decay.weight"), channels)?;
        // The softplus.
        steps.iter_mut().for_each(|step| *step = DECAY * (step.max(0.0) + (-step.abs()).exp().ln_1p()));
        Ok(RgLru {
            input: loader.linear(packer, at, &[("x", channels, fine), ("gate", channels, usual)], hidden, true)?,
            convolution: Convolution::load(loader, at, channels, taps, true)?,
            heads,
            steps,
            scan: SelectiveScan::new(&vec![-1.0; channels], &vec![0.0; channels]),
            output: loader.linear(packer, at, &[("output", hidden, usual)], channels, true)?,
        })
    }

    fn list<'a, M>(weights: &'a RgLru<M>, tensors: &mut Tensors<'a, M>) {
        let RgLru { input, convolution, heads, steps, scan: _, output } = weights;
        tensors.linear(input);
        convolution.list(tensors);
        heads.iter().for_each(|head| tensors.linear(head));
        tensors.vectors.push(steps);
        tensors.linear(output);
    }

    fn memory(&self) -> Vec<MemoryNeed> {
        let floats = self.states() + Convolution::state_len(self.channels, self.taps);
        vec![MemoryNeed::State { floats }]
    }

    fn buffer_floats(&self, _: usize, rows: usize) -> usize {
        rows * (8 * self.channels + self.head_width())
    }

    fn longest_input(&self, hidden_size: usize) -> usize {
        hidden_size.max(self.channels)
    }

    fn run(
        &self,
        weights: &RgLru,
        pass: &MixerPass<'_>,
        memory: &mut Memory,
        x: &[f32],
        buffers: &mut Buffers,
        out: &mut [f32],
    ) -> Result<(), PoolError> {
        let (exec, rows, channels, width) = (&pass.exec, pass.rows.count, self.channels, self.head_width());
        let projected = buffers.projected.take(rows * 2 * channels);
        adapted(exec, &weights.input, pass.adapters, x, projected)?;
        let [values, gate] = [0, channels].map(|first| Rows::new(projected, 2 * channels, first));
        let convolved = buffers.convolved.take(rows * channels);
        let convolution = weights.convolution.kernel(None, None);
        let (segments, states) = pass.states(memory, self.states());
        causal_convolution(exec, values, &convolution, segments, states, convolved)?;

        let (head, gates) = (buffers.head.take(rows * width), buffers.gates.take(rows * 2 * channels));
        for ((index, linear), gates) in weights.heads.iter().enumerate().zip(gates.chunks_exact_mut(rows * 2 * width)) {
            for_rows(exec, rows, head, width, |row, to| {
                to.copy_from_slice(&convolved[row * channels + index * width..][..width]);
            })?;
            adapted(exec, linear, pass.adapters, head, gates)?;
        }
        let inputs = buffers.inputs.take(rows * 2 * channels);
        self.scan_inputs(pass, &weights.steps, (convolved, gates), inputs)?;

        let ones = vec![1.0; rows];
        let [inputs, steps] = [0, channels].map(|first| Rows::new(inputs, 2 * channels, first));
        let one = Rows::new(&ones, 1, 0);
        let mixed = buffers.mixed.take(rows * channels);
        let (segments, states) = pass.states(memory, 0);
        selective_scan(exec, [inputs, steps, one, one], &weights.scan, segments, states, mixed)?;
        apply_gate(exec, mixed, channels, gate, self.activation.into())?;
        adapted_output(exec, &weights.output, pass.adapters, mixed, out)
    }
}
