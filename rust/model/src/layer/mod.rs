//! The forward pass of one layer: its residual blocks, and what all mixers share.

mod low_rank;
mod rows;

use ferrule_kernels::elementwise::{add_bias, add_scaled, scale};
use ferrule_kernels::norm::{layer_norm, layer_norm_heads, rms_norm, rms_norm_heads};
use ferrule_kernels::{Exec, PoolError, RowsMut, Scratch, matmul};

pub(crate) use low_rank::{AdapterRows, Buffers as AdapterBuffers, HeadSide, adapted, adapter_runs, add_to_heads};
pub(crate) use rows::{RaggedRows, for_rows};

use crate::memory::{Memory, Place};
use crate::mixers::{MixerBuffers, MixerPass};
use crate::spec::{LayerSpec, NormSpec};
use crate::weights::{Layer, Linear, Norm};

/// Observes the inputs of linear layers.
pub(crate) trait Observer {
    /// Receives the rows that enter the linear layer of number `site`.
    fn see(&self, exec: &Exec<'_>, site: usize, x: &[f32]) -> Result<(), PoolError>;
}

/// Buffers of a layer, reused from layer to layer and from step to step.
#[derive(Default)]
pub(crate) struct LayerBuffers {
    /// Buffers of the blocks that read the same residual stream.
    blocks: Vec<BlockBuffers>,
    mixers: MixerBuffers,
}

/// Input and output of a mixer: `[rows, hidden_size]`.
#[derive(Default)]
struct BlockBuffers {
    normed: Scratch<f32>,
    update: Scratch<f32>,
}

/// Runs a layer on `hidden: [rows, hidden_size]`, in place. `places` has the place of each block's memory.
pub(crate) fn run_layer(
    pass: &MixerPass<'_>,
    (spec, weights): (&LayerSpec, &Layer),
    places: &[Option<Place>],
    memory: &mut Memory,
    hidden: &mut [f32],
    buffers: &mut LayerBuffers,
) -> Result<(), PoolError> {
    let width = hidden.len() / pass.rows.count;
    let blocks: Vec<_> = spec.blocks.iter().zip(&weights.blocks).zip(places).collect();
    // Blocks that read the same residual stream are all computed before it changes.
    for together in blocks.chunk_by(|_, ((next, _), _)| next.parallel) {
        if buffers.blocks.len() < together.len() {
            buffers.blocks.resize_with(together.len(), BlockBuffers::default);
        }
        let mut input: &[f32] = hidden;
        let mut updates = Vec::with_capacity(together.len());
        for (&((spec, weights), place), BlockBuffers { normed, update }) in together.iter().zip(&mut buffers.blocks) {
            let normed = match &weights.norm {
                Some(norm) => Some(normed_rows(&pass.exec, norm, hidden, width, normed)?),
                None => None,
            };
            input = normed.unwrap_or(input);
            let update = update.take(hidden.len());
            let pass = MixerPass { place: *place, ..*pass };
            spec.mixer.run(&weights.mixer, &pass, memory, input, &mut buffers.mixers, update)?;
            updates.push((normed, update));
        }
        for (((spec, weights), _), (normed, update)) in together.iter().zip(updates) {
            if let (true, Some(normed)) = (spec.residual_after_norm, normed) {
                hidden.copy_from_slice(normed);
            }
            norm_in_place(&pass.exec, weights.post_norm.as_ref(), update, width)?;
            add_scaled(&pass.exec, hidden, update, spec.residual_scale)?;
            norm_in_place(&pass.exec, weights.sum_norm.as_ref(), hidden, width)?;
        }
    }
    weights.scalar.iter().flatten().try_for_each(|factor| scale(&pass.exec, hidden, *factor))
}

/// Returns the normed rows of `x`.
fn normed_rows<'a>(
    exec: &Exec<'_>,
    weights: &Norm,
    x: &[f32],
    width: usize,
    normed: &'a mut Scratch<f32>,
) -> Result<&'a [f32], PoolError> {
    let out = normed.take(x.len());
    norm(exec, weights, x, out, width)?;
    Ok(out)
}

/// Computes `out = x W^T + b`.
pub(crate) fn linear(exec: &Exec<'_>, linear: &Linear, x: &[f32], out: &mut [f32]) -> Result<(), PoolError> {
    matmul(exec, x, &linear.weight, out)?;
    linear.bias.iter().try_for_each(|bias| add_bias(exec, out, bias))
}

/// Writes the normed rows of `x` to `out`.
fn norm(exec: &Exec<'_>, norm: &Norm, x: &[f32], out: &mut [f32], width: usize) -> Result<(), PoolError> {
    match norm.spec {
        NormSpec::Rms { .. } => rms_norm(exec, x, width, &norm.weights(), out),
        NormSpec::Layer { .. } => layer_norm(exec, x, width, &norm.weights(), out),
    }
}

/// Normalizes each of `heads` heads of `dim` columns, in place.
pub(crate) fn norm_heads(
    exec: &Exec<'_>,
    norm: &Norm,
    x: RowsMut<'_>,
    heads: usize,
    dim: usize,
) -> Result<(), PoolError> {
    match norm.spec {
        NormSpec::Rms { .. } => rms_norm_heads(exec, x, heads, dim, &norm.weights()),
        NormSpec::Layer { .. } => layer_norm_heads(exec, x, heads, dim, &norm.weights()),
    }
}

/// Normalizes whole rows in place, if there is a norm.
pub(crate) fn norm_in_place(
    exec: &Exec<'_>,
    norm: Option<&Norm>,
    x: &mut [f32],
    width: usize,
) -> Result<(), PoolError> {
    norm.map_or(Ok(()), |norm| norm_heads(exec, norm, RowsMut::new(x, width, 0), 1, width))
}
