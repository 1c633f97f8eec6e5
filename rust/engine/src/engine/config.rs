//! Limits and options of an engine.

use std::path::PathBuf;
use std::time::Duration;

use crate::SpeculativeConfig;

/// What an engine may use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EngineConfig {
    /// Pages of the model's store, for each group of layers: the engine gives out numbers below these.
    pub pages: Vec<usize>,
    /// Tokens of prompt and continuation together, at the most.
    pub max_model_len: usize,
    /// Sequences that are computed side by side, at the most; never more than `max_num_batched_tokens`.
    pub max_num_seqs: usize,
    /// Tokens that one step computes, at the most: the chunk into which long prompts are cut.
    pub max_num_batched_tokens: usize,
    /// Requests that wait for a place, at the most.
    pub max_queued_requests: Option<usize>,
    /// How long a step should take at the most that computes prompts beside sequences that decode and are streamed.
    pub target_itl: Duration,
    /// Whether pages are kept for requests that begin with the same tokens.
    pub enable_prefix_caching: bool,
    /// Where they are kept beyond the life of the engine; only with prefix caching.
    pub prefix_cache_dir: Option<PrefixCacheDir>,
    /// What is guessed of the tokens to come.
    pub speculative: SpeculativeConfig,
}

/// A directory for pages.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PrefixCacheDir {
    /// The directory.
    pub path: PathBuf,
    /// Bytes that it may hold.
    pub limit: u64,
    /// Bytes that a step reads from there at the most, beyond one page: those who decode wait for it.
    pub step_bytes: usize,
}
