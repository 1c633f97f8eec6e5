//! [`TensorSpec`]: the place of a role's weights in a checkpoint.

use serde::{Deserialize, Serialize};

use crate::limits::{SpecError, require, size};

/// Place of a role's weights in a checkpoint.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct TensorSpec {
    /// Names of one tensor, or of several whose rows are concatenated. `2_Dense/linear.weight` is in a
    /// subfolder of the checkpoint.
    pub names: Vec<String>,
    /// Whether the matrix is stored as `[inputs, outputs]`.
    pub transposed: bool,
    /// Rows of the stored matrix that belong to the role, if it holds several roles.
    pub part: Option<PartSpec>,
    /// Index of the matrix, if several matrices are stored as one tensor.
    pub stack: Option<StackSpec>,
    /// Exponential that the tensor stores in place of the values. Vectors, and tables that are held in memory, only.
    #[serde(default)]
    pub exponential: Option<Exponential>,
    /// Place in checkpoints that have no tensor of the first name.
    #[serde(default)]
    pub alternative: Option<Box<TensorSpec>>,
}

/// Exponential of values that a tensor stores in their place.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Exponential {
    /// `exp(x)` of a value x.
    Exp,
    /// `-exp(x)` of a value x.
    NegatedExp,
}

impl Exponential {
    /// Returns the name in a spec.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Exp => "exp",
            Self::NegatedExp => "negated_exp",
        }
    }

    /// Returns the value whose exponential is `stored`; `None` for one of the wrong sign or that is not finite.
    pub(crate) fn value(self, stored: f32) -> Option<f32> {
        let exp = if self == Self::Exp { stored } else { -stored };
        (exp >= 0.0 && exp.is_finite()).then(|| exp.ln())
    }
}

/// Runs of `rows` rows, one every `stride` rows, from row `first` on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct PartSpec {
    /// First row of the role.
    pub first: usize,
    /// Number of consecutive rows in a run.
    pub rows: usize,
    /// Distance from the start of one run to the next.
    pub stride: usize,
}

impl PartSpec {
    /// Returns the part that is all rows of a matrix.
    pub(crate) fn whole(rows: usize) -> Self {
        Self { first: 0, rows, stride: rows }
    }

    /// Returns the number of rows of the stored matrix that has `rows` rows of the role.
    pub(crate) fn stored_rows(self, rows: usize) -> usize {
        (rows / self.rows).saturating_mul(self.stride)
    }
}

/// One matrix of a tensor `[of, rows, columns]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct StackSpec {
    /// Index of the matrix.
    pub index: usize,
    /// Number of matrices in the tensor.
    pub of: usize,
}

impl TensorSpec {
    pub(super) fn check(&self, path: &str) -> Result<(), SpecError> {
        require(&format!("{path}.names (their number)"), self.names.len(), !self.names.is_empty(), || {
            "at least 1".to_owned()
        })?;
        if let Some(PartSpec { first, rows, stride }) = self.part {
            size(&format!("{path}.part.rows"), rows)?;
            size(&format!("{path}.part.stride"), stride)?;
            require(&format!("{path}.part.first"), first, first <= stride && rows <= stride - first, || {
                format!("such that {rows} rows end within the stride of {stride}")
            })?;
        }
        if let Some(StackSpec { index, of }) = self.stack {
            size(&format!("{path}.stack.of"), of)?;
            require(&format!("{path}.stack.index"), index, index < of, || format!("below {of}"))?;
        }
        if let Some(alternative) = &self.alternative {
            require(
                &format!("{path}.alternative.alternative"),
                "another one",
                alternative.alternative.is_none(),
                || "null".to_owned(),
            )?;
            alternative.check(&format!("{path}.alternative"))?;
        }
        Ok(())
    }
}
