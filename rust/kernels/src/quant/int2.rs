//! int2: the [levels](super::levels) ±2 and ±7, with sub-scales in 3..=6; 2.1875 bits per weight.

use super::levels::{Leveled, Levels};
use super::planes::Bits;

/// Levels of int2.
pub struct FourLevels;

/// int2 format.
pub type Int2 = Leveled<FourLevels>;

impl Levels for FourLevels {
    type Places = Bits<2>;
    const LEVELS: &'static [i8] = &[-7, -2, 2, 7];
    const LOWEST_SCALE: u8 = 3;
}
