//! ggml's iq3_s: 9-bit indices to points of four inputs, eight signs for each two points, and a 4-bit sub-scale for each 32
//! inputs, with an f16 scale for 256 inputs; 3.4375 bits per weight.

use super::grids;
use super::grouped::Whole;
use super::points::{Group, PointFormat, Points, Top, consecutive_nibble};

/// iq3_s format.
pub type Iq3S = Points<Iq3SBlock>;

/// ggml's `block_iq3_s`.
pub struct Iq3SBlock;

impl PointFormat for Iq3SBlock {
    const BYTES: usize = 110;
    const UNIT: f32 = 1.0;
    const POINT: usize = 4;
    const TOP: Top = Top::Sign;
    const GRID: &'static [[i8; 4]] = &grids::IQ3_S;

    type Unpacked = Whole<false>;
    type ByCodes = Whole<true>;

    /// The low eight bits of all indices, their ninth bits, the signs, and the sub-scales.
    #[inline(always)]
    fn group(block: &[u8], index: usize) -> Group {
        let point =
            |point: usize| u16::from(block[2 + 8 * index + point]) | u16::from(block[66 + index] >> point & 1) << 8;
        Group {
            points: std::array::from_fn(point),
            signs: std::array::from_fn(|eight| block[74 + 4 * index + eight]),
            sub_scales: [consecutive_nibble(&block[106..], index); 2],
        }
    }
}
