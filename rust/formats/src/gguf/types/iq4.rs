//! IQ4_NL and IQ4_XS: 4-bit indices to a table of values that are closer together near zero.

use super::bits::{half, nibble, u16_at};

/// ggml's `kvalues_iq4nl`.
const VALUES: [i8; 16] = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];

/// Block of 32 inputs: f16 d; 16 bytes as in Q4_0. Value: d * table value.
pub(super) fn dequantize_nl(block: &[u8; 18], out: &mut [f32; 32]) {
    dequantize_group(half(block, 0), &block[2..], out);
}

/// Block of 256 inputs, each 32 with a scale of 6 bits: f16 d; the high 2 bits of the scales; their low 4 bits; 8
/// groups of 16 bytes. Value: d * (scale - 32) * table value.
pub(super) fn dequantize_xs(block: &[u8; 136], out: &mut [f32; 256]) {
    let d = half(block, 0);
    let high = u16_at(block, 2);
    for (group, out) in out.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        let scale = nibble(&block[4..8], group) | ((high >> (2 * group) & 3) << 4) as u8;
        dequantize_group(d * f32::from(scale as i8 - 32), &block[8 + group * 16..][..16], out);
    }
}

#[inline(always)]
fn dequantize_group(scale: f32, bytes: &[u8], out: &mut [f32; 32]) {
    let (low, high) = out.split_at_mut(16);
    for ((codes, low), high) in bytes.iter().zip(low).zip(high) {
        *low = scale * f32::from(VALUES[usize::from(codes & 15)]);
        *high = scale * f32::from(VALUES[usize::from(codes >> 4)]);
    }
}
