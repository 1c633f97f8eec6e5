//! Q4_1: 32 codes of 4 bits with a scale and a minimum. Value: d * code + m.

use super::bits::half;

/// Block: f16 d and m; 16 bytes, with input i in the low half of byte i and input 16 + i in the high half.
pub(super) fn dequantize(block: &[u8; 20], out: &mut [f32; 32]) {
    let (d, m) = (half(block, 0), half(block, 2));
    let (low, high) = out.split_at_mut(16);
    for ((codes, low), high) in block[4..].iter().zip(low).zip(high) {
        *low = d * f32::from(codes & 15) + m;
        *high = d * f32::from(codes >> 4) + m;
    }
}
