//! Weight matrices in the layout that the matmul reads.

use std::marker::PhantomData;
use std::ops::{Deref, Range};

use bytemuck::Pod;

use crate::arch::{ByteLine, Isa, LANES, LINE};
use crate::disjoint::Tiles;
use crate::hessian::InputStatistics;
use crate::memory::{AllocError, PageSlice, SharedBytes};
use crate::quant::grouped;
use crate::quant::integer::{self, Steps};
use crate::quant::{
    self, CalibratedPanel, FloatFormat, Format, FormatVisitor, GroupedFormat, IntegerFormat, Line, PackCalibrated,
    StoredBlock,
};
use crate::{Exec, PoolError};

/// The rows of a stored matrix. A row holds the weights of one output.
pub trait RowSource: Sync {
    /// Writes row `row`, widened exactly, to `out`.
    fn read_row(&self, row: usize, out: &mut [f32]);

    /// Writes as many rows of `row_bytes` as `out` holds, from row `first` on, as they are stored: in blocks of the format
    /// that they are packed to ([`Format::stored_block`]). Asked for by grouped formats alone.
    ///
    /// # Panics
    /// If rows are numbers.
    fn read_stored(&self, first: usize, row_bytes: usize, _out: &mut [u8]) {
        panic!("row {first} is no {row_bytes} bytes of blocks: it is numbers");
    }

    /// Writes as many rows of `columns` elements as `out` holds, from row `first` on: for sources of which neighbouring
    /// rows cost less together than one by one.
    ///
    /// `out`: `[rows, columns]`
    fn read_rows(&self, first: usize, columns: usize, out: &mut [f32]) {
        (first..).zip(out.chunks_exact_mut(columns)).for_each(|(row, out)| self.read_row(row, out));
    }
}

/// Bytes of the steps of a panel in one super-block.
const STEPS: usize = size_of::<Steps>();

/// Panels that are calibrated together at the most: a task's weights and targets then stay near the cache.
const MOST_TOGETHER: usize = 4;

/// Tasks that a thread has at least where panels are calibrated together.
const TASKS_A_THREAD: usize = 4;

/// Why a matrix was not packed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PackError {
    /// There is no memory for it.
    #[error(transparent)]
    Memory(#[from] AllocError),
    /// Cancelled, or the source panicked.
    #[error(transparent)]
    Pool(#[from] PoolError),
}

/// Names how the buffers of a packed matrix lie in memory, whatever the instruction set: panels of sixteen rows, the lines
/// of each format, little-endian steps, the rotation of integer formats' inputs. Whoever changes any of it raises it, and
/// files of matrices are packed anew.
pub const LAYOUT_VERSION: u32 = 1;

/// Memory of others does not have what a matrix needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum BufferError {
    /// As many bytes as rows, columns and format ask for.
    #[error("a buffer of {expected} bytes is {found} bytes long")]
    Length {
        /// What the matrix takes.
        expected: usize,
        /// What is there.
        found: usize,
    },
    /// A beginning on a cache line.
    #[error("a buffer begins {past} bytes past a cache line of {LINE} bytes")]
    Alignment {
        /// Bytes.
        past: usize,
    },
    /// The matrix would not fit the address space.
    #[error(transparent)]
    Memory(#[from] AllocError),
}

/// A matrix of weights, `[rows, cols]`: `rows` outputs, each over `cols` inputs.
///
/// Stored in panels of sixteen rows; the last panel is filled up with rows of zeros. Rows may be stored in several
/// formats, one below the other: each is a band of whole panels. The memory is the matrix's own or that of something
/// else, such as a mapped file.
#[derive(Debug)]
pub struct PackedMatrix {
    rows: usize,
    cols: usize,
    bands: Vec<Band>,
}

/// Panels that are stored alike.
#[derive(Debug)]
pub(crate) struct Band {
    pub format: Format,
    /// Panels of the matrix.
    pub panels: Range<usize>,
    panel_bytes: usize,
    panel_steps: usize,
    data: Buffer<u8>,
    /// What integer formats have besides.
    steps: Buffer<Steps>,
}

/// A part of what a matrix is stored in.
#[derive(Debug)]
enum Buffer<T> {
    Owned(PageSlice<T>),
    Shared(SharedBytes),
}

impl<T: Pod> Buffer<T> {
    /// # Panics
    /// If the memory is that of others, which is never written.
    fn owned(&mut self) -> &mut [T] {
        match self {
            Self::Owned(slice) => slice,
            Self::Shared(_) => unreachable!("a matrix is filled before it is anyone's but its own"),
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
    /// The lines of a panel and all that follow, in a floating-point format; `cols` of them are a panel.
    ///
    /// # Panics
    /// If the weights are not stored as `F` or there is no such panel.
    pub fn lines<F: FloatFormat>(&self, panel: usize) -> &[Line<F>] {
        bytemuck::cast_slice(&self.data[self.start(panel)..])
    }

    /// A panel and all that follow, in lines of bytes.
    ///
    /// # Panics
    /// If there is no such panel.
    pub fn byte_lines(&self, panel: usize) -> &[ByteLine] {
        bytemuck::cast_slice(&self.data[self.start(panel)..])
    }

    /// Lines of bytes of a panel.
    pub fn panel_lines(&self) -> usize {
        self.panel_bytes / size_of::<ByteLine>()
    }

    /// The steps of a panel and of all that follow.
    ///
    /// # Panics
    /// If there is no such panel.
    pub fn steps(&self, panel: usize) -> &[Steps] {
        &self.steps[(panel - self.panels.start) * self.panel_steps..]
    }

    fn start(&self, panel: usize) -> usize {
        (panel - self.panels.start) * self.panel_bytes
    }
}

impl PackedMatrix {
    /// Reads a matrix with `cols` columns from `source`, the rows in the given formats one after the other.
    ///
    /// # Errors
    /// [`PackError`] if there is no memory for it, `exec` was cancelled, or the source panicked.
    ///
    /// # Panics
    /// If rows of one format end within a panel and others follow, or floating-point formats are not alone; if `cols` is
    /// no whole number of a format's stored blocks.
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
            let steps = Tiles::row_blocks(band.steps.owned(), band.panel_steps, 1);
            exec.run(panels.len(), |index| {
                let first = (band.panels.start + index) * LANES;
                let (source, rows) = (Source { source, cols }, first..*rows);
                let mut panel = panels.take(index);
                let mut steps = (!steps.is_empty()).then(|| steps.take(index));
                let steps = steps.as_mut().map_or(&mut [][..], |steps| steps.contiguous());
                band.format.visit(PackPanel { isa: exec.isa, source, rows, steps, panel: panel.contiguous() });
            })?;
        }
        Ok(packed)
    }

    /// As [`PackedMatrix::pack`], but that integer formats make errors where they cost least. `statistics` are those of
    /// the inputs that the matrix will meet.
    ///
    /// # Errors
    /// As [`PackedMatrix::pack`].
    ///
    /// # Panics
    /// As [`PackedMatrix::pack`], and if the statistics are of another number of inputs.
    pub fn pack_calibrated(
        exec: &Exec<'_>,
        formats: &[(Format, usize)],
        cols: usize,
        source: &dyn RowSource,
        statistics: &InputStatistics,
    ) -> Result<Self, PackError> {
        assert_eq!(statistics.cols(), cols, "the inputs of the statistics");
        if formats.iter().any(|(format, _)| !format.is_integer() || format.stored_block().is_some()) {
            return Self::pack(exec, formats, cols, source);
        }
        let mut packed = Self::zeroed(formats, cols)?;
        let Self { rows, bands, .. } = &mut packed;
        for band in bands {
            let together = (band.panels.len() / (TASKS_A_THREAD * exec.pool.threads())).clamp(1, MOST_TOGETHER);
            let panels = Tiles::row_blocks(band.data.owned(), band.panel_bytes, together);
            let steps = Tiles::row_blocks(band.steps.owned(), band.panel_steps, together);
            exec.run(panels.len(), |index| {
                let (mut panels, mut steps) = (panels.take(index), steps.take(index));
                let first = band.panels.start + panels.rows().start;
                let each = (first..).zip(panels.contiguous().chunks_exact_mut(band.panel_bytes));
                let each = each.zip(steps.contiguous().chunks_exact_mut(band.panel_steps));
                let panels = each.map(|((panel, lines), steps)| {
                    let values = Source { source, cols }.numbers(panel * LANES..*rows);
                    CalibratedPanel::new(exec.isa, &values, steps, bytemuck::cast_slice_mut(lines))
                });
                band.format.visit(PackPanels { isa: exec.isa, statistics, panels: &mut panels.collect::<Vec<_>>() });
            })?;
        }
        Ok(packed)
    }

    /// Random codes and steps, as quick to make as memory is to write: for measuring. The weights are as large as those
    /// of a matrix that keeps its input's variance. Formats with codes only.
    ///
    /// # Errors
    /// [`PackError`] if there is no memory for it or `exec` was cancelled.
    ///
    /// # Panics
    /// As [`PackedMatrix::pack`], and for floating-point formats.
    pub fn random(exec: &Exec<'_>, formats: &[(Format, usize)], cols: usize, seed: u64) -> Result<Self, PackError> {
        let mut packed = Self::zeroed(formats, cols)?;
        for band in &mut packed.bands {
            let panels = Tiles::row_blocks(band.data.owned(), band.panel_bytes, 1);
            let steps = Tiles::row_blocks(band.steps.owned(), band.panel_steps, 1);
            exec.run(panels.len(), |index| {
                let mut panel = panels.take(index);
                let panel = panel.contiguous();
                fill_randomly(seed ^ ((band.panels.start + index) as u64) << 32, panel);
                let mut steps = (!steps.is_empty()).then(|| steps.take(index));
                let steps = steps.as_mut().map_or(&mut [][..], |steps| steps.contiguous());
                band.format.visit(Level { cols, steps, panel });
            })?;
        }
        Ok(packed)
    }

    /// A matrix of what was packed before: `fill` gets each buffer, zeros, in the order of [`PackedMatrix::buffers`].
    ///
    /// # Errors
    /// What `fill` returns, and [`AllocError`] if there is no memory for it.
    ///
    /// # Panics
    /// As [`PackedMatrix::pack`].
    pub fn filled<E: From<AllocError>>(
        formats: &[(Format, usize)],
        cols: usize,
        mut fill: impl FnMut(&mut [u8]) -> Result<(), E>,
    ) -> Result<Self, E> {
        let mut packed = Self::zeroed(formats, cols)?;
        for band in &mut packed.bands {
            fill(band.data.owned())?;
            fill(bytemuck::cast_slice_mut(band.steps.owned()))?;
        }
        Ok(packed)
    }

    /// A matrix of what was packed before and lies in memory that others own: its buffers, in the order of
    /// [`PackedMatrix::buffers`]. Nothing is copied.
    ///
    /// # Errors
    /// [`BufferError`] for a buffer of another length or alignment.
    ///
    /// # Panics
    /// As [`PackedMatrix::pack`], and if there are fewer than two buffers for a format.
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
        let band =
            |data: usize, steps: usize| Ok((Buffer::Shared(buffer(data)?), Buffer::Shared(buffer(steps * STEPS)?)));
        Self::in_bands(formats, cols, band)
    }

    fn zeroed(formats: &[(Format, usize)], cols: usize) -> Result<Self, AllocError> {
        // Several streams run through it at once: with small pages of the system a tenth of the time is translation.
        Self::in_bands(formats, cols, |data, steps| {
            let data = Buffer::Owned(PageSlice::zeroed_in_huge_pages(data)?);
            Ok((data, Buffer::Owned(PageSlice::zeroed_in_huge_pages(steps)?)))
        })
    }

    /// `band` makes the buffers of a band: so many bytes, and so many steps.
    fn in_bands<E: From<AllocError>>(
        formats: &[(Format, usize)],
        cols: usize,
        mut band: impl FnMut(usize, usize) -> Result<(Buffer<u8>, Buffer<Steps>), E>,
    ) -> Result<Self, E> {
        let mut rows = 0;
        let mut bands = Vec::with_capacity(formats.len());
        for &(format, count) in formats {
            assert!(rows % LANES == 0, "rows in another format begin at row {rows}, within a panel");
            assert!(format.is_integer() || formats.len() == 1, "{} is not alone", format.name());
            let block = format.stored_block().map_or(1, |block| block.inputs);
            assert!(cols.is_multiple_of(block), "{cols} inputs in blocks of {block}, {}", format.name());
            let panels = rows / LANES..rows / LANES + count.div_ceil(LANES);
            let panel_bytes = format.panel_bytes(cols).ok_or(AllocError { bytes: u64::MAX })?;
            let bytes = panel_bytes.checked_mul(panels.len()).ok_or(AllocError { bytes: u64::MAX })?;
            let panel_steps = format.panel_steps(cols);
            let (data, steps) = band(bytes, panel_steps * panels.len())?;
            bands.push(Band { format, panels, panel_bytes, panel_steps, data, steps });
            rows += count;
        }
        Ok(Self { rows, cols, bands })
    }

    /// The bytes of the two buffers of so many rows in a format: weights, and the steps that integer formats have
    /// besides. `None` where they do not fit the address space.
    #[must_use]
    pub fn buffer_bytes(format: Format, rows: usize, cols: usize) -> Option<[usize; 2]> {
        let panels = rows.div_ceil(LANES);
        let data = format.panel_bytes(cols)?.checked_mul(panels)?;
        Some([data, (format.panel_steps(cols) * STEPS).checked_mul(panels)?])
    }

    /// The bytes that such a matrix takes; `None` where they do not fit 64 bits.
    #[must_use]
    pub fn bytes_for(format: Format, rows: usize, cols: usize) -> Option<u64> {
        let [data, steps] = Self::buffer_bytes(format, rows, cols)?;
        (data as u64).checked_add(steps as u64)
    }

    /// Outputs.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Inputs.
    #[must_use]
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// How weights are stored, with how many panels of sixteen rows, from the first row to the last.
    pub fn formats(&self) -> impl Iterator<Item = (Format, usize)> {
        self.bands.iter().map(|band| (band.format, band.panels.len()))
    }

    /// The memory that it takes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.bands.iter().map(|band| band.data.len() + size_of_val(&*band.steps)).sum()
    }

    /// Bytes of it that lie in memory of others.
    #[must_use]
    pub fn shared_bytes(&self) -> usize {
        let shared = |band: &&Band| matches!(band.data, Buffer::Shared(_));
        self.bands.iter().filter(shared).map(|band| band.data.len() + size_of_val(&*band.steps)).sum()
    }

    /// The packed bytes, buffer by buffer in a fixed order: weights and steps of each format. With rows, columns and formats
    /// they say all that the matrix is.
    pub fn buffers(&self) -> impl Iterator<Item = &[u8]> {
        self.bands.iter().flat_map(|band| [&*band.data, bytemuck::cast_slice(&band.steps)])
    }

    /// Writes row `row` to `out`: floating-point weights as they are, others as near as f32 gets. This is how an embedding
    /// is looked up.
    ///
    /// # Panics
    /// If there is no such row or `out` is not `cols` long.
    pub fn read_row(&self, row: usize, out: &mut [f32]) {
        assert!(row < self.rows, "row {row} of {}", self.rows);
        assert_eq!(out.len(), self.cols, "the length of a row");
        let panel = row / LANES;
        let band = self.bands.iter().find(|band| band.panels.contains(&panel)).expect("each row is in a band");
        band.format.visit(ReadRow { band, panel, lane: row % LANES, out });
    }

    pub(crate) fn bands(&self) -> &[Band] {
        &self.bands
    }
}

/// Rows of a source, as a format asks for them.
struct Source<'a> {
    source: &'a dyn RowSource,
    cols: usize,
}

impl Source<'_> {
    /// At most sixteen rows, `[16][cols]`; those that are missing are zero.
    fn numbers(&self, rows: Range<usize>) -> Vec<f32> {
        let mut values = vec![0.0; LANES * self.cols];
        self.source.read_rows(rows.start, self.cols, &mut values[..LANES.min(rows.len()) * self.cols]);
        values
    }

    /// The same as they are stored.
    fn stored(&self, rows: Range<usize>, block: StoredBlock) -> Vec<u8> {
        let row_bytes = block.row_bytes(self.cols);
        let mut bytes = vec![0; LANES * row_bytes];
        self.source.read_stored(rows.start, row_bytes, &mut bytes[..LANES.min(rows.len()) * row_bytes]);
        bytes
    }
}

/// Stores sixteen rows.
struct PackPanel<'a> {
    isa: Isa,
    source: Source<'a>,
    /// The rows of the matrix that there are.
    rows: Range<usize>,
    steps: &'a mut [Steps],
    panel: &'a mut [u8],
}

impl FormatVisitor for PackPanel<'_> {
    type Output = ();

    fn float<F: FloatFormat>(self) {
        transpose::<F>(&self.source.numbers(self.rows), bytemuck::cast_slice_mut(self.panel));
    }

    fn integer<F: IntegerFormat>(self) {
        let values = self.source.numbers(self.rows);
        quant::pack_panel::<F>(self.isa, &values, self.steps, bytemuck::cast_slice_mut(self.panel));
    }

    fn grouped<F: GroupedFormat>(self) {
        grouped::pack_panel::<F>(&self.source.stored(self.rows, F::STORED), bytemuck::cast_slice_mut(self.panel));
    }
}

/// Quantizes panels by what is known of their inputs.
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
        unreachable!("codes that are stored stay as they are");
    }
}

/// Scales random codes over `cols` inputs so that they keep the input's variance.
struct Level<'a> {
    cols: usize,
    steps: &'a mut [Steps],
    panel: &'a mut [u8],
}

impl FormatVisitor for Level<'_> {
    type Output = ();

    fn float<F: FloatFormat>(self) {
        unreachable!("random bytes are no floating-point weights");
    }

    fn integer<F: IntegerFormat>(self) {
        // Stored weights are rotated, and longer for it.
        let step = (integer::BLOCK as f32 / self.cols as f32).sqrt() / integer::uniform_deviation::<F>();
        self.steps.as_flattened_mut().fill(half::f16::from_f32(step).to_bits());
    }

    fn grouped<F: GroupedFormat>(self) {
        let deviation = 1.0 / (self.cols as f32).sqrt();
        F::level(bytemuck::cast_slice_mut(self.panel), self.cols / grouped::GROUP, deviation);
    }
}

/// Fills a panel with codes that nothing tells from a model's.
fn fill_randomly(seed: u64, panel: &mut [u8]) {
    let mut state = seed | 1;
    for bytes in panel.as_chunks_mut::<8>().0 {
        // Knuth's linear congruential generator, its halves added up: the lower bits alone repeat soon.
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        *bytes = (state ^ state >> 32).to_ne_bytes();
    }
}

/// Sixteen rows of f32 to lines. Goes by squares of 16 x 16: rows a power of two apart share their place in the cache,
/// and a cache line of a row must be used up before the others push it out.
fn transpose<F: FloatFormat>(source: &[f32], panel: &mut [Line<F>]) {
    let cols = panel.len();
    for (square, lines) in panel.chunks_mut(LANES).enumerate() {
        let mut turned = [[0.0; LANES]; LANES];
        for (lane, row) in source.chunks_exact(cols).enumerate() {
            for (values, value) in turned.iter_mut().zip(&row[square * LANES..][..lines.len()]) {
                values[lane] = *value;
            }
        }
        for (line, values) in lines.iter_mut().zip(&turned) {
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
        let (steps, lines) = (self.band.steps(self.panel), self.band.byte_lines(self.panel));
        integer::read_row::<F>(steps, lines, self.lane, self.out);
    }

    fn grouped<F: GroupedFormat>(self) {
        grouped::read_row::<F>(self.band.byte_lines(self.panel), self.lane, self.out);
    }
}
