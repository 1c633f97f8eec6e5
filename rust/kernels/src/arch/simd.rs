//! The traits that kernels use: vectors of sixteen lanes, for registers of any width. A lane is an f32, an i32 or four
//! bytes.

/// Returns the bits of an index to a table of `len` entries.
///
/// # Panics
/// If `len` is not a power of two below 2^31.
#[inline(always)]
pub(super) const fn index_mask(len: usize) -> i32 {
    assert!(len.is_power_of_two() && len <= i32::MAX as usize, "tables have 2^n entries");
    len as i32 - 1
}

/// Number of lanes of a vector: one 512-bit register, two 256-bit registers or four 128-bit registers.
pub const LANES: usize = 16;

/// Algorithm that is written once for all instruction sets; see [`Isa::run`](super::Isa::run).
///
/// `run` must be `#[inline(always)]`, so that it is compiled inside the function that enables the instructions. For the same
/// reason it should use vectors in loops, not in closures: a closure that the standard library calls, as `[T; N]::map`
/// does, is compiled without the instructions unless it is inlined, and each operation in it is then a call.
pub trait Kernel {
    /// Result of the kernel.
    type Output;

    /// Runs the algorithm with the vectors of `S`.
    fn run<S: Simd>(self, simd: S) -> Self::Output;
}

/// Algorithm that uses int8 dot products; see [`Isa::run_dot`](super::Isa::run_dot).
///
/// A kernel that uses none should be a [`Kernel`]: instruction sets that differ in [`Dot`] alone share its compiled code.
/// `run` must be `#[inline(always)]`, as for [`Kernel`].
pub trait DotKernel {
    /// Result of the kernel.
    type Output;

    /// Runs the algorithm with the vectors and dot products of `S`.
    fn run<S: Dot>(self, simd: S) -> Self::Output;
}

/// Bytes of a vector: a cache line.
pub const LINE: usize = 64;

/// Vector of bytes in memory, aligned to a cache line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C, align(64))]
pub struct ByteLine(pub [u8; LINE]);

/// Bits of sixteen bytes, one for each lane, and their place in a number.
#[derive(Clone, Copy)]
pub struct Plane<'a> {
    /// Bytes that hold the bits.
    pub bytes: &'a [u8; LANES],
    /// Lowest of the bits in a byte.
    pub from: usize,
    /// Number of bits.
    pub width: usize,
    /// Lowest of the bits in the number.
    pub to: usize,
}

impl Plane<'_> {
    /// Returns the mask of the bits of a byte after a shift to bit 0.
    pub(super) const fn mask(&self) -> u8 {
        u8::MAX >> (8 - self.width)
    }
}

/// Operations on vectors of [`LANES`] lanes. A value of the type proves that the machine has the instructions.
///
/// Every operation acts lane by lane with IEEE rounding and does the same on every lane, so that a result depends on
/// its operands alone. Instruction sets may differ in one thing: whether [`Simd::mul_add`] rounds once or twice.
/// Operations on integers are exact on all instruction sets.
pub trait Simd: Copy + Send + Sync + 'static {
    /// Sixteen f32.
    type F32: Copy;
    /// Sixteen i32.
    type I32: Copy;
    /// Sixty-four bytes, four in each lane; the first byte of a lane is its lowest.
    type Bytes: Copy;

    /// Rows of activations in a register tile of the floating-point matmul.
    const TILE_ROWS: usize;
    /// Panels of [`LANES`] output columns in that tile.
    const TILE_PANELS: usize;

    /// Runs `kernel` in a function that is compiled with these instructions.
    fn vectorize<K: Kernel>(self, kernel: K) -> K::Output;

    /// Returns `value` in every lane.
    fn splat(self, value: f32) -> Self::F32;
    /// Loads sixteen f32.
    fn load(self, from: &[f32; LANES]) -> Self::F32;
    /// Loads sixteen bf16 and widens them to f32.
    fn load_bf16(self, from: &[u16; LANES]) -> Self::F32;
    /// Loads sixteen IEEE half floats and widens them to f32.
    fn load_f16(self, from: &[u16; LANES]) -> Self::F32;
    /// Loads `N` vectors of sixteen f32.
    #[inline(always)]
    fn load_vectors<const N: usize>(self, from: &[[f32; LANES]; N]) -> [Self::F32; N] {
        let mut vectors = [self.splat(0.0); N];
        for (vector, from) in vectors.iter_mut().zip(from) {
            *vector = self.load(from);
        }
        vectors
    }
    /// Stores sixteen f32.
    fn store(self, value: Self::F32, to: &mut [f32; LANES]);
    /// Stores sixteen f32 past the caches (non-temporal) if `to` is aligned to a cache line: for results that are not read
    /// again soon. Memory is then written without being read first. Call [`Simd::fence`] before the next access to `to`.
    fn store_nontemporal(self, value: Self::F32, to: &mut [f32; LANES]);
    /// Completes earlier non-temporal stores of this thread before later accesses.
    fn fence(self);
    /// Stores sixteen bf16, rounded to nearest, ties to even; NaN stays NaN.
    fn store_bf16(self, value: Self::F32, to: &mut [u16; LANES]);
    /// Stores sixteen IEEE half floats, rounded to nearest, ties to even; NaN stays NaN.
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
    /// Returns the larger of each pair; `b` where either is NaN.
    fn max(self, a: Self::F32, b: Self::F32) -> Self::F32;
    /// Returns the smaller of each pair; `b` where either is NaN.
    fn min(self, a: Self::F32, b: Self::F32) -> Self::F32;
    /// Rounds to the nearest integer, ties to even. Defined for |value| < 2^22.
    fn round(self, value: Self::F32) -> Self::F32;
    /// Returns 2^n for an integral n in [-126, 127], and 0 for n = -127.
    fn exp2_integer(self, n: Self::F32) -> Self::F32;
    /// Selects `x` where `a > b`, else `y`; so `y` where either is NaN.
    fn select_greater(self, a: Self::F32, b: Self::F32, x: Self::F32, y: Self::F32) -> Self::F32;
    /// Selects lane i of `a` for `from <= i < to`, and of `b` elsewhere.
    fn select_range(self, from: usize, to: usize, a: Self::F32, b: Self::F32) -> Self::F32;
    /// Selects lane i of `a` where bit i of `lanes` is set, and of `b` elsewhere.
    fn select_lanes(self, lanes: u16, a: Self::F32, b: Self::F32) -> Self::F32;

    /// Moves lane i ^ N to lane i; N is 1, 2, 4 or 8.
    fn swap_lanes<const N: usize>(self, a: Self::F32) -> Self::F32;

    /// Returns the lanes as an array.
    #[inline(always)]
    fn to_array(self, value: Self::F32) -> [f32; LANES] {
        let mut lanes = [0.0; LANES];
        self.store(value, &mut lanes);
        lanes
    }

    /// Returns the sum of the lanes, added pairwise in one fixed order: i with i + 8, then + 4, + 2, + 1.
    #[inline(always)]
    fn reduce_add(self, value: Self::F32) -> f32 {
        let value = self.add(value, self.swap_lanes::<8>(value));
        let value = self.add(value, self.swap_lanes::<4>(value));
        let value = self.add(value, self.swap_lanes::<2>(value));
        self.to_array(self.add(value, self.swap_lanes::<1>(value)))[0]
    }

    /// Returns the largest lane; unspecified if a lane is NaN.
    #[inline(always)]
    fn reduce_max(self, value: Self::F32) -> f32 {
        let value = self.max(value, self.swap_lanes::<8>(value));
        let value = self.max(value, self.swap_lanes::<4>(value));
        let value = self.max(value, self.swap_lanes::<2>(value));
        self.to_array(self.max(value, self.swap_lanes::<1>(value)))[0]
    }

    /// Returns `value` in every lane.
    fn splat_i32(self, value: i32) -> Self::I32;
    /// Loads sixteen i32.
    fn load_i32(self, from: &[i32; LANES]) -> Self::I32;
    /// Loads sixteen i8 and widens them to i32.
    fn load_i8(self, from: &[i8; LANES]) -> Self::I32;
    /// Loads sixteen numbers whose bits are in some planes, and subtracts `zero`. The results are in -128..=127.
    fn load_planes<const N: usize>(self, planes: [Option<Plane<'_>>; N], zero: u8) -> Self::I32;
    /// Stores sixteen i32.
    fn store_i32(self, value: Self::I32, to: &mut [i32; LANES]);
    /// `a + b`, wrapping.
    fn add_i32(self, a: Self::I32, b: Self::I32) -> Self::I32;
    /// Converts each integer to the nearest f32; exact below 2^24.
    fn to_f32(self, value: Self::I32) -> Self::F32;
    /// Converts each number to the nearest integer, ties to even. Defined for |value| < 2^22.
    fn to_i32(self, value: Self::F32) -> Self::I32;
    /// Stores sixteen i32 of -128..=127 as bytes.
    fn store_i8(self, value: Self::I32, to: &mut [i8; LANES]);

    /// Loads sixty-four bytes.
    fn load_bytes(self, from: &[u8; LINE]) -> Self::Bytes;
    /// Stores sixty-four bytes.
    fn store_bytes(self, value: Self::Bytes, to: &mut [u8; LINE]);
    /// Returns `value` in every byte.
    fn splat_byte(self, value: u8) -> Self::Bytes;
    /// Returns the same four bytes in every lane.
    fn splat_quad(self, quad: [i8; 4]) -> Self::Bytes;
    /// Copies byte i to all four bytes of lane i.
    fn spread(self, from: &[u8; LANES]) -> Self::Bytes;
    /// Looks up the lowest four bits of each byte of `indices` in the table. The highest bit of the bytes is zero.
    fn lookup(self, table: &[u8; LANES], indices: Self::Bytes) -> Self::Bytes;
    /// Looks up each byte of `indices`, 0..=15, among the sixteen bytes of four lanes that it is in.
    fn shuffle(self, bytes: Self::Bytes, indices: Self::Bytes) -> Self::Bytes;
    /// Looks up four bytes for each lane: the entry whose index is the lane, modulo the length of the table.
    ///
    /// # Panics
    /// If the length of the table is not a power of two.
    fn gather(self, table: &[[i8; 4]], indices: Self::Bytes) -> Self::Bytes;
    /// Looks up two entries for each lane, those at twice its index, modulo the length of the table, and after it. Returns
    /// the first entries and the second ones. Indices are less than 2^15.
    ///
    /// # Panics
    /// If the length of the table is not a power of two.
    #[inline(always)]
    fn gather_pairs(self, table: &[[i8; 4]], indices: Self::Bytes) -> [Self::Bytes; 2] {
        let first = self.shift_left::<1>(indices);
        [self.gather(table, first), self.gather(table, self.or(first, self.splat_quad([1, 0, 0, 0])))]
    }
    /// Negates each byte for which `negative`, 0..=15, is not zero, wrapping.
    #[inline(always)]
    fn negate(self, bytes: Self::Bytes, negative: Self::Bytes) -> Self::Bytes {
        const MASKS: [u8; LANES] = {
            let mut table = [0xff; LANES];
            table[0] = 0;
            table
        };
        let masks = self.lookup(&MASKS, negative);
        self.sub_bytes(self.xor(bytes, masks), masks)
    }
    /// `a & b`
    fn and(self, a: Self::Bytes, b: Self::Bytes) -> Self::Bytes;
    /// `a | b`
    fn or(self, a: Self::Bytes, b: Self::Bytes) -> Self::Bytes;
    /// `a ^ b`
    fn xor(self, a: Self::Bytes, b: Self::Bytes) -> Self::Bytes;
    /// `a - b` of each byte, wrapping.
    fn sub_bytes(self, a: Self::Bytes, b: Self::Bytes) -> Self::Bytes;
    /// `a >> N` of each pair of bytes, read as one number of 16 bits.
    fn shift_right<const N: u32>(self, a: Self::Bytes) -> Self::Bytes;
    /// `a << N` of each pair of bytes, read as one number of 16 bits.
    fn shift_left<const N: u32>(self, a: Self::Bytes) -> Self::Bytes;
    /// `a * b` of each pair of bytes, read as one number of 16 bits, wrapping.
    fn mul_pairs(self, a: Self::Bytes, b: Self::Bytes) -> Self::Bytes;

    /// Expands bytes: byte i is the next one of `values` where bit i of `mask` is set, and 0 elsewhere.
    fn expand(self, mask: u64, values: &[u8; LINE]) -> Self::Bytes;

    /// Prefetches the cache line at `at` into all cache levels; any address is allowed.
    fn prefetch(self, at: *const u8);
    /// Prefetches the cache line at `at` into the L2 cache and those after it; any address is allowed.
    fn prefetch_far(self, at: *const u8);
}

/// Dot products of signed bytes, on top of the vectors of [`Simd`].
pub trait Dot: Simd {
    /// Offset of the first factor's bytes in [`Dot::dot`], modulo 256: 128 where the instruction takes unsigned bytes
    /// there, else 0. The caller subtracts the product of this offset with the sum of the other factor.
    const WEIGHT_BIAS: u8;

    /// Whether multiplying codes, and their partial sums by sub-scales, is faster than multiplying unpacked weights.
    const BY_CODES: bool;
    /// Maximum number of rows of a tile for which codes with sub-scales are multiplied although [`Dot::BY_CODES`] is false.
    const CODE_ROWS: usize = 0;
    /// Whether there are kernels that read panels as one stream of memory: for instruction sets that may be the fastest of a
    /// processor that reads one stream faster. Others ignore [`reads_one_stream`](crate::machine::reads_one_stream).
    const READS_ONE_STREAM: bool = false;

    /// Rows of activations in a register tile of the integer matmul over many rows.
    const BYTE_TILE_ROWS: usize;
    /// Panels of [`LANES`] output columns in that tile.
    const BYTE_TILE_PANELS: usize;

    /// Runs `kernel` in a function that is compiled with these instructions.
    fn vectorize_dot<K: DotKernel>(self, kernel: K) -> K::Output;

    /// Runs a kernel that uses [`Simd::expand`] as [`Dot::vectorize_dot`] does, with an instruction for it where the
    /// machine has one.
    #[inline]
    fn vectorize_expand<K: DotKernel>(self, kernel: K) -> K::Output {
        self.vectorize_dot(kernel)
    }

    /// Adds four products to each lane of `acc`: of `w`, bytes that are stored [`Dot::WEIGHT_BIAS`] above values of
    /// -128..=127, with the values of `x`, -127..=127. The bias is not subtracted: the result is larger by the bias times
    /// the sum of the lane's four `x`.
    fn dot(self, acc: Self::I32, w: Self::Bytes, x: Self::Bytes) -> Self::I32;

    /// Adds four products of `codes`, 0..=63, with the values of `x`, -127..=127, to each lane's partial sum `acc`. A
    /// partial sum begins at zero and may be kept as two sums of 16 bits, of the first two products and of the last two;
    /// the caller adds no more products than fit.
    fn dot_codes(self, acc: Self::I32, codes: Self::Bytes, x: Self::Bytes) -> Self::I32;

    /// Adds the product of each lane's partial sum with its factor to `acc`. `scale` holds the factor twice, as two
    /// numbers of 16 bits; it is negative only if [`Dot::BY_CODES`] is set. `is_short` says that each partial sum fits 16 bits.
    fn add_scaled(self, acc: Self::I32, partial: Self::I32, scale: Self::Bytes, is_short: bool) -> Self::I32;
}
