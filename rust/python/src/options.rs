//! How a model is loaded and served: the engine's options, checked.

use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::time::Duration;

use ferrule_engine::{PrefixCacheDir, SpeculativeConfig, SpeculativeMethod};
use ferrule_kernels::kv::KvFormat;
use ferrule_kernels::{Format, machine};
use ferrule_model::{ModelSpec, Quantization};
use pyo3::{PyErr, PyResult};
use serde::Deserialize;

use crate::errors::invalid;

/// More threads than any machine that this is built for has processors.
const MAX_THREADS: i64 = 1024;
/// Sequences at once where the caller does not say: enough to fill a small server, few enough for small memories.
const DEFAULT_MAX_NUM_SEQS: i64 = 64;
const MAX_NUM_SEQS: i64 = 65_536;
/// Tokens of a step where the caller does not say: long enough to keep the matmuls at their peak.
const DEFAULT_MAX_NUM_BATCHED_TOKENS: i64 = 512;
const MAX_NUM_BATCHED_TOKENS: i64 = 65_536;
const MAX_QUEUED_REQUESTS: i64 = i32::MAX as i64;
/// Seconds of a step where the caller does not say: the next token of those who decode comes well within what a reader
/// notices, and the matmuls still have rows enough.
const DEFAULT_TARGET_ITL: f64 = 0.15;
const MAX_TARGET_ITL: f64 = 3600.0;
/// Bytes of a prefix cache's directory where the caller does not say.
const DEFAULT_PREFIX_CACHE_DIR_LIMIT: i64 = 8 << 30;
/// Bytes of it that a step reads: some hundredths of a second.
const PREFIX_CACHE_STEP_BYTES: usize = 32 << 20;

/// Drafts of a sequence in a step, at the most.
const MAX_SPECULATIVE_TOKENS: i64 = 64;
/// Tokens that a prompt lookup compares, at the most.
const MAX_PROMPT_LOOKUP: i64 = 64;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawSpeculative {
    num_speculative_tokens: i64,
    /// The least and the most tokens that are looked for; none where there is no lookup.
    prompt_lookup: Option<(i64, i64)>,
    adaptive: bool,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Raw {
    quantization: String,
    threads: Option<i64>,
    max_model_len: Option<i64>,
    mmap: bool,
    allow_paging: bool,
    kv_cache_dtype: String,
    kv_cache_memory: Option<i64>,
    max_num_seqs: Option<i64>,
    max_num_batched_tokens: Option<i64>,
    max_queued_requests: Option<i64>,
    target_itl: Option<f64>,
    enable_prefix_caching: bool,
    prefix_cache_dir: Option<PathBuf>,
    prefix_cache_dir_limit: Option<i64>,
    speculative_config: Option<RawSpeculative>,
}

/// Checked options.
pub(crate) struct Options {
    /// None for what suits the weights as they are stored.
    pub quantization: Option<Quantization>,
    pub kv_format: KvFormat,
    pub threads: NonZeroUsize,
    /// Whether a packed file is mapped, or read into memory.
    pub mmap: bool,
    /// Whether weights may be more than memory holds, where they are mapped.
    pub allow_paging: bool,
    /// Tokens of a sequence, prompt and output together.
    pub max_model_len: usize,
    /// Bytes.
    pub kv_cache_memory: Option<u64>,
    pub max_num_seqs: usize,
    pub max_num_batched_tokens: usize,
    pub max_queued_requests: Option<usize>,
    pub target_itl: Duration,
    pub enable_prefix_caching: bool,
    pub prefix_cache_dir: Option<PrefixCacheDir>,
    pub speculative: SpeculativeConfig,
}

impl Options {
    pub fn from_json(json: &str, spec: &ModelSpec) -> PyResult<Self> {
        let raw: Raw = serde_json::from_str(json)
            .map_err(|error| invalid("options", serde_json::Value::Null, error.to_string()))?;
        let name = raw.quantization.as_str();
        let unknown = || choice("quantization", name, Quantization::ALL.iter().map(|each| each.name()));
        let quantization = if name == "auto" { None } else { Some(Quantization::named(name).ok_or_else(unknown)?) };
        let kv_format = match raw.kv_cache_dtype.as_str() {
            // Exact where the weights are asked for exactly; half the bytes, and as much of the speed, elsewhere.
            "auto" if quantization.is_some_and(|each| each.is_all(Format::F32)) => KvFormat::F32,
            "auto" => KvFormat::F16,
            name => KvFormat::named(name)
                .ok_or_else(|| choice("kv_cache_dtype", name, KvFormat::ALL.iter().map(|format| format.name())))?,
        };
        let context = i64::try_from(spec.max_position_embeddings).unwrap_or(i64::MAX);
        let threads = i64::try_from(machine::cpu_count().get()).unwrap_or(1);
        let target_itl = raw.target_itl.unwrap_or(DEFAULT_TARGET_ITL);
        if !(target_itl > 0.0 && target_itl <= MAX_TARGET_ITL) {
            return Err(invalid("target_itl", target_itl, format!("a number > 0 and <= {MAX_TARGET_ITL}")));
        }
        let limit = raw.prefix_cache_dir_limit.unwrap_or(DEFAULT_PREFIX_CACHE_DIR_LIMIT);
        let limit = within("prefix_cache_dir_limit", limit, i64::MAX)? as u64;
        if raw.prefix_cache_dir.is_some() && !raw.enable_prefix_caching {
            return Err(invalid("enable_prefix_caching", false, "true with prefix_cache_dir"));
        }
        let threads = within("threads", raw.threads.unwrap_or(threads), MAX_THREADS)?;
        Ok(Self {
            quantization,
            kv_format,
            threads: NonZeroUsize::new(threads).unwrap_or(NonZeroUsize::MIN),
            mmap: raw.mmap,
            allow_paging: raw.allow_paging,
            max_model_len: within("max_model_len", raw.max_model_len.unwrap_or(context), context)?,
            kv_cache_memory: raw
                .kv_cache_memory
                .map(|bytes| within("kv_cache_memory", bytes, i64::MAX))
                .transpose()?
                .map(|bytes| bytes as u64),
            max_num_seqs: within("max_num_seqs", raw.max_num_seqs.unwrap_or(DEFAULT_MAX_NUM_SEQS), MAX_NUM_SEQS)?,
            max_num_batched_tokens: within(
                "max_num_batched_tokens",
                raw.max_num_batched_tokens.unwrap_or(DEFAULT_MAX_NUM_BATCHED_TOKENS),
                MAX_NUM_BATCHED_TOKENS,
            )?,
            max_queued_requests: raw
                .max_queued_requests
                .map(|requests| within("max_queued_requests", requests, MAX_QUEUED_REQUESTS))
                .transpose()?,
            target_itl: Duration::from_secs_f64(target_itl),
            enable_prefix_caching: raw.enable_prefix_caching,
            prefix_cache_dir: raw.prefix_cache_dir.map(|path| PrefixCacheDir {
                path,
                limit,
                step_bytes: PREFIX_CACHE_STEP_BYTES,
            }),
            speculative: raw.speculative_config.map_or_else(|| Ok(SpeculativeConfig::default()), speculative)?,
        })
    }
}

fn speculative(raw: RawSpeculative) -> PyResult<SpeculativeConfig> {
    let method = |(shortest, longest)| {
        let longest = within("prompt_lookup_max", longest, MAX_PROMPT_LOOKUP)?;
        let shortest = within("prompt_lookup_min", shortest, longest as i64)?;
        Ok::<_, PyErr>(SpeculativeMethod::Ngram { shortest, longest })
    };
    Ok(SpeculativeConfig {
        method: raw.prompt_lookup.map(method).transpose()?,
        num_speculative_tokens: within("num_speculative_tokens", raw.num_speculative_tokens, MAX_SPECULATIVE_TOKENS)?,
        adaptive: raw.adaptive,
    })
}

fn within(field: &str, value: i64, limit: i64) -> PyResult<usize> {
    if (1..=limit).contains(&value) {
        return Ok(value as usize);
    }
    Err(invalid(field, value, format!("an integer from 1 to {limit}")))
}

fn choice(field: &str, value: &str, known: impl Iterator<Item = &'static str>) -> PyErr {
    let known: Vec<_> = ["auto"].into_iter().chain(known).collect();
    invalid(field, value, format!("one of {}", known.join(", ")))
}
