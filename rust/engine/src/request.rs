//! What a caller asks for, checked before anything is queued.

use std::sync::Arc;

use ferrule_model::Adapter;

use crate::{InvalidParameterError, SamplingParams};

/// Names a request for as long as the engine lives; numbers grow in the order of arrival.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RequestId(pub u64);

/// A prompt and how to continue it.
#[derive(Debug, Clone, PartialEq)]
pub struct Request {
    /// Token ids of the prompt.
    pub prompt: Vec<u32>,
    /// How to sample its continuation.
    pub params: SamplingParams,
    /// What is added to the model for it. It is kept until the request ends.
    pub adapter: Option<Arc<Adapter>>,
}

/// Why a request was refused. It was never queued.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RequestError {
    /// A sampling parameter is invalid.
    #[error(transparent)]
    Parameter(#[from] InvalidParameterError),
    /// The model continues nothing.
    #[error(
        "the model gives no logits that a text could be continued by: it is made to embed, classify or rerank texts"
    )]
    NoLogits,
    /// There is nothing to continue.
    #[error("the prompt is empty: it must have at least one token")]
    EmptyPrompt,
    /// Not a token of the model.
    #[error("prompt_token_ids[{index}] is {id}, but the model's token ids are 0 to {}", vocab_size.saturating_sub(1))]
    PromptToken {
        /// Where in the prompt.
        index: usize,
        /// The id.
        id: i64,
        /// Token ids of the model: those below this number.
        vocab_size: usize,
    },
    /// Logits from a token on that is not there.
    #[error("first is {first}; it must be below {tokens}, the tokens given")]
    NoTokenAt {
        /// The token asked for.
        first: usize,
        /// How many there are.
        tokens: usize,
    },
    /// Longer than the context.
    #[error(
        "the prompt has {tokens} tokens, which is too long: prompt and continuation together can have {max_model_len} \
         (max_model_len), one of them new"
    )]
    PromptTooLong {
        /// Tokens of the prompt.
        tokens: usize,
        /// Tokens of prompt and continuation together that the context holds.
        max_model_len: usize,
    },
    /// Longer than the KV pages could ever hold, even with no neighbours.
    #[error(
        "the prompt has {tokens} tokens, which is too long: the KV cache holds {capacity} tokens of one sequence, one of \
         them new; give it more memory (kv_cache_memory)"
    )]
    PromptExceedsKv {
        /// Tokens of the prompt.
        tokens: usize,
        /// Tokens of one sequence that all pages together hold.
        capacity: usize,
    },
    /// Beams that could never be computed side by side.
    #[error(
        "beam_width is {beam_width}; a step computes {limit} sequences at the most (max_num_seqs, \
         max_num_batched_tokens)"
    )]
    TooManyBeams {
        /// Beams asked for.
        beam_width: usize,
        /// Sequences that a step computes at the most.
        limit: usize,
    },
    /// Beams that the KV pages could not hold even at their first token.
    #[error(
        "beam_width is {beam_width}, which with a prompt of {tokens} tokens needs {needed} KV pages; there are {pages}: \
         give the cache more memory (kv_cache_memory)"
    )]
    BeamsExceedKv {
        /// Beams asked for.
        beam_width: usize,
        /// Tokens of the prompt.
        tokens: usize,
        /// Pages that they need.
        needed: usize,
        /// Pages that there are.
        pages: usize,
    },
    /// As many wait as may.
    #[error("the queue is full: {waiting} requests wait; the limit is max_queued_requests, {limit}")]
    QueueFull {
        /// Requests that wait.
        waiting: usize,
        /// Requests that may wait.
        limit: usize,
    },
    /// A defect of ferrule ended the engine.
    #[error("the engine is dead: {reason}")]
    Dead {
        /// What happened.
        reason: String,
    },
}

/// How long a sequence can get, and why.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct LengthLimits {
    /// Tokens of prompt and continuation that the context holds.
    pub max_model_len: usize,
    /// Tokens of one sequence that the pages hold.
    pub kv_capacity: usize,
}

impl LengthLimits {
    /// The smaller of the two.
    pub fn tokens(self) -> usize {
        self.max_model_len.min(self.kv_capacity)
    }

    /// Checks that a sequence of `tokens`, followed by `room` more, can be held.
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
    /// A request to the model alone, from ids of any size, as they come from Python.
    ///
    /// # Errors
    /// [`RequestError::PromptToken`] for an id that is not of the model.
    pub fn from_ids(ids: &[i64], vocab_size: usize, params: SamplingParams) -> Result<Self, RequestError> {
        Ok(Self { prompt: prompt_from_ids(ids, vocab_size)?, params, adapter: None })
    }
}

/// Token ids of any size, as they come from Python, as ids of the model.
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

/// Checks that a prompt has tokens, and only tokens of the model.
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
    fn ids_that_are_not_of_the_model_are_named() {
        assert_eq!(prompt_from_ids(&[], 10), Err(RequestError::EmptyPrompt));
        for id in [-1, 10, i64::MAX, i64::MIN, 1 << 32] {
            let refused = prompt_from_ids(&[0, 9, id], 10).unwrap_err();
            assert_eq!(refused, RequestError::PromptToken { index: 2, id, vocab_size: 10 });
            assert!(refused.to_string().contains(&id.to_string()) && refused.to_string().contains("0 to 9"));
        }
        assert_eq!(prompt_from_ids(&[0, 9], 10), Ok(vec![0, 9]));
    }

    #[test]
    fn lengths_are_checked_against_context_and_pages() {
        let limits = LengthLimits { max_model_len: 100, kv_capacity: 64 };
        assert_eq!(limits.check(63, 1), Ok(()));
        assert_eq!(limits.check(64, 1), Err(RequestError::PromptExceedsKv { tokens: 64, capacity: 64 }));
        assert_eq!(limits.check(100, 1), Err(RequestError::PromptTooLong { tokens: 100, max_model_len: 100 }));
        assert!(limits.check(usize::MAX, 1).unwrap_err().to_string().contains("can have 100 (max_model_len)"));
    }
}
