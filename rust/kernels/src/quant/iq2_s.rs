//! ggml's iq2_s: 10-bit indices to points of eight inputs, eight signs for each point, and a 4-bit sub-scale for each 16
//! inputs, with an f16 scale for 256 inputs; 2.5625 bits per weight.

use super::grids;
use super::grouped::Halves;
use super::points::{Group, PointFormat, Points, Top, consecutive_nibble};

/// iq2_s format.
pub type Iq2S = Points<Iq2SBlock>;

/// ggml's `block_iq2_s`.
pub struct Iq2SBlock;

impl PointFormat for Iq2SBlock {
    const BYTES: usize = 82;
    const UNIT: f32 = 0.125;
    const POINT: usize = 8;
    const TOP: Top = Top::Sign;
    const GRID: &'static [[i8; 4]] = grids::IQ2_S.as_flattened().as_chunks().0;

    type Unpacked = Halves<false>;
    type ByCodes = Halves<false>;

    /// The low eight bits of all indices, the signs, the upper two bits of the indices, and the sub-scales.
    #[inline(always)]
    fn group(block: &[u8], index: usize) -> Group {
        let point = |point: usize| {
            let point = point % 4;
            u16::from(block[2 + 4 * index + point]) | u16::from(block[66 + index] >> (2 * point) & 3) << 8
        };
        Group {
            points: std::array::from_fn(point),
            signs: std::array::from_fn(|point| block[34 + 4 * index + point]),
            sub_scales: std::array::from_fn(|half| consecutive_nibble(&block[74..], 2 * index + half)),
        }
    }
}
