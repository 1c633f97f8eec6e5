//! AVX-512 with VNNI (Cascade Lake, 2019, and Zen 4, 2022, onward): four products of bytes and their sum in one
//! instruction.

use std::arch::x86_64::*;

use super::avx512::{Variant, Zmm, detect_common};
use super::simd::Kernel;

/// AVX-512 with VNNI.
#[derive(Clone, Copy, Debug)]
pub struct Vnni(());

/// Proof that this machine has AVX-512 with VNNI.
pub type Avx512Vnni = Zmm<Vnni>;

impl Avx512Vnni {
    /// A token if this machine has the instructions.
    #[must_use]
    pub fn detect() -> Option<Self> {
        (detect_common() && is_x86_feature_detected!("avx512vnni")).then_some(Self(Vnni(())))
    }
}

impl Variant for Vnni {
    const WEIGHT_BIAS: u8 = 128;
    const BY_CODES: bool = false;

    #[inline(always)]
    fn dot(self, acc: __m512i, w: __m512i, x: __m512i) -> __m512i {
        // SAFETY: `self` exists only where detection saw the instruction.
        unsafe { _mm512_dpbusd_epi32(acc, w, x) }
    }

    #[inline(always)]
    fn enter<K: Kernel>(self, kernel: K) -> K::Output {
        // Never inlined: kernels that call kernels would grow into functions that take the compiler minutes.
        #[inline(never)]
        #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
        fn with_features<K: Kernel>(token: Avx512Vnni, kernel: K) -> K::Output {
            kernel.run(token)
        }
        // SAFETY: `self` exists only where detection saw these features.
        unsafe { with_features(Zmm(self), kernel) }
    }
}
