//! IQ3_XXS and IQ3_S: each four inputs are a point of a grid, with signs.

use super::bits::{half, nibble, u32_at};
use super::grids::{IQ3_S, IQ3_XXS, even_signs, signed};

/// Block: f16 d; for each 4 inputs a grid index; for each 32 inputs a u32 with 7 bits of signs for each 8, and the
/// scale above them. Value: d * (scale + 1/2) / 2 * grid value.
pub(super) fn dequantize_xxs(block: &[u8; 98], out: &mut [f32; 256]) {
    let d = half(block, 0);
    for (group, out) in out.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        let signs = u32_at(block, 66 + group * 4);
        let scale = d * (0.5 + (signs >> 28) as f32) * 0.5;
        for (i, out) in out.as_chunks_mut().0.iter_mut().enumerate() {
            let point = |half: usize| IQ3_XXS[usize::from(block[2 + group * 8 + i * 2 + half])];
            signed(scale, &two(point), even_signs(signs >> (7 * i)), out);
        }
    }
}

/// Block: f16 d; for each 4 inputs 8 bits of grid index, then 1 more; for each 8 inputs 8 bits of signs; for each 32
/// inputs a scale of 4 bits. Value: d * (2 scale + 1) * grid value.
pub(super) fn dequantize_s(block: &[u8; 110], out: &mut [f32; 256]) {
    let d = half(block, 0);
    for (i, out) in out.as_chunks_mut().0.iter_mut().enumerate() {
        let point = |half: usize| {
            let index = i * 2 + half;
            let high = block[66 + index / 8] >> (index % 8) & 1;
            IQ3_S[usize::from(block[2 + index]) | usize::from(high) << 8]
        };
        let scale = d * f32::from(1 + 2 * nibble(&block[106..], i / 4));
        signed(scale, &two(point), block[74 + i], out);
    }
}

/// Returns the values of two consecutive points.
#[inline(always)]
fn two(point: impl Fn(usize) -> [i8; 4]) -> [i8; 8] {
    let ([a, b, c, d], [e, f, g, h]) = (point(0), point(1));
    [a, b, c, d, e, f, g, h]
}
