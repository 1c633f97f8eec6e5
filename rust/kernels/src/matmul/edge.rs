//! Sixteen outputs at the right edge of a matrix, where there may be fewer.

use crate::arch::{LANES, Simd};

/// The first sixteen of `from`, or all there are.
#[inline(always)]
pub(super) fn load_edge<S: Simd>(simd: S, from: &[f32]) -> S::F32 {
    if let Some(whole) = from.first_chunk() {
        return simd.load(whole);
    }
    let mut lanes = [0.0; LANES];
    lanes[..from.len()].copy_from_slice(from);
    simd.load(&lanes)
}

/// To the first sixteen of `to`, or all there are.
#[inline(always)]
pub(super) fn store_edge<S: Simd>(simd: S, value: S::F32, to: &mut [f32]) {
    if let Some(whole) = to.first_chunk_mut() {
        simd.store(value, whole);
    } else {
        to.copy_from_slice(&simd.to_array(value)[..to.len()]);
    }
}
