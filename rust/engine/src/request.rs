//! Requests, and the checks before one is queued.

use std::ops::Range;
use std::sync::Arc;

use ferrule_model::{Adapter, Capabilities, Features};

use crate::{EngineFailure, InvalidParameterError, SamplingParams};

/// Number of a request, unique in its engine; numbers increase in the order of arrival.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RequestId(pub u64);

/// A prompt with its sampling parameters.
#[derive(Debug, Clone, PartialEq)]
pub struct Request {
    /// Token ids of the prompt.
    pub prompt: Vec<u32>,
    /// Sampling parameters of the continuation.
    pub params: SamplingParams,
    /// LoRA adapter of the request, held until the request ends.
    pub adapter: Option<Arc<Adapter>>,
    /// Features of prompt tokens, in the order of their positions. They do not overlap.
    pub features: Vec<Features>,
}

/// Reason that a request was refused. It was never queued.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RequestError {
    /// A sampling parameter is invalid.
    #[error(transparent)]
    Parameter(#[from] InvalidParameterError),
    /// The model does not generate text.
    #[error("the model gives no logits: it is made to embed, classify or rerank texts, and does not generate")]
    NoLogits,
    /// The features of a prompt are invalid.
    #[error(transparent)]
    Features(#[from] FeaturesError),
    /// The prompt is empty.
    #[error("the prompt is empty: it must have at least one token")]
    EmptyPrompt,
    /// A token id of the prompt is outside the vocabulary.
    #[error("prompt_token_ids[{index}] must be 0 to {}, a token id of the model, got {id}", vocab_size.saturating_sub(1))]
    PromptToken {
        /// Position in the prompt.
        index: usize,
        /// Token id that was found.
        id: i64,
        /// Number of tokens in the vocabulary.
        vocab_size: usize,
    },
    /// Logits are requested from a position beyond the tokens.
    #[error("first must be < {tokens}, the number of tokens, got {first}")]
    NoTokenAt {
        /// Position of the first token with logits.
        first: usize,
        /// Number of tokens.
        tokens: usize,
    },
    /// The prompt is longer than the context.
    #[error(
        "the prompt has {tokens} tokens, which is too long: prompt and continuation together can have {max_model_len} \
         (max_model_len), one of them new"
    )]
    PromptTooLong {
        /// Number of tokens in the prompt.
        tokens: usize,
        /// Maximum number of tokens of prompt and continuation together.
        max_model_len: usize,
    },
    /// The prompt is longer than the whole KV cache.
    #[error(
        "the prompt has {tokens} tokens, which is too long: the KV cache holds {capacity} tokens of one sequence, one of \
         them new; give it more memory (kv_cache_memory)"
    )]
    PromptExceedsKv {
        /// Number of tokens in the prompt.
        tokens: usize,
        /// Number of tokens of one sequence that the KV cache holds.
        capacity: usize,
    },
    /// A step cannot compute so many beams.
    #[error(
        "beam_width must be <= {limit}, the sequences of a step (max_num_seqs, max_num_batched_tokens), got {beam_width}"
    )]
    TooManyBeams {
        /// Number of beams.
        beam_width: usize,
        /// Maximum number of sequences in a step.
        limit: usize,
    },
    /// The KV cache does not hold the first token of so many beams.
    #[error(
        "beam_width must be smaller, or kv_cache_memory larger, got {beam_width}: with a prompt of {tokens} tokens it \
         needs {needed} KV pages of {pages}"
    )]
    BeamsExceedKv {
        /// Number of beams.
        beam_width: usize,
        /// Number of tokens in the prompt.
        tokens: usize,
        /// Number of pages that the beams need.
        needed: usize,
        /// Number of pages in the KV cache.
        pages: usize,
    },
    /// The request queue is full.
    #[error("the request queue is full ({waiting} waiting; the limit is max_queued_requests {limit})")]
    QueueFull {
        /// Number of requests that wait.
        waiting: usize,
        /// Maximum number of requests that wait.
        limit: usize,
    },
    /// A failure ended the engine.
    #[error("the engine is dead: {0}")]
    Dead(EngineFailure),
}

/// Features do not fit the model or the tokens.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum FeaturesError {
    /// The model takes token ids alone.
    #[error(
        "features are not supported: the model takes token ids alone (as all models do with pipeline or tensor parallelism)"
    )]
    Unsupported,
    /// Rows have another width than embeddings.
    #[error("a row of features must have {expected} numbers, as the model's embeddings, got {found}")]
    Width {
        /// Numbers of a row.
        found: usize,
        /// Width of embeddings.
        expected: usize,
    },
    /// Positions overlap, or are beyond the tokens.
    #[error("features of positions {first} to {end} must follow those before and end within the {tokens} tokens")]
    Positions {
        /// First position.
        first: usize,
        /// Position after the last one.
        end: usize,
        /// Number of tokens.
        tokens: usize,
    },
    /// A token has neither an embedding nor features.
    #[error("the model has no token embeddings, so all {tokens} tokens need features, got {found}")]
    Missing {
        /// Number of tokens with features.
        found: usize,
        /// Number of tokens.
        tokens: usize,
    },
}

/// Checks that features fit the model and are in order within `tokens` tokens.
pub(crate) fn check_features(
    features: &[Features],
    tokens: usize,
    capabilities: &Capabilities,
) -> Result<(), FeaturesError> {
    let (mut after, mut found) = (0, 0);
    for one in features {
        let Some(expected) = capabilities.feature_width else { return Err(FeaturesError::Unsupported) };
        if one.width() != expected {
            return Err(FeaturesError::Width { found: one.width(), expected });
        }
        let Range { start: first, end } = one.positions();
        if first < after || end > tokens {
            return Err(FeaturesError::Positions { first, end, tokens });
        }
        (after, found) = (end, found + end - first);
    }
    if !capabilities.embeds_tokens && found < tokens {
        return Err(FeaturesError::Missing { found, tokens });
    }
    Ok(())
}

/// Limits of the length of a sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct LengthLimits {
    /// Maximum number of tokens of prompt and continuation together.
    pub max_model_len: usize,
    /// Number of tokens of one sequence that the KV cache holds.
    pub kv_capacity: usize,
}

impl LengthLimits {
    /// Returns the smaller limit.
    pub fn tokens(self) -> usize {
        self.max_model_len.min(self.kv_capacity)
    }

    /// Checks that a sequence of `tokens`, followed by `room` more, fits.
    pub fn check(self, tokens: usize, room: usize) -> Result<(), RequestError> {
        let needed = tokens.saturating_add(room);
        if needed > self.max_model_len {
            return Err(RequestError::PromptTooLong { tokens, max_model_len: self.max_model_len });
        }
        if needed > self.kv_capacity {
            return Err(RequestError::PromptExceedsKv { tokens, capacity: self.kv_capacity });
        }
        Ok(())
    }
}

impl Request {
    /// Returns a request without an adapter and features.
    #[must_use]
    pub fn new(prompt: Vec<u32>, params: SamplingParams) -> Self {
        Self { prompt, params, adapter: None, features: Vec::new() }
    }

    /// Returns a request without an adapter and features. Ids may have any size, as they come from Python.
    ///
    /// # Errors
    /// [`RequestError::EmptyPrompt`], [`RequestError::PromptToken`] for an id outside the vocabulary.
    pub fn from_ids(ids: &[i64], vocab_size: usize, params: SamplingParams) -> Result<Self, RequestError> {
        Ok(Self::new(prompt_from_ids(ids, vocab_size)?, params))
    }
}

/// Converts token ids of any size, as they come from Python, to ids of the model.
///
/// # Errors
/// [`RequestError::EmptyPrompt`], [`RequestError::PromptToken`].
pub(crate) fn prompt_from_ids(ids: &[i64], vocab_size: usize) -> Result<Vec<u32>, RequestError> {
    let prompt: Vec<u32> = ids
        .iter()
        .enumerate()
        .map(|(index, &id)| u32::try_from(id).map_err(|_| RequestError::PromptToken { index, id, vocab_size }))
        .collect::<Result<_, _>>()?;
    check_prompt(&prompt, vocab_size)?;
    Ok(prompt)
}

/// Checks that a prompt is not empty and has only tokens of the vocabulary.
pub(crate) fn check_prompt(prompt: &[u32], vocab_size: usize) -> Result<(), RequestError> {
    if prompt.is_empty() {
        return Err(RequestError::EmptyPrompt);
    }
    match prompt.iter().position(|&id| id as usize >= vocab_size) {
        Some(index) => Err(RequestError::PromptToken { index, id: i64::from(prompt[index]), vocab_size }),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_outside_the_vocabulary_are_named() {
        assert_eq!(prompt_from_ids(&[], 10), Err(RequestError::EmptyPrompt));
        for id in [-1, 10, i64::MAX, i64::MIN, 1 << 32] {
            let refused = prompt_from_ids(&[0, 9, id], 10).unwrap_err();
            assert_eq!(refused, RequestError::PromptToken { index: 2, id, vocab_size: 10 });
            assert!(refused.to_string().contains(&id.to_string()) && refused.to_string().contains("0 to 9"));
        }
        assert_eq!(prompt_from_ids(&[0, 9], 10), Ok(vec![0, 9]));
    }

    #[test]
    fn features_fit_the_model_and_the_tokens() {
        let rows = |first, tokens: usize, width: usize| Features::new(first, vec![0.5; tokens * width].into(), width);
        let model = Capabilities {
            causal: true,
            logits: true,
            hidden_size: 8,
            embedding_size: 8,
            token_types: 1,
            feature_width: Some(4),
            embeds_tokens: true,
            merged_rows: 1,
            classifier: None,
        };
        let text_only = Capabilities { feature_width: None, ..model };
        assert_eq!(check_features(&[], 9, &text_only), Ok(()));
        assert_eq!(check_features(&[rows(0, 1, 4)], 9, &text_only), Err(FeaturesError::Unsupported));
        assert_eq!(check_features(&[rows(0, 2, 4), rows(2, 3, 4), rows(7, 2, 4)], 9, &model), Ok(()));
        assert_eq!(check_features(&[rows(0, 2, 3)], 9, &model), Err(FeaturesError::Width { found: 3, expected: 4 }));
        let overlap = [rows(0, 3, 4), rows(2, 3, 4)];
        let error = FeaturesError::Positions { first: 2, end: 5, tokens: 9 };
        assert_eq!(check_features(&overlap, 9, &model), Err(error));
        assert!(check_features(&[rows(8, 2, 4)], 9, &model).unwrap_err().to_string().contains("8 to 10"));
        let tower = Capabilities { embeds_tokens: false, ..model };
        assert_eq!(check_features(&[rows(0, 5, 4), rows(5, 4, 4)], 9, &tower), Ok(()));
        let missing = FeaturesError::Missing { found: 8, tokens: 9 };
        assert_eq!(check_features(&[rows(0, 5, 4), rows(6, 3, 4)], 9, &tower), Err(missing));
    }

    #[test]
    fn lengths_are_checked_against_context_and_kv_cache() {
        let limits = LengthLimits { max_model_len: 100, kv_capacity: 64 };
        assert_eq!(limits.check(63, 1), Ok(()));
        assert_eq!(limits.check(64, 1), Err(RequestError::PromptExceedsKv { tokens: 64, capacity: 64 }));
        assert_eq!(limits.check(100, 1), Err(RequestError::PromptTooLong { tokens: 100, max_model_len: 100 }));
        assert!(limits.check(usize::MAX, 1).unwrap_err().to_string().contains("can have 100 (max_model_len)"));
    }
}
