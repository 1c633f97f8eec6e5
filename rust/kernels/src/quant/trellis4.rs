//! trellis4: a [trellis](super::trellis) of four bits per weight and a memory of one and a half symbols; 4.0625 bits per weight.

use super::planes::Bits;
use super::trellis::{Trellis, Trellised};

/// Tables of trellis4.
pub struct FourBits;

/// trellis4 format.
pub type Trellis4 = Trellised<FourBits>;

impl Trellis for FourBits {
    type Symbols = Bits<4>;
    const BY_LATEST: [u8; 16] = [11, 14, 0, 4, 10, 3, 15, 3, 9, 6, 4, 7, 2, 13, 7, 12];
    const BY_EARLIER: [u8; 16] = [5, 15, 3, 9, 5, 15, 3, 9, 5, 15, 3, 9, 5, 15, 3, 9];
    const BY_INDEX: [i8; 16] = [-39, 16, 23, 9, 3, -2, -50, 30, -80, -16, 82, 39, -22, 50, -30, -9];
    const BY_SYMBOL: [i8; 16] = [19, 37, 20, -14, 4, 26, 10, 2, -21, -28, 15, -47, -4, 11, -2, -8];
    const START: [u8; 3] = [6, 3, 0];
    const DEVIATION: f32 = 38.0;
    const AHEAD: usize = 8;
}
