//! Outputs of a step.

use std::time::Duration;

use crate::sequence::Sequence;
use crate::{ConstraintError, EngineFailure, Hypothesis, RequestId, SampleError, SampleTrace, TokenLogprobs};

/// Reason why a request finished.
#[derive(Debug, Clone, PartialEq)]
pub enum FinishReason {
    /// The request sampled one of its stop token ids, which is also its last token.
    Stop {
        /// The stop token id.
        token: u32,
    },
    /// The grammar is complete: no token can follow.
    Complete,
    /// The request reached `max_tokens`, the context length, or the KV cache capacity.
    Length,
    /// The logits cannot be sampled. Other requests are not affected.
    Sampling(SampleError),
    /// The grammar failed. Other requests are not affected.
    Constraint(ConstraintError),
    /// The engine is dead.
    Dead(EngineFailure),
}

impl FinishReason {
    /// Returns the API name of the reason: `stop`, `length` or `error`.
    ///
    /// # Examples
    /// ```
    /// use ferrule_engine::FinishReason;
    ///
    /// let reason = FinishReason::Stop { token: 2 };
    /// assert_eq!((reason.name(), reason.stop_token()), ("stop", Some(2)));
    /// assert_eq!(FinishReason::Length.name(), "length");
    /// ```
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Self::Stop { .. } | Self::Complete => "stop",
            Self::Length => "length",
            Self::Sampling(_) | Self::Constraint(_) | Self::Dead(_) => "error",
        }
    }

    /// Returns the stop token id that finished the request.
    #[must_use]
    pub fn stop_token(&self) -> Option<u32> {
        match self {
            Self::Stop { token } => Some(*token),
            _ => None,
        }
    }

    /// Returns the index of the pipeline stage whose loss ended the request.
    #[must_use]
    pub fn lost_stage(&self) -> Option<usize> {
        match self {
            Self::Dead(failure) => failure.lost_stage,
            _ => None,
        }
    }

    /// Returns the error message if the request failed.
    #[must_use]
    pub fn error(&self) -> Option<String> {
        match self {
            Self::Sampling(error) => Some(error.to_string()),
            Self::Constraint(error) => Some(error.to_string()),
            Self::Dead(failure) => Some(format!("the engine died: {failure}")),
            Self::Stop { .. } | Self::Complete | Self::Length => None,
        }
    }
}

/// Timing and statistics of a request; durations are counted from its arrival.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RequestTiming {
    /// Time until the request was first scheduled.
    pub first_scheduled: Option<Duration>,
    /// Time until the latest part of the prompt was computed.
    pub last_prefill: Option<Duration>,
    /// Time to first token.
    pub first_token: Option<Duration>,
    /// Time until the latest token.
    pub last_token: Option<Duration>,
    /// Number of preemptions (pages freed, computed again later).
    pub preemptions: u32,
    /// Prompt tokens that came from the prefix cache or a forked request.
    pub cached_tokens: usize,
    /// Prompt tokens whose contents are in the KV cache: computed or reused. A preemption sets it back.
    pub processed_tokens: usize,
    /// Draft tokens computed.
    pub drafted_tokens: usize,
    /// Draft tokens accepted.
    pub accepted_tokens: usize,
}

impl StepOutput {
    /// Returns an output without tokens.
    pub(crate) fn empty(sequence: &Sequence) -> Self {
        Self {
            request: sequence.id,
            token_ids: Vec::new(),
            finish: None,
            logprobs: Vec::new(),
            entropies: Vec::new(),
            trace: Vec::new(),
            prompt_logprobs: Vec::new(),
            beams: Vec::new(),
            timing: sequence.timing,
        }
    }
}

/// Output of one request in one step.
#[derive(Debug, Clone, PartialEq)]
pub struct StepOutput {
    /// Request id.
    pub request: RequestId,
    /// New token ids, including a final stop token.
    pub token_ids: Vec<u32>,
    /// Finish reason; the request produces no further output once it is set.
    pub finish: Option<FinishReason>,
    /// Log-probabilities, parallel to `token_ids` if requested, else empty.
    pub logprobs: Vec<TokenLogprobs>,
    /// Entropies of the raw logits in nats, parallel to `token_ids` if requested, else empty.
    pub entropies: Vec<f64>,
    /// Sampling traces, parallel to `token_ids` if requested, else empty.
    pub trace: Vec<SampleTrace>,
    /// Further prompt log-probabilities, if requested, in prompt order.
    pub prompt_logprobs: Vec<TokenLogprobs>,
    /// Hypotheses of a finished beam search, best first. A beam search has no `token_ids`.
    pub beams: Vec<Hypothesis>,
    /// Timing so far.
    pub timing: RequestTiming,
}
