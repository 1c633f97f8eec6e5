//! The vocabulary in which kernels are written: vectors of sixteen f32 lanes, whatever the registers' width.

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

/// Operations on vectors of [`LANES`] f32. Having a value of the type proves that the machine has the instructions.
///
/// Every operation acts lane by lane with IEEE rounding and does the same on every lane, so that a result depends on
/// its own operands alone. Instruction sets may differ in one thing: whether [`Simd::mul_add`] rounds once or twice.
pub trait Simd: Copy + Send + Sync + 'static {
    /// Sixteen f32.
    type F32: Copy;

    /// Rows of activations in a register tile of the floating-point matmul.
    const TILE_ROWS: usize;
    /// Panels of [`LANES`] output columns in that tile.
    const TILE_PANELS: usize;

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
    /// Lane i of `a` for `from <= i < to`, of `b` elsewhere.
    fn select_range(self, from: usize, to: usize, a: Self::F32, b: Self::F32) -> Self::F32;

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
        self.to_array(value).into_iter().fold(f32::NEG_INFINITY, f32::max)
    }

    /// Asks for the cache line at `at` to be read into all cache levels; any address is allowed.
    fn prefetch(self, at: *const u8);
}
