//! Tables that are looked up by token.

use serde::{Deserialize, Serialize};

use crate::limits::{SpecError, require, size};

/// Most rows of a hashed table, whose indices must fit in 32 bits; Qwen4 has 320 million.
const MAX_HASHED_ROWS: usize = 1 << 32;
/// Most elements of a hashed table; keeps its bytes from overflowing.
const MAX_ELEMENTS: usize = 1 << 56;

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
        size(&format!("{path}.columns"), self.columns)?;
        let rows = format!("{path}.rows");
        if !self.hashed {
            return size(&rows, self.rows);
        }
        let most = MAX_HASHED_ROWS.min(MAX_ELEMENTS / self.columns);
        require(&rows, self.rows, (1..=most).contains(&self.rows), || format!("in 1..={most}"))
    }
}
