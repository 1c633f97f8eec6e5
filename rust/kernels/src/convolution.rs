//! Causal depthwise convolution over the tokens of one sequence.

use crate::arch::{Kernel, Simd};
use crate::rows::{for_row_chunks, whole_rows};
use crate::{Exec, PoolError};

/// Computes the causal depthwise convolution of consecutive rows of one sequence: column `c` of row `t` of `out: [rows,
/// width]` is the sum over `k` of `weights[k][c] * x[t - taps + 1 + k][c]`, with `weights: [taps, width]` and `x: [rows,
/// width]`. Rows before the first of `x` are those of `tail: [taps - 1, width]`.
///
/// An element is summed from the oldest row to its own, and products and sums are rounded separately (no FMA), so that
/// its bits depend neither on how the rows are divided among calls nor on the instruction set.
///
/// # Errors
/// [`PoolError`] if the run was cancelled or a task panicked.
///
/// # Panics
/// If the shapes do not match.
pub fn causal_convolution(
    exec: &Exec<'_>,
    x: &[f32],
    tail: &[f32],
    weights: &[f32],
    width: usize,
    out: &mut [f32],
) -> Result<(), PoolError> {
    let (rows, taps) = (whole_rows(x.len(), width), whole_rows(weights.len(), width));
    assert!(taps > 0 && whole_rows(tail.len(), width) == taps - 1, "the tail must have a row less than there are taps");
    assert_eq!(whole_rows(out.len(), width), rows, "inputs and outputs must have the same number of rows");
    for_row_chunks(exec, out, width, width * taps, &|first, out| {
        exec.isa.run(CausalConvolution { x, tail, weights, width, first, out });
    })
}

struct CausalConvolution<'a> {
    x: &'a [f32],
    tail: &'a [f32],
    weights: &'a [f32],
    width: usize,
    /// Index of the first row of `out`.
    first: usize,
    out: &'a mut [f32],
}

impl Kernel for CausalConvolution<'_> {
    type Output = ();

    /// Plain loops, which the compiler vectorizes but must not fuse into FMA.
    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        let Self { x, tail, weights, width, first, out } = self;
        let before = tail.len() / width;
        // Row `index` of the tail followed by `x`.
        let row = |index: usize| match index.checked_sub(before) {
            Some(index) => &x[index * width..][..width],
            None => &tail[index * width..][..width],
        };
        for (out, position) in out.chunks_exact_mut(width).zip(first..) {
            let mut taps = weights.chunks_exact(width).zip(position..);
            let Some((weights, index)) = taps.next() else { return };
            for ((out, x), weight) in out.iter_mut().zip(row(index)).zip(weights) {
                *out = weight * x;
            }
            for (weights, index) in taps {
                for ((out, x), weight) in out.iter_mut().zip(row(index)).zip(weights) {
                    *out += weight * x;
                }
            }
        }
    }
}
