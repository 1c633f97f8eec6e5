//! Q3_K: 256 codes of 3 bits; each 16 have a scale of 6 bits. Value: d * (scale - 32) * (code - 4).

use super::bits::half;
use super::q2_k::two_bits;

/// Block: the high bits, with that of input i in byte i % 32 at bit i / 32; 64 bytes of low bits as in Q2_K; 12 bytes
/// of scales; f16 d.
pub(super) fn dequantize(block: &[u8; 110], out: &mut [f32; 256]) {
    let d = half(block, 108);
    for (group, out) in out.as_chunks_mut::<16>().0.iter_mut().enumerate() {
        let scale = d * f32::from(scale(&block[96..108], group));
        let high_bits = &block[group % 2 * 16..][..16];
        for ((out, low), high) in out.iter_mut().zip(two_bits(&block[32..96], group)).zip(high_bits) {
            let high = high >> (group / 2) & 1;
            *out = scale * f32::from((low | high << 2) as i8 - 4);
        }
    }
}

/// Returns scale i: its low 4 bits are in byte i % 8, the high 2 in byte 8 + i % 4.
fn scale(bytes: &[u8], group: usize) -> i8 {
    let low = bytes[group % 8] >> (group / 8 * 4) & 15;
    let high = bytes[8 + group % 4] >> (group / 4 * 2) & 3;
    (low | high << 4) as i8 - 32
}
