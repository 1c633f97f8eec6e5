//! Column ranges of row-major matrices, and parallel iteration over their rows.

use crate::disjoint::Tiles;
use crate::{Exec, PoolError};

/// Number of elements below which waking worker threads costs more than it saves.
const INLINE_ELEMENTS: usize = 16 * 1024;

/// View of the trailing columns of a row-major f32 matrix. Operations take the number of columns that they use.
#[derive(Debug, Clone, Copy)]
pub struct Rows<'a> {
    /// `[rows, stride]`
    pub data: &'a [f32],
    /// Elements from one row to the next.
    pub stride: usize,
    /// First column of the view.
    pub first: usize,
}

impl<'a> Rows<'a> {
    /// Creates a view of columns `first..` of `data: [rows, stride]`.
    #[must_use]
    pub fn new(data: &'a [f32], stride: usize, first: usize) -> Self {
        Self { data, stride, first }
    }

    /// Returns the number of rows.
    ///
    /// # Panics
    /// If `data` is not a whole number of rows.
    #[must_use]
    pub fn rows(&self) -> usize {
        whole_rows(self.data.len(), self.stride)
    }

    /// Returns the first `width` columns of row `row` of the view.
    ///
    /// # Panics
    /// If the row or a column is out of bounds.
    #[inline]
    #[must_use]
    pub fn row(&self, row: usize, width: usize) -> &'a [f32] {
        &self.data[row * self.stride..][..self.stride][self.first..][..width]
    }
}

/// Mutable view of the trailing columns of a row-major f32 matrix; see [`Rows`].
#[derive(Debug)]
pub struct RowsMut<'a> {
    /// `[rows, stride]`
    pub data: &'a mut [f32],
    /// Elements from one row to the next.
    pub stride: usize,
    /// First column of the view.
    pub first: usize,
}

impl<'a> RowsMut<'a> {
    /// Creates a view of columns `first..` of `data: [rows, stride]`.
    #[must_use]
    pub fn new(data: &'a mut [f32], stride: usize, first: usize) -> Self {
        Self { data, stride, first }
    }

    /// Returns the number of rows.
    ///
    /// # Panics
    /// If `data` is not a whole number of rows.
    #[must_use]
    pub fn rows(&self) -> usize {
        whole_rows(self.data.len(), self.stride)
    }
}

/// Returns the number of rows of `stride` elements in `len` elements. Panics if that is not a whole number.
pub(crate) fn whole_rows(len: usize, stride: usize) -> usize {
    assert!(stride > 0 && len.is_multiple_of(stride), "{len} elements are not a whole number of rows of {stride}");
    len / stride
}

/// Splits `data: [rows, stride]` into chunks of rows and calls `job` with each chunk and the index of its first row, in
/// parallel if there is enough work. `width` is the number of elements of a row that `job` processes.
///
/// # Errors
/// [`PoolError`] if the run was cancelled or a task panicked.
///
/// # Panics
/// If `data` is not a whole number of rows.
pub fn for_row_chunks(
    exec: &Exec<'_>,
    data: &mut [f32],
    stride: usize,
    width: usize,
    job: &(dyn Fn(usize, &mut [f32]) + Sync),
) -> Result<(), PoolError> {
    let rows = whole_rows(data.len(), stride);
    let elements = rows * width;
    if elements < INLINE_ELEMENTS {
        if rows > 0 {
            job(0, data);
        }
        return Ok(());
    }
    // Four chunks per thread balance the load when other programs run; chunks far below the threshold do not pay.
    let chunks = (exec.pool.threads() * 4).min(elements / (INLINE_ELEMENTS / 4)).clamp(1, rows);
    let rows_per_chunk = rows.div_ceil(chunks);
    let chunks = Tiles::row_blocks(data, stride, rows_per_chunk);
    exec.pool.run(chunks.len(), &|chunk| job(chunk * rows_per_chunk, chunks.take(chunk).contiguous()), exec.cancel)
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroUsize;

    use super::*;
    use crate::arch::Isa;
    use crate::{Cancel, Pool};

    /// Adds the number of its row to each element, in the first `width` columns, on three threads.
    fn add_row_numbers(data: &mut [f32], stride: usize, width: usize) {
        let (pool, cancel) = (Pool::new(NonZeroUsize::new(3).expect("some")), Cancel::new());
        let exec = Exec { isa: Isa::best(), pool: &pool, cancel: &cancel };
        let job = |first: usize, rows: &mut [f32]| {
            for (row, elements) in (first..).zip(rows.chunks_mut(stride)) {
                elements[..width].iter_mut().for_each(|element| *element += row as f32);
            }
        };
        for_row_chunks(&exec, data, stride, width, &job).expect("no task panics");
    }

    #[test]
    fn every_row_is_in_one_chunk() {
        // The last are enough for several chunks, of which the last one is smaller.
        for (rows, stride, width) in [(0, 3, 3), (1, 5, 2), (7, 4, 4), (INLINE_ELEMENTS / 128 + 1, 131, 128)] {
            let mut data = vec![0.5; rows * stride];
            add_row_numbers(&mut data, stride, width);
            for (row, elements) in data.chunks(stride).enumerate() {
                let (within, outside) = elements.split_at(width);
                assert!(within.iter().all(|element| *element == row as f32 + 0.5), "row {row} of {rows}");
                assert!(outside.iter().all(|element| *element == 0.5), "row {row} of {rows}");
            }
        }
    }

    #[test]
    fn a_view_has_the_trailing_columns() {
        let data = [0.0, 1.0, 2.0, 3.0, 4.0, 5.0];
        let view = Rows::new(&data, 3, 1);
        assert_eq!((view.rows(), view.row(1, 2), view.row(0, 1)), (2, &[4.0, 5.0][..], &[1.0][..]));
    }

    #[test]
    #[should_panic(expected = "5 elements are not a whole number of rows of 2")]
    fn partial_rows_are_refused() {
        add_row_numbers(&mut [0.0; 5], 2, 2);
    }
}
