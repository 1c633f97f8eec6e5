//! VNNI on 256-bit registers, in the encodings of AVX-VNNI (Alder Lake, 2021, and Zen 5, 2024, and later) and of AVX-512.
//! The second encoding is only for tests of `Dot` on machines that lack the first: a machine that has it has AVX-512 with
//! VNNI, which is faster.

use std::arch::x86_64::*;

use super::avx2::{Variant, Ymm, detect_common};
use super::simd::DotKernel;

/// Implements a variant from its features and its instruction.
macro_rules! vnni {
    ($(#[$doc:meta])* $variant:ident, $token:ident, $features:tt, [$($feature:tt),*], $dot:ident, $dot_words:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug)]
        pub struct $variant(());

        $(#[$doc])*
        pub type $token = Ymm<$variant>;

        impl $token {
            /// Returns a token if this machine has the instructions.
            #[must_use]
            pub fn detect() -> Option<Self> {
                (detect_common() $(&& is_x86_feature_detected!($feature))*).then_some(Self($variant(())))
            }
        }

        impl Variant for $variant {
            const WEIGHT_BIAS: u8 = 128;
            // 12 accumulators, two weights and a broadcast activation of 16 registers.
            const BYTE_TILE_ROWS: usize = 6;
            const BY_CODES: bool = false;
            const CODE_ROWS: usize = 2;

            #[inline(always)]
            fn dot(self, acc: __m256i, w: __m256i, x: __m256i) -> __m256i {
                // SAFETY: `self` exists only where detection found the instruction.
                unsafe { $dot(acc, w, x) }
            }

            #[inline(always)]
            fn dot_codes(self, acc: __m256i, codes: __m256i, x: __m256i) -> __m256i {
                self.dot(acc, codes, x)
            }

            #[inline(always)]
            fn add_scaled(self, acc: __m256i, partial: __m256i, scale: __m256i, is_short: bool) -> __m256i {
                // SAFETY: `self` exists only where detection found the instructions.
                unsafe {
                    // The upper half of a short partial sum only extends its sign: its factor is zero.
                    let factor = _mm256_and_si256(scale, _mm256_set1_epi32(0xffff));
                    if is_short {
                        $dot_words(acc, partial, factor)
                    } else {
                        _mm256_add_epi32(acc, _mm256_mullo_epi32(partial, factor))
                    }
                }
            }

            #[inline(always)]
            fn enter<K: DotKernel>(self, kernel: K) -> K::Output {
                // Never inlined: kernels that call kernels would grow into functions that take minutes to compile.
                #[inline(never)]
                #[target_feature(enable = $features)]
                fn dot_with_features<K: DotKernel>(token: $token, kernel: K) -> K::Output {
                    kernel.run(token)
                }
                // SAFETY: `self` exists only where detection found these features.
                unsafe { dot_with_features(Ymm(self), kernel) }
            }
        }
    };
}

vnni! {
    /// AVX2 with AVX-VNNI.
    Vex, AvxVnni, "avx2,fma,f16c,popcnt,avxvnni", ["avxvnni"], _mm256_dpbusd_avx_epi32,
    _mm256_dpwssd_avx_epi32
}

#[cfg(test)]
vnni! {
    /// AVX2 with VNNI in the encoding of AVX-512.
    Evex, AvxVnniEvex, "avx2,fma,f16c,popcnt,avx512f,avx512vl,avx512vnni", ["avx512f", "avx512vl", "avx512vnni"],
    _mm256_dpbusd_epi32, _mm256_dpwssd_epi32
}
