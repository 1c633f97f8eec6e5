//! AVX-512: one register holds the sixteen lanes.

use std::arch::x86_64::*;

use super::expand;
use super::simd::{Dot, DotKernel, Kernel, LANES, LINE, Plane, Simd, index_mask};

/// Calls intrinsics of the features that the token proves.
macro_rules! simd {
    ($call:expr) => {{
        // SAFETY: `self` exists only where detection found these features; pointers come from references to whole
        // vectors.
        unsafe { $call }
    }};
}

/// Dot product of an instruction set with 512-bit registers; the other operations are the same for all of them.
pub trait Variant: Copy + Send + Sync + 'static {
    /// See [`Dot::WEIGHT_BIAS`].
    const WEIGHT_BIAS: u8;

    /// See [`Dot::BY_CODES`].
    const BY_CODES: bool;
    /// See [`Dot::CODE_ROWS`].
    const CODE_ROWS: usize = 0;
    /// See [`Dot::READS_ONE_STREAM`].
    const READS_ONE_STREAM: bool = false;

    /// Whether there is an instruction that expands bytes.
    const EXPANDS: bool = false;

    /// See [`Dot::dot`].
    fn dot(self, acc: __m512i, w: __m512i, x: __m512i) -> __m512i;

    /// See [`Dot::dot_codes`].
    fn dot_codes(self, acc: __m512i, codes: __m512i, x: __m512i) -> __m512i;

    /// See [`Dot::add_scaled`].
    fn add_scaled(self, acc: __m512i, partial: __m512i, scale: __m512i, is_short: bool) -> __m512i;

    /// Runs `kernel` in a function that is compiled with the variant's instructions.
    fn enter<K: DotKernel>(self, kernel: K) -> K::Output;

    /// See [`Dot::vectorize_expand`].
    #[inline]
    fn enter_expanding<K: DotKernel>(self, kernel: K) -> K::Output {
        self.enter(kernel)
    }
}

/// Proof that this machine has AVX-512 F, BW, VL and DQ, the features of AVX2, and the instructions of `V`.
#[derive(Clone, Copy, Debug)]
pub struct Zmm<V>(pub(super) V);

/// Returns whether this machine has the features that all variants need.
pub(super) fn detect_common() -> bool {
    is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512vl")
        && is_x86_feature_detected!("avx512dq")
        && is_x86_feature_detected!("avx2")
        && is_x86_feature_detected!("fma")
        && is_x86_feature_detected!("f16c")
        && is_x86_feature_detected!("popcnt")
}

/// Variant without VNNI: every CPU with AVX-512 except Knights Landing (Skylake-SP, 2017).
#[derive(Clone, Copy, Debug)]
pub struct Plain(());

/// Proof that this machine has AVX-512.
pub type Avx512 = Zmm<Plain>;

impl Avx512 {
    /// Returns a token if this machine has the instructions.
    #[must_use]
    pub fn detect() -> Option<Self> {
        detect_common().then_some(Self(Plain(())))
    }
}

impl Variant for Plain {
    const WEIGHT_BIAS: u8 = 0;
    const BY_CODES: bool = true;

    /// AVX-512 without VNNI has no product of signed bytes: the sign of `w` goes to `x`. Pairs of products stay below 2^15, as `x` is
    /// never -128.
    #[inline(always)]
    fn dot(self, acc: __m512i, w: __m512i, x: __m512i) -> __m512i {
        simd!({
            let signed = _mm512_mask_sub_epi8(x, _mm512_movepi8_mask(w), _mm512_setzero_si512(), x);
            let pairs = _mm512_maddubs_epi16(_mm512_abs_epi8(w), signed);
            _mm512_add_epi32(acc, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)))
        })
    }

    #[inline(always)]
    fn dot_codes(self, acc: __m512i, codes: __m512i, x: __m512i) -> __m512i {
        simd!(_mm512_add_epi16(acc, _mm512_maddubs_epi16(codes, x)))
    }

    #[inline(always)]
    fn add_scaled(self, acc: __m512i, partial: __m512i, scale: __m512i, _is_short: bool) -> __m512i {
        simd!(_mm512_add_epi32(acc, _mm512_madd_epi16(partial, scale)))
    }

    #[inline(always)]
    fn enter<K: DotKernel>(self, kernel: K) -> K::Output {
        // Never inlined: kernels that call kernels would grow into functions that take minutes to compile.
        #[inline(never)]
        #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c,popcnt")]
        fn dot_with_features<K: DotKernel>(token: Avx512, kernel: K) -> K::Output {
            kernel.run(token)
        }
        simd!(dot_with_features(Zmm(self), kernel))
    }
}

impl<V: Variant> Simd for Zmm<V> {
    type F32 = __m512;
    type I32 = __m512i;
    type Bytes = __m512i;

    // 24 accumulators, two weights, and a broadcast activation of 32 registers.
    const TILE_ROWS: usize = 12;
    const TILE_PANELS: usize = 2;

    /// Runs the kernel as AVX-512 without VNNI does, whatever the variant, so that its code is compiled once for all
    /// variants.
    #[inline]
    fn vectorize<K: Kernel>(self, kernel: K) -> K::Output {
        // Never inlined: kernels that call kernels would grow into functions that take minutes to compile.
        #[inline(never)]
        #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c,popcnt")]
        fn with_features<K: Kernel>(token: Avx512, kernel: K) -> K::Output {
            kernel.run(token)
        }
        simd!(with_features(Zmm(Plain(())), kernel))
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

    #[inline(always)]
    fn store_nontemporal(self, value: __m512, to: &mut [f32; LANES]) {
        if to.as_ptr().addr().is_multiple_of(LINE) {
            simd!(_mm512_stream_ps(to.as_mut_ptr(), value));
        } else {
            self.store(value, to);
        }
    }

    #[inline(always)]
    fn fence(self) {
        simd!(_mm_sfence());
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
    fn select_greater(self, a: __m512, b: __m512, x: __m512, y: __m512) -> __m512 {
        simd!(_mm512_mask_blend_ps(_mm512_cmp_ps_mask::<_CMP_GT_OQ>(a, b), y, x))
    }

    #[inline(always)]
    fn select_range(self, from: usize, to: usize, a: __m512, b: __m512) -> __m512 {
        let below = |n: usize| if n >= LANES { u16::MAX } else { (1u16 << n) - 1 };
        self.select_lanes(below(to) & !below(from), a, b)
    }

    #[inline(always)]
    fn select_lanes(self, lanes: u16, a: __m512, b: __m512) -> __m512 {
        simd!(_mm512_mask_blend_ps(lanes, b, a))
    }

    #[inline(always)]
    fn swap_lanes<const N: usize>(self, a: __m512) -> __m512 {
        match N {
            1 => simd!(_mm512_permute_ps::<0b10_11_00_01>(a)),
            2 => simd!(_mm512_permute_ps::<0b01_00_11_10>(a)),
            4 => simd!(_mm512_shuffle_f32x4::<0b10_11_00_01>(a, a)),
            _ => simd!(_mm512_shuffle_f32x4::<0b01_00_11_10>(a, a)),
        }
    }

    #[inline(always)]
    fn splat_i32(self, value: i32) -> __m512i {
        simd!(_mm512_set1_epi32(value))
    }

    #[inline(always)]
    fn load_i32(self, from: &[i32; LANES]) -> __m512i {
        simd!(_mm512_loadu_si512(from.as_ptr().cast()))
    }

    #[inline(always)]
    fn load_i8(self, from: &[i8; LANES]) -> __m512i {
        simd!(_mm512_cvtepi8_epi32(_mm_loadu_si128(from.as_ptr().cast())))
    }

    #[inline(always)]
    fn load_planes<const N: usize>(self, planes: [Option<Plane<'_>>; N], zero: u8) -> __m512i {
        simd!({
            let mut numbers = _mm_setzero_si128();
            let mut i = 0;
            while i < N {
                if let Some(plane) = planes[i] {
                    let bytes = _mm_loadu_si128(plane.bytes.as_ptr().cast());
                    let lowest = _mm_srl_epi16(bytes, _mm_cvtsi64_si128(plane.from as i64));
                    let bits = _mm_and_si128(lowest, _mm_set1_epi8(plane.mask().cast_signed()));
                    numbers = _mm_or_si128(numbers, _mm_sll_epi16(bits, _mm_cvtsi64_si128(plane.to as i64)));
                }
                i += 1;
            }
            _mm512_cvtepi8_epi32(_mm_sub_epi8(numbers, _mm_set1_epi8(zero.cast_signed())))
        })
    }

    #[inline(always)]
    fn store_i32(self, value: __m512i, to: &mut [i32; LANES]) {
        simd!(_mm512_storeu_si512(to.as_mut_ptr().cast(), value));
    }

    #[inline(always)]
    fn add_i32(self, a: __m512i, b: __m512i) -> __m512i {
        simd!(_mm512_add_epi32(a, b))
    }

    #[inline(always)]
    fn to_f32(self, value: __m512i) -> __m512 {
        simd!(_mm512_cvtepi32_ps(value))
    }

    #[inline(always)]
    fn to_i32(self, value: __m512) -> __m512i {
        simd!(_mm512_cvtps_epi32(value))
    }

    #[inline(always)]
    fn store_i8(self, value: __m512i, to: &mut [i8; LANES]) {
        simd!(_mm_storeu_si128(to.as_mut_ptr().cast(), _mm512_cvtepi32_epi8(value)));
    }

    #[inline(always)]
    fn load_bytes(self, from: &[u8; LINE]) -> __m512i {
        simd!(_mm512_loadu_si512(from.as_ptr().cast()))
    }

    #[inline(always)]
    fn store_bytes(self, value: __m512i, to: &mut [u8; LINE]) {
        simd!(_mm512_storeu_si512(to.as_mut_ptr().cast(), value));
    }

    #[inline(always)]
    fn splat_byte(self, value: u8) -> __m512i {
        simd!(_mm512_set1_epi8(value as i8))
    }

    #[inline(always)]
    fn splat_quad(self, quad: [i8; 4]) -> __m512i {
        simd!(_mm512_set1_epi32(bytemuck::cast(quad)))
    }

    #[inline(always)]
    fn spread(self, from: &[u8; LANES]) -> __m512i {
        const PLACES: [u8; LINE] = {
            let mut places = [0; LINE];
            let mut i = 0;
            while i < LINE {
                places[i] = (i / 4) as u8;
                i += 1;
            }
            places
        };
        simd!({
            let quarters = _mm512_broadcast_i32x4(_mm_loadu_si128(from.as_ptr().cast()));
            _mm512_shuffle_epi8(quarters, self.load_bytes(&PLACES))
        })
    }

    #[inline(always)]
    fn lookup(self, table: &[u8; LANES], indices: __m512i) -> __m512i {
        simd!({
            let quarters = _mm512_broadcast_i32x4(_mm_loadu_si128(table.as_ptr().cast()));
            _mm512_shuffle_epi8(quarters, indices)
        })
    }

    #[inline(always)]
    fn shuffle(self, bytes: __m512i, indices: __m512i) -> __m512i {
        simd!(_mm512_shuffle_epi8(bytes, indices))
    }

    #[inline(always)]
    fn gather(self, table: &[[i8; 4]], indices: __m512i) -> __m512i {
        let mask = self.splat_i32(index_mask(table.len()));
        // Masked indices are less than the length of the table.
        simd!(_mm512_i32gather_epi32::<4>(self.and(indices, mask), table.as_ptr().cast()))
    }

    /// Loads both entries at once: a load of eight bytes takes no longer than one of four.
    #[inline(always)]
    fn gather_pairs(self, table: &[[i8; 4]], indices: __m512i) -> [__m512i; 2] {
        const EVEN: [i32; LANES] = [0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30];
        const ODD: [i32; LANES] = [1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31];
        let indices = self.and(indices, self.splat_i32(index_mask(table.len() / 2)));
        let pairs = table.as_ptr().cast();
        // Masked indices are less than half the length of the table.
        simd!({
            let low = _mm512_i32gather_epi64::<8>(_mm512_castsi512_si256(indices), pairs);
            let high = _mm512_i32gather_epi64::<8>(_mm512_extracti64x4_epi64::<1>(indices), pairs);
            [
                _mm512_permutex2var_epi32(low, self.load_i32(&EVEN), high),
                _mm512_permutex2var_epi32(low, self.load_i32(&ODD), high),
            ]
        })
    }

    #[inline(always)]
    fn negate(self, bytes: __m512i, negative: __m512i) -> __m512i {
        simd!(_mm512_mask_sub_epi8(bytes, _mm512_test_epi8_mask(negative, negative), _mm512_setzero_si512(), bytes))
    }

    #[inline(always)]
    fn and(self, a: __m512i, b: __m512i) -> __m512i {
        simd!(_mm512_and_si512(a, b))
    }

    #[inline(always)]
    fn or(self, a: __m512i, b: __m512i) -> __m512i {
        simd!(_mm512_or_si512(a, b))
    }

    #[inline(always)]
    fn xor(self, a: __m512i, b: __m512i) -> __m512i {
        simd!(_mm512_xor_si512(a, b))
    }

    #[inline(always)]
    fn sub_bytes(self, a: __m512i, b: __m512i) -> __m512i {
        simd!(_mm512_sub_epi8(a, b))
    }

    #[inline(always)]
    fn shift_right<const N: u32>(self, a: __m512i) -> __m512i {
        simd!(_mm512_srli_epi16::<N>(a))
    }

    #[inline(always)]
    fn shift_left<const N: u32>(self, a: __m512i) -> __m512i {
        simd!(_mm512_slli_epi16::<N>(a))
    }

    #[inline(always)]
    fn mul_pairs(self, a: __m512i, b: __m512i) -> __m512i {
        simd!(_mm512_mullo_epi16(a, b))
    }

    #[inline(always)]
    fn expand(self, mask: u64, values: &[u8; LINE]) -> __m512i {
        if const { V::EXPANDS } {
            return simd!(_mm512_maskz_expand_epi8(mask, _mm512_loadu_si512(values.as_ptr().cast())));
        }
        simd!({
            let [a, b, c, d] = expand::expand(mask, values);
            let low = _mm512_castsi256_si512(_mm256_set_m128i(b, a));
            _mm512_inserti64x4::<1>(low, _mm256_set_m128i(d, c))
        })
    }

    #[inline(always)]
    fn prefetch(self, at: *const u8) {
        simd!(_mm_prefetch::<_MM_HINT_T0>(at.cast()));
    }

    #[inline(always)]
    fn prefetch_far(self, at: *const u8) {
        simd!(_mm_prefetch::<_MM_HINT_T1>(at.cast()));
    }
}

impl<V: Variant> Dot for Zmm<V> {
    const WEIGHT_BIAS: u8 = V::WEIGHT_BIAS;
    const BY_CODES: bool = V::BY_CODES;
    const CODE_ROWS: usize = V::CODE_ROWS;
    const READS_ONE_STREAM: bool = V::READS_ONE_STREAM;

    // 24 accumulators, four weights, and a broadcast activation: the fewest loads for a product.
    const BYTE_TILE_ROWS: usize = 6;
    const BYTE_TILE_PANELS: usize = 4;

    #[inline]
    fn vectorize_dot<K: DotKernel>(self, kernel: K) -> K::Output {
        self.0.enter(kernel)
    }

    #[inline]
    fn vectorize_expand<K: DotKernel>(self, kernel: K) -> K::Output {
        self.0.enter_expanding(kernel)
    }

    #[inline(always)]
    fn dot(self, acc: __m512i, w: __m512i, x: __m512i) -> __m512i {
        self.0.dot(acc, w, x)
    }

    #[inline(always)]
    fn dot_codes(self, acc: __m512i, codes: __m512i, x: __m512i) -> __m512i {
        self.0.dot_codes(acc, codes, x)
    }

    #[inline(always)]
    fn add_scaled(self, acc: __m512i, partial: __m512i, scale: __m512i, is_short: bool) -> __m512i {
        self.0.add_scaled(acc, partial, scale, is_short)
    }
}
