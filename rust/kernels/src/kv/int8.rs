//! int8 KV cache: K and V as int8 codes, with a scale for each token and head.
//!
//! A head of a page is a line of scales, then K as `[key_dim / 4][token][4]`, then V as `[token / 4][value_dim][4]`:
//! the four bytes of a lane are summed by one dot product instruction, over columns of K and over tokens of V.
//! Columns of K are zero-padded to a multiple of four, columns of V to a multiple of [`LANES`].
//!
//! Codes of K are stored with the bias [`Dot::WEIGHT_BIAS`], because they are the first factors of [`Dot::dot`]. Codes
//! of V have no bias: they are the second factors, and the first are probabilities, which are never negative. A page
//! depends on the instruction set, which is fixed for a process.
//!
//! A scale is a bf16, which has the range of an f32 in half the bytes. Codes are computed with the rounded scale, which
//! is at most 2^-8 (relative) below 1/127 of the largest magnitude, so codes stay within 127.5 and round to at most 127.
//! The error of an element is at most half a scale.
//!
//! If K or V of a head is not finite, the scale of K is NaN. Every row that attends to the token then has a NaN score
//! and a NaN output; other rows are not affected.

use crate::arch::{ByteLine, Dot, DotKernel, Isa, LANES, LINE, Simd};
use crate::math::load_padded;

use super::{PAGE_TOKENS, value_vectors};

/// Number of products (over columns of K or tokens of V) that one instruction sums.
pub(crate) const QUAD: usize = 4;

/// Largest code.
pub(crate) const MAX_CODE: f32 = 127.0;

/// Name in options.
pub(super) const NAME: &str = "int8";

const _: () = assert!(2 * PAGE_TOKENS * size_of::<u16>() == LINE, "the scales of a head take one line");

/// Returns the number of quads of columns of K.
pub(crate) fn key_quads(key_dim: usize) -> usize {
    key_dim.div_ceil(QUAD)
}

/// Returns the bytes of the scales and K of a head.
pub(super) fn key_bytes(key_dim: usize) -> Option<usize> {
    key_quads(key_dim).checked_add(1)?.checked_mul(LINE)
}

/// Returns the bytes of V of a head.
pub(super) fn value_bytes(value_dim: usize) -> Option<usize> {
    value_vectors(value_dim).checked_mul(PAGE_TOKENS / QUAD * LINE)
}

/// int8 K and V of one head in one page.
#[derive(Clone, Copy, Default)]
pub(crate) struct CodePage<'a> {
    /// Scales of K and of V, `[2][token]` in bf16. Empty if there is no page.
    pub(crate) scales: &'a [[u16; LANES]],
    /// Biased codes of K, `[key_quads]` lines of `[token][4]`.
    pub(crate) keys: &'a [ByteLine],
    /// Codes of V, `[token / 4][value_vectors]` lines of `[16 columns][4]`.
    pub(crate) values: &'a [ByteLine],
}

impl<'a> CodePage<'a> {
    /// Splits the bytes of a head.
    pub(super) fn new(head: &'a [u8], key_dim: usize) -> Self {
        let (scales, codes) = head.split_at(LINE);
        let (keys, values) = bytemuck::cast_slice(codes).split_at(key_quads(key_dim));
        Self { scales: bytemuck::cast_slice(scales), keys, values }
    }
}

/// Quantizes K and V of a token into `slot` of a head.
pub(super) fn write(isa: Isa, head: &mut [u8], slot: usize, key: &[f32], value: &[f32]) {
    isa.run_dot(Write { head, slot, key, value });
}

struct Write<'a> {
    head: &'a mut [u8],
    slot: usize,
    key: &'a [f32],
    value: &'a [f32],
}

impl DotKernel for Write<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Dot>(self, simd: S) {
        let Self { head, slot, key, value } = self;
        let (largest_key, largest_value) = (largest(simd, key), largest(simd, value));
        let finite = largest_key.is_finite() && largest_value.is_finite();
        let scale = |largest: f32| if finite { round_scale(largest / MAX_CODE) } else { half::bf16::ZERO };
        let (key_scale, value_scale) = (scale(largest_key), scale(largest_value));
        let (scales, codes) = head.split_at_mut(LINE);
        let scales: &mut [[u16; PAGE_TOKENS]] = bytemuck::cast_slice_mut(scales);
        scales[0][slot] = if finite { key_scale } else { half::bf16::NAN }.to_bits();
        scales[1][slot] = value_scale.to_bits();

        let (keys, values) = codes.as_chunks_mut::<LINE>().0.split_at_mut(key_quads(key.len()));
        let factor = inverse(key_scale.to_f32());
        for (lines, numbers) in keys.chunks_mut(LANES / QUAD).zip(key.chunks(LANES)) {
            let codes = if finite { encode(simd, load_padded(simd, numbers), factor) } else { [0; LANES] };
            for (line, quad) in lines.iter_mut().zip(codes.as_chunks::<QUAD>().0) {
                for (byte, code) in line[slot * QUAD..].iter_mut().zip(quad) {
                    *byte = code.cast_unsigned().wrapping_add(S::WEIGHT_BIAS);
                }
            }
        }
        let factor = inverse(value_scale.to_f32());
        let vectors = value_vectors(value.len());
        let lines = &mut values[slot / QUAD * vectors..][..vectors];
        for (line, numbers) in lines.iter_mut().zip(value.chunks(LANES)) {
            let codes = if finite { encode(simd, load_padded(simd, numbers), factor) } else { [0; LANES] };
            for (byte, code) in line[slot % QUAD..].iter_mut().step_by(QUAD).zip(codes) {
                *byte = code as u8;
            }
        }
    }
}

/// Rounds a scale to bf16. Scales too small to have an inverse become 0.
fn round_scale(scale: f32) -> half::bf16 {
    if scale < f32::MIN_POSITIVE { half::bf16::ZERO } else { half::bf16::from_f32(scale) }
}

/// Returns the inverse of a scale, or 0 if the scale is too small.
#[inline(always)]
pub(crate) fn inverse(scale: f32) -> f32 {
    if scale < f32::MIN_POSITIVE { 0.0 } else { scale.recip() }
}

/// Returns the largest magnitude. The result is not finite if any number is not.
#[inline(always)]
pub(crate) fn largest<S: Simd>(simd: S, numbers: &[f32]) -> f32 {
    let zero = simd.splat(0.0);
    let (mut largest, mut poison) = (zero, zero);
    for numbers in numbers.chunks(LANES) {
        let numbers = load_padded(simd, numbers);
        largest = simd.max(simd.max(numbers, simd.sub(zero, numbers)), largest);
        poison = simd.mul_add(numbers, zero, poison);
    }
    simd.reduce_max(largest) + simd.reduce_add(poison)
}

/// Quantizes sixteen numbers, whose products with `factor` must be within ±127.5.
#[inline(always)]
pub(crate) fn encode<S: Simd>(simd: S, numbers: S::F32, factor: f32) -> [i8; LANES] {
    let mut codes = [0; LANES];
    simd.store_i8(simd.to_i32(simd.mul(numbers, simd.splat(factor))), &mut codes);
    codes
}
