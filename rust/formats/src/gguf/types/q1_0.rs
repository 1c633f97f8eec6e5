//! Q1_0: 128 signs with one scale. Value: d or -d.

use super::bits::half;

/// Block: f16 d; 16 bytes, with the sign of input i in bit i % 8 of byte i / 8, set for d.
pub(super) fn dequantize(block: &[u8; 18], out: &mut [f32; 128]) {
    let d = half(block, 0);
    for (out, bits) in out.as_chunks_mut::<8>().0.iter_mut().zip(&block[2..]) {
        for (i, out) in out.iter_mut().enumerate() {
            *out = if bits >> i & 1 == 1 { d } else { -d };
        }
    }
}
