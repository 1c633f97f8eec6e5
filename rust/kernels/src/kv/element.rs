//! Floating-point storage formats of K and V. A new format is a type that implements [`KvElement`] and a line in
//! `KvFormat`.

use crate::arch::{LANES, Simd};

/// Floating-point format of K and V elements.
pub(crate) trait KvElement: Send + Sync + 'static {
    /// Stored representation of an element.
    type Stored: bytemuck::Pod + Default + Send + Sync;
    /// Name in options.
    const NAME: &'static str;

    /// Converts sixteen elements to f32, exactly.
    fn widen<S: Simd>(simd: S, from: &[Self::Stored; LANES]) -> S::F32;
    /// Converts sixteen f32, rounding to nearest, ties to even.
    fn narrow<S: Simd>(simd: S, value: S::F32, to: &mut [Self::Stored; LANES]);
}

/// IEEE single precision.
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

/// bfloat16: the upper half of an f32.
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
