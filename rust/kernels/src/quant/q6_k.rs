//! q6_k of ggml: codes of -32..=31 times a sub-scale of -128..=127 for each 16 inputs; an f16 factor for 256 inputs. 6.5625
//! bits a weight.
//!
//! Of each 256 inputs there are first four lines of sub-scales, `[half group][row]`, and before those of every other 256
//! a line of factors, their own and those of the next. Then six lines a group hold codes, kept as code + 32: of each half
//! three as int6 keeps them, the low four bits of its four quads in two and the upper two of quad q in bits 2q and
//! 2q + 1 of the third.

use super::grouped::{self, GROUP, GroupedFormat, Halves, StoredBlock};
use super::integer::Codes;
use crate::arch::{ByteLine, LANES, Simd};

/// What a stored code is above its value.
const OFFSET: u8 = Codes::SixBits.offset() as u8;

/// Inputs of a block.
const INPUTS: usize = 256;

/// Groups of a block.
const GROUPS: usize = INPUTS / GROUP;

/// Inputs that share a sub-scale.
const HALF: usize = GROUP / 2;

/// Lines of the codes of half a group.
const HALF_LINES: usize = 3;

/// Lines of a block's sub-scales.
const SCALE_LINES: usize = 4;

/// Lines of a block, without the factors.
const BLOCK_LINES: usize = SCALE_LINES + GROUPS * 2 * HALF_LINES;

/// A stored block: low bits of the codes, high bits, sub-scales and the factor, f16.
#[repr(C, packed)]
struct Stored([u8; INPUTS / 2], [u8; INPUTS / 4], [i8; INPUTS / HALF], u16);

/// Two blocks of sixteen rows share a line.
const _: () =
    assert!(size_of::<Stored>() == Q6K::STORED.bytes && 2 * 16 * size_of::<Stored>() == 64 * (1 + 2 * BLOCK_LINES));

/// ggml's `block_q6_K`.
pub struct Q6K;

/// The line of a block's factor, with the factor's number in it, and the first of its sub-scales.
#[inline(always)]
fn first_lines(block: usize) -> (usize, usize, usize) {
    let (pair, second) = (block / 2, block % 2);
    let factors = pair * (1 + 2 * BLOCK_LINES);
    (factors, second, factors + 1 + second * BLOCK_LINES)
}

/// Where the codes of half a group begin.
#[inline(always)]
fn codes_of(group: usize, half: usize) -> usize {
    first_lines(group / GROUPS).2 + SCALE_LINES + (group % GROUPS * 2 + half) * HALF_LINES
}

/// The code of input `input` of a stored block, 0..=63.
fn stored_code(block: &[u8], input: usize) -> u8 {
    let (half, quarter, at) = (input / 128, input % 128 / 32, input % 32);
    let low = block[half * 64 + quarter % 2 * 32 + at] >> (4 * (quarter / 2)) & 0x0f;
    let high = block[INPUTS / 2 + half * 32 + at] >> (2 * quarter) & 0x03;
    low | high << 4
}

/// A group to unpack.
#[derive(Clone, Copy)]
pub struct Packed<'a> {
    codes: &'a [ByteLine; 2 * HALF_LINES],
    factors: &'a [u16; LANES],
    /// The sub-scales of both halves.
    scales: [&'a [i8; LANES]; 2],
}

impl GroupedFormat for Q6K {
    const STORED: StoredBlock = StoredBlock { inputs: INPUTS, bytes: 210 };

    type Group<'a, S: Simd> = Packed<'a>;
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
    fn group<'a, S: Simd>(_: S, lines: &'a [ByteLine], index: usize) -> Packed<'a> {
        let (factors, which, scales) = first_lines(index / GROUPS);
        let of_half = |half| bytemuck::cast_ref(grouped::bytes(lines, scales, index % GROUPS * 2 + half));
        Packed {
            codes: grouped::lines_at(lines, codes_of(index, 0)),
            factors: grouped::halves(lines, factors, which),
            scales: [of_half(0), of_half(1)],
        }
    }

    #[inline(always)]
    fn quad<S: Simd>(simd: S, group: Packed<'_>, index: usize) -> S::Bytes {
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
        let above = const { OFFSET.wrapping_sub(grouped::raise::<S, Self>()) };
        if above == 0 { code } else { simd.sub_bytes(code, simd.splat_byte(above)) }
    }

    /// Exact: eleven bits times eight.
    #[inline(always)]
    fn factor<S: Simd>(simd: S, group: Packed<'_>, index: usize) -> S::F32 {
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

    fn level(lines: &mut [ByteLine], groups: usize, deviation: f32) {
        for block in 0..groups / GROUPS {
            let (factors, which, _) = first_lines(block);
            // The root mean square of -32..=31 times that of -128..=127.
            let factor = half::f16::from_f32(deviation / 1366.0).to_bits();
            grouped::halves_mut(lines, factors, which).fill(factor);
        }
    }
}
