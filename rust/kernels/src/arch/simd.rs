//! The vocabulary in which kernels are written: vectors of sixteen lanes, whatever the registers' width. A lane is an
//! f32, an i32 or four bytes.

/// Lanes of a vector: one 512-bit register, two of 256 bits, four of 128.
pub const LANES: usize = 16;

/// An algorithm written once for all instruction sets.
///
/// `run` must be `#[inline(always)]`, so that it is compiled inside the function that enables the instructions.
pub trait Kernel {
    /// What the kernel returns.
    type Output;

    /// Runs the algorithm with the vocabulary of `S`.
    fn run<S: Simd>(self, simd: S) -> Self::Output;
}

/// Bytes of a vector: a cache line.
pub const LINE: usize = 64;

/// A vector of bytes in memory, on a cache line of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C, align(64))]
pub struct ByteLine(pub [u8; LINE]);

/// Operations on vectors of [`LANES`] lanes. Having a value of the type proves that the machine has the instructions.
///
/// Every operation acts lane by lane with IEEE rounding and does the same on every lane, so that a result depends on
/// its own operands alone. Instruction sets may differ in one thing: whether [`Simd::mul_add`] rounds once or twice.
/// Operations on integers are exact everywhere.
pub trait Simd: Copy + Send + Sync + 'static {
    /// Sixteen f32.
    type F32: Copy;
    /// Sixteen i32.
    type I32: Copy;
    /// Sixty-four bytes, four in each lane; the first of a lane is its lowest.
    type Bytes: Copy;

    /// What the first factor's bytes of [`Simd::dot`] are above their values, modulo 256: 128 where the instruction
    /// takes unsigned bytes there, else 0. Whoever multiplies subtracts this many times the sum of the other factor.
    const WEIGHT_BIAS: u8;

    /// Whether it is faster to multiply codes, and their partial sums by sub-scales, than to multiply weights.
    const BY_CODES: bool;

    /// Rows of activations in a register tile of the floating-point matmul.
    const TILE_ROWS: usize;
    /// Panels of [`LANES`] output columns in that tile.
    const TILE_PANELS: usize;

    /// Rows of activations in a register tile of the integer matmul over many rows.
    const BYTE_TILE_ROWS: usize;
    /// Panels of [`LANES`] output columns in that tile.
    const BYTE_TILE_PANELS: usize;

    /// Runs `kernel` in a function compiled with these instructions.
    fn vectorize<K: Kernel>(self, kernel: K) -> K::Output;

    /// `value` in every lane.
    fn splat(self, value: f32) -> Self::F32;
    /// Sixteen f32 from memory.
    fn load(self, from: &[f32; LANES]) -> Self::F32;
    /// Sixteen bf16 from memory, widened.
    fn load_bf16(self, from: &[u16; LANES]) -> Self::F32;
    /// Sixteen IEEE half floats from memory, widened.
    fn load_f16(self, from: &[u16; LANES]) -> Self::F32;
    /// Writes sixteen f32.
    fn store(self, value: Self::F32, to: &mut [f32; LANES]);
    /// Writes sixteen bf16, rounded to nearest, ties to even; NaN stays NaN.
    fn store_bf16(self, value: Self::F32, to: &mut [u16; LANES]);
    /// Writes sixteen IEEE half floats, rounded to nearest, ties to even; NaN stays NaN.
    fn store_f16(self, value: Self::F32, to: &mut [u16; LANES]);

    /// `a + b`
    fn add(self, a: Self::F32, b: Self::F32) -> Self::F32;
    /// `a - b`
    fn sub(self, a: Self::F32, b: Self::F32) -> Self::F32;
    /// `a * b`
    fn mul(self, a: Self::F32, b: Self::F32) -> Self::F32;
    /// `a / b`
    fn div(self, a: Self::F32, b: Self::F32) -> Self::F32;
    /// `a * b + c`
    fn mul_add(self, a: Self::F32, b: Self::F32, c: Self::F32) -> Self::F32;
    /// The larger of each pair; `b` where either is NaN.
    fn max(self, a: Self::F32, b: Self::F32) -> Self::F32;
    /// The smaller of each pair; `b` where either is NaN.
    fn min(self, a: Self::F32, b: Self::F32) -> Self::F32;
    /// The nearest integer, ties to even. Defined for |value| < 2^22.
    fn round(self, value: Self::F32) -> Self::F32;
    /// 2^n for an integral n in [-126, 127]; 0 for n = -127.
    fn exp2_integer(self, n: Self::F32) -> Self::F32;
    /// `x` where `a > b`, else `y`; so `y` where either is NaN.
    fn select_greater(self, a: Self::F32, b: Self::F32, x: Self::F32, y: Self::F32) -> Self::F32;
    /// Lane i of `a` for `from <= i < to`, of `b` elsewhere.
    fn select_range(self, from: usize, to: usize, a: Self::F32, b: Self::F32) -> Self::F32;

    /// Lane i ^ N in lane i; N is 1, 2, 4 or 8.
    fn swap_lanes<const N: usize>(self, a: Self::F32) -> Self::F32;

    /// The lanes as an array.
    #[inline(always)]
    fn to_array(self, value: Self::F32) -> [f32; LANES] {
        let mut lanes = [0.0; LANES];
        self.store(value, &mut lanes);
        lanes
    }

    /// The sum of the lanes, added pairwise in one fixed order: i with i + 8, then + 4, + 2, + 1.
    #[inline(always)]
    fn reduce_add(self, value: Self::F32) -> f32 {
        let mut lanes = self.to_array(value);
        for half in [8, 4, 2, 1] {
            for i in 0..half {
                lanes[i] += lanes[i + half];
            }
        }
        lanes[0]
    }

    /// The largest lane (NaN is passed over unless every lane is NaN).
    #[inline(always)]
    fn reduce_max(self, value: Self::F32) -> f32 {
        let mut lanes = self.to_array(value);
        for half in [8, 4, 2, 1] {
            for i in 0..half {
                lanes[i] = lanes[i].max(lanes[i + half]);
            }
        }
        lanes[0]
    }

    /// `value` in every lane.
    fn splat_i32(self, value: i32) -> Self::I32;
    /// Sixteen i32 from memory.
    fn load_i32(self, from: &[i32; LANES]) -> Self::I32;
    /// Sixteen i8 from memory, widened.
    fn load_i8(self, from: &[i8; LANES]) -> Self::I32;
    /// The four bytes of each lane as one number, the first its lowest.
    fn lanes(self, bytes: Self::Bytes) -> Self::I32;
    /// Writes sixteen i32.
    fn store_i32(self, value: Self::I32, to: &mut [i32; LANES]);
    /// `a + b`, wrapping.
    fn add_i32(self, a: Self::I32, b: Self::I32) -> Self::I32;
    /// The nearest f32 of each integer; exact below 2^24.
    fn to_f32(self, value: Self::I32) -> Self::F32;
    /// The nearest integer of each number, ties to even. Defined for |value| < 2^22.
    fn to_i32(self, value: Self::F32) -> Self::I32;
    /// Writes sixteen i32 of -128..=127 as bytes.
    fn store_i8(self, value: Self::I32, to: &mut [i8; LANES]);

    /// For each lane the sum of `acc` and four products: of `w`, bytes that lie [`Simd::WEIGHT_BIAS`] above values of
    /// -128..=127, with the values of `x`, -127..=127. The bias is not taken off: the result is larger by its product
    /// with the sum of the lane's four `x`.
    fn dot(self, acc: Self::I32, w: Self::Bytes, x: Self::Bytes) -> Self::I32;
    /// What begins a lane's partial sum for [`Simd::dot_codes`], from the shares of both halves.
    fn partial(_shares: [i16; 2]) -> i32 {
        unreachable!("weights are multiplied")
    }
    /// For each lane the partial sum `acc`, and four products of `codes`, 0..=63, with the values of `x`, -127..=127. A
    /// partial sum may be kept in two shares of 16 bits, of the first two products and of the others: as many products
    /// may be added as fit them.
    fn dot_codes(self, _acc: Self::I32, _codes: Self::Bytes, _x: Self::Bytes) -> Self::I32 {
        unreachable!("weights are multiplied")
    }
    /// For each lane `acc` and the product of its partial sum with its factor, which `scale` holds twice, as two numbers
    /// of 16 bits.
    fn add_scaled(self, _acc: Self::I32, _partial: Self::I32, _scale: Self::Bytes) -> Self::I32 {
        unreachable!("weights are multiplied")
    }
    /// Sixty-four bytes from memory.
    fn load_bytes(self, from: &[u8; LINE]) -> Self::Bytes;
    /// Writes sixty-four bytes.
    fn store_bytes(self, value: Self::Bytes, to: &mut [u8; LINE]);
    /// `value` in every byte.
    fn splat_byte(self, value: u8) -> Self::Bytes;
    /// Four bytes, the same in every lane.
    fn splat_quad(self, quad: [i8; 4]) -> Self::Bytes;
    /// Byte i in all four bytes of lane i.
    fn spread(self, from: &[u8; LANES]) -> Self::Bytes;
    /// For each byte of `indices`, 0..=15, that entry of the table.
    fn lookup(self, table: &[u8; LANES], indices: Self::Bytes) -> Self::Bytes;
    /// `a & b`
    fn and(self, a: Self::Bytes, b: Self::Bytes) -> Self::Bytes;
    /// `a | b`
    fn or(self, a: Self::Bytes, b: Self::Bytes) -> Self::Bytes;
    /// `a ^ b`
    fn xor(self, a: Self::Bytes, b: Self::Bytes) -> Self::Bytes;
    /// `a - b` of each byte, wrapping.
    fn sub_bytes(self, a: Self::Bytes, b: Self::Bytes) -> Self::Bytes;
    /// `a >> N` of each pair of bytes, taken as one number of 16 bits.
    fn shift_right<const N: u32>(self, a: Self::Bytes) -> Self::Bytes;
    /// `a << N` of each pair of bytes, taken as one number of 16 bits.
    fn shift_left<const N: u32>(self, a: Self::Bytes) -> Self::Bytes;
    /// `a * b` of each pair of bytes, taken as one number of 16 bits, wrapping.
    fn mul_pairs(self, a: Self::Bytes, b: Self::Bytes) -> Self::Bytes;

    /// Asks for the cache line at `at` to be read into all cache levels; any address is allowed.
    fn prefetch(self, at: *const u8);
}
