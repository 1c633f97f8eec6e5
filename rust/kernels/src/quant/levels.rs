//! Formats whose codes are levels for normally distributed weights.
//!
//! Rotated weights are almost normally distributed. The codes are the levels that quantize a normal distribution with the
//! least squared error (J. Max, Quantizing for minimum distortion, 1960), as integers whose products with a sub-scale fit a
//! signed byte. Few sub-scales are enough for groups of one distribution, and leave room for larger codes.
//!
//! Sub-scales are stored as described in [`two_bit_scales`](super::two_bit_scales). A code is stored as its place among
//! all codes, in [`planes`](super::planes); a pair of groups has as many lines as a place has bits.

use std::marker::PhantomData;

use super::integer::{Codes, GROUP, IntegerFormat, Unpack};
use super::planes::BitPlanes;
use super::two_bit_scales::{Block, PlanePair, TwoBitScales};
use crate::arch::{ByteLine, Dot, LANES, Simd};

/// Description of a format by its codes.
pub trait Levels: Send + Sync + 'static {
    /// Places of codes.
    type Places: BitPlanes;

    /// All codes, ascending, and symmetric around zero.
    const LEVELS: &'static [i8];

    /// Lowest sub-scale; the highest is three above it.
    const LOWEST_SCALE: u8;
}

/// Integer format of a description.
pub struct Leveled<L>(PhantomData<L>);

impl<L: Levels> Leveled<L> {
    /// Highest code.
    const HIGHEST: i8 = {
        let highest = L::LEVELS[L::LEVELS.len() - 1];
        assert!(L::LEVELS.len() == 1 << <L::Places as BitPlanes>::BITS && L::LEVELS[0] == -highest);
        assert!(highest as i32 * (L::LOWEST_SCALE as i32 + 3) <= i8::MAX as i32, "weights fit a signed byte");
        highest
    };

    /// Offset of an unpacked code from its value, where weights are multiplied.
    const OFFSET: u8 = Self::HIGHEST.cast_unsigned();

    const LAYOUT: TwoBitScales = TwoBitScales::of_planes::<L::Places>(L::LOWEST_SCALE, Self::OFFSET);

    /// Returns the codes plus an offset, by place.
    const fn codes_plus(offset: u8) -> [u8; LANES] {
        let mut table = [0; LANES];
        let mut place = 0;
        while place < L::LEVELS.len() {
            table[place] = offset.wrapping_add_signed(L::LEVELS[place]);
            place += 1;
        }
        table
    }
}

impl<L: Levels> Unpack for Leveled<L> {
    const BY_CODES: Option<Codes> = Some(Codes::SixBits);

    type Block<'a> = Block<'a>;
    type Pair<'a, S: Dot> = PlanePair<'a, S>;

    #[inline(always)]
    fn first_line(index: usize) -> usize {
        Self::LAYOUT.first_line(index)
    }

    #[inline(always)]
    fn block(lines: &[ByteLine], index: usize) -> Self::Block<'_> {
        Self::LAYOUT.block(lines, index)
    }

    #[inline(always)]
    fn pair<'a, S: Dot>(simd: S, block: Self::Block<'a>, index: usize) -> Self::Pair<'a, S> {
        Self::LAYOUT.plane_pair::<L::Places, S>(simd, block, index)
    }

    #[inline(always)]
    fn quad<S: Dot>(simd: S, pair: Self::Pair<'_, S>, index: usize) -> S::Bytes {
        let codes = simd.lookup(&const { Self::codes_plus(Self::OFFSET) }, L::Places::quad(simd, pair.codes, index));
        pair.scales.weights(simd, codes, index / (GROUP / 4))
    }

    #[inline(always)]
    fn codes<S: Dot>(simd: S, pair: Self::Pair<'_, S>, index: usize) -> S::Bytes {
        let places = L::Places::quad(simd, pair.codes, index);
        simd.lookup(&const { Self::codes_plus(Codes::SixBits.offset() as u8) }, places)
    }

    #[inline(always)]
    fn scale<S: Dot>(_: S, pair: Self::Pair<'_, S>, index: usize) -> S::Bytes {
        pair.scales.scales[index]
    }
}

impl<L: Levels> IntegerFormat for Leveled<L> {
    const CODES: [i32; 2] = [-(Self::HIGHEST as i32), Self::HIGHEST as i32];
    const SCALES: [i32; 2] = Self::LAYOUT.range();

    fn levels() -> impl Iterator<Item = i32> {
        L::LEVELS.iter().map(|level| i32::from(*level))
    }

    #[inline(always)]
    fn nearest<S: Simd>(simd: S, value: S::F32) -> S::F32 {
        let zero = simd.splat(0.0);
        let negated = simd.sub(zero, value);
        let magnitude = simd.max(value, negated);
        let (_, positive) = L::LEVELS.split_at(L::LEVELS.len() / 2);
        let mut level = simd.splat(f32::from(positive[0]));
        for (lower, upper) in positive.iter().zip(&positive[1..]) {
            let middle = simd.splat(f32::from(lower + upper) / 2.0);
            level = simd.select_greater(magnitude, middle, simd.splat(f32::from(*upper)), level);
        }
        simd.select_greater(negated, zero, simd.sub(zero, level), level)
    }

    fn lines(halves: usize) -> usize {
        Self::LAYOUT.lines(halves)
    }

    fn store(lines: &mut [ByteLine], block: usize, group: usize, codes: &[[i8; LANES]; GROUP], scales: &[u8; LANES]) {
        Self::LAYOUT.store_planes::<L::Places>(lines, (block, group), codes, scales, |code| {
            L::LEVELS.iter().filter(|level| **level < code).count() as u8
        });
    }

    fn weight(lines: &[ByteLine], block: usize, input: usize, row: usize) -> i32 {
        let (scale, place) = Self::LAYOUT.plane_weight::<L::Places>(lines, block, input, row);
        scale * i32::from(L::LEVELS[usize::from(place)])
    }
}
