//! Weight matrices packed in the layout that the matmul reads.

use std::marker::PhantomData;
use std::ops::{Deref, Range};

use bytemuck::Pod;

use crate::arch::{ByteLine, Isa, LANES, LINE};
use crate::disjoint::Tiles;
use crate::hessian::InputStatistics;
use crate::memory::{AllocError, PageSlice, SharedBytes};
use crate::quant::grouped;
use crate::quant::integer::{self, BlockScales};
use crate::quant::{
    self, CalibratedPanel, FloatFormat, Format, FormatVisitor, GroupedFormat, IntegerFormat, Line, PackCalibrated,
    StoredBlock,
};
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

/// Bytes of the block scales of a panel in one super-block.
const BLOCK_SCALES_BYTES: usize = size_of::<BlockScales>();

/// Maximum number of panels that a task calibrates, so that its weights and targets fit the cache.
const MAX_TASK_PANELS: usize = 4;

/// Minimum number of tasks per thread when a task calibrates several panels.
const TASKS_PER_THREAD: usize = 4;

/// Reason that a matrix could not be packed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PackError {
    /// Memory allocation failed.
    #[error(transparent)]
    Memory(#[from] AllocError),
    /// The run was cancelled, or the source panicked.
    #[error(transparent)]
    Pool(#[from] PoolError),
}

/// Version of the memory layout of packed matrices, which is the same on all instruction sets: panels of sixteen rows,
/// the lines of each format, little-endian block scales, the input rotation of integer formats. Increment it with every
/// change; packed files of another version are packed again.
pub const LAYOUT_VERSION: u32 = 2;

/// Shared buffer that does not match the matrix.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum BufferError {
    /// Length other than rows, columns and format require.
    #[error("buffer has {found} bytes, expected {expected}")]
    Length {
        /// Bytes that the matrix needs.
        expected: usize,
        /// Bytes of the buffer.
        found: usize,
    },
    /// Start that is not aligned to a cache line.
    #[error("buffer is not aligned to {LINE} bytes: it starts {past} bytes past a boundary")]
    Alignment {
        /// Bytes past the alignment boundary.
        past: usize,
    },
    /// Matrix that exceeds the address space.
    #[error(transparent)]
    Memory(#[from] AllocError),
}

/// Packed weight matrix `[rows, cols]`: `rows` outputs, each over `cols` inputs.
///
/// Weights are stored in panels of sixteen rows; the last panel is padded with zero rows. Consecutive rows may be stored
/// in different formats: each format is a band of whole panels. The memory is owned or shared, such as a mapped file.
///
/// # Examples
/// ```
/// use std::num::NonZeroUsize;
///
/// use ferrule_kernels::arch::Isa;
/// use ferrule_kernels::{Cancel, Exec, Format, PackedMatrix, Pool, RowSource, matmul};
///
/// struct Identity;
///
/// impl RowSource for Identity {
///     fn read_row(&self, row: usize, out: &mut [f32]) {
///         out.fill(0.0);
///         out[row] = 1.0;
///     }
/// }
///
/// let (pool, cancel) = (Pool::new(NonZeroUsize::MIN), Cancel::new());
/// let exec = Exec { isa: Isa::best(), pool: &pool, cancel: &cancel };
/// let weights = PackedMatrix::pack(&exec, &[(Format::Bf16, 3)], 3, &Identity)?;
/// let mut out = [0.0; 3];
/// matmul(&exec, &[1.0, 2.0, 3.0], &weights, &mut out)?;
/// assert_eq!(out, [1.0, 2.0, 3.0]);
/// # Ok::<(), ferrule_kernels::PackError>(())
/// ```
#[derive(Debug)]
pub struct PackedMatrix {
    rows: usize,
    cols: usize,
    bands: Vec<Band>,
}

/// Consecutive panels in one format.
#[derive(Debug)]
pub(crate) struct Band {
    pub format: Format,
    /// Panels of the matrix that the band covers.
    pub panels: Range<usize>,
    panel_bytes: usize,
    panel_scales: usize,
    data: Buffer<u8>,
    /// Block scales of integer formats; empty for other formats.
    block_scales: Buffer<BlockScales>,
}

/// Owned or shared memory of a band.
#[derive(Debug)]
enum Buffer<T> {
    Owned(PageSlice<T>),
    Shared(SharedBytes),
}

impl<T: Pod> Buffer<T> {
    /// Returns owned memory for writing.
    ///
    /// # Panics
    /// If the memory is shared, which is never written.
    fn owned(&mut self) -> &mut [T] {
        match self {
            Self::Owned(slice) => slice,
            Self::Shared(_) => unreachable!("shared buffers are never written"),
        }
    }
}

impl<T: Pod> Deref for Buffer<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        match self {
            Self::Owned(slice) => slice,
            Self::Shared(bytes) => bytemuck::cast_slice(bytes),
        }
    }
}

impl Band {
    /// Returns the lines of a floating-point band from panel `panel` on. A panel has `cols` lines.
    ///
    /// # Panics
    /// If the weights are not stored as `F` or the panel is out of bounds.
    pub fn lines<F: FloatFormat>(&self, panel: usize) -> &[Line<F>] {
        bytemuck::cast_slice(&self.data[self.start(panel)..])
    }

    /// Returns the byte lines of the band from panel `panel` on.
    ///
    /// # Panics
    /// If the panel is out of bounds.
    pub fn byte_lines(&self, panel: usize) -> &[ByteLine] {
        bytemuck::cast_slice(&self.data[self.start(panel)..])
    }

    /// Returns the number of byte lines of a panel.
    pub fn panel_lines(&self) -> usize {
        self.panel_bytes / size_of::<ByteLine>()
    }

    /// Returns the block scales of the band from panel `panel` on.
    ///
    /// # Panics
    /// If the panel is out of bounds.
    pub fn block_scales(&self, panel: usize) -> &[BlockScales] {
        &self.block_scales[(panel - self.panels.start) * self.panel_scales..]
    }

    fn start(&self, panel: usize) -> usize {
        (panel - self.panels.start) * self.panel_bytes
    }
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
        let Self { rows, bands, .. } = &mut packed;
        for band in bands {
            let panels = Tiles::row_blocks(band.data.owned(), band.panel_bytes, 1);
            let block_scales = Tiles::row_blocks(band.block_scales.owned(), band.panel_scales, 1);
            exec.run(panels.len(), |index| {
                let first = (band.panels.start + index) * LANES;
                let (source, rows) = (Source { source, cols }, first..*rows);
                let mut panel = panels.take(index);
                let mut block_scales = (!block_scales.is_empty()).then(|| block_scales.take(index));
                let block_scales = block_scales.as_mut().map_or(&mut [][..], |block_scales| block_scales.contiguous());
                band.format.visit(PackPanel { isa: exec.isa, source, rows, block_scales, panel: panel.contiguous() });
            })?;
        }
        Ok(packed)
    }

    /// Packs a matrix like [`PackedMatrix::pack`], but quantizes integer formats by GPTQ with the statistics of
    /// calibration inputs.
    ///
    /// # Errors
    /// Same as [`PackedMatrix::pack`].
    ///
    /// # Panics
    /// Same as [`PackedMatrix::pack`], and if the statistics have another number of inputs.
    pub fn pack_calibrated(
        exec: &Exec<'_>,
        formats: &[(Format, usize)],
        cols: usize,
        source: &dyn RowSource,
        statistics: &InputStatistics,
    ) -> Result<Self, PackError> {
        assert_eq!(statistics.cols(), cols, "statistics must have as many inputs as the matrix");
        if formats.iter().any(|(format, _)| !format.is_integer() || format.stored_block().is_some()) {
            return Self::pack(exec, formats, cols, source);
        }
        let mut packed = Self::zeroed(formats, cols)?;
        let Self { rows, bands, .. } = &mut packed;
        for band in bands {
            let task_panels = (band.panels.len() / (TASKS_PER_THREAD * exec.pool.threads())).clamp(1, MAX_TASK_PANELS);
            let panels = Tiles::row_blocks(band.data.owned(), band.panel_bytes, task_panels);
            let block_scales = Tiles::row_blocks(band.block_scales.owned(), band.panel_scales, task_panels);
            exec.run(panels.len(), |index| {
                let (mut panels, mut block_scales) = (panels.take(index), block_scales.take(index));
                let first = band.panels.start + panels.rows().start;
                let each = (first..).zip(panels.contiguous().chunks_exact_mut(band.panel_bytes));
                let each = each.zip(block_scales.contiguous().chunks_exact_mut(band.panel_scales));
                let panels = each.map(|((panel, lines), block_scales)| {
                    let values = Source { source, cols }.numbers(panel * LANES..*rows);
                    CalibratedPanel::new(exec.isa, &values, block_scales, bytemuck::cast_slice_mut(lines))
                });
                band.format.visit(PackPanels { isa: exec.isa, statistics, panels: &mut panels.collect::<Vec<_>>() });
            })?;
        }
        Ok(packed)
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
        for band in &mut packed.bands {
            let panels = Tiles::row_blocks(band.data.owned(), band.panel_bytes, 1);
            let block_scales = Tiles::row_blocks(band.block_scales.owned(), band.panel_scales, 1);
            exec.run(panels.len(), |index| {
                let mut panel = panels.take(index);
                let panel = panel.contiguous();
                fill_randomly(seed ^ ((band.panels.start + index) as u64) << 32, panel);
                let mut block_scales = (!block_scales.is_empty()).then(|| block_scales.take(index));
                let block_scales = block_scales.as_mut().map_or(&mut [][..], |block_scales| block_scales.contiguous());
                band.format.visit(ScaleRandomCodes { cols, block_scales, panel });
            })?;
        }
        Ok(packed)
    }

    /// Restores a packed matrix from a copy of its buffers: calls `fill` with each zeroed buffer in the order of
    /// [`PackedMatrix::buffers`].
    ///
    /// # Errors
    /// The error of `fill`, or [`AllocError`] if allocation fails.
    ///
    /// # Panics
    /// Same as [`PackedMatrix::pack`].
    pub fn filled<E: From<AllocError>>(
        formats: &[(Format, usize)],
        cols: usize,
        mut fill: impl FnMut(&mut [u8]) -> Result<(), E>,
    ) -> Result<Self, E> {
        let mut packed = Self::zeroed(formats, cols)?;
        for band in &mut packed.bands {
            fill(band.data.owned())?;
            fill(bytemuck::cast_slice_mut(band.block_scales.owned()))?;
        }
        Ok(packed)
    }

    /// Creates a packed matrix over shared memory, without copying. `buffers` are in the order of
    /// [`PackedMatrix::buffers`].
    ///
    /// # Errors
    /// [`BufferError`] if a buffer has the wrong length or alignment.
    ///
    /// # Panics
    /// Same as [`PackedMatrix::pack`], and if there are fewer than two buffers per format.
    pub fn shared(
        formats: &[(Format, usize)],
        cols: usize,
        buffers: impl IntoIterator<Item = SharedBytes>,
    ) -> Result<Self, BufferError> {
        let mut buffers = buffers.into_iter();
        let mut buffer = |expected: usize| {
            let bytes = buffers.next().expect("two buffers for each format");
            let past = bytes.as_ptr().addr() % LINE;
            if bytes.len() != expected {
                return Err(BufferError::Length { expected, found: bytes.len() });
            }
            if past != 0 && expected != 0 {
                return Err(BufferError::Alignment { past });
            }
            Ok(bytes)
        };
        let band = |data: usize, block_scales: usize| {
            Ok((Buffer::Shared(buffer(data)?), Buffer::Shared(buffer(block_scales * BLOCK_SCALES_BYTES)?)))
        };
        Self::in_bands(formats, cols, band)
    }

    fn zeroed(formats: &[(Format, usize)], cols: usize) -> Result<Self, AllocError> {
        // The matmul reads several streams at once: with small pages a tenth of its time is address translation.
        Self::in_bands(formats, cols, |data, block_scales| {
            let data = Buffer::Owned(PageSlice::zeroed_in_huge_pages(data)?);
            Ok((data, Buffer::Owned(PageSlice::zeroed_in_huge_pages(block_scales)?)))
        })
    }

    /// Builds the bands. `band` creates the buffers of one band, given the number of bytes and of block scale rows.
    fn in_bands<E: From<AllocError>>(
        formats: &[(Format, usize)],
        cols: usize,
        mut band: impl FnMut(usize, usize) -> Result<(Buffer<u8>, Buffer<BlockScales>), E>,
    ) -> Result<Self, E> {
        let mut rows = 0;
        let mut bands = Vec::with_capacity(formats.len());
        for &(format, count) in formats {
            assert!(rows % LANES == 0, "format boundary at row {rows} is not a multiple of {LANES}");
            assert!(
                format.is_integer() || formats.len() == 1,
                "floating-point format {} cannot be combined with other formats in one matrix",
                format.name()
            );
            let block = format.stored_block().map_or(1, |block| block.inputs);
            assert!(
                cols.is_multiple_of(block),
                "number of inputs must be a multiple of {block} for {}, got {cols}",
                format.name()
            );
            let panels = rows / LANES..rows / LANES + count.div_ceil(LANES);
            let panel_bytes = format.panel_bytes(cols).ok_or(AllocError { bytes: u64::MAX })?;
            let bytes = panel_bytes.checked_mul(panels.len()).ok_or(AllocError { bytes: u64::MAX })?;
            let panel_scales = format.panel_scales(cols);
            let (data, block_scales) = band(bytes, panel_scales * panels.len())?;
            bands.push(Band { format, panels, panel_bytes, panel_scales, data, block_scales });
            rows += count;
        }
        Ok(Self { rows, cols, bands })
    }

    /// Returns the bytes of the two buffers of a band of `rows` rows: weights, and block scales (0 for formats without).
    /// `None` if they exceed the address space.
    #[must_use]
    pub fn buffer_bytes(format: Format, rows: usize, cols: usize) -> Option<[usize; 2]> {
        let panels = rows.div_ceil(LANES);
        let data = format.panel_bytes(cols)?.checked_mul(panels)?;
        Some([data, (format.panel_scales(cols) * BLOCK_SCALES_BYTES).checked_mul(panels)?])
    }

    /// Returns the bytes of a matrix in one format, or `None` if they overflow.
    #[must_use]
    pub fn bytes_for(format: Format, rows: usize, cols: usize) -> Option<u64> {
        let [data, block_scales] = Self::buffer_bytes(format, rows, cols)?;
        (data as u64).checked_add(block_scales as u64)
    }

    /// Returns the number of rows (outputs).
    #[must_use]
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Returns the number of columns (inputs).
    #[must_use]
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Returns the format and the number of panels (of sixteen rows) of each band, from the first row to the last.
    pub fn formats(&self) -> impl Iterator<Item = (Format, usize)> {
        self.bands.iter().map(|band| (band.format, band.panels.len()))
    }

    /// Returns the bytes of memory that the matrix takes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.bands.iter().map(|band| band.data.len() + size_of_val(&*band.block_scales)).sum()
    }

    /// Returns the bytes that are in shared memory.
    #[must_use]
    pub fn shared_bytes(&self) -> usize {
        let shared = |band: &&Band| matches!(band.data, Buffer::Shared(_));
        self.bands.iter().filter(shared).map(|band| band.data.len() + size_of_val(&*band.block_scales)).sum()
    }

    /// Returns the buffers in a fixed order: weights and block scales of each band. Together with rows, columns and
    /// formats they describe the matrix completely.
    pub fn buffers(&self) -> impl Iterator<Item = &[u8]> {
        self.bands.iter().flat_map(|band| [&*band.data, bytemuck::cast_slice(&band.block_scales)])
    }

    /// Dequantizes row `row` into `out`, as in an embedding lookup. Floating-point weights are exact.
    ///
    /// # Panics
    /// If the row is out of bounds or the length of `out` is not `cols`.
    pub fn read_row(&self, row: usize, out: &mut [f32]) {
        assert!(row < self.rows, "row {row} is out of bounds for {} rows", self.rows);
        assert_eq!(out.len(), self.cols, "output must have as many elements as the matrix has columns");
        let panel = row / LANES;
        let band = self.bands.iter().find(|band| band.panels.contains(&panel)).expect("each row is in a band");
        band.format.visit(ReadRow { band, panel, lane: row % LANES, out });
    }

    pub(crate) fn bands(&self) -> &[Band] {
        &self.bands
    }
}

/// Row source with its number of columns.
struct Source<'a> {
    source: &'a dyn RowSource,
    cols: usize,
}

impl Source<'_> {
    /// Reads up to sixteen rows as `[16][cols]`. Missing rows are zero.
    fn numbers(&self, rows: Range<usize>) -> Vec<f32> {
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

/// Packs one panel.
struct PackPanel<'a> {
    isa: Isa,
    source: Source<'a>,
    /// Rows of the matrix from the panel's first to the last of the matrix.
    rows: Range<usize>,
    block_scales: &'a mut [BlockScales],
    panel: &'a mut [u8],
}

impl FormatVisitor for PackPanel<'_> {
    type Output = ();

    fn float<F: FloatFormat>(self) {
        transpose::<F>(&self.source.numbers(self.rows), bytemuck::cast_slice_mut(self.panel));
    }

    fn integer<F: IntegerFormat>(self) {
        let values = self.source.numbers(self.rows);
        quant::pack_panel::<F>(self.isa, &values, self.block_scales, bytemuck::cast_slice_mut(self.panel));
    }

    fn grouped<F: GroupedFormat>(self) {
        grouped::pack_panel::<F>(&self.source.stored(self.rows, F::STORED), bytemuck::cast_slice_mut(self.panel));
    }
}

/// Quantizes panels with the statistics of their inputs.
struct PackPanels<'a, 'p> {
    isa: Isa,
    statistics: &'a InputStatistics,
    panels: &'a mut [CalibratedPanel<'p>],
}

impl FormatVisitor for PackPanels<'_, '_> {
    type Output = ();

    fn float<F: FloatFormat>(self) {
        unreachable!("floating-point weights are not calibrated");
    }

    fn integer<F: IntegerFormat>(self) {
        let Self { isa, statistics, panels } = self;
        isa.run(PackCalibrated::<F> { statistics, panels, format: PhantomData });
    }

    fn grouped<F: GroupedFormat>(self) {
        unreachable!("grouped formats keep their stored codes");
    }
}

/// Chooses scales for random codes over `cols` inputs so that outputs have the variance of the inputs.
struct ScaleRandomCodes<'a> {
    cols: usize,
    block_scales: &'a mut [BlockScales],
    panel: &'a mut [u8],
}

impl FormatVisitor for ScaleRandomCodes<'_> {
    type Output = ();

    fn float<F: FloatFormat>(self) {
        unreachable!("random bytes are not floating-point weights");
    }

    fn integer<F: IntegerFormat>(self) {
        // Stored weights are rotated, which multiplies their norm by sqrt(BLOCK).
        let block_scale = (integer::BLOCK as f32 / self.cols as f32).sqrt() / integer::uniform_deviation::<F>();
        self.block_scales.as_flattened_mut().fill(half::f16::from_f32(block_scale).to_bits());
    }

    fn grouped<F: GroupedFormat>(self) {
        let deviation = 1.0 / (self.cols as f32).sqrt();
        F::set_deviation(bytemuck::cast_slice_mut(self.panel), self.cols / grouped::GROUP, deviation);
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

/// Transposes sixteen rows of f32 to lines, in blocks of 16 x 16: rows a power of two apart map to the same cache sets,
/// so a cache line must be used completely before the other rows evict it.
fn transpose<F: FloatFormat>(source: &[f32], panel: &mut [Line<F>]) {
    let cols = panel.len();
    for (block, lines) in panel.chunks_mut(LANES).enumerate() {
        let mut transposed = [[0.0; LANES]; LANES];
        for (lane, row) in source.chunks_exact(cols).enumerate() {
            for (values, value) in transposed.iter_mut().zip(&row[block * LANES..][..lines.len()]) {
                values[lane] = *value;
            }
        }
        for (line, values) in lines.iter_mut().zip(&transposed) {
            *line = F::narrow(values);
        }
    }
}

struct ReadRow<'a> {
    band: &'a Band,
    panel: usize,
    lane: usize,
    out: &'a mut [f32],
}

impl FormatVisitor for ReadRow<'_> {
    type Output = ();

    fn float<F: FloatFormat>(self) {
        for (value, line) in self.out.iter_mut().zip(self.band.lines::<F>(self.panel)) {
            *value = F::widen_one(line[self.lane]);
        }
    }

    fn integer<F: IntegerFormat>(self) {
        let (block_scales, lines) = (self.band.block_scales(self.panel), self.band.byte_lines(self.panel));
        integer::read_row::<F>(block_scales, lines, self.lane, self.out);
    }

    fn grouped<F: GroupedFormat>(self) {
        grouped::read_row::<F>(self.band.byte_lines(self.panel), self.lane, self.out);
    }
}
