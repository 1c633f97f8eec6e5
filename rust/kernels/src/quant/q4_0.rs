//! ggml's q4_0: codes in -8..=7, stored as code + 8, with an f16 scale for each 32 inputs; 4.5 bits per weight.

use super::blocks::{BlockFormat, Values, nibble, stored_half};
use super::grouped::{StoredBlock, Whole};
use super::planes::Bits;

/// q4_0 format: ggml's `block_q4_0`.
pub struct Q4_0;

impl BlockFormat for Q4_0 {
    const STORED: StoredBlock = StoredBlock { inputs: 32, bytes: 18 };
    const VALUES: Values = Values::Minus(8);

    type Codes = Bits<4>;
    type SubScaleBits = Bits<0>;
    type Unpacked = Whole<false>;
    type ByCodes = Whole<true>;

    fn scale(block: &[u8], _: usize) -> u16 {
        stored_half(block)
    }

    fn code(block: &[u8], input: usize) -> u8 {
        nibble(&block[2..], input)
    }
}
