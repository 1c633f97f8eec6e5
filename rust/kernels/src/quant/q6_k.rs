//! ggml's q6_k: codes in -32..=31 with a sub-scale in -128..=127 for each 16 inputs, and an f16 scale for 256 inputs;
//! 6.5625 bits per weight.
//!
//! Every 256 inputs have four lines of sub-scales, `[half group][row]`, then six lines of codes per group. Every second
//! block is preceded by a line with its scales and those of the next block. Codes are stored as code + 32. Each half of a
//! group takes three lines, as in int6: the low four bits of its four quads in two lines, and the upper two bits of quad q
//! in bits 2q and 2q + 1 of the third.

use super::grouped::{self, GROUP, GroupedFormat, Halves, StoredBlock};
use super::integer::Codes;
use crate::arch::{ByteLine, Dot, LANES};

/// Offset of a stored code from its value.
const OFFSET: u8 = Codes::SixBits.offset() as u8;

/// Number of inputs of a block.
const INPUTS: usize = 256;

/// Number of groups of a block.
const GROUPS: usize = INPUTS / GROUP;

/// Number of inputs that share a sub-scale.
const HALF: usize = GROUP / 2;

/// Number of lines of the codes of half a group.
const HALF_LINES: usize = 3;

/// Number of lines of the sub-scales of a block.
const SCALE_LINES: usize = 4;

/// Number of lines of a block, without scales.
const BLOCK_LINES: usize = SCALE_LINES + GROUPS * 2 * HALF_LINES;

/// Stored block: low bits of codes, high bits of codes, sub-scales, f16 scale.
#[repr(C, packed)]
struct Stored([u8; INPUTS / 2], [u8; INPUTS / 4], [i8; INPUTS / HALF], u16);

/// Packing is lossless: two blocks of sixteen rows share a line of scales.
const _: () =
    assert!(size_of::<Stored>() == Q6K::STORED.bytes && 2 * 16 * size_of::<Stored>() == 64 * (1 + 2 * BLOCK_LINES));

/// q6_k format: ggml's `block_q6_K`.
pub struct Q6K;

/// Returns the line of the scales of a block, the index of its scale in that line, and the first line of its sub-scales.
#[inline(always)]
fn first_lines(block: usize) -> (usize, usize, usize) {
    let (pair, second) = (block / 2, block % 2);
    let factors = pair * (1 + 2 * BLOCK_LINES);
    (factors, second, factors + 1 + second * BLOCK_LINES)
}

/// Returns the first line of the codes of half a group.
#[inline(always)]
fn codes_of(group: usize, half: usize) -> usize {
    first_lines(group / GROUPS).2 + SCALE_LINES + (group % GROUPS * 2 + half) * HALF_LINES
}

/// Returns the stored code, 0..=63, of input `input` of a stored block.
fn stored_code(block: &[u8], input: usize) -> u8 {
    let (half, quarter, at) = (input / 128, input % 128 / 32, input % 32);
    let low = block[half * 64 + quarter % 2 * 32 + at] >> (4 * (quarter / 2)) & 0x0f;
    let high = block[INPUTS / 2 + half * 32 + at] >> (2 * quarter) & 0x03;
    low | high << 4
}

/// Packed data of a group.
#[derive(Clone, Copy)]
pub struct Packed<'a> {
    codes: &'a [ByteLine; 2 * HALF_LINES],
    factors: &'a [u16; LANES],
    /// Sub-scales of both halves.
    scales: [&'a [i8; LANES]; 2],
}

impl GroupedFormat for Q6K {
    const STORED: StoredBlock = StoredBlock { inputs: INPUTS, bytes: 210 };

    type Group<'a, S: Dot> = Packed<'a>;
    type Unpacked = Halves<false>;
    type ByCodes = Halves<true>;

    #[inline(always)]
    fn lines(groups: usize) -> usize {
        let (blocks, rest) = (groups / GROUPS, groups % GROUPS);
        let begun = if rest > 0 { SCALE_LINES + rest * 2 * HALF_LINES } else { 0 };
        groups.div_ceil(2 * GROUPS) + blocks * BLOCK_LINES + begun
    }

    fn store(lines: &mut [ByteLine], index: usize, blocks: &[&[u8]; LANES]) {
        let (factors, which, scales) = first_lines(index);
        for (row, block) in blocks.iter().enumerate() {
            let (codes, rest) = block.split_at(INPUTS / 2 + INPUTS / 4);
            let (stored_scales, factor) = rest.split_at(INPUTS / HALF);
            grouped::halves_mut(lines, factors, which)[row] = grouped::stored_half(factor);
            for (half, scale) in stored_scales.iter().enumerate() {
                grouped::bytes_mut(lines, scales, half)[row] = *scale;
            }
            for input in 0..INPUTS {
                let (code, quad) = (stored_code(codes, input), input % HALF / 4);
                let lines = &mut lines[codes_of(index * GROUPS + input / GROUP, input % GROUP / HALF)..];
                let byte = row * 4 + input % 4;
                lines[quad / 2].0[byte] |= (code & 0x0f) << (4 * (quad % 2));
                lines[2].0[byte] |= (code >> 4) << (2 * quad);
            }
        }
    }

    #[inline(always)]
    fn group<'a, S: Dot>(_: S, lines: &'a [ByteLine], index: usize) -> Packed<'a> {
        let (factors, which, scales) = first_lines(index / GROUPS);
        let of_half = |half| bytemuck::cast_ref(grouped::bytes(lines, scales, index % GROUPS * 2 + half));
        Packed {
            codes: grouped::lines_at(lines, codes_of(index, 0)),
            factors: grouped::halves(lines, factors, which),
            scales: [of_half(0), of_half(1)],
        }
    }

    #[inline(always)]
    fn quad<S: Dot>(simd: S, group: Packed<'_>, index: usize) -> S::Bytes {
        let (half, quad) = (index / (HALF / 4), index % (HALF / 4));
        let lines = &group.codes.as_chunks::<HALF_LINES>().0[half];
        let low = simd.load_bytes(&lines[quad / 2].0);
        let low = if quad.is_multiple_of(2) { low } else { simd.shift_right::<4>(low) };
        let high = simd.load_bytes(&lines[2].0);
        let high = match quad {
            0 => simd.shift_left::<4>(high),
            1 => simd.shift_left::<2>(high),
            2 => high,
            _ => simd.shift_right::<2>(high),
        };
        let code = simd.or(simd.and(low, simd.splat_byte(0x0f)), simd.and(high, simd.splat_byte(0x30)));
        let offset = const { OFFSET.wrapping_sub(grouped::unpacked_bias::<S, Self>()) };
        if offset == 0 { code } else { simd.sub_bytes(code, simd.splat_byte(offset)) }
    }

    /// Returns a factor. The product is exact: eleven bits times eight.
    #[inline(always)]
    fn factor<S: Dot>(simd: S, group: Packed<'_>, index: usize) -> S::F32 {
        simd.mul(simd.load_f16(group.factors), simd.to_f32(simd.load_i8(group.scales[index])))
    }

    fn weight(lines: &[ByteLine], input: usize, row: usize) -> f32 {
        let (factors, which, scales) = first_lines(input / INPUTS);
        let scale = grouped::bytes(lines, scales, input % INPUTS / HALF)[row] as i8;
        let codes = &lines[codes_of(input / GROUP, input % GROUP / HALF)..];
        let (quad, byte) = (input % HALF / 4, row * 4 + input % 4);
        let low = codes[quad / 2].0[byte] >> (4 * (quad % 2)) & 0x0f;
        let high = codes[2].0[byte] >> (2 * quad) & 0x03;
        let factor = grouped::half_of(grouped::halves(lines, factors, which), row) * f32::from(scale);
        factor * (f32::from(high << 4 | low) - f32::from(OFFSET))
    }

    fn set_deviation(lines: &mut [ByteLine], groups: usize, deviation: f32) {
        for block in 0..groups / GROUPS {
            let (factors, which, _) = first_lines(block);
            // Divided by the root mean square of -32..=31 times that of -128..=127.
            let factor = half::f16::from_f32(deviation / 1366.0).to_bits();
            grouped::halves_mut(lines, factors, which).fill(factor);
        }
    }
}
