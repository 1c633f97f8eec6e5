//! What becomes of a whole text: its pooled hidden state, and what an embedding or a score is made from that.

use serde::{Deserialize, Serialize};

use super::{ActivationSpec, NormSpec, norm};
use crate::limits::{SpecError, require, size};

/// Which hidden state stands for a whole text.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Pooling {
    /// The first token's.
    Cls,
    /// The mean of all tokens'.
    Mean,
    /// The last token's.
    Last,
}

/// A score for each label: `labels(norm(activation(dense(pooled))))`.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct ClassifierSpec {
    /// How many there are.
    pub labels: usize,
    /// What it reads.
    pub pooling: Pooling,
    /// After a square projection; none where there is neither.
    pub activation: Option<ActivationSpec>,
    /// Whether that projection adds a bias.
    pub dense_bias: bool,
    /// After the activation.
    pub norm: Option<NormSpec>,
    /// Whether the labels have a bias.
    pub bias: bool,
}

/// A projection of pooled hidden states on the way to an embedding.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct TextProjectionSpec {
    /// Numbers that it gives.
    pub width: usize,
    /// On these.
    pub activation: Option<ActivationSpec>,
    /// Whether it adds a bias.
    pub bias: bool,
}

/// More labels than any classifier has, and more projections one after the other.
const MAX_LABELS: usize = 1 << 20;
const MAX_PROJECTIONS: usize = 16;

impl ClassifierSpec {
    pub(super) fn check(&self) -> Result<(), SpecError> {
        require("classifier.labels", self.labels, (1..=MAX_LABELS).contains(&self.labels), || {
            format!("in 1..={MAX_LABELS}")
        })?;
        norm::check("classifier.norm", self.norm)
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
