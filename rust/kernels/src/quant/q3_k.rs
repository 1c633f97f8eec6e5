//! ggml's q3_k: codes in -4..=3, stored as code + 4, with a 6-bit sub-scale for each 16 inputs, stored as sub-scale + 32,
//! and an f16 scale for 256 inputs; 3.4375 bits per weight.

use super::blocks::{BlockFormat, SubScales, Values, stored_half, strided};
use super::grouped::{Halves, StoredBlock};
use super::planes::Bits;

/// q3_k format: ggml's `block_q3_K`.
pub struct Q3K;

impl BlockFormat for Q3K {
    const STORED: StoredBlock = StoredBlock { inputs: 256, bytes: 110 };
    const VALUES: Values = Values::Minus(4);
    const SUB_SCALES: SubScales = SubScales::Minus(32, sub_scale);

    type Codes = Bits<3>;
    type SubScaleBits = Bits<6>;
    type Unpacked = Halves<false>;
    type ByCodes = Halves<true>;

    fn scale(block: &[u8], _: usize) -> u16 {
        stored_half(&block[108..])
    }

    fn code(block: &[u8], input: usize) -> u8 {
        strided(&block[32..96], input, 2) | strided(&block[..32], input, 1) << 2
    }
}

/// Returns a sub-scale: its low four bits are in byte `half % 8`, the upper two in byte `8 + half % 4`.
fn sub_scale(block: &[u8], half: usize, _: usize) -> u8 {
    let (low, high) = block[96..108].split_at(8);
    low[half % 8] >> (half / 8 * 4) & 0x0f | (high[half % 4] >> (half / 4 * 2) & 0x03) << 4
}
