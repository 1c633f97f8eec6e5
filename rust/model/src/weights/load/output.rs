//! The roles after the last layer: final norm, lm_head, classifier and projections of a text's embedding.

use ferrule_kernels::Format;

use super::{Loader, RolePart};
use crate::spec::LmHeadSpec;
use crate::weights::error::LoadError;
use crate::weights::plan::Packer;
use crate::weights::{Classifier, Linear, MatrixPart, Norm, Site};

/// The lm_head, unless it is tied to the embedding, and the bias if it is tied or its rows are divided among stages.
type LmHeadAndBias<M> = (Option<Linear<M>>, Option<Vec<f32>>);

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

    /// Loads the stage's rows of the lm_head. A bias that is not part of the linear layer has the numbers of all rows.
    pub fn lm_head<P: Packer>(&self, packer: &mut P) -> Result<LmHeadAndBias<P::Matrix>, LoadError> {
        let Self { spec, quantization, .. } = self;
        let Some(LmHeadSpec { tied, bias, .. }) = spec.lm_head else { return Ok((None, None)) };
        let is_separate = bias && (tied || self.part.vocabulary.is_divided());
        let matrix = match tied {
            true => None,
            false => {
                let part = ("lm_head", spec.vocab_size, quantization.embedding_and_lm_head());
                self.vocabulary_rows(packer, part, bias && !is_separate)?
            }
        };
        Ok((matrix, if is_separate { Some(self.vector("lm_head.bias", spec.vocab_size)?) } else { None }))
    }

    /// Loads the stage's rows of a matrix with a row for each token; `None` if it has none.
    pub(super) fn vocabulary_rows<P: Packer>(
        &self,
        packer: &mut P,
        part: RolePart<'_>,
        bias: bool,
    ) -> Result<Option<Linear<P::Matrix>>, LoadError> {
        let (columns, vocabulary) = (self.spec.embedding_width(), self.part.vocabulary);
        if !vocabulary.is_divided() {
            return self.linear(packer, "", &[part], columns, bias).map(Some);
        }
        let (role, rows, format) = part;
        let (panels, outputs) = (vocabulary.panels(rows), vocabulary.rows(rows).len());
        if outputs == 0 {
            return Ok(None);
        }
        let part = MatrixPart { role: &format!("{role}.weight"), rows, format, slice: None };
        let mut plan = self.matrix(role.to_owned(), &[part], columns)?;
        let site = packer.add_site(Site { parts: vec![(role.to_owned(), rows)], columns, heads: None });
        (plan.site, plan.panels) = (Some(site), Some(panels));
        Ok(Some(Linear { weight: packer.pack(plan)?, bias: None, site, outputs, group: None }))
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
        let mut columns = self.spec.merged_rows * self.spec.hidden_size;
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
