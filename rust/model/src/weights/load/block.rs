//! The roles of a layer: those of its blocks, and of the norms around their mixers.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::Loader;
use crate::adapter::LowRank;
use crate::limits::SpecError;
use crate::mixers::At;
use crate::spec::{BlockSpec, LayerSpec, LowRankSpec};
use crate::streams::{SpanSpec, StreamEnds};
use crate::weights::error::LoadError;
use crate::weights::plan::Packer;
use crate::weights::source::MatrixPart;
use crate::weights::{Block, BlockUse, Layer};

impl Loader<'_> {
    /// Loads layer `index`. Weights of earlier layers that it uses are taken from `before`, the layers of the stage so
    /// far, or loaded again if they are not there.
    pub fn layer<P: Packer>(
        &self,
        packer: &mut P,
        index: usize,
        layer: &LayerSpec,
        before: &[Layer<P::Matrix>],
    ) -> Result<Layer<P::Matrix>, LoadError> {
        let blocks = layer.blocks.iter().map(|block| self.block_use(packer, index, block, before));
        let blocks = blocks.collect::<Result<_, _>>()?;
        let count = self.spec.streams.as_ref().map_or(1, |streams| streams.count);
        let mixes = layer
            .spans
            .iter()
            .map(|SpanSpec { name, mix, .. }| mix.load(self, packer, &format!("layers.{index}.{name}."), count));
        Ok(Layer {
            blocks,
            mixes: mixes.collect::<Result<_, _>>()?,
            scalar: match layer.scalar {
                true => Some(self.vector(&format!("layers.{index}.scalar.weight"), 1)?),
                false => None,
            },
        })
    }

    fn block_use<P: Packer>(
        &self,
        packer: &mut P,
        layer: usize,
        block: &BlockSpec,
        before: &[Layer<P::Matrix>],
    ) -> Result<BlockUse<P::Matrix>, LoadError> {
        let owner = block.weights_of.unwrap_or(layer);
        let position = || self.spec.layers[owner].blocks.iter().position(|own| own.name == block.name);
        let loaded = before
            .get(owner - self.part.layers.range().start)
            .zip(position())
            .map(|(layer, position)| Arc::clone(&layer.blocks[position].block));
        let is_shared = block.weights_of.is_some();
        let weights = match loaded {
            Some(weights) => weights,
            None if is_shared => Arc::new(self.again().block(packer, owner, block)?),
            None => Arc::new(self.block(packer, owner, block)?),
        };
        let mut low_rank = BTreeMap::<_, Vec<_>>::new();
        for (index, spec) in block.low_rank.iter().enumerate() {
            let (site, addition) = self.low_rank(packer, (layer, owner), &block.name, (index, spec))?;
            low_rank.entry(site).or_default().push(addition);
        }
        Ok(BlockUse { block: weights, is_shared, low_rank })
    }

    /// Loads an addition to a linear layer of block `name`, and returns it with the number of the linear layer.
    fn low_rank<P: Packer>(
        &self,
        packer: &mut P,
        (layer, owner): (usize, usize),
        name: &str,
        (index, LowRankSpec { outputs, rank }): (usize, &LowRankSpec),
    ) -> Result<(usize, LowRank<P::Matrix>), LoadError> {
        let roles: Vec<_> = outputs.iter().map(|role| format!("layers.{owner}.{name}.{role}")).collect();
        let found = packer.sites().iter().enumerate().rev().find_map(|(number, site)| {
            let first = site.parts.iter().position(|(role, _)| *role == roles[0])?;
            let parts = site.parts.get(first..first + roles.len())?;
            let rows = |parts: &[(String, usize)]| parts.iter().map(|(_, rows)| rows).sum::<usize>();
            let is_alike = parts.iter().map(|(role, _)| role).eq(&roles);
            is_alike.then(|| (number, site.columns, rows(&site.parts[..first]), rows(parts)))
        });
        let Some((site, columns, first_output, rows)) = found else {
            return Err(SpecError::not_whole(&roles.join("+")).into());
        };
        let mut matrix = |half: &str, rows: usize, columns: usize| {
            let name = format!("layers.{layer}.{name}.low_rank.{index}.{half}");
            let role = format!("{name}.weight");
            let part = MatrixPart { role: &role, rows, format: self.values(), slice: None };
            packer.pack(self.matrix(name, &[part], columns)?)
        };
        let (a, b) = (matrix("a", *rank, columns)?, matrix("b", rows, *rank)?);
        Ok((site, LowRank { a, b, first_output, scale: 1.0 }))
    }

    /// Loads what several residual streams begin with in the first stage, and what they end with in the last.
    pub fn streams<P: Packer>(&self, packer: &mut P) -> Result<Option<StreamEnds<P::Matrix>>, LoadError> {
        let streams = self.spec.streams.as_ref();
        streams.map(|streams| streams.ends.load(self, packer, &self.part.layers, streams.count)).transpose()
    }

    fn block<P: Packer>(&self, packer: &mut P, layer: usize, block: &BlockSpec) -> Result<Block<P::Matrix>, LoadError> {
        let at = format!("layers.{layer}.{}", block.name);
        let norm = |role: &str, norm| self.optional_norm(&format!("{at}_{role}"), norm, self.spec.hidden_size);
        let columns = block.input.columns(self.spec.hidden_size);
        Ok(Block {
            mixer: block.mixer.load(self, packer, At { prefix: &format!("{at}."), layer, columns })?,
            norm: self.optional_norm(&format!("{at}_norm"), block.norm, columns)?,
            post_norm: norm("post_norm", block.post_norm)?,
            sum_norm: norm("sum_norm", block.sum_norm)?,
            joint_norm: norm("joint_norm", block.joint_norm)?,
        })
    }
}
