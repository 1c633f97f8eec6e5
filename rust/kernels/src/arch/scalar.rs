//! Plain Rust: runs anywhere. On x86-64 the compiler turns the sixteen lanes into SSE2.

use super::simd::{Kernel, LANES, Simd};

/// The instruction set that every machine has.
#[derive(Clone, Copy, Debug)]
pub struct Scalar;

impl Scalar {
    /// Every machine has it.
    #[must_use]
    pub fn detect() -> Option<Self> {
        Some(Self)
    }
}

/// Sixteen f32 in memory or in whatever registers the compiler finds.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub struct F32x16([f32; LANES]);

impl F32x16 {
    #[inline(always)]
    fn zip(self, other: Self, f: impl Fn(f32, f32) -> f32) -> Self {
        Self(std::array::from_fn(|i| f(self.0[i], other.0[i])))
    }
}

/// An IEEE half float as f32, without branches, so that the compiler can do several at once.
///
/// With the bits in their new place the value is too small by 2^112, for subnormal numbers too; multiplying by that is
/// exact. Infinity and NaN come out as large numbers and get the exponent that they should have.
#[inline(always)]
fn widen_f16(bits: u16) -> f32 {
    const SCALE: f32 = f32::from_bits((127 + 112) << 23);
    let magnitude = f32::from_bits(u32::from(bits & 0x7fff) << 13) * SCALE;
    let exponent = if bits & 0x7c00 == 0x7c00 { 0x7f80_0000 } else { 0 };
    f32::from_bits(magnitude.to_bits() | exponent | u32::from(bits & 0x8000) << 16)
}

impl Simd for Scalar {
    type F32 = F32x16;

    // Sixteen xmm registers: two rows of one panel (8 accumulators) leave room for the weights.
    const TILE_ROWS: usize = 2;
    const TILE_PANELS: usize = 1;

    #[inline]
    fn vectorize<K: Kernel>(self, kernel: K) -> K::Output {
        kernel.run(self)
    }

    #[inline(always)]
    fn splat(self, value: f32) -> F32x16 {
        F32x16([value; LANES])
    }

    #[inline(always)]
    fn load(self, from: &[f32; LANES]) -> F32x16 {
        F32x16(*from)
    }

    #[inline(always)]
    fn load_bf16(self, from: &[u16; LANES]) -> F32x16 {
        F32x16(from.map(|bits| f32::from_bits(u32::from(bits) << 16)))
    }

    #[inline(always)]
    fn load_f16(self, from: &[u16; LANES]) -> F32x16 {
        F32x16(from.map(widen_f16))
    }

    #[inline(always)]
    fn store(self, value: F32x16, to: &mut [f32; LANES]) {
        *to = value.0;
    }

    #[inline(always)]
    fn store_bf16(self, value: F32x16, to: &mut [u16; LANES]) {
        *to = value.0.map(|x| half::bf16::from_f32(x).to_bits());
    }

    #[inline(always)]
    fn store_f16(self, value: F32x16, to: &mut [u16; LANES]) {
        *to = value.0.map(|x| half::f16::from_f32(x).to_bits());
    }

    #[inline(always)]
    fn add(self, a: F32x16, b: F32x16) -> F32x16 {
        a.zip(b, |a, b| a + b)
    }

    #[inline(always)]
    fn sub(self, a: F32x16, b: F32x16) -> F32x16 {
        a.zip(b, |a, b| a - b)
    }

    #[inline(always)]
    fn mul(self, a: F32x16, b: F32x16) -> F32x16 {
        a.zip(b, |a, b| a * b)
    }

    #[inline(always)]
    fn div(self, a: F32x16, b: F32x16) -> F32x16 {
        a.zip(b, |a, b| a / b)
    }

    /// Rounds twice: without an FMA instruction `f32::mul_add` is a slow library call.
    #[inline(always)]
    fn mul_add(self, a: F32x16, b: F32x16, c: F32x16) -> F32x16 {
        F32x16(std::array::from_fn(|i| a.0[i] * b.0[i] + c.0[i]))
    }

    #[inline(always)]
    fn max(self, a: F32x16, b: F32x16) -> F32x16 {
        a.zip(b, |a, b| if a > b { a } else { b })
    }

    #[inline(always)]
    fn min(self, a: F32x16, b: F32x16) -> F32x16 {
        a.zip(b, |a, b| if a < b { a } else { b })
    }

    /// Adding and taking away 1.5 * 2^23 leaves the integer that the hardware's rounding chose.
    #[inline(always)]
    fn round(self, value: F32x16) -> F32x16 {
        const SHIFT: f32 = 12_582_912.0;
        F32x16(value.0.map(|x| (x + SHIFT) - SHIFT))
    }

    /// Adding 2^23 + 127 puts n + 127 into the low mantissa bits, where a shift makes them an exponent.
    #[inline(always)]
    fn exp2_integer(self, n: F32x16) -> F32x16 {
        F32x16(n.0.map(|n| f32::from_bits((n + (8_388_608.0 + 127.0)).to_bits() << 23)))
    }

    #[inline(always)]
    fn select_range(self, from: usize, to: usize, a: F32x16, b: F32x16) -> F32x16 {
        F32x16(std::array::from_fn(|i| if from <= i && i < to { a.0[i] } else { b.0[i] }))
    }

    #[inline(always)]
    fn prefetch(self, at: *const u8) {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: a prefetch is a hint; it neither reads nor faults, whatever the address. SSE is part of x86-64.
        unsafe {
            use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
            _mm_prefetch::<_MM_HINT_T0>(at.cast());
        }
        #[cfg(not(target_arch = "x86_64"))]
        let _ = at;
    }
}
