//! ggml's iq2_xxs: 8-bit indices to points of eight inputs, seven signs for each point, and a 4-bit sub-scale for each 32
//! inputs, with an f16 scale for 256 inputs; 2.0625 bits per weight.

use super::grids;
use super::grouped::Whole;
use super::points::{Group, PointFormat, Points, Top, signs_and_sub_scale};

/// iq2_xxs format.
pub type Iq2Xxs = Points<Iq2XxsBlock>;

/// ggml's `block_iq2_xxs`.
pub struct Iq2XxsBlock;

impl PointFormat for Iq2XxsBlock {
    const BYTES: usize = 66;
    const UNIT: f32 = 0.125;
    const POINT: usize = 8;
    const TOP: Top = Top::SubScale;
    const GRID: &'static [[i8; 4]] = grids::IQ2_XXS.as_flattened().as_chunks().0;

    type Unpacked = Whole<false>;
    type ByCodes = Whole<false>;

    /// Each group has four indices, then a u32 of signs and sub-scale.
    #[inline(always)]
    fn group(block: &[u8], index: usize) -> Group {
        let (indices, rest) = block[2 + 8 * index..][..8].split_at(4);
        let (signs, sub_scales) = signs_and_sub_scale(rest);
        Group { points: std::array::from_fn(|point| indices[point % 4].into()), signs, sub_scales }
    }
}
