//! Requests in, token ids out: the loop that serves many sequences from one model and one pool of pages.
//!
//! Read it as the life of a request: [`Request`] with its [`SamplingParams`] is checked once and becomes a sequence;
//! the scheduler picks what every step computes and hands out pages; the model computes one ragged batch; the
//! [`sampling`] chain turns logits into a token; the step's [`StepOutput`]s go up. Token ids only: text lives above.
//!
//! The promise kept here: **what a request gets depends on the request alone**. Not on its neighbours, on how its
//! prompt was cut into chunks, on whether a part of it came from the prefix cache, or on whether it had to give its
//! pages up and was computed again.
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
    BuildError, EngineBuilder, EngineInfo, EngineOptions, KvWindow, Measurement, MemoryNeeds, ModelFigures, StoredType,
};
pub use draft::{DraftModel, SpeculativeConfig, SpeculativeMethod};
pub use engine::{EncodeError, EncodeTask, Engine, EngineConfig, PrefixCacheDir, Text};
pub use error::{ConfigError, EngineError};
pub use metrics::Metrics;
pub use output::{FinishReason, RequestTiming, StepOutput};
pub use pages::{DiskCacheError, DiskStatistics, PAGE_NONE, PageStatistics, StateError};
pub use parameter::{Bounds, InvalidParameterError, ParameterRow};
pub use request::{Request, RequestError, RequestId};
pub use sampling::{
    Distribution, LogitsProcessor, SampleError, SampleTrace, SharedProcessor, StageEffect, TokenLogprob, TokenLogprobs,
    TraceCandidate,
};
pub use sampling_params::{BeamSearchParams, EarlyStopping, SamplingParams};
pub use structured::{ConstraintError, Grammar, GrammarError, StructuredOutputs, Vocabulary, VocabularyError};
