//! Plain Rust that runs on every machine. On x86-64 the compiler turns the sixteen lanes into SSE2.
//!
//! Lanes are filled by counting loops: iterators and `std::array::from_fn` take the compiler several times as long.
//! Operations of many instructions are separate functions. With a copy in every place that calls them, the compiler took
//! twice as long for the scalar kernels (`cargo build --release -p ferrule-kernels --no-default-features`), and these were
//! at most a sixth faster (`FERRULE_ISA=scalar cargo bench -p ferrule-kernels --bench matmul -- int8 int4 1 4`).

use super::simd::{Dot, DotKernel, Kernel, LANES, LINE, Plane, Simd, index_mask};

/// Instruction set that every machine has.
#[derive(Clone, Copy, Debug)]
pub struct Scalar;

impl Scalar {
    /// Returns the token; every machine has the instructions.
    #[must_use]
    pub fn detect() -> Option<Self> {
        Some(Self)
    }
}

/// Makes an array of `$len` elements whose element `$i` is `$value`; `$zero` is any value of the type.
macro_rules! fill {
    ($zero:literal; $i:ident in $len:expr => $value:expr) => {{
        let mut filled = [$zero; $len];
        let mut $i = 0;
        while $i < $len {
            filled[$i] = $value;
            $i += 1;
        }
        filled
    }};
}

/// Sixteen f32, in memory or in registers that the compiler chooses.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub struct F32x16([f32; LANES]);

impl F32x16 {
    #[inline(always)]
    fn zip(self, other: Self, f: impl Fn(f32, f32) -> f32) -> Self {
        Self(fill!(0.0; i in LANES => f(self.0[i], other.0[i])))
    }
}

/// Widens an IEEE half float to f32 without branches, so that the compiler can widen several at once.
///
/// After the bits are moved, the value is too small by a factor of 2^112, for subnormal numbers too; multiplying by it is
/// exact. Infinity and NaN become large numbers, whose exponent is then set.
#[inline(always)]
fn widen_f16(bits: u16) -> f32 {
    const SCALE: f32 = f32::from_bits((127 + 112) << 23);
    let magnitude = f32::from_bits(u32::from(bits & 0x7fff) << 13) * SCALE;
    let exponent = if bits & 0x7c00 == 0x7c00 { 0x7f80_0000 } else { 0 };
    f32::from_bits(magnitude.to_bits() | exponent | u32::from(bits & 0x8000) << 16)
}

/// Sixteen i32.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub struct I32x16([i32; LANES]);

/// Sixty-four bytes.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub struct U8x64([u8; LINE]);

impl U8x64 {
    #[inline(always)]
    fn zip(self, other: Self, f: impl Fn(u8, u8) -> u8) -> Self {
        Self(fill!(0; i in LINE => f(self.0[i], other.0[i])))
    }

    #[inline(always)]
    fn pairs(self) -> [u16; LINE / 2] {
        fill!(0; i in LINE / 2 => u16::from_le_bytes([self.0[2 * i], self.0[2 * i + 1]]))
    }

    #[inline(always)]
    fn from_pairs(pairs: [u16; LINE / 2]) -> Self {
        Self(fill!(0; i in LINE => pairs[i / 2].to_le_bytes()[i % 2]))
    }
}

impl Simd for Scalar {
    type F32 = F32x16;
    type I32 = I32x16;
    type Bytes = U8x64;

    // Sixteen xmm registers: two rows of one panel (8 accumulators) leave room for the weights.
    const TILE_ROWS: usize = 2;
    const TILE_PANELS: usize = 1;

    // Not inlined, as in the other instruction sets: large functions take the compiler much longer than small ones.
    #[inline(never)]
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
        F32x16(fill!(0.0; i in LANES => f32::from_bits(u32::from(from[i]) << 16)))
    }

    #[inline(never)]
    fn load_f16(self, from: &[u16; LANES]) -> F32x16 {
        F32x16(fill!(0.0; i in LANES => widen_f16(from[i])))
    }

    #[inline(always)]
    fn store(self, value: F32x16, to: &mut [f32; LANES]) {
        *to = value.0;
    }

    #[inline(always)]
    fn store_nontemporal(self, value: F32x16, to: &mut [f32; LANES]) {
        self.store(value, to);
    }

    #[inline(always)]
    fn fence(self) {}

    #[inline(never)]
    fn store_bf16(self, value: F32x16, to: &mut [u16; LANES]) {
        *to = fill!(0; i in LANES => half::bf16::from_f32(value.0[i]).to_bits());
    }

    #[inline(never)]
    fn store_f16(self, value: F32x16, to: &mut [u16; LANES]) {
        *to = fill!(0; i in LANES => half::f16::from_f32(value.0[i]).to_bits());
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
        F32x16(fill!(0.0; i in LANES => a.0[i] * b.0[i] + c.0[i]))
    }

    #[inline(always)]
    fn max(self, a: F32x16, b: F32x16) -> F32x16 {
        a.zip(b, |a, b| if a > b { a } else { b })
    }

    #[inline(always)]
    fn min(self, a: F32x16, b: F32x16) -> F32x16 {
        a.zip(b, |a, b| if a < b { a } else { b })
    }

    /// Adding and subtracting 1.5 * 2^23 leaves the integer to which the hardware rounds.
    #[inline(always)]
    fn round(self, value: F32x16) -> F32x16 {
        const SHIFT: f32 = 12_582_912.0;
        F32x16(fill!(0.0; i in LANES => (value.0[i] + SHIFT) - SHIFT))
    }

    /// Adding 2^23 + 127 puts n + 127 into the low mantissa bits, where a shift makes them an exponent.
    #[inline(always)]
    fn exp2_integer(self, n: F32x16) -> F32x16 {
        F32x16(fill!(0.0; i in LANES => f32::from_bits((n.0[i] + (8_388_608.0 + 127.0)).to_bits() << 23)))
    }

    #[inline(always)]
    fn select_greater(self, a: F32x16, b: F32x16, x: F32x16, y: F32x16) -> F32x16 {
        F32x16(fill!(0.0; i in LANES => if a.0[i] > b.0[i] { x.0[i] } else { y.0[i] }))
    }

    #[inline(always)]
    fn select_range(self, from: usize, to: usize, a: F32x16, b: F32x16) -> F32x16 {
        F32x16(fill!(0.0; i in LANES => if from <= i && i < to { a.0[i] } else { b.0[i] }))
    }

    #[inline(always)]
    fn select_lanes(self, lanes: u16, a: F32x16, b: F32x16) -> F32x16 {
        F32x16(fill!(0.0; i in LANES => if lanes >> i & 1 == 1 { a.0[i] } else { b.0[i] }))
    }

    #[inline(always)]
    fn swap_lanes<const N: usize>(self, a: F32x16) -> F32x16 {
        F32x16(fill!(0.0; i in LANES => a.0[i ^ N]))
    }

    #[inline(always)]
    fn splat_i32(self, value: i32) -> I32x16 {
        I32x16([value; LANES])
    }

    #[inline(always)]
    fn load_i32(self, from: &[i32; LANES]) -> I32x16 {
        I32x16(*from)
    }

    #[inline(always)]
    fn load_i8(self, from: &[i8; LANES]) -> I32x16 {
        I32x16(fill!(0; i in LANES => i32::from(from[i])))
    }

    #[inline(never)]
    fn load_planes<const N: usize>(self, planes: [Option<Plane<'_>>; N], zero: u8) -> I32x16 {
        let mut numbers = I32x16([-i32::from(zero); LANES]);
        let mut p = 0;
        while p < N {
            if let Some(plane) = planes[p] {
                let of = |byte: u8| i32::from(byte >> plane.from & plane.mask()) << plane.to;
                numbers = I32x16(fill!(0; i in LANES => numbers.0[i] + of(plane.bytes[i])));
            }
            p += 1;
        }
        numbers
    }

    #[inline(always)]
    fn store_i32(self, value: I32x16, to: &mut [i32; LANES]) {
        *to = value.0;
    }

    #[inline(always)]
    fn add_i32(self, a: I32x16, b: I32x16) -> I32x16 {
        I32x16(fill!(0; i in LANES => a.0[i].wrapping_add(b.0[i])))
    }

    #[inline(always)]
    fn to_f32(self, value: I32x16) -> F32x16 {
        F32x16(fill!(0.0; i in LANES => value.0[i] as f32))
    }

    #[inline(never)]
    fn to_i32(self, value: F32x16) -> I32x16 {
        let rounded = self.round(value);
        I32x16(fill!(0; i in LANES => rounded.0[i] as i32))
    }

    #[inline(always)]
    fn store_i8(self, value: I32x16, to: &mut [i8; LANES]) {
        *to = fill!(0; i in LANES => value.0[i] as i8);
    }

    #[inline(always)]
    fn load_bytes(self, from: &[u8; LINE]) -> U8x64 {
        U8x64(*from)
    }

    #[inline(always)]
    fn store_bytes(self, value: U8x64, to: &mut [u8; LINE]) {
        *to = value.0;
    }

    #[inline(always)]
    fn splat_byte(self, value: u8) -> U8x64 {
        U8x64([value; LINE])
    }

    #[inline(never)]
    fn splat_quad(self, quad: [i8; 4]) -> U8x64 {
        U8x64(fill!(0; i in LINE => quad[i % 4] as u8))
    }

    #[inline(never)]
    fn spread(self, from: &[u8; LANES]) -> U8x64 {
        U8x64(fill!(0; i in LINE => from[i / 4]))
    }

    #[inline(never)]
    fn lookup(self, table: &[u8; LANES], indices: U8x64) -> U8x64 {
        U8x64(fill!(0; i in LINE => table[usize::from(indices.0[i] & 0x0f)]))
    }

    #[inline(never)]
    fn shuffle(self, bytes: U8x64, indices: U8x64) -> U8x64 {
        U8x64(fill!(0; i in LINE => bytes.0[i / LANES * LANES + usize::from(indices.0[i] % LANES as u8)]))
    }

    #[inline(never)]
    fn gather(self, table: &[[i8; 4]], indices: U8x64) -> U8x64 {
        let index = |lane: usize| {
            let bytes = [0, 1, 2, 3].map(|byte| indices.0[4 * lane + byte]);
            (i32::from_le_bytes(bytes) & index_mask(table.len())) as usize
        };
        U8x64(fill!(0; i in LINE => table[index(i / 4)][i % 4] as u8))
    }

    #[inline(always)]
    fn and(self, a: U8x64, b: U8x64) -> U8x64 {
        a.zip(b, |a, b| a & b)
    }

    #[inline(always)]
    fn or(self, a: U8x64, b: U8x64) -> U8x64 {
        a.zip(b, |a, b| a | b)
    }

    #[inline(always)]
    fn xor(self, a: U8x64, b: U8x64) -> U8x64 {
        a.zip(b, |a, b| a ^ b)
    }

    #[inline(always)]
    fn sub_bytes(self, a: U8x64, b: U8x64) -> U8x64 {
        a.zip(b, u8::wrapping_sub)
    }

    #[inline(never)]
    fn shift_right<const N: u32>(self, a: U8x64) -> U8x64 {
        let pairs = a.pairs();
        U8x64::from_pairs(fill!(0; i in LINE / 2 => pairs[i] >> N))
    }

    #[inline(never)]
    fn shift_left<const N: u32>(self, a: U8x64) -> U8x64 {
        let pairs = a.pairs();
        U8x64::from_pairs(fill!(0; i in LINE / 2 => pairs[i] << N))
    }

    #[inline(never)]
    fn mul_pairs(self, a: U8x64, b: U8x64) -> U8x64 {
        let (a, b) = (a.pairs(), b.pairs());
        U8x64::from_pairs(fill!(0; i in LINE / 2 => a[i].wrapping_mul(b[i])))
    }

    #[inline(never)]
    fn expand(self, mask: u64, values: &[u8; LINE]) -> U8x64 {
        let (mut bytes, mut next) = ([0; LINE], 0);
        for (i, byte) in bytes.iter_mut().enumerate() {
            if mask >> i & 1 == 1 {
                *byte = values[next];
                next += 1;
            }
        }
        U8x64(bytes)
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

    /// Does nothing: these kernels do not wait for memory.
    #[inline(always)]
    fn prefetch_far(self, _: *const u8) {}
}

impl Dot for Scalar {
    const WEIGHT_BIAS: u8 = 0;
    const BY_CODES: bool = true;

    // Two rows are a quarter faster, and one row is a sixth faster with two panels side by side, but they take longer to
    // compile (`benches/record/2026-12-01-amd-epyc-zen5/kernels-compile.txt`): only machines without AVX2 run this code.
    const BYTE_TILE_ROWS: usize = 1;
    const BYTE_TILE_PANELS: usize = 1;

    #[inline(never)]
    fn vectorize_dot<K: DotKernel>(self, kernel: K) -> K::Output {
        kernel.run(self)
    }

    #[inline(never)]
    fn dot(self, acc: I32x16, w: U8x64, x: U8x64) -> I32x16 {
        let product = |i: usize| i32::from(w.0[i] as i8) * i32::from(x.0[i] as i8);
        I32x16(fill!(0; i in LANES => {
            acc.0[i].wrapping_add(product(4 * i) + product(4 * i + 1) + product(4 * i + 2) + product(4 * i + 3))
        }))
    }

    #[inline(always)]
    fn dot_codes(self, acc: I32x16, codes: U8x64, x: U8x64) -> I32x16 {
        self.dot(acc, codes, x)
    }

    #[inline(never)]
    fn add_scaled(self, acc: I32x16, partial: I32x16, scale: U8x64, _is_short: bool) -> I32x16 {
        I32x16(fill!(0; i in LANES => {
            let factor = i32::from(i16::from_le_bytes([scale.0[4 * i], scale.0[4 * i + 1]]));
            acc.0[i].wrapping_add(partial.0[i].wrapping_mul(factor))
        }))
    }
}
