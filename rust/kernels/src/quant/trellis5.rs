//! trellis5: a [trellis](super::trellis) of a sign and four bits per weight and a memory of one and a half symbols; 5.0625
//! bits per weight.

use super::planes::Bits;
use super::trellis::{Trellis, Trellised};

/// Tables of trellis5.
pub struct FiveBits;

/// trellis5 format.
pub type Trellis5 = Trellised<FiveBits>;

impl Trellis for FiveBits {
    type Symbols = Bits<5>;
    const BY_LATEST: [u8; 16] = [11, 10, 4, 15, 8, 15, 2, 9, 10, 14, 0, 6, 14, 6, 12, 7];
    const BY_EARLIER: [u8; 16] = [3, 9, 14, 4, 3, 9, 14, 4, 3, 9, 14, 4, 3, 9, 14, 4];
    const BY_INDEX: [i8; 16] = [18, 13, -25, 23, -35, 1, 7, -15, 34, 29, -4, 45, 51, 57, -9, 40];
    const BY_SYMBOL: [i8; 16] = [-49, 3, -16, -30, 23, -30, -33, -35, -14, 18, -91, 14, -41, -54, -28, 5];
    const START: [u8; 3] = [15, 0, 0];
    const DEVIATION: f32 = 34.0;
}
