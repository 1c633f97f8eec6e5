//! int8: codes in -127..=127, without sub-scales; 8.0625 bits per weight.
//!
//! A block has a line for each of its quads. Codes are stored as code + 128, which the fastest instruction sets multiply
//! directly.

use super::integer::{BLOCK_QUADS, Codes, GROUP, IntegerFormat, PAIR_QUADS, Unpack};
use crate::arch::{ByteLine, Dot, LANES};

/// Offset of a stored code from its value.
const OFFSET: u8 = 128;

/// int8 format.
pub struct Int8;

impl Unpack for Int8 {
    const BY_CODES: Option<Codes> = None;
    const HAS_QUAD_LINES: bool = true;

    /// Lines from those of the block on.
    type Block<'a> = &'a [ByteLine];
    type Pair<'a, S: Dot> = &'a [ByteLine; PAIR_QUADS];

    #[inline(always)]
    fn first_line(index: usize) -> usize {
        index * BLOCK_QUADS
    }

    #[inline(always)]
    fn block(lines: &[ByteLine], index: usize) -> Self::Block<'_> {
        &lines[index * BLOCK_QUADS..]
    }

    #[inline(always)]
    fn pair<'a, S: Dot>(_: S, block: Self::Block<'a>, index: usize) -> Self::Pair<'a, S> {
        &block.as_chunks().0[index]
    }

    /// Codes as they are stored, with the bias of all matrix units.
    #[inline(always)]
    fn quad_lines<'a>(block: Self::Block<'a>) -> &'a [ByteLine] {
        block
    }

    #[inline(always)]
    fn quad<S: Dot>(simd: S, pair: Self::Pair<'_, S>, index: usize) -> S::Bytes {
        let stored = simd.load_bytes(&pair[index].0);
        if const { S::WEIGHT_BIAS == OFFSET } {
            stored
        } else {
            simd.xor(stored, simd.splat_byte(OFFSET ^ S::WEIGHT_BIAS))
        }
    }
}

impl IntegerFormat for Int8 {
    const CODES: [i32; 2] = [-127, 127];
    const SCALES: [i32; 2] = [1, 1];

    fn lines(halves: usize) -> usize {
        halves * BLOCK_QUADS / 2
    }

    fn store(lines: &mut [ByteLine], block: usize, group: usize, codes: &[[i8; LANES]; GROUP], _: &[u8; LANES]) {
        let quads = &mut lines[block * BLOCK_QUADS + group * GROUP / 4..][..GROUP / 4];
        for (input, codes) in codes.iter().enumerate() {
            for (row, code) in codes.iter().enumerate() {
                quads[input / 4].0[row * 4 + input % 4] = (*code as u8) ^ OFFSET;
            }
        }
    }

    fn weight(lines: &[ByteLine], block: usize, input: usize, row: usize) -> i32 {
        i32::from(lines[block * BLOCK_QUADS + input / 4].0[row * 4 + input % 4]) - i32::from(OFFSET)
    }
}
