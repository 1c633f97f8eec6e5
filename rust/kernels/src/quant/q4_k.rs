//! ggml's q4_k: codes in 0..=15 with a 6-bit sub-scale and a 6-bit minimum for each 32 inputs, and an f16 scale of each
//! for 256 inputs; 4.5 bits per weight. A weight is `scale * sub_scale * code - min_scale * minimum`.
//!
//! Every 256 inputs have a line of f16 scales, `[scale, min_scale][row]`, three lines of sub-scales and minima, then four
//! lines of codes per group. Of the three lines, byte 16 g + r of the first two belongs to row r and group g: the low four
//! bits of the sub-scale in the low half, those of the minimum in the high half. Byte 16 j + r of the third holds the upper
//! two bits: of group 2j, the minimum in bits 0 and 1 and the sub-scale in bits 4 and 5; of group 2j + 1, in bits 2 and 3,
//! and 6 and 7.

use super::grouped::{self, GROUP, GroupedFormat, Layout, Offset, StoredBlock};
use crate::arch::{ByteLine, Dot, LANES, Simd};

/// Number of inputs of a block.
const INPUTS: usize = 256;

/// Number of groups of a block.
const GROUPS: usize = INPUTS / GROUP;

/// Bytes of the sub-scales and minima of a stored block.
const SCALES: usize = 12;

const LAYOUT: Layout = Layout { block_groups: GROUPS, factors: 4, codes: 4 };

/// First line of the low bits of sub-scales and minima, relative to the first line of the block.
const LOW: usize = 1;

/// Line of the high bits of sub-scales and minima, relative to the first line of the block.
const HIGH: usize = 3;

/// Stored block: two f16 scales, sub-scales and minima, and codes. Of every 64 inputs the first half is in the low bits of
/// 32 bytes and the second half in the high bits.
#[repr(C, packed)]
struct Stored([u16; 2], [u8; SCALES], [u8; INPUTS / 2]);

/// Packing is lossless: a block of sixteen rows takes a quarter as many lines as it has bytes.
const _: () = assert!(size_of::<Stored>() == Q4K::STORED.bytes && 4 * LAYOUT.lines(GROUPS) == Q4K::STORED.bytes);

/// q4_k format: ggml's `block_q4_K`.
pub struct Q4K;

/// Returns the sub-scale and the minimum of a group of a stored block: ggml's `get_scale_min_k4`.
fn stored_scales(bytes: &[u8], group: usize) -> [u8; 2] {
    if group < 4 {
        [bytes[group] & 0x3f, bytes[group + 4] & 0x3f]
    } else {
        let (low, high) = (bytes[group + 4], [bytes[group - 4] >> 6, bytes[group] >> 6]);
        [low & 0x0f | high[0] << 4, low >> 4 | high[1] << 4]
    }
}

/// Returns a 6-bit number in each lane, from the lowest byte of its low and of its high bits.
#[inline(always)]
fn six_bits<S: Simd>(simd: S, low: S::Bytes, high: S::Bytes) -> S::I32 {
    let (low_bits, high_bits) = (simd.splat_quad([0x0f, 0, 0, 0]), simd.splat_quad([0x30, 0, 0, 0]));
    simd.lanes(simd.or(simd.and(low, low_bits), simd.and(high, high_bits)))
}

/// Packed data of a group.
#[derive(Clone, Copy)]
pub struct Packed<'a, S: Dot> {
    codes: &'a [ByteLine; 4],
    /// Scales of sub-scales and of minima.
    factors: [&'a [u16; LANES]; 2],
    /// Sub-scales and minima of the group.
    numbers: [S::I32; 2],
}

impl GroupedFormat for Q4K {
    const STORED: StoredBlock = StoredBlock { inputs: INPUTS, bytes: 144 };

    type Group<'a, S: Dot> = Packed<'a, S>;
    type Unpacked = Offset<false>;
    type ByCodes = Offset<true>;

    #[inline(always)]
    fn lines(groups: usize) -> usize {
        LAYOUT.lines(groups)
    }

    fn store(lines: &mut [ByteLine], index: usize, blocks: &[&[u8]; LANES]) {
        for (row, block) in blocks.iter().enumerate() {
            let (factors, rest) = block.split_at(4);
            let (scales, codes) = rest.split_at(SCALES);
            for group in 0..GROUPS {
                let (line, of_block) = LAYOUT.factors_of(index * GROUPS + group);
                if group == 0 {
                    for (which, factor) in factors.chunks_exact(2).enumerate() {
                        grouped::halves_mut(lines, line, which)[row] = grouped::stored_half(factor);
                    }
                }
                let [scale, minimum] = stored_scales(scales, group);
                grouped::bytes_mut(lines, line + LOW, of_block)[row] = scale & 0x0f | minimum << 4;
                let high = minimum >> 4 | scale & 0x30;
                grouped::bytes_mut(lines, line + HIGH, of_block / 2)[row] |= high << (2 * (of_block % 2));
                let of_group = |input: usize| codes[group / 2 * GROUP + input] >> (4 * (group % 2)) & 0x0f;
                let first = LAYOUT.codes_of(index * GROUPS + group);
                grouped::store_nibbles(&mut lines[first..], row, &std::array::from_fn(of_group));
            }
        }
    }

    #[inline(always)]
    fn group<'a, S: Dot>(simd: S, lines: &'a [ByteLine], index: usize) -> Packed<'a, S> {
        let (line, of_block) = LAYOUT.factors_of(index);
        let low = simd.spread(grouped::bytes(lines, line + LOW, of_block));
        let high = simd.spread(grouped::bytes(lines, line + HIGH, of_block / 2));
        let high = if of_block.is_multiple_of(2) { high } else { simd.shift_right::<2>(high) };
        Packed {
            codes: grouped::lines_at(lines, LAYOUT.codes_of(index)),
            factors: [grouped::halves(lines, line, 0), grouped::halves(lines, line, 1)],
            numbers: [
                six_bits(simd, low, high),
                six_bits(simd, simd.shift_right::<4>(low), simd.shift_left::<4>(high)),
            ],
        }
    }

    #[inline(always)]
    fn quad<S: Dot>(simd: S, group: Packed<'_, S>, index: usize) -> S::Bytes {
        let bias = simd.splat_byte(const { grouped::unpacked_bias::<S, Self>() });
        simd.xor(grouped::nibbles(simd, group.codes, index), bias)
    }

    /// Returns a factor. The product is exact: eleven bits times six.
    #[inline(always)]
    fn factor<S: Dot>(simd: S, group: Packed<'_, S>, index: usize) -> S::F32 {
        simd.mul(simd.load_f16(group.factors[index]), simd.to_f32(group.numbers[index]))
    }

    fn weight(lines: &[ByteLine], input: usize, row: usize) -> f32 {
        let group = input / GROUP;
        let (line, of_block) = LAYOUT.factors_of(group);
        let low = grouped::bytes(lines, line + LOW, of_block)[row];
        let high = grouped::bytes(lines, line + HIGH, of_block / 2)[row] >> (2 * (of_block % 2));
        let factor = |which| grouped::half_of(grouped::halves(lines, line, which), row);
        let scale = factor(0) * f32::from(low & 0x0f | high & 0x30);
        let minimum = factor(1) * f32::from(low >> 4 | (high & 0x03) << 4);
        scale * f32::from(grouped::nibble(&lines[LAYOUT.codes_of(group)..], input % GROUP, row)) - minimum
    }

    fn set_deviation(lines: &mut [ByteLine], groups: usize, deviation: f32) {
        // Divided by the root mean square of `s * c - 7.5 * m` for sub-scales s and minima m up to 63, codes c up to 15.
        let factor = deviation / 258.3;
        for group in (0..groups).step_by(GROUPS) {
            let (line, _) = LAYOUT.factors_of(group);
            for (which, factor) in [factor, 7.5 * factor].into_iter().enumerate() {
                grouped::halves_mut(lines, line, which).fill(half::f16::from_f32(factor).to_bits());
            }
        }
    }
}
