//! Disjoint parallel writes: a matrix partitioned into tiles, each of which is handed out at most once.
//!
//! The tasks of a [`Pool::run`](crate::Pool::run) share one closure, so none of them can own a `&mut` into the output.
//! [`Tiles`] borrows the output during the run and hands out each tile at most once. This is checked at run time (one
//! atomic byte per tile), so callers need no `unsafe`. [`Regions`] does the same for tiles of different sizes, and lets
//! tasks read the rows that it does not hand out.

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

    /// Returns the first column of tile `index` in column-major order.
    #[must_use]
    pub fn first_column(&self, index: usize) -> usize {
        self.columns.start + index / self.down * self.tile_columns
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

/// Regions of a borrowed matrix: the crossings of some ranges of rows with some ranges of columns. Each is handed out at
/// most once, as by [`Tiles`]. The rows outside of the ranges can be read meanwhile.
///
/// # Examples
/// ```
/// use ferrule_kernels::disjoint::Regions;
///
/// let mut data = [1, 2, 3, 4, 5, 6]; // 2 rows of 3 columns
/// let regions = Regions::new(&mut data, 3, vec![1..2], vec![0..1, 1..3]);
/// regions.take(0, 1).row(0).copy_from_slice(regions.shared(0, 1));
/// drop(regions);
/// assert_eq!(data, [1, 2, 3, 4, 2, 3]);
/// ```
pub struct Regions<'a, T> {
    data: NonNull<T>,
    stride: usize,
    rows: Vec<Range<usize>>,
    columns: Vec<Range<usize>>,
    /// Whether a row is in one of the ranges, by row.
    is_exclusive: Vec<bool>,
    taken: Vec<AtomicBool>,
    owner: PhantomData<&'a mut [T]>,
}

// SAFETY: a `Regions` hands out disjoint parts of a `&mut [T]`, each to one thread, which is sound if T is Send, and
// shared references to other parts, which is sound if T is Sync. The only other shared state, the flags, is atomic.
unsafe impl<T: Send + Sync> Sync for Regions<'_, T> {}
// SAFETY: it holds nothing but the `&mut [T]` that it was created from, which is Send if T is.
unsafe impl<T: Send> Send for Regions<'_, T> {}

impl<'a, T> Regions<'a, T> {
    /// Creates the regions of `data`, whose rows are `stride` elements long. Ranges of rows may be in any order.
    ///
    /// # Panics
    /// If `data` is not a whole number of rows, ranges overlap or exceed the matrix, or the ranges of columns are not in
    /// ascending order.
    #[must_use]
    pub fn new(data: &'a mut [T], stride: usize, rows: Vec<Range<usize>>, columns: Vec<Range<usize>>) -> Self {
        let count = data.len().checked_div(stride).unwrap_or(0);
        assert_eq!(count * stride, data.len(), "{} elements are not a whole number of rows of {stride}", data.len());
        let mut is_exclusive = vec![false; count];
        for range in &rows {
            assert!(
                range.start <= range.end && range.end <= count,
                "rows {range:?} are out of bounds for a matrix of {count} rows"
            );
            for row in &mut is_exclusive[range.clone()] {
                assert!(!*row, "rows {range:?} overlap with those of another region");
                *row = true;
            }
        }
        let mut next = 0;
        for range in &columns {
            assert!(
                next <= range.start && range.start <= range.end && range.end <= stride,
                "columns {range:?} are out of bounds for rows of {stride}, or overlap with those of another region"
            );
            next = range.end;
        }
        let taken = (0..rows.len() * columns.len()).map(|_| AtomicBool::new(false)).collect();
        let data = NonNull::from(data).cast();
        Self { data, stride, rows, columns, is_exclusive, taken, owner: PhantomData }
    }

    /// Hands out the region of the rows and columns with these indices.
    ///
    /// # Panics
    /// If an index is out of bounds or the region was taken before.
    #[must_use]
    pub fn take(&self, rows: usize, columns: usize) -> Tile<'_, T> {
        let (row_range, column_range) = (self.rows[rows].clone(), self.columns[columns].clone());
        let taken = self.taken[rows * self.columns.len() + columns].swap(true, Ordering::Relaxed);
        assert!(!taken, "region ({rows}, {columns}) was taken twice");
        // A range without rows may start at the end of the matrix.
        let first = if row_range.is_empty() { 0 } else { row_range.start * self.stride + column_range.start };
        Tile {
            // SAFETY: `new` checked that the ranges lie within the matrix.
            data: unsafe { self.data.add(first) },
            rows: row_range,
            columns: column_range,
            stride: self.stride,
            owner: PhantomData,
        }
    }

    /// Returns the columns with this index of a row that is in no region.
    ///
    /// # Panics
    /// If an index is out of bounds, or the row is in a region.
    #[must_use]
    pub fn shared(&self, row: usize, columns: usize) -> &[T] {
        assert!(!self.is_exclusive[row], "row {row} is in a region");
        let columns = self.columns[columns].clone();
        // SAFETY: the row lies in the matrix, which is borrowed for longer than the result lives, and no region covers
        // it, so that nothing writes to it.
        unsafe { std::slice::from_raw_parts(self.data.as_ptr().add(row * self.stride + columns.start), columns.len()) }
    }
}

/// Exclusive access to one tile of a [`Tiles`], or to one region of a [`Regions`].
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
        // SAFETY: row and columns lie in the matrix that `Tiles` or `Regions` borrows mutably for longer than this tile
        // lives. No other tile covers them, this one was taken once, and the result borrows it mutably.
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
// A list of one range of rows or columns is meant.
#[allow(clippy::single_range_in_vec_init)]
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
    fn regions_cover_their_crossings_once_and_share_other_rows() {
        let mut data: Vec<u32> = (0..5 * 7).collect();
        let regions = Regions::new(&mut data, 7, vec![3..5, 1..2], vec![0..3, 3..3, 4..7]);
        for rows in 0..2 {
            for columns in 0..3 {
                let mut region = regions.take(rows, columns);
                for row in 0..region.rows().len() {
                    region.row(row).iter_mut().for_each(|element| *element += 100);
                }
            }
        }
        assert_eq!(regions.shared(0, 2), [4, 5, 6]);
        assert_eq!(regions.shared(2, 1), []);
        drop(regions);
        for (index, element) in (0..).zip(&data) {
            let is_covered = [1, 3, 4].contains(&(index / 7)) && index % 7 != 3;
            assert_eq!(*element, index + if is_covered { 100 } else { 0 });
        }
    }

    #[test]
    #[should_panic(expected = "region (1, 0) was taken twice")]
    fn taking_a_region_twice_panics() {
        let mut data = [0.0; 4];
        let regions = Regions::new(&mut data, 2, vec![1..2, 0..1], vec![0..1, 1..2]);
        let _first = regions.take(1, 0);
        let _second = regions.take(1, 0);
    }

    #[test]
    #[should_panic(expected = "row 1 is in a region")]
    fn rows_of_regions_are_not_shared() {
        let _row = Regions::new(&mut [0.0; 4], 2, vec![1..2], vec![0..2]).shared(1, 0).len();
    }

    #[test]
    #[should_panic(expected = "rows 1..2 overlap")]
    fn overlapping_rows_of_regions_are_refused() {
        let _regions = Regions::new(&mut [0.0; 4], 2, vec![0..2, 1..2], vec![0..2]);
    }

    #[test]
    #[should_panic(expected = "columns 0..2 are out of bounds for rows of 2, or overlap")]
    fn overlapping_columns_of_regions_are_refused() {
        let _regions = Regions::new(&mut [0.0; 4], 2, vec![0..1], vec![0..1, 0..2]);
    }

    #[test]
    #[should_panic(expected = "not a whole number of rows")]
    fn partial_rows_are_refused() {
        let _tiles = Tiles::row_blocks(&mut [0.0; 5], 2, 1);
    }
}
