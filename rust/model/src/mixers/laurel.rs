//! Learned augmented residual (LAuReL; Menghani et al. 2024): `x + norm(right(left(x)))`, of low rank.

use ferrule_kernels::elementwise::add;
use ferrule_kernels::{PackedMatrix, PoolError, Scratch};
use serde::{Deserialize, Serialize};

use super::{At, Mixer, MixerPass};
use crate::layer::{adapted, norm_in_place};
use crate::limits::{SpecError, size};
use crate::memory::Memory;
use crate::rope::RopeSpec;
use crate::spec::{NormSpec, check_norm};
use crate::weights::{Linear, LoadError, Loader, Norm, Packer, Tensors};

/// Learned augmented residual.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct LaurelSpec {
    /// Rank of the projection.
    pub rank: usize,
    /// Norm of the projection's output.
    pub norm: NormSpec,
}

/// Weights of a learned augmented residual.
pub(crate) struct Laurel<M = PackedMatrix> {
    left: Linear<M>,
    right: Linear<M>,
    norm: Norm,
}

/// Outputs of the first projection: `[rows, rank]`.
#[derive(Default)]
pub(crate) struct Buffers {
    narrow: Scratch<f32>,
}

impl Mixer for LaurelSpec {
    type Weights<M> = Laurel<M>;
    type Buffers = Buffers;

    fn check(&self, path: &str, _: &[RopeSpec], _: usize) -> Result<(), SpecError> {
        size(&format!("{path}.rank"), self.rank)?;
        check_norm(&format!("{path}.norm"), Some(self.norm))
    }

    fn load<P: Packer>(
        &self,
        loader: &Loader<'_>,
        packer: &mut P,
        At { prefix: at, .. }: At<'_>,
    ) -> Result<Laurel<P::Matrix>, LoadError> {
        let (hidden, usual) = (loader.hidden_size(), loader.usual());
        Ok(Laurel {
            left: loader.linear(packer, at, &[("left", self.rank, usual)], hidden, false)?,
            right: loader.linear(packer, at, &[("right", hidden, usual)], self.rank, false)?,
            norm: loader.norm(&format!("{at}norm"), self.norm, hidden)?,
        })
    }

    fn list<'a, M>(weights: &'a Laurel<M>, tensors: &mut Tensors<'a, M>) {
        tensors.linear(&weights.left);
        tensors.linear(&weights.right);
        tensors.norm(&weights.norm);
    }

    fn buffer_floats(&self, _: usize, rows: usize) -> usize {
        rows * self.rank
    }

    fn longest_input(&self, hidden_size: usize) -> usize {
        hidden_size.max(self.rank)
    }

    fn run(
        &self,
        weights: &Laurel,
        pass: &MixerPass<'_>,
        _: &mut Memory,
        x: &[f32],
        Buffers { narrow }: &mut Buffers,
        out: &mut [f32],
    ) -> Result<(), PoolError> {
        let narrow = narrow.take(pass.rows.count * self.rank);
        adapted(&pass.exec, &weights.left, pass.adapters, x, narrow)?;
        adapted(&pass.exec, &weights.right, pass.adapters, narrow, out)?;
        norm_in_place(&pass.exec, Some(&weights.norm), out, pass.width)?;
        add(&pass.exec, out, x)
    }
}
