//! Delta nets: linear attention whose state decays and learns by a delta rule. Gated delta net (Yang et al. 2024; Qwen3-Next,
//! Qwen3.5, OLMo hybrid) and Kimi delta attention (Kimi Team 2025).
//!
//! Queries, keys and values are projections of the input that pass a causal convolution and an activation; queries and
//! keys then have unit length. The output of each head is normed, and multiplied by a gate.

use ferrule_kernels::activation::apply_gate;
use ferrule_kernels::norm::l2_norm_heads;
use ferrule_kernels::scan::{
    Decay, Gate, LinearAttention, UpdateRule, causal_convolution, gates, linear_attention, linear_attention_state_len,
};
use ferrule_kernels::{Exec, PackedMatrix, PoolError, Rows, RowsMut, Scratch};
use serde::{Deserialize, Serialize};

use super::convolution::Convolution;
use super::{At, Mixer, MixerPass};
use crate::layer::{adapted, adapted_output, norm_heads};
use crate::limits::{SpecError, finite, require, size};
use crate::memory::{Memory, MemoryNeed};
use crate::rope::RopeSpec;
use crate::spec::{ActivationSpec, NormSpec, check_norm};
use crate::weights::{Linear, LoadError, Loader, Norm, Packer, Tensors};

/// Delta net.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct DeltaNetSpec {
    /// Number of heads of queries and keys, a divisor of `value_heads`.
    pub key_heads: usize,
    /// Number of heads of values and states.
    pub value_heads: usize,
    /// Whether value head h reads key head `h % key_heads`, rather than `h / (value_heads / key_heads)`.
    pub alternating: bool,
    /// Length of a query or key head.
    pub key_dim: usize,
    /// Length of a value head.
    pub value_dim: usize,
    /// Number of rows that a row of the convolution depends on, its own included.
    pub taps: usize,
    /// Activation of queries, keys and values.
    pub activation: ActivationSpec,
    /// Largest factor of an update: 2 allows negative eigenvalues.
    pub update_scale: f32,
    /// Decay of the state.
    pub decay: DecaySpec,
    /// Activation of the gate of the output.
    pub gate: ActivationSpec,
    /// Rank of the gate's projection, which is then the product of two; `None` for one matrix.
    pub gate_rank: Option<usize>,
    /// Norm of each head of the output, with a weight that the heads share.
    pub norm: NormSpec,
}

/// Decay of a delta net's state, from a projection f of the input, with a rate for each head.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct DecaySpec {
    /// Whether each element of the key has its own factor (Kimi delta attention), rather than each head.
    pub by_key: bool,
    /// Rank of the projection, which is then the product of two; `None` for one matrix.
    pub rank: Option<usize>,
    /// Logarithm b of the smallest factor: the factor is `exp(b * sigmoid(rate * (f(x) + bias)))`. `None` for
    /// `exp(-rate * softplus(f(x) + bias))`.
    pub lower_bound: Option<f32>,
}

/// Added to the squared length of queries and keys.
const LENGTH_EPS: f32 = 1e-6;

/// Weights of a delta net.
pub(crate) struct DeltaNet<M = PackedMatrix> {
    /// Rows: queries, keys, values; then the factors of updates, the decay and the gate, unless of low rank.
    input: Linear<M>,
    decay: Option<LowRank<M>>,
    gate: Option<LowRank<M>>,
    convolution: Convolution,
    /// One for each column of the decay: minus the rates, or the slopes of a bounded decay.
    rates: Vec<f32>,
    decay_bias: Vec<f32>,
    norm: Norm,
    output: Linear<M>,
}

/// A projection that is the product of two.
struct LowRank<M> {
    first: Linear<M>,
    second: Linear<M>,
}

/// Buffers of a delta net. Shapes: `[rows, width]`.
#[derive(Default)]
pub(crate) struct Buffers {
    projected: Scratch<f32>,
    /// Outputs of the first matrices of low-rank projections.
    ranks: Scratch<f32>,
    /// Outputs of the low-rank projections.
    expanded: [Scratch<f32>; 2],
    convolved: Scratch<f32>,
    decays: Scratch<f32>,
    factors: Scratch<f32>,
    mixed: Scratch<f32>,
}

impl DeltaNetSpec {
    fn keys(&self) -> usize {
        self.key_heads * self.key_dim
    }

    fn values(&self) -> usize {
        self.value_heads * self.value_dim
    }

    /// Returns the channels of the convolution.
    fn channels(&self) -> usize {
        2 * self.keys() + self.values()
    }

    /// Returns the columns of the decay.
    fn decays(&self) -> usize {
        if self.decay.by_key { self.value_heads * self.key_dim } else { self.value_heads }
    }

    /// Returns the rows of the projection from the input.
    fn projected(&self) -> usize {
        let decay = if self.decay.rank.is_none() { self.decays() } else { 0 };
        let gate = if self.gate_rank.is_none() { self.values() } else { 0 };
        self.channels() + self.value_heads + decay + gate
    }

    /// Returns the floats of the state matrices.
    fn matrices(&self) -> usize {
        linear_attention_state_len(self.value_heads, self.key_dim, self.value_dim)
    }
}

impl<M> LowRank<M> {
    /// Loads `<at><role>_a` and `<at><role>_b`.
    fn load<P: Packer<Matrix = M>>(
        loader: &Loader<'_>,
        packer: &mut P,
        at: &str,
        role: &str,
        rank: Option<usize>,
        outputs: usize,
    ) -> Result<Option<Self>, LoadError> {
        let Some(rank) = rank else { return Ok(None) };
        let format = loader.values();
        Ok(Some(Self {
            first: loader.linear(packer, at, &[(&format!("{role}_a"), rank, format)], loader.hidden_size(), false)?,
            second: loader.linear(packer, at, &[(&format!("{role}_b"), outputs, format)], rank, false)?,
        }))
    }

    fn list<'a>(&'a self, tensors: &mut Tensors<'a, M>) {
        tensors.linear(&self.first);
        tensors.linear(&self.second);
    }
}

impl LowRank<PackedMatrix> {
    /// Returns the projection of `x`.
    fn run<'b>(
        &self,
        pass: &MixerPass<'_>,
        x: &[f32],
        rank: &mut Scratch<f32>,
        out: &'b mut Scratch<f32>,
    ) -> Result<Rows<'b>, PoolError> {
        let (rows, width) = (pass.rows.count, self.second.outputs);
        let rank = rank.take(rows * self.first.outputs);
        adapted(&pass.exec, &self.first, pass.adapters, x, rank)?;
        let out = out.take(rows * width);
        adapted(&pass.exec, &self.second, pass.adapters, rank, out)?;
        Ok(Rows::new(out, width, 0))
    }
}

impl Mixer for DeltaNetSpec {
    type Weights<M> = DeltaNet<M>;
    type Buffers = Buffers;

    fn check(&self, path: &str, _: &[RopeSpec], _: usize) -> Result<(), SpecError> {
        let Self { key_heads, value_heads, key_dim, value_dim, decay, .. } = self;
        let sizes =
            [("key_heads", key_heads), ("value_heads", value_heads), ("key_dim", key_dim), ("value_dim", value_dim)];
        for (name, &value) in sizes {
            size(&format!("{path}.{name}"), value)?;
        }
        for (name, value) in [("keys", self.keys()), ("values", self.values()), ("state", self.matrices())] {
            size(&format!("{path} ({name} of all heads)"), value)?;
        }
        for (name, rank) in [("decay.rank", decay.rank), ("gate_rank", self.gate_rank)] {
            rank.map_or(Ok(()), |rank| size(&format!("{path}.{name}"), rank))?;
        }
        require(&format!("{path}.key_heads"), key_heads, value_heads.is_multiple_of(*key_heads), || {
            format!("a divisor of value_heads ({value_heads})")
        })?;
        finite(&format!("{path}.update_scale"), self.update_scale)?;
        finite(&format!("{path}.decay.lower_bound"), decay.lower_bound.unwrap_or(0.0))?;
        check_norm(&format!("{path}.norm"), Some(self.norm))?;
        Convolution::check(path, self.taps)
    }

    fn load<P: Packer>(
        &self,
        loader: &Loader<'_>,
        packer: &mut P,
        At { prefix: at, .. }: At<'_>,
    ) -> Result<DeltaNet<P::Matrix>, LoadError> {
        let (hidden, usual, fine) = (loader.hidden_size(), loader.usual(), loader.values());
        let (decay, gate) = (self.decay.rank.is_none(), self.gate_rank.is_none());
        let mut parts = vec![("q", self.keys(), usual), ("k", self.keys(), usual), ("v", self.values(), fine)];
        parts.push(("factor", self.value_heads, fine));
        parts.extend(decay.then_some(("decay", self.decays(), fine)));
        parts.extend(gate.then_some(("gate", self.values(), usual)));
        let by_column = self.decays() / self.value_heads;
        let rates = loader.vector(&format!("{at}decay_log.weight"), self.value_heads)?;
        let sign = if self.decay.lower_bound.is_some() { 1.0 } else { -1.0 };
        Ok(DeltaNet {
            input: loader.linear(packer, at, &parts, hidden, false)?,
            decay: LowRank::load(loader, packer, at, "decay", self.decay.rank, self.decays())?,
            gate: LowRank::load(loader, packer, at, "gate", self.gate_rank, self.values())?,
            convolution: Convolution::load(loader, at, self.channels(), self.taps, false)?,
            rates: rates.iter().flat_map(|rate| std::iter::repeat_n(sign * rate.exp(), by_column)).collect(),
            decay_bias: loader.vector(&format!("{at}decay_bias.weight"), self.decays())?,
            norm: loader.norm(&format!("{at}norm"), self.norm, self.value_dim)?,
            output: loader.linear(packer, at, &[("output", hidden, usual)], self.values(), false)?,
        })
    }

    fn list<'a, M>(weights: &'a DeltaNet<M>, tensors: &mut Tensors<'a, M>) {
        let DeltaNet { input, decay, gate, convolution, rates, decay_bias, norm, output } = weights;
        tensors.linear(input);
        [decay, gate].into_iter().flatten().for_each(|low_rank| low_rank.list(tensors));
        convolution.list(tensors);
        tensors.vectors.extend([rates, decay_bias]);
        tensors.norm(norm);
        tensors.linear(output);
    }

    fn memory(&self) -> Vec<MemoryNeed> {
        let floats = self.matrices() + Convolution::state_len(self.channels(), self.taps);
        vec![MemoryNeed::State { floats }]
    }

    fn buffer_floats(&self, _: usize, rows: usize) -> usize {
        let low_rank = |rank: Option<usize>, outputs: usize| rank.map_or(0, |rank| rank + outputs);
        let expanded = low_rank(self.decay.rank, self.decays()) + low_rank(self.gate_rank, self.values());
        rows * (self.projected() + self.channels() + self.decays() + self.value_heads + self.values() + expanded)
    }

    fn longest_input(&self, hidden_size: usize) -> usize {
        hidden_size.max(self.values())
    }

    fn run(
        &self,
        weights: &DeltaNet,
        pass: &MixerPass<'_>,
        memory: &mut Memory,
        x: &[f32],
        buffers: &mut Buffers,
        out: &mut [f32],
    ) -> Result<(), PoolError> {
        let Self { key_heads, value_heads, key_dim, value_dim, .. } = *self;
        let (exec, rows) = (&pass.exec, pass.rows.count);
        let Buffers { projected, ranks, expanded: [expanded_decay, expanded_gate], convolved, .. } = buffers;
        let (channels, keys, width) = (self.channels(), self.keys(), self.projected());
        let projected = projected.take(rows * width);
        adapted(exec, &weights.input, pass.adapters, x, projected)?;
        let view = |first| Rows::new(projected, width, first);
        let decay = match &weights.decay {
            Some(decay) => decay.run(pass, x, ranks, expanded_decay)?,
            None => view(channels + value_heads),
        };
        let gate = match &weights.gate {
            Some(gate) => gate.run(pass, x, ranks, expanded_gate)?,
            None => view(width - self.values()),
        };

        let convolved = convolved.take(rows * channels);
        let convolution = weights.convolution.kernel(Some(self.activation.into()), None);
        let (segments, states) = pass.states(memory, self.matrices());
        causal_convolution(exec, view(0), &convolution, segments, states, convolved)?;
        for (first, scale) in [(0, 1.0 / (key_dim as f32).sqrt()), (keys, 1.0)] {
            let heads = RowsMut::new(convolved, channels, first);
            l2_norm_heads(exec, heads, key_heads, key_dim, LENGTH_EPS, scale)?;
        }

        let factors = buffers.factors.take(rows * value_heads);
        gates(exec, view(channels), &Gate::Sigmoid { scale: self.update_scale }, value_heads, factors)?;
        let decays = buffers.decays.take(rows * self.decays());
        self.decay_factors(exec, weights, decay, decays)?;
        let decays = Rows::new(decays, self.decays(), 0);
        let attention = LinearAttention {
            heads: value_heads,
            key_heads,
            alternating: self.alternating,
            key_dim,
            value_dim,
            decay: if self.decay.by_key { Decay::Keys(decays) } else { Decay::Heads(decays) },
            rule: UpdateRule::Delta,
            factor: Some(Rows::new(factors, value_heads, 0)),
            skip: None,
        };
        let mixed = buffers.mixed.take(rows * self.values());
        let [q, k, v] = [0, keys, 2 * keys].map(|first| Rows::new(convolved, channels, first));
        let (segments, states) = pass.states(memory, 0);
        linear_attention(exec, q, k, v, &attention, segments, states, mixed)?;

        norm_heads(exec, &weights.norm, RowsMut::new(mixed, self.values(), 0), value_heads, value_dim)?;
        apply_gate(exec, mixed, self.values(), gate, self.gate.into())?;
        adapted_output(exec, &weights.output, pass.adapters, mixed, out)
    }
}

impl DeltaNetSpec {
    /// Computes the factors of the decay from its projection.
    fn decay_factors(
        &self,
        exec: &Exec<'_>,
        DeltaNet { rates, decay_bias: bias, .. }: &DeltaNet,
        decay: Rows<'_>,
        out: &mut [f32],
    ) -> Result<(), PoolError> {
        let gate = match self.decay.lower_bound {
            Some(bound) => Gate::BoundedDecay { bias, slopes: rates, bound },
            None => Gate::Decay { bias, limits: [0.0, f32::INFINITY], rates },
        };
        gates(exec, decay, &gate, self.decays(), out)
    }
}
