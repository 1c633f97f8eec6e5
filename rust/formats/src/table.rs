//! [`StoredTable`]: a matrix that stays in its mapped file, whose rows are decoded one by one when they are read.

use std::ops::Range;
use std::sync::Arc;

use memmap2::Mmap;

use crate::dtype::{Dtype, FloatDtype};
use crate::file::release_pages;
use crate::gguf::BlockType;

/// Bytes around a row whose pages are released with it: when a page is read, Linux maps its neighbours in the page cache
/// too, up to a large folio.
const FAULT_AROUND: usize = 2 << 20;

/// Storage of the rows of a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowFormat {
    /// Floating-point numbers, one by one.
    Float(FloatDtype),
    /// Blocks of ggml.
    Blocks(BlockType),
}

impl RowFormat {
    /// Returns all formats.
    pub fn all() -> impl Iterator<Item = Self> {
        let floats = [FloatDtype::F32, FloatDtype::F16, FloatDtype::Bf16].map(Self::Float);
        floats.into_iter().chain(BlockType::ALL.iter().copied().map(Self::Blocks))
    }

    /// Returns the name: that of the element type, or ggml's name of the block type.
    pub fn name(self) -> &'static str {
        match self {
            Self::Float(FloatDtype::F32) => Dtype::F32.name(),
            Self::Float(FloatDtype::F16) => Dtype::F16.name(),
            Self::Float(FloatDtype::Bf16) => Dtype::Bf16.name(),
            Self::Blocks(blocks) => blocks.name(),
        }
    }

    /// Returns the bytes of a row, or `None` if it ends within a block or its length overflows.
    pub fn row_bytes(self, columns: usize) -> Option<usize> {
        let (inputs, bytes) = match self {
            Self::Float(float) => (1, float.bytes()),
            Self::Blocks(blocks) => (blocks.inputs(), blocks.bytes()),
        };
        if columns.is_multiple_of(inputs) { (columns / inputs).checked_mul(bytes) } else { None }
    }
}

/// A matrix that stays in its mapped file. It keeps the file mapped.
#[derive(Clone, Debug)]
pub struct StoredTable {
    map: Arc<Mmap>,
    /// Place in the file.
    bytes: Range<usize>,
    format: RowFormat,
    row_bytes: usize,
}

impl StoredTable {
    /// Returns the table in these bytes of a file.
    pub(crate) fn new(map: Arc<Mmap>, bytes: Range<usize>, format: RowFormat, row_bytes: usize) -> Self {
        Self { map, bytes, format, row_bytes }
    }

    /// Returns the storage of the rows.
    pub fn format(&self) -> RowFormat {
        self.format
    }

    /// Returns the bytes of all rows.
    pub fn bytes(&self) -> &[u8] {
        &self.map[self.bytes.clone()]
    }

    /// Reads the elements of a row from `first` on.
    ///
    /// # Panics
    /// If the table does not have the row, or the row that many elements.
    pub fn read(&self, row: usize, first: usize, out: &mut [f32]) {
        let row = &self.bytes()[row * self.row_bytes..][..self.row_bytes];
        match self.format {
            RowFormat::Float(float) => float.widen(row, first, out),
            RowFormat::Blocks(blocks) => blocks.dequantize(row, first, out),
        }
    }

    /// Releases the memory that reading a row has taken; its pages are read from the file again when needed.
    pub fn release(&self, row: usize) {
        let begin = self.bytes.start + row * self.row_bytes;
        self.release_bytes(begin.saturating_sub(FAULT_AROUND)..begin + self.row_bytes + FAULT_AROUND);
    }

    /// Releases the memory that reading all rows has taken.
    pub fn release_all(&self) {
        self.release_bytes(self.bytes.clone());
    }

    /// Releases the table's part of a range of the file.
    fn release_bytes(&self, Range { start, end }: Range<usize>) {
        release_pages(&self.map, start.max(self.bytes.start)..end.min(self.bytes.end));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_formats_are_distinct() {
        let names: std::collections::BTreeSet<_> = RowFormat::all().map(RowFormat::name).collect();
        assert_eq!(names.len(), RowFormat::all().count());
    }

    #[test]
    fn rows_are_whole_blocks() {
        let q6_k = RowFormat::Blocks(BlockType::Q6K);
        assert_eq!(q6_k.row_bytes(512), Some(420));
        assert_eq!(q6_k.row_bytes(500), None);
        assert_eq!(RowFormat::Float(FloatDtype::Bf16).row_bytes(500), Some(1000));
        assert_eq!(RowFormat::Float(FloatDtype::F32).row_bytes(usize::MAX), None);
    }
}
