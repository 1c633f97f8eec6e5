//! What the integer formats have in common.
//!
//! Weights are rotated in blocks ([`rotation`](super::rotation)). What is stored of one is `step * scale * code`: a code of few bits, an integer sub-scale for each [`GROUP`] inputs, and an f16
//! step for each [`SUPER`] inputs of a row. `scale * code` fits a signed byte, so every format can be multiplied as bytes;
//! where that is slower, codes are, and what they add up to in a group with its sub-scale. Either way products are exact
//! in [`BLOCK`] inputs at a time. `benches/quality` is the study behind the choice.
//!
//! A panel of sixteen rows is its blocks, in lines of 64 bytes; its steps, `[super-blocks][16]` f16, lie elsewhere. A
//! row of weights is filled up with zeros to whole blocks. A *quad* is four consecutive inputs; unpacked, a line holds
//! one quad of each row (N16K4).

use super::grouped::Factors;
use super::rotation;
use crate::arch::{ByteLine, LANES, Simd};

/// Inputs that share a sub-scale.
pub const GROUP: usize = 16;

/// Inputs whose products are added up as integers; those of a row share one scale of activations.
pub const BLOCK: usize = 128;

/// Inputs of a row that share a step.
pub const SUPER: usize = 2 * BLOCK;

/// Quads of a block, and lines of a block of unpacked weights.
pub const BLOCK_QUADS: usize = BLOCK / 4;

/// Quads that are unpacked together: those of two groups, whose sub-scales share bytes.
pub const PAIR_QUADS: usize = 2 * GROUP / 4;

/// Groups of a block.
pub const BLOCK_GROUPS: usize = BLOCK / GROUP;

/// Such pairs of groups in a block.
pub const BLOCK_PAIRS: usize = BLOCK_QUADS / PAIR_QUADS;

/// Weights that unpack to lines of bytes, one for each quad, as [`Simd::dot`] takes them.
pub trait Unpack: Send + Sync + 'static {
    /// The codes that are multiplied where [`Simd::BY_CODES`] says so; `None` if they are the weights.
    const BY_CODES: Option<Codes>;

    /// What sums of groups are multiplied with where those are not integers; `None` if the steps are all there is.
    const FACTORS: Option<Factors> = None;

    /// The lines of one block.
    type Block<'a>: Copy;
    /// What the quads of two groups are unpacked from.
    type Pair<'a, S: Simd>: Copy;

    /// The number of the first line of block `index`.
    fn first_line(index: usize) -> usize;

    /// Block `index` of a panel whose blocks are `lines`.
    fn block(lines: &[ByteLine], index: usize) -> Self::Block<'_>;

    /// Groups `2 * index` and `2 * index + 1` of a block.
    fn pair<'a, S: Simd>(simd: S, block: Self::Block<'a>, index: usize) -> Self::Pair<'a, S>;

    /// Quad `index` of the pair; bytes lie [`Simd::WEIGHT_BIAS`] above the weights.
    fn quad<S: Simd>(simd: S, pair: Self::Pair<'_, S>, index: usize) -> S::Bytes;

    /// The codes of quad `index` of the pair, as they are stored.
    fn codes<S: Simd>(_simd: S, _pair: Self::Pair<'_, S>, _index: usize) -> S::Bytes {
        unreachable!("codes are the weights")
    }

    /// The sub-scales of group `index` of the pair, as [`Simd::add_scaled`] takes them.
    fn scale<S: Simd>(_simd: S, _pair: Self::Pair<'_, S>, _index: usize) -> S::Bytes {
        unreachable!("there are no sub-scales")
    }

    /// Factor `index` of the pair: of its first half or of all, of its second half or of the activations' sum.
    fn factor<S: Simd>(_simd: S, _pair: Self::Pair<'_, S>, _index: usize) -> S::F32 {
        unreachable!("there are no factors")
    }
}

/// What a stored code is above its value. Codes are multiplied as they are stored, in partial sums that begin with what
/// takes the offset off, one for each group of inputs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Codes {
    /// Codes of four bits.
    FourBits,
    /// Codes of six bits.
    SixBits,
}

impl Codes {
    /// All of them.
    pub const ALL: [Self; 2] = [Self::FourBits, Self::SixBits];

    /// What is between the stored code and its value.
    pub const fn offset(self) -> i16 {
        match self {
            Self::FourBits => 8,
            Self::SixBits => 32,
        }
    }
}

/// A share of a partial sum, two inputs of each quad of a group, fits 16 bits: the largest magnitude of a code is its
/// offset, that of an activation 127.
const _: () = assert!(Codes::SixBits.offset() as usize * GROUP / 2 * 127 < 1 << 15);

/// A format of integer codes with sub-scales and steps.
pub trait IntegerFormat: Unpack {
    /// The lowest and the highest code.
    const CODES: [i32; 2];
    /// The lowest and the highest sub-scale.
    const SCALES: [i32; 2];
    /// Lines that so many blocks take.
    fn lines(blocks: usize) -> usize;

    /// Stores group `group` of block `block`, whose lines are zero: codes `[input][row]` and the rows' sub-scales.
    fn store(lines: &mut [ByteLine], block: usize, group: usize, codes: &[[i8; LANES]; GROUP], scales: &[u8; LANES]);

    /// `scale * code` of one rotated weight: of row `row` and input `input` of block `block`.
    fn weight(lines: &[ByteLine], block: usize, input: usize, row: usize) -> i32;
}

/// Weights unpacked beforehand: a line for each quad, raised by the bias of the instruction set at hand.
pub struct Unpacked;

impl Unpack for Unpacked {
    const BY_CODES: Option<Codes> = None;

    type Block<'a> = &'a [ByteLine; BLOCK_QUADS];
    type Pair<'a, S: Simd> = &'a [ByteLine; PAIR_QUADS];

    #[inline(always)]
    fn first_line(index: usize) -> usize {
        index * BLOCK_QUADS
    }

    #[inline(always)]
    fn block(lines: &[ByteLine], index: usize) -> Self::Block<'_> {
        &lines.as_chunks().0[index]
    }

    #[inline(always)]
    fn pair<'a, S: Simd>(_: S, block: Self::Block<'a>, index: usize) -> Self::Pair<'a, S> {
        &block.as_chunks().0[index]
    }

    #[inline(always)]
    fn quad<S: Simd>(simd: S, pair: Self::Pair<'_, S>, index: usize) -> S::Bytes {
        simd.load_bytes(&pair[index].0)
    }
}

/// The steps of sixteen rows in one super-block, f16.
pub type Steps = [u16; LANES];

/// Blocks that hold so many inputs.
pub const fn blocks(cols: usize) -> usize {
    cols.div_ceil(BLOCK)
}

/// Super-blocks that hold so many inputs.
pub const fn supers(cols: usize) -> usize {
    cols.div_ceil(SUPER)
}

/// The weights of row `row` of a panel, as f32.
pub fn read_row<F: IntegerFormat>(steps: &[Steps], lines: &[ByteLine], row: usize, out: &mut [f32]) {
    for (index, out) in out.chunks_mut(BLOCK).enumerate() {
        let step = half::f16::from_bits(steps[index * BLOCK / SUPER][row]).to_f32();
        let mut block = std::array::from_fn(|input| F::weight(lines, index, input, row) as f32 * step);
        rotation::restore(&mut block);
        out.copy_from_slice(&block[..out.len()]);
    }
}

/// The root mean square of `scale * code` where all codes and sub-scales are equally frequent.
pub fn uniform_deviation<F: IntegerFormat>() -> f32 {
    let [codes, scales] = [F::CODES, F::SCALES].map(|[lowest, highest]| {
        let squares = (lowest..=highest).map(|n| (n * n) as f32);
        squares.sum::<f32>() / (highest - lowest + 1) as f32
    });
    (codes * scales).sqrt()
}
