//! trellis2: a [trellis](super::trellis) of two bits per weight and a memory of three symbols; 2.0625 bits per weight.

use super::planes::Bits;
use super::trellis::{Trellis, Trellised};

/// Tables of trellis2.
pub struct TwoBits;

/// trellis2 format.
pub type Trellis2 = Trellised<TwoBits>;

impl Trellis for TwoBits {
    type Symbols = Bits<2>;
    const BY_LATEST: [u8; 16] = [0, 1, 10, 8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    const BY_EARLIER: [u8; 16] = [6, 13, 1, 8, 14, 1, 10, 9, 8, 11, 0, 10, 9, 12, 2, 11];
    const BY_INDEX: [i8; 16] = [-75, 9, -26, 47, 10, -115, -26, 53, 78, -8, 27, -46, 117, -7, -52, 24];
    const BY_SYMBOL: [i8; 16] = [0, -2, -1, -1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    const START: [u8; 3] = [0, 3, 1];
    const DEVIATION: f32 = 49.5;
}
