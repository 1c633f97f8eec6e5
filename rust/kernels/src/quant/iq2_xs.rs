//! ggml's iq2_xs: 9-bit indices to points of eight inputs, seven signs for each point, and a 4-bit sub-scale for each 16
//! inputs, with an f16 scale for 256 inputs; 2.3125 bits per weight.

use super::grids;
use super::grouped::Halves;
use super::points::{Group, PointFormat, Points, Top, consecutive_nibble, even_signs};

/// iq2_xs format.
pub type Iq2Xs = Points<Iq2XsBlock>;

/// ggml's `block_iq2_xs`.
pub struct Iq2XsBlock;

impl PointFormat for Iq2XsBlock {
    const BYTES: usize = 74;
    const UNIT: f32 = 0.125;
    const POINT: usize = 8;
    const TOP: Top = Top::Index;
    const GRID: &'static [[i8; 4]] = grids::IQ2_XS.as_flattened().as_chunks().0;

    type Unpacked = Halves<false>;
    type ByCodes = Halves<false>;

    /// For each point, a u16 with its index and, above, its signs; then the sub-scales.
    #[inline(always)]
    fn group(block: &[u8], index: usize) -> Group {
        let code = |point: usize| {
            let at = 2 + 8 * index + 2 * (point % 4);
            u16::from_le_bytes([block[at], block[at + 1]])
        };
        Group {
            points: std::array::from_fn(|point| code(point) & 0x1ff),
            signs: std::array::from_fn(|point| even_signs(u32::from(code(point) >> 9))),
            sub_scales: std::array::from_fn(|half| consecutive_nibble(&block[66..], 2 * index + half)),
        }
    }
}
