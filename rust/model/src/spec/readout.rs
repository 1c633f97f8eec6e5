//! Result computed from the pooled hidden state of a text: an embedding, or scores.

use serde::{Deserialize, Serialize};

use super::{ActivationSpec, NormSpec, check_norm};
use crate::limits::{SpecError, require, size};

/// Pooling: which hidden state represents a text.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Pooling {
    /// Hidden state of the first token.
    Cls,
    /// Mean of the hidden states of all tokens.
    Mean,
    /// Hidden state of the last token.
    Last,
}

/// Classifier: `labels(norm(activation(dense(pooled))))`, one score per label.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct ClassifierSpec {
    /// Number of labels.
    pub labels: usize,
    /// Pooling of the hidden states.
    pub pooling: Pooling,
    /// Activation after a square projection; `None` if the classifier has neither.
    pub activation: Option<ActivationSpec>,
    /// Whether the square projection adds a bias.
    pub dense_bias: bool,
    /// Norm after the activation.
    pub norm: Option<NormSpec>,
    /// Whether the projection to labels adds a bias.
    pub bias: bool,
}

/// Projection of a pooled hidden state, one of those that make an embedding of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct TextProjectionSpec {
    /// Number of outputs.
    pub width: usize,
    /// Activation of the outputs.
    pub activation: Option<ActivationSpec>,
    /// Whether the projection adds a bias.
    pub bias: bool,
}

/// Upper limits for the number of labels and of projections, above those of any known model.
const MAX_LABELS: usize = 1 << 20;
const MAX_PROJECTIONS: usize = 16;

impl ClassifierSpec {
    pub(super) fn check(&self) -> Result<(), SpecError> {
        require("classifier.labels", self.labels, (1..=MAX_LABELS).contains(&self.labels), || {
            format!("in 1..={MAX_LABELS}")
        })?;
        check_norm("classifier.norm", self.norm)
    }
}

pub(super) fn check_projections(projections: &[TextProjectionSpec]) -> Result<(), SpecError> {
    let count = projections.len();
    require("text_projections (their number)", count, count <= MAX_PROJECTIONS, || {
        format!("at most {MAX_PROJECTIONS}")
    })?;
    projections
        .iter()
        .enumerate()
        .try_for_each(|(i, projection)| size(&format!("text_projections[{i}].width"), projection.width))
}
