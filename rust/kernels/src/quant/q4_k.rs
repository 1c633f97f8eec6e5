//! q4_k of ggml: codes of 0..=15 times a sub-scale, less a minimum, both of six bits, for each 32 inputs; an f16 factor of
//! each for 256 inputs. 4.5 bits a weight.
//!
//! Of each 256 inputs there are first a line of the factors, `[sub-scales', minima's][row]`, and three of sub-scales and
//! minima; then four lines a group hold codes. Of the three, byte 16 g + r of the first two is of row r and group g, the
//! low four bits of the sub-scale and, above them, of the minimum. Byte 16 j + r of the third has what is above these:
//! of group 2j the minimum's in bits 0 and 1 and the sub-scale's in 4 and 5, of group 2j + 1 in 2 and 3, and 6 and 7.

use super::grouped::{self, GROUP, GroupedFormat, Layout, Offset, StoredBlock};
use crate::arch::{ByteLine, LANES, Simd};

/// Inputs of a block.
const INPUTS: usize = 256;

/// Groups of a block.
const GROUPS: usize = INPUTS / GROUP;

/// Bytes of a stored block's sub-scales and minima.
const SCALES: usize = 12;

const LAYOUT: Layout = Layout { block_groups: GROUPS, factors: 4, codes: 4 };

/// The first line of the sub-scales' and minima's low bits, from the block's first on.
const LOW: usize = 1;

/// The line of their high bits.
const HIGH: usize = 3;

/// A stored block: both factors, f16, sub-scales and minima, and codes, of 64 inputs the first half in the low bits of 32
/// bytes and the second in the high ones.
#[repr(C, packed)]
struct Stored([u16; 2], [u8; SCALES], [u8; INPUTS / 2]);

/// Sixteen rows of a block are a quarter as many lines as it has bytes.
const _: () = assert!(size_of::<Stored>() == Q4K::STORED.bytes && 4 * LAYOUT.lines(GROUPS) == Q4K::STORED.bytes);

/// ggml's `block_q4_K`.
pub struct Q4K;

/// The sub-scale and the minimum of a group of a stored block: ggml's `get_scale_min_k4`.
fn stored_scales(bytes: &[u8], group: usize) -> [u8; 2] {
    if group < 4 {
        [bytes[group] & 0x3f, bytes[group + 4] & 0x3f]
    } else {
        let (low, high) = (bytes[group + 4], [bytes[group - 4] >> 6, bytes[group] >> 6]);
        [low & 0x0f | high[0] << 4, low >> 4 | high[1] << 4]
    }
}

/// A group to unpack.
#[derive(Clone, Copy)]
pub struct Packed<'a, S: Simd> {
    codes: &'a [ByteLine; 4],
    /// The factor of sub-scales, and that of minima.
    factors: [&'a [u16; LANES]; 2],
    /// The group's sub-scales and minima.
    numbers: [S::I32; 2],
}

impl GroupedFormat for Q4K {
    const STORED: StoredBlock = StoredBlock { inputs: INPUTS, bytes: 144 };

    type Group<'a, S: Simd> = Packed<'a, S>;
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
    fn group<'a, S: Simd>(simd: S, lines: &'a [ByteLine], index: usize) -> Packed<'a, S> {
        let (line, of_block) = LAYOUT.factors_of(index);
        let low = simd.spread(grouped::bytes(lines, line + LOW, of_block));
        let high = simd.spread(grouped::bytes(lines, line + HIGH, of_block / 2));
        let high = if of_block.is_multiple_of(2) { high } else { simd.shift_right::<2>(high) };
        // Of each lane one byte stays: a number of six bits.
        let six_bits = |low, high| {
            let (low_bits, high_bits) = (simd.splat_quad([0x0f, 0, 0, 0]), simd.splat_quad([0x30, 0, 0, 0]));
            simd.lanes(simd.or(simd.and(low, low_bits), simd.and(high, high_bits)))
        };
        Packed {
            codes: grouped::lines_at(lines, LAYOUT.codes_of(index)),
            factors: [grouped::halves(lines, line, 0), grouped::halves(lines, line, 1)],
            numbers: [six_bits(low, high), six_bits(simd.shift_right::<4>(low), simd.shift_left::<4>(high))],
        }
    }

    #[inline(always)]
    fn quad<S: Simd>(simd: S, group: Packed<'_, S>, index: usize) -> S::Bytes {
        let raise = simd.splat_byte(const { grouped::raise::<S, Self>() });
        simd.xor(grouped::nibbles(simd, group.codes, index), raise)
    }

    /// Exact: eleven bits times six.
    #[inline(always)]
    fn factor<S: Simd>(simd: S, group: Packed<'_, S>, index: usize) -> S::F32 {
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

    fn level(lines: &mut [ByteLine], groups: usize, deviation: f32) {
        // Minima are as large as codes are on average; the root mean square is that of numbers up to 63 and up to 15.
        let factor = deviation / 258.3;
        for group in (0..groups).step_by(GROUPS) {
            let (line, _) = LAYOUT.factors_of(group);
            for (which, factor) in [factor, 7.5 * factor].into_iter().enumerate() {
                grouped::halves_mut(lines, line, which).fill(half::f16::from_f32(factor).to_bits());
            }
        }
    }
}
