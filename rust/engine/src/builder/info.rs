//! Figures of a model, with or without loading it.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use ferrule_kernels::arch::Isa;
use ferrule_kernels::kv::PAGE_TOKENS;
use ferrule_kernels::{Format, machine};
use ferrule_model::{
    KvGroup, LanguageModel, LoadError, ModelSpec, Needs, Quantization, WeightFiles, WeightSizes, buffer_bytes,
};
use serde::Serialize;

use super::kv_memory::DEFAULT_SHARE;
use super::{EngineModel, EngineOptions, pool};
use crate::{DraftModel, pages};

/// Figures of a model on this machine with given options.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ModelFigures {
    /// Instruction set.
    pub isa: &'static str,
    /// Number of threads.
    pub threads: usize,
    /// Number of NUMA nodes that the threads are divided among; 1 if the system places them.
    pub numa_nodes: usize,
    /// Format of the weights.
    pub quantization: &'static str,
    /// Format of the KV cache.
    pub kv_cache_dtype: &'static str,
    /// Number of weights of the matrices and of the tables that tokens are looked up in.
    pub parameters: u64,
    /// Number of weights that a token is multiplied with.
    pub parameters_per_token: u64,
    /// Number of weights of the layers' matrices, without embedding and `lm_head`.
    pub layer_parameters: u64,
    /// Number of weights of the layers that a token is multiplied with; those that several layers use are counted for
    /// each.
    pub layer_parameters_per_token: u64,
    /// Bytes of the packed matrices.
    pub weight_bytes: u64,
    /// Bytes of the packed matrices in each format.
    pub weight_bytes_by_format: BTreeMap<&'static str, u64>,
    /// Bytes of the matrices that a decode step of one sequence reads.
    pub weight_bytes_per_token: u64,
    /// Bytes of norms, biases, and tables that are held in memory.
    pub vector_bytes: u64,
    /// Bytes of tables that stay in their file, whose rows are looked up by token.
    pub table_bytes: u64,
    /// Bytes of keys and values per token.
    pub kv_bytes_per_token: u64,
    /// Attention window and KV bytes per token of each group of layers.
    pub kv_windows: Vec<KvWindow>,
    /// Bytes of the states of one sequence; a decode step reads them and writes as many.
    pub state_bytes: u64,
    /// Maximum number of sequences in a step.
    pub max_num_seqs: usize,
    /// Maximum number of tokens in a step.
    pub max_num_batched_tokens: usize,
}

/// Attention window of a group of layers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct KvWindow {
    /// Number of tokens that a token attends to; `None` for all.
    pub window: Option<usize>,
    /// Bytes of keys and values per token.
    pub bytes_per_token: u64,
}

/// Figures of an engine.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct EngineInfo {
    /// Figures of the model.
    #[serde(flatten)]
    pub model: ModelFigures,
    /// Bytes of mapped weights, including the weights of a draft model.
    pub mapped_bytes: u64,
    /// Bytes of the KV cache.
    pub kv_cache_bytes: u64,
    /// Number of tokens that the largest group of the KV cache holds; `None` for a model without a KV cache.
    pub kv_cache_tokens: Option<usize>,
    /// Maximum number of requests that wait.
    pub max_queued_requests: Option<usize>,
    /// Target inter-token latency in seconds.
    pub target_itl: f64,
    /// Whether requests share the KV cache of a common prefix.
    pub enable_prefix_caching: bool,
    /// Directory in which prefixes outlive the process.
    pub prefix_cache_dir: Option<PathBuf>,
    /// Maximum number of tokens of a sequence, by context and KV cache.
    pub max_model_len: usize,
    /// Figures of the workers, stage by stage and in the order of ranks; empty for a model in one process.
    pub workers: Vec<WorkerFigures>,
}

/// Figures of a worker: one process of a pipeline stage.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct WorkerFigures {
    /// Index of the stage.
    pub stage: usize,
    /// First layer.
    pub first_layer: usize,
    /// Number of layers.
    pub layers: usize,
    /// Rank among the workers that divide the rows of the stage's matrices.
    pub rank: usize,
    /// Bytes of the weights of this worker, with norms, biases and tables.
    pub weight_bytes: u64,
}

/// Figures of a model that is not loaded, and the memory that it needs.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Measurement {
    /// Figures of the model.
    #[serde(flatten)]
    pub model: ModelFigures,
    /// Bytes of mapped weights.
    pub mapped_bytes: u64,
    /// Bytes of the tensors in the files; `None` for random weights.
    pub checkpoint_bytes: Option<u64>,
    /// Tensors of each stored type; `None` for random weights.
    pub stored_types: Option<BTreeMap<&'static str, StoredType>>,
    /// Maximum number of tokens of a sequence.
    pub max_model_len: usize,
    /// Memory that the model needs.
    pub memory: MemoryNeeds,
}

/// Tensors of a stored type.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct StoredType {
    /// Number of tensors.
    pub tensors: usize,
    /// Bytes of the tensors.
    pub bytes: u64,
}

/// Memory for a model and one sequence of the maximum length, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct MemoryNeeds {
    /// Packed matrices.
    pub weights: u64,
    /// Norms, biases and tables.
    pub vectors: u64,
    /// KV cache of the sequence.
    pub kv_cache: u64,
    /// Buffers between the operations of a step.
    pub buffers: u64,
    /// Sum of the above.
    pub needed: u64,
    /// Free memory.
    pub available: u64,
    /// Number of tokens of one sequence that an engine could hold.
    pub holds_tokens: usize,
}

impl ModelFigures {
    fn new(
        weights: &WeightSizes,
        quantization: Quantization,
        groups: &[KvGroup],
        options: &EngineOptions,
        isa: Isa,
    ) -> Self {
        let by_format = Format::ALL.iter().zip(weights.bytes_by_format).filter(|(_, bytes)| *bytes > 0);
        let per_token = |bytes: u64| bytes / PAGE_TOKENS as u64;
        let paged = || groups.iter().filter(|group| !group.is_state());
        let window =
            |group: &KvGroup| KvWindow { window: group.window(), bytes_per_token: per_token(group.page_bytes) };
        let pool = pool(options);
        Self {
            isa: isa.name(),
            threads: pool.threads(),
            numa_nodes: pool.nodes(),
            quantization: quantization.name(),
            kv_cache_dtype: options.kv_format().name(),
            parameters: weights.parameters,
            parameters_per_token: weights.parameters_per_token,
            layer_parameters: weights.layer_parameters,
            layer_parameters_per_token: weights.layer_parameters_per_token,
            weight_bytes: weights.weight_bytes,
            weight_bytes_by_format: by_format.map(|(format, bytes)| (format.name(), bytes)).collect(),
            weight_bytes_per_token: weights.weight_bytes_per_token,
            vector_bytes: weights.vector_bytes,
            table_bytes: weights.table_bytes,
            kv_bytes_per_token: per_token(paged().map(|group| group.page_bytes).sum()),
            kv_windows: paged().map(window).collect(),
            state_bytes: groups.iter().filter(|group| group.is_state()).map(|group| group.page_bytes).sum(),
            max_num_seqs: options.max_num_seqs,
            max_num_batched_tokens: options.max_num_batched_tokens,
        }
    }
}

impl EngineInfo {
    pub(super) fn new(
        model: &EngineModel,
        draft: Option<&DraftModel<EngineModel>>,
        options: &EngineOptions,
        isa: Isa,
        pages: &[usize],
    ) -> Self {
        let groups = model.kv_groups();
        let bytes = groups.iter().zip(pages).map(|(group, &pages)| group.page_bytes * pages as u64);
        let paged = groups.iter().zip(pages).filter(|(group, _)| !group.is_state()).map(|(_, pages)| pages);
        Self {
            model: ModelFigures::new(&model.weight_sizes(), model.quantization(), groups, options, isa),
            mapped_bytes: model.mapped_bytes() + draft.map_or(0, |draft| draft.model.mapped_bytes()),
            kv_cache_bytes: bytes.sum(),
            kv_cache_tokens: paged.max().map(|pages| pages * PAGE_TOKENS),
            max_queued_requests: options.max_queued_requests,
            target_itl: options.target_itl.as_secs_f64(),
            enable_prefix_caching: options.enable_prefix_caching && model.capabilities().causal,
            prefix_cache_dir: options.prefix_cache_dir.clone(),
            max_model_len: 0,
            workers: model
                .stage_infos()
                .enumerate()
                .map(|(index, info)| WorkerFigures {
                    stage: index / info.ranks,
                    first_layer: info.first,
                    layers: info.end - info.first,
                    rank: info.rank,
                    weight_bytes: info.weight_bytes,
                })
                .collect(),
        }
    }
}

/// Measures a model without loading it.
pub(super) fn measure(
    spec: &ModelSpec,
    weights: Option<&Path>,
    options: &EngineOptions,
    isa: Isa,
) -> Result<Measurement, LoadError> {
    let files = WeightFiles::open(weights, spec, options.mmap)?;
    let source = files.source(options.allow_paging);
    let quantization = options.quantization.unwrap_or_else(|| Quantization::auto(source, spec.causal));
    let Needs { weights, kv_groups } = ferrule_model::measure(spec, source, quantization, options.kv_format())?;
    let is_mapped = options.mmap && matches!(files, WeightFiles::Packed(_));
    let max_model_len = options.max_model_len.unwrap_or(spec.max_position_embeddings);
    let EngineOptions { max_num_seqs, max_num_batched_tokens: chunk, .. } = *options;

    // The measured step has one sequence of the maximum length. Its prompt is computed in chunks, except by an encoder,
    // and one row of a chunk has logits.
    let kv_cache = pages::bytes_of_one(&kv_groups, max_model_len, chunk);
    let rows = if spec.causal { chunk.min(max_model_len) } else { max_model_len };
    let buffers = buffer_bytes(spec, rows, 1);
    let kept = weights.weight_bytes.saturating_add(weights.vector_bytes);
    let available = if is_mapped { machine::memory_for_files() } else { machine::available_memory() };
    // An engine uses part of the memory that the weights leave.
    let budget = options.kv_cache_memory.unwrap_or(available.saturating_sub(kept) / DEFAULT_SHARE);
    let held = pages::divide(&kv_groups, budget, max_model_len, max_num_seqs, chunk)
        .map_or(0, |pages| pages::tokens_of_one(&kv_groups, &pages).min(max_model_len));

    let stored = files.stored();
    Ok(Measurement {
        model: ModelFigures::new(&weights, quantization, &kv_groups, options, isa),
        mapped_bytes: if is_mapped { weights.weight_bytes } else { 0 },
        checkpoint_bytes: stored.as_ref().map(|(bytes, _)| *bytes),
        stored_types: stored.map(|(_, types)| {
            types.into_iter().map(|(name, (tensors, bytes))| (name, StoredType { tensors, bytes })).collect()
        }),
        max_model_len,
        memory: MemoryNeeds {
            weights: weights.weight_bytes,
            vectors: weights.vector_bytes,
            kv_cache,
            buffers,
            needed: kept.saturating_add(kv_cache).saturating_add(buffers),
            available,
            holds_tokens: if kept > available { 0 } else { held },
        },
    })
}
