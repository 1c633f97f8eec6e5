//! ggml's q6_k: codes in -32..=31, stored as code + 32, with a sub-scale in -128..=127 for each 16 inputs, and an f16
//! scale for 256 inputs; 6.5625 bits per weight.

use super::blocks::{BlockFormat, SubScales, Values, stored_half, strided};
use super::grouped::{Halves, StoredBlock};
use super::planes::Bits;

/// q6_k format: ggml's `block_q6_K`.
pub struct Q6K;

impl BlockFormat for Q6K {
    const STORED: StoredBlock = StoredBlock { inputs: 256, bytes: 210 };
    const VALUES: Values = Values::Minus(32);
    const SUB_SCALES: SubScales = SubScales::Signed(|block, half, _| block[192 + half]);

    type Codes = Bits<6>;
    type SubScaleBits = Bits<8>;
    type Unpacked = Halves<false>;
    type ByCodes = Halves<true>;

    fn scale(block: &[u8], _: usize) -> u16 {
        stored_half(&block[208..])
    }

    /// Returns the code of an input. Of every 128 inputs, the low four bits of the first 64 are in the low halves of 64 bytes
    /// and those of the last 64 in the high halves.
    fn code(block: &[u8], input: usize) -> u8 {
        let low = block[input / 128 * 64 + input % 64] >> (input % 128 / 64 * 4) & 0x0f;
        low | strided(&block[128..192], input, 2) << 4
    }
}
