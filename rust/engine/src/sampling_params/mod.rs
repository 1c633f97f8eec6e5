//! Sampling parameters, which determine the continuation of a prompt.
//!
//! The table below is the only declaration; see [`crate::parameter`]. All values are checked here, and the sampler's
//! stages rely on the checks.

mod beams;

use std::sync::Arc;

use crate::parameter::{
    Checked, Flag, Integer, InvalidParameterError, MAX_COUNT, MinusOneIsNone, Optional, Real, Required, Text,
    TokenBias, TokenIds, TokenSequences, check_ids, malformed, outside_vocabulary, parameters,
};
use crate::sampling::SharedProcessor;
use crate::structured::Grammar;

pub use beams::{BeamSearchParams, EarlyStopping};

/// Count of tokens from `low` on.
const fn count(low: i128) -> Integer<usize> {
    Integer::new(low, MAX_COUNT as i128)
}

/// Maximum number of alternatives to report for a token, as in OpenAI's API.
const MAX_LOGPROBS: i128 = 20;
/// Maximum number of candidates of a trace.
const MAX_TRACE: i128 = 1000;
/// Maximum length of an n-gram that must not repeat; longer n-grams hardly repeat.
const MAX_NGRAM: i128 = 1024;
/// Maximum number of ids in a list that may contain most of a vocabulary.
const MAX_TOKEN_IDS: usize = 1 << 20;
/// Maximum number of stop ids, each of which is compared with every sampled token.
const MAX_STOP_TOKEN_IDS: usize = 1024;
/// Maximum number of forbidden sequences, each of which is compared with the end of the text before every token.
const MAX_BAD_WORDS: usize = 1536;
/// Maximum length of a forbidden sequence, in tokens.
const MAX_BAD_WORD_TOKENS: usize = 256;
/// Maximum length of a prediction, in tokens; no context is longer.
const MAX_PREDICTION: usize = 1 << 22;
/// Maximum length of a cache salt, in bytes.
const MAX_CACHE_SALT: usize = 1024;

parameters! {
    /// How to sample a continuation, and the request's other options. Names and meanings are vLLM's.
    ///
    /// ```
    /// use ferrule_engine::SamplingParams;
    ///
    /// let params = SamplingParams { temperature: 0.7, top_p: 0.9, max_tokens: 100, ..SamplingParams::default() };
    /// params.validate(32_000)?;
    /// # Ok::<(), ferrule_engine::InvalidParameterError>(())
    /// ```
    #[derive(Debug, Clone, PartialEq)]
    pub struct SamplingParams ("sampling parameters") {
        /// Divides the logits; 0 always selects the most likely token.
        temperature: f64 = 1.0, Real::closed(0.0, 100.0);
        /// Keeps this many of the most likely tokens, and tokens that tie with the last of them; 0 or -1 keeps all.
        top_k: usize = 0, count(0).or_minus_one();
        /// Keeps the smallest set of most likely tokens whose total probability reaches this value; 1 keeps all.
        top_p: f64 = 1.0, Real::above(0.0, 1.0);
        /// Drops tokens less likely than this fraction of the most likely token's probability; 0 keeps all.
        min_p: f64 = 0.0, Real::closed(0.0, 1.0);
        /// Divides positive and multiplies negative logits of tokens in the prompt or the output; 1 changes nothing.
        repetition_penalty: f64 = 1.0, Real::above(0.0, 100.0);
        /// Penalty subtracted from the logits of tokens that occur in the output.
        presence_penalty: f64 = 0.0, Real::closed(-2.0, 2.0);
        /// Penalty subtracted from the logit of a token once for each occurrence in the output.
        frequency_penalty: f64 = 0.0, Real::closed(-2.0, 2.0);
        /// Half the width of the range in which the temperature follows the entropy; 0 keeps it constant.
        dynatemp_range: f64 = 0.0, Real::closed(0.0, 100.0);
        /// Exponent of the normalized entropy in the dynamic temperature.
        dynatemp_exponent: f64 = 1.0, Real::closed(0.0, 100.0);
        /// Keeps logits within this many standard deviations of the highest; 0 or -1 keeps all.
        top_n_sigma: f64 = 0.0, Real::closed(-1.0, 100.0);
        /// Keeps the tokens of this total probability whose surprise is closest to the entropy; 1 keeps all.
        typical_p: f64 = 1.0, Real::above(0.0, 1.0);
        /// Drops tokens with a lower probability than this; 0 keeps all.
        epsilon_cutoff: f64 = 0.0, Real::closed(0.0, 1.0);
        /// Drops tokens with a lower probability than this, or than its square root times exp(-entropy); 0 keeps all.
        eta_cutoff: f64 = 0.0, Real::closed(0.0, 1.0);
        /// Keeps the most likely tokens up to this fraction of the entropy; 0 keeps all.
        top_h: f64 = 0.0, Real::closed(0.0, 1.0);
        /// Probability with which XTC drops the most likely tokens; 0 is off.
        xtc_probability: f64 = 0.0, Real::closed(0.0, 1.0);
        /// Minimum probability of the tokens that XTC drops; it keeps the least likely of these tokens.
        xtc_threshold: f64 = 0.1, Real::closed(0.0, 1.0);
        /// Strength of the DRY penalty for tokens that extend a repeat; 0 is off.
        dry_multiplier: f64 = 0.0, Real::closed(0.0, 100.0);
        /// Base of the exponential DRY penalty per extra repeated token.
        dry_base: f64 = 1.75, Real::closed(1.0, 100.0);
        /// Length in tokens of the shortest repeat that DRY penalizes.
        dry_allowed_length: usize = 2, count(1);
        /// Number of last tokens in which DRY looks for repeats; -1 means all, 0 none.
        dry_penalty_last_n: Option<usize> = None, MinusOneIsNone(count(0));
        /// Tokens across which DRY finds no repeats.
        dry_sequence_breaker_ids: Vec<u32> = Vec::new(), TokenIds { min_items: 0, max_items: MAX_TOKEN_IDS };
        /// Mirostat version, 1 or 2; 0 is off.
        mirostat: usize = 0, Integer::new(0, 2);
        /// Mirostat target surprise, in bits.
        mirostat_tau: f64 = 5.0, Real::above(0.0, 100.0);
        /// Mirostat learning rate.
        mirostat_eta: f64 = 0.1, Real::above(0.0, 1.0);
        /// Forbids n-grams of this many tokens to occur twice; 0 allows all.
        no_repeat_ngram_size: usize = 0, Integer::new(0, MAX_NGRAM);
        /// Sequences of tokens that must not be generated.
        bad_words: Vec<Vec<u32>> = Vec::new(), TokenSequences {
            max_items: MAX_BAD_WORDS,
            each: TokenIds { min_items: 1, max_items: MAX_BAD_WORD_TOKENS },
        };
        /// The only tokens that may be sampled.
        allowed_token_ids: Option<Vec<u32>> = None, Optional(TokenIds { min_items: 1, max_items: MAX_TOKEN_IDS });
        /// Added to the logits of these tokens.
        logit_bias: Vec<(u32, f64)> = Vec::new(), TokenBias(Real::closed(-100.0, 100.0));
        /// Seed of the random numbers; each draw depends on the seed and the position alone.
        seed: u64 = 0, Required(Integer::new(0, u64::MAX as i128));
        /// Maximum number of tokens to generate; generation also ends with the context.
        max_tokens: usize = 16, Required(count(1));
        /// Minimum number of tokens before a stop token may be sampled; at most `max_tokens`.
        min_tokens: usize = 0, count(0);
        /// Tokens that end the output.
        stop_token_ids: Vec<u32> = Vec::new(), TokenIds { min_items: 0, max_items: MAX_STOP_TOKEN_IDS };
        /// Number of most likely tokens whose log-probability is reported beside each sampled token's.
        logprobs: Option<usize> = None, Optional(Integer::new(0, MAX_LOGPROBS));
        /// Whether the log-probabilities of sampled tokens are those after all stages, rather than of the raw logits.
        processed_logprobs: bool = false, Flag;
        /// Whether to report the entropy of the raw logits before each sampled token.
        entropy: bool = false, Flag;
        /// Number of most likely candidates to report with how each token was selected.
        trace: Option<usize> = None, Optional(Integer::new(0, MAX_TRACE));
        /// Number of most likely tokens whose log-probability is reported beside each prompt token's.
        prompt_logprobs: Option<usize> = None, Optional(Integer::new(0, MAX_LOGPROBS));
        /// Position of the first prompt token with a report; nothing precedes the token at 0.
        prompt_logprobs_from: usize = 1, count(1);
        /// Whether the caller reads each token as it is generated, rather than the whole output.
        streams: bool = true, Flag;
        /// Whether each step that computes a part of the prompt has an output, for its timing.
        prompt_progress: bool = false, Flag;
        /// Scheduling priority; lower values run first.
        priority: i32 = 0, Integer::new(i32::MIN as i128, i32::MAX as i128);
        /// Restricts prefix-cache sharing to requests with the same salt.
        cache_salt: Option<Arc<str>> = None, Optional(Text { max_bytes: MAX_CACHE_SALT });
        /// Predicted output; speeds up generation where it matches.
        prediction: Vec<u32> = Vec::new(), TokenIds { min_items: 0, max_items: MAX_PREDICTION };
        /// Runs a beam search instead of sampling.
        beam_search: Option<BeamSearchParams> = None, Optional(beams::KIND);
    }
    unlisted {
        /// The caller's own changes to the logits.
        logits_processor: Option<SharedProcessor> = None;
        /// Grammar of the output, compiled for the model's vocabulary.
        structured_outputs: Option<Arc<Grammar>> = None;
    }
}

impl SamplingParams {
    /// Reads and checks the parameters of a request, written as a JSON object; `seed` and `max_tokens` are required.
    ///
    /// # Errors
    /// [`InvalidParameterError`] for the first violation.
    pub fn from_json(text: &str, vocab_size: usize) -> Result<Self, InvalidParameterError> {
        if !text.trim_start().starts_with('{') {
            // serde would also accept a list with the fields in order.
            return Err(malformed("sampling parameters", &"expected an object"));
        }
        let mut params = Self::read_object(&mut serde_json::Deserializer::from_str(text))?;
        let Self { stop_token_ids, dry_sequence_breaker_ids, allowed_token_ids, .. } = &mut params;
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
    /// [`InvalidParameterError`] for the first violation.
    pub fn validate(&self, vocab_size: usize) -> Result<(), InvalidParameterError> {
        self.check_bounds()?;
        if self.min_tokens > self.max_tokens {
            let requirement = format!("an integer from 0 to max_tokens ({})", self.max_tokens);
            return Err(InvalidParameterError::new("min_tokens", self.min_tokens, requirement));
        }
        self.check_vocabulary(vocab_size)?;
        self.beam_search.as_ref().map_or(Ok(()), |_| beams::check_conflicts(self))
    }

    fn check_vocabulary(&self, vocab_size: usize) -> Checked<()> {
        for (index, word) in self.bad_words.iter().enumerate() {
            check_ids(&format!("bad_words[{index}]"), word, vocab_size)?;
        }
        if let Some(&(id, _)) = self.logit_bias.iter().find(|&&(id, _)| id as usize >= vocab_size) {
            return Err(outside_vocabulary("logit_bias".into(), id.into(), vocab_size));
        }
        for (field, ids) in [
            ("allowed_token_ids", self.allowed_token_ids.as_deref().unwrap_or_default()),
            ("dry_sequence_breaker_ids", &self.dry_sequence_breaker_ids),
            ("stop_token_ids", &self.stop_token_ids),
            ("prediction", &self.prediction),
        ] {
            check_ids(field, ids, vocab_size)?;
        }
        match self.structured_outputs.as_ref().map(|grammar| grammar.vocab_size()) {
            Some(tokens) if tokens != vocab_size => Err(InvalidParameterError::new(
                "structured_outputs",
                format!("a grammar for {tokens} tokens"),
                format!("a grammar for the model's {vocab_size} tokens"),
            )),
            _ => Ok(()),
        }
    }

    /// Returns whether the most likely token is selected every time.
    #[must_use]
    pub fn is_greedy(&self) -> bool {
        self.temperature == 0.0
    }

    /// Returns whether a token ends the output.
    #[must_use]
    pub fn is_stop(&self, token: u32) -> bool {
        self.stop_token_ids.contains(&token)
    }
}

#[cfg(test)]
mod tests;
