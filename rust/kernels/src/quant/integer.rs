//! Integer formats: ferrule's own quantization.
//!
//! Weights are rotated in blocks ([`rotation`](super::rotation)) and stored as `block scale * sub-scale * code`: a code of
//! few bits, an integer sub-scale for each [`GROUP`] inputs, and an f16 block scale for each [`SUPER`] inputs of a row.
//! `sub-scale * code` fits a signed byte, so all formats can be multiplied as bytes. On instruction sets where it is
//! faster, codes are multiplied instead, and the sum of a group is multiplied by its sub-scale. Both ways are exact over
//! [`BLOCK`] inputs. `benches/quality` is the study behind the choice of formats.
//!
//! A panel of sixteen rows consists of its blocks, in lines of 64 bytes; its block scales, `[super-blocks][16]` f16, are
//! stored separately. Rows are zero-padded to a multiple of [`HALF`]: the last block may be a half block, which has the
//! first half of the codes of a block, and its sub-scales in the same places. A *quad* is four consecutive inputs; an
//! unpacked line holds one quad of each row (N16K4).

use super::grouped::Factors;
use super::rotation;
use crate::arch::{ByteLine, Dot, LANES, Simd};

/// Number of inputs that share a sub-scale.
pub const GROUP: usize = 16;

/// Number of inputs whose products are summed as integers. In a row of activations they share a scale.
pub const BLOCK: usize = 128;

/// Number of inputs of a half block, with which a row may end.
pub const HALF: usize = BLOCK / 2;

/// Number of inputs of a super-block: those of a row that share a block scale.
pub const SUPER: usize = 2 * BLOCK;

/// Number of quads in a block, and of lines in a block of unpacked weights.
pub const BLOCK_QUADS: usize = BLOCK / 4;

/// Number of quads that are unpacked together: those of two groups, whose sub-scales share bytes.
pub const PAIR_QUADS: usize = 2 * GROUP / 4;

/// Number of groups in a block.
pub const BLOCK_GROUPS: usize = BLOCK / GROUP;

/// Number of pairs of groups in a block.
pub const BLOCK_PAIRS: usize = BLOCK_QUADS / PAIR_QUADS;

/// Number of pairs of groups in a half block.
const HALF_PAIRS: usize = BLOCK_PAIRS / 2;

/// Weights that are unpacked to lines of bytes for [`Dot::dot`], one line per quad.
pub trait Unpack: Send + Sync + 'static {
    /// Kind of codes that are multiplied if [`Dot::BY_CODES`] is set or there are few rows ([`Dot::CODE_ROWS`]); `None` if codes
    /// are the weights.
    const BY_CODES: Option<Codes>;

    /// Floating-point factors of the sums of groups; `None` if there are only block scales.
    const FACTORS: Option<Factors> = None;

    /// Whether the groups of a block are unpacked by unrolled code where panels take turns. Rows must consist of whole
    /// blocks.
    const UNROLLED: bool = false;

    /// Whether panels of few rows take turns block by block, where sixteen registers must suffice for sub-scales too.
    const TURNS: bool = true;

    /// Whether unpacking uses [`Simd::expand`]. Panels of few rows take turns block by block then.
    const EXPANDS: bool = false;

    /// Whether the lines of a block are unpacked ([`Self::quad_lines`]).
    const HAS_QUAD_LINES: bool = false;

    /// Packed lines of one block, which may be a half block.
    type Block<'a>: Copy;
    /// Packed data of two groups.
    type Pair<'a, S: Dot>: Copy;

    /// Returns the index of the first line of block `index`.
    fn first_line(index: usize) -> usize;

    /// Returns block `index` of a panel, given its lines.
    fn block(lines: &[ByteLine], index: usize) -> Self::Block<'_>;

    /// Returns groups `2 * index` and `2 * index + 1` of a block.
    fn pair<'a, S: Dot>(simd: S, block: Self::Block<'a>, index: usize) -> Self::Pair<'a, S>;

    /// Returns the scales of block `index` of a panel, which is `block`, if its groups have no factors.
    #[inline(always)]
    fn block_scale<S: Dot>(simd: S, scales: &[BlockScales], index: usize, _block: Self::Block<'_>) -> S::F32 {
        load_block_scale(simd, scales, index)
    }

    /// Returns the lines of a block if they hold a quad each. Matrix units multiply such lines.
    fn quad_lines<'a>(_block: Self::Block<'a>) -> &'a [ByteLine] {
        unreachable!("weights are packed")
    }

    /// Returns quad `index` of the pair, as weights plus [`Dot::WEIGHT_BIAS`].
    fn quad<S: Dot>(simd: S, pair: Self::Pair<'_, S>, index: usize) -> S::Bytes;

    /// Returns the stored codes of quad `index` of the pair.
    fn codes<S: Dot>(_simd: S, _pair: Self::Pair<'_, S>, _index: usize) -> S::Bytes {
        unreachable!("codes are the weights")
    }

    /// Returns the sub-scales of group `index` of the pair, in the form of [`Dot::add_scaled`].
    fn scale<S: Dot>(_simd: S, _pair: Self::Pair<'_, S>, _index: usize) -> S::Bytes {
        unreachable!("there are no sub-scales")
    }

    /// Returns factor `index` of the pair: the factor of the whole pair or those of both halves, and then the offset of the
    /// pair or those of both halves.
    fn factor<S: Dot>(_simd: S, _pair: Self::Pair<'_, S>, _index: usize) -> S::F32 {
        unreachable!("there are no factors")
    }
}

/// Kind of stored codes. Stored codes are non-negative: their value plus an offset. They are multiplied as stored, and
/// the partial sum of each group starts with a correction for the offset if there is one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Codes {
    /// Codes of four bits.
    FourBits,
    /// Codes of six bits.
    SixBits,
    /// Codes of up to five bits without an offset.
    Unsigned,
}

impl Codes {
    /// Kinds with an offset.
    pub const WITH_OFFSETS: [Self; 2] = [Self::FourBits, Self::SixBits];

    /// Returns the offset of a stored code from its value.
    pub const fn offset(self) -> i16 {
        match self {
            Self::FourBits => 8,
            Self::SixBits => 32,
            Self::Unsigned => 0,
        }
    }
}

/// The sum of two products per quad of a group fits 16 bits: the magnitude of a code is at most its offset, or less than 32
/// if there is none, that of an activation at most 127.
const _: () = assert!(Codes::SixBits.offset() as usize * GROUP / 2 * 127 < 1 << 15 && Codes::SixBits.offset() == 32);

/// Format of integer codes with sub-scales and block scales.
pub trait IntegerFormat: Unpack {
    /// Lowest and highest code.
    const CODES: [i32; 2];
    /// Lowest and highest sub-scale.
    const SCALES: [i32; 2];

    /// Returns all codes.
    fn levels() -> impl Iterator<Item = i32> {
        Self::CODES[0]..=Self::CODES[1]
    }

    /// Returns the code nearest to a value.
    #[inline(always)]
    fn nearest<S: Simd>(simd: S, value: S::F32) -> S::F32 {
        let (lowest, highest) = (simd.splat(Self::CODES[0] as f32), simd.splat(Self::CODES[1] as f32));
        simd.round(simd.max(simd.min(value, highest), lowest))
    }

    /// Returns the number of lines of `halves` half blocks.
    fn lines(halves: usize) -> usize;

    /// Stores group `group` of block `block` into zeroed lines: codes `[input][row]` and the sub-scales of the rows.
    fn store(lines: &mut [ByteLine], block: usize, group: usize, codes: &[[i8; LANES]; GROUP], scales: &[u8; LANES]);

    /// Returns `sub-scale * code` of one rotated weight: row `row`, input `input` of block `block`.
    fn weight(lines: &[ByteLine], block: usize, input: usize, row: usize) -> i32;
}

/// Unpacked blocks of `LINES` lines: one for each quad, with the bias of the instruction set, and one for the scales of the
/// rows, f32, unless block scales are stored separately.
pub struct UnpackedBlocks<const LINES: usize>;

/// Unpacked blocks without their scales.
pub type Unpacked = UnpackedBlocks<BLOCK_QUADS>;

/// Unpacked blocks with their scales.
pub type UnpackedScaled = UnpackedBlocks<{ BLOCK_QUADS + 1 }>;

impl<const LINES: usize> UnpackedBlocks<LINES> {
    /// Number of lines of a block.
    pub const LINES: usize = LINES;
}

impl<const LINES: usize> Unpack for UnpackedBlocks<LINES> {
    const BY_CODES: Option<Codes> = None;
    const HAS_QUAD_LINES: bool = true;

    type Block<'a> = &'a [ByteLine; LINES];
    type Pair<'a, S: Dot> = &'a [ByteLine; PAIR_QUADS];

    #[inline(always)]
    fn first_line(index: usize) -> usize {
        index * LINES
    }

    #[inline(always)]
    fn block(lines: &[ByteLine], index: usize) -> Self::Block<'_> {
        &lines.as_chunks().0[index]
    }

    #[inline(always)]
    fn pair<'a, S: Dot>(_: S, block: Self::Block<'a>, index: usize) -> Self::Pair<'a, S> {
        &block.as_chunks().0[index]
    }

    #[inline(always)]
    fn quad_lines<'a>(block: Self::Block<'a>) -> &'a [ByteLine] {
        block
    }

    #[inline(always)]
    fn block_scale<S: Dot>(simd: S, scales: &[BlockScales], index: usize, block: Self::Block<'_>) -> S::F32 {
        match block.get(BLOCK_QUADS) {
            Some(scales) => simd.load(bytemuck::cast_ref(scales)),
            None => load_block_scale(simd, scales, index),
        }
    }

    #[inline(always)]
    fn quad<S: Dot>(simd: S, pair: Self::Pair<'_, S>, index: usize) -> S::Bytes {
        simd.load_bytes(&pair[index].0)
    }
}

/// Block scales of sixteen rows in one super-block, f16.
pub type BlockScales = [u16; LANES];

/// Loads the scales of block `index` of a panel.
#[inline(always)]
fn load_block_scale<S: Simd>(simd: S, scales: &[BlockScales], index: usize) -> S::F32 {
    simd.load_f16(&scales[index * BLOCK / SUPER])
}

/// Returns the number of blocks of `cols` inputs; the last one may be a half block.
pub const fn blocks(cols: usize) -> usize {
    cols.div_ceil(BLOCK)
}

/// Returns the number of half blocks of `cols` inputs.
pub const fn halves(cols: usize) -> usize {
    cols.div_ceil(HALF)
}

/// Returns the number of inputs that are stored for `cols` inputs.
pub const fn padded(cols: usize) -> usize {
    halves(cols) * HALF
}

/// Returns the number of pairs of groups of block `index` of `cols` inputs: those of a half block if the row ends with it.
#[inline(always)]
pub fn pairs(cols: usize, index: usize) -> usize {
    BLOCK_PAIRS.min(halves(cols - index * BLOCK) * HALF_PAIRS)
}

/// Returns the number of super-blocks of `cols` inputs.
pub const fn supers(cols: usize) -> usize {
    cols.div_ceil(SUPER)
}

/// Dequantizes row `row` of a panel, whose `weight` returns the product of sub-scale and code of a rotated weight, given its
/// input and row.
pub fn read_row(weight: impl Fn(usize, usize) -> i32, block_scales: &[BlockScales], row: usize, out: &mut [f32]) {
    for (index, out) in out.chunks_mut(BLOCK).enumerate() {
        let block_scale = half::f16::from_bits(block_scales[index * BLOCK / SUPER][row]).to_f32();
        let weight = |input| weight(index * BLOCK + input, row) as f32 * block_scale;
        if out.len() > HALF { read_block::<BLOCK>(weight, out) } else { read_block::<HALF>(weight, out) }
    }
}

/// Reads a block of N rotated weights.
fn read_block<const N: usize>(weight: impl Fn(usize) -> f32, out: &mut [f32]) {
    let mut block: [f32; N] = std::array::from_fn(weight);
    rotation::restore(&mut block);
    out.copy_from_slice(&block[..out.len()]);
}

/// Returns the root mean square of `sub-scale * code` for uniformly distributed codes and sub-scales.
pub fn uniform_deviation<F: IntegerFormat>() -> f32 {
    let mean_square = |numbers: &[i32]| numbers.iter().map(|n| (n * n) as f32).sum::<f32>() / numbers.len() as f32;
    let (codes, scales) = (F::levels().collect::<Vec<_>>(), (F::SCALES[0]..=F::SCALES[1]).collect::<Vec<_>>());
    (mean_square(&codes) * mean_square(&scales)).sqrt()
}

/// Sets the block scales of random codes over `cols` inputs so that outputs have the variance of the inputs. `deviation` is the
/// root mean square of `sub-scale * code`.
pub fn set_deviation(deviation: f32, cols: usize, block_scales: &mut [BlockScales]) {
    // Stored weights are rotated, which multiplies their norm by sqrt(BLOCK).
    let block_scale = (BLOCK as f32 / cols as f32).sqrt() / deviation;
    block_scales.as_flattened_mut().fill(half::f16::from_f32(block_scale).to_bits());
}
