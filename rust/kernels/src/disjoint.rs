//! Parallel writing without overlap: a matrix cut into tiles, each of which one task may take once.
//!
//! The tasks of a [`Pool::run`](crate::Pool::run) share their closure, so none of them can own a `&mut` into the
//! output. A [`Tiles`] owns the output for the length of the run and gives each tile away at most once; that is checked
//! while it runs (one atomic byte a tile), so using it needs no `unsafe`.

use std::marker::PhantomData;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, Ordering};

/// A borrowed matrix, or a range of its columns, cut into a grid of tiles that are handed out one by one.
///
/// Tiles are numbered row by row. Those at the right and lower edge may be smaller.
pub struct Tiles<'a, T> {
    data: NonNull<T>,
    rows: usize,
    /// Elements from one row to the next in memory.
    stride: usize,
    columns: Range<usize>,
    tile_rows: usize,
    tile_columns: usize,
    /// Tiles that lie one below the other, and side by side.
    down: usize,
    across: usize,
    taken: Vec<AtomicBool>,
    owner: PhantomData<&'a mut [T]>,
}

// SAFETY: a `Tiles` gives away parts of a `&mut [T]`, each to one thread, which may send where T may be sent; what is
// shared between threads besides (the flags) is atomic.
unsafe impl<T: Send> Sync for Tiles<'_, T> {}
// SAFETY: it holds no more than the `&mut [T]` it was made from, which is Send where T is.
unsafe impl<T: Send> Send for Tiles<'_, T> {}

impl<'a, T> Tiles<'a, T> {
    /// Tiles of `tile_rows` x `tile_columns` over the given columns of `data`, whose rows are `stride` elements long.
    ///
    /// # Panics
    /// If `data` is not a whole number of rows, `columns` reach past the stride, or a tile would be empty.
    #[must_use]
    pub fn new(data: &'a mut [T], stride: usize, columns: Range<usize>, tile_rows: usize, tile_columns: usize) -> Self {
        assert!(columns.start <= columns.end && columns.end <= stride, "columns {columns:?} of rows of {stride}");
        assert!(tile_rows > 0 && tile_columns > 0, "a tile of {tile_rows} x {tile_columns}");
        let rows = data.len().checked_div(stride).unwrap_or(0);
        assert_eq!(rows * stride, data.len(), "{} elements are no whole number of rows of {stride}", data.len());
        let (down, across) = (rows.div_ceil(tile_rows), columns.len().div_ceil(tile_columns));
        let taken = (0..down * across).map(|_| AtomicBool::new(false)).collect();
        let data = NonNull::from(data).cast();
        Self { data, rows, stride, columns, tile_rows, tile_columns, down, across, taken, owner: PhantomData }
    }

    /// Whole rows, `tile_rows` of them in a tile.
    ///
    /// # Panics
    /// As [`Tiles::new`].
    #[must_use]
    pub fn of_rows(data: &'a mut [T], stride: usize, tile_rows: usize) -> Self {
        Self::new(data, stride, 0..stride, tile_rows, stride.max(1))
    }

    /// How many tiles there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.taken.len()
    }

    /// Whether there are no tiles at all.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.taken.is_empty()
    }

    /// How many tiles lie side by side: tile i is number `i % across` of its row of tiles.
    #[must_use]
    pub fn across(&self) -> usize {
        self.across
    }

    /// Gives away tile `index`.
    ///
    /// # Panics
    /// If there is no such tile, or it was taken before.
    #[must_use]
    pub fn take(&self, index: usize) -> Tile<'_, T> {
        self.take_at(index / self.across, index % self.across)
    }

    /// Gives away tile `index` of those numbered column by column, so that tiles which follow each other lie below each
    /// other.
    ///
    /// # Panics
    /// As [`Tiles::take`].
    #[must_use]
    pub fn take_down(&self, index: usize) -> Tile<'_, T> {
        self.take_at(index % self.down, index / self.down)
    }

    fn take_at(&self, down: usize, along: usize) -> Tile<'_, T> {
        assert!(down < self.down && along < self.across, "no tile {down}, {along} in {} x {}", self.down, self.across);
        let taken = self.taken[down * self.across + along].swap(true, Ordering::Relaxed);
        assert!(!taken, "tile {down}, {along} was taken twice");
        let first_row = down * self.tile_rows;
        let first = self.columns.start + along * self.tile_columns;
        Tile {
            // SAFETY: the tile exists, so its first row and column lie within the matrix.
            data: unsafe { self.data.add(first_row * self.stride + first) },
            rows: first_row..(first_row + self.tile_rows).min(self.rows),
            columns: first..(first + self.tile_columns).min(self.columns.end),
            stride: self.stride,
            owner: PhantomData,
        }
    }
}

/// One tile of a [`Tiles`], owned by who took it.
pub struct Tile<'a, T> {
    /// The element in the tile's first row and column.
    data: NonNull<T>,
    rows: Range<usize>,
    columns: Range<usize>,
    stride: usize,
    owner: PhantomData<&'a mut [T]>,
}

impl<T> Tile<'_, T> {
    /// The rows of the matrix that the tile covers.
    #[must_use]
    pub fn rows(&self) -> Range<usize> {
        self.rows.clone()
    }

    /// The columns of the matrix that the tile covers.
    #[must_use]
    pub fn columns(&self) -> Range<usize> {
        self.columns.clone()
    }

    /// The tile's part of row `row`, counted from the tile's first.
    ///
    /// # Panics
    /// If the tile has no such row.
    #[inline]
    #[must_use]
    pub fn row(&mut self, row: usize) -> &mut [T] {
        assert!(row < self.rows.len(), "row {row} of a tile of {}", self.rows.len());
        // SAFETY: row and columns lie in the matrix that `Tiles` borrowed mutably for longer than this tile lives. No
        // other tile covers them, this one was taken once, and the result borrows it mutably.
        unsafe { std::slice::from_raw_parts_mut(self.data.as_ptr().add(row * self.stride), self.columns.len()) }
    }

    /// The whole tile as one slice.
    ///
    /// # Panics
    /// If the tile is narrower than the matrix, so that its rows do not touch, and has more than one row.
    #[must_use]
    pub fn contiguous(&mut self) -> &mut [T] {
        let (rows, columns) = (self.rows.len(), self.columns.len());
        assert!(rows == 1 || columns == self.stride, "{rows} rows of {columns} columns in rows of {}", self.stride);
        // SAFETY: as in `row`; the rows touch, so the tile is one run of rows * columns elements.
        unsafe { std::slice::from_raw_parts_mut(self.data.as_ptr(), rows * columns) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_cover_the_columns_once_and_nothing_else() {
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
    fn tiles_that_follow_each_other_down_share_their_columns() {
        let mut data = [0u8; 5 * 7];
        let tiles = Tiles::new(&mut data, 7, 1..7, 2, 4);
        let taken: Vec<_> =
            (0..tiles.len()).map(|i| tiles.take_down(i)).map(|tile| (tile.rows(), tile.columns())).collect();
        let wanted = [1..5, 5..7].map(|columns| [0..2, 2..4, 4..5].map(|rows| (rows, columns.clone())));
        assert_eq!(taken, wanted.as_flattened());
    }

    #[test]
    fn whole_rows_are_one_slice() {
        let mut data = vec![0u8; 5 * 3];
        let tiles = Tiles::of_rows(&mut data, 3, 2);
        assert_eq!((tiles.len(), tiles.across()), (3, 1));
        assert_eq!(tiles.take(1).contiguous().len(), 6);
        assert_eq!(tiles.take(2).contiguous().len(), 3);
        assert_eq!(Tiles::of_rows(&mut [0u8; 0], 0, 1).len(), 0);
    }

    #[test]
    #[should_panic(expected = "taken twice")]
    fn no_tile_is_given_twice() {
        let mut data = [0.0; 4];
        let tiles = Tiles::of_rows(&mut data, 2, 1);
        let _first = tiles.take(0);
        let _second = tiles.take(0);
    }

    #[test]
    #[should_panic(expected = "no whole number")]
    fn half_a_row_is_refused() {
        let _tiles = Tiles::of_rows(&mut [0.0; 5], 2, 1);
    }
}
