//! ggml's q4_k: codes in 0..=15 with a 6-bit sub-scale and a 6-bit minimum for each 32 inputs, and an f16 scale of each
//! for 256 inputs; 4.5 bits per weight.

use super::blocks::{BlockFormat, SubScales, Values, k_sub_scale, stored_half, strided};
use super::grouped::{Offset, StoredBlock};
use super::planes::Bits;

/// q4_k format: ggml's `block_q4_K`.
pub struct Q4K;

impl BlockFormat for Q4K {
    const STORED: StoredBlock = StoredBlock { inputs: 256, bytes: 144 };
    const VALUES: Values = Values::Minus(0);
    const SUB_SCALES: SubScales = SubScales::Minus(0, k_sub_scale);

    type Codes = Bits<4>;
    type SubScaleBits = Bits<6>;
    type Unpacked = Offset<false>;
    type ByCodes = Offset<true>;

    fn scale(block: &[u8], which: usize) -> u16 {
        stored_half(&block[2 * which..])
    }

    fn code(block: &[u8], input: usize) -> u8 {
        strided(&block[16..], input, 4)
    }
}
