//! Q5_1: 32 codes of 5 bits with a scale and a minimum. Value: d * code + m.

use super::bits::{half, u32_at};
use super::q5_0;

/// Block: f16 d and m; the high bits and 16 bytes of low bits as in Q5_0.
pub(super) fn dequantize(block: &[u8; 24], out: &mut [f32; 32]) {
    let (d, m) = (half(block, 0), half(block, 2));
    q5_0::codes(u32_at(block, 4), &block[8..], out, |code| d * f32::from(code) + m);
}
