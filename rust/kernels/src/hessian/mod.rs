//! What a linear map's inputs have in common: which of them are large, and which go together.
//!
//! The sum of `x x^T` over many rows x says what an error of the map's weights costs: an error e of one output's weights
//! costs `e (sum of x x^T) e^T`. Quantizing with it ([`quant::gptq`](crate::quant)) wants that matrix as a triangular
//! factor. Inputs are rotated as integer formats rotate them ([`rotation`]), since it is rotated weights that have
//! errors; what is here are therefore whole blocks of inputs.
//!
//! Every number is summed up in one order, whatever the threads.

mod factor;
mod rank_update;

use crate::arch::{Kernel, LANES, Simd};
use crate::disjoint::{Tile, Tiles};
use crate::memory::{AllocError, PageSlice};
use crate::quant::integer::{self, BLOCK};
use crate::quant::rotation;
use crate::{Exec, PoolError};

pub(crate) use factor::Feedback;
pub use factor::{CalibrationError, InputStatistics};
use rank_update::{DEPTH, PANEL, Sign, rank_update};

/// Panels of columns that a block has.
const BLOCK_PANELS: usize = BLOCK / PANEL;

/// Sums of `x x^T` over rows x, as they come.
pub struct Hessian {
    cols: usize,
    /// Rows so far.
    rows: u64,
    /// `[padded][padded]`; what lies below the diagonal's tiles stays zero.
    sums: PageSlice<f32>,
    /// Rotated rows that are not in the sums yet: `[panels of columns][DEPTH][PANEL]`.
    pending: PageSlice<f32>,
    /// How many there are.
    filled: usize,
}

/// Inputs, filled up to whole blocks.
fn padded(cols: usize) -> usize {
    integer::blocks(cols) * BLOCK
}

impl Hessian {
    /// Of no rows yet, with `cols` inputs.
    ///
    /// # Errors
    /// [`AllocError`] if there is no memory for it.
    pub fn zeroed(cols: usize) -> Result<Self, AllocError> {
        let size = padded(cols);
        let sums = PageSlice::zeroed_in_huge_pages(size.checked_mul(size).ok_or(AllocError { bytes: u64::MAX })?)?;
        let pending = PageSlice::zeroed_in_huge_pages(size.checked_mul(DEPTH).ok_or(AllocError { bytes: u64::MAX })?)?;
        Ok(Self { cols, rows: 0, sums, pending, filled: 0 })
    }

    /// The bytes that they take; `None` where they do not fit 64 bits.
    #[must_use]
    pub fn bytes_for(cols: usize) -> Option<u64> {
        let size = padded(cols) as u64;
        size.checked_mul(size.checked_add(DEPTH as u64)?)?.checked_mul(size_of::<f32>() as u64)
    }

    /// Rows so far.
    #[must_use]
    pub fn rows(&self) -> u64 {
        self.rows
    }

    /// Adds the rows of `x: [rows, cols]`.
    ///
    /// # Errors
    /// [`PoolError`]; then they are good for nothing.
    ///
    /// # Panics
    /// If `x` is no whole number of rows.
    pub fn add(&mut self, exec: &Exec<'_>, x: &[f32]) -> Result<(), PoolError> {
        assert!(x.len().is_multiple_of(self.cols), "{} numbers are no rows of {}", x.len(), self.cols);
        let mut left = x;
        while !left.is_empty() {
            let room = (DEPTH - self.filled) * self.cols;
            let (now, later) = left.split_at(room.min(left.len()));
            left = later;
            let (first, count) = (self.filled, now.len() / self.cols);
            let blocks = Tiles::row_blocks(&mut self.pending, BLOCK_PANELS * DEPTH * PANEL, 1);
            exec.run(blocks.len(), |block| {
                exec.isa.run(RotateRows { x: now, cols: self.cols, block, first, panels: blocks.take(block) });
            })?;
            drop(blocks);
            (self.filled, self.rows) = (first + count, self.rows + count as u64);
            if self.filled == DEPTH {
                self.flush(exec)?;
            }
        }
        Ok(())
    }

    /// Adds what is pending to the sums.
    fn flush(&mut self, exec: &Exec<'_>) -> Result<(), PoolError> {
        let size = padded(self.cols);
        rank_update(exec, &mut self.sums, size, size, &self.pending, self.filled, Sign::Plus)?;
        self.filled = 0;
        Ok(())
    }
}

/// Rotates one block of some rows.
struct RotateRows<'a> {
    /// `[rows, cols]`
    x: &'a [f32],
    cols: usize,
    block: usize,
    /// The place of the first row.
    first: usize,
    /// The block's, `[BLOCK_PANELS][DEPTH][PANEL]`.
    panels: Tile<'a, f32>,
}

impl Kernel for RotateRows<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, simd: S) {
        let columns = self.block * BLOCK..self.cols.min((self.block + 1) * BLOCK);
        let panels = self.panels.contiguous();
        for (x, row) in self.x.chunks_exact(self.cols).zip(self.first..) {
            let mut block = [[0.0; LANES]; BLOCK / LANES];
            block.as_flattened_mut()[..columns.len()].copy_from_slice(&x[columns.clone()]);
            let rotated = rotation::rotate(simd, block.map(|lanes| simd.load(&lanes)));
            for (index, lanes) in rotated.into_iter().enumerate() {
                let at = (index * LANES / PANEL * DEPTH + row) * PANEL + index * LANES % PANEL;
                simd.store(lanes, panels[at..].first_chunk_mut().expect("a panel is whole lanes"));
            }
        }
    }
}
