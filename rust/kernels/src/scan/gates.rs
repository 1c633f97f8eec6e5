//! Gates of recurrences: step sizes, decay factors and update factors, from columns of a projection.

use crate::arch::{Kernel, LANES, Simd};
use crate::math::{exp, load_up_to, sigmoid, softplus, store_up_to};
use crate::rows::{Rows, for_row_chunks, whole_rows};
use crate::{Exec, PoolError};

/// Function from the columns of a projection to those of a gate. Vectors have an element per column.
#[derive(Debug, Clone, Copy)]
pub enum Gate<'a> {
    /// Step size of Mamba: `softplus(x + bias)`, clamped to `limits`.
    Step {
        /// Bias of each column.
        bias: &'a [f32],
        /// Minimum and maximum.
        limits: [f32; 2],
    },
    /// Decay factor over a step: `exp(rate * step)` with the step of [`Gate::Step`]. Rates are at most 0: `-exp(A_log)`.
    Decay {
        /// Bias of each column.
        bias: &'a [f32],
        /// Minimum and maximum of the step.
        limits: [f32; 2],
        /// Rate of each column.
        rates: &'a [f32],
    },
    /// Decay factor with a lower bound: `exp(bound * sigmoid(slope * (x + bias)))`.
    BoundedDecay {
        /// Bias of each column.
        bias: &'a [f32],
        /// Slope of each column.
        slopes: &'a [f32],
        /// Logarithm of the smallest factor, at most 0.
        bound: f32,
    },
    /// Update factor of a delta rule: `scale * sigmoid(x)`.
    Sigmoid {
        /// Largest factor: 1, or 2 if the recurrence may have negative eigenvalues.
        scale: f32,
    },
}

impl<'a> Gate<'a> {
    /// Returns the vectors of the gate.
    fn vectors(&self) -> [&'a [f32]; 2] {
        match *self {
            Self::Step { bias, .. } => [bias, bias],
            Self::Decay { bias, rates, .. } => [bias, rates],
            Self::BoundedDecay { bias, slopes, .. } => [bias, slopes],
            Self::Sigmoid { .. } => [&[], &[]],
        }
    }
}

/// Computes `out = gate(x)` elementwise, on the first columns of the view, with `out: [rows, width]`.
///
/// # Errors
/// [`PoolError`] if the run was cancelled or a task panicked.
///
/// # Panics
/// If the shapes do not match.
pub fn gates(exec: &Exec<'_>, x: Rows<'_>, gate: &Gate<'_>, width: usize, out: &mut [f32]) -> Result<(), PoolError> {
    assert_eq!(x.rows(), whole_rows(out.len(), width), "inputs and outputs must have the same number of rows");
    let is_wide = |vector: &[f32]| vector.len() == width || matches!(gate, Gate::Sigmoid { .. });
    assert!(gate.vectors().into_iter().all(is_wide), "vectors of a gate must have {width} elements");
    for_row_chunks(exec, out, width, 16 * width, &|first, out| {
        for (row, out) in (first..).zip(out.chunks_exact_mut(width)) {
            exec.isa.run(Apply { x: x.row(row, width), gate, out });
        }
    })
}

struct Apply<'a> {
    x: &'a [f32],
    gate: &'a Gate<'a>,
    out: &'a mut [f32],
}

impl Kernel for Apply<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Self { x, gate, out } = self;
        for (index, (x, out)) in x.chunks(LANES).zip(out.chunks_mut(LANES)).enumerate() {
            let len = x.len();
            let x = load_up_to(simd, x);
            let vector = |of: &[f32]| load_up_to(simd, &of[index * LANES..][..len]);
            let value = match *gate {
                Gate::Step { bias, limits } => step(simd, simd.add(x, vector(bias)), limits),
                Gate::Decay { bias, limits, rates } => {
                    exp(simd, simd.mul(vector(rates), step(simd, simd.add(x, vector(bias)), limits)))
                }
                Gate::BoundedDecay { bias, slopes, bound } => {
                    let opened = sigmoid(simd, simd.mul(vector(slopes), simd.add(x, vector(bias))));
                    exp(simd, simd.mul(simd.splat(bound), opened))
                }
                Gate::Sigmoid { scale } => simd.mul(simd.splat(scale), sigmoid(simd, x)),
            };
            store_up_to(simd, value, out);
        }
    }
}

/// Computes softplus x, clamped.
#[inline(always)]
fn step<S: Simd>(simd: S, x: S::F32, [min, max]: [f32; 2]) -> S::F32 {
    // The step is the second operand, which is kept if it is NaN.
    simd.min(simd.splat(max), simd.max(simd.splat(min), softplus(simd, x)))
}
