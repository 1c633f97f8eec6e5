//! q8_0 of ggml: codes of -128..=127, an f16 factor for each 32 inputs. 8.5 bits a weight.
//!
//! Of each 128 inputs the factors are two lines, `[group][row]`, then eight lines a group hold codes as code + 128.

use std::ops::RangeInclusive;

use super::Int8;
use super::grouped::{self, GROUP, GroupedFormat, Layout, StoredBlock, Whole};
use super::quantize::{Grid, not_finite};
use crate::arch::{ByteLine, Isa, Kernel, LANES, Simd};

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

/// Codes of a group's largest number that are tried, the finest step first.
const LARGEST: RangeInclusive<u8> = 64..=127;

impl Q8_0 {
    /// Numbers as stored blocks, as near as they come.
    ///
    /// What was quantized before lies on a grid of its own, which a step of largest number / 127 meets by chance. Of the
    /// steps with which the largest number is a code that has seven bits, the one with the least squared error is taken:
    /// whole numbers of up to seven bits come out as they are, floating-point numbers of eight and values of a table of
    /// sixteen nearly so. Of what is not finite nothing is finite in its group. Every instruction set finds the same.
    ///
    /// # Panics
    /// If `blocks` has not a block for each 32 numbers.
    pub fn quantize(numbers: &[f32], blocks: &mut [u8]) {
        let (groups, rest) = numbers.as_chunks::<GROUP>();
        let (blocks, part) = blocks.as_chunks_mut::<{ Self::STORED.bytes }>();
        assert!(rest.is_empty() && part.is_empty() && groups.len() == blocks.len(), "a block for each group");
        Isa::best().run(Quantize { groups, blocks });
    }
}

/// Quantizes groups, sixteen side by side.
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
            for code in LARGEST.rev() {
                let step = grid.to_f16(simd.div(largest, simd.splat(f32::from(code))));
                let [first, second] = &columns;
                let error =
                    simd.add(grid.error(first, step, |_, error| error), grid.error(second, step, |_, error| error));
                best = simd.select_greater(least, error, step, best);
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
