//! trellis4: a [trellis](super::trellis) of four bits per weight and a memory of one symbol; 4.0625 bits per weight.

use super::planes::Bits;
use super::trellis::{Trellis, Trellised};

/// Tables of trellis4.
pub struct FourBits;

/// trellis4 format.
pub type Trellis4 = Trellised<FourBits>;

impl Trellis for FourBits {
    type Symbols = Bits<4>;
    const MEMORY: usize = 1;
    const BEFORE: [[u8; 16]; 2] =
        [[0, 5, 3, 10, 8, 7, 12, 1, 6, 15, 11, 4, 9, 13, 2, 14], [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]];
    const BY_INDEX: [i8; 16] = [-30, 25, 33, -25, -14, -19, 18, 12, -72, -37, -8, -43, -2, -51, 4, 53];
    const BY_SYMBOL: [i8; 16] = [-2, 22, 37, 42, 19, 5, 5, 19, 1, 6, -12, 16, -49, 10, -10, 33];
    const START: [u8; 2] = [0, 0];
    const DEVIATION: f32 = 31.0;
}
