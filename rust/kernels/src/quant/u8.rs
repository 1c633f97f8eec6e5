//! u8, the 8-bit format of GPTQ and compressed-tensors: codes in 0..=255 with an f16 scale and a zero point for each 32
//! inputs; 9 bits per weight. Larger groups of a checkpoint repeat their scale and zero point.
//!
//! Every 128 inputs have two lines of scales, `[group][row]`, and two lines of zero points as f16, then eight lines of
//! codes per group.

use super::blocks::{Values, stored_half};
use super::grouped::{self, GROUP, GroupedFormat, Layout, Offset, StoredBlock};
use super::planes::{BitPlanes, Bits};
use crate::arch::{ByteLine, Dot, LANES};

/// Highest zero point: one more than the highest code, as in GPTQ. All zero points are exact in f16.
const MAX_ZERO_POINT: u16 = 256;

/// Midpoint that is subtracted from codes and zero points before they are multiplied.
const MIDDLE: u8 = 128;

const LAYOUT: Layout = Layout { block_groups: 4, shared: 0, factors: 4, codes: 8 };

/// First line of the zero points, relative to the first line of the block.
const ZEROS: usize = 2;

/// Stored block: f16 scale, zero point, codes.
#[repr(C, packed)]
struct Stored(u16, u16, [u8; GROUP]);

/// Packing is lossless: four blocks of sixteen rows take as many lines as a block has bytes.
const _: () = assert!(size_of::<Stored>() == U8::STORED.bytes && LAYOUT.lines(4) == U8::STORED.bytes);

/// u8 format: 8-bit codes with zero points.
pub struct U8;

/// Packed data of a group.
#[derive(Clone, Copy)]
pub struct Packed<'a> {
    codes: &'a [ByteLine; 8],
    factors: &'a [u16; LANES],
    zeros: &'a [u16; LANES],
}

impl GroupedFormat for U8 {
    const STORED: StoredBlock = StoredBlock { inputs: GROUP, bytes: 36 };
    const UNROLLED: bool = false;
    const TURNS: bool = false;

    type Group<'a, S: Dot> = Packed<'a>;
    type Unpacked = Offset<false>;
    type ByCodes = Offset<false>;

    #[inline(always)]
    fn lines(groups: usize) -> usize {
        LAYOUT.lines(groups)
    }

    fn store(lines: &mut [ByteLine], index: usize, blocks: &[&[u8]; LANES]) {
        let (line, of_block) = LAYOUT.factors_of(index);
        for (row, block) in blocks.iter().enumerate() {
            let zero = u16::from_le_bytes([block[2], block[3]]);
            assert!(zero <= MAX_ZERO_POINT, "zero point must be <= {MAX_ZERO_POINT}, got {zero}");
            grouped::halves_mut(lines, line, of_block)[row] = stored_half(block);
            grouped::halves_mut(lines, line + ZEROS, of_block)[row] = half::f16::from_f32(f32::from(zero)).to_bits();
            grouped::store_codes::<Bits<8>>(&mut lines[LAYOUT.codes_of(index)..], row, |input| block[4 + input]);
        }
    }

    #[inline(always)]
    fn group<'a, S: Dot>(_: S, lines: &'a [ByteLine], index: usize) -> Packed<'a> {
        let (line, of_block) = LAYOUT.factors_of(index);
        let factors = grouped::halves(lines, line, of_block);
        let zeros = grouped::halves(lines, line + ZEROS, of_block);
        Packed { codes: grouped::lines_at(lines, LAYOUT.codes_of(index)), factors, zeros }
    }

    #[inline(always)]
    fn quad<S: Dot>(simd: S, group: Packed<'_>, index: usize) -> S::Bytes {
        let biased = const { &Values::Minus(MIDDLE).biased(grouped::unpacked_bias::<S, Self>()) };
        biased.quad(simd, Bits::<8>::quad(simd, group.codes, index))
    }

    #[inline(always)]
    fn factor<S: Dot>(simd: S, group: Packed<'_>, index: usize) -> S::F32 {
        let factors = simd.load_f16(group.factors);
        if index == 0 {
            return factors;
        }
        // The product is exact: eleven bits times eight.
        simd.mul(factors, simd.sub(simd.load_f16(group.zeros), simd.splat(f32::from(MIDDLE))))
    }

    fn weight(lines: &[ByteLine], input: usize, row: usize) -> f32 {
        let group = input / GROUP;
        let (line, of_block) = LAYOUT.factors_of(group);
        let code = grouped::code::<Bits<8>>(&lines[LAYOUT.codes_of(group)..], input % GROUP, row);
        let zero = grouped::half_of(grouped::halves(lines, line + ZEROS, of_block), row);
        grouped::half_of(grouped::halves(lines, line, of_block), row) * (f32::from(code) - zero)
    }

    fn set_deviation(lines: &mut [ByteLine], groups: usize, deviation: f32) {
        // Divided by the root mean square of -128..=127.
        grouped::set_factors(lines, &LAYOUT, groups, deviation / 73.9);
        for group in 0..groups {
            let (line, of_block) = LAYOUT.factors_of(group);
            grouped::halves_mut(lines, line + ZEROS, of_block).fill(half::f16::from_f32(f32::from(MIDDLE)).to_bits());
        }
    }
}
