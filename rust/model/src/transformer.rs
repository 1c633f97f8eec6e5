//! The forward pass, the same for every architecture, over a ragged batch of prefill chunks and decode rows.

use std::cell::RefCell;
use std::sync::{Arc, OnceLock};

use ferrule_kernels::arch::Isa;
use ferrule_kernels::kv::{KvFormat, PageId};
use ferrule_kernels::{Cancel, Exec, Pool, PoolError, Scratch, machine};

use crate::adapter::AdapterLoader;
use crate::batch::{Batch, Capabilities, ForwardError, KvGroup, LanguageModel, SequenceChunk};
use crate::fingerprint::{fingerprint, shared_fingerprint};
use crate::layer::{
    AdapterBuffers, AdapterRows, LayerBuffers, RaggedRows, adapted, adapter_runs, look_up, norm_in_place, run_layer,
    scale_unless_one,
};
use crate::lm_head::{self, LmHeadWeights, apply_lm_head, multiply_lm_head};
use crate::memory::{Memory, MemoryLayout};
use crate::mixers::MixerPass;
use crate::quantization::Quantization;
use crate::readout;
use crate::rope::RopeRows;
use crate::spec::{ModelSpec, PositionsSpec};
use crate::stage::{LoadedPart, StageLayers, TensorParallelGroup, VocabularyPart};
use crate::streams::{StreamEndBuffers, StreamsSpec};
use crate::weights::{
    Embedding, LoadError, Loader, Progress, Site, Source, WeightSizes, Weights, check_quantization, release_tokens,
};

/// Options for loading a model.
#[derive(Debug, Clone, Copy)]
pub struct LoadOptions {
    /// Formats of the weights.
    pub quantization: Quantization,
    /// Format of keys and values in the KV cache.
    pub kv_format: KvFormat,
    /// Instruction set to use.
    pub isa: Isa,
}

/// A model with its weights, KV cache and thread pool.
///
/// Within the crate, also a part of a model: see [`crate::Stage`].
///
/// # Examples
/// Computes the logits of a prompt's last token with random weights; [`ModelSpec`] shows the JSON of the spec.
/// ```
/// use std::num::NonZeroUsize;
/// use std::sync::Arc;
///
/// use ferrule_kernels::arch::Isa;
/// use ferrule_kernels::kv::KvFormat;
/// use ferrule_kernels::{Cancel, Pool};
/// use ferrule_model::{
///     Batch, LanguageModel, LoadOptions, LogitRows, ModelSpec, Quantization, SequenceChunk, Source, Transformer,
/// };
///
/// # let json = r#"{
/// #     "architecture": "llama", "vocab_size": 96, "hidden_size": 64, "max_position_embeddings": 256,
/// #     "embedding": {"scale": 1.0, "width": null, "positions": null, "token_types": 0, "norm": null},
/// #     "ropes": [{"theta": 1e4, "rotary_dim": 16, "interleaved": false, "scaling": {"type": "none"}}],
/// #     "layers": [{
/// #         "scalar": false, "blocks": [{
/// #             "name": "attention",
/// #             "mixer": {
/// #                 "type": "attention", "heads": 4, "scale": 0.25, "output_bias": false, "rope": 0, "window": null,
/// #                 "softcap": null, "alibi_slopes": null, "sinks": false,
/// #                 "projections": {
/// #                     "type": "heads", "kv_heads": 2, "key_dim": 16, "value_dim": 16, "bias": false, "qk_norm": null,
/// #                     "values_are_keys": false, "clip": null
/// #                 }
/// #             },
/// #             "norm": {"type": "rms", "eps": 1e-5, "weight_offset": 0.0, "weight": true},
/// #             "post_norm": null, "sum_norm": null, "parallel": false, "residual_scale": 1.0,
/// #             "residual_after_norm": false
/// #         }, {
/// #             "name": "ffn",
/// #             "mixer": {
/// #                 "type": "dense", "intermediate_size": 96, "activation": "silu", "gated": true, "bias": false,
/// #                 "clamp": null, "gate_scale": 1.0
/// #             },
/// #             "norm": {"type": "rms", "eps": 1e-5, "weight_offset": 0.0, "weight": true},
/// #             "post_norm": null, "sum_norm": null, "parallel": false, "residual_scale": 1.0,
/// #             "residual_after_norm": false
/// #         }]
/// #     }],
/// #     "final_norm": {"type": "rms", "eps": 1e-5, "weight_offset": 0.0, "weight": true},
/// #     "lm_head": {"tied": true, "bias": false, "scale": 1.0, "softcap": null},
/// #     "causal": true, "classifier": null, "text_projections": [], "tensors": {}, "prefixes": []
/// # }"#;
/// let spec = ModelSpec::from_json(json)?;
/// let quantization = Quantization::named("int8").expect("a known name");
/// let options = LoadOptions { quantization, kv_format: KvFormat::F16, isa: Isa::best() };
/// let pool = Arc::new(Pool::new(NonZeroUsize::MIN));
/// let mut model = Transformer::load(spec, Source::Random, options, pool, &Cancel::new(), &mut |_, _| {})?;
/// model.allocate_kv(&[1])?;
///
/// let prompt = SequenceChunk {
///     tokens: &[3, 1, 4],
///     first_position: 0,
///     prompt_len: 3,
///     pages: &[vec![0]],
///     token_types: &[],
///     features: &[],
///     logits: LogitRows::Last,
///     adapter: None,
/// };
/// let mut logits = Vec::new();
/// model.forward(Batch { sequences: &[prompt] }, &Cancel::new(), &mut logits)?;
/// assert_eq!(logits.len(), 96);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Transformer {
    spec: Arc<ModelSpec>,
    /// The layers whose weights and memory are here, and the workers that divide the rows of the matrices and the heads of
    /// keys and values.
    part: LoadedPart,
    weights: Arc<Weights>,
    /// Linear layers that adapters can change.
    sites: Arc<[Site]>,
    layout: MemoryLayout,
    memory: Memory,
    options: LoadOptions,
    pool: Arc<Pool>,
    buffers: Buffers,
    /// Computed on first use.
    fingerprint: OnceLock<[u8; 32]>,
}

/// Buffers of a forward pass, reused from step to step. Shapes: `[rows, width]`.
#[derive(Default)]
struct Buffers {
    /// The residual stream, or several side by side.
    residual: Scratch<f32>,
    /// Hidden states before several streams begin; then the lm_head's narrow input.
    hidden: Scratch<f32>,
    /// Hidden states before the first layer, if a mixer reads them.
    embedding: Scratch<f32>,
    /// Streams of the rows that the lm_head reads.
    last_streams: Scratch<f32>,
    ends: StreamEndBuffers,
    /// Narrow embedding rows before their projection; then the rows that the lm_head reads.
    update: Scratch<f32>,
    layer: LayerBuffers,
    /// Shared by all linear layers of a pass, which run one after the other.
    adapters: RefCell<AdapterBuffers>,
    ropes: Vec<RopeRows>,
}

impl Transformer {
    /// Loads a model from a source of weights. The KV cache is empty until [`Transformer::allocate_kv`].
    ///
    /// # Errors
    /// [`LoadError`] if the files do not fit the spec, memory is too small, or the load is cancelled.
    pub fn load(
        spec: ModelSpec,
        source: Source<'_>,
        options: LoadOptions,
        pool: Arc<Pool>,
        cancel: &Cancel,
        progress: Progress<'_>,
    ) -> Result<Self, LoadError> {
        let whole = StageLayers::whole(&spec);
        Self::load_part(spec, whole.into(), source, options, pool, cancel, progress)
    }

    /// Loads the weights of some layers, and of what precedes or follows them; only the rows of this worker if a group
    /// divides them.
    pub(crate) fn load_part(
        spec: ModelSpec,
        part: LoadedPart,
        source: Source<'_>,
        options: LoadOptions,
        pool: Arc<Pool>,
        cancel: &Cancel,
        progress: Progress<'_>,
    ) -> Result<Self, LoadError> {
        let LoadOptions { quantization, kv_format, isa } = options;
        let exec = Exec { isa, pool: &pool, cancel };
        if let Source::Packed { file, .. } = source {
            check_quantization(file, quantization)?;
        }
        let mut weights = Loader::new(&spec, source, quantization).of_part(part.clone()).load(exec, progress)?;
        let sites = std::mem::take(&mut weights.sites).into();
        let ranks = part.group.as_ref().map_or(1, |group| group.ranks());
        let layers = part.layers.range();
        let layout = MemoryLayout::new(&spec.layers, layers, spec.causal, kv_format).divided(ranks, kv_format);
        Ok(Self {
            spec: Arc::new(spec),
            part,
            weights: Arc::new(weights),
            sites,
            layout,
            memory: Memory::default(),
            options,
            pool,
            buffers: Buffers::default(),
            fingerprint: OnceLock::new(),
        })
    }

    /// Allocates `pages[i]` empty KV cache pages for group `i`. Memory is used when a page is first written.
    ///
    /// # Errors
    /// [`LoadError::Memory`] if the address space is too small.
    pub fn allocate_kv(&mut self, pages: &[usize]) -> Result<(), LoadError> {
        self.memory = Memory::default();
        self.memory = Memory::new(&self.layout, self.options.kv_format, pages).map_err(|needs| LoadError::Memory {
            what: "the key-value cache",
            needs,
            available: machine::available_memory(),
        })?;
        Ok(())
    }

    /// Returns the model's architecture.
    #[must_use]
    pub fn spec(&self) -> &ModelSpec {
        &self.spec
    }

    /// Returns the options with which the model was loaded.
    pub(crate) fn options(&self) -> LoadOptions {
        self.options
    }

    /// Returns the layers whose weights and memory are here.
    pub(crate) fn stage(&self) -> &StageLayers {
        &self.part.layers
    }

    /// Returns the rows of the embedding and the lm_head that are here.
    pub(crate) fn vocabulary(&self) -> VocabularyPart {
        self.part.vocabulary
    }

    /// Returns the workers that divide the rows of the matrices.
    pub(crate) fn group(&self) -> Option<&TensorParallelGroup> {
        self.part.group.as_deref()
    }

    /// Returns the fingerprint of what each of the workers has that divide the rows of the matrices.
    pub(crate) fn shared_fingerprint(&self) -> [u8; 32] {
        shared_fingerprint(&self.spec, self.part.layers.range(), &self.weights)
    }

    /// Returns a loader of adapters for this model, which can be used while the model runs.
    #[must_use]
    pub fn adapters(&self) -> AdapterLoader {
        AdapterLoader {
            spec: Arc::clone(&self.spec),
            sites: Arc::clone(&self.sites),
            isa: self.options.isa,
            pool: Arc::clone(&self.pool),
        }
    }

    /// Returns the sizes of the weights.
    #[must_use]
    pub fn weight_sizes(&self) -> WeightSizes {
        self.weights.sizes(&self.spec, &self.part.layers)
    }

    /// Returns the bytes of weights in a mapped file, which other processes can share.
    #[must_use]
    pub fn mapped_bytes(&self) -> u64 {
        self.weights.tensors().matrices.iter().map(|matrix| matrix.shared_bytes() as u64).sum()
    }

    /// Returns the quantization of the weights.
    #[must_use]
    pub fn quantization(&self) -> Quantization {
        self.options.quantization
    }

    /// Returns the instruction set in use.
    #[must_use]
    pub fn isa(&self) -> Isa {
        self.options.isa
    }

    /// Returns the thread pool in use.
    #[must_use]
    pub fn pool(&self) -> &Arc<Pool> {
        &self.pool
    }

    /// Runs a batch through the layers and leaves the residual streams in [`Buffers::residual`]. `input` has what
    /// [`Transformer::copy_boundary`] of the stage before wrote; the first stage reads the rows of the tokens if they are
    /// divided among stages, else nothing.
    pub(crate) fn run_layers(&mut self, batch: Batch<'_>, input: &[f32], cancel: &Cancel) -> Result<(), PoolError> {
        let _bound = self.pool.bind_caller();
        let Self { spec, part: LoadedPart { layers: stage, group, .. }, weights, layout, memory, buffers, .. } = self;
        let exec = Exec { isa: self.options.isa, pool: &self.pool, cancel };
        let rows = RaggedRows::new(batch, &spec.ropes, &layout.groups, &mut buffers.ropes);
        let runs = adapter_runs(batch, |sequence| sequence.tokens.len());
        let adapters = AdapterRows::new(&runs, &buffers.adapters);
        let width = spec.hidden_size;

        let residual = buffers.residual.take(rows.count * spec.streams_width());
        let reads_embedding = spec.reads_embedding(stage.range().start);
        let embedding = buffers.embedding.take(if reads_embedding { rows.count * width } else { 0 });
        match (stage.is_first(), spec.streams.as_ref().zip(weights.streams.as_ref())) {
            (false, _) => {
                let (streams, embedded) = input.split_at(residual.len());
                residual.copy_from_slice(streams);
                embedding.copy_from_slice(embedded);
            }
            (true, None) => {
                embed(&exec, spec, (weights.embedding(), input), batch, adapters, &mut buffers.update, residual)?;
                embedding.copy_from_slice(&residual[..embedding.len()]);
            }
            (true, Some((StreamsSpec { ends, .. }, streams))) => {
                let hidden = buffers.hidden.take(rows.count * width);
                embed(&exec, spec, (weights.embedding(), input), batch, adapters, &mut buffers.update, hidden)?;
                embedding.copy_from_slice(&hidden[..embedding.len()]);
                ends.begin(&exec, streams, adapters, (hidden, width), &mut buffers.ends, residual)?;
            }
        }
        let (causal, ropes, tables) = (spec.causal, &spec.ropes, &weights.tables);
        let group = group.as_deref();
        let pass =
            MixerPass { exec, group, width, causal, ropes, rows: &rows, embedding, tables, adapters, places: &[] };
        for (index, layer) in stage.range().zip(&weights.layers) {
            run_layer(
                &pass,
                (&spec.layers[index], layer),
                &layout.places[index],
                memory,
                residual,
                &mut buffers.layer,
            )?;
        }
        release_tokens(tables, &rows.tokens);
        Ok(())
    }

    /// Returns the weights, which other threads may read while the model computes.
    pub(crate) fn shared_weights(&self) -> Arc<Weights> {
        Arc::clone(&self.weights)
    }

    /// Writes what the next stage reads after [`Transformer::run_layers`]: `[rows, all streams]`, and the embeddings
    /// `[rows, hidden_size]` if a later layer reads them.
    pub(crate) fn copy_boundary(&mut self, batch: Batch<'_>, output: &mut Vec<f32>) {
        let Self { spec, part, buffers, .. } = self;
        let rows = batch.tokens().count();
        output.clear();
        output.extend_from_slice(buffers.residual.take(rows * spec.streams_width()));
        if spec.reads_embedding(part.layers.range().end) {
            output.extend_from_slice(buffers.embedding.take(rows * spec.hidden_size));
        }
    }

    /// Computes the rows whose logits are requested after [`Transformer::run_layers`]: ends the streams and applies the
    /// final norm. Writes them to [`Buffers::update`], `[wanted rows, hidden_size]`, and returns the number of floats.
    fn last_rows(&mut self, batch: Batch<'_>, cancel: &Cancel) -> Result<usize, PoolError> {
        let Self { spec, weights, buffers, .. } = self;
        let exec = Exec { isa: self.options.isa, pool: &self.pool, cancel };
        let (width, all_width) = (spec.hidden_size, spec.streams_width());
        let residual = buffers.residual.take(batch.tokens().count() * all_width);
        let wanted = wanted_rows(batch);
        let last = buffers.update.take(wanted.len() * width);
        let copy = |to: &mut [f32]| {
            for (&row, to) in wanted.iter().zip(to.chunks_exact_mut(all_width)) {
                to.copy_from_slice(&residual[row * all_width..][..all_width]);
            }
        };
        match spec.streams.as_ref().zip(weights.streams.as_ref()) {
            None => copy(last),
            Some((StreamsSpec { ends, .. }, weights)) => {
                let all = buffers.last_streams.take(wanted.len() * all_width);
                copy(all);
                let runs = adapter_runs(batch, |sequence| sequence.logits.of(sequence.tokens.len()).len());
                let adapters = AdapterRows::new(&runs, &buffers.adapters);
                ends.end(&exec, weights, adapters, (all, width), &mut buffers.ends, last)?;
            }
        }
        norm_in_place(&exec, weights.final_norm.as_ref(), last, width)?;
        Ok(last.len())
    }

    /// Computes the logits after [`Transformer::run_layers`]: overwrites `logits` with `[wanted rows, vocab_size]`.
    ///
    /// # Panics
    /// If logits are requested from a model that has none.
    pub(crate) fn logits(&mut self, batch: Batch<'_>, cancel: &Cancel, logits: &mut Vec<f32>) -> Result<(), PoolError> {
        let _bound = self.pool.bind_caller();
        let numbers = self.last_rows(batch, cancel)?;
        let Self { spec, weights, buffers, .. } = self;
        assert!(numbers == 0 || spec.lm_head.is_some(), "logits of a model that has none");
        let exec = Exec { isa: self.options.isa, pool: &self.pool, cancel };
        let runs = adapter_runs(batch, |sequence| sequence.logits.of(sequence.tokens.len()).len());
        let adapters = AdapterRows::new(&runs, &buffers.adapters);
        logits.resize(numbers / spec.hidden_size * spec.vocab_size, 0.0);
        let weights = LmHeadWeights::new(weights, 0..spec.vocab_size);
        apply_lm_head(&exec, spec, weights, buffers.update.take(numbers), adapters, &mut buffers.hidden, logits)
    }

    /// Computes what the workers multiply with their rows of the lm_head after [`Transformer::run_layers`]: overwrites
    /// `output` with `[wanted rows, embedding_width]`. Stages have no adapters.
    pub(crate) fn lm_head_input(
        &mut self,
        batch: Batch<'_>,
        cancel: &Cancel,
        output: &mut Vec<f32>,
    ) -> Result<(), PoolError> {
        let _bound = self.pool.bind_caller();
        let numbers = self.last_rows(batch, cancel)?;
        let Self { spec, weights, buffers, .. } = self;
        let exec = Exec { isa: self.options.isa, pool: &self.pool, cancel };
        let adapters = AdapterRows::new(&[], &buffers.adapters);
        let (projection, rows) = (weights.lm_head_projection.as_ref(), buffers.update.take(numbers));
        output.clear();
        output.extend_from_slice(lm_head::project(&exec, spec, projection, rows, adapters, &mut buffers.hidden)?);
        Ok(())
    }

    /// Multiplies rows of [`Transformer::lm_head_input`] with the rows of the lm_head that are here: overwrites `logits`
    /// with `[rows, own tokens]`.
    ///
    /// # Panics
    /// If the model has no lm_head, or none of its rows is here.
    pub(crate) fn own_logits(&self, rows: &[f32], cancel: &Cancel, logits: &mut Vec<f32>) -> Result<(), PoolError> {
        let _bound = self.pool.bind_caller();
        let own = self.part.vocabulary.rows(self.spec.vocab_size);
        logits.resize(rows.len() / self.spec.embedding_width() * own.len(), 0.0);
        let adapters = AdapterRows::new(&[], &self.buffers.adapters);
        multiply_lm_head(&self.exec(cancel), &self.spec, LmHeadWeights::new(&self.weights, own), rows, adapters, logits)
    }

    /// Computes the hidden states after [`Transformer::run_layers`]: overwrites `hidden` with `[wanted rows,
    /// hidden_size]`.
    pub(crate) fn last_hidden(
        &mut self,
        batch: Batch<'_>,
        cancel: &Cancel,
        hidden: &mut Vec<f32>,
    ) -> Result<(), PoolError> {
        let _bound = self.pool.bind_caller();
        let numbers = self.last_rows(batch, cancel)?;
        hidden.clear();
        hidden.extend_from_slice(self.buffers.update.take(numbers));
        Ok(())
    }

    fn exec<'a>(&'a self, cancel: &'a Cancel) -> Exec<'a> {
        Exec { isa: self.options.isa, pool: &self.pool, cancel }
    }
}

/// Computes the hidden states before the first layer, `[rows, hidden_size]`. If the rows of the embedding are divided
/// among stages, `looked_up` has those of the tokens, `[rows, embedding_width]`; else it is empty.
pub(crate) fn embed(
    exec: &Exec<'_>,
    spec: &ModelSpec,
    (weights, looked_up): (&Embedding, &[f32]),
    batch: Batch<'_>,
    adapters: AdapterRows<'_>,
    narrow: &mut Scratch<f32>,
    hidden: &mut [f32],
) -> Result<(), PoolError> {
    let width = spec.hidden_size;
    let read = |rows: &mut [f32]| -> Result<(), PoolError> {
        match &weights.tokens {
            Some(tokens) if looked_up.is_empty() => look_up(exec, tokens, batch.tokens(), rows)?,
            None if looked_up.is_empty() => rows.fill(0.0),
            _ => rows.copy_from_slice(looked_up),
        }
        place_features(batch, spec.embedding_width(), rows);
        Ok(())
    };
    match &weights.projection {
        None => read(hidden)?,
        Some(projection) => {
            let rows = narrow.take(hidden.len() / spec.hidden_size * spec.embedding_width());
            read(rows)?;
            adapted(exec, projection, adapters, rows, hidden)?;
        }
    }
    scale_unless_one(exec, hidden, spec.embedding.scale)?;
    if let (Some(table), Some(positions)) = (&weights.positions, &spec.embedding.positions) {
        let (PositionsSpec::Learned { offset, .. } | PositionsSpec::Sinusoidal { offset }) = *positions;
        let positions = batch.sequences.iter().flat_map(SequenceChunk::positions);
        for (position, row) in positions.zip(hidden.chunks_exact_mut(width)) {
            let added = &table[(offset + position) * width..][..width];
            row.iter_mut().zip(added).for_each(|(x, added)| *x += added);
        }
    }
    if let Some(table) = &weights.token_types {
        for (kind, row) in batch.token_types().zip(hidden.chunks_exact_mut(width)) {
            let added = &table[kind as usize * width..][..width];
            row.iter_mut().zip(added).for_each(|(x, added)| *x += added);
        }
    }
    norm_in_place(exec, weights.norm.as_ref(), hidden, width)
}

/// Overwrites the embeddings `[rows, width]` of tokens that have features.
fn place_features(batch: Batch<'_>, width: usize, mut rows: &mut [f32]) {
    for sequence in batch.sequences {
        let (embeddings, rest) = rows.split_at_mut(sequence.tokens.len() * width);
        for features in sequence.features {
            features.overwrite(sequence.positions(), embeddings);
        }
        rows = rest;
    }
}

impl LanguageModel for Transformer {
    fn vocab_size(&self) -> usize {
        self.spec.vocab_size
    }

    fn kv_groups(&self) -> &[KvGroup] {
        &self.layout.groups
    }

    fn shareable_tokens(&self, prompt_len: usize) -> usize {
        self.spec.shareable_tokens(prompt_len)
    }

    fn copy_page(&mut self, group: usize, from: PageId, to: PageId) {
        self.memory.store_mut(group).copy_page(from, to);
    }

    fn page(&self, group: usize, page: PageId) -> &[u8] {
        self.memory.store(group).page(page)
    }

    fn set_page(&mut self, group: usize, page: PageId, bytes: &[u8]) {
        self.memory.store_mut(group).set_page(page, bytes);
    }

    fn fingerprint(&self) -> [u8; 32] {
        *self
            .fingerprint
            .get_or_init(|| fingerprint(&self.spec, self.part.layers.range(), &self.weights, self.options, &self.pool))
    }

    fn capabilities(&self) -> Capabilities {
        self.spec.capabilities()
    }

    fn forward(&mut self, batch: Batch<'_>, cancel: &Cancel, logits: &mut Vec<f32>) -> Result<(), ForwardError> {
        self.run_layers(batch, &[], cancel)?;
        Ok(self.logits(batch, cancel, logits)?)
    }

    fn hidden_states(&mut self, batch: Batch<'_>, cancel: &Cancel, hidden: &mut Vec<f32>) -> Result<(), ForwardError> {
        self.run_layers(batch, &[], cancel)?;
        Ok(self.last_hidden(batch, cancel, hidden)?)
    }

    fn embeddings(&self, pooled: &[f32], cancel: &Cancel) -> Result<Vec<f32>, ForwardError> {
        Ok(readout::embeddings(&self.exec(cancel), &self.spec, &self.weights, pooled)?)
    }

    fn scores(&self, pooled: &[f32], cancel: &Cancel) -> Result<Vec<f32>, ForwardError> {
        Ok(readout::scores(&self.exec(cancel), &self.spec, &self.weights, pooled)?)
    }
}

/// Returns the rows of a batch whose logits or hidden states are computed.
fn wanted_rows(batch: Batch<'_>) -> Vec<usize> {
    let mut first = 0;
    let mut wanted = Vec::new();
    for sequence in batch.sequences {
        wanted.extend(sequence.logits.of(sequence.tokens.len()).map(|row| first + row));
        first += sequence.tokens.len();
    }
    wanted
}
