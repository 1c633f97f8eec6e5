//! int6: codes in -32..=31 with sub-scales in 1..=4; 6.1875 bits per weight.
//!
//! The sub-scales are described in [`two_bit_scales`](super::two_bit_scales). Codes are stored as code + 32. A group takes
//! three lines: the low four bits of its four quads, arranged as in int4, then the upper two bits, those of quad q in bits
//! 2q and 2q + 1 of each byte.

use super::integer::{BLOCK, Codes, GROUP, IntegerFormat, Unpack};
use super::two_bit_scales::{Block, PairScales, TwoBitScales};
use crate::arch::{ByteLine, Dot, LANES};

/// Offset of a stored code from its value.
const OFFSET: u8 = Codes::SixBits.offset() as u8;

const GROUP_LINES: usize = 3;

/// Number of lines of the codes of a block.
const BLOCK_LINES: usize = BLOCK / GROUP * GROUP_LINES;

const LAYOUT: TwoBitScales = TwoBitScales { code_lines: BLOCK_LINES, lowest: 1, offset: OFFSET };

/// int6 format.
pub struct Int6;

/// Packed data of two groups.
#[derive(Clone, Copy)]
pub struct Pair<'a, S: Dot> {
    codes: &'a [ByteLine; 2 * GROUP_LINES],
    scales: PairScales<S>,
}

impl Unpack for Int6 {
    const BY_CODES: Option<Codes> = Some(Codes::SixBits);

    type Block<'a> = Block<'a>;
    type Pair<'a, S: Dot> = Pair<'a, S>;

    #[inline(always)]
    fn first_line(index: usize) -> usize {
        LAYOUT.first_line(index)
    }

    #[inline(always)]
    fn block(lines: &[ByteLine], index: usize) -> Self::Block<'_> {
        LAYOUT.block(lines, index)
    }

    #[inline(always)]
    fn pair<'a, S: Dot>(simd: S, block: Self::Block<'a>, index: usize) -> Self::Pair<'a, S> {
        Pair { codes: &block.codes.as_chunks().0[index], scales: LAYOUT.pair(simd, block, index) }
    }

    #[inline(always)]
    fn quad<S: Dot>(simd: S, pair: Self::Pair<'_, S>, index: usize) -> S::Bytes {
        pair.scales.weights(simd, Self::codes(simd, pair, index), index / (GROUP / 4))
    }

    #[inline(always)]
    fn codes<S: Dot>(simd: S, pair: Self::Pair<'_, S>, index: usize) -> S::Bytes {
        let (group, quad) = (index / (GROUP / 4), index % (GROUP / 4));
        let lines = &pair.codes.as_chunks::<GROUP_LINES>().0[group];
        let low = simd.load_bytes(&lines[quad / 2].0);
        let low = if quad.is_multiple_of(2) { low } else { simd.shift_right::<4>(low) };
        let high = simd.load_bytes(&lines[2].0);
        let high = match quad {
            0 => simd.shift_left::<4>(high),
            1 => simd.shift_left::<2>(high),
            2 => high,
            _ => simd.shift_right::<2>(high),
        };
        simd.or(simd.and(low, simd.splat_byte(0x0f)), simd.and(high, simd.splat_byte(0x30)))
    }

    #[inline(always)]
    fn scale<S: Dot>(_: S, pair: Self::Pair<'_, S>, index: usize) -> S::Bytes {
        pair.scales.scales[index]
    }
}

impl IntegerFormat for Int6 {
    const CODES: [i32; 2] = [-32, 31];
    const SCALES: [i32; 2] = LAYOUT.range();

    fn lines(halves: usize) -> usize {
        LAYOUT.lines(halves)
    }

    fn store(lines: &mut [ByteLine], block: usize, group: usize, codes: &[[i8; LANES]; GROUP], scales: &[u8; LANES]) {
        LAYOUT.store(lines, block, group, scales);
        let lines = &mut lines[LAYOUT.first_code_line(block) + group * GROUP_LINES..][..GROUP_LINES];
        for (input, codes) in codes.iter().enumerate() {
            let quad = input / 4;
            for (row, code) in codes.iter().enumerate() {
                let (byte, code) = (row * 4 + input % 4, code.wrapping_add_unsigned(OFFSET) as u8);
                lines[quad / 2].0[byte] |= (code & 0x0f) << (4 * (quad % 2));
                lines[2].0[byte] |= (code >> 4) << (2 * quad);
            }
        }
    }

    fn weight(lines: &[ByteLine], block: usize, input: usize, row: usize) -> i32 {
        let group = input / GROUP;
        let scale = LAYOUT.scale(lines, block, group, row);
        let lines = &lines[LAYOUT.first_code_line(block) + group * GROUP_LINES..][..GROUP_LINES];
        let (quad, byte) = (input % GROUP / 4, row * 4 + input % 4);
        let low = lines[quad / 2].0[byte] >> (4 * (quad % 2)) & 0x0f;
        let high = lines[2].0[byte] >> (2 * quad) & 3;
        scale * (i32::from(high << 4 | low) - i32::from(OFFSET))
    }
}
