//! int3: eight codes for normally distributed weights, with sub-scales in 4..=7; 3.1875 bits per weight.
//!
//! Rotated weights are almost normally distributed. The codes are the levels that quantize a normal distribution with the
//! least squared error (J. Max, Quantizing for minimum distortion, 1960), as integers whose products with a sub-scale fit a
//! signed byte. Few sub-scales are enough for groups of one distribution, and leave room for larger codes.
//!
//! Sub-scales are stored as described in [`two_bit_scales`](super::two_bit_scales). A code is stored as its place among
//! all codes, in [`planes`]; a pair of groups has three lines.

use super::integer::{Codes, GROUP, IntegerFormat, Unpack};
use super::planes::{BitPlanes, Bits};
use super::two_bit_scales::{Block, PlanePair, TwoBitScales};
use crate::arch::{ByteLine, Dot, LANES, Simd};

/// All codes, ascending.
const LEVELS: [i8; 8] = [-18, -11, -6, -2, 2, 6, 11, 18];

/// Offset of an unpacked code from its value, where weights are multiplied.
const OFFSET: u8 = 18;

/// Products of a code plus its offset with a sub-scale fit a byte.
const _: () = assert!(LEVELS[0] == -(OFFSET as i8) && 2 * OFFSET as i32 * LAYOUT.range()[1] < 256);

/// Places of codes.
type Places = Bits<3>;

const LAYOUT: TwoBitScales = TwoBitScales::of_planes::<Places>(4, OFFSET);

/// int3 format.
pub struct Int3;

/// Returns the codes plus an offset, by place.
const fn codes_plus(offset: u8) -> [u8; LANES] {
    let mut table = [0; LANES];
    let mut place = 0;
    while place < LEVELS.len() {
        table[place] = offset.wrapping_add_signed(LEVELS[place]);
        place += 1;
    }
    table
}

impl Unpack for Int3 {
    const BY_CODES: Option<Codes> = Some(Codes::SixBits);

    type Block<'a> = Block<'a>;
    type Pair<'a, S: Dot> = PlanePair<'a, S>;

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
        LAYOUT.plane_pair::<Places, S>(simd, block, index)
    }

    #[inline(always)]
    fn quad<S: Dot>(simd: S, pair: Self::Pair<'_, S>, index: usize) -> S::Bytes {
        let codes = simd.lookup(&const { codes_plus(OFFSET) }, Places::quad(simd, pair.codes, index));
        pair.scales.weights(simd, codes, index / (GROUP / 4))
    }

    #[inline(always)]
    fn codes<S: Dot>(simd: S, pair: Self::Pair<'_, S>, index: usize) -> S::Bytes {
        let places = Places::quad(simd, pair.codes, index);
        simd.lookup(&const { codes_plus(Codes::SixBits.offset() as u8) }, places)
    }

    #[inline(always)]
    fn scale<S: Dot>(_: S, pair: Self::Pair<'_, S>, index: usize) -> S::Bytes {
        pair.scales.scales[index]
    }
}

impl IntegerFormat for Int3 {
    const CODES: [i32; 2] = [LEVELS[0] as i32, LEVELS[LEVELS.len() - 1] as i32];
    const SCALES: [i32; 2] = LAYOUT.range();

    fn levels() -> impl Iterator<Item = i32> {
        LEVELS.into_iter().map(i32::from)
    }

    #[inline(always)]
    fn nearest<S: Simd>(simd: S, value: S::F32) -> S::F32 {
        let zero = simd.splat(0.0);
        let negated = simd.sub(zero, value);
        let magnitude = simd.max(value, negated);
        let (_, positive) = LEVELS.split_at(LEVELS.len() / 2);
        let mut level = simd.splat(f32::from(positive[0]));
        for (lower, upper) in positive.iter().zip(&positive[1..]) {
            let middle = simd.splat(f32::from(lower + upper) / 2.0);
            level = simd.select_greater(magnitude, middle, simd.splat(f32::from(*upper)), level);
        }
        simd.select_greater(negated, zero, simd.sub(zero, level), level)
    }

    fn lines(halves: usize) -> usize {
        LAYOUT.lines(halves)
    }

    fn store(lines: &mut [ByteLine], block: usize, group: usize, codes: &[[i8; LANES]; GROUP], scales: &[u8; LANES]) {
        LAYOUT.store_planes::<Places>(lines, (block, group), codes, scales, |code| {
            LEVELS.iter().filter(|level| **level < code).count() as u8
        });
    }

    fn weight(lines: &[ByteLine], block: usize, input: usize, row: usize) -> i32 {
        let (scale, place) = LAYOUT.plane_weight::<Places>(lines, block, input, row);
        scale * i32::from(LEVELS[usize::from(place)])
    }
}
