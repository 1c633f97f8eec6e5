//! q4_0 of ggml: codes of -8..=7, an f16 factor for each 32 inputs. 4.5 bits a weight.
//!
//! Of each 128 inputs the factors are two lines, `[group][row]`, then four lines a group hold codes as code + 8.

use super::grouped::{self, GROUP, GroupedFormat, Layout, StoredBlock, Whole};
use crate::arch::{ByteLine, LANES, Simd};

/// What a stored code is above its value.
const OFFSET: u8 = 8;

const LAYOUT: Layout = Layout { block_groups: 4, factors: 2, codes: 4 };

/// A stored block: the factor, f16, and the codes of its first and its last sixteen inputs, low and high in each byte.
#[repr(C, packed)]
struct Stored(u16, [u8; GROUP / 2]);

/// Sixteen rows of four blocks are as many lines as a block has bytes.
const _: () = assert!(size_of::<Stored>() == Q4_0::STORED.bytes && LAYOUT.lines(4) == Q4_0::STORED.bytes);

/// ggml's `block_q4_0`.
pub struct Q4_0;

/// A group to unpack.
#[derive(Clone, Copy)]
pub struct Packed<'a> {
    codes: &'a [ByteLine; 4],
    factors: &'a [u16; LANES],
}

impl GroupedFormat for Q4_0 {
    const STORED: StoredBlock = StoredBlock { inputs: GROUP, bytes: 18 };

    type Group<'a, S: Simd> = Packed<'a>;
    type Unpacked = Whole<false>;
    type ByCodes = Whole<true>;

    #[inline(always)]
    fn lines(groups: usize) -> usize {
        LAYOUT.lines(groups)
    }

    fn store(lines: &mut [ByteLine], index: usize, blocks: &[&[u8]; LANES]) {
        let (line, of_block) = LAYOUT.factors_of(index);
        for (row, block) in blocks.iter().enumerate() {
            grouped::halves_mut(lines, line, of_block)[row] = grouped::stored_half(block);
            grouped::store_nibbles(&mut lines[LAYOUT.codes_of(index)..], row, &grouped::stored_nibbles(&block[2..]));
        }
    }

    #[inline(always)]
    fn group<'a, S: Simd>(_: S, lines: &'a [ByteLine], index: usize) -> Packed<'a> {
        let (line, of_block) = LAYOUT.factors_of(index);
        let factors = grouped::halves(lines, line, of_block);
        Packed { codes: grouped::lines_at(lines, LAYOUT.codes_of(index)), factors }
    }

    #[inline(always)]
    fn quad<S: Simd>(simd: S, group: Packed<'_>, index: usize) -> S::Bytes {
        let above = simd.splat_byte(const { OFFSET.wrapping_sub(grouped::raise::<S, Self>()) });
        simd.sub_bytes(grouped::nibbles(simd, group.codes, index), above)
    }

    #[inline(always)]
    fn factor<S: Simd>(simd: S, group: Packed<'_>, _: usize) -> S::F32 {
        simd.load_f16(group.factors)
    }

    fn weight(lines: &[ByteLine], input: usize, row: usize) -> f32 {
        let group = input / GROUP;
        let (line, of_block) = LAYOUT.factors_of(group);
        let code = grouped::nibble(&lines[LAYOUT.codes_of(group)..], input % GROUP, row);
        grouped::half_of(grouped::halves(lines, line, of_block), row) * (f32::from(code) - f32::from(OFFSET))
    }

    fn level(lines: &mut [ByteLine], groups: usize, deviation: f32) {
        // The root mean square of -8..=7.
        grouped::level_halves(lines, &LAYOUT, groups, deviation / 4.637);
    }
}
