//! Activations of gated feed-forward layers.

use crate::arch::{Kernel, LANES, Simd};
use crate::math::{gelu, gelu_tanh, load_padded, silu, store_partial};
use crate::rows::{for_row_runs, whole_rows};
use crate::{Exec, PoolError};

/// The function that the gate goes through.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Activation {
    /// x / (1 + e^-x)
    Silu,
    /// x Φ(x)
    Gelu,
    /// Gelu approximated by tanh.
    GeluTanh,
}

impl Activation {
    #[inline(always)]
    fn apply<S: Simd>(self, simd: S, x: S::F32) -> S::F32 {
        match self {
            Self::Silu => silu(simd, x),
            Self::Gelu => gelu(simd, x),
            Self::GeluTanh => gelu_tanh(simd, x),
        }
    }
}

/// `out = activation(gate) * up`, where each row of `gate_up: [m, 2 width]` holds the gate and then up, and
/// `out: [m, width]`.
///
/// # Errors
/// [`PoolError`] if the run was cancelled or a task panicked.
///
/// # Panics
/// If the shapes do not fit.
pub fn gated(
    exec: &Exec<'_>,
    gate_up: &[f32],
    width: usize,
    activation: Activation,
    out: &mut [f32],
) -> Result<(), PoolError> {
    let rows = whole_rows(out.len(), width);
    assert_eq!(gate_up.len(), rows * 2 * width, "a gate and an up for every output");
    // An activation is worth a dozen additions.
    for_row_runs(exec, out, width, 8 * width, &|first, out| {
        for (out, gate_up) in out.chunks_exact_mut(width).zip(gate_up[first * 2 * width..].chunks_exact(2 * width)) {
            let (gate, up) = gate_up.split_at(width);
            exec.isa.run(Gated { gate, up, activation, out });
        }
    })
}

/// `x = activation(x)`, element by element.
///
/// # Errors
/// [`PoolError`] if the run was cancelled or a task panicked.
pub fn activate(exec: &Exec<'_>, x: &mut [f32], activation: Activation) -> Result<(), PoolError> {
    for_row_runs(exec, x, 1, 8, &|_, x| exec.isa.run(Activate { x, activation }))
}

struct Gated<'a> {
    gate: &'a [f32],
    up: &'a [f32],
    activation: Activation,
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
            simd.store(simd.mul(self.activation.apply(simd, simd.load(gate)), simd.load(up)), out);
        }
        if !out_tail.is_empty() {
            let gate = self.activation.apply(simd, load_padded(simd, gate_tail));
            store_partial(simd, simd.mul(gate, load_padded(simd, up_tail)), out_tail);
        }
    }
}

struct Activate<'a> {
    x: &'a mut [f32],
    activation: Activation,
}

impl Kernel for Activate<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let (x, tail) = self.x.as_chunks_mut::<LANES>();
        for x in x {
            simd.store(self.activation.apply(simd, simd.load(x)), x);
        }
        if !tail.is_empty() {
            let value = self.activation.apply(simd, load_padded(simd, tail));
            store_partial(simd, value, tail);
        }
    }
}
