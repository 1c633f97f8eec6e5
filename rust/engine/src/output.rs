//! What a step gives back.

use std::time::Duration;

use crate::sequence::Sequence;
use crate::{ConstraintError, Hypothesis, RequestId, SampleError, SampleTrace, TokenLogprobs};

/// Why a request ended.
#[derive(Debug, Clone, PartialEq)]
pub enum FinishReason {
    /// It sampled one of its stop ids, which is also the last of its tokens.
    Stop {
        /// The stop id.
        token: u32,
    },
    /// Its grammar is complete: nothing can follow.
    Complete,
    /// It has `max_tokens` tokens, or the context or the KV pool holds no more of it.
    Length,
    /// Its logits cannot be sampled from. Its neighbours go on.
    Sampling(SampleError),
    /// Its grammar cannot be followed any further. Its neighbours go on.
    Constraint(ConstraintError),
    /// The engine died.
    Dead {
        /// What happened.
        reason: String,
    },
}

impl FinishReason {
    /// The field's word for it: `stop`, `length` or `error`.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Self::Stop { .. } | Self::Complete => "stop",
            Self::Length => "length",
            Self::Sampling(_) | Self::Constraint(_) | Self::Dead { .. } => "error",
        }
    }

    /// The stop id that ended the request.
    #[must_use]
    pub fn stop_token(&self) -> Option<u32> {
        match self {
            Self::Stop { token } => Some(*token),
            _ => None,
        }
    }

    /// What went wrong, where something did.
    #[must_use]
    pub fn error(&self) -> Option<String> {
        match self {
            Self::Sampling(error) => Some(error.to_string()),
            Self::Constraint(error) => Some(error.to_string()),
            Self::Dead { reason } => Some(format!("the engine died: {reason}")),
            Self::Stop { .. } | Self::Complete | Self::Length => None,
        }
    }
}

/// When things happened to a request, counted from its arrival.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RequestTiming {
    /// Until it was first part of a batch.
    pub first_scheduled: Option<Duration>,
    /// Until its first token was sampled: the time to first token.
    pub first_token: Option<Duration>,
    /// Until its latest token was sampled.
    pub last_token: Option<Duration>,
    /// How often it gave its pages up and was computed again.
    pub preemptions: u32,
    /// Tokens of its prompt that were not computed, since their keys and values were there.
    pub cached_tokens: usize,
    /// Tokens that were computed as drafts.
    pub drafted_tokens: usize,
    /// Those of them that were sampled indeed.
    pub accepted_tokens: usize,
}

impl StepOutput {
    /// Nothing yet.
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

/// What one request got in one step.
#[derive(Debug, Clone, PartialEq)]
pub struct StepOutput {
    /// The request.
    pub request: RequestId,
    /// Its new tokens, a stop id included.
    pub token_ids: Vec<u32>,
    /// Why it ended, if it did; nothing more comes for this request then.
    pub finish: Option<FinishReason>,
    /// Parallel to `token_ids` where log-probabilities were asked for, else empty.
    pub logprobs: Vec<TokenLogprobs>,
    /// Parallel to `token_ids` where entropies of the raw logits were asked for, else empty. In nats.
    pub entropies: Vec<f64>,
    /// Parallel to `token_ids` where a trace was asked for, else empty.
    pub trace: Vec<SampleTrace>,
    /// Where they were asked for, those of the tokens of the prompt that follow the ones told before.
    pub prompt_logprobs: Vec<TokenLogprobs>,
    /// What a beam search has found, with its end; the best first. It has no tokens else.
    pub beams: Vec<Hypothesis>,
    /// When things happened so far.
    pub timing: RequestTiming,
}
