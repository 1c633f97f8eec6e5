//! IEEE half precision.

use half::slice::{HalfBitsSliceExt, HalfFloatSliceExt};

use super::{FloatFormat, Line};
use crate::arch::{LANES, Simd};

/// IEEE half precision format, stored as bits.
pub struct F16;

impl FloatFormat for F16 {
    type Element = u16;

    #[inline(always)]
    fn widen<S: Simd>(simd: S, line: &Line<Self>) -> S::F32 {
        simd.load_f16(line)
    }

    #[inline(always)]
    fn widen_one(element: u16) -> f32 {
        half::f16::from_bits(element).to_f32()
    }

    /// Converts the whole slice, for which `half` uses hardware instructions.
    #[inline(always)]
    fn narrow(values: &[f32; LANES]) -> Line<Self> {
        let mut line = [0; LANES];
        line.reinterpret_cast_mut::<half::f16>().convert_from_f32_slice(values);
        line
    }
}
