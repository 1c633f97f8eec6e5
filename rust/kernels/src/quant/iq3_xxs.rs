//! ggml's iq3_xxs: 8-bit indices to points of four inputs, seven signs for each two points, and a 4-bit sub-scale for each
//! 32 inputs, with an f16 scale for 256 inputs; 3.0625 bits per weight.

use super::grids;
use super::grouped::Whole;
use super::points::{Group, PointFormat, Points, Top, signs_and_sub_scale};

/// iq3_xxs format.
pub type Iq3Xxs = Points<Iq3XxsBlock>;

/// ggml's `block_iq3_xxs`.
pub struct Iq3XxsBlock;

impl PointFormat for Iq3XxsBlock {
    const BYTES: usize = 98;
    const UNIT: f32 = 0.25;
    const POINT: usize = 4;
    const TOP: Top = Top::SubScale;
    const GRID: &'static [[i8; 4]] = &grids::IQ3_XXS;

    type Unpacked = Whole<false>;
    type ByCodes = Whole<false>;

    /// All indices, then for each group a u32 of signs and sub-scale.
    #[inline(always)]
    fn group(block: &[u8], index: usize) -> Group {
        let (signs, sub_scales) = signs_and_sub_scale(&block[66 + 4 * index..]);
        Group { points: std::array::from_fn(|point| block[2 + 8 * index + point].into()), signs, sub_scales }
    }
}
