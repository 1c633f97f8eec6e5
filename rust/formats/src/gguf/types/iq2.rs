//! IQ2_XXS, IQ2_XS and IQ2_S: each eight inputs are a point of a grid, with signs. Value: d * (scale + 1/2) / 4 * grid
//! value.

use super::bits::{half, nibble, u16_at, u32_at};
use super::grids::{IQ2_S, IQ2_XS, IQ2_XXS, even_signs, signed};

/// Block: f16 d; for each 32 inputs two u32: four grid indices, then 7 bits of signs for each with the scale above
/// them.
pub(super) fn dequantize_xxs(block: &[u8; 66], out: &mut [f32; 256]) {
    let d = half(block, 0);
    for (group, out) in out.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        let points = &block[2 + group * 8..][..4];
        let signs = u32_at(block, 6 + group * 8);
        let scale = d * (0.5 + (signs >> 28) as f32) * 0.25;
        for (i, (out, point)) in out.as_chunks_mut().0.iter_mut().zip(points).enumerate() {
            signed(scale, &IQ2_XXS[usize::from(*point)], even_signs(signs >> (7 * i)), out);
        }
    }
}

/// Block: f16 d; for each 8 inputs a u16 with 9 bits of grid index and 7 of signs; for each 16 inputs a scale of 4
/// bits.
pub(super) fn dequantize_xs(block: &[u8; 74], out: &mut [f32; 256]) {
    let d = half(block, 0);
    for (i, out) in out.as_chunks_mut().0.iter_mut().enumerate() {
        let code = u16_at(block, 2 + 2 * i);
        let scale = d * (0.5 + f32::from(nibble(&block[66..], i / 2))) * 0.25;
        signed(scale, &IQ2_XS[usize::from(code & 511)], even_signs(u32::from(code >> 9)), out);
    }
}

/// Block: f16 d; for each 8 inputs 8 bits of grid index, then 8 of signs, then 2 more of the index; for each 16 inputs
/// a scale of 4 bits.
pub(super) fn dequantize_s(block: &[u8; 82], out: &mut [f32; 256]) {
    let d = half(block, 0);
    for (i, out) in out.as_chunks_mut().0.iter_mut().enumerate() {
        let high = block[66 + i / 4] >> (2 * (i % 4)) & 3;
        let point = usize::from(block[2 + i]) | usize::from(high) << 8;
        let scale = d * (0.5 + f32::from(nibble(&block[74..], i / 2))) * 0.25;
        signed(scale, &IQ2_S[point], block[34 + i], out);
    }
}
