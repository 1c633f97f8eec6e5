//! The forward pass of one layer: its residual blocks, and what all mixers share.

mod linear;
mod low_rank;
mod rows;

use ferrule_kernels::elementwise::{add_scaled, scale};
use ferrule_kernels::norm::{layer_norm, layer_norm_heads, rms_norm, rms_norm_heads};
use ferrule_kernels::{Exec, PackedMatrix, PoolError, RowsMut, Scratch};

pub(crate) use linear::{gather_columns, linear, linear_each, look_up, read_rows};
pub(crate) use low_rank::{
    AdapterRows, Buffers as AdapterBuffers, HeadSide, adapted, adapted_output, adapter_runs, add_adapters, add_to_heads,
};
pub(crate) use rows::{RaggedRows, for_rows};

use crate::memory::{Memory, Place};
use crate::mixers::{MixerBuffers, MixerPass};
use crate::spec::{BlockInput, BlockSpec, LayerSpec, NormSpec};
use crate::streams::{StreamBuffers, StreamMix};
use crate::weights::{BlockUse, Layer, Linear, Norm};

/// Observes the inputs of linear layers, and replaces their matrices.
pub(crate) trait Observer {
    /// Receives the rows that enter a linear layer. `stream` has those of the residual stream, if the outputs are added to
    /// it. An error ends the forward pass.
    fn see(&self, exec: &Exec<'_>, layer: &Linear, x: &[f32], stream: Option<StreamRows<'_>>) -> Result<(), PoolError>;

    /// Returns the matrix that replaces that of linear layer `site`, if there is one.
    fn replacement(&self, site: usize) -> Option<&PackedMatrix>;
}

/// Rows of a residual stream that the outputs of a mixer are added to.
#[derive(Clone, Copy)]
pub(crate) struct StreamRows<'a> {
    /// `[rows, width]`
    pub rows: &'a [f32],
    pub width: usize,
    /// Factor of the stream in the sum, relative to that of the outputs.
    pub scale: f32,
}

/// Buffers of a layer, reused from layer to layer and from step to step.
#[derive(Default)]
pub(crate) struct LayerBuffers {
    /// Buffers of the blocks that read the same residual stream.
    blocks: Vec<BlockBuffers>,
    /// Input that is put together from the residual stream and something else: `[rows, columns]`.
    input: Scratch<f32>,
    /// Output that the next block takes: `[rows, hidden_size]`.
    output: Vec<f32>,
    mixers: MixerBuffers,
    streams: StreamBuffers,
}

/// Input and output of a mixer: `[rows, hidden_size]`.
#[derive(Default)]
struct BlockBuffers {
    normed: Scratch<f32>,
    /// Input times its factor.
    scaled: Scratch<f32>,
    update: Scratch<f32>,
}

/// Runs a layer on `hidden: [rows, hidden_size]`, in place, or on several residual streams side by side. `places` has the
/// places of each block's memory.
pub(crate) fn run_layer(
    pass: &MixerPass<'_>,
    (spec, weights): (&LayerSpec, &Layer),
    places: &[Vec<Place>],
    memory: &mut Memory,
    hidden: &mut [f32],
    buffers: &mut LayerBuffers,
) -> Result<(), PoolError> {
    if pass.rows.count == 0 {
        return Ok(());
    }
    let blocks: Vec<_> = spec.blocks.iter().zip(&weights.blocks).zip(places).collect();
    let mut left = blocks.as_slice();
    // The stream is taken out of the buffers, because the blocks use the others.
    let mut stream = std::mem::take(&mut buffers.streams.span);
    for (span, mix) in spec.spans.iter().zip(&weights.mixes) {
        let (now, later) = left.split_at(span.blocks);
        left = later;
        if let StreamMix::Joined = mix {
            let pass = MixerPass { width: hidden.len() / pass.rows.count, ..*pass };
            run_blocks(&pass, now, memory, hidden, buffers)?;
            continue;
        }
        let x = stream.take(pass.rows.count * pass.width);
        span.mix.enter(mix, pass, hidden, x, &mut buffers.streams)?;
        run_blocks(pass, now, memory, x, buffers)?;
        span.mix.leave(mix, pass, hidden, x, &mut buffers.streams)?;
    }
    buffers.streams.span = stream;
    run_blocks(pass, left, memory, hidden, buffers)?;
    weights.scalar.iter().flatten().try_for_each(|factor| scale(&pass.exec, hidden, *factor))
}

/// A block with its weights and the places of its memory.
type PlacedBlock<'a> = ((&'a BlockSpec, &'a BlockUse), &'a Vec<Place>);

/// Runs blocks on `hidden: [rows, hidden_size]`, in place.
fn run_blocks(
    pass: &MixerPass<'_>,
    blocks: &[PlacedBlock<'_>],
    memory: &mut Memory,
    hidden: &mut [f32],
    buffers: &mut LayerBuffers,
) -> Result<(), PoolError> {
    let width = pass.width;
    let LayerBuffers { blocks: buffers, input: gathered, output, mixers, .. } = buffers;
    // Blocks that read the same residual stream are all computed before it changes.
    let mut groups = blocks.chunk_by(|_, ((next, _), _)| next.parallel).peekable();
    while let Some(together) = groups.next() {
        if buffers.len() < together.len() {
            buffers.resize_with(together.len(), BlockBuffers::default);
        }
        let ((first, _), _) = together[0];
        let columns = first.input.columns(width);
        let source = gather(pass, first.input, hidden, output, gathered)?;
        let is_taken = groups.peek().is_some_and(|next| next[0].0.0.input.takes_output());
        let stream = StreamRows { rows: &*hidden, width, scale: 1.0 };
        let mut input = source;
        let mut updates = Vec::with_capacity(together.len());
        for (&((spec, used), places), BlockBuffers { normed, scaled, update }) in together.iter().zip(&mut *buffers) {
            let normed = match &used.block.norm {
                Some(norm) => Some(normed_rows(&pass.exec, norm, source, columns, normed)?),
                None => None,
            };
            input = normed.unwrap_or(input);
            let scaled = scaled_or_same(&pass.exec, input, spec.input_scale, scaled)?;
            let update = update.take(hidden.len());
            let has_norm =
                used.block.post_norm.is_some() || used.block.joint_norm.is_some() || spec.residual_after_norm;
            let is_added = together.len() == 1 && !is_taken && !has_norm && spec.residual_scale != 0.0;
            let stream = StreamRows { scale: spec.stream_scale / spec.residual_scale, ..stream };
            let adapters = pass.adapters.with_own(&used.low_rank).with_stream(is_added.then_some(stream));
            let pass = MixerPass { places, adapters, ..*pass };
            spec.mixer.run(&used.block.mixer, &pass, memory, scaled, mixers, update)?;
            updates.push((normed, update));
        }
        let ((_, first), _) = together[0];
        // Outputs are added to the stream, or to the first output if their sum has a norm.
        let mut sum: Option<&mut [f32]> = None;
        for (((spec, used), _), (normed, update)) in together.iter().zip(updates) {
            let weights = &*used.block;
            if is_taken {
                norm_in_place(&pass.exec, weights.post_norm.as_ref(), update, width)?;
                output.clear();
                output.extend_from_slice(update);
                continue;
            }
            if let (true, Some(normed)) = (spec.residual_after_norm, normed) {
                hidden.copy_from_slice(normed);
            }
            scale_unless_one(&pass.exec, hidden, spec.stream_scale)?;
            norm_in_place(&pass.exec, weights.post_norm.as_ref(), update, width)?;
            match &mut sum {
                Some(sum) => add_scaled(&pass.exec, sum, update, spec.residual_scale)?,
                None if first.block.joint_norm.is_some() => {
                    scale_unless_one(&pass.exec, update, spec.residual_scale)?;
                    sum = Some(update);
                }
                None => {
                    add_scaled(&pass.exec, hidden, update, spec.residual_scale)?;
                    norm_in_place(&pass.exec, weights.sum_norm.as_ref(), hidden, width)?;
                }
            }
        }
        if let Some(sum) = sum {
            norm_in_place(&pass.exec, first.block.joint_norm.as_ref(), sum, width)?;
            add_scaled(&pass.exec, hidden, sum, 1.0)?;
            norm_in_place(&pass.exec, first.block.sum_norm.as_ref(), hidden, width)?;
        }
    }
    Ok(())
}

/// Returns `x` times `factor`, or `x` itself if that is 1.
fn scaled_or_same<'a>(
    exec: &Exec<'_>,
    x: &'a [f32],
    factor: f32,
    scaled: &'a mut Scratch<f32>,
) -> Result<&'a [f32], PoolError> {
    if factor == 1.0 {
        return Ok(x);
    }
    let out = scaled.take(x.len());
    out.copy_from_slice(x);
    scale(exec, out, factor)?;
    Ok(out)
}

/// Computes `x *= factor`.
pub(crate) fn scale_unless_one(exec: &Exec<'_>, x: &mut [f32], factor: f32) -> Result<(), PoolError> {
    if factor == 1.0 { Ok(()) } else { scale(exec, x, factor) }
}

/// Returns what a block reads: `hidden: [rows, hidden_size]`, or something with the `output` of the block before.
fn gather<'a>(
    pass: &MixerPass<'_>,
    input: BlockInput,
    hidden: &'a [f32],
    output: &'a [f32],
    gathered: &'a mut Scratch<f32>,
) -> Result<&'a [f32], PoolError> {
    let rows = pass.rows.count;
    let width = hidden.len() / rows;
    match input {
        BlockInput::Stream => Ok(hidden),
        BlockInput::Output => Ok(output),
        BlockInput::StreamPlusOutput => {
            let sum = gathered.take(hidden.len());
            sum.copy_from_slice(hidden);
            add_scaled(&pass.exec, sum, output, 1.0)?;
            Ok(sum)
        }
        BlockInput::StreamAndEmbedding => {
            let joined = gathered.take(2 * hidden.len());
            for_rows(&pass.exec, rows, joined, 2 * width, |row, to| {
                let (stream, embedding) = to.split_at_mut(width);
                stream.copy_from_slice(&hidden[row * width..][..width]);
                embedding.copy_from_slice(&pass.embedding[row * width..][..width]);
            })?;
            Ok(joined)
        }
    }
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

/// Returns the normed rows of `x`, or `x` itself if there is no norm.
pub(crate) fn normed_or_same<'a>(
    exec: &Exec<'_>,
    weights: Option<&Norm>,
    x: &'a [f32],
    width: usize,
    normed: &'a mut Scratch<f32>,
) -> Result<&'a [f32], PoolError> {
    weights.map_or(Ok(x), |weights| normed_rows(exec, weights, x, width, normed))
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
