//! int5: codes in -16..=15 with sub-scales in 4..=7; 5.1875 bits per weight.
//!
//! Sub-scales are stored as described in [`two_bit_scales`](super::two_bit_scales), codes as code + 16 in
//! [`planes`](super::planes); a pair of groups has five lines.

use super::integer::{Codes, GROUP, IntegerFormat, Unpack};
use super::planes::{BitPlanes, Bits};
use super::two_bit_scales::{Block, PlanePair, TwoBitScales};
use crate::arch::{ByteLine, Dot, LANES};

/// Offset of a stored code from its value.
const OFFSET: u8 = 16;

/// Stored codes.
type Stored = Bits<5>;

const LAYOUT: TwoBitScales = TwoBitScales::of_planes::<Stored>(4, OFFSET);

/// Products of a stored code with a sub-scale fit a byte.
const _: () = assert!((2 * OFFSET as i32 - 1) * LAYOUT.range()[1] < 256);

/// int5 format.
pub struct Int5;

impl Unpack for Int5 {
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
        LAYOUT.plane_pair::<Stored, S>(simd, block, index)
    }

    #[inline(always)]
    fn quad<S: Dot>(simd: S, pair: Self::Pair<'_, S>, index: usize) -> S::Bytes {
        pair.scales.weights(simd, Stored::quad(simd, pair.codes, index), index / (GROUP / 4))
    }

    #[inline(always)]
    fn codes<S: Dot>(simd: S, pair: Self::Pair<'_, S>, index: usize) -> S::Bytes {
        let less = OFFSET.wrapping_sub(Codes::SixBits.offset() as u8);
        simd.sub_bytes(Stored::quad(simd, pair.codes, index), simd.splat_byte(less))
    }

    #[inline(always)]
    fn scale<S: Dot>(_: S, pair: Self::Pair<'_, S>, index: usize) -> S::Bytes {
        pair.scales.scales[index]
    }
}

impl IntegerFormat for Int5 {
    const CODES: [i32; 2] = [-16, 15];
    const SCALES: [i32; 2] = LAYOUT.range();

    fn lines(halves: usize) -> usize {
        LAYOUT.lines(halves)
    }

    fn store(lines: &mut [ByteLine], block: usize, group: usize, codes: &[[i8; LANES]; GROUP], scales: &[u8; LANES]) {
        LAYOUT.store_planes::<Stored>(lines, (block, group), codes, scales, |code| {
            code.wrapping_add_unsigned(OFFSET) as u8
        });
    }

    fn weight(lines: &[ByteLine], block: usize, input: usize, row: usize) -> i32 {
        let (scale, code) = LAYOUT.plane_weight::<Stored>(lines, block, input, row);
        scale * (i32::from(code) - i32::from(OFFSET))
    }
}
