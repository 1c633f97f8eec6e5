//! A matrix between blocks, such as that after the shared network of Zamba 2.

use ferrule_kernels::PoolError;
use serde::{Deserialize, Serialize};

use super::{At, Mixer, MixerPass};
use crate::layer::adapted_output;
use crate::limits::SpecError;
use crate::memory::Memory;
use crate::rope::RopeSpec;
use crate::weights::{Linear, LoadError, Loader, Packer, Tensors};

/// Projection of rows of the residual stream's width to rows of the same width.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct ProjectionSpec {
    /// Whether a bias is added.
    pub bias: bool,
}

impl Mixer for ProjectionSpec {
    type Weights<M> = Linear<M>;
    type Buffers = ();

    fn check(&self, _: &str, _: &[RopeSpec], _: usize) -> Result<(), SpecError> {
        Ok(())
    }

    fn load<P: Packer>(&self, loader: &Loader<'_>, packer: &mut P, at: At<'_>) -> Result<Linear<P::Matrix>, LoadError> {
        let hidden = loader.hidden_size();
        loader.linear(packer, at.prefix, &[("output", hidden, loader.usual())], hidden, self.bias)
    }

    fn list<'a, M>(weights: &'a Linear<M>, tensors: &mut Tensors<'a, M>) {
        tensors.linear(weights);
    }

    fn buffer_floats(&self, _: usize, _: usize) -> usize {
        0
    }

    fn longest_input(&self, hidden_size: usize) -> usize {
        hidden_size
    }

    fn run(
        &self,
        weights: &Linear,
        pass: &MixerPass<'_>,
        _: &mut Memory,
        x: &[f32],
        (): &mut (),
        out: &mut [f32],
    ) -> Result<(), PoolError> {
        adapted_output(&pass.exec, weights, pass.adapters, x, out)
    }
}
