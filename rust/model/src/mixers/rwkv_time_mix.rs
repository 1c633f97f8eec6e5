//! Time mixing of RWKV 4 (Peng et al. 2023): `output(sigmoid(receptance) * wkv(k, v))`, where receptance, k and v are
//! projections of different mixes of a row with the row before it.

use ferrule_kernels::activation::{Activation, apply_gate};
use ferrule_kernels::scan::{Wkv, wkv, wkv_state_len};
use ferrule_kernels::{PackedMatrix, PoolError, Rows, Scratch};
use serde::{Deserialize, Serialize};

use super::token_shift::TokenShift;
use super::{At, Mixer, MixerPass};
use crate::layer::{adapted, adapted_output};
use crate::limits::{SpecError, require, size};
use crate::memory::{Memory, MemoryNeed};
use crate::rope::RopeSpec;
use crate::weights::{Linear, LoadError, Loader, Packer, Tensors};

/// Time mixing of RWKV 4.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct RwkvTimeMixSpec {
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Number of channels of keys, values and receptance.
    pub channels: usize,
}

/// Weights of time mixing.
pub(crate) struct RwkvTimeMix<M = PackedMatrix> {
    /// Mixes of keys, values and receptance.
    shift: TokenShift,
    /// Projections to keys, values and receptance.
    projections: [Linear<M>; 3],
    wkv: Wkv,
    output: Linear<M>,
}

/// Buffers of time mixing. Shapes: `[rows, width]`.
#[derive(Default)]
pub(crate) struct Buffers {
    previous: Scratch<f32>,
    shifted: Scratch<f32>,
    /// Keys, values and receptance.
    projected: [Scratch<f32>; 3],
    mixed: Scratch<f32>,
}

impl Mixer for RwkvTimeMixSpec {
    type Weights<M> = RwkvTimeMix<M>;
    type Buffers = Buffers;

    fn check(&self, path: &str, _: &[RopeSpec], hidden_size: usize) -> Result<(), SpecError> {
        require(&format!("{path}.hidden_size"), self.hidden_size, self.hidden_size == hidden_size, || {
            format!("that of the model ({hidden_size})")
        })?;
        size(&format!("{path}.channels"), self.channels)
    }

    fn load<P: Packer>(
        &self,
        loader: &Loader<'_>,
        packer: &mut P,
        At { prefix: at, .. }: At<'_>,
    ) -> Result<RwkvTimeMix<P::Matrix>, LoadError> {
        let Self { hidden_size: hidden, channels } = *self;
        let (usual, fine) = (loader.usual(), loader.values());
        let mut rates = loader.vector(&format!("{at}decay_log.weight"), channels)?;
        rates.iter_mut().for_each(|rate| *rate = -rate.exp());
        let bonuses = loader.vector(&format!("{at}bonus.weight"), channels)?;
        let mut projection = |role, format| loader.linear(packer, at, &[(role, channels, format)], hidden, false);
        Ok(RwkvTimeMix {
            shift: TokenShift::load(loader, at, &["k", "v", "receptance"], hidden)?,
            // Keys are exponents.
            projections: [projection("k", fine)?, projection("v", fine)?, projection("receptance", usual)?],
            wkv: Wkv::new(&rates, &bonuses),
            output: loader.linear(packer, at, &[("output", hidden, usual)], channels, false)?,
        })
    }

    fn list<'a, M>(weights: &'a RwkvTimeMix<M>, tensors: &mut Tensors<'a, M>) {
        let RwkvTimeMix { shift, projections, wkv, output } = weights;
        shift.list(tensors);
        projections.iter().for_each(|linear| tensors.linear(linear));
        tensors.vectors.extend(wkv.vectors());
        tensors.linear(output);
    }

    fn memory(&self) -> Vec<MemoryNeed> {
        vec![MemoryNeed::State { floats: self.hidden_size + wkv_state_len(self.channels) }]
    }

    fn buffer_floats(&self, hidden_size: usize, rows: usize) -> usize {
        rows * (2 * hidden_size + 4 * self.channels)
    }

    fn longest_input(&self, hidden_size: usize) -> usize {
        hidden_size.max(self.channels)
    }

    fn run(
        &self,
        weights: &RwkvTimeMix,
        pass: &MixerPass<'_>,
        memory: &mut Memory,
        x: &[f32],
        buffers: &mut Buffers,
        out: &mut [f32],
    ) -> Result<(), PoolError> {
        let (exec, rows, channels) = (&pass.exec, pass.rows.count, self.channels);
        let (previous, shifted) = (buffers.previous.take(x.len()), buffers.shifted.take(x.len()));
        weights.shift.previous(pass, memory, x, previous)?;
        let projected = buffers.projected.each_mut().map(|buffer| buffer.take(rows * channels));
        for (index, linear) in weights.projections.iter().enumerate() {
            weights.shift.mix(exec, index, (x, previous), shifted)?;
            adapted(exec, linear, pass.adapters, shifted, projected[index])?;
        }

        let [k, v, receptance] = projected.map(|columns| Rows::new(columns, channels, 0));
        let mixed = buffers.mixed.take(rows * channels);
        let (segments, states) = pass.states(memory, self.hidden_size);
        wkv(exec, [k, v], &weights.wkv, segments, states, mixed)?;
        apply_gate(exec, mixed, channels, receptance, Activation::Sigmoid)?;
        adapted_output(exec, &weights.output, pass.adapters, mixed, out)
    }
}
