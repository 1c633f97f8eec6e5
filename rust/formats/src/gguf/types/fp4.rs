//! MXFP4 and NVFP4: 4-bit floats (one sign bit, two bits of exponent, one of mantissa) with 8-bit scales.
//!
//! Values are doubled and scales halved, so that the values are integers (OCP Microscaling Formats 1.0;
//! <https://docs.nvidia.com/cuda/parallel-thread-execution/#alternate-floating-point-data-formats>).

use super::bits::nibble;

/// Twice the values of the codes.
const DOUBLED: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

/// Block: the exponent of a power of two; 16 bytes, with input i in the low half of byte i and input 16 + i in the high
/// half.
pub(super) fn dequantize_mxfp4(block: &[u8; 17], out: &mut [f32; 32]) {
    let d = half_of_power(block[0]);
    let (low, high) = out.split_at_mut(16);
    for ((codes, low), high) in block[1..].iter().zip(low).zip(high) {
        *low = d * f32::from(DOUBLED[usize::from(codes & 15)]);
        *high = d * f32::from(DOUBLED[usize::from(codes >> 4)]);
    }
}

/// Returns 2^(exponent - 128). The two smallest are subnormal.
fn half_of_power(exponent: u8) -> f32 {
    let exponent = u32::from(exponent);
    f32::from_bits(if exponent < 2 { 0x0020_0000 << exponent } else { (exponent - 1) << 23 })
}

/// Block: four scales of 16 inputs each; 32 bytes, each 8 of which hold 8 inputs in the low halves and 8 in the high
/// halves.
pub(super) fn dequantize_nvfp4(block: &[u8; 36], out: &mut [f32; 64]) {
    let (scales, codes) = block.split_at(4);
    let groups = out.as_chunks_mut::<16>().0.iter_mut().zip(codes.as_chunks::<8>().0);
    for ((out, codes), scale) in groups.zip(scales) {
        let d = half_of_e4m3(*scale);
        for (i, out) in out.iter_mut().enumerate() {
            *out = d * f32::from(DOUBLED[usize::from(nibble(codes, i % 8 * 2 + i / 8))]);
        }
    }
}

/// Returns half of a float with 4 bits of exponent and 3 of mantissa. The sign is ignored, and NaN is read as zero.
fn half_of_e4m3(code: u8) -> f32 {
    let (exponent, mantissa) = (i32::from(code >> 3 & 15), f32::from(code & 7));
    match (code, exponent) {
        (0x7f, _) => 0.0,
        (_, 0) => mantissa * 2f32.powi(-10),
        _ => (1.0 + mantissa / 8.0) * 2f32.powi(exponent - 8),
    }
}
