//! ggml's formats whose codes are points of a grid: one index stands for the magnitudes of four or eight inputs, and signs
//! are stored beside it.
//!
//! A weight is `scale * (2 * sub_scale + 1) * unit * sign * magnitude`; the product of the first three is exact. Stored
//! blocks have 256 inputs and begin with their f16 scale. The description says how to read a group; the layout of panels
//! and the arithmetic follow from it.
//!
//! In a panel, two blocks share the line of their scales before them, `[block][row]`. A block has its sub-scales, four bits
//! each, in [bit planes](super::planes), and the upper bits of the indices, a byte of each row for each group. The codes of
//! a group follow: the low eight bits of the indices, `[point][row]`, and the signs, `[eight inputs][row]`. Where the
//! last of eight signs is not stored, as an even number of them is negative, its bit is one of the sub-scale or index.

use std::marker::PhantomData;

use super::blocks::stored_half;
use super::grouped::{self, GROUP, GroupedFormat, Layout, StoredBlock};
use super::integer::Unpack;
use super::planes::{self, BitPlanes, Bits};
use crate::arch::{ByteLine, Dot, LANES, LINE, Plane};

/// Number of inputs of a stored block.
const INPUTS: usize = 256;

/// Number of groups of a stored block.
const GROUPS: usize = INPUTS / GROUP;

/// Bits of sub-scales.
type SubScaleBits = Bits<4>;

/// Meaning of the highest bit of a stored byte of signs.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Top {
    /// The sign of the last of eight inputs.
    Sign,
    /// A bit of the sub-scale of the group: that of the first eight inputs is the lowest.
    SubScale,
    /// The ninth bit of the index of the point.
    Index,
}

/// Stored group of 32 inputs.
pub struct Group {
    /// Indices of points, in the order of their inputs; four if a point has eight inputs.
    pub points: [u16; 8],
    /// Bit i is set if input i of eight is negative.
    pub signs: [u8; 4],
    /// Sub-scale of each half.
    pub sub_scales: [u8; 2],
}

/// Description of a format by its stored blocks.
pub trait PointFormat: Send + Sync + 'static {
    /// Bytes of a stored block.
    const BYTES: usize;

    /// Factor of all weights: a power of two.
    const UNIT: f32;

    /// Number of inputs of a point.
    const POINT: usize;

    /// Use of the highest bit of the signs.
    const TOP: Top;

    /// Magnitudes of all points, four at a time: a point of eight inputs has two entries.
    const GRID: &'static [[i8; 4]];

    /// Unpacked form of groups, which also says whether halves of groups have their own sub-scales.
    type Unpacked: Unpack;

    /// Unpacked form on instruction sets that multiply codes, if magnitudes are small enough.
    type ByCodes: Unpack;

    /// Reads group `index` of a block.
    fn group(block: &[u8], index: usize) -> Group;

    /// Dequantizes a block.
    #[inline]
    fn dequantize(block: &[u8], out: &mut [f32]) {
        let scale = half::f16::from_bits(stored_half(block)).to_f32();
        for (index, out) in out.chunks_exact_mut(GROUP).enumerate() {
            let group = Self::group(block, index);
            for (input, out) in out.iter_mut().enumerate() {
                let sub_scale = group.sub_scales[input / (GROUP / 2)];
                *out =
                    weight::<Self>(scale, sub_scale, group.points[input / Self::POINT], group.signs[input / 8], input);
            }
        }
    }
}

/// Returns the weight of an input from the scale of its block, its sub-scale, its point, and the signs of its eight inputs.
#[inline(always)]
fn weight<F: PointFormat + ?Sized>(scale: f32, sub_scale: u8, point: u16, signs: u8, input: usize) -> f32 {
    let entry = usize::from(point) * (F::POINT / 4) + input % F::POINT / 4;
    let magnitude = scale * (f32::from(2 * sub_scale + 1) * F::UNIT) * f32::from(F::GRID[entry][input % 4]);
    if signs >> (input % 8) & 1 == 0 { magnitude } else { -magnitude }
}

/// Returns eight signs, of which the highest is not stored: an even number of them is negative.
#[inline(always)]
pub fn even_signs(code: u32) -> u8 {
    let seven = code as u8 & 0x7f;
    seven | (seven.count_ones() as u8 & 1) << 7
}

/// Returns four signs of groups and their sub-scale from a stored u32: seven bits of signs each, and the sub-scale above.
#[inline(always)]
pub fn signs_and_sub_scale(stored: &[u8]) -> ([u8; 4], [u8; 2]) {
    let stored = u32::from_le_bytes([stored[0], stored[1], stored[2], stored[3]]);
    ([0, 7, 14, 21].map(|first| even_signs(stored >> first)), [(stored >> 28) as u8; 2])
}

/// Returns code `index` of four bits; the first code of a byte is in its low half.
#[inline(always)]
pub fn consecutive_nibble(bytes: &[u8], index: usize) -> u8 {
    bytes[index / 2] >> (4 * (index % 2)) & 0x0f
}

/// Grouped format of a description.
pub struct Points<F>(PhantomData<F>);

impl<F: PointFormat> Points<F> {
    /// Number of points of a group.
    const POINTS: usize = GROUP / F::POINT;

    /// Bits of the index of a point above the low eight.
    const HIGH_BITS: usize = match F::TOP {
        Top::Sign => F::POINT / 4,
        Top::SubScale => 0,
        Top::Index => 1,
    };

    /// Number of parts of a group that have their own sub-scales.
    const PARTS: usize = grouped::factors::<Self>().parts();

    /// Number of sub-scales of a block that precede its groups.
    const SUB_SCALES: usize = if matches!(F::TOP, Top::SubScale) { 0 } else { GROUPS * Self::PARTS };

    /// Number of vectors of sub-scales of a block.
    const SUB_SCALE_VECTORS: usize = SubScaleBits::BITS * Self::SUB_SCALES / 8;

    /// Number of vectors of upper bits of indices of a block, which follow the sub-scales.
    const HIGH_VECTORS: usize = if matches!(F::TOP, Top::Sign) { GROUPS } else { 0 };

    const LAYOUT: Layout = Layout {
        block_groups: GROUPS,
        shared: 1,
        factors: (Self::SUB_SCALE_VECTORS + Self::HIGH_VECTORS) * LANES / LINE,
        codes: (Self::POINTS + GROUP / 8) * LANES / LINE,
    };

    /// Packing is lossless: two blocks of sixteen rows take as many bytes as they do when stored.
    const IS_LOSSLESS: () = assert!(
        Self::LAYOUT.lines(2 * GROUPS) * LINE == 2 * LANES * F::BYTES,
        "the description does not account for each bit of a block"
    );

    /// Each index has its point.
    const HAS_ALL_POINTS: () = assert!(
        (F::POINT == 4 || F::POINT == 8) && F::GRID.len() == (F::POINT / 4) << (8 + Self::HIGH_BITS),
        "the grid does not have a point for each index"
    );

    /// Returns the index of point `point` of row `row`.
    fn point(packed: PackedPoints<'_>, point: usize, row: usize) -> u16 {
        let high = match F::TOP {
            Top::Sign => packed.high[row] >> (Self::HIGH_BITS * point) & ((1 << Self::HIGH_BITS) - 1),
            Top::SubScale => 0,
            Top::Index => packed.signs[point][row] >> 7,
        };
        u16::from(packed.points[point][row]) | u16::from(high) << 8
    }

    /// Returns the signs of inputs from `8 * eight` on of row `row`.
    fn signs(packed: PackedPoints<'_>, eight: usize, row: usize) -> u8 {
        let signs = packed.signs[eight][row];
        if matches!(F::TOP, Top::Sign) { signs } else { even_signs(signs.into()) }
    }

    /// Returns the sub-scale of half `half` of row `row`.
    fn sub_scale(packed: PackedPoints<'_>, half: usize, row: usize) -> u8 {
        if matches!(F::TOP, Top::SubScale) {
            return (0..GROUP / 8).fold(0, |number, bit| number | packed.signs[bit][row] >> 7 << bit);
        }
        let at = packed.index % GROUPS * Self::PARTS + half * Self::PARTS / 2;
        SubScaleBits::number(packed.sub_scales, Self::SUB_SCALES, at, row)
    }
}

/// Packed data of a group.
#[derive(Clone, Copy)]
pub struct PackedPoints<'a> {
    /// Low eight bits of the indices, by point.
    points: &'a [[u8; LANES]],
    /// Signs of eight inputs each.
    signs: &'a [[u8; LANES]; GROUP / 8],
    /// Upper bits of the indices.
    high: &'a [u8; LANES],
    /// Sub-scales of the block.
    sub_scales: &'a [[u8; LANES]],
    scale: &'a [u16; LANES],
    index: usize,
}

impl<'a> PackedPoints<'a> {
    /// Returns group `index` of a panel.
    #[inline(always)]
    fn of<F: PointFormat>(lines: &'a [ByteLine], index: usize) -> Self {
        let layout = &Points::<F>::LAYOUT;
        let (factors, of_block) = layout.factors_of(index);
        let codes = &planes::vectors::<LANES>(&lines[layout.codes_of(index)..])[..layout.codes * LINE / LANES];
        let (points, signs) = codes.split_at(Points::<F>::POINTS);
        let factors = &planes::vectors::<LANES>(&lines[factors..])[..layout.factors * LINE / LANES];
        let (sub_scales, high) = factors.split_at(Points::<F>::SUB_SCALE_VECTORS);
        Self {
            points,
            signs: signs.first_chunk().expect("signs of each eight inputs"),
            high: high.get(of_block).unwrap_or(&signs[0]),
            sub_scales,
            scale: grouped::halves(lines, layout.shared_of(index), index / GROUPS % 2),
            index,
        }
    }
}

/// Parity of a number of four bits, in bit 3.
const PARITY: [u8; 16] = {
    let mut table = [0; 16];
    let mut number = 0usize;
    while number < table.len() {
        table[number] = (number.count_ones() as u8 & 1) << 3;
        number += 1;
    }
    table
};

impl<F: PointFormat> GroupedFormat for Points<F> {
    const STORED: StoredBlock = StoredBlock { inputs: INPUTS, bytes: F::BYTES };
    const UNROLLED: bool = true;
    const TURNS: bool = true;

    type Group<'a, S: Dot> = PackedPoints<'a>;
    type Unpacked = F::Unpacked;
    type ByCodes = F::ByCodes;

    #[inline(always)]
    fn lines(groups: usize) -> usize {
        const { Self::IS_LOSSLESS }
        const { Self::HAS_ALL_POINTS }
        Self::LAYOUT.lines(groups)
    }

    fn store(lines: &mut [ByteLine], index: usize, blocks: &[&[u8]; LANES]) {
        let first = index * GROUPS;
        let (factors, _) = Self::LAYOUT.factors_of(first);
        for (row, block) in blocks.iter().enumerate() {
            grouped::halves_mut(lines, Self::LAYOUT.shared_of(first), index % 2)[row] = stored_half(block);
            for of_block in 0..GROUPS {
                let Group { points, mut signs, sub_scales } = F::group(block, of_block);
                let factors = planes::vectors_mut::<LANES>(&mut lines[factors..]);
                match F::TOP {
                    Top::Sign => {
                        let high = &mut factors[Self::SUB_SCALE_VECTORS + of_block][row];
                        for (point, index) in points[..Self::POINTS].iter().enumerate() {
                            *high |= ((index >> 8) as u8) << (Self::HIGH_BITS * point);
                        }
                    }
                    Top::SubScale => {
                        for (bit, signs) in signs.iter_mut().enumerate() {
                            *signs = *signs & 0x7f | (sub_scales[0] >> bit & 1) << 7;
                        }
                    }
                    Top::Index => {
                        for (index, signs) in points.iter().zip(&mut signs) {
                            *signs = *signs & 0x7f | (index >> 8 << 7) as u8;
                        }
                    }
                }
                if !matches!(F::TOP, Top::SubScale) {
                    for (part, sub_scale) in sub_scales[..Self::PARTS].iter().enumerate() {
                        let at = of_block * Self::PARTS + part;
                        SubScaleBits::store(factors, Self::SUB_SCALES, at, row, *sub_scale);
                    }
                }
                let codes = planes::vectors_mut::<LANES>(&mut lines[Self::LAYOUT.codes_of(first + of_block)..]);
                let bytes = points[..Self::POINTS].iter().map(|index| *index as u8).chain(signs);
                codes.iter_mut().zip(bytes).for_each(|(code, byte)| code[row] = byte);
            }
        }
    }

    #[inline(always)]
    fn group<'a, S: Dot>(_: S, lines: &'a [ByteLine], index: usize) -> PackedPoints<'a> {
        PackedPoints::of::<F>(lines, index)
    }

    #[inline(always)]
    fn quad<S: Dot>(simd: S, group: PackedPoints<'_>, index: usize) -> S::Bytes {
        let (point, eight, half) = (index * 4 / F::POINT, index / 2, index % 2);
        let signs = simd.spread(&group.signs[eight]);
        let mut entry = simd.and(simd.spread(&group.points[point]), simd.splat_quad([-1, 0, 0, 0]));
        if const { Self::HIGH_BITS > 0 } {
            // The second byte of a lane has the bits above the first.
            let high = match const { F::TOP } {
                Top::Index => planes::shift(simd, signs, 7, 0),
                _ => planes::shift(simd, simd.spread(group.high), Self::HIGH_BITS * point, 0),
            };
            entry = simd.or(entry, simd.and(high, simd.splat_quad([0, (1 << Self::HIGH_BITS) - 1, 0, 0])));
        }
        let magnitudes = match const { F::POINT } {
            8 => simd.gather_pairs(F::GRID, entry)[half],
            _ => simd.gather(F::GRID, entry),
        };

        let upper = simd.shift_right::<4>(signs);
        let bits = if half == 0 {
            simd.and(signs, simd.splat_quad([1, 2, 4, 8]))
        } else if const { matches!(F::TOP, Top::Sign) } {
            simd.and(upper, simd.splat_quad([1, 2, 4, 8]))
        } else {
            let three = simd.and(upper, simd.splat_byte(0x07));
            let four = simd.and(signs, simd.splat_byte(0x0f));
            let parity = simd.xor(simd.lookup(&PARITY, three), simd.lookup(&PARITY, four));
            simd.and(simd.or(three, parity), simd.splat_quad([1, 2, 4, 8]))
        };
        let weights = simd.negate(magnitudes, bits);
        match const { grouped::unpacked_bias::<S, Self>() } {
            0 => weights,
            bias => simd.sub_bytes(weights, simd.splat_byte(bias.wrapping_neg())),
        }
    }

    /// Returns a factor. The product is exact: eleven bits times five.
    #[inline(always)]
    fn factor<S: Dot>(simd: S, group: PackedPoints<'_>, index: usize) -> S::F32 {
        let sub_scale = if const { matches!(F::TOP, Top::SubScale) } {
            let [first, second, third, fourth] = group.signs;
            let top = |bytes, to| Some(Plane { bytes, from: 7, width: 1, to });
            simd.load_planes([top(first, 0), top(second, 1), top(third, 2), top(fourth, 3)], 0)
        } else {
            let at = group.index % GROUPS * Self::PARTS + index;
            SubScaleBits::lanes(simd, group.sub_scales, (at, Self::SUB_SCALES), 0)
        };
        let sub_scale = simd.mul_add(simd.to_f32(sub_scale), simd.splat(2.0 * F::UNIT), simd.splat(F::UNIT));
        simd.mul(simd.load_f16(group.scale), sub_scale)
    }

    fn weight(lines: &[ByteLine], input: usize, row: usize) -> f32 {
        let (packed, of_group) = (PackedPoints::of::<F>(lines, input / GROUP), input % GROUP);
        let sub_scale = Self::sub_scale(packed, of_group / (GROUP / 2), row);
        let (point, signs) = (Self::point(packed, of_group / F::POINT, row), Self::signs(packed, of_group / 8, row));
        weight::<F>(grouped::half_of(packed.scale, row), sub_scale, point, signs, input)
    }

    fn set_deviation(lines: &mut [ByteLine], groups: usize, deviation: f32) {
        let magnitudes = F::GRID.as_flattened();
        let squares = magnitudes.iter().map(|n| f32::from(*n) * f32::from(*n)).sum::<f32>() / magnitudes.len() as f32;
        // The mean square of the odd numbers from 1 to 31.
        let sub_scale_squares = 341.0;
        let scale = deviation / (F::UNIT * (squares * sub_scale_squares).sqrt());
        for group in (0..groups).step_by(GROUPS) {
            let line = Self::LAYOUT.shared_of(group);
            grouped::halves_mut(lines, line, group / GROUPS % 2).fill(half::f16::from_f32(scale).to_bits());
        }
    }
}
