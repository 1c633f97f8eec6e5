//! Packing: filling the panels of a matrix from rows of weights.

use std::ops::Range;
use std::sync::{Mutex, PoisonError};
use std::thread;

use super::PackedMatrix;
use crate::arch::LANES;
use crate::disjoint::Tiles;
use crate::hessian::{Basis, InputStatistics};
use crate::memory::AllocError;
use crate::quant::integer::{BlockScales, GROUP, HALF, SUPER};
use crate::quant::rotation::SHRINK;
use crate::quant::sparse::TooDense;
use crate::quant::{CalibratedPanel, Family, Format, PANEL_INPUT_BYTES, Quantized, ROWS_INPUT_BYTES, StoredBlock};
use crate::{Exec, PoolError};

/// Source of the rows of a matrix to pack. A row holds the weights of one output.
pub trait RowSource: Sync {
    /// Reads row `row` as f32 into `out`, without rounding.
    fn read_row(&self, row: usize, out: &mut [f32]);

    /// Reads rows from `first` on in their stored block format ([`Format::stored_block`]) into `out`, as many rows of
    /// `row_bytes` as fit. Called for grouped formats only.
    ///
    /// # Panics
    /// If the source stores numbers rather than blocks.
    fn read_stored(&self, first: usize, row_bytes: usize, _out: &mut [u8]) {
        panic!("row {first} is stored as numbers, not as {row_bytes} bytes of quantized blocks");
    }

    /// Reads rows from `first` on into `out: [rows, columns]`. Sources override this if reading neighbouring rows
    /// together is cheaper.
    fn read_rows(&self, first: usize, columns: usize, out: &mut [f32]) {
        (first..).zip(out.chunks_exact_mut(columns)).for_each(|(row, out)| self.read_row(row, out));
    }
}

/// Maximum number of panels that a task calibrates or prunes, so that its weights and targets fit the cache.
pub(crate) const MAX_TASK_PANELS: usize = 4;

/// Minimum number of tasks per thread when a task calibrates or prunes several panels.
pub(crate) const TASKS_PER_THREAD: usize = 4;

/// Reason that a matrix could not be packed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PackError {
    /// Memory allocation failed.
    #[error(transparent)]
    Memory(#[from] AllocError),
    /// The run was cancelled, or the source panicked.
    #[error(transparent)]
    Pool(#[from] PoolError),
    /// Sixteen rows have more nonzero codes than their sparse format stores.
    #[error("rows {row} to {}: {too_dense}", row + LANES - 1)]
    TooDense {
        /// First of the rows.
        row: usize,
        /// Numbers of weights.
        too_dense: TooDense,
    },
}

impl PackedMatrix {
    /// Packs a matrix of `cols` columns. `formats` gives the format of consecutive rows and their number.
    ///
    /// # Errors
    /// [`PackError`] if allocation fails, `exec` was cancelled, or the source panicked.
    ///
    /// # Panics
    /// If a format other than the last one ends within a panel, if a floating-point format is not the only one, or if
    /// `cols` is not a whole number of stored blocks of a format.
    pub fn pack(
        exec: &Exec<'_>,
        formats: &[(Format, usize)],
        cols: usize,
        source: &dyn RowSource,
    ) -> Result<Self, PackError> {
        let mut packed = Self::zeroed(formats, cols)?;
        let (rows, source) = (packed.rows, Source { source, cols });
        let too_dense = Mutex::new(None::<(usize, TooDense)>);
        packed.for_panels(exec, |family, panel, block_scales, data| {
            let rows = panel * LANES..rows;
            match family {
                Family::Float(format) => format.pack(&source.numbers(rows), data),
                Family::Quantized(Quantized::Integer(format)) => {
                    format.pack(exec.isa, &source.numbers(rows), block_scales, data);
                }
                Family::Quantized(Quantized::Grouped(format)) => {
                    if let Err(found) = format.pack(&source.stored(rows, format.stored()), data) {
                        let mut first = too_dense.lock().unwrap_or_else(PoisonError::into_inner);
                        if first.is_none_or(|(row, _)| panel * LANES < row) {
                            *first = Some((panel * LANES, found));
                        }
                    }
                }
            }
        })?;
        match too_dense.into_inner().unwrap_or_else(PoisonError::into_inner) {
            None => Ok(packed),
            Some((row, too_dense)) => Err(PackError::TooDense { row, too_dense }),
        }
    }

    /// Calls `f` with the family, index, block scales and bytes of each panel, in parallel.
    fn for_panels(
        &mut self,
        exec: &Exec<'_>,
        f: impl Fn(Family, usize, &mut [BlockScales], &mut [u8]) + Sync,
    ) -> Result<(), PoolError> {
        for (family, band) in self.bands.each_mut() {
            let panels = Tiles::row_blocks(band.data.owned(), band.panel_bytes, 1);
            let block_scales = Tiles::row_blocks(band.block_scales.owned(), band.panel_scales, 1);
            exec.run(panels.len(), |index| {
                let mut panel = panels.take(index);
                let mut block_scales = (!block_scales.is_empty()).then(|| block_scales.take(index));
                let block_scales = block_scales.as_mut().map_or(&mut [][..], |block_scales| block_scales.contiguous());
                f(family, band.panels.start + index, block_scales, panel.contiguous());
            })?;
        }
        Ok(())
    }

    /// Packs a matrix like [`PackedMatrix::pack`], but quantizes integer formats by GPTQ with the statistics of
    /// calibration inputs, which may correct the weights before.
    ///
    /// # Errors
    /// Same as [`PackedMatrix::pack`].
    ///
    /// # Panics
    /// Same as [`PackedMatrix::pack`], and if the statistics have another number of inputs, or a correction for another
    /// number of rows.
    pub fn pack_calibrated(
        exec: &Exec<'_>,
        formats: &[(Format, usize)],
        cols: usize,
        source: &dyn RowSource,
        statistics: &InputStatistics,
    ) -> Result<Self, PackError> {
        match Self::quantize_calibrated(exec, formats, cols, source, statistics)? {
            Some((packed, _)) => Ok(packed),
            None => Self::pack(exec, formats, cols, source),
        }
    }

    /// Returns the squared error of `rows` rows that [`PackedMatrix::pack_calibrated`] would quantize, as their inputs
    /// weigh it: the sum of `e H e^T` over the errors e of the rows, where the Hessian H is damped and has a mean diagonal
    /// of 1. For uncorrelated inputs of equal magnitude, this is the sum of the squared errors. `None` for formats that
    /// calibration does not change.
    ///
    /// # Errors
    /// Same as [`PackedMatrix::pack`].
    ///
    /// # Panics
    /// If the statistics have another number of inputs, or a correction for another number of rows.
    pub fn calibrated_error(
        exec: &Exec<'_>,
        (format, rows): (Format, usize),
        cols: usize,
        source: &dyn RowSource,
        statistics: &InputStatistics,
    ) -> Result<Option<f64>, PackError> {
        let quantized = Self::quantize_calibrated(exec, &[(format, rows)], cols, source, statistics)?;
        // The rotation scales the squares of errors.
        Ok(quantized.map(|(_, loss)| loss * f64::from(SHRINK)))
    }

    /// Returns the bytes that [`PackedMatrix::pack_calibrated`] needs for `cols` columns on `threads` threads, besides the
    /// matrix and the Hessian: the panels that each thread quantizes, and inverses of diagonal blocks of the Hessian's factor, in
    /// two orders of inputs.
    #[must_use]
    pub fn calibration_bytes(cols: usize, threads: usize) -> u64 {
        let of_task = MAX_TASK_PANELS * PANEL_INPUT_BYTES + ROWS_INPUT_BYTES + LANES * size_of::<f32>();
        let shared = 2 * (SUPER + GROUP) * size_of::<f32>();
        let each = (threads as u64).saturating_mul(of_task as u64).saturating_add(shared as u64);
        (cols as u64).saturating_add(HALF as u64).saturating_mul(each)
    }

    /// Quantizes integer formats by GPTQ, and returns the loss of all rows. `None` for other formats.
    fn quantize_calibrated(
        exec: &Exec<'_>,
        formats: &[(Format, usize)],
        cols: usize,
        source: &dyn RowSource,
        statistics: &InputStatistics,
    ) -> Result<Option<(Self, f64)>, PackError> {
        assert_eq!(statistics.cols(), cols, "statistics must have as many inputs as the matrix");
        assert_eq!(statistics.basis, Basis::Rotated, "integer formats are rotated");
        let integer = formats.iter().map(|(format, _)| match format.family() {
            Family::Quantized(Quantized::Integer(format)) => Some(format),
            Family::Quantized(Quantized::Grouped(_)) | Family::Float(_) => None,
        });
        let Some(integer) = integer.collect::<Option<Vec<_>>>() else { return Ok(None) };
        let mut packed = Self::zeroed(formats, cols)?;
        let mut losses = vec![[0.0; LANES]; packed.rows.div_ceil(LANES)];
        let Self { rows, bands, .. } = &mut packed;
        let correction = statistics.correction.as_ref();
        if let Some(correction) = correction {
            assert_eq!(correction.outputs, *rows, "the correction must be of as many rows as the matrix has");
        }
        let caller = thread::current().id();
        // A task takes seconds for thousands of columns. The caller alone polls, as between tasks.
        let is_cancelled = || match thread::current().id() == caller {
            true => exec.cancel.poll(),
            false => exec.cancel.is_cancelled(),
        };
        for (format, (_, band)) in integer.into_iter().zip(bands.each_mut()) {
            let task_panels = (band.panels.len() / (TASKS_PER_THREAD * exec.pool.threads())).clamp(1, MAX_TASK_PANELS);
            let panels = Tiles::row_blocks(band.data.owned(), band.panel_bytes, task_panels);
            let block_scales = Tiles::row_blocks(band.block_scales.owned(), band.panel_scales, task_panels);
            let losses = Tiles::row_blocks(&mut losses[band.panels.clone()], 1, task_panels);
            exec.run(panels.len(), |index| {
                let (mut panels, mut block_scales) = (panels.take(index), block_scales.take(index));
                let first = band.panels.start + panels.rows().start;
                let each = (first..).zip(panels.contiguous().chunks_exact_mut(band.panel_bytes));
                let each = each.zip(block_scales.contiguous().chunks_exact_mut(band.panel_scales));
                let calibrated = each.map(|((panel, lines), block_scales)| {
                    let values = Source { source, cols }.numbers(panel * LANES..*rows);
                    let mut calibrated =
                        CalibratedPanel::new(exec.isa, &values, block_scales, bytemuck::cast_slice_mut(lines));
                    if let Some(correction) = correction {
                        correction.add_to(panel, calibrated.weights_mut());
                    }
                    calibrated
                });
                let mut calibrated: Vec<_> = calibrated.collect();
                format.pack_calibrated(exec.isa, statistics, &mut calibrated, &is_cancelled);
                losses
                    .take(index)
                    .contiguous()
                    .iter_mut()
                    .zip(&calibrated)
                    .for_each(|(loss, panel)| *loss = panel.loss);
            })?;
        }
        if exec.cancel.is_cancelled() {
            return Err(PoolError::Cancelled.into());
        }
        let loss = losses.as_flattened().iter().map(|loss| f64::from(*loss)).sum();
        Ok(Some((packed, loss)))
    }

    /// Creates a matrix of random codes and block scales for benchmarks, at the speed of writing memory. The weights
    /// are scaled so that outputs have the variance of the inputs. Quantized formats only.
    ///
    /// # Errors
    /// [`PackError`] if allocation fails or `exec` was cancelled.
    ///
    /// # Panics
    /// Same as [`PackedMatrix::pack`], and for floating-point formats.
    pub fn random(exec: &Exec<'_>, formats: &[(Format, usize)], cols: usize, seed: u64) -> Result<Self, PackError> {
        let mut packed = Self::zeroed(formats, cols)?;
        packed.for_panels(exec, |family, panel, block_scales, data| {
            fill_randomly(seed ^ (panel as u64) << 32, data);
            match family {
                Family::Float(_) => panic!("random bytes are not floating-point weights"),
                Family::Quantized(Quantized::Integer(format)) => format.scale_random(cols, block_scales),
                Family::Quantized(Quantized::Grouped(format)) => format.scale_random(cols, data),
            }
        })?;
        Ok(packed)
    }
}

/// Row source with its number of columns.
pub(crate) struct Source<'a> {
    pub source: &'a dyn RowSource,
    pub cols: usize,
}

impl Source<'_> {
    /// Reads up to sixteen rows as `[16][cols]`. Missing rows are zero.
    pub fn numbers(&self, rows: Range<usize>) -> Vec<f32> {
        let mut values = vec![0.0; LANES * self.cols];
        self.source.read_rows(rows.start, self.cols, &mut values[..LANES.min(rows.len()) * self.cols]);
        values
    }

    /// Reads up to sixteen rows in their stored block format. Missing rows are zero.
    fn stored(&self, rows: Range<usize>, block: StoredBlock) -> Vec<u8> {
        let row_bytes = block.row_bytes(self.cols);
        let mut bytes = vec![0; LANES * row_bytes];
        self.source.read_stored(rows.start, row_bytes, &mut bytes[..LANES.min(rows.len()) * row_bytes]);
        bytes
    }
}

/// Fills a panel with pseudorandom codes.
fn fill_randomly(seed: u64, panel: &mut [u8]) {
    let mut state = seed | 1;
    for bytes in panel.as_chunks_mut::<8>().0 {
        // Knuth's linear congruential generator. Its upper half is mixed in because its low bits have a short period.
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        *bytes = (state ^ state >> 32).to_ne_bytes();
    }
}
