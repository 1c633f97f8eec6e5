//! Packing by what a text shows: the model itself runs over it, and every matrix is quantized by what goes into it.
//!
//! Layer by layer (GPTQ, <https://arxiv.org/abs/2210.17323>): a layer is loaded in f32 and runs over all tokens; the
//! moments of what goes into each of its linear maps say what errors cost there. Its matrices are quantized by that,
//! and the layer as it was quantized leads to the next one's inputs, so that later layers know what earlier ones lost.
//!
//! In memory at a time are the hidden states of all tokens, one layer in f32 and quantized, and moments as far as
//! memory goes: where those of all maps are more, the layer runs again for those that are left.

mod inputs;
mod output;
mod pass;

use std::collections::BTreeMap;
use std::path::Path;

use ferrule_kernels::{Exec, Moments, machine};

use crate::layer::{linear, norm_in_place};
use crate::quantization::Quantization;
use crate::spec::ModelSpec;
use crate::weights::{Layer, LoadError, Loader, MatrixSize, Pack, PackedOutput, Packer, Progress, Source, refuse_packed};
use inputs::{LayerInputs, Wanted};
use output::{Calibrated, Output};
use pass::Pass;

/// Shares of a layer's work: running it in f32, quantizing it, running what came out.
const SHARES: [f64; 3] = [0.4, 0.4, 0.2];

/// Packs the weights of a source into a file, as [`crate::pack_into`] does, but by what a text shows: `sequences` of
/// tokens, each from its first position on. Matrices of floating-point numbers are as without it. The same text gives
/// the same file on one instruction set, whatever the threads.
///
/// # Errors
/// [`LoadError`], of a source that is packed too; then there is no such file, or the one that was there before.
///
/// # Panics
/// If a sequence is longer than the model's positions, or a token is beyond the vocabulary.
pub fn calibrate_into(
    path: &Path,
    spec: &ModelSpec,
    source: Source<'_>,
    (quantization, sequences): (Quantization, &[Vec<u32>]),
    metadata: &BTreeMap<String, String>,
    exec: Exec<'_>,
    progress: Progress<'_>,
) -> Result<(), LoadError> {
    let floats = Loader::new(spec, source, Quantization::F32);
    let loader = Loader::new(spec, source, quantization);
    refuse_packed(source)?;
    check_memory(spec, &floats, sequences)?;
    let file =
        PackedOutput::create(path, &loader, quantization, metadata, |loader, survey| walk(loader, spec, survey))?;
    let mut output = Output { exec, source, done: 0.0, file, progress };

    // An embedding that is the head too is packed as such, when what goes into it is known; until then as without.
    let embedding = match is_tied(spec) {
        true => loader.embedding(&mut in_memory(exec, source, &mut |_, _| ()))?,
        false => loader.embedding(&mut Calibrated::new(&mut output, &mut None::<Moments>))?,
    };
    let mut pass = Pass::new(exec, spec, sequences, &embedding)?;
    drop(embedding);
    for (index, layer_spec) in spec.layers.iter().enumerate() {
        let mut wanted = Wanted::default();
        loader.without_vectors().layer(&mut wanted, index, layer_spec)?;
        let [before, packing, after] = SHARES.map(|share| share * wanted.bytes as f64);
        let layer = floats.layer(&mut in_memory(exec, source, &mut |_, _| ()), index, layer_spec)?;
        // Half of it: matrices are quantized beside what was recorded.
        let room = machine::available_memory() / 2;
        let mut inputs = LayerInputs::new(&mut pass, &layer, layer_spec, wanted.maps, room, before);
        let mut calibrated = Calibrated::new(&mut output, &mut inputs);
        calibrated.share = packing / wanted.bytes as f64;
        let quantized = loader.layer(&mut calibrated, index, layer_spec)?;
        drop(layer);
        let each = after / sequences.len() as f64;
        pass.advance(&quantized, layer_spec, &mut || output.advance(each))?;
    }

    let mut rows = pass.into_hidden();
    norm_in_place(&exec, loader.final_norm()?.as_ref(), &mut rows, spec.hidden_size)?;
    let mut inputs = moments(&exec, &rows, spec.hidden_size)?;
    if let Some(projection) = loader.head_projection(&mut Calibrated::new(&mut output, &mut inputs))? {
        let mut narrow = vec![0.0; rows.len() / spec.hidden_size * spec.embedding_width()];
        linear(&exec, &projection, &rows, &mut narrow)?;
        inputs = moments(&exec, &narrow, spec.embedding_width())?;
    }
    drop(rows);
    after_projection(&loader, spec, &mut Calibrated::new(&mut output, &mut inputs))?;
    output.file.finish()
}

/// Has the loader load everything in the order in which it is written.
fn walk<P: Packer>(loader: &Loader<'_>, spec: &ModelSpec, packer: &mut P) -> Result<(), LoadError> {
    if !is_tied(spec) {
        loader.embedding(packer)?;
    }
    for (index, layer) in spec.layers.iter().enumerate() {
        loader.layer(packer, index, layer)?;
    }
    loader.final_norm()?;
    loader.head_projection(packer)?;
    after_projection(loader, spec, packer)
}

/// What is written last: the head first of all.
fn after_projection<P: Packer>(loader: &Loader<'_>, spec: &ModelSpec, packer: &mut P) -> Result<(), LoadError> {
    loader.head(packer)?;
    if is_tied(spec) {
        loader.embedding(packer)?;
    }
    loader.classifier(packer)?;
    loader.text_projections(packer)?;
    Ok(())
}

fn is_tied(spec: &ModelSpec) -> bool {
    spec.head.is_some_and(|head| head.tied)
}

fn in_memory<'a>(exec: Exec<'a>, source: Source<'a>, progress: Progress<'a>) -> Pack<'a> {
    Pack { exec, source, done: 0, total: 0, progress, sites: Vec::new() }
}

fn moments(exec: &Exec<'_>, rows: &[f32], cols: usize) -> Result<Option<Moments>, LoadError> {
    let mut moments = Moments::zeroed(cols)?;
    moments.add(exec, rows)?;
    Ok(Some(moments))
}

/// Holds what is in memory at a time, but for what is between a layer's operations, against what there is.
fn check_memory(spec: &ModelSpec, floats: &Loader<'_>, sequences: &[Vec<u32>]) -> Result<(), LoadError> {
    let tokens = sequences.iter().map(Vec::len).sum::<usize>() as u64;
    let hidden = tokens.saturating_mul((spec.hidden_size * size_of::<f32>()) as u64);
    let of_layer = |layer: &Layer<MatrixSize>| {
        layer.tensors().matrices.into_iter().fold(0u64, |sum, size| sum.saturating_add(size.bytes))
    };
    let weights = floats.measure()?;
    let needs = weights.layers.iter().map(of_layer).max().unwrap_or(0).saturating_add(hidden);
    let available = machine::available_memory();
    if needs > available {
        return Err(LoadError::Memory {
            what: "a layer in f32 with the hidden states of the calibration's tokens",
            needs,
            available,
        });
    }
    Ok(())
}
