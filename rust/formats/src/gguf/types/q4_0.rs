//! Q4_0: 32 codes of 4 bits with one scale. Value: d * (code - 8).

use super::bits::half;

/// Block: f16 d; 16 bytes, with input i in the low half of byte i and input 16 + i in the high half.
pub(super) fn dequantize(block: &[u8; 18], out: &mut [f32; 32]) {
    let d = half(block, 0);
    let (low, high) = out.split_at_mut(16);
    for ((codes, low), high) in block[2..].iter().zip(low).zip(high) {
        *low = d * f32::from((codes & 15) as i8 - 8);
        *high = d * f32::from((codes >> 4) as i8 - 8);
    }
}
