//! Activation functions of feed-forward layers, with and without a gate.

use crate::arch::{Kernel, LANES, Simd};
use crate::math::{
    InPlace, Lanewise, clamp, exp, gelu, gelu_tanh, load_padded, load_up_to, sigmoid, silu, store_partial, store_up_to,
    swish, tanh,
};
use crate::rows::{Rows, for_row_chunks, whole_rows};
use crate::{Exec, PoolError};

/// Activation function. All of them propagate NaN.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Activation {
    /// SiLU: x / (1 + e^-x).
    Silu,
    /// GELU: x Φ(x).
    Gelu,
    /// Approximation of GELU by tanh.
    GeluTanh,
    /// Approximation of GELU by x sigmoid(1.702 x).
    GeluQuick,
    /// ReLU: max(x, 0).
    Relu,
    /// Squared ReLU: max(x, 0)^2; So et al. 2021.
    Relu2,
    /// Hyperbolic tangent.
    Tanh,
    /// Logistic sigmoid: 1 / (1 + e^-x).
    Sigmoid,
    /// xIELU (Huang 2024): `alpha_p x^2 + beta x` above 0, else `alpha_n (e^min(x, eps) - 1 - x) + beta x`.
    Xielu {
        /// Factor of the square, above 0.
        alpha_p: f32,
        /// Factor of the exponential part, up to 0.
        alpha_n: f32,
        /// Slope at 0.
        beta: f32,
        /// Largest exponent.
        eps: f32,
    },
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
            Self::Sigmoid => sigmoid(simd, x),
            Self::Xielu { alpha_p, alpha_n, beta, eps } => {
                let square = simd.mul(simd.splat(alpha_p), simd.mul(x, x));
                let power = exp(simd, simd.min(simd.splat(eps), x));
                let below = simd.sub(simd.sub(power, simd.splat(1.0)), x);
                let below = simd.mul(simd.splat(alpha_n), below);
                let curve = simd.select_greater(x, simd.splat(0.0), square, below);
                simd.add(curve, simd.mul(simd.splat(beta), x))
            }
        }
    }
}

#[inline(always)]
fn relu<S: Simd>(simd: S, x: S::F32) -> S::F32 {
    // `x` is the second operand, which is kept if it is NaN.
    simd.max(simd.splat(0.0), x)
}

/// Combination of the gate and up projections of a gated feed-forward layer. NaN in either gives NaN.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Gating {
    /// Gated linear unit: activation(gate) * up.
    Plain(Activation),
    /// Clamped SwiGLU: (u + offset) * g * sigmoid(alpha * g) with g = min(gate, gate_limit) and u = up clamped to ±limit.
    Clamped {
        /// Factor of the gate inside the sigmoid.
        alpha: f32,
        /// Maximum of the gate.
        gate_limit: f32,
        /// Maximum magnitude of up.
        limit: f32,
        /// Number added to up: 1 in gpt-oss, 0 in DeepSeek-V4.
        offset: f32,
    },
}

impl Gating {
    #[inline(always)]
    fn apply<S: Simd>(self, simd: S, gate: S::F32, up: S::F32) -> S::F32 {
        match self {
            Self::Plain(activation) => simd.mul(activation.apply(simd, gate), up),
            Self::Clamped { alpha, gate_limit, limit, offset } => {
                // `gate` is the second operand, which is kept if it is NaN.
                let gate = simd.min(simd.splat(gate_limit), gate);
                let up = simd.add(clamp(simd, up, limit), simd.splat(offset));
                simd.mul(swish(simd, gate, alpha), up)
            }
        }
    }
}

/// Computes `out = gating(gate, up)`, where each row of `gate_up: [m, 2 width]` holds the gate and then up, and
/// `out: [m, width]`.
///
/// # Errors
/// [`PoolError`] if the run was cancelled or a task panicked.
///
/// # Panics
/// If the shapes do not match.
pub fn gated(exec: &Exec<'_>, gate_up: &[f32], width: usize, gating: Gating, out: &mut [f32]) -> Result<(), PoolError> {
    let rows = whole_rows(out.len(), width);
    assert_eq!(gate_up.len(), rows * 2 * width, "gate_up must have twice as many elements as out");
    // An activation costs about as much as a dozen additions.
    for_row_chunks(exec, out, width, 8 * width, &|first, out| {
        for (out, gate_up) in out.chunks_exact_mut(width).zip(gate_up[first * 2 * width..].chunks_exact(2 * width)) {
            let (gate, up) = gate_up.split_at(width);
            exec.isa.run(Gated { gate, up, gating, out });
        }
    })
}

/// Computes `x *= activation(gate)` elementwise, on `x: [m, width]` and the first `width` columns of the view `gate`.
///
/// # Errors
/// [`PoolError`] if the run was cancelled or a task panicked.
///
/// # Panics
/// If the shapes do not match.
pub fn apply_gate(
    exec: &Exec<'_>,
    x: &mut [f32],
    width: usize,
    gate: Rows<'_>,
    activation: Activation,
) -> Result<(), PoolError> {
    assert_eq!(gate.rows(), whole_rows(x.len(), width), "x and the gate must have the same number of rows");
    for_row_chunks(exec, x, width, 8 * width, &|first, x| {
        for (row, x) in (first..).zip(x.chunks_exact_mut(width)) {
            exec.isa.run(ApplyGate { x, gate: gate.row(row, width), activation });
        }
    })
}

/// Computes `x = activation(x)` elementwise.
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

struct ApplyGate<'a> {
    x: &'a mut [f32],
    gate: &'a [f32],
    activation: Activation,
}

impl Kernel for ApplyGate<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        for (x, gate) in self.x.chunks_mut(LANES).zip(self.gate.chunks(LANES)) {
            let factor = self.activation.apply(simd, load_up_to(simd, gate));
            store_up_to(simd, simd.mul(load_up_to(simd, x), factor), x);
        }
    }
}
