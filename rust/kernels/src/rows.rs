//! Matrices that lie side by side in wider rows, and the splitting of rows among threads.

use crate::disjoint::Tiles;
use crate::{Exec, PoolError};

/// Below this many elements waking the threads costs more than they save.
const INLINE_ELEMENTS: usize = 16 * 1024;

/// Some columns of a matrix of f32: `width` columns of each row, where `width` is known to the operation.
#[derive(Debug, Clone, Copy)]
pub struct Rows<'a> {
    /// `[rows, stride]`
    pub data: &'a [f32],
    /// Elements from one row to the next.
    pub stride: usize,
    /// The first column that belongs to the view.
    pub first: usize,
}

impl<'a> Rows<'a> {
    /// Columns `first ..` of `data: [rows, stride]`.
    #[must_use]
    pub fn new(data: &'a [f32], stride: usize, first: usize) -> Self {
        Self { data, stride, first }
    }

    /// How many rows there are.
    ///
    /// # Panics
    /// If `data` is not made of whole rows.
    #[must_use]
    pub fn rows(&self) -> usize {
        whole_rows(self.data.len(), self.stride)
    }

    /// The first `width` columns of the view in `row`.
    #[inline]
    pub(crate) fn row(&self, row: usize, width: usize) -> &'a [f32] {
        &self.data[row * self.stride..][..self.stride][self.first..][..width]
    }
}

/// As [`Rows`], to be changed in place.
#[derive(Debug)]
pub struct RowsMut<'a> {
    /// `[rows, stride]`
    pub data: &'a mut [f32],
    /// Elements from one row to the next.
    pub stride: usize,
    /// The first column that belongs to the view.
    pub first: usize,
}

impl<'a> RowsMut<'a> {
    /// Columns `first ..` of `data: [rows, stride]`.
    #[must_use]
    pub fn new(data: &'a mut [f32], stride: usize, first: usize) -> Self {
        Self { data, stride, first }
    }

    /// How many rows there are.
    ///
    /// # Panics
    /// If `data` is not made of whole rows.
    #[must_use]
    pub fn rows(&self) -> usize {
        whole_rows(self.data.len(), self.stride)
    }
}

/// Rows of `stride` in `len` elements.
pub(crate) fn whole_rows(len: usize, stride: usize) -> usize {
    assert!(stride > 0 && len.is_multiple_of(stride), "{len} elements are not rows of {stride}");
    len / stride
}

/// Cuts `data: [rows, stride]` into runs of rows and calls `job` on each with the number of its first row, on all
/// threads if there is enough to do. `width` is the number of elements of a row that `job` works on.
///
/// # Errors
/// [`PoolError`], as `Pool::run`.
///
/// # Panics
/// If `data` is not made of whole rows.
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
    // Four runs a thread even out what other programs take; runs much smaller than the threshold do not pay.
    let runs = (exec.pool.threads() * 4).min(elements / (INLINE_ELEMENTS / 4)).clamp(1, rows);
    let rows_per_run = rows.div_ceil(runs);
    let runs = Tiles::of_rows(data, stride, rows_per_run);
    exec.pool.run(runs.len(), &|run| job(run * rows_per_run, runs.take(run).contiguous()), exec.cancel)
}
