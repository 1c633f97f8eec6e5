//! ggml's q4_1: codes in 0..=15 with an f16 scale and an f16 minimum, which is added, for each 32 inputs; 5 bits per
//! weight.

use super::blocks::{BlockFormat, Values, nibble, scale_and_minimum};
use super::grouped::{Offset, StoredBlock};
use super::planes::Bits;

/// q4_1 format: ggml's `block_q4_1`.
pub struct Q4_1;

impl BlockFormat for Q4_1 {
    const STORED: StoredBlock = StoredBlock { inputs: 32, bytes: 20 };
    const VALUES: Values = Values::Minus(0);

    type Codes = Bits<4>;
    type SubScaleBits = Bits<0>;
    type Unpacked = Offset<false>;
    type ByCodes = Offset<true>;

    fn scale(block: &[u8], which: usize) -> u16 {
        scale_and_minimum(block, which)
    }

    fn code(block: &[u8], input: usize) -> u8 {
        nibble(&block[4..], input)
    }
}
