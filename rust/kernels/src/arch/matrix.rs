//! Matrix units: instructions that multiply whole tiles of bytes, beside the vectors of [`Simd`](super::Simd).

use super::simd::{ByteLine, Dot, DotKernel, Kernel, LANES, LINE};

/// Bytes of sixteen rows of activations, `[row][input]`: 64 consecutive inputs of each row.
pub type RowTile = [[u8; LINE]; LANES];

/// Sums of the products of a tile, `[row][column]`.
pub type TileSums = [[i32; LANES]; LANES];

/// Algorithm that uses a matrix unit; see [`Isa::run_matrix`](super::Isa::run_matrix).
pub trait MatrixKernel {
    /// Result of the kernel.
    type Output;

    /// Runs the algorithm. It is compiled without the instructions of `S`: it runs kernels for what uses vectors.
    fn run<S: Dot, M: MatrixUnit>(self, simd: S, unit: M) -> Self::Output;
}

/// Matrix unit. A value of the type proves that the machine has it and that this process may use it.
pub trait MatrixUnit: Copy + Send + Sync + 'static {
    /// Offset of the bytes of weights from their values; see [`Dot::WEIGHT_BIAS`].
    const WEIGHT_BIAS: u8;

    /// Tiles of a thread.
    type Tiles: Tiles;

    /// Configures the tiles of this thread.
    ///
    /// # Safety
    /// A thread has one configuration at a time: tiles that this thread configured before must not be used again.
    unsafe fn configure(self) -> Self::Tiles;
}

/// Configured tiles of a thread, which are released when this is dropped: two panels of weights, and the sums of the
/// products of up to two tiles of activations with them.
///
/// Each step is a few instructions, so that vector code of the same thread can run between them: out-of-order execution does
/// not reach far enough to overlap a long run of one with a long run of the other.
pub trait Tiles {
    /// Sets the sums of tile `ROW` of activations, which is 0 or 1, to zero.
    fn clear<const ROW: usize>(&mut self);

    /// Loads weights of two panels for 64 inputs, bytes that are stored [`MatrixUnit::WEIGHT_BIAS`] above their values:
    /// sixteen columns, a line for each four inputs (N16K4).
    fn load(&mut self, w: [&[ByteLine; LANES]; 2]);

    /// Adds the products of a tile of activations, signed bytes, with the loaded weights to the sums of tile `ROW`. The bias
    /// is not subtracted, as in [`Dot::dot`].
    fn add<const ROW: usize>(&mut self, x: &RowTile);

    /// Stores the sums of tile `ROW`.
    fn store<const ROW: usize>(&self, sums: &mut [TileSums; 2]);
}

/// Instruction set with a matrix unit. All kernels but [`MatrixKernel`] run as they do without the unit, so that their code
/// is compiled once for both.
#[cfg_attr(not(feature = "amx"), allow(dead_code, reason = "builds without a matrix unit have nothing to combine"))]
#[derive(Clone, Copy, Debug)]
pub struct WithUnit<S, M> {
    simd: S,
    unit: M,
}

#[cfg_attr(not(feature = "amx"), allow(dead_code, reason = "builds without a matrix unit have nothing to combine"))]
impl<S: Dot, M: MatrixUnit> WithUnit<S, M> {
    /// Combines an instruction set and a matrix unit of this machine.
    pub(super) fn new(simd: S, unit: M) -> Self {
        Self { simd, unit }
    }

    /// See [`Simd::vectorize`](super::Simd::vectorize).
    #[inline]
    pub(super) fn vectorize<K: Kernel>(self, kernel: K) -> K::Output {
        self.simd.vectorize(kernel)
    }

    /// See [`Dot::vectorize_dot`].
    #[inline]
    pub(super) fn vectorize_dot<K: DotKernel>(self, kernel: K) -> K::Output {
        self.simd.vectorize_dot(kernel)
    }

    /// Runs `kernel` with the matrix unit.
    #[inline]
    pub(super) fn run_matrix<K: MatrixKernel>(self, kernel: K) -> K::Output {
        kernel.run(self.simd, self.unit)
    }
}
