//! ggml's q8_0: codes in -128..=127 with an f16 scale for each 32 inputs; 8.5 bits per weight.
//!
//! Every 128 inputs have two lines of scales, `[group][row]`, then eight lines of codes per group, stored as code + 128.

use std::ops::RangeInclusive;

use super::Int8;
use super::grouped::{self, GROUP, GroupedFormat, Layout, StoredBlock, Whole};
use super::quantize::{Grid, not_finite};
use crate::arch::{ByteLine, Dot, Isa, Kernel, LANES, Simd};

/// Offset of a stored code from its value.
const OFFSET: u8 = 128;

const LAYOUT: Layout = Layout { block_groups: 4, factors: 2, codes: 8 };

/// Stored block: f16 scale, codes.
#[repr(C, packed)]
struct Stored(u16, [i8; GROUP]);

/// Packing is lossless: four blocks of sixteen rows take as many lines as a block has bytes.
const _: () = assert!(size_of::<Stored>() == Q8_0::STORED.bytes && LAYOUT.lines(4) == Q8_0::STORED.bytes);

/// q8_0 format: ggml's `block_q8_0`.
pub struct Q8_0;

/// Packed data of a group.
#[derive(Clone, Copy)]
pub struct Packed<'a> {
    codes: &'a [ByteLine; 8],
    factors: &'a [u16; LANES],
}

/// Candidate codes for the largest number of a group, which determine the scale.
const PEAK_CODES: RangeInclusive<u8> = 64..=127;

impl Q8_0 {
    /// Quantizes numbers to stored blocks.
    ///
    /// Numbers that were quantized before lie on a grid that the usual scale, absmax / 127, rarely matches. Of the scales
    /// that map the largest number to a code in 64..=127, the one with the least squared error is chosen: multiples of a
    /// scale by codes of up to seven bits are preserved exactly, FP8 numbers and 4-bit lookup values almost exactly. If a
    /// number is not finite, its whole group becomes NaN. All instruction sets give the same result.
    ///
    /// # Panics
    /// If `blocks` does not have one block for each 32 numbers.
    pub fn quantize(numbers: &[f32], blocks: &mut [u8]) {
        let (groups, rest) = numbers.as_chunks::<GROUP>();
        let (blocks, part) = blocks.as_chunks_mut::<{ Self::STORED.bytes }>();
        assert!(
            rest.is_empty() && part.is_empty() && groups.len() == blocks.len(),
            "blocks must have one block per group of 32"
        );
        Isa::best().run(Quantize { groups, blocks });
    }
}

/// Kernel that quantizes groups, sixteen at a time.
struct Quantize<'a> {
    groups: &'a [[f32; GROUP]],
    blocks: &'a mut [[u8; Q8_0::STORED.bytes]],
}

impl Kernel for Quantize<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let grid = Grid::new::<Int8>(simd);
        for (groups, blocks) in self.groups.chunks(LANES).zip(self.blocks.chunks_mut(LANES)) {
            let mut columns = [[[0.0; LANES]; GROUP / 2]; 2];
            for (lane, group) in groups.iter().enumerate() {
                for (column, value) in columns.as_flattened_mut().iter_mut().zip(group) {
                    column[lane] = *value;
                }
            }
            let largest = grid.peak(columns.as_flattened());
            let (mut best, mut least) = (simd.splat(0.0), simd.splat(f32::INFINITY));
            for code in PEAK_CODES.rev() {
                let scale = grid.to_f16(simd.div(largest, simd.splat(f32::from(code))));
                let [first, second] = &columns;
                let error =
                    simd.add(grid.error(first, scale, |_, error| error), grid.error(second, scale, |_, error| error));
                best = simd.select_greater(least, error, scale, best);
                least = simd.min(error, least);
            }
            let mut factors = [0; LANES];
            simd.store_f16(simd.add(best, not_finite(simd, &columns)), &mut factors);
            for (block, factor) in blocks.iter_mut().zip(factors) {
                block[..2].copy_from_slice(&factor.to_le_bytes());
            }
            let inverse = grid.inverse(best);
            for (input, column) in columns.as_flattened().iter().enumerate() {
                let mut codes = [0; LANES];
                simd.store_i8(simd.to_i32(grid.code(simd.load(column), inverse)), &mut codes);
                for (block, code) in blocks.iter_mut().zip(codes) {
                    block[2 + input] = code.cast_unsigned();
                }
            }
        }
    }
}

impl GroupedFormat for Q8_0 {
    const STORED: StoredBlock = StoredBlock { inputs: GROUP, bytes: 34 };

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
            let codes = block[2..].iter().map(|code| code ^ OFFSET);
            grouped::store_bytes(&mut lines[LAYOUT.codes_of(index)..], row, codes);
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
        grouped::quad_of_bytes(simd, group.codes, index)
    }

    #[inline(always)]
    fn factor<S: Dot>(simd: S, group: Packed<'_>, _: usize) -> S::F32 {
        simd.load_f16(group.factors)
    }

    fn weight(lines: &[ByteLine], input: usize, row: usize) -> f32 {
        let group = input / GROUP;
        let (line, of_block) = LAYOUT.factors_of(group);
        let code = grouped::byte(&lines[LAYOUT.codes_of(group)..], input % GROUP, row);
        grouped::half_of(grouped::halves(lines, line, of_block), row) * (f32::from(code) - f32::from(OFFSET))
    }

    fn set_deviation(lines: &mut [ByteLine], groups: usize, deviation: f32) {
        // Divided by the root mean square of -128..=127.
        grouped::set_factors(lines, &LAYOUT, groups, deviation / 73.9);
    }
}
