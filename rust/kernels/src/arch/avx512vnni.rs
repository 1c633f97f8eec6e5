//! AVX-512 with VNNI (Cascade Lake, 2019, and Zen 4, 2022, and later): one instruction adds four products of bytes to
//! each lane.

use std::arch::x86_64::*;

use super::avx512::{Variant, Zmm, detect_common};
use super::simd::DotKernel;

/// Variant that computes dot products with VNNI.
#[derive(Clone, Copy, Debug)]
pub struct Vnni(());

/// Proof that this machine has AVX-512 with VNNI.
pub type Avx512Vnni = Zmm<Vnni>;

impl Avx512Vnni {
    /// Returns a token if this machine has the instructions.
    #[must_use]
    pub fn detect() -> Option<Self> {
        (detect_common() && is_x86_feature_detected!("avx512vnni")).then_some(Self(Vnni(())))
    }
}

impl Variant for Vnni {
    const WEIGHT_BIAS: u8 = 128;
    const BY_CODES: bool = false;
    const CODE_ROWS: usize = 2;
    const READS_ONE_STREAM: bool = true;

    #[inline(always)]
    fn dot(self, acc: __m512i, w: __m512i, x: __m512i) -> __m512i {
        // SAFETY: `self` exists only where detection found the instruction.
        unsafe { _mm512_dpbusd_epi32(acc, w, x) }
    }

    #[inline(always)]
    fn dot_codes(self, acc: __m512i, codes: __m512i, x: __m512i) -> __m512i {
        self.dot(acc, codes, x)
    }

    #[inline(always)]
    fn add_scaled(self, acc: __m512i, partial: __m512i, scale: __m512i, is_short: bool) -> __m512i {
        // SAFETY: `self` exists only where detection found the instructions.
        unsafe {
            // The upper half of a short partial sum only extends its sign: its factor is zero.
            let factor = _mm512_and_si512(scale, _mm512_set1_epi32(0xffff));
            if is_short {
                _mm512_dpwssd_epi32(acc, partial, factor)
            } else {
                _mm512_add_epi32(acc, _mm512_mullo_epi32(partial, factor))
            }
        }
    }

    #[inline(always)]
    fn enter<K: DotKernel>(self, kernel: K) -> K::Output {
        // Never inlined: kernels that call kernels would grow into functions that take minutes to compile.
        #[inline(never)]
        #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c,popcnt")]
        fn dot_with_features<K: DotKernel>(token: Avx512Vnni, kernel: K) -> K::Output {
            kernel.run(token)
        }
        // SAFETY: `self` exists only where detection found these features.
        unsafe { dot_with_features(Zmm(self), kernel) }
    }

    #[inline]
    fn enter_expanding<K: DotKernel>(self, kernel: K) -> K::Output {
        if is_x86_feature_detected!("avx512vbmi2") { VnniVbmi2(()).enter(kernel) } else { self.enter(kernel) }
    }
}

/// Variant that expands bytes with VBMI2 too (Ice Lake, 2019, and Zen 4, 2022, and later). Only kernels that
/// unpack sparse weights are compiled for it.
#[derive(Clone, Copy, Debug)]
struct VnniVbmi2(());

impl Variant for VnniVbmi2 {
    const WEIGHT_BIAS: u8 = Vnni::WEIGHT_BIAS;
    const BY_CODES: bool = Vnni::BY_CODES;
    const CODE_ROWS: usize = Vnni::CODE_ROWS;
    const READS_ONE_STREAM: bool = Vnni::READS_ONE_STREAM;
    const EXPANDS: bool = true;

    #[inline(always)]
    fn dot(self, acc: __m512i, w: __m512i, x: __m512i) -> __m512i {
        Vnni(()).dot(acc, w, x)
    }

    #[inline(always)]
    fn dot_codes(self, acc: __m512i, codes: __m512i, x: __m512i) -> __m512i {
        Vnni(()).dot_codes(acc, codes, x)
    }

    #[inline(always)]
    fn add_scaled(self, acc: __m512i, partial: __m512i, scale: __m512i, is_short: bool) -> __m512i {
        Vnni(()).add_scaled(acc, partial, scale, is_short)
    }

    #[inline(always)]
    fn enter<K: DotKernel>(self, kernel: K) -> K::Output {
        // Never inlined: kernels that call kernels would grow into functions that take minutes to compile.
        #[inline(never)]
        #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512vbmi2,avx2,fma,f16c,popcnt")]
        fn dot_with_features<K: DotKernel>(token: Zmm<VnniVbmi2>, kernel: K) -> K::Output {
            kernel.run(token)
        }
        // SAFETY: `self` exists only where detection found these features.
        unsafe { dot_with_features(Zmm(self), kernel) }
    }
}
