//! The engine: schedules requests, runs the model, samples tokens.
//!
//! Each file holds one concern of `impl Engine`:
//!
//! | file | concern |
//! |---|---|
//! | `config.rs` | limits and options ([`EngineConfig`]) |
//! | `mod.rs` | the struct and its constructors |
//! | `requests.rs` | add, fork and abort requests |
//! | `step.rs` | one step: schedule and forward pass |
//! | `in_flight.rs` | steps of a model that computes several batches at the same time |
//! | `postprocess.rs` | sampling, prefix caching and finished requests after the forward pass |
//! | `metrics.rs` | metrics, page statistics and the page audit |
//! | `failure.rs` | a panic or a lost pipeline stage ends the engine |
//! | `between_steps.rs` | work between steps, with separate pages |
//! | `logits.rs` | the logits of every token, for evaluation |
//! | `state.rs` | save and restore the KV cache of a prompt |
//! | `encode/` | embeddings, scores and label logits |

mod between_steps;
mod config;
mod encode;
mod failure;
mod in_flight;
mod logits;
mod metrics;
mod postprocess;
mod requests;
mod state;
mod step;

use std::sync::{Arc, Mutex};

use ferrule_model::LanguageModel;

use crate::beams::BeamSearches;
use crate::draft::{DraftModel, Speculator};
use crate::pages::{DiskCache, KvCacheManager, PAGE_NONE};
use crate::prefill_budget::PrefillBudget;
use crate::request::LengthLimits;
use crate::sampling::Sampler;
use crate::scheduler::{Scheduler, StepLimits};
use crate::{ConfigError, Metrics, StepOutput};
pub use config::{EngineConfig, PrefixCacheDir};
pub use encode::{EncodeError, EncodeTask, Text};
pub use failure::EngineFailure;
pub(crate) use failure::panic_message;
use in_flight::BatchesInFlight;

/// Maximum number of logits per step for prompt log-probabilities, which need a row of `vocab_size` logits per token.
const MAX_LOGITS: usize = 1 << 24;

/// Serves many requests from one model by continuous batching.
#[derive(Debug)]
pub struct Engine<M> {
    pub(crate) model: M,
    pub(crate) scheduler: Scheduler,
    pub(crate) config: EngineConfig,
    pub(crate) limits: LengthLimits,
    sampler: Sampler,
    /// Logits of the latest forward pass, `[sampled rows, vocab]`.
    pub(crate) logits: Vec<f32>,
    next_id: u64,
    prefill_budget: PrefillBudget,
    speculator: Speculator<M>,
    searches: BeamSearches,
    pub(crate) metrics: Metrics,
    /// Copy of the metrics, updated at the end of each call, so that readers do not wait for a step.
    published: Arc<Mutex<Metrics>>,
    /// Failure that ended the engine, if it is dead.
    dead: Option<EngineFailure>,
    in_flight: BatchesInFlight,
    /// Outputs that the next step returns without doing anything else.
    ready_outputs: Vec<StepOutput>,
    /// Outputs with which a later step ends the requests of a dead engine.
    final_outputs: Vec<StepOutput>,
}

impl<M: LanguageModel> Engine<M> {
    /// Creates an engine without requests.
    ///
    /// # Errors
    /// Returns [`ConfigError`] if a limit is zero or the configuration does not fit the model.
    pub fn new(model: M, config: EngineConfig) -> Result<Self, ConfigError> {
        Self::with_draft_model(model, None, config)
    }

    /// Creates an engine that drafts tokens with a second, smaller model.
    ///
    /// # Errors
    /// Returns [`ConfigError`] if a limit is zero, or the configuration or the draft model does not fit the model.
    pub fn with_draft_model(
        mut model: M,
        draft: Option<DraftModel<M>>,
        mut config: EngineConfig,
    ) -> Result<Self, ConfigError> {
        for (field, value) in [
            ("max_model_len", config.max_model_len),
            ("max_num_seqs", config.max_num_seqs),
            ("max_num_batched_tokens", config.max_num_batched_tokens),
        ] {
            if value == 0 {
                return Err(ConfigError::Zero { field });
            }
        }
        let groups = model.kv_groups();
        if groups.len() != config.pages.len() {
            return Err(ConfigError::PoolCount { expected: groups.len(), given: config.pages.len() });
        }
        let limit = PAGE_NONE as usize;
        if let Some(&pages) = config.pages.iter().find(|&&pages| pages > limit) {
            return Err(ConfigError::PoolTooLarge { pages, limit });
        }
        if !model.capabilities().causal {
            if config.prefix_cache_dir.is_some() {
                return Err(ConfigError::NoPrefixes);
            }
            config.enable_prefix_caching = false;
        }
        if config.prefix_cache_dir.is_some() && !model.has_local_pages() {
            return Err(ConfigError::RemotePages);
        }
        let speculator = Speculator::new(&config, draft, &model)?;
        let mut scheduler = new_scheduler(&mut model, &config);
        if let Some(PrefixCacheDir { path, limit, .. }) =
            config.prefix_cache_dir.as_ref().filter(|_| config.enable_prefix_caching)
        {
            scheduler.kv_cache.attach_disk(DiskCache::open(path, *limit)?, &model);
        }
        let kv_capacity = scheduler.kv_cache.tokens_of_one_sequence();
        let mut engine = Self {
            model,
            scheduler,
            limits: LengthLimits { max_model_len: config.max_model_len, kv_capacity },
            sampler: Sampler::default(),
            logits: Vec::new(),
            next_id: 0,
            prefill_budget: PrefillBudget::new(config.target_itl),
            speculator,
            searches: BeamSearches::default(),
            metrics: Metrics::default(),
            published: Arc::default(),
            dead: None,
            in_flight: BatchesInFlight::default(),
            ready_outputs: Vec::new(),
            final_outputs: Vec::new(),
            config,
        };
        engine.publish();
        Ok(engine)
    }

    /// Returns the model.
    pub fn model(&self) -> &M {
        &self.model
    }

    /// Returns the maximum number of tokens of a request (prompt plus output): the context length or the KV cache
    /// capacity, whichever is smaller.
    pub fn max_model_len(&self) -> usize {
        self.limits.tokens()
    }

    /// Returns why the engine is dead, if it is.
    pub fn dead(&self) -> Option<&str> {
        self.dead.as_ref().map(|failure| failure.reason.as_str())
    }
}

fn new_scheduler<M: LanguageModel>(model: &mut M, config: &EngineConfig) -> Scheduler {
    let kv_cache = KvCacheManager::new(model.kv_groups(), &config.pages, config.enable_prefix_caching);
    let limits = StepLimits {
        max_num_seqs: config.max_num_seqs.min(config.max_num_batched_tokens),
        max_num_batched_tokens: config.max_num_batched_tokens,
        logit_rows: MAX_LOGITS / model.vocab_size().max(1),
        fetch_bytes: config.prefix_cache_dir.as_ref().map_or(0, |directory| directory.step_bytes),
        batches: model.batch_queue().map_or(1, |queue| queue.capacity()),
    };
    Scheduler::new(kv_cache, limits)
}
