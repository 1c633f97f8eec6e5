//! Disjoint parallel writes: a matrix partitioned into tiles, each of which is handed out at most once.
//!
//! The tasks of a [`Pool::run`](crate::Pool::run) share one closure, so none of them can own a `&mut` into the output.
//! [`Tiles`] borrows the output during the run and hands out each tile at most once. This is checked at run time (one
//! atomic byte per tile), so callers need no `unsafe`.

use std::marker::PhantomData;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, Ordering};

/// Grid of tiles over a borrowed matrix or over a range of its columns.
///
/// Tiles are numbered in row-major order. Tiles at the right and lower edges may be smaller.
///
/// # Examples
/// ```
/// use ferrule_kernels::disjoint::Tiles;
///
/// let mut data = [0; 6]; // 2 rows of 3 columns
/// let tiles = Tiles::row_blocks(&mut data, 3, 1);
/// tiles.take(1).row(0).fill(7);
/// drop(tiles);
/// assert_eq!(data, [0, 0, 0, 7, 7, 7]);
/// ```
pub struct Tiles<'a, T> {
    data: NonNull<T>,
    rows: usize,
    /// Elements from one row to the next in memory.
    stride: usize,
    columns: Range<usize>,
    tile_rows: usize,
    tile_columns: usize,
    /// Number of tiles in a column of tiles.
    down: usize,
    /// Number of tiles in a row of tiles.
    across: usize,
    taken: Vec<AtomicBool>,
    owner: PhantomData<&'a mut [T]>,
}

// SAFETY: a `Tiles` hands out disjoint parts of a `&mut [T]`, each to one thread, which is sound if T is Send. The only
// other shared state, the flags, is atomic.
unsafe impl<T: Send> Sync for Tiles<'_, T> {}
// SAFETY: it holds nothing but the `&mut [T]` that it was created from, which is Send if T is.
unsafe impl<T: Send> Send for Tiles<'_, T> {}

impl<'a, T> Tiles<'a, T> {
    /// Partitions the given columns of `data`, whose rows are `stride` elements long, into tiles of
    /// `tile_rows` x `tile_columns`.
    ///
    /// # Panics
    /// If `data` is not a whole number of rows, `columns` exceed the stride, or a tile size is 0.
    #[must_use]
    pub fn new(data: &'a mut [T], stride: usize, columns: Range<usize>, tile_rows: usize, tile_columns: usize) -> Self {
        assert!(
            columns.start <= columns.end && columns.end <= stride,
            "columns {columns:?} are out of bounds for rows of {stride}"
        );
        assert!(tile_rows > 0 && tile_columns > 0, "tile size must be > 0, got {tile_rows} x {tile_columns}");
        let rows = data.len().checked_div(stride).unwrap_or(0);
        assert_eq!(rows * stride, data.len(), "{} elements are not a whole number of rows of {stride}", data.len());
        let (down, across) = (rows.div_ceil(tile_rows), columns.len().div_ceil(tile_columns));
        let taken = (0..down * across).map(|_| AtomicBool::new(false)).collect();
        let data = NonNull::from(data).cast();
        Self { data, rows, stride, columns, tile_rows, tile_columns, down, across, taken, owner: PhantomData }
    }

    /// Partitions `data` into blocks of `tile_rows` whole rows.
    ///
    /// # Panics
    /// Same as [`Tiles::new`].
    #[must_use]
    pub fn row_blocks(data: &'a mut [T], stride: usize, tile_rows: usize) -> Self {
        Self::new(data, stride, 0..stride, tile_rows, stride.max(1))
    }

    /// Returns the number of tiles.
    #[must_use]
    pub fn len(&self) -> usize {
        self.taken.len()
    }

    /// Returns whether there are no tiles.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.taken.is_empty()
    }

    /// Returns the number of tiles in a row of tiles.
    #[must_use]
    pub fn tiles_per_row(&self) -> usize {
        self.across
    }

    /// Hands out tile `index`.
    ///
    /// # Panics
    /// If the index is out of bounds or the tile was taken before.
    #[must_use]
    pub fn take(&self, index: usize) -> Tile<'_, T> {
        self.take_at(index / self.across, index % self.across)
    }

    /// Hands out tile `index` in column-major order.
    ///
    /// # Panics
    /// Same as [`Tiles::take`].
    #[must_use]
    pub fn take_column_major(&self, index: usize) -> Tile<'_, T> {
        self.take_at(index % self.down, index / self.down)
    }

    fn take_at(&self, down: usize, along: usize) -> Tile<'_, T> {
        assert!(
            down < self.down && along < self.across,
            "tile ({down}, {along}) is out of bounds for a grid of {} x {}",
            self.down,
            self.across
        );
        let taken = self.taken[down * self.across + along].swap(true, Ordering::Relaxed);
        assert!(!taken, "tile ({down}, {along}) was taken twice");
        let first_row = down * self.tile_rows;
        let first = self.columns.start + along * self.tile_columns;
        Tile {
            // SAFETY: the tile is in bounds, so its first row and column lie within the matrix.
            data: unsafe { self.data.add(first_row * self.stride + first) },
            rows: first_row..(first_row + self.tile_rows).min(self.rows),
            columns: first..(first + self.tile_columns).min(self.columns.end),
            stride: self.stride,
            owner: PhantomData,
        }
    }
}

/// Exclusive access to one tile of a [`Tiles`].
pub struct Tile<'a, T> {
    /// Element in the first row and column of the tile.
    data: NonNull<T>,
    rows: Range<usize>,
    columns: Range<usize>,
    stride: usize,
    owner: PhantomData<&'a mut [T]>,
}

impl<T> Tile<'_, T> {
    /// Returns the rows of the matrix that the tile covers.
    #[must_use]
    pub fn rows(&self) -> Range<usize> {
        self.rows.clone()
    }

    /// Returns the columns of the matrix that the tile covers.
    #[must_use]
    pub fn columns(&self) -> Range<usize> {
        self.columns.clone()
    }

    /// Returns row `row` of the tile.
    ///
    /// # Panics
    /// If the row is out of bounds.
    #[inline]
    #[must_use]
    pub fn row(&mut self, row: usize) -> &mut [T] {
        assert!(row < self.rows.len(), "row {row} is out of bounds for a tile of {} rows", self.rows.len());
        // SAFETY: row and columns lie in the matrix that `Tiles` borrows mutably for longer than this tile lives. No
        // other tile covers them, this one was taken once, and the result borrows it mutably.
        unsafe { std::slice::from_raw_parts_mut(self.data.as_ptr().add(row * self.stride), self.columns.len()) }
    }

    /// Returns the whole tile as one slice.
    ///
    /// # Panics
    /// If the tile has several rows and is narrower than the matrix, so that its rows are not contiguous.
    #[must_use]
    pub fn contiguous(&mut self) -> &mut [T] {
        let (rows, columns) = (self.rows.len(), self.columns.len());
        assert!(
            rows == 1 || columns == self.stride,
            "a tile of {rows} x {columns} in rows of {} is not contiguous",
            self.stride
        );
        // SAFETY: as in `row`; the rows are contiguous, so the tile is one slice of rows * columns elements.
        unsafe { std::slice::from_raw_parts_mut(self.data.as_ptr(), rows * columns) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_cover_each_column_once_and_nothing_else() {
        for (rows, stride, columns, tile_rows, tile_columns) in
            [(5, 7, 0..7, 2, 3), (4, 8, 2..7, 3, 2), (1, 33, 0..33, 1, 16), (3, 4, 2..2, 1, 1), (0, 4, 0..4, 1, 4)]
        {
            let mut data = vec![0u32; rows * stride];
            let tiles = Tiles::new(&mut data, stride, columns.clone(), tile_rows, tile_columns);
            for index in (0..tiles.len()).rev() {
                let mut tile = tiles.take(index);
                for row in 0..tile.rows().len() {
                    tile.row(row).iter_mut().for_each(|element| *element += 1);
                }
            }
            for (index, count) in data.iter().enumerate() {
                assert_eq!(*count, u32::from(columns.contains(&(index % stride))), "element {index}");
            }
        }
    }

    #[test]
    fn column_major_order_goes_down_before_across() {
        let mut data = [0u8; 5 * 7];
        let tiles = Tiles::new(&mut data, 7, 1..7, 2, 4);
        let taken: Vec<_> =
            (0..tiles.len()).map(|i| tiles.take_column_major(i)).map(|tile| (tile.rows(), tile.columns())).collect();
        let wanted = [1..5, 5..7].map(|columns| [0..2, 2..4, 4..5].map(|rows| (rows, columns.clone())));
        assert_eq!(taken, wanted.as_flattened());
    }

    #[test]
    fn row_blocks_are_contiguous() {
        let mut data = vec![0u8; 5 * 3];
        let tiles = Tiles::row_blocks(&mut data, 3, 2);
        assert_eq!((tiles.len(), tiles.tiles_per_row()), (3, 1));
        assert_eq!(tiles.take(1).contiguous().len(), 6);
        assert_eq!(tiles.take(2).contiguous().len(), 3);
        assert_eq!(Tiles::row_blocks(&mut [0u8; 0], 0, 1).len(), 0);
    }

    #[test]
    #[should_panic(expected = "taken twice")]
    fn taking_a_tile_twice_panics() {
        let mut data = [0.0; 4];
        let tiles = Tiles::row_blocks(&mut data, 2, 1);
        let _first = tiles.take(0);
        let _second = tiles.take(0);
    }

    #[test]
    #[should_panic(expected = "not a whole number of rows")]
    fn partial_rows_are_refused() {
        let _tiles = Tiles::row_blocks(&mut [0.0; 5], 2, 1);
    }
}
