//! Inference engine: continuous batching of many requests on one model, with a paged KV cache. Token ids only; text
//! processing is above.
//!
//! A [`Request`] with its [`SamplingParams`] is validated and becomes a sequence in the waiting queue. In each step the
//! scheduler selects prefill chunks and decode rows and allocates pages, the model runs one ragged batch, the
//! [`sampling`] chain turns logits into tokens, and the step returns [`StepOutput`]s.
//!
//! The output of a request **depends on that request alone**: not on other requests, on how its prompt was split into
//! chunks, on prefix cache hits, or on preemption.
#![forbid(unsafe_code)]

mod beams;
mod builder;
mod draft;
mod engine;
mod error;
pub mod metrics;
mod output;
pub mod pages;
mod parameter;
mod prefill_budget;
mod request;
pub mod sampling;
mod sampling_params;
mod scheduler;
mod sequence;
pub mod structured;

pub use beams::Hypothesis;
pub use builder::{
    BuildError, EngineBuilder, EngineInfo, EngineModel, EngineOptions, KvWindow, Measurement, MemoryNeeds,
    ModelFigures, StoredType, WorkerFigures,
};
pub use draft::{DraftModel, SpeculativeConfig, SpeculativeMethod};
pub use engine::{EncodeError, EncodeTask, Engine, EngineConfig, EngineFailure, PrefixCacheDir, Text};
pub use error::{ConfigError, EngineError};
pub use metrics::Metrics;
pub use output::{FinishReason, RequestTiming, StepOutput};
pub use pages::{DiskCacheError, DiskStatistics, PAGE_NONE, PageStatistics, StateError};
pub use parameter::{Bounds, InvalidParameterError, ParameterRow};
pub use request::{FeaturesError, Request, RequestError, RequestId};
pub use sampling::{
    Distribution, LogitsProcessor, SampleError, SampleTrace, SharedProcessor, StageEffect, TokenLogprob, TokenLogprobs,
    TraceCandidate,
};
pub use sampling_params::{BeamSearchParams, EarlyStopping, SamplingParams};
pub use structured::{ConstraintError, Grammar, GrammarError, StructuredOutputs, Vocabulary, VocabularyError};
