//! [`TokenTable`]: a table whose rows are looked up by token, and which is never in memory.

use ferrule_formats::StoredTable;

use crate::random::RandomMatrix;
use crate::spec::TableSpec;

/// A table with a row for each token id below a limit, or with rows that hashes of tokens select. It stays in its file;
/// rows are decoded as they are read.
pub(crate) struct TokenTable {
    pub spec: TableSpec,
    pub rows: TableRows,
}

/// Releases the memory that reading the rows of tokens has taken in the tables that are not hashed.
pub(crate) fn release_tokens(tables: &[TokenTable], tokens: &[u32]) {
    let tables = tables.iter().filter(|table| !table.spec.hashed);
    tables.for_each(|table| tokens.iter().for_each(|token| table.release(*token)));
}

/// Source of the rows of a table.
pub(crate) enum TableRows {
    Stored(StoredTable),
    Random(RandomMatrix),
}

impl TokenTable {
    /// Reads the elements of a token's row from column `first` on. Ids beyond the table, which stand for pictures and
    /// sounds, have the row of id 0.
    pub fn read(&self, token: u32, first: usize, out: &mut [f32]) {
        let row = self.row(token);
        match &self.rows {
            TableRows::Stored(table) => table.read(row, first, out),
            TableRows::Random(RandomMatrix { seed, rows }) => {
                RandomMatrix { seed: seed ^ first as u64, rows: *rows }.read_row(row, out);
            }
        }
    }

    /// Releases the memory that reading a token's row has taken.
    pub fn release(&self, token: u32) {
        if let TableRows::Stored(table) = &self.rows {
            table.release(self.row(token));
        }
    }

    /// Returns the table in its file, if it has one.
    pub fn stored(&self) -> Option<&StoredTable> {
        match &self.rows {
            TableRows::Stored(table) => Some(table),
            TableRows::Random(_) => None,
        }
    }

    fn row(&self, token: u32) -> usize {
        let row = token as usize;
        if row < self.spec.rows { row } else { 0 }
    }
}
