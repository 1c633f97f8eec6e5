//! The forward pass of one layer.

mod attention;
mod experts;
mod ffn;
mod latent;
mod low_rank;
mod router;
mod rows;

use ferrule_kernels::elementwise::{add_bias, add_scaled};
use ferrule_kernels::kv::KvStore;
use ferrule_kernels::norm::{layer_norm, layer_norm_heads, rms_norm, rms_norm_heads};
use ferrule_kernels::{Exec, PoolError, RowsMut, Scratch, matmul};

pub(crate) use attention::AttentionPass;
pub(crate) use experts::EXPERTS_ROWS;
pub(crate) use ffn::FFN_ROWS;
pub(crate) use low_rank::{AdapterRows, Buffers as AdapterBuffers, adapted, adapter_runs};
pub(crate) use rows::RaggedRows;

use crate::spec::{LayerSpec, NormSpec};
use crate::weights::{Layer, Linear, Norm};

/// Observes the inputs of linear layers.
pub(crate) trait Observer {
    /// Receives the rows that enter the linear layer of number `site`.
    fn see(&self, exec: &Exec<'_>, site: usize, x: &[f32]) -> Result<(), PoolError>;
}

/// Buffers of a layer, reused from layer to layer and from step to step. Shapes: `[rows, width]`.
#[derive(Default)]
pub(crate) struct LayerBuffers {
    /// Input of attention.
    normed: Scratch<f32>,
    /// Input of the feed-forward network.
    ffn_normed: Scratch<f32>,
    /// Output of a block.
    update: Scratch<f32>,
    /// Output of attention, if both blocks read the layer's input.
    parallel: Scratch<f32>,
    attention: attention::Buffers,
    ffn: ffn::Buffers,
}

impl AttentionPass<'_> {
    /// Runs the layer on `hidden: [rows, hidden_size]`, in place.
    pub fn layer(
        &self,
        spec: &LayerSpec,
        weights: &Layer,
        store: &mut KvStore,
        hidden: &mut [f32],
        buffers: &mut LayerBuffers,
    ) -> Result<(), PoolError> {
        let (exec, adapters, width) = (&self.exec, self.adapters, hidden.len() / self.rows.count);
        let LayerBuffers { normed, ffn_normed, update, parallel, attention, ffn } = buffers;
        let input = normed_or_same(exec, weights.attention_norm.as_ref(), hidden, width, normed)?;
        if spec.parallel {
            let attended = parallel.take(hidden.len());
            self.run(store, input, attention, attended)?;
            let input = match &weights.ffn_norm {
                Some(own) => normed_or_same(exec, Some(own), hidden, width, ffn_normed)?,
                None => input,
            };
            let update = update.take(hidden.len());
            ffn::run(exec, &weights.ffn, &spec.ffn, adapters, input, ffn, update)?;
            add_block(exec, spec, weights.attention_post_norm.as_ref(), attended, hidden, width)?;
            return add_block(exec, spec, weights.ffn_post_norm.as_ref(), update, hidden, width);
        }
        let update = update.take(hidden.len());
        self.run(store, input, attention, update)?;
        if spec.residual_after_norm && weights.attention_norm.is_some() {
            hidden.copy_from_slice(normed.take(hidden.len()));
        }
        add_block(exec, spec, weights.attention_post_norm.as_ref(), update, hidden, width)?;
        norm_in_place(exec, weights.attention_sum_norm.as_ref(), hidden, width)?;

        let input = normed_or_same(exec, weights.ffn_norm.as_ref(), hidden, width, ffn_normed)?;
        ffn::run(exec, &weights.ffn, &spec.ffn, adapters, input, ffn, update)?;
        if spec.residual_after_norm && weights.ffn_norm.is_some() {
            hidden.copy_from_slice(ffn_normed.take(hidden.len()));
        }
        add_block(exec, spec, weights.ffn_post_norm.as_ref(), update, hidden, width)?;
        norm_in_place(exec, weights.ffn_sum_norm.as_ref(), hidden, width)
    }
}

/// Adds the output of a block, `update`, to the residual stream, after the block's norm and factor.
fn add_block(
    exec: &Exec<'_>,
    spec: &LayerSpec,
    post_norm: Option<&Norm>,
    update: &mut [f32],
    hidden: &mut [f32],
    width: usize,
) -> Result<(), PoolError> {
    norm_in_place(exec, post_norm, update, width)?;
    add_scaled(exec, hidden, update, spec.residual_scale)
}

/// Returns the normed rows in `normed`, or `x` itself if there is no norm.
fn normed_or_same<'a>(
    exec: &Exec<'_>,
    weights: Option<&Norm>,
    x: &'a [f32],
    width: usize,
    normed: &'a mut Scratch<f32>,
) -> Result<&'a [f32], PoolError> {
    let Some(weights) = weights else { return Ok(x) };
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
