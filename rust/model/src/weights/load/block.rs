//! The roles of a layer: those of its blocks, and of the norms around their mixers.

use super::Loader;
use crate::mixers::At;
use crate::spec::{BlockSpec, LayerSpec};
use crate::weights::error::LoadError;
use crate::weights::plan::Packer;
use crate::weights::{Block, Layer};

impl Loader<'_> {
    /// Loads layer `index`.
    pub fn layer<P: Packer>(
        &self,
        packer: &mut P,
        index: usize,
        layer: &LayerSpec,
    ) -> Result<Layer<P::Matrix>, LoadError> {
        let blocks = layer.blocks.iter().map(|block| self.block(packer, index, block));
        Ok(Layer {
            blocks: blocks.collect::<Result<_, _>>()?,
            scalar: match layer.scalar {
                true => Some(self.vector(&format!("layers.{index}.scalar.weight"), 1)?),
                false => None,
            },
        })
    }

    fn block<P: Packer>(&self, packer: &mut P, layer: usize, block: &BlockSpec) -> Result<Block<P::Matrix>, LoadError> {
        let at = format!("layers.{layer}.{}", block.name);
        let norm = |role: &str, norm| self.optional_norm(&format!("{at}_{role}"), norm, self.spec.hidden_size);
        Ok(Block {
            mixer: block.mixer.load(self, packer, At { prefix: &format!("{at}."), layer })?,
            norm: norm("norm", block.norm)?,
            post_norm: norm("post_norm", block.post_norm)?,
            sum_norm: norm("sum_norm", block.sum_norm)?,
        })
    }
}
