//! Gradients of a loss through layers, for calibration: how the loss changes with the outputs of each linear layer.
//!
//! Only layers of plain residual blocks have them, whose mixers implement [`Mixer::gradient`](crate::mixers::Mixer::gradient).

use ferrule_kernels::{Exec, Format, PackedMatrix, PoolError, RowSource, for_row_chunks, matmul};

use super::{for_rows, norm_in_place, scale_unless_one};
use crate::memory::{Memory, Place};
use crate::mixers::{MixerBuffers, MixerPass};
use crate::spec::{BlockInput, BlockSpec, LayerSpec, NormSpec};
use crate::weights::{Layer, Linear, LoadError, Norm};

/// Receives the gradients of the loss with respect to the outputs of a linear layer: `[rows, outputs]`.
pub(crate) type SeeGradients<'a> = dyn FnMut(&Exec<'_>, &Linear, &[f32]) -> Result<(), LoadError> + 'a;

/// Number of outputs of a linear layer whose weights are transposed at a time.
pub(crate) const TRANSPOSED_ROWS: usize = 512;

/// Returns whether the gradients of a layer can be computed.
pub(crate) fn has_gradient(spec: &LayerSpec) -> bool {
    let is_plain = |block: &BlockSpec| {
        let has_norms = block.sum_norm.is_some() || block.joint_norm.is_some() || block.residual_after_norm;
        let is_alone = !block.parallel && block.input == BlockInput::Stream;
        is_alone && !has_norms && block.weights_of.is_none() && block.low_rank.is_empty() && block.mixer.has_gradient()
    };
    spec.spans.is_empty() && !spec.scalar && spec.blocks.iter().all(is_plain)
}

/// A block during the forward pass: `[rows, hidden_size]` each.
struct BlockRows {
    /// Residual stream before it.
    stream: Vec<f32>,
    /// Input of the mixer.
    input: Vec<f32>,
    /// Output of the mixer.
    output: Vec<f32>,
}

/// Turns the gradient with respect to a layer's outputs into that with respect to its inputs `hidden`, both
/// `[rows, hidden_size]`. The rows are one whole sequence.
pub(crate) fn layer_gradient(
    pass: &MixerPass<'_>,
    (spec, weights): (&LayerSpec, &Layer),
    places: &[Vec<Place>],
    (memory, buffers): (&mut Memory, &mut MixerBuffers),
    hidden: &[f32],
    gradient: &mut [f32],
    see: &mut SeeGradients<'_>,
) -> Result<(), LoadError> {
    if hidden.is_empty() {
        return Ok(());
    }
    let (exec, width) = (&pass.exec, pass.width);
    let mut stream = hidden.to_vec();
    let mut blocks = Vec::with_capacity(spec.blocks.len());
    for ((spec, used), places) in spec.blocks.iter().zip(&weights.blocks).zip(places) {
        let mut input = stream.clone();
        norm_in_place(exec, used.block.norm.as_ref(), &mut input, width)?;
        scale_unless_one(exec, &mut input, spec.input_scale)?;
        let mut output = vec![0.0; stream.len()];
        spec.mixer.run(&used.block.mixer, &MixerPass { places, ..*pass }, memory, &input, buffers, &mut output)?;
        let mut update = output.clone();
        norm_in_place(exec, used.block.post_norm.as_ref(), &mut update, width)?;
        let next = stream.iter().zip(&update).map(|(x, update)| spec.stream_scale * x + spec.residual_scale * update);
        let next = next.collect();
        blocks.push(BlockRows { stream: std::mem::replace(&mut stream, next), input, output });
    }
    let all = spec.blocks.iter().zip(&weights.blocks).zip(places).zip(blocks);
    for (((spec, used), places), rows) in all.rev() {
        let mut update: Vec<f32> = gradient.iter().map(|x| spec.residual_scale * x).collect();
        norm_gradient(exec, used.block.post_norm.as_ref(), &rows.output, width, &mut update)?;
        let pass = MixerPass { places, ..*pass };
        let mut input = spec.mixer.gradient(&used.block.mixer, &pass, &rows.input, &update, see)?;
        scale_unless_one(exec, &mut input, spec.input_scale)?;
        norm_gradient(exec, used.block.norm.as_ref(), &rows.stream, width, &mut input)?;
        gradient.iter_mut().zip(input).for_each(|(x, input)| *x = spec.stream_scale * *x + input);
    }
    Ok(())
}

/// Rows of a matrix, of which it gives the columns.
struct Transposed {
    /// `[rows, columns]`
    rows: Vec<f32>,
    columns: usize,
}

impl RowSource for Transposed {
    fn read_row(&self, row: usize, out: &mut [f32]) {
        out.iter_mut().zip(self.rows.chunks_exact(self.columns)).for_each(|(out, values)| *out = values[row]);
    }
}

/// Returns the gradient with respect to the inputs of a linear layer, `[rows, inputs]`, from that with respect to its
/// outputs, `[rows, outputs]`.
pub(crate) fn linear_gradient(exec: &Exec<'_>, linear: &Linear, gradient: &[f32]) -> Result<Vec<f32>, LoadError> {
    let (outputs, columns) = (linear.outputs, linear.weight.cols());
    let count = gradient.len() / outputs;
    let mut sums = vec![0.0; count * columns];
    let mut products = vec![0.0; count * columns];
    for first in (0..outputs).step_by(TRANSPOSED_ROWS) {
        let of_chunk = first..outputs.min(first + TRANSPOSED_ROWS);
        let mut rows = vec![0.0; of_chunk.len() * columns];
        for_row_chunks(exec, &mut rows, columns, columns, &|row, out: &mut [f32]| {
            let each = out.chunks_exact_mut(columns).zip(first + row..);
            each.for_each(|(out, row)| linear.weight.read_row(row, out));
        })?;
        let bands = [(Format::F32, columns)];
        let transposed = PackedMatrix::pack(exec, &bands, of_chunk.len(), &Transposed { rows, columns })?;
        let part: Vec<f32> = gradient.chunks_exact(outputs).flat_map(|row| &row[of_chunk.clone()]).copied().collect();
        matmul(exec, &part, &transposed, &mut products)?;
        sums.iter_mut().zip(&products).for_each(|(sum, product)| *sum += product);
    }
    Ok(sums)
}

/// Turns the gradient with respect to normed rows into that with respect to the rows `x`, both `[rows, width]`.
pub(crate) fn norm_gradient(
    exec: &Exec<'_>,
    norm: Option<&Norm>,
    x: &[f32],
    width: usize,
    gradient: &mut [f32],
) -> Result<(), PoolError> {
    let Some(norm) = norm else { return Ok(()) };
    let (NormSpec::Rms { eps, weight_offset, .. } | NormSpec::Layer { eps, weight_offset, .. }) = norm.spec;
    let weight = |column: usize| norm.weight.as_ref().map_or(1.0, |weight| f64::from(weight[column] + weight_offset));
    let is_centered = matches!(norm.spec, NormSpec::Layer { .. });
    for_rows(exec, gradient.len() / width, gradient, width, |row, gradient| {
        let x = &x[row * width..][..width];
        let mean_of = |values: &mut dyn Iterator<Item = f64>| values.sum::<f64>() / width as f64;
        let mean = if is_centered { mean_of(&mut x.iter().map(|x| f64::from(*x))) } else { 0.0 };
        let variance = mean_of(&mut x.iter().map(|x| (f64::from(*x) - mean).powi(2)));
        let inverse = (variance + f64::from(eps)).sqrt().recip();
        let normed = |column: usize| (f64::from(x[column]) - mean) * inverse;
        let weighted = |column: usize, gradient: &[f32]| f64::from(gradient[column]) * weight(column);
        let along = mean_of(&mut (0..width).map(|column| weighted(column, gradient) * normed(column)));
        let shift = if is_centered { mean_of(&mut (0..width).map(|column| weighted(column, gradient))) } else { 0.0 };
        for column in 0..width {
            gradient[column] = (inverse * (weighted(column, gradient) - shift - normed(column) * along)) as f32;
        }
    })
}
