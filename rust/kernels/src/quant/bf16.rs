//! bfloat16: the upper half of an f32.

use super::{FloatFormat, Line};
use crate::arch::{LANES, Simd};

/// bfloat16 format, stored as bits.
pub struct Bf16;

impl FloatFormat for Bf16 {
    type Element = u16;

    #[inline(always)]
    fn widen<S: Simd>(simd: S, line: &Line<Self>) -> S::F32 {
        simd.load_bf16(line)
    }

    #[inline(always)]
    fn widen_one(element: u16) -> f32 {
        half::bf16::from_bits(element).to_f32()
    }

    #[inline(always)]
    fn narrow(values: &[f32; LANES]) -> Line<Self> {
        let mut line = [0; LANES];
        for (element, value) in line.iter_mut().zip(values) {
            *element = half::bf16::from_f32(*value).to_bits();
        }
        line
    }
}
