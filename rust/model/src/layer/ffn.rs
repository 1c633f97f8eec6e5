//! Feed-forward networks.

use ferrule_kernels::activation::{activate, gated};
use ferrule_kernels::{Exec, PoolError, Scratch};

use super::experts::{self, ExpertsPass};
use super::{AdapterRows, adapted};
use crate::spec::{DenseSpec, FfnSpec};
use crate::weights::{Dense, Ffn};

/// Rows that are processed at a time. The inner layer is several times wider than a row: this bounds its memory and
/// keeps it in the cache.
pub(crate) const FFN_ROWS: usize = 256;

/// Buffers of a feed-forward network. Shapes: `[rows, width]`.
#[derive(Default)]
pub(crate) struct Buffers {
    /// Outputs of gate and up.
    pub inner: Scratch<f32>,
    /// Outputs of the gate.
    pub activated: Scratch<f32>,
    pub experts: experts::Buffers,
}

/// Computes `out` from `x`, both `[rows, hidden_size]`.
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
            ExpertsPass { exec, weights, spec, adapters }.run(x, buffers, out)
        }
        _ => unreachable!("weights are loaded as the spec says"),
    }
}

/// Runs one dense network from `x` to `out`.
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
    // Chunks of equal size: a last chunk of one row would read all weights for it.
    let chunk_rows = rows.div_ceil(rows.div_ceil(FFN_ROWS).max(1)).max(1);
    let chunks = x.chunks(chunk_rows * width).zip(out.chunks_mut(chunk_rows * width));
    for ((x, out), first) in chunks.zip((0..).step_by(chunk_rows)) {
        let adapters = adapters.skip(first);
        let inner = buffers.inner.take(x.len() / width * inner_rows);
        adapted(exec, &weights.inner, adapters, x, inner)?;
        let activated = apply_gate(exec, spec, inner, &mut buffers.activated)?;
        adapted(exec, &weights.down, adapters, activated, out)?;
    }
    Ok(())
}

/// Applies the gate to `inner: [rows, inner_rows]` and returns `[rows, intermediate_size]`.
pub(super) fn apply_gate<'a>(
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
