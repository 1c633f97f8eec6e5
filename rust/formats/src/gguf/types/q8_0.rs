//! Q8_0: 32 codes of 8 bits with one scale. Value: d * code.

use super::bits::half;

/// Block: f16 d; 32 signed bytes.
pub(super) fn dequantize(block: &[u8; 34], out: &mut [f32; 32]) {
    let d = half(block, 0);
    for (out, code) in out.iter_mut().zip(&block[2..]) {
        *out = d * f32::from(*code as i8);
    }
}
