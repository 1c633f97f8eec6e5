//! IQ1_S and IQ1_M: each eight inputs are a point of a grid of -1, 0 and 1, shifted up or down by one eighth. Value: d
//! * (2 scale + 1) * (grid value ± 1/8).

use ferrule_kernels::quant::grids::IQ1;
use half::f16;

use super::bits::{half, nibble, u16_at};

const SHIFT: f32 = 0.125;

/// Block: f16 d; for each 8 inputs, 8 bits of grid index; for each 32 inputs, a u16 with 3 more bits for each of the 4
/// indices, 3 bits of scale, and 1 bit for a shift down.
pub(super) fn dequantize_s(block: &[u8; 50], out: &mut [f32; 256]) {
    let d = half(block, 0);
    for (i, out) in out.as_chunks_mut().0.iter_mut().enumerate() {
        let group = u16_at(block, 34 + i / 4 * 2);
        let scale = d * f32::from(2 * (group >> 12 & 7) + 1);
        let high = group >> (i % 4 * 3) & 7;
        shifted(scale, usize::from(block[2 + i]) | usize::from(high) << 8, group >> 15 != 0, out);
    }
}

/// Block: for each 8 inputs, 8 bits of grid index, then 4 bits: 3 more of the index and 1 for a shift down. For each 16
/// inputs 3 bits of scale, four of them in a u16, whose highest 4 bits are a part of d.
pub(super) fn dequantize_m(block: &[u8; 56], out: &mut [f32; 256]) {
    let scales = |index: usize| u16_at(block, 48 + 2 * index);
    let d = scales(0) >> 12 | scales(1) >> 12 << 4 | scales(2) >> 12 << 8 | scales(3) >> 12 << 12;
    let d = f16::from_bits(d).to_f32();
    for (i, out) in out.as_chunks_mut().0.iter_mut().enumerate() {
        let scale = scales(i / 8) >> (i / 2 % 4 * 3) & 7;
        let high = nibble(&block[32..48], i);
        let point = usize::from(block[i]) | usize::from(high & 7) << 8;
        shifted(d * f32::from(2 * scale + 1), point, high >> 3 != 0, out);
    }
}

#[inline(always)]
fn shifted(scale: f32, point: usize, down: bool, out: &mut [f32; 8]) {
    let shift = if down { -SHIFT } else { SHIFT };
    for (out, value) in out.iter_mut().zip(IQ1[point]) {
        *out = scale * (f32::from(value) + shift);
    }
}
