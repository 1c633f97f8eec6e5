//! Block formats of ggml, each described by its stored block.
//!
//! A block has one or two f16 scales, sub-scales of few bits in most formats, and a code for each input. A weight is
//! `scale * sub_scale * value(code)`, minus `second_scale * second_sub_scale` in formats with offsets. The description says
//! how to read a stored block; the layout of panels and the arithmetic follow from it.
//!
//! In a panel, a block takes a line with its two scales, or half a line with its only one, as `[scale][row]`. Where that
//! leaves half a line, two blocks share the line before them. The sub-scales follow, in
//! [bit planes](super::planes), `[group][half][kind][row]`, and then the codes of each group, in bit planes of lines.

use std::marker::PhantomData;

use super::grouped::{self, Factors, GROUP, GroupedFormat, Layout, StoredBlock};
use super::integer::{BLOCK, Unpack};
use super::planes::{self, BitPlanes};
use crate::arch::{ByteLine, Dot, LANES, LINE};

/// Values of codes.
#[derive(Clone, Copy)]
pub enum Values {
    /// The code minus a number.
    Minus(u8),
    /// Entry of a table.
    Table([i8; 16]),
}

impl Values {
    /// Returns the values plus `bias`, as unsigned bytes.
    pub const fn biased(self, bias: u8) -> Self {
        match self {
            Self::Minus(zero) => Self::Minus(zero.wrapping_sub(bias)),
            Self::Table(mut table) => {
                let mut i = 0;
                while i < table.len() {
                    table[i] = table[i].wrapping_add(bias.cast_signed());
                    i += 1;
                }
                Self::Table(table)
            }
        }
    }

    /// Returns the values of stored codes, as bytes.
    #[inline(always)]
    pub fn quad<S: Dot>(&self, simd: S, codes: S::Bytes) -> S::Bytes {
        match self {
            Self::Minus(0) => codes,
            Self::Minus(zero) => simd.sub_bytes(codes, simd.splat_byte(*zero)),
            Self::Table(table) => simd.lookup(bytemuck::cast_ref(table), codes),
        }
    }

    /// Returns the value of a code.
    pub fn of(self, code: u8) -> f32 {
        match self {
            Self::Minus(zero) => f32::from(code) - f32::from(zero),
            Self::Table(table) => f32::from(table[usize::from(code)]),
        }
    }
}

/// Sub-scales, which multiply the scales of a block.
#[derive(Clone, Copy)]
pub enum SubScales {
    /// None: all groups have the scales of their block.
    None,
    /// Stored numbers, minus a number.
    Minus(u8, ReadSubScale),
    /// Signed bytes.
    Signed(ReadSubScale),
}

/// Reads the stored sub-scale of a group, or of half a group, of a block, for weights, 0, or for offsets, 1.
pub type ReadSubScale = fn(block: &[u8], part: usize, which: usize) -> u8;

impl SubScales {
    /// Returns the value of a stored sub-scale; 1 if there are none.
    pub fn of(self, stored: u8) -> f32 {
        match self {
            Self::None => 1.0,
            Self::Minus(zero, _) => f32::from(stored) - f32::from(zero),
            Self::Signed(_) => f32::from(stored.cast_signed()),
        }
    }
}

/// Description of a format by its stored blocks.
pub trait BlockFormat: Send + Sync + 'static {
    /// Size of a stored block: one or several whole groups.
    const STORED: StoredBlock;

    /// Values of the codes.
    const VALUES: Values;

    /// Sub-scales of groups or of halves of groups.
    const SUB_SCALES: SubScales = SubScales::None;

    /// Bits of the codes.
    type Codes: BitPlanes;

    /// Bits of the sub-scales: none if there are no sub-scales, and eight if they are signed bytes.
    type SubScaleBits: BitPlanes;

    /// Unpacked form of groups, which also says whether there are offsets, and sub-scales for halves of groups.
    type Unpacked: Unpack;

    /// Unpacked form on instruction sets that multiply codes, if codes are small enough.
    type ByCodes: Unpack;

    /// Returns the scale of weights, 0, or of offsets, 1: the bits of an f16.
    fn scale(block: &[u8], which: usize) -> u16;

    /// Returns the code of an input.
    fn code(block: &[u8], input: usize) -> u8;
}

/// Sizes and layout that follow from a description.
struct Derived<F>(PhantomData<F>);

impl<F: BlockFormat> Derived<F> {
    const FACTORS: Factors = grouped::factors::<F>();

    /// Number of f16 scales of a block.
    const SCALES: usize = Self::FACTORS.kinds();

    /// Number of parts of a group that have their own sub-scales.
    const PARTS: usize = Self::FACTORS.parts();

    /// Number of groups of a block.
    const GROUPS: usize = F::STORED.inputs / GROUP;

    /// Number of sub-scales of a row in a block.
    const SUB_SCALES: usize = Self::GROUPS * Self::PARTS * Self::SCALES;

    /// Number of vectors of the sub-scales of a block.
    const SUB_SCALE_VECTORS: usize = F::SubScaleBits::BITS * Self::SUB_SCALES / 8;

    /// Bytes of the scales and sub-scales of a block of sixteen rows.
    const SCALE_BYTES: usize = Self::SCALES * size_of::<[u16; LANES]>() + Self::SUB_SCALE_VECTORS * LANES;

    /// Whether two blocks share the line of their scales.
    const SHARED: bool = !Self::SCALE_BYTES.is_multiple_of(LINE);

    const LAYOUT: Layout = Layout {
        block_groups: Self::GROUPS,
        shared: if Self::SHARED { 1 } else { 0 },
        factors: Self::SCALE_BYTES / LINE,
        codes: F::Codes::BITS,
    };

    /// Sub-scales have bits, and signed ones eight.
    const HAS_BITS_OF_SUB_SCALES: () = assert!(
        match F::SUB_SCALES {
            SubScales::None => F::SubScaleBits::BITS == 0,
            SubScales::Minus(..) => F::SubScaleBits::BITS > 0 && F::SubScaleBits::BITS < 8,
            SubScales::Signed(_) => F::SubScaleBits::BITS == 8,
        },
        "the sub-scales do not have the described number of bits"
    );

    /// Packing is lossless: two blocks of sixteen rows take as many bytes as they do when stored.
    const IS_LOSSLESS: () = assert!(
        Self::LAYOUT.lines(2 * Self::GROUPS) * LINE == 2 * LANES * F::STORED.bytes && F::STORED.inputs % GROUP == 0,
        "the description does not account for each bit of a block"
    );

    /// Returns the line of a scale of the block of group `group`, and its index there.
    #[inline(always)]
    const fn scale_at(group: usize, which: usize) -> (usize, usize) {
        if Self::SHARED {
            (Self::LAYOUT.shared_of(group), group / Self::GROUPS % 2)
        } else {
            (Self::LAYOUT.factors_of(group).0, which)
        }
    }

    /// Returns the line of the sub-scales of the block of group `group`, and the number of vectors of sixteen bytes that
    /// precede them there.
    #[inline(always)]
    const fn sub_scales_at(group: usize) -> (usize, usize) {
        let scales = if Self::SHARED { 0 } else { Self::SCALES * size_of::<[u16; LANES]>() / LANES };
        (Self::LAYOUT.factors_of(group).0, scales)
    }

    /// Returns the index of a sub-scale in its block.
    #[inline(always)]
    const fn sub_scale_index(group: usize, part: usize, which: usize) -> usize {
        (group % Self::GROUPS * Self::PARTS + part) * Self::SCALES + which
    }
}

/// Packed data of a group.
#[derive(Clone, Copy)]
pub struct Packed<'a> {
    codes: &'a [ByteLine],
    scales: [&'a [u16; LANES]; 2],
    sub_scales: &'a [[u8; LANES]],
    index: usize,
}

impl<F: BlockFormat> GroupedFormat for F {
    const STORED: StoredBlock = F::STORED;

    /// Sub-scales of few bits are then shifted by constants.
    const UNROLLED: bool = F::STORED.inputs.is_multiple_of(BLOCK) && matches!(F::SUB_SCALES, SubScales::Minus(..));
    const TURNS: bool = !matches!(F::SUB_SCALES, SubScales::None);

    type Group<'a, S: Dot> = Packed<'a>;
    type Unpacked = F::Unpacked;
    type ByCodes = F::ByCodes;

    #[inline(always)]
    fn lines(groups: usize) -> usize {
        const { Derived::<F>::IS_LOSSLESS }
        const { Derived::<F>::HAS_BITS_OF_SUB_SCALES }
        Derived::<F>::LAYOUT.lines(groups)
    }

    fn store(lines: &mut [ByteLine], index: usize, blocks: &[&[u8]; LANES]) {
        let first = index * Derived::<F>::GROUPS;
        for (row, block) in blocks.iter().enumerate() {
            for which in 0..Derived::<F>::SCALES {
                let (line, at) = Derived::<F>::scale_at(first, which);
                grouped::halves_mut(lines, line, at)[row] = F::scale(block, which);
            }
        }
        if let SubScales::Minus(_, read) | SubScales::Signed(read) = F::SUB_SCALES {
            let (line, skipped) = Derived::<F>::sub_scales_at(first);
            let vectors = &mut planes::vectors_mut::<LANES>(&mut lines[line..])[skipped..];
            for (row, block) in blocks.iter().enumerate() {
                for index in 0..Derived::<F>::SUB_SCALES {
                    let (part, which) = (index / Derived::<F>::SCALES, index % Derived::<F>::SCALES);
                    F::SubScaleBits::store(vectors, Derived::<F>::SUB_SCALES, index, row, read(block, part, which));
                }
            }
        }
        for group in 0..Derived::<F>::GROUPS {
            let lines = &mut lines[Derived::<F>::LAYOUT.codes_of(first + group)..];
            for (row, block) in blocks.iter().enumerate() {
                grouped::store_codes::<F::Codes>(lines, row, |input| F::code(block, group * GROUP + input));
            }
        }
    }

    #[inline(always)]
    fn group<'a, S: Dot>(_: S, lines: &'a [ByteLine], index: usize) -> Packed<'a> {
        let scale = |which: usize| {
            let (line, at) = Derived::<F>::scale_at(index, which % Derived::<F>::SCALES);
            grouped::halves(lines, line, at)
        };
        let (line, skipped) = Derived::<F>::sub_scales_at(index);
        let sub_scales = &planes::vectors(&lines[line..])[skipped..][..Derived::<F>::SUB_SCALE_VECTORS];
        Packed {
            codes: &lines[Derived::<F>::LAYOUT.codes_of(index)..][..F::Codes::BITS],
            scales: [scale(0), scale(1)],
            sub_scales,
            index,
        }
    }

    #[inline(always)]
    fn quad<S: Dot>(simd: S, group: Packed<'_>, index: usize) -> S::Bytes {
        let biased = const { &F::VALUES.biased(grouped::unpacked_bias::<S, F>()) };
        biased.quad(simd, F::Codes::quad(simd, group.codes, index))
    }

    /// Returns a factor. The product is exact: eleven bits times at most eight.
    #[inline(always)]
    fn factor<S: Dot>(simd: S, group: Packed<'_>, index: usize) -> S::F32 {
        let (part, which) = (index % Derived::<F>::PARTS, index / Derived::<F>::PARTS);
        let scale = simd.load_f16(group.scales[which]);
        let at = Derived::<F>::sub_scale_index(group.index, part, which);
        let zero = match F::SUB_SCALES {
            SubScales::None => return scale,
            SubScales::Minus(zero, _) => zero,
            SubScales::Signed(_) => 0,
        };
        let place = (at, Derived::<F>::SUB_SCALES);
        simd.mul(scale, simd.to_f32(F::SubScaleBits::lanes(simd, group.sub_scales, place, zero)))
    }

    fn weight(lines: &[ByteLine], input: usize, row: usize) -> f32 {
        let group = input / GROUP;
        let part = input % GROUP * Derived::<F>::PARTS / GROUP;
        let factor = |which| {
            let (line, at) = Derived::<F>::scale_at(group, which);
            let scale = grouped::half_of(grouped::halves(lines, line, at), row);
            let (line, skipped) = Derived::<F>::sub_scales_at(group);
            let at = Derived::<F>::sub_scale_index(group, part, which);
            let vectors = &planes::vectors::<LANES>(&lines[line..])[skipped..];
            scale * F::SUB_SCALES.of(F::SubScaleBits::number(vectors, Derived::<F>::SUB_SCALES, at, row))
        };
        let codes = &lines[Derived::<F>::LAYOUT.codes_of(group)..];
        let code = grouped::code::<F::Codes>(codes, input % GROUP, row);
        let weight = factor(0) * F::VALUES.of(code);
        if Derived::<F>::FACTORS.offsets { weight - factor(1) } else { weight }
    }

    fn set_deviation(lines: &mut [ByteLine], groups: usize, deviation: f32) {
        let codes = (0..1 << F::Codes::BITS).map(|code| F::VALUES.of(code as u8));
        let (code, code_square) = moments(codes);
        let sub_scales = (0..1 << F::SubScaleBits::BITS).map(|stored| F::SUB_SCALES.of(stored as u8));
        let (sub_scale, sub_scale_square) = moments(sub_scales);
        // Offsets are the mean of codes times their own sub-scales.
        let offset_square = if Derived::<F>::FACTORS.offsets {
            code * code * (sub_scale_square - 2.0 * sub_scale * sub_scale)
        } else {
            0.0
        };
        let scale = deviation / (sub_scale_square * code_square + offset_square).sqrt();
        for group in (0..groups).step_by(Derived::<F>::GROUPS) {
            for (which, factor) in [scale, scale * code].into_iter().enumerate().take(Derived::<F>::SCALES) {
                let (line, at) = Derived::<F>::scale_at(group, which);
                grouped::halves_mut(lines, line, at).fill(half::f16::from_f32(factor).to_bits());
            }
        }
    }
}

/// Returns the mean of numbers and of their squares.
fn moments(numbers: impl ExactSizeIterator<Item = f32> + Clone) -> (f32, f32) {
    let count = numbers.len() as f32;
    (numbers.clone().sum::<f32>() / count, numbers.map(|number| number * number).sum::<f32>() / count)
}

/// Returns the bits of the f16 at the start of stored bytes.
pub fn stored_half(bytes: &[u8]) -> u16 {
    u16::from_le_bytes([bytes[0], bytes[1]])
}

/// Returns the f16 scale, 0, at the start of a block, or the negated f16 minimum, 1, after it: the bits of an f16.
pub fn scale_and_minimum(block: &[u8], which: usize) -> u16 {
    stored_half(&block[2 * which..]) ^ (which as u16) << 15
}

/// Returns bit `input` of stored bytes.
pub fn bit(bytes: &[u8], input: usize) -> u8 {
    bytes[input / 8] >> (input % 8) & 1
}

/// Returns code `input` of a group in 16 bytes: the first half of the inputs in the low four bits, the second half in the
/// high four bits.
pub fn nibble(bytes: &[u8], input: usize) -> u8 {
    bytes[input % (GROUP / 2)] >> (4 * (input / (GROUP / 2))) & 0x0f
}

/// Returns bits of input `input` among those of 32 * (8 / n) inputs in 32 bytes, n bits each: input i is in byte i % 32,
/// from bit n * (i / 32) on.
pub fn strided(bytes: &[u8], input: usize, bits: usize) -> u8 {
    let each = GROUP * (8 / bits);
    bytes[input / each * GROUP + input % GROUP] >> (input % each / GROUP * bits) & (u8::MAX >> (8 - bits))
}

/// Returns the sub-scale, 0, or minimum, 1, of a group of a block whose twelve bytes of them follow two f16: ggml's
/// `get_scale_min_k4`.
pub fn k_sub_scale(block: &[u8], group: usize, which: usize) -> u8 {
    let bytes = &block[4..16];
    if group < 4 {
        return bytes[group + 4 * which] & 0x3f;
    }
    bytes[group + 4] >> (4 * which) & 0x0f | bytes[group - 4 + 4 * which] >> 6 << 4
}
