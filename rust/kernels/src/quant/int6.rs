//! int6: codes in -32..=31 with sub-scales in 1..=4; 6.1875 bits per weight.
//!
//! A super-block is a line of sub-scales, then the codes of its one or two blocks. Codes are stored as code + 32. A group
//! takes three lines: the low four bits of its four quads, arranged as in int4, then the upper two bits, those of quad q
//! in bits 2q and 2q + 1 of each byte. Byte 16 j + r of the sub-scales belongs to row r and holds the sub-scale minus 1 of
//! group 4j + i in bits 2i and 2i + 1.

use super::integer::{BLOCK, Codes, GROUP, IntegerFormat, SUPER, Unpack};
use crate::arch::{ByteLine, Dot, LANES};

/// Offset of a stored code from its value.
const OFFSET: u8 = Codes::SixBits.offset() as u8;

const GROUP_LINES: usize = 3;

/// Number of lines of the codes of a block.
const BLOCK_LINES: usize = BLOCK / GROUP * GROUP_LINES;

const SUPER_BLOCKS: usize = SUPER / BLOCK;

const SUPER_LINES: usize = 1 + SUPER_BLOCKS * BLOCK_LINES;

/// int6 format.
pub struct Int6;

/// Packed block: its codes and its half of the sub-scales.
#[derive(Clone, Copy)]
pub struct Block<'a> {
    scales: &'a [[u8; LANES]; 2],
    codes: &'a [ByteLine; BLOCK_LINES],
}

/// Packed data of two groups.
#[derive(Clone, Copy)]
pub struct Pair<'a, S: Dot> {
    codes: &'a [ByteLine; 2 * GROUP_LINES],
    /// Sub-scales of each group, in the low byte of each pair of bytes.
    scales: [S::Bytes; 2],
    /// Difference of `sub-scale * stored code` and `sub-scale * code + bias` of each group, in each byte.
    offsets: [S::Bytes; 2],
}

/// Returns the first line of the codes of a block.
#[inline(always)]
fn first_code_line(index: usize) -> usize {
    index / SUPER_BLOCKS * SUPER_LINES + 1 + index % SUPER_BLOCKS * BLOCK_LINES
}

impl Unpack for Int6 {
    const BY_CODES: Option<Codes> = Some(Codes::SixBits);

    type Block<'a> = Block<'a>;
    type Pair<'a, S: Dot> = Pair<'a, S>;

    #[inline(always)]
    fn first_line(index: usize) -> usize {
        first_code_line(index) - usize::from(index.is_multiple_of(SUPER_BLOCKS))
    }

    #[inline(always)]
    fn block(lines: &[ByteLine], index: usize) -> Self::Block<'_> {
        let scales = lines[index / SUPER_BLOCKS * SUPER_LINES].0.as_chunks::<LANES>().0;
        Block {
            scales: &scales.as_chunks().0[index % SUPER_BLOCKS],
            codes: lines[first_code_line(index)..].first_chunk().expect("a whole block"),
        }
    }

    #[inline(always)]
    fn pair<'a, S: Dot>(simd: S, block: Self::Block<'a>, index: usize) -> Self::Pair<'a, S> {
        let four = simd.spread(&block.scales[index / 2]);
        let two = if index.is_multiple_of(2) { four } else { simd.shift_right::<4>(four) };
        let low = simd.splat_quad([0x03, 0, 0x03, 0]);
        let plus_one = |scales| simd.sub_bytes(simd.and(scales, low), simd.splat_quad([-1, 0, -1, 0]));
        let scales = [plus_one(two), plus_one(simd.shift_right::<2>(two))];
        // 63 times 4 fits a byte, so a product of byte pairs is two byte products.
        let offset =
            |scales| simd.xor(simd.mul_pairs(scales, simd.splat_byte(OFFSET)), simd.splat_byte(S::WEIGHT_BIAS));
        Pair { codes: &block.codes.as_chunks().0[index], scales, offsets: [offset(scales[0]), offset(scales[1])] }
    }

    #[inline(always)]
    fn quad<S: Dot>(simd: S, pair: Self::Pair<'_, S>, index: usize) -> S::Bytes {
        let (codes, group) = (Self::codes(simd, pair, index), index / (GROUP / 4));
        simd.sub_bytes(simd.mul_pairs(codes, pair.scales[group]), pair.offsets[group])
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
        pair.scales[index]
    }
}

impl IntegerFormat for Int6 {
    const CODES: [i32; 2] = [-32, 31];
    const SCALES: [i32; 2] = [1, 4];

    fn lines(blocks: usize) -> usize {
        blocks.div_ceil(SUPER_BLOCKS) + blocks * BLOCK_LINES
    }

    fn store(lines: &mut [ByteLine], block: usize, group: usize, codes: &[[i8; LANES]; GROUP], scales: &[u8; LANES]) {
        let of_super = block % SUPER_BLOCKS * (BLOCK / GROUP) + group;
        let scale_line = &mut lines[block / SUPER_BLOCKS * SUPER_LINES];
        for (row, scale) in scales.iter().enumerate() {
            scale_line.0[of_super / 4 * LANES + row] |= (scale - 1) << (2 * (of_super % 4));
        }
        let lines = &mut lines[first_code_line(block) + group * GROUP_LINES..][..GROUP_LINES];
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
        let of_super = block % SUPER_BLOCKS * (BLOCK / GROUP) + group;
        let scale = lines[block / SUPER_BLOCKS * SUPER_LINES].0[of_super / 4 * LANES + row] >> (2 * (of_super % 4)) & 3;
        let lines = &lines[first_code_line(block) + group * GROUP_LINES..][..GROUP_LINES];
        let (quad, byte) = (input % GROUP / 4, row * 4 + input % 4);
        let low = lines[quad / 2].0[byte] >> (4 * (quad % 2)) & 0x0f;
        let high = lines[2].0[byte] >> (2 * quad) & 3;
        (i32::from(scale) + 1) * (i32::from(high << 4 | low) - i32::from(OFFSET))
    }
}
