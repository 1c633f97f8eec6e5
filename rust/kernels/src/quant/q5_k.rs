//! ggml's q5_k: codes in 0..=31 with a 6-bit sub-scale and a 6-bit minimum for each 32 inputs, and an f16 scale of each
//! for 256 inputs; 5.5 bits per weight.

use super::blocks::{BlockFormat, SubScales, Values, k_sub_scale, stored_half, strided};
use super::grouped::{Offset, StoredBlock};
use super::planes::Bits;

/// q5_k format: ggml's `block_q5_K`.
pub struct Q5K;

impl BlockFormat for Q5K {
    const STORED: StoredBlock = StoredBlock { inputs: 256, bytes: 176 };
    const VALUES: Values = Values::Minus(0);
    const SUB_SCALES: SubScales = SubScales::Minus(0, k_sub_scale);

    type Codes = Bits<5>;
    type SubScaleBits = Bits<6>;
    type Unpacked = Offset<false>;
    type ByCodes = Offset<true>;

    fn scale(block: &[u8], which: usize) -> u16 {
        stored_half(&block[2 * which..])
    }

    fn code(block: &[u8], input: usize) -> u8 {
        strided(&block[48..], input, 4) | strided(&block[16..48], input, 1) << 4
    }
}
