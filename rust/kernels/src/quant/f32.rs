//! IEEE single precision, without conversion.

use super::{FloatFormat, Line};
use crate::arch::{LANES, Simd};

/// IEEE single precision format.
pub struct F32;

impl FloatFormat for F32 {
    type Element = f32;

    #[inline(always)]
    fn widen<S: Simd>(simd: S, line: &Line<Self>) -> S::F32 {
        simd.load(line)
    }

    #[inline(always)]
    fn widen_one(element: f32) -> f32 {
        element
    }

    #[inline(always)]
    fn narrow(values: &[f32; LANES]) -> Line<Self> {
        *values
    }
}
