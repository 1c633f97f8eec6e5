//! How to sample the continuation of a prompt, and what no value of it may be.
//!
//! Everything is checked here, once; the sampler's stages rely on it. Each violation names the field, the value and
//! the limit, since the message is what a user of the Python API or of the HTTP server reads.

mod json;
pub mod limits;

use std::sync::Arc;

use crate::structured::Grammar;
use limits::{IntegerRange, RealRange};

/// Why sampling parameters were refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ParamError {
    /// A number outside its range.
    #[error("{field} must be {limit}, got {value}")]
    OutOfRange {
        /// The parameter's name.
        field: &'static str,
        /// What was given.
        value: String,
        /// What is allowed.
        limit: String,
    },
    /// Something that is not of the parameter's type.
    #[error("{field} must be {expected}, got {value}")]
    WrongType {
        /// The parameter's name.
        field: &'static str,
        /// What was given, shortened.
        value: String,
        /// What it should be.
        expected: &'static str,
    },
    /// A parameter that has no default was not given.
    #[error("{field} is required")]
    Missing {
        /// The parameter's name.
        field: &'static str,
    },
    /// Not a token of the model.
    #[error("{field} names token id {id}, but the model's token ids are 0 to {}", vocab_size.saturating_sub(1))]
    TokenId {
        /// The parameter's name.
        field: &'static str,
        /// The id as given.
        id: String,
        /// Token ids of the model: those below this number.
        vocab_size: usize,
    },
    /// A list that is too long.
    #[error("{field} has {count} items, but at most {limit} are allowed")]
    TooMany {
        /// The parameter's name.
        field: &'static str,
        /// Items given.
        count: usize,
        /// Items allowed.
        limit: usize,
    },
    /// Not a JSON object of known parameters.
    #[error("sampling parameters: {message}")]
    Malformed {
        /// What the parser said; an unknown parameter is named.
        message: String,
    },
}

/// How to sample a continuation, and what else a request says of itself. Names and meanings are vLLM's.
#[derive(Debug, Clone, PartialEq)]
pub struct SamplingParams {
    /// Divides the logits; 0 takes the most likely token every time.
    pub temperature: f64,
    /// Keeps this many of the most likely tokens, and those equal to the last of them; 0 keeps all.
    pub top_k: usize,
    /// Keeps the smallest set of most likely tokens whose probability reaches this; 1 keeps all.
    pub top_p: f64,
    /// Keeps tokens at least this times as likely as the most likely one; 0 keeps all.
    pub min_p: f64,
    /// Divides positive and multiplies negative logits of tokens in prompt or continuation; 1 changes nothing.
    pub repetition_penalty: f64,
    /// Taken off the logits of tokens in the continuation.
    pub presence_penalty: f64,
    /// Taken off the logits of tokens in the continuation, once for each time.
    pub frequency_penalty: f64,
    /// Added to the logits of these tokens; ascending ids, each once.
    pub logit_bias: Vec<(u32, f64)>,
    /// Makes the random numbers: the draw for a position depends on this and on the position alone.
    pub seed: u64,
    /// Tokens of the continuation at the most.
    pub max_tokens: usize,
    /// Tokens of the continuation before a stop id may be sampled.
    pub min_tokens: usize,
    /// Tokens that end the continuation; ascending, each once.
    pub stop_token_ids: Vec<u32>,
    /// Report the log-probability of each sampled token and of this many most likely ones.
    pub logprobs: Option<usize>,
    /// Report how each token was picked, with this many most likely candidates.
    pub trace: Option<usize>,
    /// Report the log-probability of each token of the prompt and of this many most likely ones in its place.
    pub prompt_logprobs: Option<usize>,
    /// The position of the first token of the prompt that is reported; at least 1, since nothing precedes the first.
    pub prompt_logprobs_from: usize,
    /// Whether someone waits for each token, and not for the last one alone.
    pub streams: bool,
    /// Who goes first: lower numbers do.
    pub priority: i32,
    /// What the continuation must be; compiled for the model's vocabulary.
    pub structured_outputs: Option<Arc<Grammar>>,
    /// Requests share pages of the prefix cache with those of the same salt alone.
    pub cache_salt: Option<Arc<str>>,
    /// Tokens that are expected to come: they are tried as drafts, and change nothing but the time that it takes.
    pub prediction: Vec<u32>,
}

impl Default for SamplingParams {
    /// Plain sampling at temperature 1 with seed 0, up to 16 tokens.
    fn default() -> Self {
        Self {
            temperature: 1.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            logit_bias: Vec::new(),
            seed: 0,
            max_tokens: 16,
            min_tokens: 0,
            stop_token_ids: Vec::new(),
            logprobs: None,
            trace: None,
            prompt_logprobs: None,
            prompt_logprobs_from: 1,
            streams: true,
            priority: 0,
            structured_outputs: None,
            cache_salt: None,
            prediction: Vec::new(),
        }
    }
}

impl SamplingParams {
    /// Reads and checks the parameters of a request, written as a JSON object; `seed` and `max_tokens` are required.
    ///
    /// JSON has no word for numbers that are not finite: the strings `"nan"`, `"inf"` and `"-inf"` stand for them, so
    /// that they are refused under the name of their field.
    ///
    /// # Errors
    /// [`ParamError`] for the first violation.
    pub fn from_json(text: &str, vocab_size: usize) -> Result<Self, ParamError> {
        let mut params = json::read(text, vocab_size)?;
        params.logit_bias.sort_by_key(|&(id, _)| id);
        params.stop_token_ids.sort_unstable();
        params.stop_token_ids.dedup();
        params.validate(vocab_size)?;
        Ok(params)
    }

    /// Checks every range, and that every token id is one of the model's.
    ///
    /// # Errors
    /// [`ParamError`] for the first violation.
    pub fn validate(&self, vocab_size: usize) -> Result<(), ParamError> {
        limits::TEMPERATURE.check(self.temperature)?;
        limits::TOP_K.check(self.top_k)?;
        limits::TOP_P.check(self.top_p)?;
        limits::MIN_P.check(self.min_p)?;
        limits::REPETITION_PENALTY.check(self.repetition_penalty)?;
        limits::PRESENCE_PENALTY.check(self.presence_penalty)?;
        limits::FREQUENCY_PENALTY.check(self.frequency_penalty)?;
        limits::MAX_TOKENS.check(self.max_tokens)?;
        if self.min_tokens > self.max_tokens {
            return Err(ParamError::OutOfRange {
                field: "min_tokens",
                value: self.min_tokens.to_string(),
                limit: format!("0 to max_tokens ({})", self.max_tokens),
            });
        }
        if let Some(count) = self.logprobs {
            limits::LOGPROBS.check(count)?;
        }
        if let Some(count) = self.trace {
            limits::TRACE.check(count)?;
        }
        if let Some(count) = self.prompt_logprobs {
            limits::PROMPT_LOGPROBS.check(count)?;
        }
        limits::PROMPT_LOGPROBS_FROM.check(self.prompt_logprobs_from)?;
        for &(id, bias) in &self.logit_bias {
            check_token("logit_bias", id, vocab_size)?;
            limits::LOGIT_BIAS.check(bias)?;
        }
        if let Some(grammar) = self.structured_outputs.as_ref().filter(|grammar| grammar.vocab_size() != vocab_size) {
            return Err(ParamError::OutOfRange {
                field: "structured_outputs",
                value: format!("a grammar of {} tokens", grammar.vocab_size()),
                limit: format!("of the model's {vocab_size} tokens"),
            });
        }
        check_count("stop_token_ids", self.stop_token_ids.len(), limits::MAX_STOP_TOKEN_IDS)?;
        self.stop_token_ids.iter().try_for_each(|&id| check_token("stop_token_ids", id, vocab_size))?;
        check_count("prediction", self.prediction.len(), limits::MAX_PREDICTION)?;
        self.prediction.iter().try_for_each(|&id| check_token("prediction", id, vocab_size))
    }

    /// Whether the most likely token is taken every time.
    #[must_use]
    pub fn is_greedy(&self) -> bool {
        self.temperature == 0.0
    }

    /// Whether a token ends the continuation.
    #[must_use]
    pub fn is_stop(&self, token: u32) -> bool {
        self.stop_token_ids.contains(&token)
    }
}

fn check_token(field: &'static str, id: u32, vocab_size: usize) -> Result<(), ParamError> {
    if (id as usize) < vocab_size { Ok(()) } else { Err(ParamError::TokenId { field, id: id.to_string(), vocab_size }) }
}

fn check_count(field: &'static str, count: usize, limit: usize) -> Result<(), ParamError> {
    if count <= limit { Ok(()) } else { Err(ParamError::TooMany { field, count, limit }) }
}

impl RealRange {
    fn check(&self, value: f64) -> Result<(), ParamError> {
        if self.contains(value) {
            return Ok(());
        }
        Err(ParamError::OutOfRange { field: self.field, value: format!("{value:?}"), limit: self.to_string() })
    }
}

impl IntegerRange {
    fn check(&self, value: usize) -> Result<(), ParamError> {
        if (self.low..=self.high).contains(&value) {
            return Ok(());
        }
        Err(ParamError::OutOfRange { field: self.field, value: value.to_string(), limit: self.to_string() })
    }
}
