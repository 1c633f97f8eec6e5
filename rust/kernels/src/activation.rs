//! Activations of feed-forward layers, gated and not.

use crate::arch::{Kernel, LANES, Simd};
use crate::math::{InPlace, Lanewise, clamp, gelu, gelu_tanh, load_padded, silu, store_partial, swish, tanh};
use crate::rows::{for_row_chunks, whole_rows};
use crate::{Exec, PoolError};

/// The function that a layer is bent with. NaN stays NaN in all of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Activation {
    /// x / (1 + e^-x)
    Silu,
    /// x Φ(x)
    Gelu,
    /// Gelu approximated by tanh.
    GeluTanh,
    /// Gelu approximated by x sigmoid(1.702 x).
    GeluQuick,
    /// max(x, 0)
    Relu,
    /// max(x, 0)^2; So et al. 2021.
    Relu2,
    /// tanh x
    Tanh,
}

impl Lanewise for Activation {
    #[inline(always)]
    fn apply<S: Simd>(self, simd: S, x: S::F32) -> S::F32 {
        match self {
            Self::Silu => silu(simd, x),
            Self::Gelu => gelu(simd, x),
            Self::GeluTanh => gelu_tanh(simd, x),
            Self::GeluQuick => swish(simd, x, 1.702),
            Self::Relu => relu(simd, x),
            Self::Relu2 => {
                let x = relu(simd, x);
                simd.mul(x, x)
            }
            Self::Tanh => tanh(simd, x),
        }
    }
}

#[inline(always)]
fn relu<S: Simd>(simd: S, x: S::F32) -> S::F32 {
    // `x` second: it is kept where it is NaN.
    simd.max(simd.splat(0.0), x)
}

/// What becomes of a gate and of what it lets through. NaN in either becomes NaN.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Gating {
    /// activation(gate) * up
    Plain(Activation),
    /// (u + 1) * g * sigmoid(alpha * g) with g = min(gate, limit) and u = up cut to ±limit, as in gpt-oss.
    Clamped {
        /// What the gate is multiplied with inside the sigmoid.
        alpha: f32,
        /// The largest gate, and the largest magnitude of up.
        limit: f32,
    },
}

impl Gating {
    #[inline(always)]
    fn apply<S: Simd>(self, simd: S, gate: S::F32, up: S::F32) -> S::F32 {
        match self {
            Self::Plain(activation) => simd.mul(activation.apply(simd, gate), up),
            Self::Clamped { alpha, limit } => {
                // `gate` second: it is kept where it is NaN.
                let gate = simd.min(simd.splat(limit), gate);
                let up = simd.add(clamp(simd, up, limit), simd.splat(1.0));
                simd.mul(swish(simd, gate, alpha), up)
            }
        }
    }
}

/// `out = gating(gate, up)`, where each row of `gate_up: [m, 2 width]` holds the gate and then up, and
/// `out: [m, width]`.
///
/// # Errors
/// [`PoolError`] if the run was cancelled or a task panicked.
///
/// # Panics
/// If the shapes do not fit.
pub fn gated(exec: &Exec<'_>, gate_up: &[f32], width: usize, gating: Gating, out: &mut [f32]) -> Result<(), PoolError> {
    let rows = whole_rows(out.len(), width);
    assert_eq!(gate_up.len(), rows * 2 * width, "a gate and an up for every output");
    // An activation is worth a dozen additions.
    for_row_chunks(exec, out, width, 8 * width, &|first, out| {
        for (out, gate_up) in out.chunks_exact_mut(width).zip(gate_up[first * 2 * width..].chunks_exact(2 * width)) {
            let (gate, up) = gate_up.split_at(width);
            exec.isa.run(Gated { gate, up, gating, out });
        }
    })
}

/// `x = activation(x)`, element by element.
///
/// # Errors
/// [`PoolError`] if the run was cancelled or a task panicked.
pub fn activate(exec: &Exec<'_>, x: &mut [f32], activation: Activation) -> Result<(), PoolError> {
    for_row_chunks(exec, x, 1, 8, &|_, x| exec.isa.run(InPlace { x, function: activation }))
}

struct Gated<'a> {
    gate: &'a [f32],
    up: &'a [f32],
    gating: Gating,
    out: &'a mut [f32],
}

impl Kernel for Gated<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let (gate, gate_tail) = self.gate.as_chunks::<LANES>();
        let (up, up_tail) = self.up.as_chunks::<LANES>();
        let (out, out_tail) = self.out.as_chunks_mut::<LANES>();
        for ((gate, up), out) in gate.iter().zip(up).zip(out) {
            simd.store(self.gating.apply(simd, simd.load(gate), simd.load(up)), out);
        }
        if !out_tail.is_empty() {
            let value = self.gating.apply(simd, load_padded(simd, gate_tail), load_padded(simd, up_tail));
            store_partial(simd, value, out_tail);
        }
    }
}
