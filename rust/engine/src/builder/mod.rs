//! Builds an engine: loads the model, divides the memory, and sets the defaults.
//!
//! | file | concern |
//! |---|---|
//! | `mod.rs` | [`EngineBuilder`] |
//! | `model.rs` | [`EngineModel`]: the model in this process, or in pipeline stages |
//! | `options.rs` | [`EngineOptions`]: one table row per option |
//! | `kv_memory.rs` | memory of the KV caches of the model and of a draft model |
//! | `info.rs` | [`EngineInfo`], [`Measurement`]: figures of a model, with or without loading it |

mod info;
mod kv_memory;
mod model;
mod options;

use std::collections::BTreeMap;
use std::num::NonZeroUsize;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use ferrule_kernels::arch::{Isa, IsaError};
use ferrule_kernels::kv::KvFormat;
use ferrule_kernels::{Cancel, Exec, Pool, machine};
use ferrule_model::{
    Allocation, AllocationError, BitBudget, Calibration, LoadError, LoadOptions, MatrixFormats, ModelSpec, Pipeline,
    PipelineError, Progress, PrunedShare, Pruning, Quantization, Recipe, Source, Stage, StageLink, StagePart,
    Transformer, WeightFiles, check_memory, divide_layers,
};

use crate::parameter::Checked;
use crate::{ConfigError, DraftModel, Engine, EngineConfig, InvalidParameterError, PrefixCacheDir, SpeculativeConfig};
pub use info::{EngineInfo, KvWindow, Measurement, MemoryNeeds, ModelFigures, StoredType, WorkerFigures};
pub use model::EngineModel;
pub use options::EngineOptions;

/// Maximum number of bytes that a step reads from a prefix cache directory, which takes some hundredths of a second.
const PREFIX_CACHE_STEP_BYTES: usize = 32 << 20;

/// Metadata key of packed files: which matrices are pruned, as [`PrunedShare`] displays it.
const PRUNED: &str = "pruned";

/// Reason that an engine could not be built.
#[derive(Debug, thiserror::Error)]
pub enum BuildError {
    /// An option is invalid.
    #[error(transparent)]
    Parameter(#[from] InvalidParameterError),
    /// The model could not be loaded.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// The configuration does not fit the model.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The stages of a pipeline cannot form the model.
    #[error(transparent)]
    Pipeline(#[from] PipelineError),
    /// The environment variable `FERRULE_ISA` is invalid.
    #[error(transparent)]
    Isa(#[from] IsaError),
    /// The KV cache is larger than the free memory.
    #[error("kv_cache_memory must be at most the {available} bytes that are free, got {requested}")]
    KvMemory {
        /// Requested number of bytes.
        requested: u64,
        /// Bytes that are free.
        available: u64,
    },
}

/// Builds an [`Engine`] from the description of a model and its weights.
///
/// ```
/// use ferrule_engine::{EngineBuilder, Request, SamplingParams};
/// use ferrule_kernels::Cancel;
/// use ferrule_model::{ModelSpec, Quantization};
///
/// // Without weights, the model's weights are random.
/// let spec = ModelSpec::from_json(include_str!("../../examples/tiny.json"))?;
/// let mut engine = EngineBuilder::new(spec)
///     .quantization(Quantization::named("int8"))
///     .max_model_len(64)
///     .kv_cache_memory(8 << 20)
///     .build()?;
///
/// let params = SamplingParams { temperature: 0.0, max_tokens: 5, ..SamplingParams::default() };
/// let request = engine.add_request(Request::new(vec![1, 2, 3], params))?;
/// let mut tokens = Vec::new();
/// while engine.has_unfinished_requests() {
///     for output in engine.step(&Cancel::new())? {
///         assert_eq!(output.request, request);
///         tokens.extend(output.token_ids);
///     }
/// }
/// assert_eq!(tokens.len(), 5);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[must_use]
pub struct EngineBuilder<'a> {
    model: ModelFiles,
    options: EngineOptions,
    draft: Option<(ModelFiles, EngineOptions)>,
    stages: Option<Vec<StageLink>>,
    isa: Option<Isa>,
    cancel: Option<&'a Cancel>,
    progress: Option<Progress<'a>>,
}

/// Description of a model, and the path of its weights.
struct ModelFiles {
    spec: ModelSpec,
    /// Directory of a checkpoint, GGUF file or packed file; `None` for random weights.
    weights: Option<PathBuf>,
}

/// Instruction set, threads and cancel flag for loading.
struct Loading<'a> {
    isa: Isa,
    pool: Arc<Pool>,
    cancel: &'a Cancel,
}

impl<'a> EngineBuilder<'a> {
    /// Returns a builder for a model with random weights and default options.
    pub fn new(spec: ModelSpec) -> Self {
        let model = ModelFiles { spec, weights: None };
        let options = EngineOptions::default();
        Self { model, options, draft: None, stages: None, isa: None, cancel: None, progress: None }
    }

    /// Reads the weights from a directory of safetensors files, a GGUF file or a packed file.
    pub fn weights(mut self, path: impl Into<PathBuf>) -> Self {
        self.model.weights = Some(path.into());
        self
    }

    /// Replaces all options.
    pub fn options(mut self, options: EngineOptions) -> Self {
        self.options = options;
        self
    }

    /// Sets the format of the weights; `None` selects it by the stored format.
    pub fn quantization(mut self, quantization: Option<Quantization>) -> Self {
        self.options.quantization = quantization;
        self
    }

    /// Sets the format of the KV cache.
    pub fn kv_cache_dtype(mut self, format: KvFormat) -> Self {
        self.options.kv_cache_dtype = Some(format);
        self
    }

    /// Sets the number of threads.
    pub fn threads(mut self, threads: usize) -> Self {
        self.options.threads = Some(threads);
        self
    }

    /// Sets the maximum number of tokens of a sequence, prompt and output together.
    pub fn max_model_len(mut self, tokens: usize) -> Self {
        self.options.max_model_len = Some(tokens);
        self
    }

    /// Sets the size of the KV cache in bytes.
    pub fn kv_cache_memory(mut self, bytes: u64) -> Self {
        self.options.kv_cache_memory = Some(bytes);
        self
    }

    /// Sets the maximum number of sequences in a step.
    pub fn max_num_seqs(mut self, sequences: usize) -> Self {
        self.options.max_num_seqs = sequences;
        self
    }

    /// Sets the maximum number of tokens in a step.
    pub fn max_num_batched_tokens(mut self, tokens: usize) -> Self {
        self.options.max_num_batched_tokens = tokens;
        self
    }

    /// Sets the maximum number of requests that wait to be scheduled.
    pub fn max_queued_requests(mut self, requests: usize) -> Self {
        self.options.max_queued_requests = Some(requests);
        self
    }

    /// Sets the target inter-token latency.
    pub fn target_itl(mut self, latency: Duration) -> Self {
        self.options.target_itl = latency;
        self
    }

    /// Sets whether requests share the KV cache of a common prefix.
    pub fn enable_prefix_caching(mut self, enable: bool) -> Self {
        self.options.enable_prefix_caching = enable;
        self
    }

    /// Keeps prefixes in a directory of at most `limit` bytes.
    pub fn prefix_cache_dir(mut self, directory: impl Into<PathBuf>, limit: u64) -> Self {
        self.options.prefix_cache_dir = Some(directory.into());
        self.options.prefix_cache_dir_limit = limit;
        self
    }

    /// Configures speculative decoding.
    pub fn speculative_config(mut self, config: SpeculativeConfig) -> Self {
        self.options.speculative_config = config;
        self
    }

    /// Drafts tokens with a smaller model that has the same vocabulary. Only the `options` for loading and for the
    /// context are used.
    pub fn draft_model(mut self, spec: ModelSpec, weights: Option<PathBuf>, options: EngineOptions) -> Self {
        self.draft = Some((ModelFiles { spec, weights }, options));
        self
    }

    /// Runs the model in pipeline stages, first to last, instead of loading it; the workers of a stage are in the order of
    /// their ranks. Of the weights, only headers are read.
    pub fn stages(mut self, links: Vec<StageLink>) -> Self {
        self.stages = Some(links);
        self
    }

    /// Sets the instruction set; default: the one that `FERRULE_ISA` names, or the fastest of the machine.
    pub fn isa(mut self, isa: Isa) -> Self {
        self.isa = Some(isa);
        self
    }

    /// Cancels the load when the flag is set.
    pub fn cancel(mut self, cancel: &'a Cancel) -> Self {
        self.cancel = Some(cancel);
        self
    }

    /// Reports the packed bytes and the bytes in total while the model is loaded.
    pub fn progress(mut self, progress: Progress<'a>) -> Self {
        self.progress = Some(progress);
        self
    }

    /// Loads the model and returns its engine.
    ///
    /// # Errors
    /// [`BuildError`] for invalid options, files that cannot be loaded, and too little memory.
    pub fn build(self) -> Result<Engine<EngineModel>, BuildError> {
        self.build_with_info().map(|(engine, _)| engine)
    }

    /// Loads the model and returns its engine and the figures of both.
    ///
    /// # Errors
    /// The errors of [`EngineBuilder::build`].
    pub fn build_with_info(self) -> Result<(Engine<EngineModel>, EngineInfo), BuildError> {
        let Self { model, options, draft, stages, isa, cancel, progress } = self;
        options.check(model.spec.max_position_embeddings)?;
        if let Some((draft, options)) = &draft {
            options.check(draft.spec.max_position_embeddings)?;
        }
        let no_cancel = Cancel::new();
        let isa = isa.map_or_else(Isa::from_environment, Ok)?;
        let pool = Arc::new(pool(&options));
        let loading = Loading { isa, pool, cancel: cancel.unwrap_or(&no_cancel) };
        let max_model_len = options.max_model_len.unwrap_or(model.spec.max_position_embeddings);
        let mut model = match stages {
            None => EngineModel::local(loading.load(model, &options, progress.unwrap_or(&mut |_, _| ()))?),
            Some(_) if draft.is_some() => return Err(PipelineError::Unsupported { what: "draft models" }.into()),
            Some(links) => join_stages(model, links, &options)?,
        };
        let mut draft = match draft {
            None => None,
            Some((files, options)) => {
                let max_model_len = options.max_model_len.unwrap_or(files.spec.max_position_embeddings);
                let model = EngineModel::local(loading.load(files, &options, &mut |_, _| ())?);
                Some(DraftModel { model, pages: Vec::new(), max_model_len })
            }
        };
        let pages = kv_memory::allocate(&mut model, draft.as_mut(), &options, max_model_len, loading.cancel)?;
        let mut info = EngineInfo::new(&model, draft.as_ref(), &options, isa, &pages);
        let config = EngineConfig {
            pages,
            max_model_len,
            max_num_seqs: options.max_num_seqs,
            max_num_batched_tokens: options.max_num_batched_tokens,
            max_queued_requests: options.max_queued_requests,
            target_itl: options.target_itl,
            enable_prefix_caching: options.enable_prefix_caching,
            prefix_cache_dir: options.prefix_cache_dir.map(|path| PrefixCacheDir {
                path,
                limit: options.prefix_cache_dir_limit,
                step_bytes: PREFIX_CACHE_STEP_BYTES,
            }),
            speculative: options.speculative_config,
        };
        let engine = Engine::with_draft_model(model, draft, config)?;
        info.max_model_len = engine.max_model_len();
        Ok((engine, info))
    }

    /// Loads a part of the model as a worker of a pipeline stage. Returns it with the bytes that are free for its pages,
    /// if `sharers` workers of the model, this one included, divide the memory of this machine.
    ///
    /// # Errors
    /// The errors of [`EngineBuilder::build`]; [`LoadError::Stage`] within them if the layers are not a valid stage.
    pub fn load_stage(self, part: StagePart, sharers: NonZeroUsize) -> Result<(Stage, u64), BuildError> {
        let Self { model, options, isa, cancel, progress, .. } = self;
        options.check(model.spec.max_position_embeddings)?;
        let no_cancel = Cancel::new();
        let isa = isa.map_or_else(Isa::from_environment, Ok)?;
        let loading = Loading { isa, pool: Arc::new(pool(&options)), cancel: cancel.unwrap_or(&no_cancel) };
        let stage = loading.load_stage(model, part, &options, progress.unwrap_or(&mut |_, _| ()))?;
        let sharers = sharers.get() as u64;
        // The other workers of this machine map weights of about the same size.
        let mapped = stage.mapped_bytes().saturating_mul(sharers);
        let available = kv_memory::available_beside(mapped, options.allow_paging) / sharers;
        Ok((stage, available))
    }

    /// Divides the layers of the model into pipeline stages, first to last; see [`ferrule_model::divide_layers`].
    ///
    /// # Errors
    /// The errors of [`EngineBuilder::build`] that the headers of the files show; [`LoadError::Stage`] within them if the
    /// model cannot be divided into so many stages.
    pub fn divide(self, stages: usize) -> Result<Vec<Range<usize>>, BuildError> {
        self.with_headers(|spec, source, quantization| divide_layers(spec, source, quantization, stages))
    }

    /// Checks that the memory of this machine holds the weights of all `parts` together; see
    /// [`ferrule_model::check_memory`].
    ///
    /// # Errors
    /// The errors of [`EngineBuilder::build`] that the headers of the files show; [`LoadError::Weights`] within them if
    /// the parts exceed the memory.
    pub fn check_memory(self, parts: impl IntoIterator<Item = StagePart>) -> Result<(), BuildError> {
        self.with_headers(|spec, source, quantization| check_memory(spec, parts, source, quantization))
    }

    /// Calls `read` with the spec, the files, and the quantization that the model is loaded with.
    fn with_headers<T>(
        self,
        read: impl FnOnce(&ModelSpec, Source<'_>, Quantization) -> Result<T, LoadError>,
    ) -> Result<T, BuildError> {
        let Self { model: ModelFiles { spec, weights }, options, .. } = self;
        options.check(spec.max_position_embeddings)?;
        let files = WeightFiles::open(weights.as_deref(), &spec, options.mmap)?;
        let source = files.source(options.allow_paging);
        let quantization = options.quantization.unwrap_or_else(|| Quantization::auto(source, spec.causal));
        Ok(read(&spec, source, quantization)?)
    }

    /// Returns the figures of the model and the memory that it needs, without loading it.
    ///
    /// # Errors
    /// The errors of [`EngineBuilder::build`] that the headers of the files show.
    pub fn measure(self) -> Result<Measurement, BuildError> {
        self.options.check(self.model.spec.max_position_embeddings)?;
        let isa = self.isa.map_or_else(Isa::from_environment, Ok)?;
        Ok(info::measure(&self.model.spec, self.model.weights.as_deref(), &self.options, isa)?)
    }

    /// Packs the weights into the file `path`. `calibration` has sequences of tokens, over which the model runs to reduce
    /// the error of integer formats (GPTQ). `recipe` replaces formats of single matrices, and `pruning` sets weights
    /// to zero before they are packed. `metadata` is written into the file, and with `pruning` which matrices it fits.
    ///
    /// # Errors
    /// The errors of [`EngineBuilder::build`], and [`BuildError::Parameter`] if `pruning` fits no matrix; no file is
    /// written then.
    pub fn pack(
        self,
        path: &Path,
        metadata: &BTreeMap<String, String>,
        calibration: Option<Calibration<'_>>,
        recipe: Option<&Recipe>,
        pruning: Option<Pruning>,
    ) -> Result<(), BuildError> {
        let Self { model: ModelFiles { spec, weights }, options, isa, cancel, progress, .. } = self;
        options.check(spec.max_position_embeddings)?;
        check_calibration(calibration.map(|it| it.sequences), &spec)?;
        let no_cancel = Cancel::new();
        let isa = isa.map_or_else(Isa::from_environment, Ok)?;
        let files = WeightFiles::open(weights.as_deref(), &spec, true)?;
        let source = files.source(false);
        let quantization = options.quantization.unwrap_or_else(|| Quantization::auto(source, spec.causal));
        let pool = pool(&options);
        let exec = Exec { isa, pool: &pool, cancel: cancel.unwrap_or(&no_cancel) };
        let mut ignored = |_, _| ();
        let progress = progress.unwrap_or(&mut ignored);
        let formats = MatrixFormats { quantization, recipe, pruning };
        let mut metadata = metadata.clone();
        if let Some(pruning) = pruning {
            let share = pruned_share(&spec, source, formats, pruning)?;
            metadata.insert(PRUNED.to_owned(), share.to_string());
        }
        let metadata = &metadata;
        match calibration {
            None => ferrule_model::pack_into(path, &spec, source, formats, metadata, exec, progress)?,
            Some(calibration) => {
                let calibrated = (formats, calibration);
                ferrule_model::calibrate_into(path, &spec, source, calibrated, metadata, exec, progress)?;
            }
        }
        Ok(())
    }

    /// Chooses a format for each matrix, so that the estimated loss is least within a budget; with the errors of calibrated
    /// matrices, if there are token sequences for calibration. See [`ferrule_model::allocate_bits`].
    ///
    /// # Errors
    /// The errors of [`EngineBuilder::build`], also for bits that the formats do not have.
    pub fn allocate_bits(
        self,
        budget: BitBudget<'_>,
        calibration: Option<&[Vec<u32>]>,
    ) -> Result<Allocation, BuildError> {
        let Self { model: ModelFiles { spec, weights }, options, isa, cancel, progress, .. } = self;
        options.check(spec.max_position_embeddings)?;
        check_calibration(calibration, &spec)?;
        let no_cancel = Cancel::new();
        let isa = isa.map_or_else(Isa::from_environment, Ok)?;
        let files = WeightFiles::open(weights.as_deref(), &spec, true)?;
        let pool = pool(&options);
        let exec = Exec { isa, pool: &pool, cancel: cancel.unwrap_or(&no_cancel) };
        let mut ignored = |_, _| ();
        let progress = progress.unwrap_or(&mut ignored);
        let budget = (budget, calibration);
        ferrule_model::allocate_bits(&spec, files.source(false), budget, exec, progress).map_err(allocation_error)
    }

    /// Checks the budget of [`Self::allocate_bits`] without reading any weights.
    ///
    /// # Errors
    /// The errors of [`EngineBuilder::build`], also for bits that the formats do not have.
    pub fn check_bits(self, budget: BitBudget<'_>) -> Result<(), BuildError> {
        let Self { model: ModelFiles { spec, weights }, .. } = self;
        let files = WeightFiles::open(weights.as_deref(), &spec, true)?;
        ferrule_model::check_bits(&spec, files.source(false), budget).map_err(allocation_error)
    }
}

fn allocation_error(error: AllocationError) -> BuildError {
    match error {
        AllocationError::Load(error) => error.into(),
        AllocationError::Bits { bits, least, most } => {
            let requirement = format!("a number from {least:.2} to {most:.2} for this model and these formats");
            InvalidParameterError::new("bits", bits, requirement).into()
        }
    }
}

impl Loading<'_> {
    fn load(
        &self,
        files: ModelFiles,
        options: &EngineOptions,
        progress: Progress<'_>,
    ) -> Result<Transformer, LoadError> {
        self.open(files, options, |spec, source, options| {
            Transformer::load(spec, source, options, Arc::clone(&self.pool), self.cancel, progress)
        })
    }

    fn load_stage(
        &self,
        files: ModelFiles,
        part: StagePart,
        options: &EngineOptions,
        progress: Progress<'_>,
    ) -> Result<Stage, LoadError> {
        self.open(files, options, |spec, source, options| {
            Stage::load(spec, part, source, options, Arc::clone(&self.pool), self.cancel, progress)
        })
    }

    /// Opens the files of a model and passes them to `load`.
    fn open<T>(
        &self,
        ModelFiles { spec, weights }: ModelFiles,
        options: &EngineOptions,
        load: impl FnOnce(ModelSpec, Source<'_>, LoadOptions) -> Result<T, LoadError>,
    ) -> Result<T, LoadError> {
        let files = WeightFiles::open(weights.as_deref(), &spec, options.mmap)?;
        let source = files.source(options.allow_paging);
        let quantization = options.quantization.unwrap_or_else(|| Quantization::auto(source, spec.causal));
        load(spec, source, LoadOptions { quantization, kv_format: options.kv_format(), isa: self.isa })
    }
}

/// Joins pipeline stages to a model; its sizes come from the headers of the files.
fn join_stages(
    ModelFiles { spec, weights }: ModelFiles,
    links: Vec<StageLink>,
    options: &EngineOptions,
) -> Result<EngineModel, BuildError> {
    let files = WeightFiles::open(weights.as_deref(), &spec, true)?;
    let source = files.source(true);
    let quantization = options.quantization.unwrap_or_else(|| Quantization::auto(source, spec.causal));
    let sizes = ferrule_model::measure(&spec, source, quantization, options.kv_format())?.weights;
    Ok(EngineModel::stages(Pipeline::new(spec, links)?, sizes, quantization))
}

fn threads(options: &EngineOptions) -> NonZeroUsize {
    options.threads.and_then(NonZeroUsize::new).unwrap_or_else(machine::cpu_count)
}

/// Returns the threads of an engine, on the NUMA nodes of the processors that it may use.
fn pool(options: &EngineOptions) -> Pool {
    Pool::on_nodes(threads(options), &if options.numa { machine::numa_nodes() } else { Vec::new() })
}

/// Returns which matrices are pruned.
///
/// # Errors
/// [`BuildError::Parameter`] if there is none, and the errors of reading headers.
fn pruned_share(
    spec: &ModelSpec,
    source: Source<'_>,
    formats: MatrixFormats<'_>,
    pruning: Pruning,
) -> Result<PrunedShare, BuildError> {
    let share = PrunedShare::of(spec, source, formats)?;
    if share.pruned_matrices > 0 {
        return Ok(share);
    }
    let first = share.first_dense.unwrap_or_else(|| "the model has no linear layers that are pruned".to_owned());
    let requirement = format!("one that fits a matrix of the model in {}: {first}", formats.quantization.name());
    Err(InvalidParameterError::new("sparsity", pruning.sparsity.to_string(), requirement).into())
}

/// Checks the tokens of a calibration against the vocabulary and the context of the model.
fn check_calibration(calibration: Option<&[Vec<u32>]>, spec: &ModelSpec) -> Checked<()> {
    let Some(sequences) = calibration else { return Ok(()) };
    let context = spec.max_position_embeddings;
    if sequences.is_empty() {
        let requirement = "a list of at least one sequence of tokens";
        return Err(InvalidParameterError::new("calibration", Vec::<u32>::new(), requirement));
    }
    for (index, tokens) in sequences.iter().enumerate() {
        let field = format!("calibration[{index}]");
        if tokens.is_empty() || tokens.len() > context {
            let requirement = format!("a list of 1 to {context} token ids");
            return Err(InvalidParameterError::new(field, tokens.as_slice(), requirement));
        }
        crate::parameter::check_ids(&field, tokens, spec.vocab_size)?;
    }
    Ok(())
}
