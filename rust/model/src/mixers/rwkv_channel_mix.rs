//! Channel mixing of RWKV 4 (Peng et al. 2023): `sigmoid(receptance) * down(relu(up)^2)`, where receptance and up are
//! projections of different mixes of a row with the row before it.

use ferrule_kernels::activation::{Activation, activate, apply_gate};
use ferrule_kernels::{PackedMatrix, PoolError, Rows, Scratch};
use serde::{Deserialize, Serialize};

use super::token_shift::TokenShift;
use super::{At, Mixer, MixerPass};
use crate::layer::adapted;
use crate::limits::{SpecError, require, size};
use crate::memory::{Memory, MemoryNeed};
use crate::rope::RopeSpec;
use crate::weights::{Linear, LoadError, Loader, Packer, Tensors};

/// Channel mixing of RWKV 4.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct RwkvChannelMixSpec {
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width of the inner layer.
    pub intermediate_size: usize,
}

/// Weights of channel mixing.
pub(crate) struct RwkvChannelMix<M = PackedMatrix> {
    /// Mixes of the inner layer and of the receptance.
    shift: TokenShift,
    up: Linear<M>,
    receptance: Linear<M>,
    down: Linear<M>,
}

/// Buffers of channel mixing. Shapes: `[rows, width]`.
#[derive(Default)]
pub(crate) struct Buffers {
    previous: Scratch<f32>,
    shifted: Scratch<f32>,
    inner: Scratch<f32>,
    receptance: Scratch<f32>,
}

impl Mixer for RwkvChannelMixSpec {
    type Weights<M> = RwkvChannelMix<M>;
    type Buffers = Buffers;

    fn check(&self, path: &str, _: &[RopeSpec], hidden_size: usize) -> Result<(), SpecError> {
        require(&format!("{path}.hidden_size"), self.hidden_size, self.hidden_size == hidden_size, || {
            format!("that of the model ({hidden_size})")
        })?;
        size(&format!("{path}.intermediate_size"), self.intermediate_size)
    }

    fn load<P: Packer>(
        &self,
        loader: &Loader<'_>,
        packer: &mut P,
        At { prefix: at, layer, .. }: At<'_>,
    ) -> Result<RwkvChannelMix<P::Matrix>, LoadError> {
        let Self { hidden_size: hidden, intermediate_size: inner } = *self;
        let (usual, down) = (loader.usual(), loader.down(layer));
        Ok(RwkvChannelMix {
            shift: TokenShift::load(loader, at, &["up", "receptance"], hidden)?,
            up: loader.linear(packer, at, &[("up", inner, usual)], hidden, false)?,
            receptance: loader.linear(packer, at, &[("receptance", hidden, usual)], hidden, false)?,
            down: loader.linear(packer, at, &[("down", hidden, down)], inner, false)?,
        })
    }

    fn list<'a, M>(weights: &'a RwkvChannelMix<M>, tensors: &mut Tensors<'a, M>) {
        let RwkvChannelMix { shift, up, receptance, down } = weights;
        shift.list(tensors);
        [up, receptance, down].into_iter().for_each(|linear| tensors.linear(linear));
    }

    fn memory(&self) -> Vec<MemoryNeed> {
        vec![MemoryNeed::State { floats: self.hidden_size }]
    }

    fn buffer_floats(&self, hidden_size: usize, rows: usize) -> usize {
        rows * (3 * hidden_size + self.intermediate_size)
    }

    fn longest_input(&self, hidden_size: usize) -> usize {
        hidden_size.max(self.intermediate_size)
    }

    fn run(
        &self,
        weights: &RwkvChannelMix,
        pass: &MixerPass<'_>,
        memory: &mut Memory,
        x: &[f32],
        buffers: &mut Buffers,
        out: &mut [f32],
    ) -> Result<(), PoolError> {
        let (exec, width) = (&pass.exec, self.hidden_size);
        let (previous, shifted) = (buffers.previous.take(x.len()), buffers.shifted.take(x.len()));
        weights.shift.previous(pass, memory, x, previous)?;
        weights.shift.mix(exec, 0, (x, previous), shifted)?;
        let inner = buffers.inner.take(pass.rows.count * self.intermediate_size);
        adapted(exec, &weights.up, pass.adapters, shifted, inner)?;
        activate(exec, inner, Activation::Relu2)?;
        adapted(exec, &weights.down, pass.adapters, inner, out)?;

        weights.shift.mix(exec, 1, (x, previous), shifted)?;
        let receptance = buffers.receptance.take(x.len());
        adapted(exec, &weights.receptance, pass.adapters, shifted, receptance)?;
        apply_gate(exec, out, width, Rows::new(receptance, width, 0), Activation::Sigmoid)
    }
}
