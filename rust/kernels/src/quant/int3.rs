//! int3: the [levels](super::levels) ±2, ±6, ±11 and ±18, with sub-scales in 4..=7; 3.1875 bits per weight.

use super::levels::{Leveled, Levels};
use super::planes::Bits;

/// Levels of int3.
pub struct EightLevels;

/// int3 format.
pub type Int3 = Leveled<EightLevels>;

impl Levels for EightLevels {
    type Places = Bits<3>;
    const LEVELS: &'static [i8] = &[-18, -11, -6, -2, 2, 6, 11, 18];
    const LOWEST_SCALE: u8 = 4;
}
