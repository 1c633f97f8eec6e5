//! u4, what GPTQ, AWQ and compressed-tensors make of four bits: codes of 0..=15 of which a zero point is subtracted, an
//! f16 factor and a zero point for each 32 inputs. Coarser groups repeat theirs. 4.75 bits a weight.
//!
//! Of each 128 inputs the factors are two lines, `[group][row]`, the zero points a third; then four lines a group hold
//! codes.

use super::grouped::{self, GROUP, GroupedFormat, Layout, StoredBlock, Whole};
use crate::arch::{ByteLine, LANES, Simd};

/// The highest zero point: one above the codes, as GPTQ has it.
const HIGHEST_ZERO: u8 = 16;

const LAYOUT: Layout = Layout { block_groups: 4, factors: 3, codes: 4 };

/// The line of the zero points, from the block's first on.
const ZEROS: usize = 2;

/// A stored block: the factor, f16, the zero point, and the codes of its first and its last sixteen inputs, low and high
/// in each byte.
#[repr(C, packed)]
struct Stored(u16, u8, [u8; GROUP / 2]);

/// Sixteen rows of four blocks are as many lines as a block has bytes.
const _: () = assert!(size_of::<Stored>() == U4::STORED.bytes && LAYOUT.lines(4) == U4::STORED.bytes);

/// Four bits a code, with zero points.
pub struct U4;

/// A group to unpack.
#[derive(Clone, Copy)]
pub struct Packed<'a, S: Simd> {
    codes: &'a [ByteLine; 4],
    factors: &'a [u16; LANES],
    /// What codes are above the bytes to multiply: a code less its zero point still is a small number, and there is no need
    /// of offsets.
    above: S::Bytes,
}

impl GroupedFormat for U4 {
    const STORED: StoredBlock = StoredBlock { inputs: GROUP, bytes: 19 };

    type Group<'a, S: Simd> = Packed<'a, S>;
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
            assert!(zero <= HIGHEST_ZERO, "a zero point of {zero}; the highest is {HIGHEST_ZERO}");
            grouped::halves_mut(lines, line, of_block)[row] = grouped::stored_half(block);
            grouped::bytes_mut(lines, line + ZEROS, of_block)[row] = zero;
            grouped::store_nibbles(&mut lines[LAYOUT.codes_of(index)..], row, &grouped::stored_nibbles(&block[3..]));
        }
    }

    #[inline(always)]
    fn group<'a, S: Simd>(simd: S, lines: &'a [ByteLine], index: usize) -> Packed<'a, S> {
        let (line, of_block) = LAYOUT.factors_of(index);
        let zeros = simd.spread(grouped::bytes(lines, line + ZEROS, of_block));
        let above = simd.sub_bytes(zeros, simd.splat_byte(const { grouped::raise::<S, Self>() }));
        let factors = grouped::halves(lines, line, of_block);
        Packed { codes: grouped::lines_at(lines, LAYOUT.codes_of(index)), factors, above }
    }

    #[inline(always)]
    fn quad<S: Simd>(simd: S, group: Packed<'_, S>, index: usize) -> S::Bytes {
        simd.sub_bytes(grouped::nibbles(simd, group.codes, index), group.above)
    }

    #[inline(always)]
    fn factor<S: Simd>(simd: S, group: Packed<'_, S>, _: usize) -> S::F32 {
        simd.load_f16(group.factors)
    }

    fn weight(lines: &[ByteLine], input: usize, row: usize) -> f32 {
        let group = input / GROUP;
        let (line, of_block) = LAYOUT.factors_of(group);
        let code = grouped::nibble(&lines[LAYOUT.codes_of(group)..], input % GROUP, row);
        let zero = grouped::bytes(lines, line + ZEROS, of_block)[row];
        grouped::half_of(grouped::halves(lines, line, of_block), row) * (f32::from(code) - f32::from(zero))
    }

    fn level(lines: &mut [ByteLine], groups: usize, deviation: f32) {
        // The root mean square of -8..=7.
        grouped::level_halves(lines, &LAYOUT, groups, deviation / 4.637);
        for group in 0..groups {
            let (line, of_block) = LAYOUT.factors_of(group);
            grouped::bytes_mut(lines, line + ZEROS, of_block).fill(HIGHEST_ZERO / 2);
        }
    }
}
