//! q8_0 of ggml: codes of -128..=127, an f16 factor for each 32 inputs. 8.5 bits a weight.
//!
//! Of each 128 inputs the factors are two lines, `[group][row]`, then eight lines a group hold codes as code + 128.

use std::ops::RangeInclusive;

use half::f16;

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

/// Codes of a group's largest number that are tried, the finest step first.
const LARGEST: RangeInclusive<u8> = 64..=127;

/// What moves an f32 of up to 2^22 so far up that it is rounded to a whole number, ties to even.
const ROUNDS: f32 = 1.5 * (1 << 23) as f32;

impl Q8_0 {
    /// Numbers as stored blocks, as near as they come.
    ///
    /// What was quantized before lies on a grid of its own, which a step of largest number / 127 meets by chance. Of the
    /// steps with which the largest number is a code that has seven bits, the one with the least squared error is taken:
    /// whole numbers of up to seven bits come out as they are, floating-point numbers of eight and values of a table of
    /// sixteen nearly so. Of what is not finite nothing is finite in its group.
    ///
    /// # Panics
    /// If `blocks` has not a block for each 32 numbers.
    pub fn quantize(numbers: &[f32], blocks: &mut [u8]) {
        let (groups, rest) = numbers.as_chunks::<GROUP>();
        let (blocks, part) = blocks.as_chunks_mut::<{ Self::STORED.bytes }>();
        assert!(rest.is_empty() && part.is_empty() && groups.len() == blocks.len(), "a block for each group");
        for (group, block) in groups.iter().zip(blocks) {
            let (step, codes) = nearest(group);
            let (factor, stored) = block.split_at_mut(2);
            factor.copy_from_slice(&step.to_le_bytes());
            stored.iter_mut().zip(codes).for_each(|(stored, code)| *stored = (code as i8).cast_unsigned());
        }
    }
}

/// The step and the codes, whole numbers of -127..=127, that are nearest to a group.
fn nearest(group: &[f32; GROUP]) -> (f16, [f32; GROUP]) {
    let largest = group.iter().fold(0.0f32, |largest, value| largest.max(value.abs()));
    if !group.iter().all(|value| value.is_finite()) {
        return (f16::NAN, [0.0; GROUP]);
    }
    // Where the step is 0 the error is NaN, and never less.
    let mut best = (f16::ZERO, [0.0; GROUP]);
    let mut least = f32::INFINITY;
    for code in LARGEST.rev() {
        let step = f16::from_f32(largest / f32::from(code));
        let (wide, inverse) = (step.to_f32(), 1.0 / step.to_f32());
        let codes = group.map(|value| (value * inverse).clamp(-127.0, 127.0) + ROUNDS - ROUNDS);
        let mut errors = [0.0; LANES];
        for (index, (value, code)) in group.iter().zip(&codes).enumerate() {
            let error = code * wide - value;
            errors[index % LANES] += error * error;
        }
        let error = errors.iter().sum::<f32>();
        if error < least {
            (best, least) = ((step, codes), error);
        }
    }
    best
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
