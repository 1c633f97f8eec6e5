//! How to sample the continuation of a prompt, and what no value of it may be.
//!
//! Everything is checked here, once; the sampler's stages rely on it. Each violation names the field, the value and
//! the limit, since the message is what a user of the Python API or of the HTTP server reads.

mod beams;
mod json;
pub mod limits;

use std::sync::Arc;

use crate::sampling::SharedProcessor;
use crate::structured::Grammar;

pub use beams::{BeamSearchParams, EarlyStopping};
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
    /// A list with nothing in it.
    #[error("{field} is empty: it must have at least one token id")]
    Empty {
        /// The parameter's name.
        field: &'static str,
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
    /// A parameter that a beam search gives no meaning to.
    #[error("{field} and beam_search cannot be used together")]
    WithBeams {
        /// The parameter's name.
        field: &'static str,
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
    /// Half the width of the range in which the temperature follows the entropy; 0 keeps it constant.
    pub dynatemp_range: f64,
    /// The power of the entropy's share by which it does.
    pub dynatemp_exponent: f64,
    /// Keeps logits within so many standard deviations of the highest; 0 keeps all.
    pub top_n_sigma: f64,
    /// Keeps the set of this probability whose surprise is nearest to the entropy; 1 keeps all.
    pub typical_p: f64,
    /// Drops tokens less likely than this; 0 keeps all.
    pub epsilon_cutoff: f64,
    /// Drops tokens less likely than this, and than its root times the exponential of minus the entropy; 0 keeps all.
    pub eta_cutoff: f64,
    /// Keeps the most likely tokens up to this share of the entropy; 0 keeps all.
    pub top_h: f64,
    /// How often the most likely tokens are dropped.
    pub xtc_probability: f64,
    /// How likely a token is that counts as one of them; the least likely of them is kept.
    pub xtc_threshold: f64,
    /// What going on with a repeat of the allowed length costs; 0 is off.
    pub dry_multiplier: f64,
    /// By how much more, for each token that the repeat is longer.
    pub dry_base: f64,
    /// Tokens of a repeat that begins to cost something.
    pub dry_allowed_length: usize,
    /// Tokens at the end of the text in which repeats are looked for; none: the whole text.
    pub dry_penalty_last_n: Option<usize>,
    /// Tokens across which repeats do not reach; ascending, each once.
    pub dry_sequence_breaker_ids: Vec<u32>,
    /// The version of mirostat; 0 is off.
    pub mirostat: usize,
    /// The surprise, in bits, that mirostat holds.
    pub mirostat_tau: f64,
    /// How fast it does.
    pub mirostat_eta: f64,
    /// No n-gram of this many tokens comes twice; 0 allows all.
    pub no_repeat_ngram_size: usize,
    /// Sequences that must not come, each of one token or more.
    pub bad_words: Vec<Vec<u32>>,
    /// The only tokens that may be sampled; ascending, each once.
    pub allowed_token_ids: Option<Vec<u32>>,
    /// What the caller does to logits itself. JSON has no word for it.
    pub logits_processor: Option<SharedProcessor>,
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
    /// Report the entropy of the raw logits before each sampled token.
    pub entropy: bool,
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
    /// That no token is drawn, and the likeliest continuations are looked for instead.
    pub beam_search: Option<BeamSearchParams>,
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
            dynatemp_range: 0.0,
            dynatemp_exponent: 1.0,
            top_n_sigma: 0.0,
            typical_p: 1.0,
            epsilon_cutoff: 0.0,
            eta_cutoff: 0.0,
            top_h: 0.0,
            xtc_probability: 0.0,
            xtc_threshold: 0.1,
            dry_multiplier: 0.0,
            dry_base: 1.75,
            dry_allowed_length: 2,
            dry_penalty_last_n: None,
            dry_sequence_breaker_ids: Vec::new(),
            mirostat: 0,
            mirostat_tau: 5.0,
            mirostat_eta: 0.1,
            no_repeat_ngram_size: 0,
            bad_words: Vec::new(),
            allowed_token_ids: None,
            logits_processor: None,
            logit_bias: Vec::new(),
            seed: 0,
            max_tokens: 16,
            min_tokens: 0,
            stop_token_ids: Vec::new(),
            logprobs: None,
            entropy: false,
            trace: None,
            prompt_logprobs: None,
            prompt_logprobs_from: 1,
            streams: true,
            priority: 0,
            structured_outputs: None,
            cache_salt: None,
            prediction: Vec::new(),
            beam_search: None,
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
        let SamplingParams { stop_token_ids, dry_sequence_breaker_ids, allowed_token_ids, .. } = &mut params;
        for ids in [stop_token_ids, dry_sequence_breaker_ids].into_iter().chain(allowed_token_ids) {
            ids.sort_unstable();
            ids.dedup();
        }
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
        limits::DYNATEMP_RANGE.check(self.dynatemp_range)?;
        limits::DYNATEMP_EXPONENT.check(self.dynatemp_exponent)?;
        limits::TOP_N_SIGMA.check(self.top_n_sigma)?;
        limits::TYPICAL_P.check(self.typical_p)?;
        limits::EPSILON_CUTOFF.check(self.epsilon_cutoff)?;
        limits::ETA_CUTOFF.check(self.eta_cutoff)?;
        limits::TOP_H.check(self.top_h)?;
        limits::XTC_PROBABILITY.check(self.xtc_probability)?;
        limits::XTC_THRESHOLD.check(self.xtc_threshold)?;
        limits::DRY_MULTIPLIER.check(self.dry_multiplier)?;
        limits::DRY_BASE.check(self.dry_base)?;
        limits::DRY_ALLOWED_LENGTH.check(self.dry_allowed_length)?;
        limits::MIROSTAT.check(self.mirostat)?;
        limits::MIROSTAT_TAU.check(self.mirostat_tau)?;
        limits::MIROSTAT_ETA.check(self.mirostat_eta)?;
        limits::NO_REPEAT_NGRAM_SIZE.check(self.no_repeat_ngram_size)?;
        if let Some(count) = self.dry_penalty_last_n {
            limits::DRY_PENALTY_LAST_N.check(count)?;
        }
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
        check_count("bad_words", self.bad_words.len(), limits::MAX_BAD_WORDS)?;
        for word in &self.bad_words {
            if word.is_empty() {
                return Err(ParamError::Empty { field: "an item of bad_words" });
            }
            check_tokens("bad_words", word, limits::MAX_BAD_WORD_TOKENS, vocab_size)?;
        }
        if let Some(allowed) = &self.allowed_token_ids {
            if allowed.is_empty() {
                return Err(ParamError::Empty { field: "allowed_token_ids" });
            }
            check_tokens("allowed_token_ids", allowed, limits::MAX_TOKEN_IDS, vocab_size)?;
        }
        let breakers = &self.dry_sequence_breaker_ids;
        check_tokens("dry_sequence_breaker_ids", breakers, limits::MAX_TOKEN_IDS, vocab_size)?;
        check_tokens("stop_token_ids", &self.stop_token_ids, limits::MAX_STOP_TOKEN_IDS, vocab_size)?;
        check_tokens("prediction", &self.prediction, limits::MAX_PREDICTION, vocab_size)?;
        self.beam_search.as_ref().map_or(Ok(()), |search| beams::check(search, self))
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

fn check_tokens(field: &'static str, ids: &[u32], limit: usize, vocab_size: usize) -> Result<(), ParamError> {
    check_count(field, ids.len(), limit)?;
    ids.iter().try_for_each(|&id| check_token(field, id, vocab_size))
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
