//! Encoding tasks and their inputs, validated before anything runs.

use std::sync::Arc;

use ferrule_model::{Capabilities, Features, Pooling};
use serde::Deserialize;

use crate::request::{FeaturesError, LengthLimits, check_features};

/// Input of an encoding task: a tokenized text.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Text {
    /// Token ids.
    pub tokens: Vec<u32>,
    /// Token type id of each token; empty if all are 0.
    pub token_types: Vec<u32>,
    /// Cached pages are shared only with texts and prompts of the same salt.
    pub cache_salt: Option<Arc<str>>,
    /// Features of tokens, in the order of their positions. They do not overlap.
    pub features: Vec<Features>,
}

/// The operation that [`Engine::encode`](crate::Engine::encode) runs on each text.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case", deny_unknown_fields)]
pub enum EncodeTask {
    /// Computes an embedding, `[dimensions]`.
    Embedding {
        /// Pooling of the hidden states.
        pooling: Pooling,
        /// Whether the embedding is normalized to unit length.
        normalize: bool,
        /// Number of leading dimensions to keep (Matryoshka), cut before normalization; all if `None`.
        dimensions: Option<usize>,
    },
    /// Returns the hidden state of every token, `[tokens, hidden_size]`.
    TokenEmbeddings {
        /// Whether each hidden state is normalized to unit length.
        normalize: bool,
    },
    /// Computes one embedding of each `merged_rows` consecutive hidden states, `[tokens / merged_rows, embedding_size]`: the
    /// features of an image, whose patches are the tokens.
    Features {},
    /// Computes the classifier's scores, `[labels]`.
    Scores {},
    /// Returns the next-token logits of selected vocabulary entries after the text, `[tokens]`.
    Logits {
        /// Selected token ids.
        tokens: Vec<u32>,
    },
    /// Returns the most likely next tokens after every token of the text, `[tokens, 2, count]`: token ids (stored as
    /// f32 bit patterns), then log-probabilities, most likely first.
    TopLogprobs {
        /// Number of tokens per position.
        count: usize,
    },
}

/// Reason why an encoding task or its input is invalid.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum EncodeError {
    /// The task is not valid JSON or has unknown fields.
    #[error("encoding task is invalid: {message}")]
    Malformed {
        /// Description of the problem.
        message: String,
    },
    /// The requested dimensions exceed the embedding size, or are zero.
    #[error("dimensions must be in 1..={embedding_size}, got {dimensions}")]
    Dimensions {
        /// Requested value.
        dimensions: usize,
        /// Size of the model's embeddings.
        embedding_size: usize,
    },
    /// The requested number of tokens exceeds the vocabulary, or is zero.
    #[error("count must be in 1..={vocab_size}, got {count}")]
    Count {
        /// Requested value.
        count: usize,
        /// Vocabulary size.
        vocab_size: usize,
    },
    /// The model has no language modeling head.
    #[error("the model gives no logits: it is made to embed, classify or rerank texts")]
    NoLogits,
    /// The features of a text are invalid.
    #[error("text {text}: {error}")]
    Features {
        /// Index of the text.
        text: usize,
        /// Problem with the features.
        error: FeaturesError,
    },
    /// An embedding is made of several hidden states.
    #[error("the model makes an embedding of {merged_rows} hidden states, so it gives features of images alone")]
    NoPooling {
        /// Number of hidden states that make one embedding.
        merged_rows: usize,
    },
    /// The number of tokens is not a multiple of the number of hidden states that make one embedding.
    #[error("text {text} must have a multiple of {merged_rows} tokens, got {tokens}")]
    Merged {
        /// Index of the text.
        text: usize,
        /// Number of its tokens.
        tokens: usize,
        /// Number of hidden states that make one embedding.
        merged_rows: usize,
    },
    /// The model has no classifier.
    #[error("the model has no classifier")]
    NoClassifier,
    /// The text has no tokens.
    #[error("text {text} is empty: it must have at least one token")]
    Empty {
        /// Index of the text.
        text: usize,
    },
    /// The text exceeds the context length or the KV cache.
    #[error("text {text} has {tokens} tokens; the limit is {limit}")]
    TooLong {
        /// Index of the text.
        text: usize,
        /// Number of its tokens.
        tokens: usize,
        /// Maximum number of tokens.
        limit: usize,
    },
    /// An id is out of range.
    #[error("{field}[{index}] of text {text} must be below {limit}, got {id}")]
    Id {
        /// `token_ids`, `token_type_ids`, or the task's `tokens`.
        field: &'static str,
        /// Index of the text.
        text: usize,
        /// Position of the id.
        index: usize,
        /// The id.
        id: i64,
        /// Exclusive upper bound.
        limit: usize,
    },
    /// The number of token types differs from the number of tokens.
    #[error("text {text} has {tokens} tokens but {types} token_type_ids; the numbers must be equal")]
    TypeCount {
        /// Index of the text.
        text: usize,
        /// Number of its tokens.
        tokens: usize,
        /// Number of token types.
        types: usize,
    },
    /// The model computed NaN or infinity.
    #[error("model output for text {text} is not finite (NaN or infinity)")]
    NotFinite {
        /// Index of the text.
        text: usize,
    },
}

impl Text {
    /// Converts token ids of any size, as they come from Python, into a text; `text` is its index in error messages.
    ///
    /// # Errors
    /// Returns [`EncodeError::Id`] for ids that do not fit into 32 bits.
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
        let (tokens, token_types) = (read("token_ids", tokens)?, read("token_type_ids", token_types)?);
        Ok(Self { tokens, token_types, cache_salt, features: Vec::new() })
    }

    /// Checks the lengths and ids of the text.
    pub(super) fn check(
        &self,
        text: usize,
        vocab_size: usize,
        capabilities: &Capabilities,
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
        check_ids("token_type_ids", text, &self.token_types, capabilities.token_types)?;
        check_features(&self.features, tokens, capabilities).map_err(|error| EncodeError::Features { text, error })?;
        let merged_rows = capabilities.merged_rows;
        if tokens.is_multiple_of(merged_rows) { Ok(()) } else { Err(EncodeError::Merged { text, tokens, merged_rows }) }
    }
}

impl EncodeTask {
    /// Parses a task from JSON: `{"type": "embedding", "pooling": "mean", "normalize": true, "dimensions": null}`.
    ///
    /// # Examples
    /// ```
    /// use ferrule_engine::EncodeTask;
    ///
    /// let task = EncodeTask::from_json(r#"{"type": "logits", "tokens": [3, 7]}"#).unwrap();
    /// assert_eq!(task, EncodeTask::Logits { tokens: vec![3, 7] });
    /// ```
    ///
    /// # Errors
    /// Returns [`EncodeError::Malformed`] for anything else.
    pub fn from_json(json: &str) -> Result<Self, EncodeError> {
        serde_json::from_str(json).map_err(|error| EncodeError::Malformed { message: error.to_string() })
    }

    /// Checks that the model supports the task.
    pub(super) fn check(&self, vocab_size: usize, capabilities: &Capabilities) -> Result<(), EncodeError> {
        let Capabilities { embedding_size, merged_rows, .. } = *capabilities;
        match self {
            Self::Embedding { .. } if merged_rows > 1 => Err(EncodeError::NoPooling { merged_rows }),
            Self::Embedding { dimensions: Some(dimensions), .. } if !(1..=embedding_size).contains(dimensions) => {
                Err(EncodeError::Dimensions { dimensions: *dimensions, embedding_size })
            }
            Self::Embedding { .. } | Self::TokenEmbeddings { .. } | Self::Features {} => Ok(()),
            Self::Scores {} => capabilities.classifier.map(|_| ()).ok_or(EncodeError::NoClassifier),
            Self::Logits { .. } | Self::TopLogprobs { .. } if !capabilities.logits => Err(EncodeError::NoLogits),
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
