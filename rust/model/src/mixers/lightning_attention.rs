//! Lightning attention (Qin et al. 2024; MiniMax-01): linear attention whose state decays by a constant of each head.
//!
//! Queries, keys and values are activated projections of the input. All heads of the output are normed together and
//! multiplied by the sigmoid of a gate.

use ferrule_kernels::activation::{Activation, activate, apply_gate};
use ferrule_kernels::scan::{Decay, LinearAttention, UpdateRule, linear_attention, linear_attention_state_len};
use ferrule_kernels::{PackedMatrix, PoolError, Rows, Scratch};
use serde::{Deserialize, Serialize};

use super::{At, Mixer, MixerPass};
use crate::layer::{adapted, adapted_output, norm_in_place};
use crate::limits::{SpecError, require, size};
use crate::memory::{Memory, MemoryNeed};
use crate::rope::RopeSpec;
use crate::spec::{ActivationSpec, NormSpec, check_norm};
use crate::weights::{Linear, LoadError, Loader, Norm, Packer, Tensors};

/// Lightning attention.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct LightningAttentionSpec {
    /// Length of a head of queries, keys and values.
    pub head_dim: usize,
    /// Factor of the state of each head per token, in 0..=1; as many as heads.
    pub decays: Vec<f32>,
    /// Activation of queries, keys and values.
    pub activation: ActivationSpec,
    /// Norm of the output, over all heads.
    pub norm: NormSpec,
}

/// Weights of lightning attention.
pub(crate) struct LightningAttention<M = PackedMatrix> {
    /// Rows: queries, keys, values.
    qkv: Linear<M>,
    gate: Linear<M>,
    norm: Norm,
    output: Linear<M>,
}

/// Buffers of lightning attention. Shapes: `[rows, width]`.
#[derive(Default)]
pub(crate) struct Buffers {
    qkv: Scratch<f32>,
    gate: Scratch<f32>,
    mixed: Scratch<f32>,
}

impl LightningAttentionSpec {
    /// Returns the columns of queries, which are those of keys, values and outputs.
    fn inner(&self) -> usize {
        self.decays.len() * self.head_dim
    }

    /// Returns the floats of the state.
    fn state(&self) -> usize {
        linear_attention_state_len(self.decays.len(), self.head_dim, self.head_dim)
    }
}

impl Mixer for LightningAttentionSpec {
    type Weights<M> = LightningAttention<M>;
    type Buffers = Buffers;

    fn check(&self, path: &str, _: &[RopeSpec], _: usize) -> Result<(), SpecError> {
        size(&format!("{path}.decays (their number)"), self.decays.len())?;
        size(&format!("{path}.head_dim"), self.head_dim)?;
        size(&format!("{path} (width of all heads)"), self.inner())?;
        size(&format!("{path} (state of all heads)"), self.state())?;
        for decay in &self.decays {
            require(&format!("{path}.decays"), decay, (0.0..=1.0).contains(decay), || "in 0..=1".to_owned())?;
        }
        check_norm(&format!("{path}.norm"), Some(self.norm))
    }

    fn load<P: Packer>(
        &self,
        loader: &Loader<'_>,
        packer: &mut P,
        At { prefix: at, .. }: At<'_>,
    ) -> Result<LightningAttention<P::Matrix>, LoadError> {
        let (hidden, inner, usual) = (loader.hidden_size(), self.inner(), loader.usual());
        let qkv = [("q", inner, usual), ("k", inner, usual), ("v", inner, loader.values())];
        Ok(LightningAttention {
            qkv: loader.linear(packer, at, &qkv, hidden, false)?,
            gate: loader.linear(packer, at, &[("gate", inner, usual)], hidden, false)?,
            norm: loader.norm(&format!("{at}norm"), self.norm, inner)?,
            output: loader.linear(packer, at, &[("output", hidden, usual)], inner, false)?,
        })
    }

    fn list<'a, M>(weights: &'a LightningAttention<M>, tensors: &mut Tensors<'a, M>) {
        let LightningAttention { qkv, gate, norm, output } = weights;
        [qkv, gate].into_iter().for_each(|linear| tensors.linear(linear));
        tensors.norm(norm);
        tensors.linear(output);
    }

    fn memory(&self) -> Vec<MemoryNeed> {
        vec![MemoryNeed::State { floats: self.state() }]
    }

    fn buffer_floats(&self, _: usize, rows: usize) -> usize {
        5 * rows * self.inner()
    }

    fn longest_input(&self, hidden_size: usize) -> usize {
        hidden_size.max(self.inner())
    }

    fn run(
        &self,
        weights: &LightningAttention,
        pass: &MixerPass<'_>,
        memory: &mut Memory,
        x: &[f32],
        buffers: &mut Buffers,
        out: &mut [f32],
    ) -> Result<(), PoolError> {
        let (exec, rows, inner) = (&pass.exec, pass.rows.count, self.inner());
        let heads = self.decays.len();
        let qkv = buffers.qkv.take(rows * 3 * inner);
        adapted(exec, &weights.qkv, pass.adapters, x, qkv)?;
        activate(exec, qkv, self.activation.into())?;
        let gate = buffers.gate.take(rows * inner);
        adapted(exec, &weights.gate, pass.adapters, x, gate)?;

        let attention = LinearAttention {
            heads,
            key_heads: heads,
            alternating: false,
            key_dim: self.head_dim,
            value_dim: self.head_dim,
            decay: Decay::Constant(&self.decays),
            rule: UpdateRule::Add,
            factor: None,
            skip: None,
        };
        let mixed = buffers.mixed.take(rows * inner);
        let [q, k, v] = [0, 1, 2].map(|part| Rows::new(qkv, 3 * inner, part * inner));
        let (segments, states) = pass.states(memory, 0);
        linear_attention(exec, q, k, v, &attention, segments, states, mixed)?;

        norm_in_place(exec, Some(&weights.norm), mixed, inner)?;
        apply_gate(exec, mixed, inner, Rows::new(gate, inner, 0), Activation::Sigmoid)?;
        adapted_output(exec, &weights.output, pass.adapters, mixed, out)
    }
}
