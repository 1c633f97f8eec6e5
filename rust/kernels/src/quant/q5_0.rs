//! ggml's q5_0: codes in -16..=15, stored as code + 16, with an f16 scale for each 32 inputs; 5.5 bits per weight.

use super::blocks::{BlockFormat, Values, bit, nibble, stored_half};
use super::grouped::{StoredBlock, Whole};
use super::planes::Bits;

/// q5_0 format: ggml's `block_q5_0`.
pub struct Q5_0;

impl BlockFormat for Q5_0 {
    const STORED: StoredBlock = StoredBlock { inputs: 32, bytes: 22 };
    const VALUES: Values = Values::Minus(16);

    type Codes = Bits<5>;
    type SubScaleBits = Bits<0>;
    type Unpacked = Whole<false>;
    type ByCodes = Whole<true>;

    fn scale(block: &[u8], _: usize) -> u16 {
        stored_half(block)
    }

    fn code(block: &[u8], input: usize) -> u8 {
        nibble(&block[6..], input) | bit(&block[2..6], input) << 4
    }
}
