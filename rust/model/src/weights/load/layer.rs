//! The roles of a layer: attention, feed-forward network, and the norms around them.

use super::Loader;
use crate::spec::{FfnSpec, LayerSpec};
use crate::weights::error::LoadError;
use crate::weights::plan::Packer;
use crate::weights::{Ffn, Layer};

impl Loader<'_> {
    /// Loads layer `index`.
    pub fn layer<P: Packer>(
        &self,
        packer: &mut P,
        index: usize,
        layer: &LayerSpec,
    ) -> Result<Layer<P::Matrix>, LoadError> {
        let at = format!("layers.{index}.");
        let norm = |role: &str, norm| self.optional_norm(&format!("{at}{role}"), norm, self.spec.hidden_size);
        let down = self.quantization.down(index, self.spec.layers.len());
        Ok(Layer {
            attention: self.attention(packer, &format!("{at}attention."), &layer.attention)?,
            ffn: match &layer.ffn {
                FfnSpec::Dense(dense) => Ffn::Dense(self.dense(packer, &format!("{at}ffn."), dense, down)?),
                FfnSpec::Experts(experts) => Ffn::Experts(self.experts(packer, &format!("{at}ffn."), experts, down)?),
            },
            attention_norm: norm("attention_norm", layer.attention_norm)?,
            attention_post_norm: norm("attention_post_norm", layer.attention_post_norm)?,
            attention_sum_norm: norm("attention_sum_norm", layer.attention_sum_norm)?,
            ffn_norm: norm("ffn_norm", layer.ffn_norm)?,
            ffn_post_norm: norm("ffn_post_norm", layer.ffn_post_norm)?,
            ffn_sum_norm: norm("ffn_sum_norm", layer.ffn_sum_norm)?,
        })
    }
}
