//! int4: codes in -8..=7 with sub-scales in 0..=15; 4.3125 bits per weight.
//!
//! A block is a line of sub-scales and sixteen lines of codes. Codes are stored as code + 8. A byte of code line i holds
//! quad 2i in its low half and quad 2i + 1 in its high half. Byte 16 j + r of the sub-scales belongs to row r: group 2j in
//! the low half, group 2j + 1 in the high half.

use super::integer::{BLOCK_QUADS, Codes, GROUP, IntegerFormat, Unpack};
use crate::arch::{ByteLine, Dot, LANES};

/// Offset of a stored code from its value.
const OFFSET: u8 = Codes::FourBits.offset() as u8;

/// Number of lines of the codes of a half block.
const HALF_LINES: usize = BLOCK_QUADS / 4;

/// Number of lines of a block.
const BLOCK_LINES: usize = 1 + 2 * HALF_LINES;

/// int4 format.
pub struct Int4;

/// Packed data of two groups.
#[derive(Clone, Copy)]
pub struct Pair<'a, S: Dot> {
    codes: &'a [ByteLine; 4],
    /// Sub-scales of each group, in the low byte of each pair of bytes.
    scales: [S::Bytes; 2],
    /// Difference of `sub-scale * stored code` and `sub-scale * code + bias` of each group, in each byte.
    offsets: [S::Bytes; 2],
}

impl Unpack for Int4 {
    const BY_CODES: Option<Codes> = Some(Codes::FourBits);

    /// Line of sub-scales, and lines of codes from those of the block on.
    type Block<'a> = (&'a ByteLine, &'a [ByteLine]);
    type Pair<'a, S: Dot> = Pair<'a, S>;

    #[inline(always)]
    fn first_line(index: usize) -> usize {
        index * BLOCK_LINES
    }

    #[inline(always)]
    fn block(lines: &[ByteLine], index: usize) -> Self::Block<'_> {
        lines[index * BLOCK_LINES..].split_first().expect("a line of sub-scales")
    }

    #[inline(always)]
    fn pair<'a, S: Dot>(simd: S, (scales, codes): Self::Block<'a>, index: usize) -> Self::Pair<'a, S> {
        let both = simd.spread(&scales.0.as_chunks().0[index]);
        let low = simd.splat_quad([0x0f, 0, 0x0f, 0]);
        let scales = [simd.and(both, low), simd.and(simd.shift_right::<4>(both), low)];
        // Products of values up to 15 fit a byte, so a product of byte pairs is two byte products.
        let offset =
            |scales| simd.xor(simd.mul_pairs(scales, simd.splat_byte(OFFSET)), simd.splat_byte(S::WEIGHT_BIAS));
        Pair { codes: &codes.as_chunks().0[index], scales, offsets: [offset(scales[0]), offset(scales[1])] }
    }

    #[inline(always)]
    fn quad<S: Dot>(simd: S, pair: Self::Pair<'_, S>, index: usize) -> S::Bytes {
        let (codes, group) = (Self::codes(simd, pair, index), index / (GROUP / 4));
        simd.sub_bytes(simd.mul_pairs(codes, pair.scales[group]), pair.offsets[group])
    }

    #[inline(always)]
    fn codes<S: Dot>(simd: S, pair: Self::Pair<'_, S>, index: usize) -> S::Bytes {
        let line = simd.load_bytes(&pair.codes[index / 2].0);
        let codes = if index.is_multiple_of(2) { line } else { simd.shift_right::<4>(line) };
        simd.and(codes, simd.splat_byte(0x0f))
    }

    #[inline(always)]
    fn scale<S: Dot>(_: S, pair: Self::Pair<'_, S>, index: usize) -> S::Bytes {
        pair.scales[index]
    }
}

impl IntegerFormat for Int4 {
    const CODES: [i32; 2] = [-8, 7];
    const SCALES: [i32; 2] = [0, 15];

    fn lines(halves: usize) -> usize {
        halves.div_ceil(2) + halves * HALF_LINES
    }

    fn store(lines: &mut [ByteLine], block: usize, group: usize, codes: &[[i8; LANES]; GROUP], scales: &[u8; LANES]) {
        let (scale_line, code_lines) = lines[block * BLOCK_LINES..].split_first_mut().expect("a line of sub-scales");
        for (row, scale) in scales.iter().enumerate() {
            scale_line.0[group / 2 * LANES + row] |= scale << (4 * (group % 2));
        }
        for (input, codes) in codes.iter().enumerate() {
            let quad = group * GROUP / 4 + input / 4;
            for (row, code) in codes.iter().enumerate() {
                let code = code.wrapping_add_unsigned(OFFSET) as u8;
                code_lines[quad / 2].0[row * 4 + input % 4] |= code << (4 * (quad % 2));
            }
        }
    }

    fn weight(lines: &[ByteLine], block: usize, input: usize, row: usize) -> i32 {
        let (scales, codes) = Self::block(lines, block);
        let (group, quad) = (input / GROUP, input / 4);
        let scale = scales.0[group / 2 * LANES + row] >> (4 * (group % 2)) & 0x0f;
        let code = codes[quad / 2].0[row * 4 + input % 4] >> (4 * (quad % 2)) & 0x0f;
        i32::from(scale) * (i32::from(code) - i32::from(OFFSET))
    }
}
