//! Tables that are looked up by token.

use serde::{Deserialize, Serialize};

use crate::limits::{SpecError, size};

/// A table with a row for each token id below `rows`, where the others have the row of id 0, or with rows that hashes of
/// tokens select. Its rows are read from the file when they are needed. Table `i` has the role `tables.i.weight`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct TableSpec {
    /// Number of rows.
    pub rows: usize,
    /// Number of elements of a row.
    pub columns: usize,
    /// Whether hashes of tokens select the rows.
    #[serde(default)]
    pub hashed: bool,
}

impl TableSpec {
    pub(super) fn check(self, path: &str) -> Result<(), SpecError> {
        size(&format!("{path}.rows"), self.rows)?;
        size(&format!("{path}.columns"), self.columns)
    }
}
