//! ggml's iq4_nl: codes select one of sixteen non-uniform values, with an f16 scale for each 32 inputs; 4.5 bits per
//! weight.

use super::blocks::{BlockFormat, Values, nibble, stored_half};
use super::grouped::{StoredBlock, Whole};
use super::planes::Bits;

/// ggml's `kvalues_iq4nl`.
pub(super) const VALUES: [i8; 16] = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];

/// iq4_nl format: ggml's `block_iq4_nl`.
pub struct Iq4Nl;

impl BlockFormat for Iq4Nl {
    const STORED: StoredBlock = StoredBlock { inputs: 32, bytes: 18 };
    const VALUES: Values = Values::Table(VALUES);

    type Codes = Bits<4>;
    type SubScaleBits = Bits<0>;
    type Unpacked = Whole<false>;
    type ByCodes = Whole<false>;

    fn scale(block: &[u8], _: usize) -> u16 {
        stored_half(block)
    }

    fn code(block: &[u8], input: usize) -> u8 {
        nibble(&block[2..], input)
    }
}
