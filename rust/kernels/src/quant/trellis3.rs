//! trellis3: a [trellis](super::trellis) of three bits per weight and a memory of two symbols; 3.0625 bits per weight.

use super::planes::Bits;
use super::trellis::{Trellis, Trellised};

/// Tables of trellis3.
pub struct ThreeBits;

/// trellis3 format.
pub type Trellis3 = Trellised<ThreeBits>;

impl Trellis for ThreeBits {
    type Symbols = Bits<3>;
    const MEMORY: usize = 2;
    const BEFORE: [[u8; 16]; 2] =
        [[9, 8, 15, 13, 2, 4, 1, 14, 0, 0, 0, 0, 0, 0, 0, 0], [4, 10, 1, 8, 15, 3, 6, 13, 0, 0, 0, 0, 0, 0, 0, 0]];
    const BY_INDEX: [i8; 16] = [-34, -57, 0, 0, 90, 13, 33, 31, -30, -50, 16, -94, 51, -13, -15, 61];
    const BY_SYMBOL: [i8; 16] = [-7, 11, -7, 28, -16, 3, -29, 15, 0, 0, 0, 0, 0, 0, 0, 0];
    const START: [u8; 2] = [1, 6];
    const DEVIATION: f32 = 43.0;
}
