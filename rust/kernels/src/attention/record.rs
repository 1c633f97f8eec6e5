//! What is known of a row after some blocks: the maximum m of its scores s, the sum of 2^(s - m) and the sum of
//! 2^(s - m) v.

use crate::arch::{Kernel, LANES, Simd};
use crate::kv::value_vectors;
use crate::math::{exp2_scalar, store_partial};

/// A vector in memory, on a cache line of its own.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
#[repr(C, align(64))]
pub(super) struct Line(pub(super) [f32; LANES]);

const _: () = assert!(size_of::<Line>() == 64);

/// Lines of a record: one that holds [maximum, sum, ..], then the accumulator.
pub(super) fn lines(value_dim: usize) -> usize {
    1 + value_vectors(value_dim)
}

/// A record's first line.
#[inline(always)]
pub(super) fn head(max: f32, sum: f32) -> Line {
    let mut line = Line::default();
    line.0[0] = max;
    line.0[1] = sum;
    line
}

/// Makes records of rows that have seen nothing. A sum of 0 says so: a row that has seen a token has at least the 1 of
/// its largest score, or NaN.
pub(super) fn clear(records: &mut [Line], record_lines: usize) {
    for record in records.chunks_exact_mut(record_lines) {
        record[0] = head(f32::NEG_INFINITY, 0.0);
    }
}

/// Appends a block on the right: `state = state merged with block`, record by record.
pub(super) struct Merge<'a> {
    pub(super) state: &'a mut [Line],
    pub(super) block: &'a [Line],
    pub(super) record_lines: usize,
}

impl Kernel for Merge<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let records = self.state.chunks_exact_mut(self.record_lines).zip(self.block.chunks_exact(self.record_lines));
        for (state, block) in records {
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
            let (state_factor, block_factor) = weights(simd, state_max, block_max);
            state[0] = head(max, state_sum * state_factor + block_sum * block_factor);
            let (state_factor, block_factor) = (simd.splat(state_factor), simd.splat(block_factor));
            for (state, block) in state[1..].iter_mut().zip(&block[1..]) {
                let scaled = simd.mul(simd.load(&state.0), state_factor);
                simd.store(simd.mul_add(simd.load(&block.0), block_factor, scaled), &mut state.0);
            }
        }
    }
}

/// `out = accumulator / sum`
pub(super) struct Finish<'a> {
    pub(super) record: &'a [Line],
    /// A score with no value, which joins the sum after the last block.
    pub(super) sink: Option<f32>,
    pub(super) out: &'a mut [f32],
}

impl Kernel for Finish<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let [max, sum, ..] = self.record[0].0;
        let (accumulator, out) = (&self.record[1..], self.out.chunks_mut(LANES));
        let Some(sink) = self.sink else {
            let sum = simd.splat(sum);
            for (out, line) in out.zip(accumulator) {
                store_partial(simd, simd.div(simd.load(&line.0), sum), out);
            }
            return;
        };
        let (factor, sink) = weights(simd, max, sink);
        let (factor, sum) = (simd.splat(factor), simd.splat(sum * factor + sink));
        for (out, line) in out.zip(accumulator) {
            store_partial(simd, simd.div(simd.mul(simd.load(&line.0), factor), sum), out);
        }
    }
}

/// 2^(a - max) and 2^(b - max) for the larger of both, max: one of them is 1.
#[inline(always)]
fn weights<S: Simd>(simd: S, a: f32, b: f32) -> (f32, f32) {
    let factor = exp2_scalar(simd, -(a - b).abs());
    if a < b { (factor, 1.0) } else { (1.0, factor) }
}
