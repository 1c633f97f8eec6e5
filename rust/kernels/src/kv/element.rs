//! How one number of K or V is stored. A new format is a type with this trait and its line in `KvFormat`.

use crate::arch::{LANES, Simd};

/// A format of numbers in pages.
pub(crate) trait KvElement: Send + Sync + 'static {
    /// A number as it lies in memory.
    type Stored: bytemuck::Pod + Default + Send + Sync;
    /// The name that users write.
    const NAME: &'static str;

    /// Sixteen numbers as f32, exactly.
    fn widen<S: Simd>(simd: S, from: &[Self::Stored; LANES]) -> S::F32;
    /// Sixteen f32 rounded to nearest, ties to even.
    fn narrow<S: Simd>(simd: S, value: S::F32, to: &mut [Self::Stored; LANES]);
}

/// Stored as computed.
pub(crate) struct F32;

impl KvElement for F32 {
    type Stored = f32;
    const NAME: &'static str = "f32";

    #[inline(always)]
    fn widen<S: Simd>(simd: S, from: &[f32; LANES]) -> S::F32 {
        simd.load(from)
    }

    #[inline(always)]
    fn narrow<S: Simd>(simd: S, value: S::F32, to: &mut [f32; LANES]) {
        simd.store(value, to);
    }
}

/// IEEE half precision.
pub(crate) struct F16;

impl KvElement for F16 {
    type Stored = u16;
    const NAME: &'static str = "f16";

    #[inline(always)]
    fn widen<S: Simd>(simd: S, from: &[u16; LANES]) -> S::F32 {
        simd.load_f16(from)
    }

    #[inline(always)]
    fn narrow<S: Simd>(simd: S, value: S::F32, to: &mut [u16; LANES]) {
        simd.store_f16(value, to);
    }
}

/// The upper half of an f32.
pub(crate) struct Bf16;

impl KvElement for Bf16 {
    type Stored = u16;
    const NAME: &'static str = "bf16";

    #[inline(always)]
    fn widen<S: Simd>(simd: S, from: &[u16; LANES]) -> S::F32 {
        simd.load_bf16(from)
    }

    #[inline(always)]
    fn narrow<S: Simd>(simd: S, value: S::F32, to: &mut [u16; LANES]) {
        simd.store_bf16(value, to);
    }
}
