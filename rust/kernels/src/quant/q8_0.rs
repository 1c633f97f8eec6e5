//! q8_0 of ggml: codes of -128..=127, an f16 factor for each 32 inputs. 8.5 bits a weight.
//!
//! Of each 128 inputs the factors are two lines, `[group][row]`, then eight lines a group hold codes as code + 128.

use super::grouped::{self, GROUP, GroupedFormat, Layout, StoredBlock, Whole};
use crate::arch::{ByteLine, LANES, Simd};

/// What a code is above its value.
const OFFSET: u8 = 128;

const LAYOUT: Layout = Layout { block_groups: 4, factors: 2, codes: 8 };

/// A stored block: the factor, f16, and the codes.
#[repr(C, packed)]
struct Stored(u16, [i8; GROUP]);

/// Sixteen rows of four blocks are as many lines as a block has bytes.
const _: () = assert!(size_of::<Stored>() == Q8_0::STORED.bytes && LAYOUT.lines(4) == Q8_0::STORED.bytes);

/// ggml's `block_q8_0`.
pub struct Q8_0;

/// A group to unpack.
#[derive(Clone, Copy)]
pub struct Packed<'a> {
    codes: &'a [ByteLine; 8],
    factors: &'a [u16; LANES],
}

impl GroupedFormat for Q8_0 {
    const STORED: StoredBlock = StoredBlock { inputs: GROUP, bytes: 34 };

    type Group<'a, S: Simd> = Packed<'a>;
    type Unpacked = Whole<false>;
    type ByCodes = Whole<false>;

    #[inline(always)]
    fn lines(groups: usize) -> usize {
        LAYOUT.lines(groups)
    }

    fn store(lines: &mut [ByteLine], index: usize, blocks: &[&[u8]; LANES]) {
        let (line, of_block) = LAYOUT.factors_of(index);
        for (row, block) in blocks.iter().enumerate() {
            grouped::halves_mut(lines, line, of_block)[row] = grouped::stored_half(block);
            let codes = block[2..].iter().map(|code| code ^ OFFSET);
            grouped::store_bytes(&mut lines[LAYOUT.codes_of(index)..], row, codes);
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
        grouped::quad_of_bytes(simd, group.codes, index)
    }

    #[inline(always)]
    fn factor<S: Simd>(simd: S, group: Packed<'_>, _: usize) -> S::F32 {
        simd.load_f16(group.factors)
    }

    fn weight(lines: &[ByteLine], input: usize, row: usize) -> f32 {
        let group = input / GROUP;
        let (line, of_block) = LAYOUT.factors_of(group);
        let code = grouped::byte(&lines[LAYOUT.codes_of(group)..], input % GROUP, row);
        grouped::half_of(grouped::halves(lines, line, of_block), row) * (f32::from(code) - f32::from(OFFSET))
    }

    fn level(lines: &mut [ByteLine], groups: usize, deviation: f32) {
        // The root mean square of -128..=127.
        grouped::level_halves(lines, &LAYOUT, groups, deviation / 73.9);
    }
}
