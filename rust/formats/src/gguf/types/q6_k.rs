//! Q6_K: 256 codes of 6 bits; each 16 have a scale of 8 bits. Value: d * scale * (code - 32).

use super::bits::half;
use super::q2_k::two_bits;

/// Block: 128 bytes of low bits, each 64 of which hold 64 inputs in the low halves and the next 64 in the high halves;
/// 64 bytes of high bits, as the codes of Q2_K; 16 signed scales; f16 d.
pub(super) fn dequantize(block: &[u8; 210], out: &mut [f32; 256]) {
    let d = half(block, 208);
    for (group, out) in out.as_chunks_mut::<16>().0.iter_mut().enumerate() {
        let scale = d * f32::from(block[192 + group] as i8);
        let (low, shift) = (&block[group / 8 * 64 + group % 4 * 16..][..16], group % 8 / 4 * 4);
        for ((out, low), high) in out.iter_mut().zip(low).zip(two_bits(&block[128..192], group)) {
            *out = scale * f32::from((low >> shift & 15 | high << 4) as i8 - 32);
        }
    }
}
