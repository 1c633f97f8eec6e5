//! Sparse formats: panels that store the nonzero codes of dense blocks.
//!
//! A sparse format is packed from dense stored blocks, as a [grouped](super::grouped) format is: a scale, and a code for
//! each input, most of them zero. A panel has a fixed size, which depends on the number of inputs alone, so that sparse
//! matrices can be divided and stored like all others; weights that do not fit are refused. For the matmul, blocks of
//! [`BLOCK`] inputs are unpacked to lines that are those of dense weights. The products are therefore bitwise those of
//! dense weights.

use std::marker::PhantomData;

use super::family::GroupedPanels;
use super::grouped::{GROUP, StoredBlock};
use super::integer::{BLOCK, BLOCK_PAIRS, Unpack};
use crate::arch::{ByteLine, Dot, LANES, LINE};
use crate::matmul::integer::BandTask;
use crate::matmul::sparse::FewRows;

/// Weights of which more are nonzero than a sparse format stores.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{nonzero} of {weights} weights are nonzero, but the sparse format stores at most {limit} of them")]
pub struct TooDense {
    /// Number of weights that share space.
    pub weights: usize,
    /// Number of nonzero weights.
    pub nonzero: usize,
    /// Largest number of nonzero weights.
    pub limit: usize,
}

/// Format whose panels store nonzero codes. Rows consist of whole stored blocks: an f16 scale and signed bytes.
pub trait SparseFormat: Send + Sync + 'static {
    /// Number of inputs that share a scale.
    const INPUTS: usize;

    /// Number of bits of a code.
    const BITS: usize;

    /// Whether unpacking uses [`Simd::expand`](crate::arch::Simd::expand).
    const EXPANDS: bool;

    /// Number of lines of an unpacked block.
    const UNPACKED_BLOCK_LINES: usize;

    /// Dense weights to which blocks are unpacked. Those without factors of groups have a scale for each block.
    type Unpacked: Unpack;
    /// Dense weights on instruction sets that multiply codes, if codes are small enough.
    type ByCodes: Unpack;

    /// Returns the number of lines of a panel over `cols` inputs.
    fn lines(cols: usize) -> usize;

    /// Returns about how many lines of a panel precede block `index`, for its prefetch.
    fn first_line(index: usize) -> usize;

    /// Packs sixteen rows into the zeroed lines of a panel.
    fn pack(rows: &Rows<'_>, lines: &mut [ByteLine]) -> Result<(), TooDense>;

    /// Unpacks the first `groups` groups of block `index` of a panel, given its lines. A damaged panel may
    /// give any weights, but only bytes of the panel and of those that follow it are read.
    fn unpack<S: Dot>(simd: S, lines: &[ByteLine], index: usize, groups: usize, to: &mut [ByteLine]);

    /// Multiplies all panels with one tile of R rows.
    fn few_rows<S: Dot, const R: usize>(simd: S, panels: FewRows<'_, '_, '_, Self>)
    where
        Self: Sized;

    /// Makes lines of random bytes a panel of random codes with the scale `scale`, f16.
    fn make_valid(lines: &mut [ByteLine], cols: usize, scale: u16);

    /// Dequantizes row `row` of a panel.
    fn read_row(lines: &[ByteLine], row: usize, out: &mut [f32]);
}

/// Returns the stored block of a format.
const fn stored<F: SparseFormat>() -> StoredBlock {
    StoredBlock { inputs: F::INPUTS, bytes: SCALE_BYTES + F::INPUTS }
}

/// Bytes of the scale of a stored block.
const SCALE_BYTES: usize = size_of::<u16>();

/// Sixteen rows of stored blocks.
pub struct Rows<'a> {
    bytes: &'a [u8],
    row_bytes: usize,
    block: StoredBlock,
}

impl<'a> Rows<'a> {
    /// Views `[16][bytes of a row]`.
    fn new<F: SparseFormat>(bytes: &'a [u8]) -> Self {
        Self { bytes, row_bytes: bytes.len() / LANES, block: stored::<F>() }
    }

    /// Returns the number of inputs.
    pub fn cols(&self) -> usize {
        self.row_bytes / self.block.bytes * self.block.inputs
    }

    fn block(&self, row: usize, input: usize) -> &'a [u8] {
        &self.bytes[row * self.row_bytes + input / self.block.inputs * self.block.bytes..][..self.block.bytes]
    }

    /// Returns the scale of an input, the bits of an f16.
    pub fn scale(&self, row: usize, input: usize) -> u16 {
        let [first, second, ..] = *self.block(row, input) else { unreachable!("a block begins with its scale") };
        u16::from_le_bytes([first, second])
    }

    /// Returns the code of an input.
    pub fn code(&self, row: usize, input: usize) -> i8 {
        self.block(row, input)[SCALE_BYTES + input % self.block.inputs].cast_signed()
    }

    /// Returns the number of nonzero codes.
    pub fn nonzero(&self) -> usize {
        let blocks = self.bytes.chunks_exact(self.block.bytes);
        blocks.map(|block| block[SCALE_BYTES..].iter().filter(|code| **code != 0).count()).sum()
    }
}

impl<F: SparseFormat> GroupedPanels for Sparse<F> {
    fn stored(&self) -> StoredBlock {
        stored::<F>()
    }

    fn has_codes(&self) -> bool {
        F::ByCodes::BY_CODES.is_some()
    }

    fn is_sparse(&self) -> bool {
        true
    }

    fn has_block_scales(&self) -> bool {
        F::Unpacked::FACTORS.is_none()
    }

    fn bytes(&self, cols: usize) -> Option<usize> {
        // No format takes more than two bytes per weight.
        (cols < usize::MAX / (2 * LINE)).then(|| F::lines(cols))?.checked_mul(LINE)
    }

    fn pack(&self, rows: &[u8], panel: &mut [u8]) -> Result<(), TooDense> {
        F::pack(&Rows::new::<F>(rows), bytemuck::cast_slice_mut(panel))
    }

    fn scale_random(&self, cols: usize, panel: &mut [u8]) {
        // Half of the codes are zero. The others are distributed uniformly: their variance is a twelfth of their range squared.
        let range = (1 << F::BITS) as f32;
        let scale = half::f16::from_f32((24.0 / cols as f32).sqrt() / range);
        F::make_valid(bytemuck::cast_slice_mut(panel), cols, scale.to_bits());
    }

    fn read_row(&self, panel: &[u8], lane: usize, out: &mut [f32]) {
        F::read_row(bytemuck::cast_slice(panel), lane, out);
    }

    fn multiply(&self, task: BandTask<'_, '_>) {
        task.sparse::<F>();
    }
}

/// Panels of a sparse format.
pub struct Sparse<F>(pub PhantomData<F>);

const _: () = assert!(BLOCK == BLOCK_PAIRS * GROUP);
