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

    /// Tiles for products over `QUADS` quads of inputs; a quad is four inputs.
    type Tiles<const QUADS: usize>: Tiles<QUADS>;

    /// Configures the tiles of this thread.
    ///
    /// # Safety
    /// A thread has one configuration at a time: tiles that this thread configured before must not be used again.
    unsafe fn configure<const QUADS: usize>(self) -> Self::Tiles<QUADS>;
}

/// Configured tiles of a thread, which are released when this is dropped.
pub trait Tiles<const QUADS: usize> {
    /// Multiplies ROWS tiles of activations, signed bytes, with two panels of weights, bytes that are stored
    /// [`MatrixUnit::WEIGHT_BIAS`] above their values: sixteen columns, a line for each quad (N16K4). Each product is over
    /// `QUADS` quads of each of STEPS consecutive tiles, from quad `first` of a row on, and replaces its sums. The bias is
    /// not subtracted, as in [`Dot::dot`].
    ///
    /// ROWS is 1 or 2. STEPS is 1, or 2 if the tiles are of sixteen quads.
    ///
    /// # Panics
    /// If a row of a tile ends before the last quad.
    fn multiply<const ROWS: usize, const STEPS: usize>(
        &mut self,
        x: [&[RowTile; STEPS]; ROWS],
        first: usize,
        w: [&[[ByteLine; QUADS]; STEPS]; 2],
        sums: &mut [[TileSums; 2]; ROWS],
    );
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
