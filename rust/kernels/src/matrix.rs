//! Weight matrices in the layout that the matmul reads.

use crate::arch::LANES;
use crate::disjoint::Tiles;
use crate::memory::{AllocError, PageSlice};
use crate::quant::{FloatFormat, Format, FormatVisitor, Line};
use crate::{Exec, PoolError};

/// The rows of a stored matrix. A row holds the weights of one output.
pub trait RowSource: Sync {
    /// Writes row `row`, widened exactly, to `out`.
    fn read_row(&self, row: usize, out: &mut [f32]);
}

/// Why a matrix was not packed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PackError {
    /// There is no memory for it.
    #[error(transparent)]
    Memory(#[from] AllocError),
    /// Cancelled, or the source panicked.
    #[error(transparent)]
    Pool(#[from] PoolError),
}

/// A matrix of weights, `[rows, cols]`: `rows` outputs, each over `cols` inputs.
///
/// Stored as panels of sixteen rows, `[rows / 16][cols][16]`; the last panel is filled up with rows of zeros.
#[derive(Debug)]
pub struct PackedMatrix {
    format: Format,
    rows: usize,
    cols: usize,
    data: PageSlice<u8>,
}

impl PackedMatrix {
    /// Reads a matrix of `rows` x `cols` from `source` and stores it as `format`.
    ///
    /// # Errors
    /// [`PackError`] if there is no memory for it, `exec` was cancelled, or the source panicked.
    pub fn pack(
        exec: &Exec<'_>,
        format: Format,
        rows: usize,
        cols: usize,
        source: &dyn RowSource,
    ) -> Result<Self, PackError> {
        let bytes = Self::bytes_for(format, rows, cols).and_then(|bytes| usize::try_from(bytes).ok());
        let data = PageSlice::zeroed(bytes.ok_or(AllocError { bytes: u64::MAX })?)?;
        let mut packed = Self { format, rows, cols, data };
        format.visit(Pack { exec, matrix: &mut packed, source })?;
        Ok(packed)
    }

    /// The bytes that such a matrix takes; `None` where they do not fit 64 bits.
    #[must_use]
    pub fn bytes_for(format: Format, rows: usize, cols: usize) -> Option<u64> {
        let lines = (rows.div_ceil(LANES) as u64).checked_mul(cols as u64)?;
        lines.checked_mul(format.line_bytes() as u64)
    }

    /// Outputs.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Inputs.
    #[must_use]
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// How weights are stored.
    #[must_use]
    pub fn format(&self) -> Format {
        self.format
    }

    /// The memory that it takes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.data.len()
    }

    /// Writes row `row` to `out`, widened exactly. This is how an embedding is looked up.
    ///
    /// # Panics
    /// If there is no such row or `out` is not `cols` long.
    pub fn read_row(&self, row: usize, out: &mut [f32]) {
        assert!(row < self.rows, "row {row} of {}", self.rows);
        assert_eq!(out.len(), self.cols, "the length of a row");
        self.format.visit(ReadRow { matrix: self, row, out });
    }

    /// The lines of all panels; `cols` of them are a panel.
    ///
    /// # Panics
    /// If the weights are not stored as `F`.
    pub(crate) fn lines<F: FloatFormat>(&self) -> &[Line<F>] {
        bytemuck::cast_slice(&self.data)
    }
}

struct Pack<'a> {
    exec: &'a Exec<'a>,
    matrix: &'a mut PackedMatrix,
    source: &'a dyn RowSource,
}

impl FormatVisitor for Pack<'_> {
    type Output = Result<(), PoolError>;

    fn visit<F: FloatFormat>(self) -> Self::Output {
        let PackedMatrix { rows, cols, data, .. } = self.matrix;
        let (rows, cols) = (*rows, *cols);
        let panels = Tiles::of_rows(bytemuck::cast_slice_mut::<u8, Line<F>>(data), cols, 1);
        self.exec.run(panels.len(), |panel| {
            let first = panel * LANES;
            let mut source = vec![0.0; LANES * cols];
            for (row, values) in (first..rows).zip(source.chunks_exact_mut(cols)) {
                self.source.read_row(row, values);
            }
            transpose::<F>(&source, panels.take(panel).contiguous());
        })
    }
}

/// Sixteen rows of f32 to lines. Goes by squares of 16 x 16: rows a power of two apart share their place in the cache,
/// and a cache line of a row must be used up before the others push it out.
fn transpose<F: FloatFormat>(source: &[f32], panel: &mut [Line<F>]) {
    let cols = panel.len();
    for (square, lines) in panel.chunks_mut(LANES).enumerate() {
        let mut turned = [[0.0; LANES]; LANES];
        for (lane, row) in source.chunks_exact(cols).enumerate() {
            for (values, value) in turned.iter_mut().zip(&row[square * LANES..][..lines.len()]) {
                values[lane] = *value;
            }
        }
        for (line, values) in lines.iter_mut().zip(&turned) {
            *line = F::narrow(values);
        }
    }
}

struct ReadRow<'a> {
    matrix: &'a PackedMatrix,
    row: usize,
    out: &'a mut [f32],
}

impl FormatVisitor for ReadRow<'_> {
    type Output = ();

    fn visit<F: FloatFormat>(self) {
        let cols = self.matrix.cols;
        let panel = &self.matrix.lines::<F>()[self.row / LANES * cols..][..cols];
        for (value, line) in self.out.iter_mut().zip(panel) {
            *value = F::widen_one(line[self.row % LANES]);
        }
    }
}
