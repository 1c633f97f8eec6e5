//! Weight matrices packed in the layout that the matmul reads.

mod pack;
mod reuse;

use std::fmt;
use std::ops::{Deref, Range};

use bytemuck::Pod;

pub(crate) use self::pack::{MAX_TASK_PANELS, Source, TASKS_PER_THREAD};
pub use self::pack::{PackError, RowSource};
use self::reuse::LastRead;
use crate::arch::{LANES, LINE};
use crate::memory::{AllocError, PageSlice, SharedBytes};
use crate::quant::family::FloatPanels;
use crate::quant::integer::BlockScales;
use crate::quant::{Family, FloatFormat, Format, Line, Quantized};

/// Bytes of the block scales of a panel in one super-block.
const BLOCK_SCALES_BYTES: usize = size_of::<BlockScales>();

/// Version of the memory layout of packed matrices, which is the same on all instruction sets: panels of sixteen rows,
/// the lines of each format, little-endian block scales, the input rotation of integer formats. Increment it with every
/// change; packed files of another version are packed again.
pub const LAYOUT_VERSION: u32 = 4;

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
pub struct PackedMatrix {
    rows: usize,
    cols: usize,
    bands: Bands,
    last_read: LastRead,
}

impl fmt::Debug for PackedMatrix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let formats: Vec<_> = self.formats().collect();
        f.debug_struct("PackedMatrix")
            .field("rows", &self.rows)
            .field("cols", &self.cols)
            .field("formats", &formats)
            .finish()
    }
}

/// Bands of a matrix, from the first row to the last.
pub(crate) enum Bands {
    /// The only band, in a floating-point format.
    Float(&'static dyn FloatPanels, Band),
    /// Bands in quantized formats.
    Quantized(Vec<(Quantized, Band)>),
}

impl Bands {
    /// Returns all bands with the families of their formats.
    fn each(&self) -> impl Iterator<Item = (Family, &Band)> {
        let (float, quantized) = match self {
            Self::Float(format, band) => (Some((Family::Float(*format), band)), &[][..]),
            Self::Quantized(bands) => (None, &bands[..]),
        };
        float.into_iter().chain(quantized.iter().map(|(format, band)| (Family::Quantized(*format), band)))
    }

    /// Mutable version of [`Bands::each`].
    fn each_mut(&mut self) -> impl Iterator<Item = (Family, &mut Band)> {
        let (float, quantized) = match self {
            Self::Float(format, band) => (Some((Family::Float(*format), band)), &mut [][..]),
            Self::Quantized(bands) => (None, &mut bands[..]),
        };
        float.into_iter().chain(quantized.iter_mut().map(|(format, band)| (Family::Quantized(*format), band)))
    }
}

/// Consecutive panels in one format.
pub(crate) struct Band {
    pub format: Format,
    /// Panels of the matrix that the band covers.
    pub panels: Range<usize>,
    /// Bytes of a panel, and number of its block scales.
    pub panel_bytes: usize,
    pub panel_scales: usize,
    data: Buffer<u8>,
    /// Block scales of integer formats; empty for other formats.
    block_scales: Buffer<BlockScales>,
}

/// Owned or shared memory of a band.
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

    /// Returns some of the elements: shared memory stays shared, owned memory is copied.
    fn part(&self, range: Range<usize>) -> Result<Self, AllocError> {
        match self {
            Self::Owned(slice) => {
                let mut part = PageSlice::zeroed_in_huge_pages(range.len())?;
                part.copy_from_slice(&slice[range]);
                Ok(Self::Owned(part))
            }
            Self::Shared(bytes) => {
                Ok(Self::Shared(bytes.part(range.start * size_of::<T>()..range.end * size_of::<T>())))
            }
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
    /// Returns the lines of a floating-point band. A panel has as many lines as the matrix has columns.
    ///
    /// # Panics
    /// If the weights are not stored as `F`.
    pub fn lines<F: FloatFormat>(&self) -> &[Line<F>] {
        bytemuck::cast_slice(&self.data)
    }

    /// Returns the bytes of the band from panel `panel` of the matrix on.
    ///
    /// # Panics
    /// If the panel is out of bounds.
    pub fn data(&self, panel: usize) -> &[u8] {
        &self.data[(panel - self.panels.start) * self.panel_bytes..]
    }

    /// Returns the block scales of the band from panel `panel` of the matrix on.
    ///
    /// # Panics
    /// If the panel is out of bounds.
    pub fn block_scales(&self, panel: usize) -> &[BlockScales] {
        &self.block_scales[(panel - self.panels.start) * self.panel_scales..]
    }

    /// Returns the bytes of memory that the band takes.
    fn bytes(&self) -> usize {
        self.data.len() + size_of_val(&*self.block_scales)
    }

    /// Returns the part of the band in panels `panels` of the matrix, which are then counted from their first one; `None`
    /// if the band has none of them.
    fn part(&self, panels: &Range<usize>) -> Result<Option<Self>, AllocError> {
        let own = self.panels.start.max(panels.start)..self.panels.end.min(panels.end);
        if own.is_empty() {
            return Ok(None);
        }
        let within = own.start - self.panels.start..own.end - self.panels.start;
        let part = |of_panel: usize| within.start * of_panel..within.end * of_panel;
        Ok(Some(Self {
            panels: own.start - panels.start..own.end - panels.start,
            data: self.data.part(part(self.panel_bytes))?,
            block_scales: self.block_scales.part(part(self.panel_scales))?,
            ..*self
        }))
    }
}

impl PackedMatrix {
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
        for (_, band) in packed.bands.each_mut() {
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

    /// Returns the rows of panels `panels` as a matrix. Shared memory stays shared, and owned memory is copied.
    ///
    /// # Errors
    /// [`AllocError`] if allocation fails.
    ///
    /// # Panics
    /// If the matrix does not have the panels.
    pub fn panels(&self, panels: Range<usize>) -> Result<Self, AllocError> {
        let count = self.rows.div_ceil(LANES);
        assert!(panels.start <= panels.end && panels.end <= count, "panels {panels:?} of a matrix of {count}");
        let bands = match &self.bands {
            Bands::Float(format, band) => match band.part(&panels)? {
                Some(band) => Bands::Float(*format, band),
                None => Bands::Quantized(Vec::new()),
            },
            Bands::Quantized(bands) => {
                let parts = bands.iter().map(|(format, band)| Ok(band.part(&panels)?.map(|band| (*format, band))));
                Bands::Quantized(parts.filter_map(Result::transpose).collect::<Result<_, _>>()?)
            }
        };
        let rows = self.rows.min(panels.end * LANES).saturating_sub(panels.start * LANES);
        Ok(Self { rows, cols: self.cols, bands, last_read: LastRead::default() })
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
        let mut next = |format: Format, count: usize| {
            assert!(rows % LANES == 0, "format boundary at row {rows} is not a multiple of {LANES}");
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
            rows += count;
            Ok::<_, E>(Band { format, panels, panel_bytes, panel_scales, data, block_scales })
        };
        let mut quantized = Vec::with_capacity(formats.len());
        let bands = loop {
            let Some(&(format, count)) = formats.get(quantized.len()) else { break Bands::Quantized(quantized) };
            match format.family() {
                Family::Quantized(family) => quantized.push((family, next(format, count)?)),
                Family::Float(family) if formats.len() == 1 => break Bands::Float(family, next(format, count)?),
                Family::Float(_) => panic!(
                    "floating-point format {} cannot be combined with other formats in one matrix",
                    format.name()
                ),
            }
        };
        Ok(Self { rows, cols, bands, last_read: LastRead::default() })
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
        self.bands.each().map(|(_, band)| (band.format, band.panels.len()))
    }

    /// Returns the bytes of memory that the matrix takes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.bands.each().map(|(_, band)| band.bytes()).sum()
    }

    /// Records that a product reads the matrix, and returns whether it probably is still in the last-level cache since the
    /// previous product.
    pub(crate) fn record_read(&self) -> bool {
        self.last_read.record(self.bytes())
    }

    /// Returns the bytes that are in shared memory.
    #[must_use]
    pub fn shared_bytes(&self) -> usize {
        let shared = self.bands.each().filter(|(_, band)| matches!(band.data, Buffer::Shared(_)));
        shared.map(|(_, band)| band.bytes()).sum()
    }

    /// Returns the buffers in a fixed order: weights and block scales of each band. Together with rows, columns and
    /// formats they describe the matrix completely.
    pub fn buffers(&self) -> impl Iterator<Item = &[u8]> {
        self.bands.each().flat_map(|(_, band)| [&*band.data, bytemuck::cast_slice(&band.block_scales)])
    }

    /// Dequantizes row `row` into `out`, as in an embedding lookup. Floating-point weights are exact.
    ///
    /// # Panics
    /// If the row is out of bounds or the length of `out` is not `cols`.
    pub fn read_row(&self, row: usize, out: &mut [f32]) {
        assert!(row < self.rows, "row {row} is out of bounds for {} rows", self.rows);
        assert_eq!(out.len(), self.cols, "output must have as many elements as the matrix has columns");
        let (panel, lane) = (row / LANES, row % LANES);
        let of_row = self.bands.each().find(|(_, band)| band.panels.contains(&panel));
        let (family, band) = of_row.expect("each row is in a band");
        let data = band.data(panel);
        match family {
            Family::Float(format) => format.read_row(data, lane, out),
            Family::Quantized(Quantized::Integer(format)) => {
                format.read_row(band.block_scales(panel), data, lane, out);
            }
            Family::Quantized(Quantized::Grouped(format)) => format.read_row(data, lane, out),
        }
    }

    pub(crate) fn bands(&self) -> &Bands {
        &self.bands
    }
}
