//! Limits and options of an engine.

use std::path::PathBuf;
use std::time::Duration;

use crate::SpeculativeConfig;

/// Limits and options of an [`Engine`](crate::Engine).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EngineConfig {
    /// Number of KV pages per group of layers; page numbers are below these.
    pub pages: Vec<usize>,
    /// Maximum number of tokens of a sequence: prompt plus output.
    pub max_model_len: usize,
    /// Maximum number of running sequences; capped at `max_num_batched_tokens`.
    pub max_num_seqs: usize,
    /// Maximum number of tokens in one step; longer prompts are split into chunks of this size.
    pub max_num_batched_tokens: usize,
    /// Maximum number of waiting requests; unlimited if `None`.
    pub max_queued_requests: Option<usize>,
    /// Target time between two tokens of a streamed sequence that decodes while prompts are computed: one step, or with
    /// pipeline stages one step of each batch in flight.
    pub target_itl: Duration,
    /// Whether full pages stay cached for later requests that start with the same tokens.
    pub enable_prefix_caching: bool,
    /// Directory in which cached pages outlive the engine; requires prefix caching.
    pub prefix_cache_dir: Option<PrefixCacheDir>,
    /// Speculative decoding.
    pub speculative: SpeculativeConfig,
}

/// Disk tier of the prefix cache.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PrefixCacheDir {
    /// Path of the directory.
    pub path: PathBuf,
    /// Maximum size of the directory in bytes.
    pub limit: u64,
    /// Maximum bytes that one step reads from disk beyond the first page, because running sequences wait for the read.
    pub step_bytes: usize,
}
