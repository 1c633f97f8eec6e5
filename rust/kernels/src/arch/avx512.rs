//! AVX-512: one register holds the sixteen lanes.

use std::arch::x86_64::*;

use super::simd::{Kernel, LANES, Simd};

/// Proof that this machine has AVX-512 F, BW, VL and DQ (every AVX-512 CPU but Knights Landing) and what AVX2 needs.
#[derive(Clone, Copy, Debug)]
pub struct Avx512(());

impl Avx512 {
    /// A token if this machine has the instructions.
    #[must_use]
    pub fn detect() -> Option<Self> {
        let found = is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512vl")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c");
        found.then_some(Self(()))
    }
}

/// An intrinsic of the features that the token stands for.
macro_rules! simd {
    ($call:expr) => {{
        // SAFETY: `self` exists only where detection saw these features; pointers come from references to whole vectors.
        unsafe { $call }
    }};
}

impl Simd for Avx512 {
    type F32 = __m512;

    // 24 accumulators, two weights, and a broadcast activation of 32 registers.
    const TILE_ROWS: usize = 12;
    const TILE_PANELS: usize = 2;

    #[inline]
    fn vectorize<K: Kernel>(self, kernel: K) -> K::Output {
        #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
        fn with_features<K: Kernel>(token: Avx512, kernel: K) -> K::Output {
            kernel.run(token)
        }
        simd!(with_features(self, kernel))
    }

    #[inline(always)]
    fn splat(self, value: f32) -> __m512 {
        simd!(_mm512_set1_ps(value))
    }

    #[inline(always)]
    fn load(self, from: &[f32; LANES]) -> __m512 {
        simd!(_mm512_loadu_ps(from.as_ptr()))
    }

    #[inline(always)]
    fn load_bf16(self, from: &[u16; LANES]) -> __m512 {
        simd!(_mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(_mm256_loadu_si256(
            from.as_ptr().cast()
        )))))
    }

    #[inline(always)]
    fn load_f16(self, from: &[u16; LANES]) -> __m512 {
        simd!(_mm512_cvtph_ps(_mm256_loadu_si256(from.as_ptr().cast())))
    }

    #[inline(always)]
    fn store(self, value: __m512, to: &mut [f32; LANES]) {
        simd!(_mm512_storeu_ps(to.as_mut_ptr(), value));
    }

    /// Adding just under half of the last place that stays, and that place's lowest bit, rounds ties to even.
    #[inline(always)]
    fn store_bf16(self, value: __m512, to: &mut [u16; LANES]) {
        simd!({
            let bits = _mm512_castps_si512(value);
            let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
            let rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
            let is_nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(value, value);
            let rounded = _mm512_mask_or_epi32(rounded, is_nan, bits, _mm512_set1_epi32(0x0040_0000));
            let narrow = _mm512_cvtepi32_epi16(_mm512_srli_epi32::<16>(rounded));
            _mm256_storeu_si256(to.as_mut_ptr().cast(), narrow);
        });
    }

    #[inline(always)]
    fn store_f16(self, value: __m512, to: &mut [u16; LANES]) {
        let narrow = simd!(_mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(value));
        simd!(_mm256_storeu_si256(to.as_mut_ptr().cast(), narrow));
    }

    #[inline(always)]
    fn add(self, a: __m512, b: __m512) -> __m512 {
        simd!(_mm512_add_ps(a, b))
    }

    #[inline(always)]
    fn sub(self, a: __m512, b: __m512) -> __m512 {
        simd!(_mm512_sub_ps(a, b))
    }

    #[inline(always)]
    fn mul(self, a: __m512, b: __m512) -> __m512 {
        simd!(_mm512_mul_ps(a, b))
    }

    #[inline(always)]
    fn div(self, a: __m512, b: __m512) -> __m512 {
        simd!(_mm512_div_ps(a, b))
    }

    #[inline(always)]
    fn mul_add(self, a: __m512, b: __m512, c: __m512) -> __m512 {
        simd!(_mm512_fmadd_ps(a, b, c))
    }

    #[inline(always)]
    fn max(self, a: __m512, b: __m512) -> __m512 {
        simd!(_mm512_max_ps(a, b))
    }

    #[inline(always)]
    fn min(self, a: __m512, b: __m512) -> __m512 {
        simd!(_mm512_min_ps(a, b))
    }

    #[inline(always)]
    fn round(self, value: __m512) -> __m512 {
        simd!(_mm512_roundscale_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(value))
    }

    #[inline(always)]
    fn exp2_integer(self, n: __m512) -> __m512 {
        simd!({
            let biased = _mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127));
            _mm512_castsi512_ps(_mm512_slli_epi32::<23>(biased))
        })
    }

    #[inline(always)]
    fn select_range(self, from: usize, to: usize, a: __m512, b: __m512) -> __m512 {
        let below = |n: usize| if n >= LANES { u16::MAX } else { (1u16 << n) - 1 };
        simd!(_mm512_mask_blend_ps(below(to) & !below(from), b, a))
    }

    #[inline(always)]
    fn prefetch(self, at: *const u8) {
        simd!(_mm_prefetch::<_MM_HINT_T0>(at.cast()));
    }
}
