//! Calibrated quantization (GPTQ, <https://arxiv.org/abs/2210.17323>): the model runs over a text, and every matrix is
//! quantized for the inputs that it gets.
//!
//! The model is processed layer by layer. A layer is loaded in full precision and runs over all tokens; the Hessians of
//! the inputs of its linear layers say what quantization errors cost. Its matrices are quantized with them, and the
//! quantized layer computes the inputs of the next one.
//!
//! A matrix corrects the errors of those before it, in the layer and in earlier ones (GPTAQ,
//! <https://arxiv.org/abs/2504.02692>). The layer runs up to each linear layer once, with the matrices that are quantized
//! already, and records the inputs. The layer of the exact model runs on the hidden states of the exact model before, and
//! what the outputs should be follows from its inputs. Not corrected are matrices of routed experts, which compute in
//! full precision while the layer runs, pruned matrices, per-head matrices of latent attention, and all of a model that
//! uses blocks several times. A matrix that is stored before one that computes its inputs, such as the output of an
//! attention with an output gate, does not see the errors of the other.
//!
//! An embedding that is tied to the `lm_head` is quantized before the layers, so that they correct its errors. For the inputs
//! of the `lm_head`, the exact model runs to its end first. If no matrix is corrected, the embedding is quantized last.
//!
//! Memory holds the hidden states of all tokens in both models, one layer in full precision and quantized, and the
//! Hessian of a linear layer, or as many of those of experts as fit. If not all fit, the layer runs again for the
//! remaining ones. Finished layers may be kept in files, from which a call continues that was interrupted.

mod inputs;
mod kept;
mod output;
mod pass;
mod recorder;

use std::collections::BTreeMap;
use std::path::Path;

use ferrule_kernels::kv::PAGE_TOKENS;
use ferrule_kernels::{Basis, Exec, Hessian, PackedMatrix, machine};

use crate::batch::KvGroup;
use crate::layer::{linear, norm_in_place};
use crate::memory::MemoryLayout;
use crate::needs::buffer_bytes;
use crate::quantization::Quantization;
use crate::recipe::MatrixFormats;
use crate::spec::ModelSpec;
use crate::streams::StreamEnds;
use crate::weights::{
    Linear, LoadError, Loader, Measure, Pack, PackedOutput, Packer, Progress, Source, TokenTable, check_recipe,
    refuse_packed,
};
use inputs::{CalibratedSite, CalibratedSites, LayerInputs};
use kept::{Finished, KeptLayers};
pub(crate) use output::Target;
use output::{Calibrated, Output};
pub(crate) use pass::{Pass, State};
use recorder::ERROR_ROWS;

/// Shares of a layer's work, for progress: running it in full precision, quantizing it, and running it quantized. Measured
/// in f32 with 16,384 tokens and int4 on SmolLM2-135M (0.61, 0.13, 0.26) and the embedded model (0.62, 0.10, 0.28). The
/// share of quantizing is larger in wide layers, where each weight takes longer.
const SHARES: [f64; 3] = [0.6, 0.15, 0.25];

/// [`SHARES`] where matrices are corrected, which takes 2.4 times as long, almost all of it in full precision, on the
/// embedded model (`benches/record/2026-11-29-amd-epyc-zen3`).
const CORRECTED_SHARES: [f64; 3] = [0.83, 0.06, 0.11];

/// Cost of errors of a tied embedding as inputs of the first layer, in relation to the mean cost of such errors as weights of
/// the lm_head. The divergence of the embedded model is least from 0.3 to 0.6
/// (`benches/record/2026-11-30-intel-avx512vnni/allocation-search.txt`).
const EMBEDDING_COST: f64 = 0.6;

/// Share of running the exact model to its end, for the inputs of a tied lm_head, in the work of all layers, for progress. By
/// [`SHARES`] it takes 0.6 of the time of a calibration without corrections, and corrected layers take 2.4 times as long.
const EXACT_PASS_SHARE: f64 = 0.2;

/// Text of a calibration, and the folder of its finished layers.
#[derive(Clone, Copy, Debug)]
pub struct Calibration<'a> {
    /// Sequences of tokens, each starting at position 0.
    pub sequences: &'a [Vec<u32>],
    /// Folder that keeps the matrices of finished layers: with it, the same call continues after them if it was
    /// interrupted. It must be empty before the first call, and the caller removes it.
    pub kept_layers: Option<&'a Path>,
}

/// Packs the weights of a source into a file, as [`crate::pack_into`] does, but quantized for the inputs that they get
/// from the sequences of a calibration. Floating-point matrices are the same as without calibration. On one instruction
/// set, the same text gives the same file for any number of threads, also if a call continues after an interrupted one.
///
/// # Errors
/// [`LoadError`], also if the source is packed already; a file that was at `path` is then left as it was.
///
/// # Panics
/// If a sequence exceeds the model's positions, or a token the vocabulary.
pub fn calibrate_into<'a>(
    path: &Path,
    spec: &'a ModelSpec,
    source: Source<'a>,
    (formats, Calibration { sequences, kept_layers }): (impl Into<MatrixFormats<'a>>, Calibration<'_>),
    metadata: &BTreeMap<String, String>,
    exec: Exec<'_>,
    progress: Progress<'_>,
) -> Result<(), LoadError> {
    refuse_packed(source)?;
    let formats = formats.into();
    let loader = Loader::new(spec, source, formats);
    check_recipe(spec, &loader, formats)?;
    let all = Sequences { tokens: sequences, corrects: corrects(spec, &loader, sequences)? };
    check_memory(spec, source, &loader, all, exec.pool.threads())?;
    let file = PackedOutput::create(path, &loader, formats.quantization, metadata, |loader, survey| {
        walk(loader, spec, all, survey)
    })?;
    let kept = kept_layers.map(|folder| KeptLayers::new(folder, formats.quantization));
    let mut output = Output { done: 0.0, file, kept, progress };
    calibrate(spec, source, &loader, all, exec, &mut output)?;
    output.file.finish()
}

/// Runs the model over `all` sequences and gives each matrix that `loader` loads to `target`, with the statistics of its
/// inputs. `source` is that of the loader.
pub(crate) fn calibrate<T: Target>(
    spec: &ModelSpec,
    source: Source<'_>,
    loader: &Loader<'_>,
    all: Sequences<'_>,
    exec: Exec<'_>,
    target: &mut T,
) -> Result<(), LoadError> {
    let (exact_layers, sequences) = (Loader::new(spec, source, Quantization::EXACT), all.tokens);
    let mut share_of_layers = 1.0;
    let embedding = if !all.embedding_is_first(spec) {
        // Used uncalibrated until the inputs of the lm_head are known.
        loader.embedding(&mut in_memory(exec, &mut |_, _| ()))?
    } else if spec.has_tied_lm_head() {
        share_of_layers -= EXACT_PASS_SHARE;
        let mut inputs = Some(exact_head_inputs(spec, source, loader, sequences, exec, target)?);
        loader.embedding(&mut Calibrated::new(exec, target, &mut inputs))?
    } else {
        loader.embedding(&mut Calibrated::new(exec, target, &mut None::<Hessian>))?
    };
    let tables = loader.tables(&mut Calibrated::new(exec, target, &mut None::<Hessian>))?;
    let streams = loader.streams(&mut Calibrated::new(exec, target, &mut None::<Hessian>))?;
    let exact = all.corrects.then(|| exact_pass(spec, source, sequences, &tables, exec)).transpose()?;
    let mut exact = exact.map(|(pass, _)| pass.state);
    let mut pass = Pass::new(exec, spec, sequences, &embedding, &tables, streams.as_ref())?;
    drop(embedding);
    for (index, layer_spec) in spec.layers.iter().enumerate() {
        let mut wanted = CalibratedSites::new(all.correction_tokens());
        loader.without_vectors().layer(&mut wanted, index, layer_spec, &[])?;
        let shares = if all.corrects { CORRECTED_SHARES } else { SHARES };
        let [before, packing, after] = shares.map(|share| share_of_layers * share * wanted.bytes as f64);
        let share = packing / wanted.bytes as f64;
        let load = || exact_layers.layer(&mut in_memory(exec, &mut |_, _| ()), index, layer_spec, &[]);
        let packed = if let Some(file) = &target.kept().and_then(|kept| kept.open(index)) {
            if let Some(exact) = &mut exact {
                pass.advance_exact(exact, &load()?, index)?;
            }
            target.advance(before);
            let mut finished = Finished { exec, target: &mut *target, file, share, sites: Vec::new() };
            loader.layer(&mut finished, index, layer_spec, &[])?
        } else {
            if let Some(kept) = target.kept() {
                kept.begin(loader, index, layer_spec);
            }
            let layer = load()?;
            // Use half of the memory that will be left, because other programs may need some meanwhile.
            let beside = beside_hessians(spec, index, &wanted, all, exec.pool.threads());
            let room = machine::available_memory().saturating_sub(beside) / 2;
            let mut inputs =
                LayerInputs::new((&mut pass, exact.as_mut()), (&layer, index), wanted.linears, room, before);
            let mut calibrated = Calibrated::new(exec, target, &mut inputs);
            calibrated.share = share;
            let packed = loader.layer(&mut calibrated, index, layer_spec, &[])?;
            inputs.finish()?;
            if let Some(kept) = target.kept() {
                kept.finish();
            }
            packed
        };
        let each = after / sequences.len() as f64;
        pass.advance(&packed, index, &mut || target.advance(each))?;
    }

    drop(exact);
    let mut rows = final_rows(spec, loader, exec, &mut pass, streams.as_ref())?;
    let mut inputs = spec.embedding.width.map(|_| hessian(&exec, &rows, spec.hidden_size)).transpose()?;
    if let Some(projection) = loader.lm_head_projection(&mut Calibrated::new(exec, target, &mut inputs))? {
        rows = projected(spec, exec, &projection, &rows)?;
    }
    let is_last = !all.embedding_is_first(spec);
    // The matrix of a tied lm_head may be packed already; its inputs are only checked then.
    let mut inputs = match spec.has_tied_lm_head() && !is_last {
        false => Some(hessian(&exec, &rows, spec.embedding_width())?),
        true if rows.iter().all(|x| x.is_finite()) => None,
        true => return Err(LoadError::NotFinite { role: "lm_head".to_owned() }),
    };
    drop(rows);
    after_projection(loader, spec, is_last, &mut Calibrated::new(exec, target, &mut inputs))
}

/// The sequences of a calibration.
#[derive(Clone, Copy)]
pub(crate) struct Sequences<'a> {
    pub tokens: &'a [Vec<u32>],
    /// Whether the exact model runs over them too, and matrices are corrected for the errors of those before.
    pub corrects: bool,
}

impl Sequences<'_> {
    /// Returns the number of all tokens.
    fn count(&self) -> usize {
        count(self.tokens)
    }

    /// Returns the number of tokens of the longest sequence.
    fn longest(&self) -> usize {
        self.tokens.iter().map(Vec::len).max().unwrap_or(0)
    }

    /// Returns whether the embedding is packed before the layers. One that is tied to the lm_head is packed after them
    /// unless they correct its errors.
    fn embedding_is_first(&self, spec: &ModelSpec) -> bool {
        self.corrects || !spec.has_tied_lm_head()
    }

    /// Returns the number of all tokens, if matrices are corrected.
    fn correction_tokens(&self) -> Option<usize> {
        self.corrects.then(|| self.count())
    }
}

fn count(sequences: &[Vec<u32>]) -> usize {
    sequences.iter().map(Vec::len).sum()
}

/// Returns whether matrices are corrected for the errors of those before: at least one is calibrated in a format that
/// allows it, and no block is used several times, each time with other errors.
fn corrects(spec: &ModelSpec, loader: &Loader<'_>, sequences: &[Vec<u32>]) -> Result<bool, LoadError> {
    let mut wanted = CalibratedSites::new(Some(count(sequences)));
    for (index, layer) in spec.layers.iter().enumerate() {
        if layer.blocks.iter().any(|block| block.weights_of.is_some()) {
            return Ok(false);
        }
        loader.without_vectors().layer(&mut wanted, index, layer, &[])?;
    }
    Ok(wanted.linears.iter().any(|linear| linear.corrects))
}

/// Returns the exact model before the first layer, with hidden states in f16, and its streams. "Exact" means with an
/// embedding in bf16, which has less than a hundredth of the squared error of int6 and takes half of the memory of f32.
fn exact_pass<'a>(
    spec: &'a ModelSpec,
    source: Source<'_>,
    sequences: &'a [Vec<u32>],
    tables: &'a [TokenTable],
    exec: Exec<'a>,
) -> Result<(Pass<'a>, Option<StreamEnds>), LoadError> {
    let loader = Loader::new(spec, source, Quantization::BF16);
    let embedding = loader.embedding(&mut in_memory(exec, &mut |_, _| ()))?;
    let streams = loader.streams(&mut in_memory(exec, &mut |_, _| ()))?;
    let mut pass = Pass::new(exec, spec, sequences, &embedding, tables, streams.as_ref())?;
    pass.state.hidden.narrow();
    Ok((pass, streams))
}

/// Runs the exact model to its end, and returns the Hessian of the inputs of its lm_head, in which errors in all directions
/// cost something too, because the first layer reads the rows of the matrix as well.
fn exact_head_inputs<T: Target>(
    spec: &ModelSpec,
    source: Source<'_>,
    loader: &Loader<'_>,
    sequences: &[Vec<u32>],
    exec: Exec<'_>,
    target: &mut T,
) -> Result<Hessian, LoadError> {
    let exact = Loader::new(spec, source, Quantization::EXACT);
    let tables = exact.tables(&mut in_memory(exec, &mut |_, _| ()))?;
    let (mut pass, streams) = exact_pass(spec, source, sequences, &tables, exec)?;
    for (index, layer_spec) in spec.layers.iter().enumerate() {
        let mut size = Measure::default();
        loader.without_vectors().layer(&mut size, index, layer_spec, &[])?;
        let each = EXACT_PASS_SHARE * size.bytes as f64 / sequences.len() as f64;
        let layer = exact.layer(&mut in_memory(exec, &mut |_, _| ()), index, layer_spec, &[])?;
        pass.advance(&layer, index, &mut || target.advance(each))?;
    }
    let mut rows = final_rows(spec, &exact, exec, &mut pass, streams.as_ref())?;
    if let Some(projection) = exact.lm_head_projection(&mut in_memory(exec, &mut |_, _| ()))? {
        rows = projected(spec, exec, &projection, &rows)?;
    }
    let width = spec.embedding_width();
    let mut inputs = hessian(&exec, &rows, width)?;
    let squares = rows.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>();
    let length = (EMBEDDING_COST * squares / width as f64).sqrt() as f32;
    let mut direction = vec![0.0; width];
    for input in 0..width {
        direction[input] = length;
        inputs.add(&exec, &direction)?;
        direction[input] = 0.0;
    }
    Ok(inputs)
}

/// Returns the hidden states after the final norm: `[tokens, hidden_size]`.
fn final_rows(
    spec: &ModelSpec,
    loader: &Loader<'_>,
    exec: Exec<'_>,
    pass: &mut Pass<'_>,
    streams: Option<&StreamEnds>,
) -> Result<Vec<f32>, LoadError> {
    let mut rows = pass.take_hidden(streams)?;
    norm_in_place(&exec, loader.final_norm()?.as_ref(), &mut rows, spec.hidden_size)?;
    Ok(rows)
}

/// Projects rows after the final norm to the width of the lm_head's rows.
fn projected(spec: &ModelSpec, exec: Exec<'_>, projection: &Linear, rows: &[f32]) -> Result<Vec<f32>, LoadError> {
    let mut narrow = vec![0.0; rows.len() / spec.hidden_size * spec.embedding_width()];
    linear(&exec, projection, rows, &mut narrow)?;
    Ok(narrow)
}

/// Loads everything in the order in which it is written.
fn walk<P: Packer>(
    loader: &Loader<'_>,
    spec: &ModelSpec,
    sequences: Sequences<'_>,
    packer: &mut P,
) -> Result<(), LoadError> {
    if sequences.embedding_is_first(spec) {
        loader.embedding(packer)?;
    }
    loader.tables(packer)?;
    loader.streams(packer)?;
    for (index, layer) in spec.layers.iter().enumerate() {
        loader.layer(packer, index, layer, &[])?;
    }
    loader.final_norm()?;
    loader.lm_head_projection(packer)?;
    after_projection(loader, spec, !sequences.embedding_is_first(spec), packer)
}

/// Loads what is written after the projection before the lm_head, starting with the lm_head, and with the embedding if it is
/// written last.
fn after_projection<P: Packer>(
    loader: &Loader<'_>,
    spec: &ModelSpec,
    embedding_is_last: bool,
    packer: &mut P,
) -> Result<(), LoadError> {
    loader.lm_head(packer)?;
    if embedding_is_last && spec.has_tied_lm_head() {
        loader.embedding(packer)?;
    }
    loader.classifier(packer)?;
    loader.text_projections(packer)?;
    Ok(())
}

fn in_memory<'a>(exec: Exec<'a>, progress: Progress<'a>) -> Pack<'a> {
    Pack { exec, done: 0, total: 0, progress, sites: Vec::new() }
}

/// Returns the Hessian of the inputs of a matrix, `rows: [rows, cols]`.
fn hessian(exec: &Exec<'_>, rows: &[f32], cols: usize) -> Result<Hessian, LoadError> {
    let mut hessian = inputs::zeroed(cols, Basis::Rotated)?;
    hessian.add(exec, rows)?;
    Ok(hessian)
}

/// Checks that the peak memory of [`calibrate`] on `threads` threads is available.
pub(crate) fn check_memory(
    spec: &ModelSpec,
    source: Source<'_>,
    loader: &Loader<'_>,
    sequences: Sequences<'_>,
    threads: usize,
) -> Result<(), LoadError> {
    let [layers, embedding] =
        [Quantization::EXACT, Quantization::BF16].map(|quantization| Loader::new(spec, source, quantization));
    let needs = needs(spec, [&layers, &embedding], loader, sequences, threads)?;
    let available = machine::available_memory();
    if needs > available {
        let what = "calibration, with the hidden states of its tokens, a layer in full precision and quantized, and \
                    Hessians of its inputs,";
        return Err(LoadError::Memory { what, needs, available });
    }
    Ok(())
}

/// Returns the peak memory in bytes on `threads` threads, with the Hessian of one linear layer. The first two
/// loaders are those of the exact model, of its layers and of its embedding.
fn needs(
    spec: &ModelSpec,
    [exact_layers, exact_embedding]: [&Loader<'_>; 2],
    loader: &Loader<'_>,
    sequences: Sequences<'_>,
    threads: usize,
) -> Result<u64, LoadError> {
    let tokens = sequences.count();
    let (streams, narrow) = (float_bytes(tokens, spec.streams_width()), float_bytes(tokens, spec.embedding_width()));
    let hessian = |columns: usize| {
        let bytes = Hessian::bytes_for(columns).unwrap_or(u64::MAX);
        bytes.saturating_add(PackedMatrix::calibration_bytes(columns, threads))
    };
    let [exact_layers, exact_embedding] = [exact_layers, exact_embedding].map(Loader::without_vectors);
    let loader = loader.without_vectors();

    let mut embedding = Measure::default();
    loader.embedding(&mut embedding)?;
    if sequences.corrects {
        // The exact embedding is read while that of the quantized model is in memory.
        exact_embedding.embedding(&mut embedding)?;
        exact_embedding.streams(&mut embedding)?;
    }
    let mut ends = Measure::default();
    loader.streams(&mut ends)?;
    let mut output = Measure::default();
    loader.lm_head_projection(&mut output)?;
    // A tied embedding is packed with the Hessian of the inputs of the lm_head, before the layers or after them.
    after_projection(&loader, spec, true, &mut output)?;
    let of_inputs = hessian(spec.hidden_size).max(hessian(spec.embedding_width()));
    let mut most = embedding.bytes.max(output.bytes.saturating_add(narrow).saturating_add(of_inputs));
    for (index, layer_spec) in spec.layers.iter().enumerate() {
        let (mut layer, mut wanted) = (Measure::default(), CalibratedSites::new(sequences.correction_tokens()));
        exact_layers.layer(&mut layer, index, layer_spec, &[])?;
        loader.layer(&mut wanted, index, layer_spec, &[])?;
        let of_inputs = wanted.linears.iter().map(CalibratedSite::recorded_bytes).max().unwrap_or(0);
        let beside = beside_hessians(spec, index, &wanted, sequences, threads);
        most = most.max(layer.bytes.saturating_add(of_inputs).saturating_add(beside));
    }
    let embedding = if spec.reads_embedding(0) { float_bytes(tokens, spec.hidden_size) } else { 0 };
    // The hidden states of the exact model are in f16, apart from those before the first layer.
    let of_exact = if sequences.corrects { (streams / 2).saturating_add(embedding) } else { 0 };
    let hidden = streams.saturating_add(embedding).saturating_add(of_exact);
    Ok(most.saturating_add(hidden).saturating_add(ends.bytes))
}

/// Returns the bytes that a layer needs besides its weights in full precision and their Hessians: its quantized weights,
/// the weights that are being quantized or pruned, the activations of the longest sequence including a copy of its hidden
/// states, and the sequence memory, which is that of all sequences where layers share keys and values. If matrices are
/// corrected, also copies of the quantized weights, the sequence memory of the exact model, and its inputs of a linear
/// layer.
fn beside_hessians(
    spec: &ModelSpec,
    index: usize,
    wanted: &CalibratedSites,
    sequences: Sequences<'_>,
    threads: usize,
) -> u64 {
    let longest = sequences.longest();
    let pages = |group: &KvGroup| if group.is_state() { 2 } else { longest.div_ceil(PAGE_TOKENS) };
    let bytes = |layout: MemoryLayout| {
        let groups = layout.groups.iter().map(|group| group.page_bytes.saturating_mul(pages(group) as u64));
        groups.fold(0, u64::saturating_add)
    };
    let held = pass::held_memory(spec, index, sequences.tokens.len()).into_iter();
    let widest = wanted.linears.iter().map(|linear| linear.columns).max().unwrap_or(0);
    let memory = held.map(|(layout, held)| bytes(layout).saturating_mul(held as u64)).fold(0, u64::saturating_add);
    let models = if sequences.corrects { 2 } else { 1 };
    let of_errors = wanted.linears.iter().filter(|linear| linear.corrects).map(|linear| {
        let parts = float_bytes(longest.min(ERROR_ROWS), linear.columns.saturating_add(linear.outputs));
        // Inputs of the exact model, and its residual stream.
        float_bytes(longest, linear.columns.saturating_add(spec.streams_width())).saturating_add(parts)
    });
    let of_errors = of_errors.max().unwrap_or(0);
    wanted
        .bytes
        .saturating_add(wanted.replaced_bytes)
        .saturating_add(of_errors)
        .saturating_add(wanted.pruned_bytes)
        .saturating_add(PackedMatrix::calibration_bytes(widest, threads))
        .saturating_add(buffer_bytes(spec, longest, 0))
        .saturating_add(memory.saturating_mul(models))
}

pub(crate) fn float_bytes(rows: usize, width: usize) -> u64 {
    (rows as u64).saturating_mul(width as u64).saturating_mul(size_of::<f32>() as u64)
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroUsize;

    use ferrule_kernels::arch::Isa;
    use ferrule_kernels::{Cancel, InputStatistics, Pool};
    use serde_json::json;

    use super::*;
    use crate::specs;
    use crate::weights::MatrixPlan;

    /// Packs matrices, and keeps their names and whether their inputs are known.
    #[derive(Default)]
    pub(super) struct Packed {
        pub(super) matrices: Vec<(String, bool)>,
        bytes: f64,
        done: f64,
    }

    impl Target for Packed {
        fn pack(
            &mut self,
            exec: &Exec<'_>,
            plan: &MatrixPlan<'_>,
            statistics: Option<&InputStatistics>,
        ) -> Result<PackedMatrix, LoadError> {
            self.matrices.push((plan.name.clone(), statistics.is_some()));
            let matrix = match statistics {
                Some(statistics) => plan.pack_calibrated(exec, statistics)?,
                None => plan.pack(exec)?,
            };
            self.bytes += matrix.bytes() as f64;
            Ok(matrix)
        }

        fn advance(&mut self, bytes: f64) {
            self.done += bytes;
        }
    }

    #[test]
    fn a_tied_embedding_is_packed_before_the_layers_if_they_correct_its_errors() {
        let spec = ModelSpec::from_json(&specs::llama(96, 2).to_string()).unwrap();
        let loader = Loader::new(&spec, Source::Random, Quantization::named("int4").unwrap());
        let (pool, cancel) = (Pool::new(NonZeroUsize::new(2).unwrap()), Cancel::new());
        let exec = Exec { isa: Isa::best(), pool: &pool, cancel: &cancel };
        let sequences = [0, 1].map(|first| (0..200).map(|i| (first + i * i) % 96).collect::<Vec<u32>>());
        for corrects in [true, false] {
            let mut packed = Packed::default();
            let all = Sequences { tokens: &sequences, corrects };
            calibrate(&spec, Source::Random, &loader, all, exec, &mut packed).unwrap();
            let is_embedding = |(name, _): &(String, bool)| name.starts_with("embedding");
            let at = packed.matrices.iter().position(is_embedding).unwrap();
            assert_eq!(at, if corrects { 0 } else { packed.matrices.len() - 1 }, "{:?}", packed.matrices);
            assert!(packed.matrices.iter().all(|(_, has_statistics)| *has_statistics), "{:?}", packed.matrices);
            assert!((packed.done / packed.bytes - 1.0).abs() < 1e-9, "{} of {}", packed.done, packed.bytes);
        }
    }

    fn needs_of(change: impl FnOnce(&mut serde_json::Value), sequences: &[Vec<u32>]) -> u64 {
        needs_of_threads(change, sequences, 1)
    }

    fn needs_of_threads(change: impl FnOnce(&mut serde_json::Value), sequences: &[Vec<u32>], threads: usize) -> u64 {
        let mut json = specs::llama(96, 2);
        change(&mut json);
        let spec = ModelSpec::from_json(&json.to_string()).unwrap();
        let load = |quantization| Loader::new(&spec, Source::Random, quantization);
        let int4 = Quantization::named("int4").unwrap();
        let [layers, embedding, loader] = [Quantization::EXACT, Quantization::BF16, int4].map(load);
        let sequences = Sequences { tokens: sequences, corrects: true };
        needs(&spec, [&layers, &embedding], &loader, sequences, threads).unwrap()
    }

    #[test]
    fn peak_memory_grows_with_every_size() {
        let plain = needs_of(|_| (), &[vec![1; 64]]);
        // Of the exact and the quantized model.
        let hidden = 64 * 64 * (2 + 4);
        assert_eq!(needs_of(|_| (), &[vec![1; 64], vec![1; 64]]), plain + hidden, "only one runs at a time");
        let longer = needs_of(|_| (), &[vec![1; 128]]);
        let keys_and_values = 64 * 2 * 2 * 16 * 4;
        assert!(longer > plain + 2 * hidden + keys_and_values, "{longer}: with a copy, keys and values");
        let inner = |json: &mut serde_json::Value| {
            json["layers"][1]["blocks"][1]["mixer"]["intermediate_size"] = json!(1 << 12)
        };
        let wide = needs_of(inner, &[vec![1; 64]]);
        let (exact, quantized) = (3 * 64 * (1 << 12) * 4, 3 * 64 * (1 << 12) / 2);
        assert!(wide > Hessian::bytes_for(1 << 12).unwrap() + exact + quantized, "{wide}: with the Hessian");
        // Four panels of each thread: 64 bytes a column for the weights, corrections, residuals and codes.
        let panels = needs_of_threads(inner, &[vec![1; 64]], 3) - wide;
        assert!(panels > 2 * 4 * 4 * 64 * (1 << 12), "{panels}: with the panels of two more threads");
        let head = needs_of(|json| json["vocab_size"] = json!(1 << 20), &[vec![1; 64]]);
        assert!(head > (64 << 20) / 2 + Hessian::bytes_for(64).unwrap(), "{head}: with the head");
    }
}
