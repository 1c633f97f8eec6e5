//! The roles after the last layer: final norm, lm_head, classifier and projections of a text's embedding.

use ferrule_kernels::Format;

use super::Loader;
use crate::weights::error::LoadError;
use crate::weights::plan::Packer;
use crate::weights::{Classifier, Linear, Norm};

/// The lm_head, or the bias of an lm_head that is tied to the embedding.
type LmHeadOrBias<M> = (Option<Linear<M>>, Option<Vec<f32>>);

impl Loader<'_> {
    /// Loads the norm after the last layer.
    pub fn final_norm(&self) -> Result<Option<Norm>, LoadError> {
        self.optional_norm("final_norm", self.spec.final_norm, self.spec.hidden_size)
    }

    /// Loads the projection from `hidden_size` to the width of the lm_head's rows.
    pub fn lm_head_projection<P: Packer>(&self, packer: &mut P) -> Result<Option<Linear<P::Matrix>>, LoadError> {
        let Self { spec, quantization, .. } = self;
        if spec.lm_head.is_none() || spec.embedding.width.is_none() {
            return Ok(None);
        }
        let part = [("lm_head_projection", spec.embedding_width(), quantization.embedding_and_lm_head())];
        self.linear(packer, "", &part, spec.hidden_size, false).map(Some)
    }

    /// Loads the lm_head, or the bias of an lm_head that is tied to the embedding.
    pub fn lm_head<P: Packer>(&self, packer: &mut P) -> Result<LmHeadOrBias<P::Matrix>, LoadError> {
        let Self { spec, quantization, .. } = self;
        Ok(match spec.lm_head {
            Some(lm_head) if !lm_head.tied => {
                let part = [("lm_head", spec.vocab_size, quantization.embedding_and_lm_head())];
                (Some(self.linear(packer, "", &part, spec.embedding_width(), lm_head.bias)?), None)
            }
            Some(lm_head) if lm_head.bias => (None, Some(self.vector("lm_head.bias", spec.vocab_size)?)),
            _ => (None, None),
        })
    }

    /// Loads the classifier, in f32 because it is small and runs once per text.
    pub fn classifier<P: Packer>(&self, packer: &mut P) -> Result<Option<Classifier<P::Matrix>>, LoadError> {
        let Some(spec) = self.spec.classifier else { return Ok(None) };
        let hidden = self.spec.hidden_size;
        let dense = match spec.activation {
            Some(_) => {
                Some(self.linear(packer, "classifier.", &[("dense", hidden, Format::F32)], hidden, spec.dense_bias)?)
            }
            None => None,
        };
        let norm = self.optional_norm("classifier.norm", spec.norm, hidden)?;
        let labels = self.linear(packer, "", &[("classifier", spec.labels, Format::F32)], hidden, spec.bias)?;
        Ok(Some(Classifier { dense, norm, labels }))
    }

    /// Loads the projections of a text's embedding, in f32 as the classifier.
    pub fn text_projections<P: Packer>(&self, packer: &mut P) -> Result<Vec<Linear<P::Matrix>>, LoadError> {
        let mut columns = self.spec.hidden_size;
        let mut projections = Vec::new();
        for (i, spec) in self.spec.text_projections.iter().enumerate() {
            let role = i.to_string();
            let part = [(role.as_str(), spec.width, Format::F32)];
            projections.push(self.linear(packer, "text_projections.", &part, columns, spec.bias)?);
            columns = spec.width;
        }
        Ok(projections)
    }
}
