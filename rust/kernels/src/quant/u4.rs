//! u4, the 4-bit format of GPTQ, AWQ and compressed-tensors: codes in 0..=15 with an f16 scale and a zero point for each
//! 32 inputs; 4.75 bits per weight. Larger groups of a checkpoint repeat their scale and zero point.
//!
//! Every 128 inputs have two lines of scales, `[group][row]`, and one line of zero points, then four lines of codes per
//! group.

use super::blocks::{nibble, stored_half};
use super::grouped::{self, GROUP, GroupedFormat, Layout, StoredBlock, Whole};
use super::planes::{BitPlanes, Bits};
use crate::arch::{ByteLine, Dot, LANES};

/// Highest zero point: one more than the highest code, as in GPTQ.
const MAX_ZERO_POINT: u8 = 16;

const LAYOUT: Layout = Layout { block_groups: 4, shared: 0, factors: 3, codes: 4 };

/// Line of the zero points, relative to the first line of the block.
const ZEROS: usize = 2;

/// Stored block: f16 scale, zero point, and codes of the first and the last sixteen inputs in the low and high half of
/// each byte.
#[repr(C, packed)]
struct Stored(u16, u8, [u8; GROUP / 2]);

/// Packing is lossless: four blocks of sixteen rows take as many lines as a block has bytes.
const _: () = assert!(size_of::<Stored>() == U4::STORED.bytes && LAYOUT.lines(4) == U4::STORED.bytes);

/// u4 format: 4-bit codes with zero points.
pub struct U4;

/// Packed data of a group.
#[derive(Clone, Copy)]
pub struct Packed<'a, S: Dot> {
    codes: &'a [ByteLine; 4],
    factors: &'a [u16; LANES],
    /// Zero points minus the bias of unpacked bytes. A code minus its zero point is still small, so no offset is needed.
    zero_points: S::Bytes,
}

impl GroupedFormat for U4 {
    const STORED: StoredBlock = StoredBlock { inputs: GROUP, bytes: 19 };
    const UNROLLED: bool = false;
    const TURNS: bool = false;

    type Group<'a, S: Dot> = Packed<'a, S>;
    type Unpacked = Whole<false>;
    type ByCodes = Whole<true>;

    #[inline(always)]
    fn lines(groups: usize) -> usize {
        LAYOUT.lines(groups)
    }

    fn store(lines: &mut [ByteLine], index: usize, blocks: &[&[u8]; LANES]) {
        let (line, of_block) = LAYOUT.factors_of(index);
        for (row, block) in blocks.iter().enumerate() {
            let zero = block[2];
            assert!(zero <= MAX_ZERO_POINT, "zero point must be <= {MAX_ZERO_POINT}, got {zero}");
            grouped::halves_mut(lines, line, of_block)[row] = stored_half(block);
            grouped::bytes_mut(lines, line + ZEROS, of_block)[row] = zero;
            grouped::store_codes::<Bits<4>>(&mut lines[LAYOUT.codes_of(index)..], row, |input| {
                nibble(&block[3..], input)
            });
        }
    }

    #[inline(always)]
    fn group<'a, S: Dot>(simd: S, lines: &'a [ByteLine], index: usize) -> Packed<'a, S> {
        let (line, of_block) = LAYOUT.factors_of(index);
        let zeros = simd.spread(grouped::bytes(lines, line + ZEROS, of_block));
        let zero_points = simd.sub_bytes(zeros, simd.splat_byte(const { grouped::unpacked_bias::<S, Self>() }));
        let factors = grouped::halves(lines, line, of_block);
        Packed { codes: grouped::lines_at(lines, LAYOUT.codes_of(index)), factors, zero_points }
    }

    #[inline(always)]
    fn quad<S: Dot>(simd: S, group: Packed<'_, S>, index: usize) -> S::Bytes {
        simd.sub_bytes(Bits::<4>::quad(simd, group.codes, index), group.zero_points)
    }

    #[inline(always)]
    fn factor<S: Dot>(simd: S, group: Packed<'_, S>, _: usize) -> S::F32 {
        simd.load_f16(group.factors)
    }

    fn weight(lines: &[ByteLine], input: usize, row: usize) -> f32 {
        let group = input / GROUP;
        let (line, of_block) = LAYOUT.factors_of(group);
        let code = grouped::code::<Bits<4>>(&lines[LAYOUT.codes_of(group)..], input % GROUP, row);
        let zero = grouped::bytes(lines, line + ZEROS, of_block)[row];
        grouped::half_of(grouped::halves(lines, line, of_block), row) * (f32::from(code) - f32::from(zero))
    }

    fn set_deviation(lines: &mut [ByteLine], groups: usize, deviation: f32) {
        // Divided by the root mean square of -8..=7.
        grouped::set_factors(lines, &LAYOUT, groups, deviation / 4.637);
        for group in 0..groups {
            let (line, of_block) = LAYOUT.factors_of(group);
            grouped::bytes_mut(lines, line + ZEROS, of_block).fill(MAX_ZERO_POINT / 2);
        }
    }
}
