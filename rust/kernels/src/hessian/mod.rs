//! Hessian of the calibration inputs of a linear layer, for GPTQ.
//!
//! `H` is the sum of `x x^T` over many input rows x. An error e in the weights of one output adds `e H e^T` to the
//! squared error of that output. Quantization ([`quant::gptq`](crate::quant)) and pruning ([`prune`](crate::prune)) need H
//! as a triangular factor. For quantization, inputs are rotated in the same way as integer formats rotate weights
//! ([`rotation`]), because the rotated weights are quantized; H therefore covers whole half blocks of inputs.
//!
//! Every element is summed in a fixed order, independent of the number of threads.

mod correction;
mod factor;
pub(crate) mod feedback;
mod norms;
mod rank_update;

use crate::arch::{Kernel, LANES, Simd};
use crate::disjoint::{Tile, Tiles};
use crate::memory::{AllocError, PageSlice};
use crate::quant::integer::{BLOCK, padded};
use crate::quant::rotation;
use crate::{Exec, PoolError};

pub(crate) use correction::Correction;
use correction::OutputErrors;
pub(crate) use factor::HessianFactor;
pub use factor::{CalibrationError, InputStatistics};
pub use norms::InputNorms;
use rank_update::{DEPTH, PANEL, Sign, rank_update};

/// Number of panels in a block of inputs.
const BLOCK_PANELS: usize = BLOCK / PANEL;

/// Basis of the inputs of a Hessian.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Basis {
    /// Inputs rotated in blocks, as integer formats rotate weights.
    Rotated,
    /// Inputs as they are, for pruning.
    Plain,
}

/// Hessian of the inputs of a linear layer: the running sum of `x x^T` over input rows x (up to the factor 2 of the
/// literature, which cancels).
pub struct Hessian {
    cols: usize,
    basis: Basis,
    /// Number of rows added so far.
    rows: u64,
    /// Sums of `x x^T`, `[padded][padded]`; elements below the diagonal tiles stay zero.
    sums: PageSlice<f32>,
    /// Rows in the basis that are not yet in the sums, `[column panels][DEPTH][PANEL]`.
    pending: PageSlice<f32>,
    /// Number of pending rows.
    filled: usize,
    /// Errors of the outputs, if the weights are corrected for them.
    errors: Option<OutputErrors>,
}

impl Hessian {
    /// Creates a zero Hessian for `cols` inputs.
    ///
    /// # Errors
    /// [`AllocError`] if allocation fails.
    pub fn zeroed(cols: usize, basis: Basis) -> Result<Self, AllocError> {
        let size = padded(cols);
        let sums = PageSlice::zeroed_in_huge_pages(size.checked_mul(size).ok_or(AllocError { bytes: u64::MAX })?)?;
        let pending = PageSlice::zeroed_in_huge_pages(size.checked_mul(DEPTH).ok_or(AllocError { bytes: u64::MAX })?)?;
        Ok(Self { cols, basis, rows: 0, sums, pending, filled: 0, errors: None })
    }

    /// Adds sums for the errors of `outputs` outputs, which [`Hessian::add_with_errors`] receives. The statistics then
    /// correct the weights of these outputs.
    ///
    /// # Errors
    /// [`AllocError`] if allocation fails.
    ///
    /// # Panics
    /// If the basis is plain, or rows were added before.
    pub fn with_errors(self, outputs: usize) -> Result<Self, AllocError> {
        assert!(self.basis == Basis::Rotated && self.rows == 0, "only an empty Hessian of rotated inputs has errors");
        let errors = OutputErrors::zeroed(outputs, padded(self.cols))?;
        Ok(Self { errors: Some(errors), ..self })
    }

    /// Returns the bytes of memory that [`Hessian::with_errors`] adds, or `None` if they overflow.
    #[must_use]
    pub fn bytes_of_errors(cols: usize, outputs: usize) -> Option<u64> {
        OutputErrors::bytes_for(outputs, padded(cols))
    }

    /// Returns the bytes of memory of a Hessian for `cols` inputs, or `None` if they overflow.
    #[must_use]
    pub fn bytes_for(cols: usize) -> Option<u64> {
        let size = padded(cols) as u64;
        size.checked_mul(size.checked_add(DEPTH as u64)?)?.checked_mul(size_of::<f32>() as u64)
    }

    /// Returns the number of rows added so far.
    #[must_use]
    pub fn rows(&self) -> u64 {
        self.rows
    }

    /// Adds the rows of `x: [rows, cols]`.
    ///
    /// # Errors
    /// [`PoolError`] if the run was cancelled or a task panicked. The Hessian is then invalid.
    ///
    /// # Panics
    /// If `x` is not a whole number of rows, or the Hessian has sums for errors.
    pub fn add(&mut self, exec: &Exec<'_>, x: &[f32]) -> Result<(), PoolError> {
        assert!(self.errors.is_none(), "the errors of outputs are missing");
        self.add_rows(exec, x, &[])
    }

    /// Adds the rows of `x: [rows, cols]` with the errors of their outputs, `[rows, outputs]`: the exact outputs minus
    /// those that the weights compute from `x`.
    ///
    /// # Errors
    /// Same as [`Hessian::add`].
    ///
    /// # Panics
    /// If `x` and `errors` do not have the same whole number of rows, or the Hessian has no sums for errors.
    pub fn add_with_errors(&mut self, exec: &Exec<'_>, x: &[f32], errors: &[f32]) -> Result<(), PoolError> {
        let outputs = self.errors.as_ref().expect("a Hessian with sums for errors").outputs;
        assert_eq!(x.len() / self.cols * outputs, errors.len(), "inputs and errors must have as many rows");
        self.add_rows(exec, x, errors)
    }

    fn add_rows(&mut self, exec: &Exec<'_>, x: &[f32], mut errors: &[f32]) -> Result<(), PoolError> {
        assert!(
            x.len().is_multiple_of(self.cols),
            "{} elements are not a whole number of rows of {}",
            x.len(),
            self.cols
        );
        let mut left = x;
        while !left.is_empty() {
            let room = (DEPTH - self.filled) * self.cols;
            let (now, later) = left.split_at(room.min(left.len()));
            left = later;
            let (first, count) = (self.filled, now.len() / self.cols);
            if let Some(of_outputs) = &mut self.errors {
                let (now, later) = errors.split_at(count * of_outputs.outputs);
                errors = later;
                of_outputs.add(exec, now, first)?;
            }
            let blocks = Tiles::row_blocks(&mut self.pending, DEPTH * PANEL, BLOCK_PANELS);
            exec.run(blocks.len(), |block| {
                let (cols, basis, panels) = (self.cols, self.basis, blocks.take(block));
                exec.isa.run(AddRows { x: now, cols, basis, block, first, panels });
            })?;
            drop(blocks);
            (self.filled, self.rows) = (first + count, self.rows + count as u64);
            if self.filled == DEPTH {
                self.flush(exec)?;
            }
        }
        Ok(())
    }

    /// Adds the pending rows to the sums.
    fn flush(&mut self, exec: &Exec<'_>) -> Result<(), PoolError> {
        let size = padded(self.cols);
        rank_update(exec, &mut self.sums, size, size, &self.pending, self.filled, Sign::Plus)?;
        if let Some(errors) = &mut self.errors {
            errors.flush(exec, &self.pending, self.filled)?;
        }
        self.filled = 0;
        Ok(())
    }
}

/// Adds one block of inputs of several rows to the pending rows.
struct AddRows<'a> {
    /// `[rows, cols]`
    x: &'a [f32],
    cols: usize,
    basis: Basis,
    block: usize,
    /// Index of the first row in `panels`.
    first: usize,
    /// Output panels of the block, `[panels][DEPTH][PANEL]`.
    panels: Tile<'a, f32>,
}

impl Kernel for AddRows<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, simd: S) {
        let columns = self.block * BLOCK..self.cols.min((self.block + 1) * BLOCK);
        let panels = self.panels.contiguous();
        for (x, row) in self.x.chunks_exact(self.cols).zip(self.first..) {
            let mut block = [[0.0; LANES]; BLOCK / LANES];
            block.as_flattened_mut()[..columns.len()].copy_from_slice(&x[columns.clone()]);
            let mut vectors = simd.load_vectors(&block);
            if self.basis == Basis::Rotated {
                vectors = rotation::rotate(simd, vectors, columns.len());
            }
            for (index, lanes) in vectors.into_iter().enumerate().take(panels.len() / (DEPTH * LANES)) {
                let at = (index * LANES / PANEL * DEPTH + row) * PANEL + index * LANES % PANEL;
                simd.store(lanes, panels[at..].first_chunk_mut().expect("a panel is a whole number of vectors"));
            }
        }
    }
}
