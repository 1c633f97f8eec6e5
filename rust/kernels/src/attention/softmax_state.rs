//! Online softmax state of a row (Milakov and Gimelshein 2018; FlashAttention): the maximum m of its scores s, the sum of
//! 2^(s - m), and the accumulator, the sum of 2^(s - m) v.

use crate::arch::{Kernel, LANES, Simd};
use crate::kv::value_vectors;
use crate::math::{exp2_scalar, store_partial};

/// Vector in memory, aligned to a cache line.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
#[repr(C, align(64))]
pub(super) struct Line(pub(super) [f32; LANES]);

const _: () = assert!(size_of::<Line>() == 64);

/// Returns the number of lines of a state: a header `[maximum, sum, ..]`, then the accumulator.
pub(super) fn lines(value_dim: usize) -> usize {
    1 + value_vectors(value_dim)
}

/// Returns the header line of a state.
#[inline(always)]
pub(super) fn header(max: f32, sum: f32) -> Line {
    let mut line = Line::default();
    line.0[0] = max;
    line.0[1] = sum;
    line
}

/// Initializes the states of rows that have seen no token. Their sum is 0; after a token the sum is at least 1 (from the
/// largest score) or NaN.
pub(super) fn clear(states: &mut [Line], state_lines: usize) {
    for state in states.chunks_exact_mut(state_lines) {
        state[0] = header(f32::NEG_INFINITY, 0.0);
    }
}

/// Merges the states of the next block into `state`, row by row.
pub(super) struct Merge<'a> {
    pub(super) state: &'a mut [Line],
    pub(super) block: &'a [Line],
    pub(super) state_lines: usize,
}

impl Kernel for Merge<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let states = self.state.chunks_exact_mut(self.state_lines).zip(self.block.chunks_exact(self.state_lines));
        for (state, block) in states {
            let [state_max, state_sum, ..] = state[0].0;
            let [block_max, block_sum, ..] = block[0].0;
            if block_sum == 0.0 {
                continue;
            }
            if state_sum == 0.0 {
                state.copy_from_slice(block);
                continue;
            }
            let max = state_max.max(block_max);
            let (state_factor, block_factor) = rescale_factors(simd, state_max, block_max);
            state[0] = header(max, state_sum * state_factor + block_sum * block_factor);
            let (state_factor, block_factor) = (simd.splat(state_factor), simd.splat(block_factor));
            for (state, block) in state[1..].iter_mut().zip(&block[1..]) {
                let scaled = simd.mul(simd.load(&state.0), state_factor);
                simd.store(simd.mul_add(simd.load(&block.0), block_factor, scaled), &mut state.0);
            }
        }
    }
}

/// Computes the output of a row: `out = accumulator / sum`.
pub(super) struct Finalize<'a> {
    pub(super) state: &'a [Line],
    /// Attention sink: a score without a value, added to the sum after the last block.
    pub(super) sink: Option<f32>,
    pub(super) out: &'a mut [f32],
}

impl Kernel for Finalize<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let [max, sum, ..] = self.state[0].0;
        let (accumulator, out) = (&self.state[1..], self.out.chunks_mut(LANES));
        let Some(sink) = self.sink else {
            let sum = simd.splat(sum);
            for (out, line) in out.zip(accumulator) {
                store_partial(simd, simd.div(simd.load(&line.0), sum), out);
            }
            return;
        };
        let (factor, sink) = rescale_factors(simd, max, sink);
        let (factor, sum) = (simd.splat(factor), simd.splat(sum * factor + sink));
        for (out, line) in out.zip(accumulator) {
            store_partial(simd, simd.div(simd.mul(simd.load(&line.0), factor), sum), out);
        }
    }
}

/// Returns 2^(a - m) and 2^(b - m) for the maximum m of a and b. One of them is 1.
#[inline(always)]
fn rescale_factors<S: Simd>(simd: S, a: f32, b: f32) -> (f32, f32) {
    let factor = exp2_scalar(simd, -(a - b).abs());
    if a < b { (factor, 1.0) } else { (1.0, factor) }
}
