//! Q2_K: 256 codes of 2 bits; each 16 have a scale and a minimum of 4 bits. Value: d * scale * code - dmin * minimum.

use super::bits::half;

/// Block: 16 bytes with the scale in the low half and the minimum in the high half; 64 bytes of codes; f16 d and dmin.
pub(super) fn dequantize(block: &[u8; 84], out: &mut [f32; 256]) {
    let (d, dmin) = (half(block, 80), half(block, 82));
    let scales = &block[..16];
    for (group, out) in out.as_chunks_mut::<16>().0.iter_mut().enumerate() {
        let scale = d * f32::from(scales[group] & 15);
        let minimum = dmin * f32::from(scales[group] >> 4);
        for (out, code) in out.iter_mut().zip(two_bits(&block[16..80], group)) {
            *out = scale * f32::from(code) - minimum;
        }
    }
}

/// Returns the codes of 16 inputs among 256 in 64 bytes: each 32 bytes hold 128 inputs, with input i in byte i % 32 at
/// bit 2 * (i / 32).
#[inline(always)]
pub(super) fn two_bits(bytes: &[u8], group: usize) -> impl Iterator<Item = u8> {
    let (first, shift) = (group / 8 * 32 + group % 2 * 16, group % 8 / 2 * 2);
    bytes[first..first + 16].iter().map(move |byte| byte >> shift & 3)
}
