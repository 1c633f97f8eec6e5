//! Families of formats: what the matrix and the matmul do with panels of each.

use std::marker::PhantomData;

use super::descent::SWEEPS;
use super::grouped::{self, GroupedFormat, StoredBlock};
use super::integer::{self, BlockScales, IntegerFormat, Unpack};
use super::sparse::TooDense;
use super::trellis::{Trellis, Trellised};
use super::trellis_descent;
use super::trellis_gptq::{self, PackTrellis};
use super::{CalibratedPanel, FloatFormat, Line, PackCalibrated, pack_panel};
use crate::arch::{Isa, LANES, LINE};
use crate::hessian::InputStatistics;
use crate::matmul::float::{self, FloatPart};
use crate::matmul::integer::BandTask;
use crate::{Exec, PoolError};

/// Family of a format, with the operations that its formats have.
#[derive(Clone, Copy)]
pub(crate) enum Family {
    /// Floating-point formats. Such a format is the only one of its matrix.
    Float(&'static dyn FloatPanels),
    /// Formats whose codes are multiplied as bytes.
    Quantized(Quantized),
}

/// Family of quantized formats, all of which may be bands of one matrix.
#[derive(Clone, Copy)]
pub(crate) enum Quantized {
    /// ferrule's own quantization.
    Integer(&'static dyn IntegerPanels),
    /// Quantization by other programs.
    Grouped(&'static dyn GroupedPanels),
}

impl Quantized {
    /// Returns whether there are codes that are multiplied as they are stored where that is faster.
    pub fn has_codes(self) -> bool {
        match self {
            Self::Integer(format) => format.has_codes(),
            Self::Grouped(format) => format.has_codes(),
        }
    }
}

/// Operations on panels of a floating-point format.
pub(crate) trait FloatPanels: Sync {
    /// Returns the bytes of a panel of `cols` inputs. `None` if they overflow.
    fn bytes(&self, cols: usize) -> Option<usize>;

    /// Packs sixteen rows, `[16][cols]`.
    fn pack(&self, rows: &[f32], panel: &mut [u8]);

    /// Reads row `lane`.
    fn read_row(&self, panel: &[u8], lane: usize, out: &mut [f32]);

    /// Multiplies with weights in this format.
    fn multiply(&self, exec: &Exec<'_>, parts: &mut [FloatPart<'_>]) -> Result<(), PoolError>;
}

impl<F: FloatFormat> FloatPanels for PhantomData<F> {
    fn bytes(&self, cols: usize) -> Option<usize> {
        cols.checked_mul(size_of::<Line<F>>())
    }

    /// Transposes rows to lines, in blocks of 16 x 16: rows a power of two apart map to the same cache sets, so a cache
    /// line must be used completely before the other rows evict it.
    fn pack(&self, rows: &[f32], panel: &mut [u8]) {
        let panel: &mut [Line<F>] = bytemuck::cast_slice_mut(panel);
        let cols = panel.len();
        for (block, lines) in panel.chunks_mut(LANES).enumerate() {
            let mut transposed = [[0.0; LANES]; LANES];
            for (lane, row) in rows.chunks_exact(cols).enumerate() {
                for (values, value) in transposed.iter_mut().zip(&row[block * LANES..][..lines.len()]) {
                    values[lane] = *value;
                }
            }
            for (line, values) in lines.iter_mut().zip(&transposed) {
                *line = F::narrow(values);
            }
        }
    }

    fn read_row(&self, panel: &[u8], lane: usize, out: &mut [f32]) {
        for (value, line) in out.iter_mut().zip(bytemuck::cast_slice::<_, Line<F>>(panel)) {
            *value = F::widen_one(line[lane]);
        }
    }

    fn multiply(&self, exec: &Exec<'_>, parts: &mut [FloatPart<'_>]) -> Result<(), PoolError> {
        float::multiply::<F>(exec, parts)
    }
}

/// Operations on panels of an integer format.
pub(crate) trait IntegerPanels: Sync {
    /// See [`Quantized::has_codes`].
    fn has_codes(&self) -> bool;

    /// Returns the bytes of a panel of `cols` inputs, without block scales. `None` if they overflow.
    fn bytes(&self, cols: usize) -> Option<usize>;

    /// Quantizes and packs sixteen rows, `[16][cols]`.
    fn pack(&self, isa: Isa, rows: &[f32], block_scales: &mut [BlockScales], panel: &mut [u8]);

    /// Quantizes panels with the statistics of their inputs. Leaves them incomplete once `is_cancelled` returns true.
    fn pack_calibrated(
        &self,
        isa: Isa,
        statistics: &InputStatistics,
        panels: &mut [CalibratedPanel<'_>],
        is_cancelled: &dyn Fn() -> bool,
    );

    /// Sets the block scales of random codes over `cols` inputs so that outputs have the variance of the inputs.
    fn scale_random(&self, cols: usize, block_scales: &mut [BlockScales]);

    /// Reads row `lane`.
    fn read_row(&self, block_scales: &[BlockScales], panel: &[u8], lane: usize, out: &mut [f32]);

    /// Multiplies with panels of a band.
    fn multiply(&self, task: BandTask<'_, '_>);
}

impl<F: IntegerFormat> IntegerPanels for PhantomData<F> {
    fn has_codes(&self) -> bool {
        F::BY_CODES.is_some()
    }

    fn bytes(&self, cols: usize) -> Option<usize> {
        // No format takes more than two lines for four inputs, so the number of lines cannot overflow.
        (cols < usize::MAX / LINE).then(|| F::lines(integer::halves(cols)))?.checked_mul(LINE)
    }

    fn pack(&self, isa: Isa, rows: &[f32], block_scales: &mut [BlockScales], panel: &mut [u8]) {
        pack_panel::<F>(isa, rows, block_scales, bytemuck::cast_slice_mut(panel));
    }

    fn pack_calibrated(
        &self,
        isa: Isa,
        statistics: &InputStatistics,
        panels: &mut [CalibratedPanel<'_>],
        is_cancelled: &dyn Fn() -> bool,
    ) {
        isa.run(PackCalibrated::<F> { statistics, panels, sweeps: SWEEPS, is_cancelled, format: PhantomData });
    }

    fn scale_random(&self, cols: usize, block_scales: &mut [BlockScales]) {
        integer::set_deviation(integer::uniform_deviation::<F>(), cols, block_scales);
    }

    fn read_row(&self, block_scales: &[BlockScales], panel: &[u8], lane: usize, out: &mut [f32]) {
        let lines = bytemuck::cast_slice(panel);
        let weight = |input, row| F::weight(lines, input / integer::BLOCK, input % integer::BLOCK, row);
        integer::read_row(weight, block_scales, lane, out);
    }

    fn multiply(&self, task: BandTask<'_, '_>) {
        task.integer::<F>();
    }
}

impl<T: Trellis> IntegerPanels for PhantomData<Trellised<T>> {
    fn has_codes(&self) -> bool {
        Trellised::<T>::BY_CODES.is_some()
    }

    fn bytes(&self, cols: usize) -> Option<usize> {
        // No format takes more than two lines for four inputs, so the number of lines cannot overflow.
        (cols < usize::MAX / LINE).then(|| Trellised::<T>::lines(integer::halves(cols)))?.checked_mul(LINE)
    }

    fn pack(&self, isa: Isa, rows: &[f32], block_scales: &mut [BlockScales], panel: &mut [u8]) {
        trellis_gptq::pack_panel::<T>(isa, rows, block_scales, bytemuck::cast_slice_mut(panel));
    }

    fn pack_calibrated(
        &self,
        isa: Isa,
        statistics: &InputStatistics,
        panels: &mut [CalibratedPanel<'_>],
        is_cancelled: &dyn Fn() -> bool,
    ) {
        let statistics = Some(statistics);
        isa.run(PackTrellis::<T> {
            statistics,
            panels,
            sweeps: trellis_descent::SWEEPS,
            is_cancelled,
            format: PhantomData,
        });
    }

    fn scale_random(&self, cols: usize, block_scales: &mut [BlockScales]) {
        integer::set_deviation(Trellised::<T>::uniform_deviation(), cols, block_scales);
    }

    fn read_row(&self, block_scales: &[BlockScales], panel: &[u8], lane: usize, out: &mut [f32]) {
        let lines = bytemuck::cast_slice(panel);
        integer::read_row(|input, row| Trellised::<T>::read(lines, input, row), block_scales, lane, out);
    }

    fn multiply(&self, task: BandTask<'_, '_>) {
        task.integer::<Trellised<T>>();
    }
}

/// Operations on panels of a grouped format.
pub(crate) trait GroupedPanels: Sync {
    /// Returns the stored block.
    fn stored(&self) -> StoredBlock;

    /// Returns the bytes of a panel of `cols` inputs. `None` if they overflow.
    fn bytes(&self, cols: usize) -> Option<usize>;

    /// See [`Quantized::has_codes`].
    fn has_codes(&self) -> bool;

    /// Returns whether panels store nonzero codes alone.
    fn is_sparse(&self) -> bool {
        false
    }

    /// Returns whether weights have a scale for each block, rather than factors for each group of it.
    fn has_block_scales(&self) -> bool {
        false
    }

    /// Packs sixteen stored rows, `[16][bytes of a row]`. Fails if a sparse format has no space for all nonzero codes.
    fn pack(&self, rows: &[u8], panel: &mut [u8]) -> Result<(), TooDense>;

    /// Sets the factors of random codes over `cols` inputs so that outputs have the variance of the inputs.
    fn scale_random(&self, cols: usize, panel: &mut [u8]);

    /// Reads row `lane`.
    fn read_row(&self, panel: &[u8], lane: usize, out: &mut [f32]);

    /// Multiplies with panels of a band.
    fn multiply(&self, task: BandTask<'_, '_>);
}

impl<F: GroupedFormat> GroupedPanels for PhantomData<F> {
    fn stored(&self) -> StoredBlock {
        F::STORED
    }

    fn has_codes(&self) -> bool {
        F::ByCodes::BY_CODES.is_some()
    }

    fn bytes(&self, cols: usize) -> Option<usize> {
        // No format takes more than two bytes per weight.
        (cols < usize::MAX / LINE).then(|| F::lines(cols.div_ceil(grouped::GROUP)))?.checked_mul(LINE)
    }

    fn pack(&self, rows: &[u8], panel: &mut [u8]) -> Result<(), TooDense> {
        grouped::pack_panel::<F>(rows, bytemuck::cast_slice_mut(panel));
        Ok(())
    }

    fn scale_random(&self, cols: usize, panel: &mut [u8]) {
        F::set_deviation(bytemuck::cast_slice_mut(panel), cols / grouped::GROUP, 1.0 / (cols as f32).sqrt());
    }

    fn read_row(&self, panel: &[u8], lane: usize, out: &mut [f32]) {
        grouped::read_row::<F>(bytemuck::cast_slice(panel), lane, out);
    }

    fn multiply(&self, task: BandTask<'_, '_>) {
        task.grouped::<F>();
    }
}
