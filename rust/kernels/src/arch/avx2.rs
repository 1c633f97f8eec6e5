//! AVX2 with FMA, F16C and POPCNT (Haswell, 2013, and Zen, 2017, and later): two registers hold the sixteen lanes.

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

/// Dot product of an instruction set with 256-bit registers; the other operations are the same for all of them.
pub trait Variant: Copy + Send + Sync + 'static {
    /// See [`Dot::WEIGHT_BIAS`].
    const WEIGHT_BIAS: u8;

    /// See [`Dot::BYTE_TILE_ROWS`].
    const BYTE_TILE_ROWS: usize;

    /// See [`Dot::BY_CODES`].
    const BY_CODES: bool;
    /// See [`Dot::CODE_ROWS`].
    const CODE_ROWS: usize = 0;

    /// Computes one half of [`Dot::dot`].
    fn dot(self, acc: __m256i, w: __m256i, x: __m256i) -> __m256i;

    /// Computes one half of [`Dot::dot_codes`].
    fn dot_codes(self, acc: __m256i, codes: __m256i, x: __m256i) -> __m256i;

    /// Computes one half of [`Dot::add_scaled`].
    fn add_scaled(self, acc: __m256i, partial: __m256i, scale: __m256i, is_short: bool) -> __m256i;

    /// Runs `kernel` in a function that is compiled with the variant's instructions.
    fn enter<K: DotKernel>(self, kernel: K) -> K::Output;
}

/// Proof that this machine has AVX2, FMA, F16C, POPCNT and the instructions of `V`.
#[derive(Clone, Copy, Debug)]
pub struct Ymm<V>(pub(super) V);

/// Returns whether this machine has the features that all variants need.
pub(super) fn detect_common() -> bool {
    is_x86_feature_detected!("avx2")
        && is_x86_feature_detected!("fma")
        && is_x86_feature_detected!("f16c")
        && is_x86_feature_detected!("popcnt")
}

/// Variant that computes dot products with AVX2 alone.
#[derive(Clone, Copy, Debug)]
pub struct Plain(());

/// Proof that this machine has AVX2, FMA, F16C and POPCNT.
pub type Avx2 = Ymm<Plain>;

impl Avx2 {
    /// Returns a token if this machine has the instructions.
    #[must_use]
    pub fn detect() -> Option<Self> {
        detect_common().then_some(Self(Plain(())))
    }
}

impl Variant for Plain {
    const WEIGHT_BIAS: u8 = 0;
    // Eight accumulators; a product needs two more registers for weights, two for their magnitudes, and two for
    // intermediate results.
    const BYTE_TILE_ROWS: usize = 4;
    const BY_CODES: bool = true;

    /// AVX2 has no product of signed bytes: the sign of `w` goes to `x`. Pairs of products stay below 2^15, as `x` is
    /// never -128.
    #[inline(always)]
    fn dot(self, acc: __m256i, w: __m256i, x: __m256i) -> __m256i {
        simd!({
            let pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w));
            _mm256_add_epi32(acc, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)))
        })
    }

    #[inline(always)]
    fn dot_codes(self, acc: __m256i, codes: __m256i, x: __m256i) -> __m256i {
        simd!(_mm256_add_epi16(acc, _mm256_maddubs_epi16(codes, x)))
    }

    #[inline(always)]
    fn add_scaled(self, acc: __m256i, partial: __m256i, scale: __m256i, _is_short: bool) -> __m256i {
        simd!(_mm256_add_epi32(acc, _mm256_madd_epi16(partial, scale)))
    }

    #[inline(always)]
    fn enter<K: DotKernel>(self, kernel: K) -> K::Output {
        // Never inlined: kernels that call kernels would grow into functions that take minutes to compile.
        #[inline(never)]
        #[target_feature(enable = "avx2,fma,f16c,popcnt")]
        fn dot_with_features<K: DotKernel>(token: Avx2, kernel: K) -> K::Output {
            kernel.run(token)
        }
        simd!(dot_with_features(Ymm(self), kernel))
    }
}

/// Sixteen f32: lanes 0 to 7 and lanes 8 to 15.
#[derive(Clone, Copy)]
pub struct F32x16(__m256, __m256);

/// Sixteen i32 or sixty-four bytes: lanes 0 to 7 and lanes 8 to 15.
#[derive(Clone, Copy)]
pub struct Int512(__m256i, __m256i);

impl Int512 {
    #[inline(always)]
    fn zip(self, other: Self, f: impl Fn(__m256i, __m256i) -> __m256i) -> Self {
        Self(f(self.0, other.0), f(self.1, other.1))
    }
}

/// Rounds eight f32 to bf16, to nearest, ties to even; each is the low half of its lane. NaN stays NaN.
#[inline(always)]
fn to_bf16(value: __m256) -> __m256i {
    simd!({
        let bits = _mm256_castps_si256(value);
        let odd = _mm256_and_si256(_mm256_srli_epi32::<16>(bits), _mm256_set1_epi32(1));
        let rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
        let quiet_nan = _mm256_or_si256(bits, _mm256_set1_epi32(0x0040_0000));
        let is_nan = _mm256_castps_si256(_mm256_cmp_ps::<_CMP_UNORD_Q>(value, value));
        _mm256_srli_epi32::<16>(_mm256_blendv_epi8(rounded, quiet_nan, is_nan))
    })
}

impl<V: Variant> Simd for Ymm<V> {
    type F32 = F32x16;
    type I32 = Int512;
    type Bytes = Int512;

    // 12 accumulators, two weights and a broadcast activation of 16 registers.
    const TILE_ROWS: usize = 6;
    const TILE_PANELS: usize = 1;

    /// Runs the kernel with AVX2 for every variant, so that its code is compiled once for all variants.
    #[inline]
    fn vectorize<K: Kernel>(self, kernel: K) -> K::Output {
        // Never inlined: kernels that call kernels would grow into functions that take minutes to compile.
        #[inline(never)]
        #[target_feature(enable = "avx2,fma,f16c,popcnt")]
        fn with_features<K: Kernel>(token: Avx2, kernel: K) -> K::Output {
            kernel.run(token)
        }
        simd!(with_features(Ymm(Plain(())), kernel))
    }

    #[inline(always)]
    fn splat(self, value: f32) -> F32x16 {
        let half = simd!(_mm256_set1_ps(value));
        F32x16(half, half)
    }

    #[inline(always)]
    fn load(self, from: &[f32; LANES]) -> F32x16 {
        let from = from.as_ptr();
        simd!(F32x16(_mm256_loadu_ps(from), _mm256_loadu_ps(from.add(8))))
    }

    #[inline(always)]
    fn load_bf16(self, from: &[u16; LANES]) -> F32x16 {
        let from: *const __m128i = from.as_ptr().cast();
        let widen = |bits| simd!(_mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(bits))));
        F32x16(widen(simd!(_mm_loadu_si128(from))), widen(simd!(_mm_loadu_si128(from.add(1)))))
    }

    #[inline(always)]
    fn load_f16(self, from: &[u16; LANES]) -> F32x16 {
        let from: *const __m128i = from.as_ptr().cast();
        simd!(F32x16(_mm256_cvtph_ps(_mm_loadu_si128(from)), _mm256_cvtph_ps(_mm_loadu_si128(from.add(1)))))
    }

    #[inline(always)]
    fn store(self, value: F32x16, to: &mut [f32; LANES]) {
        let to = to.as_mut_ptr();
        simd!({
            _mm256_storeu_ps(to, value.0);
            _mm256_storeu_ps(to.add(8), value.1);
        });
    }

    #[inline(always)]
    fn store_nontemporal(self, value: F32x16, to: &mut [f32; LANES]) {
        if !to.as_ptr().addr().is_multiple_of(LINE) {
            return self.store(value, to);
        }
        let to = to.as_mut_ptr();
        simd!({
            _mm256_stream_ps(to, value.0);
            _mm256_stream_ps(to.add(8), value.1);
        });
    }

    #[inline(always)]
    fn fence(self) {
        simd!(_mm_sfence());
    }

    /// Adding just under half of the last place that stays, and that place's lowest bit, rounds ties to even.
    #[inline(always)]
    fn store_bf16(self, value: F32x16, to: &mut [u16; LANES]) {
        simd!({
            let interleaved = _mm256_packus_epi32(to_bf16(value.0), to_bf16(value.1));
            _mm256_storeu_si256(to.as_mut_ptr().cast(), _mm256_permute4x64_epi64::<0b11_01_10_00>(interleaved));
        });
    }

    #[inline(always)]
    fn store_f16(self, value: F32x16, to: &mut [u16; LANES]) {
        let to: *mut __m128i = to.as_mut_ptr().cast();
        simd!({
            _mm_storeu_si128(to, _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(value.0));
            _mm_storeu_si128(to.add(1), _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(value.1));
        });
    }

    #[inline(always)]
    fn add(self, a: F32x16, b: F32x16) -> F32x16 {
        simd!(F32x16(_mm256_add_ps(a.0, b.0), _mm256_add_ps(a.1, b.1)))
    }

    #[inline(always)]
    fn sub(self, a: F32x16, b: F32x16) -> F32x16 {
        simd!(F32x16(_mm256_sub_ps(a.0, b.0), _mm256_sub_ps(a.1, b.1)))
    }

    #[inline(always)]
    fn mul(self, a: F32x16, b: F32x16) -> F32x16 {
        simd!(F32x16(_mm256_mul_ps(a.0, b.0), _mm256_mul_ps(a.1, b.1)))
    }

    #[inline(always)]
    fn div(self, a: F32x16, b: F32x16) -> F32x16 {
        simd!(F32x16(_mm256_div_ps(a.0, b.0), _mm256_div_ps(a.1, b.1)))
    }

    #[inline(always)]
    fn mul_add(self, a: F32x16, b: F32x16, c: F32x16) -> F32x16 {
        simd!(F32x16(_mm256_fmadd_ps(a.0, b.0, c.0), _mm256_fmadd_ps(a.1, b.1, c.1)))
    }

    #[inline(always)]
    fn max(self, a: F32x16, b: F32x16) -> F32x16 {
        simd!(F32x16(_mm256_max_ps(a.0, b.0), _mm256_max_ps(a.1, b.1)))
    }

    #[inline(always)]
    fn min(self, a: F32x16, b: F32x16) -> F32x16 {
        simd!(F32x16(_mm256_min_ps(a.0, b.0), _mm256_min_ps(a.1, b.1)))
    }

    #[inline(always)]
    fn round(self, value: F32x16) -> F32x16 {
        const NEAREST: i32 = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
        simd!(F32x16(_mm256_round_ps::<NEAREST>(value.0), _mm256_round_ps::<NEAREST>(value.1)))
    }

    #[inline(always)]
    fn exp2_integer(self, n: F32x16) -> F32x16 {
        let power = |n| {
            simd!({
                let biased = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
                _mm256_castsi256_ps(_mm256_slli_epi32::<23>(biased))
            })
        };
        F32x16(power(n.0), power(n.1))
    }

    #[inline(always)]
    fn select_greater(self, a: F32x16, b: F32x16, x: F32x16, y: F32x16) -> F32x16 {
        let select = |a, b, x, y| simd!(_mm256_blendv_ps(y, x, _mm256_cmp_ps::<_CMP_GT_OQ>(a, b)));
        F32x16(select(a.0, b.0, x.0, y.0), select(a.1, b.1, x.1, y.1))
    }

    #[inline(always)]
    fn select_range(self, from: usize, to: usize, a: F32x16, b: F32x16) -> F32x16 {
        let bound = |n: usize| n.min(LANES) as i32;
        let mut selected = [a.0, a.1];
        for ((first, selected), b) in [0, 8].into_iter().zip(&mut selected).zip([b.0, b.1]) {
            *selected = simd!({
                let lane = _mm256_add_epi32(_mm256_set1_epi32(first), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
                let outside = _mm256_or_si256(
                    _mm256_cmpgt_epi32(_mm256_set1_epi32(bound(from)), lane),
                    _mm256_xor_si256(_mm256_cmpgt_epi32(_mm256_set1_epi32(bound(to)), lane), _mm256_set1_epi32(-1)),
                );
                _mm256_blendv_ps(*selected, b, _mm256_castsi256_ps(outside))
            });
        }
        F32x16(selected[0], selected[1])
    }

    #[inline(always)]
    fn select_lanes(self, lanes: u16, a: F32x16, b: F32x16) -> F32x16 {
        let select = |lanes: u16, a, b| {
            simd!({
                // The bit of each lane becomes its sign, which decides a blend.
                let shifts = _mm256_setr_epi32(31, 30, 29, 28, 27, 26, 25, 24);
                let signs = _mm256_sllv_epi32(_mm256_set1_epi32(i32::from(lanes)), shifts);
                _mm256_blendv_ps(b, a, _mm256_castsi256_ps(signs))
            })
        };
        F32x16(select(lanes, a.0, b.0), select(lanes >> 8, a.1, b.1))
    }

    #[inline(always)]
    fn swap_lanes<const N: usize>(self, a: F32x16) -> F32x16 {
        let swap = |a| match N {
            1 => simd!(_mm256_permute_ps::<0b10_11_00_01>(a)),
            2 => simd!(_mm256_permute_ps::<0b01_00_11_10>(a)),
            _ => simd!(_mm256_permute2f128_ps::<1>(a, a)),
        };
        if N == 8 { F32x16(a.1, a.0) } else { F32x16(swap(a.0), swap(a.1)) }
    }

    #[inline(always)]
    fn splat_i32(self, value: i32) -> Int512 {
        let half = simd!(_mm256_set1_epi32(value));
        Int512(half, half)
    }

    #[inline(always)]
    fn load_i32(self, from: &[i32; LANES]) -> Int512 {
        let from: *const __m256i = from.as_ptr().cast();
        simd!(Int512(_mm256_loadu_si256(from), _mm256_loadu_si256(from.add(1))))
    }

    #[inline(always)]
    fn load_i8(self, from: &[i8; LANES]) -> Int512 {
        simd!({
            let bytes = _mm_loadu_si128(from.as_ptr().cast());
            Int512(_mm256_cvtepi8_epi32(bytes), _mm256_cvtepi8_epi32(_mm_srli_si128::<8>(bytes)))
        })
    }

    #[inline(always)]
    fn load_planes<const N: usize>(self, planes: [Option<Plane<'_>>; N], zero: u8) -> Int512 {
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
            let numbers = _mm_sub_epi8(numbers, _mm_set1_epi8(zero.cast_signed()));
            Int512(_mm256_cvtepi8_epi32(numbers), _mm256_cvtepi8_epi32(_mm_srli_si128::<8>(numbers)))
        })
    }

    #[inline(always)]
    fn store_i32(self, value: Int512, to: &mut [i32; LANES]) {
        let to: *mut __m256i = to.as_mut_ptr().cast();
        simd!({
            _mm256_storeu_si256(to, value.0);
            _mm256_storeu_si256(to.add(1), value.1);
        });
    }

    #[inline(always)]
    fn add_i32(self, a: Int512, b: Int512) -> Int512 {
        a.zip(b, |a, b| simd!(_mm256_add_epi32(a, b)))
    }

    #[inline(always)]
    fn to_f32(self, value: Int512) -> F32x16 {
        simd!(F32x16(_mm256_cvtepi32_ps(value.0), _mm256_cvtepi32_ps(value.1)))
    }

    #[inline(always)]
    fn to_i32(self, value: F32x16) -> Int512 {
        simd!(Int512(_mm256_cvtps_epi32(value.0), _mm256_cvtps_epi32(value.1)))
    }

    #[inline(always)]
    fn store_i8(self, value: Int512, to: &mut [i8; LANES]) {
        simd!({
            // Packs 128-bit halves side by side, which leaves quads of four bytes in the order 0, 2, 1, 3.
            let words = _mm256_packs_epi32(value.0, value.1);
            let bytes = _mm256_packs_epi16(words, words);
            let ordered = _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 0, 4, 1, 5));
            _mm_storeu_si128(to.as_mut_ptr().cast(), _mm256_castsi256_si128(ordered));
        });
    }

    #[inline(always)]
    fn load_bytes(self, from: &[u8; LINE]) -> Int512 {
        let from: *const __m256i = from.as_ptr().cast();
        simd!(Int512(_mm256_loadu_si256(from), _mm256_loadu_si256(from.add(1))))
    }

    #[inline(always)]
    fn store_bytes(self, value: Int512, to: &mut [u8; LINE]) {
        let to: *mut __m256i = to.as_mut_ptr().cast();
        simd!({
            _mm256_storeu_si256(to, value.0);
            _mm256_storeu_si256(to.add(1), value.1);
        });
    }

    #[inline(always)]
    fn splat_byte(self, value: u8) -> Int512 {
        let half = simd!(_mm256_set1_epi8(value as i8));
        Int512(half, half)
    }

    #[inline(always)]
    fn splat_quad(self, quad: [i8; 4]) -> Int512 {
        self.splat_i32(bytemuck::cast(quad))
    }

    #[inline(always)]
    fn spread(self, from: &[u8; LANES]) -> Int512 {
        simd!({
            let twice = _mm256_broadcastsi128_si256(_mm_loadu_si128(from.as_ptr().cast()));
            // The shuffle works in halves of 128 bits: four bytes go to each.
            let low = _mm256_setr_epi32(
                0,
                0x0101_0101,
                0x0202_0202,
                0x0303_0303,
                0x0404_0404,
                0x0505_0505,
                0x0606_0606,
                0x0707_0707,
            );
            let high = _mm256_add_epi8(low, _mm256_set1_epi8(8));
            Int512(_mm256_shuffle_epi8(twice, low), _mm256_shuffle_epi8(twice, high))
        })
    }

    #[inline(always)]
    fn lookup(self, table: &[u8; LANES], indices: Int512) -> Int512 {
        simd!({
            let twice = _mm256_broadcastsi128_si256(_mm_loadu_si128(table.as_ptr().cast()));
            Int512(_mm256_shuffle_epi8(twice, indices.0), _mm256_shuffle_epi8(twice, indices.1))
        })
    }

    #[inline(always)]
    fn shuffle(self, bytes: Int512, indices: Int512) -> Int512 {
        bytes.zip(indices, |bytes, indices| simd!(_mm256_shuffle_epi8(bytes, indices)))
    }

    #[inline(always)]
    fn gather(self, table: &[[i8; 4]], indices: Int512) -> Int512 {
        let mask = self.splat_i32(index_mask(table.len()));
        let Int512(low, high) = self.and(indices, mask);
        let entries = table.as_ptr().cast();
        // Masked indices are less than the length of the table.
        simd!(Int512(_mm256_i32gather_epi32::<4>(entries, low), _mm256_i32gather_epi32::<4>(entries, high)))
    }

    #[inline(always)]
    fn and(self, a: Int512, b: Int512) -> Int512 {
        a.zip(b, |a, b| simd!(_mm256_and_si256(a, b)))
    }

    #[inline(always)]
    fn or(self, a: Int512, b: Int512) -> Int512 {
        a.zip(b, |a, b| simd!(_mm256_or_si256(a, b)))
    }

    #[inline(always)]
    fn xor(self, a: Int512, b: Int512) -> Int512 {
        a.zip(b, |a, b| simd!(_mm256_xor_si256(a, b)))
    }

    #[inline(always)]
    fn sub_bytes(self, a: Int512, b: Int512) -> Int512 {
        a.zip(b, |a, b| simd!(_mm256_sub_epi8(a, b)))
    }

    #[inline(always)]
    fn shift_right<const N: u32>(self, a: Int512) -> Int512 {
        let count = simd!(_mm_cvtsi32_si128(N as i32));
        simd!(Int512(_mm256_srl_epi16(a.0, count), _mm256_srl_epi16(a.1, count)))
    }

    #[inline(always)]
    fn shift_left<const N: u32>(self, a: Int512) -> Int512 {
        let count = simd!(_mm_cvtsi32_si128(N as i32));
        simd!(Int512(_mm256_sll_epi16(a.0, count), _mm256_sll_epi16(a.1, count)))
    }

    #[inline(always)]
    fn mul_pairs(self, a: Int512, b: Int512) -> Int512 {
        a.zip(b, |a, b| simd!(_mm256_mullo_epi16(a, b)))
    }

    #[inline(always)]
    fn expand(self, mask: u64, values: &[u8; LINE]) -> Int512 {
        simd!({
            let [a, b, c, d] = expand::expand(mask, values);
            Int512(_mm256_set_m128i(b, a), _mm256_set_m128i(d, c))
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

impl<V: Variant> Dot for Ymm<V> {
    const WEIGHT_BIAS: u8 = V::WEIGHT_BIAS;
    const BY_CODES: bool = V::BY_CODES;
    const CODE_ROWS: usize = V::CODE_ROWS;
    const READS_ONE_STREAM: bool = true;

    const BYTE_TILE_ROWS: usize = V::BYTE_TILE_ROWS;
    const BYTE_TILE_PANELS: usize = 1;

    #[inline]
    fn vectorize_dot<K: DotKernel>(self, kernel: K) -> K::Output {
        self.0.enter(kernel)
    }

    #[inline(always)]
    fn dot(self, acc: Int512, w: Int512, x: Int512) -> Int512 {
        Int512(self.0.dot(acc.0, w.0, x.0), self.0.dot(acc.1, w.1, x.1))
    }

    #[inline(always)]
    fn dot_codes(self, acc: Int512, codes: Int512, x: Int512) -> Int512 {
        Int512(self.0.dot_codes(acc.0, codes.0, x.0), self.0.dot_codes(acc.1, codes.1, x.1))
    }

    #[inline(always)]
    fn add_scaled(self, acc: Int512, partial: Int512, scale: Int512, is_short: bool) -> Int512 {
        let half = |acc, partial, scale| self.0.add_scaled(acc, partial, scale, is_short);
        Int512(half(acc.0, partial.0, scale.0), half(acc.1, partial.1, scale.1))
    }
}
