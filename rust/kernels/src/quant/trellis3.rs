//! trellis3: a [trellis](super::trellis) of three bits per weight and a memory of two symbols; 3.0625 bits per weight.

use super::planes::Bits;
use super::trellis::{Trellis, Trellised};

/// Tables of trellis3.
pub struct ThreeBits;

/// trellis3 format.
pub type Trellis3 = Trellised<ThreeBits>;

impl Trellis for ThreeBits {
    type Symbols = Bits<3>;
    const BY_LATEST: [u8; 16] = [11, 9, 7, 14, 1, 6, 10, 13, 0, 0, 0, 0, 0, 0, 0, 0];
    const BY_EARLIER: [u8; 16] = [0, 13, 2, 3, 12, 14, 15, 1, 0, 0, 0, 0, 0, 0, 0, 0];
    const BY_INDEX: [i8; 16] = [55, 2, -47, 36, -53, 92, -16, 12, -2, 29, -36, 47, -94, -28, -12, 18];
    const BY_SYMBOL: [i8; 16] = [5, -7, 29, -28, -1, -1, -21, 19, 0, 0, 0, 0, 0, 0, 0, 0];
    const START: [u8; 3] = [5, 6, 0];
    const DEVIATION: f32 = 42.5;
}
