//! Mamba (Gu and Dao 2023): a recurrence of each channel, whose steps and inputs depend on the tokens.
//!
//! One projection of the input gives values x and a gate. Values pass a causal convolution and SiLU; a projection of them
//! gives step sizes in a low rank, keys b and queries c, which some families norm. The output is multiplied by the SiLU of
//! the gate.

use ferrule_kernels::activation::{Activation, apply_gate};
use ferrule_kernels::scan::{Gate, SelectiveScan, causal_convolution, gates, selective_scan, selective_scan_state_len};
use ferrule_kernels::{PackedMatrix, PoolError, Rows, RowsMut, Scratch};
use serde::{Deserialize, Serialize};

use super::convolution::Convolution;
use super::{At, Mixer, MixerPass};
use crate::layer::{adapted, adapted_output, for_rows, norm_heads};
use crate::limits::{SpecError, size};
use crate::memory::{Memory, MemoryNeed};
use crate::rope::RopeSpec;
use crate::spec::{NormSpec, check_norm};
use crate::weights::{Linear, LoadError, Loader, Norm, Packer, Tensors};

/// Mamba.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct MambaSpec {
    /// Number of channels of values, gate and output.
    pub channels: usize,
    /// Number of elements of the state of a channel: the length of keys and queries.
    pub state_size: usize,
    /// Rank of the projection to step sizes.
    pub step_rank: usize,
    /// Number of rows that a row of the convolution depends on, its own included.
    pub taps: usize,
    /// Whether the projections from and to the residual stream add a bias.
    pub bias: bool,
    /// Whether the convolution adds a bias.
    pub kernel_bias: bool,
    /// Norm of step sizes in their low rank, of keys and of queries, each with its own weight.
    pub norm: Option<NormSpec>,
}

/// Weights of Mamba.
pub(crate) struct Mamba<M = PackedMatrix> {
    /// Rows: values, gate.
    input: Linear<M>,
    convolution: Convolution,
    /// Rows: step sizes in their low rank, keys, queries.
    inner: Linear<M>,
    /// Projection of step sizes from their low rank.
    step: Linear<M>,
    step_bias: Vec<f32>,
    /// Norms of step sizes, keys and queries.
    norms: Option<[Norm; 3]>,
    scan: SelectiveScan,
    output: Linear<M>,
}

/// Buffers of Mamba. Shapes: `[rows, width]`.
#[derive(Default)]
pub(crate) struct Buffers {
    projected: Scratch<f32>,
    convolved: Scratch<f32>,
    inner: Scratch<f32>,
    ranks: Scratch<f32>,
    unlimited: Scratch<f32>,
    steps: Scratch<f32>,
    mixed: Scratch<f32>,
}

impl MambaSpec {
    /// Returns the columns of the parts of the inner projection: step sizes, keys, queries.
    fn parts(&self) -> [usize; 3] {
        [self.step_rank, self.state_size, self.state_size]
    }

    fn inner(&self) -> usize {
        self.parts().iter().sum()
    }

    /// Returns the floats of the states of all channels.
    fn states(&self) -> usize {
        selective_scan_state_len(self.channels, self.state_size)
    }
}

impl Mixer for MambaSpec {
    type Weights<M> = Mamba<M>;
    type Buffers = Buffers;

    fn check(&self, path: &str, _: &[RopeSpec], _: usize) -> Result<(), SpecError> {
        let Self { channels, state_size, step_rank, .. } = *self;
        for (name, value) in [("channels", channels), ("state_size", state_size), ("step_rank", step_rank)] {
            size(&format!("{path}.{name}"), value)?;
        }
        size(&format!("{path} (state of all channels)"), self.states())?;
        check_norm(&format!("{path}.norm"), self.norm)?;
        Convolution::check(path, self.taps)
    }

    fn load<P: Packer>(
        &self,
        loader: &Loader<'_>,
        packer: &mut P,
        At { prefix: at, .. }: At<'_>,
    ) -> Result<Mamba<P::Matrix>, LoadError> {
        let Self { channels, state_size, step_rank, taps, bias, kernel_bias, norm } = *self;
        let (hidden, usual, fine) = (loader.hidden_size(), loader.usual(), loader.values());
        let input = [("x", channels, fine), ("gate", channels, usual)];
        let inner = [("step_in", step_rank, fine), ("b", state_size, fine), ("c", state_size, fine)];
        let norms = |spec| -> Result<_, LoadError> {
            let [step, b, c] = self.parts();
            Ok([
                loader.norm(&format!("{at}step_norm"), spec, step)?,
                loader.norm(&format!("{at}b_norm"), spec, b)?,
                loader.norm(&format!("{at}c_norm"), spec, c)?,
            ])
        };
        let mut rates = loader.table("the rates of Mamba", &format!("{at}decay_log.weight"), [channels, state_size])?;
        rates.iter_mut().for_each(|rate| *rate = -rate.exp());
        let skip = loader.vector(&format!("{at}skip.weight"), channels)?;
        Ok(Mamba {
            input: loader.linear(packer, at, &input, hidden, bias)?,
            convolution: Convolution::load(loader, at, channels, taps, kernel_bias)?,
            inner: loader.linear(packer, at, &inner, channels, false)?,
            step: loader.linear(packer, at, &[("step", channels, fine)], step_rank, false)?,
            step_bias: loader.vector(&format!("{at}step_bias.weight"), channels)?,
            norms: norm.map(norms).transpose()?,
            scan: SelectiveScan::new(&rates, &skip),
            output: loader.linear(packer, at, &[("output", hidden, usual)], channels, bias)?,
        })
    }

    fn list<'a, M>(weights: &'a Mamba<M>, tensors: &mut Tensors<'a, M>) {
        let Mamba { input, convolution, inner, step, step_bias, norms, scan, output } = weights;
        tensors.linear(input);
        convolution.list(tensors);
        tensors.linear(inner);
        tensors.linear(step);
        tensors.vectors.push(step_bias);
        norms.iter().flatten().for_each(|norm| tensors.norm(norm));
        tensors.vectors.extend(scan.vectors());
        tensors.linear(output);
    }

    fn memory(&self) -> Vec<MemoryNeed> {
        let floats = self.states() + Convolution::state_len(self.channels, self.taps);
        vec![MemoryNeed::State { floats }]
    }

    fn buffer_floats(&self, _: usize, rows: usize) -> usize {
        rows * (6 * self.channels + self.inner() + self.step_rank)
    }

    fn longest_input(&self, hidden_size: usize) -> usize {
        hidden_size.max(self.channels).max(self.step_rank)
    }

    fn run(
        &self,
        weights: &Mamba,
        pass: &MixerPass<'_>,
        memory: &mut Memory,
        x: &[f32],
        buffers: &mut Buffers,
        out: &mut [f32],
    ) -> Result<(), PoolError> {
        let (exec, rows, channels, rank) = (&pass.exec, pass.rows.count, self.channels, self.step_rank);
        let projected = buffers.projected.take(rows * 2 * channels);
        adapted(exec, &weights.input, pass.adapters, x, projected)?;

        let convolved = buffers.convolved.take(rows * channels);
        let convolution = weights.convolution.kernel(Some(Activation::Silu), None);
        let (segments, states) = pass.states(memory, self.states());
        let values = Rows::new(projected, 2 * channels, 0);
        causal_convolution(exec, values, &convolution, segments, states, convolved)?;

        let width = self.inner();
        let inner = buffers.inner.take(rows * width);
        adapted(exec, &weights.inner, pass.adapters, convolved, inner)?;
        let mut first = 0;
        for (norm, part) in weights.norms.iter().flatten().zip(self.parts()) {
            norm_heads(exec, norm, RowsMut::new(inner, width, first), 1, part)?;
            first += part;
        }

        let ranks = buffers.ranks.take(rows * rank);
        for_rows(exec, rows, ranks, rank, |row, to| to.copy_from_slice(&inner[row * width..][..rank]))?;
        let unlimited = buffers.unlimited.take(rows * channels);
        adapted(exec, &weights.step, pass.adapters, ranks, unlimited)?;
        let steps = buffers.steps.take(rows * channels);
        let gate = Gate::Step { bias: &weights.step_bias, limits: [0.0, f32::INFINITY] };
        gates(exec, Rows::new(unlimited, channels, 0), &gate, channels, steps)?;

        let mixed = buffers.mixed.take(rows * channels);
        let [b, c] = [rank, rank + self.state_size].map(|first| Rows::new(inner, width, first));
        let inputs = [Rows::new(convolved, channels, 0), Rows::new(steps, channels, 0), b, c];
        let (segments, states) = pass.states(memory, 0);
        selective_scan(exec, inputs, &weights.scan, segments, states, mixed)?;
        apply_gate(exec, mixed, channels, Rows::new(projected, 2 * channels, channels), Activation::Silu)?;
        adapted_output(exec, &weights.output, pass.adapters, mixed, out)
    }
}
