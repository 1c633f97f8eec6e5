//! ggml's iq4_xs: 4-bit indices to the table of iq4_nl with a 6-bit sub-scale for each 32 inputs, stored as sub-scale + 32,
//! and an f16 scale for 256 inputs; 4.25 bits per weight.

use super::blocks::{BlockFormat, SubScales, Values, nibble, stored_half};
use super::grouped::{GROUP, StoredBlock, Whole};
use super::iq4_nl::VALUES;
use super::planes::Bits;

/// iq4_xs format: ggml's `block_iq4_xs`.
pub struct Iq4Xs;

impl BlockFormat for Iq4Xs {
    const STORED: StoredBlock = StoredBlock { inputs: 256, bytes: 136 };
    const VALUES: Values = Values::Table(VALUES);
    const SUB_SCALES: SubScales = SubScales::Minus(32, sub_scale);

    type Codes = Bits<4>;
    type SubScaleBits = Bits<6>;
    type Unpacked = Whole<false>;
    type ByCodes = Whole<false>;

    fn scale(block: &[u8], _: usize) -> u16 {
        stored_half(block)
    }

    fn code(block: &[u8], input: usize) -> u8 {
        nibble(&block[8 + input / GROUP * 16..], input % GROUP)
    }
}

/// Returns a sub-scale: its upper two bits are in two bytes, its low four bits in the four bytes after them.
fn sub_scale(block: &[u8], group: usize, _: usize) -> u8 {
    let high = block[2 + group / 4] >> (group % 4 * 2) & 0x03;
    block[4 + group / 2] >> (group % 2 * 4) & 0x0f | high << 4
}
