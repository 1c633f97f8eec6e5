//! Feed-forward networks.

use ferrule_kernels::activation::{activate, gated};
use ferrule_kernels::{Exec, PoolError, Scratch};

use super::experts::{self, MixturePass};
use super::{AdapterRows, adapted};
use crate::spec::{DenseSpec, FfnSpec};
use crate::weights::{Dense, Ffn};

/// Rows that go through a network at a time. What is between its matrices is several times wider than the rows: this
/// bounds the memory that it takes, and keeps it in the cache.
pub(crate) const FFN_ROWS: usize = 256;

/// Buffers of a network. Shapes: `[rows, width]`.
#[derive(Default)]
pub(crate) struct Buffers {
    /// Gate and up.
    pub inner: Scratch<f32>,
    /// What the gate let through.
    pub activated: Scratch<f32>,
    pub experts: experts::Buffers,
}

/// From `x` to `out`, both `[rows, hidden_size]`.
pub(super) fn run(
    exec: &Exec<'_>,
    weights: &Ffn,
    spec: &FfnSpec,
    adapters: AdapterRows<'_>,
    x: &[f32],
    buffers: &mut Buffers,
    out: &mut [f32],
) -> Result<(), PoolError> {
    match (weights, spec) {
        (Ffn::Dense(weights), FfnSpec::Dense(spec)) => dense(exec, weights, spec, adapters, x, buffers, out),
        (Ffn::Experts(weights), FfnSpec::Experts(spec)) => {
            MixturePass { exec, weights, spec, adapters }.run(x, buffers, out)
        }
        _ => unreachable!("weights are loaded as the spec says"),
    }
}

/// One network, from `x` to `out`.
pub(super) fn dense(
    exec: &Exec<'_>,
    weights: &Dense,
    spec: &DenseSpec,
    adapters: AdapterRows<'_>,
    x: &[f32],
    buffers: &mut Buffers,
    out: &mut [f32],
) -> Result<(), PoolError> {
    let (width, inner_rows) = (weights.inner.weight.cols(), spec.inner_rows());
    let rows = x.len() / width;
    // Pieces of the same size: a last one of one row would read all weights for it.
    let piece = rows.div_ceil(rows.div_ceil(FFN_ROWS).max(1)).max(1);
    let pieces = x.chunks(piece * width).zip(out.chunks_mut(piece * width));
    for ((x, out), first) in pieces.zip((0..).step_by(piece)) {
        let adapters = adapters.skip(first);
        let inner = buffers.inner.take(x.len() / width * inner_rows);
        adapted(exec, &weights.inner, adapters, x, inner)?;
        let activated = let_through(exec, spec, inner, &mut buffers.activated)?;
        adapted(exec, &weights.down, adapters, activated, out)?;
    }
    Ok(())
}

/// What the activation lets through of `inner: [rows, inner_rows]`: `[rows, intermediate_size]`.
pub(super) fn let_through<'a>(
    exec: &Exec<'_>,
    spec: &DenseSpec,
    inner: &'a mut [f32],
    activated: &'a mut Scratch<f32>,
) -> Result<&'a [f32], PoolError> {
    if !spec.gated {
        activate(exec, inner, spec.activation.into())?;
        return Ok(inner);
    }
    let out = activated.take(inner.len() / 2);
    gated(exec, inner, spec.intermediate_size, spec.gating(), out)?;
    Ok(out)
}
