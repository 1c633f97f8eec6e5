//! trellis4: a [trellis](super::trellis) of four bits per weight and a memory of one and a half symbols; 4.0625 bits per weight.

use super::planes::Bits;
use super::trellis::{Trellis, Trellised};

/// Tables of trellis4.
pub struct FourBits;

/// trellis4 format.
pub type Trellis4 = Trellised<FourBits>;

impl Trellis for FourBits {
    type Symbols = Bits<4>;
    const BY_LATEST: [u8; 16] = [2, 6, 8, 7, 9, 12, 0, 11, 13, 2, 14, 4, 1, 8, 1, 10];
    const BY_EARLIER: [u8; 16] = [3, 4, 1, 6, 3, 4, 1, 6, 3, 4, 1, 6, 3, 4, 1, 6];
    const BY_INDEX: [i8; 16] = [29, -28, -34, 58, 19, -53, -14, 11, -81, -2, 40, -42, -22, 5, -63, -8];
    const BY_SYMBOL: [i8; 16] = [13, 45, -3, -1, -8, 5, 69, 21, -46, -10, 35, 9, 2, 29, 17, 8];
    const START: [u8; 3] = [15, 0, 0];
    const DEVIATION: f32 = 38.0;
}
