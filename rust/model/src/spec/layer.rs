//! Layers as lists of residual blocks.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use super::norm::{NormSpec, check_norm};
use crate::limits::{SpecError, finite, require};
use crate::mixers::MixerSpec;
use crate::rope::RopeSpec;

/// A layer: residual blocks, which run in order.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct LayerSpec {
    /// Blocks, first to last.
    pub blocks: Vec<BlockSpec>,
    /// Whether the residual stream is multiplied by a stored number after the last block.
    pub scalar: bool,
}

/// Residual block: `x = sum_norm(x + residual_scale * post_norm(mixer(norm(x))))`.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct BlockSpec {
    /// Name in the roles of its tensors: block `ffn` of layer 3 has `layers.3.ffn.down.weight` and, for its norms,
    /// `layers.3.ffn_norm.weight`, `layers.3.ffn_post_norm.weight` and `layers.3.ffn_sum_norm.weight`.
    pub name: String,
    /// Function from the normed input to the output.
    pub mixer: MixerSpec,
    /// Norm of the mixer's input.
    pub norm: Option<NormSpec>,
    /// Norm of the mixer's output.
    pub post_norm: Option<NormSpec>,
    /// Norm after the output is added to the residual stream.
    pub sum_norm: Option<NormSpec>,
    /// Whether the block reads the same residual stream as the block before it. Without a norm of its own it then
    /// reads that block's normed input.
    pub parallel: bool,
    /// Factor on the mixer's output.
    pub residual_scale: f32,
    /// Whether the output is added to the normed input instead of the input.
    pub residual_after_norm: bool,
}

/// Upper limit for the number of blocks of a layer, above that of any known model.
const MAX_BLOCKS: usize = 16;

impl LayerSpec {
    pub(super) fn check(&self, path: &str, ropes: &[RopeSpec], hidden_size: usize) -> Result<(), SpecError> {
        let count = self.blocks.len();
        require(&format!("{path}.blocks (their number)"), count, (1..=MAX_BLOCKS).contains(&count), || {
            format!("in 1..={MAX_BLOCKS}")
        })?;
        let mut names = BTreeSet::new();
        for (i, block) in self.blocks.iter().enumerate() {
            let path = format!("{path}.blocks[{i}]");
            let is_name = !block.name.is_empty()
                && block.name.bytes().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == b'_');
            require(&format!("{path}.name"), &block.name, is_name && names.insert(&block.name), || {
                "lowercase letters, digits and underscores that no other block of the layer has".to_owned()
            })?;
            require(&format!("{path}.parallel"), block.parallel, i > 0 || !block.parallel, || {
                "false for the first block of a layer".to_owned()
            })?;
            require(
                &format!("{path}.residual_after_norm"),
                block.residual_after_norm,
                !(block.parallel && block.residual_after_norm),
                || "false for a block that is parallel to the one before it".to_owned(),
            )?;
            block.check(&path, ropes, hidden_size)?;
        }
        Ok(())
    }
}

impl BlockSpec {
    fn check(&self, path: &str, ropes: &[RopeSpec], hidden_size: usize) -> Result<(), SpecError> {
        check_norm(&format!("{path}.norm"), self.norm)?;
        check_norm(&format!("{path}.post_norm"), self.post_norm)?;
        check_norm(&format!("{path}.sum_norm"), self.sum_norm)?;
        finite(&format!("{path}.residual_scale"), self.residual_scale)?;
        self.mixer.check(&format!("{path}.mixer"), ropes, hidden_size)
    }
}
