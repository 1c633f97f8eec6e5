//! ggml's iq4_nl: codes select one of sixteen non-uniform values, with an f16 scale for each 32 inputs; 4.5 bits per
//! weight.
//!
//! The layout is that of [`q4_0`](super::q4_0).

use super::grouped::{self, GROUP, GroupedFormat, Layout, StoredBlock, Whole};
use crate::arch::{ByteLine, Dot, LANES};

/// Values of the codes: ggml's `kvalues_iq4nl`.
const VALUES: [i8; 16] = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];

const LAYOUT: Layout = Layout { block_groups: 4, factors: 2, codes: 4 };

/// Stored block: f16 scale, and codes of the first and the last sixteen inputs in the low and high half of each byte.
#[repr(C, packed)]
struct Stored(u16, [u8; GROUP / 2]);

/// Packing is lossless: four blocks of sixteen rows take as many lines as a block has bytes.
const _: () = assert!(size_of::<Stored>() == Iq4Nl::STORED.bytes && LAYOUT.lines(4) == Iq4Nl::STORED.bytes);

/// iq4_nl format: ggml's `block_iq4_nl`.
pub struct Iq4Nl;

/// Packed data of a group.
#[derive(Clone, Copy)]
pub struct Packed<'a> {
    codes: &'a [ByteLine; 4],
    factors: &'a [u16; LANES],
}

impl GroupedFormat for Iq4Nl {
    const STORED: StoredBlock = StoredBlock { inputs: GROUP, bytes: 18 };

    type Group<'a, S: Dot> = Packed<'a>;
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
            grouped::store_nibbles(&mut lines[LAYOUT.codes_of(index)..], row, &grouped::stored_nibbles(&block[2..]));
        }
    }

    #[inline(always)]
    fn group<'a, S: Dot>(_: S, lines: &'a [ByteLine], index: usize) -> Packed<'a> {
        let (line, of_block) = LAYOUT.factors_of(index);
        let factors = grouped::halves(lines, line, of_block);
        Packed { codes: grouped::lines_at(lines, LAYOUT.codes_of(index)), factors }
    }

    #[inline(always)]
    fn quad<S: Dot>(simd: S, group: Packed<'_>, index: usize) -> S::Bytes {
        let table = const { &grouped::biased_table::<S, Self>(&VALUES) };
        simd.lookup(table, grouped::nibbles(simd, group.codes, index))
    }

    #[inline(always)]
    fn factor<S: Dot>(simd: S, group: Packed<'_>, _: usize) -> S::F32 {
        simd.load_f16(group.factors)
    }

    fn weight(lines: &[ByteLine], input: usize, row: usize) -> f32 {
        let group = input / GROUP;
        let (line, of_block) = LAYOUT.factors_of(group);
        let code = grouped::nibble(&lines[LAYOUT.codes_of(group)..], input % GROUP, row);
        grouped::half_of(grouped::halves(lines, line, of_block), row) * f32::from(VALUES[usize::from(code)])
    }

    fn set_deviation(lines: &mut [ByteLine], groups: usize, deviation: f32) {
        // Divided by the root mean square of the values.
        grouped::set_factors(lines, &LAYOUT, groups, deviation / 69.22);
    }
}
