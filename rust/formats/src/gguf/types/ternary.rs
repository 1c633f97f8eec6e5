//! TQ1_0 and TQ2_0: 256 digits of -1, 0 and 1 with one scale. Value: d * (digit - 1).

use super::bits::half;
use super::q2_k::two_bits;

/// Powers of the base 3: a fraction times 3^n has its digit n before the point.
const POWERS: [u8; 5] = [1, 3, 9, 27, 81];

/// Block: 52 bytes, each the first 8 bits of a fraction in base 3; f16 d. From 32, 16 and 4 bytes come the first digits
/// of all, then the second digits, and so on: five, five and four digits.
pub(super) fn dequantize_tq1_0(block: &[u8; 54], out: &mut [f32; 256]) {
    let d = half(block, 52);
    let (first, rest) = out.split_at_mut(160);
    let (second, third) = rest.split_at_mut(80);
    for (bytes, out) in [(&block[..32], first), (&block[32..48], second), (&block[48..52], third)] {
        for (out, power) in out.chunks_exact_mut(bytes.len()).zip(POWERS) {
            for (out, byte) in out.iter_mut().zip(bytes) {
                let digit = (u16::from(byte.wrapping_mul(power)) * 3) >> 8;
                *out = d * f32::from(digit as i8 - 1);
            }
        }
    }
}

/// Block: 64 bytes of digits with two bits each, as the codes of Q2_K; f16 d.
pub(super) fn dequantize_tq2_0(block: &[u8; 66], out: &mut [f32; 256]) {
    let d = half(block, 64);
    for (group, out) in out.as_chunks_mut::<16>().0.iter_mut().enumerate() {
        for (out, digit) in out.iter_mut().zip(two_bits(&block[..64], group)) {
            *out = d * f32::from(digit as i8 - 1);
        }
    }
}
