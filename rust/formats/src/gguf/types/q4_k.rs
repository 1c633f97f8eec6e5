//! Q4_K: 256 codes of 4 bits; each 32 have a scale and a minimum of 6 bits. Value: d * scale * code - dmin * minimum.

use super::bits::half;
use super::k_scales::scale_and_minimum;

/// Block: f16 d and dmin; 12 bytes of scales and minima; 128 bytes, each 32 of which hold 32 inputs in the low halves
/// and the next 32 in the high halves.
pub(super) fn dequantize(block: &[u8; 144], out: &mut [f32; 256]) {
    let (d, dmin) = (half(block, 0), half(block, 2));
    for (group, out) in out.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        let (scale, minimum) = scale_and_minimum(&block[4..16], group);
        let (scale, minimum) = (d * scale, dmin * minimum);
        let (codes, shift) = (&block[16 + group / 2 * 32..][..32], group % 2 * 4);
        for (out, codes) in out.iter_mut().zip(codes) {
            *out = scale * f32::from(codes >> shift & 15) - minimum;
        }
    }
}
