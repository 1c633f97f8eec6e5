//! What is encoded and what is made of it, checked before anything runs.

use std::sync::Arc;

use ferrule_model::{Abilities, Pooling};
use serde::Deserialize;

use crate::request::LengthLimits;

/// A text as the model reads it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Text {
    /// Token ids.
    pub tokens: Vec<u32>,
    /// The kind of each token; empty where all are of the first.
    pub token_types: Vec<u32>,
    /// Kept pages are shared with texts and prompts of the same salt alone.
    pub cache_salt: Option<Arc<str>>,
}

/// What is made of each text.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case", deny_unknown_fields)]
pub enum EncodeTask {
    /// An embedding, `[dimensions]`.
    Embedding {
        /// From which hidden state.
        pooling: Pooling,
        /// Whether its length becomes 1.
        normalize: bool,
        /// How many of its leading numbers are kept, before it is normalized; all if none.
        dimensions: Option<usize>,
    },
    /// The hidden state of every token, `[tokens, hidden_size]`.
    TokenEmbeddings {
        /// Whether the length of each becomes 1.
        normalize: bool,
    },
    /// The classifier's scores, `[labels]`.
    Scores {},
    /// Logits of some tokens of the vocabulary for the place after the text, `[tokens]`.
    Logits {
        /// Of which.
        tokens: Vec<u32>,
    },
    /// The most likely next tokens after every token of the text, `[tokens, 2, count]`: ids, as the bits of these
    /// numbers, and natural logarithms of probabilities, most likely first.
    TopLogprobs {
        /// How many.
        count: usize,
    },
}

/// Why a text or a task was refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum EncodeError {
    /// Not a task.
    #[error("the task is malformed: {message}")]
    Malformed {
        /// What is wrong.
        message: String,
    },
    /// More numbers of an embedding than it has.
    #[error("dimensions is {dimensions}; it must be in 1..={embedding_size}")]
    Dimensions {
        /// What was asked for.
        dimensions: usize,
        /// Numbers of an embedding.
        embedding_size: usize,
    },
    /// More tokens than there are, or none.
    #[error("count is {count}; it must be in 1..={vocab_size}")]
    Count {
        /// What was asked for.
        count: usize,
        /// Tokens of the vocabulary.
        vocab_size: usize,
    },
    /// There are no logits.
    #[error("the model gives no logits: it is made to embed, classify or rerank texts")]
    NoLogits,
    /// There is no classifier.
    #[error("the model has no classifier")]
    NoClassifier,
    /// Nothing to read.
    #[error("text {text} is empty: it must have at least one token")]
    Empty {
        /// Which.
        text: usize,
    },
    /// Longer than the context, or than the pages hold.
    #[error("text {text} has {tokens} tokens; the limit is {limit}")]
    TooLong {
        /// Which.
        text: usize,
        /// Its tokens.
        tokens: usize,
        /// The most that it can have.
        limit: usize,
    },
    /// A number that names nothing.
    #[error("{field}[{index}] of text {text} is {id}; it must be below {limit}")]
    Id {
        /// `token_ids`, `token_type_ids`, or the task's `tokens`.
        field: &'static str,
        /// Which text.
        text: usize,
        /// Where in it.
        index: usize,
        /// The number.
        id: i64,
        /// How many there are.
        limit: usize,
    },
    /// Not a kind for each token.
    #[error("text {text} has {tokens} tokens and {types} token_type_ids; it must have as many")]
    TypeCount {
        /// Which.
        text: usize,
        /// Its tokens.
        tokens: usize,
        /// Kinds given.
        types: usize,
    },
    /// What came out is no number.
    #[error("what the model makes of text {text} is not finite")]
    NotFinite {
        /// Which.
        text: usize,
    },
}

impl Text {
    /// The text number `text` from ids of any size, as they come from Python.
    ///
    /// # Errors
    /// [`EncodeError::Id`] for ids beyond 32 bits.
    pub fn from_ids(
        text: usize,
        tokens: &[i64],
        token_types: &[i64],
        cache_salt: Option<Arc<str>>,
    ) -> Result<Self, EncodeError> {
        let read = |field, ids: &[i64]| -> Result<Vec<u32>, EncodeError> {
            let limit = u32::MAX as usize;
            let read = |(index, &id)| u32::try_from(id).map_err(|_| EncodeError::Id { field, text, index, id, limit });
            ids.iter().enumerate().map(read).collect()
        };
        Ok(Self { tokens: read("token_ids", tokens)?, token_types: read("token_type_ids", token_types)?, cache_salt })
    }

    pub(super) fn check(
        &self,
        text: usize,
        vocab_size: usize,
        abilities: &Abilities,
        limits: LengthLimits,
    ) -> Result<(), EncodeError> {
        let (tokens, types, limit) = (self.tokens.len(), self.token_types.len(), limits.tokens());
        if tokens == 0 {
            return Err(EncodeError::Empty { text });
        }
        if tokens > limit {
            return Err(EncodeError::TooLong { text, tokens, limit });
        }
        if types != 0 && types != tokens {
            return Err(EncodeError::TypeCount { text, tokens, types });
        }
        check_ids("token_ids", text, &self.tokens, vocab_size)?;
        check_ids("token_type_ids", text, &self.token_types, abilities.token_types)
    }
}

impl EncodeTask {
    /// Reads a task: `{"type": "embedding", "pooling": "mean", "normalize": true, "dimensions": null}`.
    ///
    /// # Errors
    /// [`EncodeError::Malformed`].
    pub fn from_json(json: &str) -> Result<Self, EncodeError> {
        serde_json::from_str(json).map_err(|error| EncodeError::Malformed { message: error.to_string() })
    }

    pub(super) fn check(&self, vocab_size: usize, abilities: &Abilities) -> Result<(), EncodeError> {
        let Abilities { embedding_size, .. } = *abilities;
        match self {
            Self::Embedding { dimensions: Some(dimensions), .. } if !(1..=embedding_size).contains(dimensions) => {
                Err(EncodeError::Dimensions { dimensions: *dimensions, embedding_size })
            }
            Self::Embedding { .. } | Self::TokenEmbeddings { .. } => Ok(()),
            Self::Scores {} => abilities.classifier.map(|_| ()).ok_or(EncodeError::NoClassifier),
            Self::Logits { .. } | Self::TopLogprobs { .. } if !abilities.logits => Err(EncodeError::NoLogits),
            Self::TopLogprobs { count } if !(1..=vocab_size).contains(count) => {
                Err(EncodeError::Count { count: *count, vocab_size })
            }
            Self::TopLogprobs { .. } => Ok(()),
            Self::Logits { tokens } => check_ids("tokens", 0, tokens, vocab_size),
        }
    }
}

fn check_ids(field: &'static str, text: usize, ids: &[u32], limit: usize) -> Result<(), EncodeError> {
    match ids.iter().position(|&id| id as usize >= limit) {
        Some(index) => Err(EncodeError::Id { field, text, index, id: ids[index].into(), limit }),
        None => Ok(()),
    }
}
