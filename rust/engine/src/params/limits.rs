//! The range of every sampling parameter, written once. They are vLLM's where vLLM has one.

use std::fmt;

/// The range of a parameter that is a real number.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RealRange {
    /// The parameter's name.
    pub field: &'static str,
    /// The smallest value.
    pub low: f64,
    /// Whether `low` itself is outside.
    pub low_is_open: bool,
    /// The largest value, inside.
    pub high: f64,
}

impl RealRange {
    const fn closed(field: &'static str, low: f64, high: f64) -> Self {
        Self { field, low, low_is_open: false, high }
    }

    const fn open_below(field: &'static str, low: f64, high: f64) -> Self {
        Self { field, low, low_is_open: true, high }
    }

    /// Whether a value is inside; what is not a number never is.
    #[must_use]
    pub fn contains(&self, value: f64) -> bool {
        value <= self.high && if self.low_is_open { value > self.low } else { value >= self.low }
    }
}

impl fmt::Display for RealRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bound = if self.low_is_open { "above" } else { "at least" };
        write!(f, "{bound} {} and at most {}", self.low, self.high)
    }
}

/// The range of a parameter that is a whole number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IntegerRange {
    /// The parameter's name.
    pub field: &'static str,
    /// The smallest value.
    pub low: usize,
    /// The largest value.
    pub high: usize,
    /// Whether -1 is another way to write 0.
    pub minus_one_is_zero: bool,
}

impl IntegerRange {
    const fn new(field: &'static str, low: usize, high: usize) -> Self {
        Self { field, low, high, minus_one_is_zero: false }
    }
}

impl fmt::Display for IntegerRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} to {}", self.low, self.high)?;
        if self.minus_one_is_zero { write!(f, " (0 or -1: off)") } else { Ok(()) }
    }
}

/// A token count that nobody means; it also fits every integer type on the way.
const MANY: usize = i32::MAX as usize;

/// `temperature`.
pub const TEMPERATURE: RealRange = RealRange::closed("temperature", 0.0, 100.0);
/// `top_k`. More than the vocabulary is allowed and keeps everything.
pub const TOP_K: IntegerRange = IntegerRange { minus_one_is_zero: true, ..IntegerRange::new("top_k", 0, MANY) };
/// `top_p`.
pub const TOP_P: RealRange = RealRange::open_below("top_p", 0.0, 1.0);
/// `min_p`.
pub const MIN_P: RealRange = RealRange::closed("min_p", 0.0, 1.0);
/// `repetition_penalty`.
pub const REPETITION_PENALTY: RealRange = RealRange::open_below("repetition_penalty", 0.0, 100.0);
/// `presence_penalty`.
pub const PRESENCE_PENALTY: RealRange = RealRange::closed("presence_penalty", -2.0, 2.0);
/// `frequency_penalty`.
pub const FREQUENCY_PENALTY: RealRange = RealRange::closed("frequency_penalty", -2.0, 2.0);
/// Each value of `logit_bias`.
pub const LOGIT_BIAS: RealRange = RealRange::closed("logit_bias", -100.0, 100.0);
/// `max_tokens`. More than the context holds is allowed: the continuation ends where the context does.
pub const MAX_TOKENS: IntegerRange = IntegerRange::new("max_tokens", 1, MANY);
/// `min_tokens`; also at most `max_tokens`.
pub const MIN_TOKENS: IntegerRange = IntegerRange::new("min_tokens", 0, MANY);
/// `logprobs`.
pub const LOGPROBS: IntegerRange = IntegerRange::new("logprobs", 0, 20);
/// `prompt_logprobs`.
pub const PROMPT_LOGPROBS: IntegerRange = IntegerRange::new("prompt_logprobs", 0, 20);
/// `prompt_logprobs_from`. Beyond the prompt is allowed and reports nothing.
pub const PROMPT_LOGPROBS_FROM: IntegerRange = IntegerRange::new("prompt_logprobs_from", 1, MANY);
/// Bytes of `cache_salt`.
pub const CACHE_SALT: IntegerRange = IntegerRange::new("cache_salt", 1, 1024);
/// `trace`.
pub const TRACE: IntegerRange = IntegerRange::new("trace", 0, 1000);
/// Items of `stop_token_ids`: each is looked for after every token.
pub const MAX_STOP_TOKEN_IDS: usize = 1024;
/// `dynatemp_range`.
pub const DYNATEMP_RANGE: RealRange = RealRange::closed("dynatemp_range", 0.0, 100.0);
/// `dynatemp_exponent`.
pub const DYNATEMP_EXPONENT: RealRange = RealRange::closed("dynatemp_exponent", 0.0, 100.0);
/// `top_n_sigma`. 0 is off.
pub const TOP_N_SIGMA: RealRange = RealRange::closed("top_n_sigma", 0.0, 100.0);
/// `typical_p`.
pub const TYPICAL_P: RealRange = RealRange::open_below("typical_p", 0.0, 1.0);
/// `epsilon_cutoff`.
pub const EPSILON_CUTOFF: RealRange = RealRange::closed("epsilon_cutoff", 0.0, 1.0);
/// `eta_cutoff`.
pub const ETA_CUTOFF: RealRange = RealRange::closed("eta_cutoff", 0.0, 1.0);
/// `top_h`. 0 is off; at 1 the hundred most likely are kept.
pub const TOP_H: RealRange = RealRange::closed("top_h", 0.0, 1.0);
/// `xtc_probability`.
pub const XTC_PROBABILITY: RealRange = RealRange::closed("xtc_probability", 0.0, 1.0);
/// `xtc_threshold`. Above 0.5 it never acts.
pub const XTC_THRESHOLD: RealRange = RealRange::closed("xtc_threshold", 0.0, 1.0);
/// `dry_multiplier`.
pub const DRY_MULTIPLIER: RealRange = RealRange::closed("dry_multiplier", 0.0, 100.0);
/// `dry_base`.
pub const DRY_BASE: RealRange = RealRange::closed("dry_base", 1.0, 100.0);
/// `dry_allowed_length`.
pub const DRY_ALLOWED_LENGTH: IntegerRange = IntegerRange::new("dry_allowed_length", 1, MANY);
/// `dry_penalty_last_n`, where it is not -1, the whole text.
pub const DRY_PENALTY_LAST_N: IntegerRange = IntegerRange::new("dry_penalty_last_n", 0, MANY);
/// `mirostat`.
pub const MIROSTAT: IntegerRange = IntegerRange::new("mirostat", 0, 2);
/// `mirostat_tau`, in bits.
pub const MIROSTAT_TAU: RealRange = RealRange::open_below("mirostat_tau", 0.0, 100.0);
/// `mirostat_eta`.
pub const MIROSTAT_ETA: RealRange = RealRange::open_below("mirostat_eta", 0.0, 1.0);
/// `no_repeat_ngram_size`: longer ones hardly come twice.
pub const NO_REPEAT_NGRAM_SIZE: IntegerRange = IntegerRange::new("no_repeat_ngram_size", 0, 1024);
/// Items of `bad_words`: each is compared with the text before every token.
pub const MAX_BAD_WORDS: usize = 1536;
/// Tokens of an item of `bad_words`.
pub const MAX_BAD_WORD_TOKENS: usize = 256;
/// Items of lists that may name much of a vocabulary: `allowed_token_ids`, `dry_sequence_breaker_ids`.
pub const MAX_TOKEN_IDS: usize = 1 << 20;
/// `beam_width`: each beam is a sequence of its own to the model.
pub const BEAM_WIDTH: IntegerRange = IntegerRange::new("beam_width", 1, 128);
/// `n` of a beam search; also at most `beam_width`.
pub const BEAMS_TOLD: IntegerRange = IntegerRange::new("n", 1, 128);
/// `length_penalty`. Beyond this, the longest or the shortest sequence wins whatever it says.
pub const LENGTH_PENALTY: RealRange = RealRange::closed("length_penalty", -10.0, 10.0);
/// Tokens of `prediction`: more than any context holds.
pub const MAX_PREDICTION: usize = 1 << 22;
