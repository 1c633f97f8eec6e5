//! ggml's q2_k: codes in 0..=3 with a 4-bit sub-scale and a 4-bit minimum for each 16 inputs, and an f16 scale of each for
//! 256 inputs; 2.625 bits per weight.

use super::blocks::{BlockFormat, SubScales, Values, stored_half, strided};
use super::grouped::{OffsetHalves, StoredBlock};
use super::planes::Bits;

/// q2_k format: ggml's `block_q2_K`.
pub struct Q2K;

impl BlockFormat for Q2K {
    const STORED: StoredBlock = StoredBlock { inputs: 256, bytes: 84 };
    const VALUES: Values = Values::Minus(0);
    const SUB_SCALES: SubScales = SubScales::Minus(0, |block, half, which| block[half] >> (4 * which) & 0x0f);

    type Codes = Bits<2>;
    type SubScaleBits = Bits<4>;
    type Unpacked = OffsetHalves<false>;
    type ByCodes = OffsetHalves<true>;

    fn scale(block: &[u8], which: usize) -> u16 {
        stored_half(&block[80 + 2 * which..])
    }

    fn code(block: &[u8], input: usize) -> u8 {
        strided(&block[16..80], input, 2)
    }
}
