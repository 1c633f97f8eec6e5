//! Q5_0: 32 codes of 5 bits with one scale. Value: d * (code - 16).

use super::bits::{half, u32_at};

/// Block: f16 d; the high bits, with that of input i in bit i; 16 bytes of low bits as in Q4_0.
pub(super) fn dequantize(block: &[u8; 22], out: &mut [f32; 32]) {
    let d = half(block, 0);
    codes(u32_at(block, 2), &block[6..], out, |code| d * f32::from(code as i8 - 16));
}

/// Calls `number` with the code of each input and stores its value.
#[inline(always)]
pub(super) fn codes(high_bits: u32, bytes: &[u8], out: &mut [f32; 32], number: impl Fn(u8) -> f32) {
    let (low, high) = out.split_at_mut(16);
    for (i, ((codes, low), high)) in bytes.iter().zip(low).zip(high).enumerate() {
        let bit = |index: usize| ((high_bits >> index & 1) << 4) as u8;
        *low = number(codes & 15 | bit(i));
        *high = number(codes >> 4 | bit(16 + i));
    }
}
