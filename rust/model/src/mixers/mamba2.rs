//! Mamba 2 (Dao and Gu 2024): linear attention whose state decays and grows by steps that depend on the input.
//!
//! One projection of the input gives a gate, values x, keys b, queries c and step sizes. Values, keys and queries pass a
//! causal convolution and an activation. The output is multiplied by the SiLU of the gate, and normed before or after.

use ferrule_kernels::activation::{Activation, apply_gate};
use ferrule_kernels::scan::{
    Decay, Gate, LinearAttention, UpdateRule, causal_convolution, gates, linear_attention, linear_attention_state_len,
};
use ferrule_kernels::{Exec, PackedMatrix, PoolError, Rows, RowsMut, Scratch};
use serde::{Deserialize, Serialize};

use super::convolution::Convolution;
use super::{At, Mixer, MixerPass};
use crate::layer::{adapted, adapted_output, for_rows, norm_heads};
use crate::limits::{SpecError, finite, require, size};
use crate::memory::{Memory, MemoryNeed};
use crate::rope::RopeSpec;
use crate::spec::{ActivationSpec, NormSpec, check_norm};
use crate::weights::{Linear, LoadError, Loader, Norm, Packer, Tensors};

/// Mamba 2.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Mamba2Spec {
    /// Number of heads of values, states and outputs.
    pub heads: usize,
    /// Length of a head.
    pub head_dim: usize,
    /// Number of groups of heads that share keys and queries, a divisor of `heads`.
    pub groups: usize,
    /// Length of keys and queries.
    pub state_size: usize,
    /// Number of rows that a row of the convolution depends on, its own included.
    pub taps: usize,
    /// Whether the projection of the input adds a bias.
    pub bias: bool,
    /// Whether the output projection adds a bias.
    pub output_bias: bool,
    /// Whether the convolution adds a bias.
    pub kernel_bias: bool,
    /// Activation of values, keys and queries.
    pub activation: ActivationSpec,
    /// Smallest step size.
    pub min_step: f32,
    /// Largest step size.
    pub max_step: Option<f32>,
    /// Factors of the outputs of the input projection: of the gate, values, keys, queries and step sizes.
    pub scales: Option<[f32; 5]>,
    /// Norm of the output.
    pub norm: Option<NormSpec>,
    /// Number of parts of the output that are normed separately, a divisor of `heads * head_dim`.
    pub norm_groups: usize,
    /// Whether the output is normed before it is multiplied by the gate.
    pub norm_before_gate: bool,
}

/// Weights of Mamba 2.
pub(crate) struct Mamba2<M = PackedMatrix> {
    /// Rows: gate, values, keys, queries, step sizes.
    input: Linear<M>,
    convolution: Convolution,
    /// Rate of each head: `-exp(A_log)`.
    rates: Vec<f32>,
    step_bias: Vec<f32>,
    /// Factor of the values that are added to the outputs.
    skip: Vec<f32>,
    norm: Option<Norm>,
    output: Linear<M>,
}

/// Buffers of Mamba 2. Shapes: `[rows, width]`.
#[derive(Default)]
pub(crate) struct Buffers {
    projected: Scratch<f32>,
    convolved: Scratch<f32>,
    steps: Scratch<f32>,
    decays: Scratch<f32>,
    mixed: Scratch<f32>,
}

impl Mamba2Spec {
    /// Returns the columns of gate, values and outputs.
    fn inner(&self) -> usize {
        self.heads * self.head_dim
    }

    /// Returns the columns of keys, which are those of queries.
    fn keys(&self) -> usize {
        self.groups * self.state_size
    }

    /// Returns the channels of the convolution: values, keys, queries.
    fn channels(&self) -> usize {
        self.inner() + 2 * self.keys()
    }

    /// Returns the columns of the parts of the input projection.
    fn parts(&self) -> [usize; 5] {
        [self.inner(), self.inner(), self.keys(), self.keys(), self.heads]
    }

    fn projected(&self) -> usize {
        self.parts().iter().sum()
    }

    /// Returns the floats of the state matrices.
    fn matrices(&self) -> usize {
        linear_attention_state_len(self.heads, self.state_size, self.head_dim)
    }

    /// Multiplies the parts of the rows by their factors, if there are any.
    fn apply_scales(&self, exec: &Exec<'_>, tokens: usize, projected: &mut [f32]) -> Result<(), PoolError> {
        let Some(scales) = self.scales else { return Ok(()) };
        for_rows(exec, tokens, projected, self.projected(), |_, row| {
            let mut rest = row;
            for (width, scale) in self.parts().into_iter().zip(scales) {
                let (part, others) = rest.split_at_mut(width);
                part.iter_mut().for_each(|x| *x *= scale);
                rest = others;
            }
        })
    }
}

impl Mixer for Mamba2Spec {
    type Weights<M> = Mamba2<M>;
    type Buffers = Buffers;

    fn check(&self, path: &str, _: &[RopeSpec], _: usize) -> Result<(), SpecError> {
        let Self { heads, head_dim, groups, state_size, norm_groups, .. } = *self;
        let sizes = [("heads", heads), ("head_dim", head_dim), ("groups", groups), ("state_size", state_size)];
        for (name, value) in sizes.into_iter().chain([("norm_groups", norm_groups)]) {
            size(&format!("{path}.{name}"), value)?;
        }
        for (name, value) in [("values", self.inner()), ("keys", self.keys()), ("state", self.matrices())] {
            size(&format!("{path} ({name} of all heads)"), value)?;
        }
        require(&format!("{path}.groups"), groups, heads.is_multiple_of(groups), || {
            format!("a divisor of heads ({heads})")
        })?;
        require(&format!("{path}.norm_groups"), norm_groups, self.inner().is_multiple_of(norm_groups), || {
            format!("a divisor of heads * head_dim ({})", self.inner())
        })?;
        finite(&format!("{path}.min_step"), self.min_step)?;
        finite(&format!("{path}.max_step"), self.max_step.unwrap_or(0.0))?;
        self.scales.into_iter().flatten().try_for_each(|scale| finite(&format!("{path}.scales"), scale))?;
        check_norm(&format!("{path}.norm"), self.norm)?;
        Convolution::check(path, self.taps)
    }

    fn load<P: Packer>(
        &self,
        loader: &Loader<'_>,
        packer: &mut P,
        At { prefix: at, .. }: At<'_>,
    ) -> Result<Mamba2<P::Matrix>, LoadError> {
        let (hidden, usual, fine) = (loader.hidden_size(), loader.usual(), loader.values());
        let formats = [("gate", usual), ("x", fine), ("b", usual), ("c", usual), ("step", fine)];
        let parts: Vec<_> =
            formats.into_iter().zip(self.parts()).map(|((role, format), rows)| (role, rows, format)).collect();
        let rates = loader.vector(&format!("{at}decay_log.weight"), self.heads)?;
        let norm = self.norm.map(|norm| loader.norm(&format!("{at}norm"), norm, self.inner()));
        Ok(Mamba2 {
            input: loader.linear(packer, at, &parts, hidden, self.bias)?,
            convolution: Convolution::load(loader, at, self.channels(), self.taps, self.kernel_bias)?,
            rates: rates.iter().map(|rate| -rate.exp()).collect(),
            step_bias: loader.vector(&format!("{at}step_bias.weight"), self.heads)?,
            skip: loader.vector(&format!("{at}skip.weight"), self.heads)?,
            norm: norm.transpose()?,
            output: loader.linear(packer, at, &[("output", hidden, usual)], self.inner(), self.output_bias)?,
        })
    }

    fn list<'a, M>(weights: &'a Mamba2<M>, tensors: &mut Tensors<'a, M>) {
        let Mamba2 { input, convolution, rates, step_bias, skip, norm, output } = weights;
        tensors.linear(input);
        convolution.list(tensors);
        tensors.vectors.extend([rates, step_bias, skip]);
        norm.iter().for_each(|norm| tensors.norm(norm));
        tensors.linear(output);
    }

    fn memory(&self) -> Vec<MemoryNeed> {
        let floats = self.matrices() + Convolution::state_len(self.channels(), self.taps);
        vec![MemoryNeed::State { floats }]
    }

    fn buffer_floats(&self, _: usize, rows: usize) -> usize {
        rows * (self.projected() + self.channels() + 2 * self.heads + self.inner())
    }

    fn longest_input(&self, hidden_size: usize) -> usize {
        hidden_size.max(self.inner())
    }

    fn run(
        &self,
        weights: &Mamba2,
        pass: &MixerPass<'_>,
        memory: &mut Memory,
        x: &[f32],
        buffers: &mut Buffers,
        out: &mut [f32],
    ) -> Result<(), PoolError> {
        let Self { heads, head_dim, groups, state_size, .. } = *self;
        let (exec, rows) = (&pass.exec, pass.rows.count);
        let (inner, keys, channels, width) = (self.inner(), self.keys(), self.channels(), self.projected());
        let projected = buffers.projected.take(rows * width);
        adapted(exec, &weights.input, pass.adapters, x, projected)?;
        self.apply_scales(exec, rows, projected)?;
        let view = |first| Rows::new(projected, width, first);

        let convolved = buffers.convolved.take(rows * channels);
        let convolution = weights.convolution.kernel(Some(self.activation.into()), None);
        let (segments, states) = pass.states(memory, self.matrices());
        causal_convolution(exec, view(inner), &convolution, segments, states, convolved)?;

        let (bias, limits) = (&weights.step_bias[..], [self.min_step, self.max_step.unwrap_or(f32::INFINITY)]);
        let (steps, decays) = (buffers.steps.take(rows * heads), buffers.decays.take(rows * heads));
        let step_columns = view(inner + channels);
        gates(exec, step_columns, &Gate::Step { bias, limits }, heads, steps)?;
        gates(exec, step_columns, &Gate::Decay { bias, limits, rates: &weights.rates }, heads, decays)?;
        let attention = LinearAttention {
            heads,
            key_heads: groups,
            alternating: false,
            key_dim: state_size,
            value_dim: head_dim,
            decay: Decay::Heads(Rows::new(decays, heads, 0)),
            rule: UpdateRule::Add,
            factor: Some(Rows::new(steps, heads, 0)),
            skip: Some(&weights.skip),
        };
        let mixed = buffers.mixed.take(rows * inner);
        let [values, b, c] = [0, inner, inner + keys].map(|first| Rows::new(convolved, channels, first));
        let (segments, states) = pass.states(memory, 0);
        linear_attention(exec, c, b, values, &attention, segments, states, mixed)?;

        if !self.norm_before_gate {
            apply_gate(exec, mixed, inner, view(0), Activation::Silu)?;
        }
        if let Some(norm) = &weights.norm {
            let groups = self.norm_groups;
            norm_heads(exec, norm, RowsMut::new(mixed, inner, 0), groups, inner / groups)?;
        }
        if self.norm_before_gate {
            apply_gate(exec, mixed, inner, view(0), Activation::Silu)?;
        }
        adapted_output(exec, &weights.output, pass.adapters, mixed, out)
    }
}
