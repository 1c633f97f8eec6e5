//! Where a checkpoint keeps a role's weights.

use serde::{Deserialize, Serialize};

use crate::limits::{SpecError, require, size};

/// Where a role's weights lie.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct TensorSpec {
    /// One tensor of the checkpoint, or several of the same shape whose rows follow one another. `2_Dense/linear.weight`
    /// is one of a folder within the checkpoint's.
    pub names: Vec<String>,
    /// Stored as `[inputs, outputs]`.
    pub transposed: bool,
    /// Which rows of a stored matrix that holds several roles.
    pub part: Option<PartSpec>,
    /// Which of several matrices that are stored as one tensor.
    pub stack: Option<StackSpec>,
}

/// `rows` of every `stride`, from row `first` on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct PartSpec {
    /// The first of the role's rows.
    pub first: usize,
    /// The role's rows that lie together.
    pub rows: usize,
    /// From one such run to the next.
    pub stride: usize,
}

impl PartSpec {
    /// All rows of a matrix.
    pub(crate) fn whole(rows: usize) -> Self {
        Self { first: 0, rows, stride: rows }
    }

    /// Rows of the stored matrix of which `rows` are the role's.
    pub(crate) fn stored_rows(self, rows: usize) -> usize {
        (rows / self.rows).saturating_mul(self.stride)
    }
}

/// A matrix of a tensor `[of, rows, columns]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct StackSpec {
    /// Which one.
    pub index: usize,
    /// How many there are.
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
        Ok(())
    }
}
