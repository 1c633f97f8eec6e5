//! From a row of logits to a token.
//!
//! # Order
//! vLLM's. Log-probabilities are taken from the raw logits, before any stage. Then `STAGES`, from top to bottom:
//!
//! | stage | what it does |
//! |---|---|
//! | `structured_outputs` | drops what the request's grammar does not allow |
//! | `allowed_token_ids` | drops all but named tokens |
//! | `bad_words` | drops tokens that complete a forbidden sequence |
//! | `no_repeat_ngram_size` | drops tokens that complete an n-gram for the second time |
//! | `logit_bias` | adds to the logits of named tokens |
//! | `min_tokens` | drops stop ids while the continuation is too short |
//! | `logits_processors` | does what the caller's own functions do |
//! | `penalties` | repetition, then frequency, then presence |
//! | `dry` | takes off, the more the longer a repeat the token would go on |
//! | `greedy` | at temperature 0 drops all but the most likely token |
//! | `top_n_sigma` | keeps what lies within so many standard deviations of the highest logit |
//! | `temperature` | divides |
//! | `dynatemp` | divides by a temperature that follows the entropy, in the place of the one before |
//! | `min_p` | drops what is unlikely beside the most likely token |
//! | `top_k` | keeps so many of the most likely |
//! | `top_p` | keeps the smallest most likely set of that mass |
//! | `typical_p` | keeps the set of that mass whose surprise is nearest to the entropy |
//! | `epsilon_cutoff` | drops what is less likely than that |
//! | `eta_cutoff` | drops what is less likely than a bound that falls with the entropy |
//! | `top_h` | keeps the most likely that have that share of the entropy |
//! | `xtc` | by chance drops all likely tokens but the least likely of them |
//! | `mirostat` | drops what is more surprising than a bound that holds the surprise near a target |
//!
//! and one of what is left is drawn. (Hugging Face's order is the same but for min-p, which it applies after top-p. The
//! two differ only where both are on: min-p compares with the most likely token, which top-k and top-p never drop, but
//! what it drops makes top-p's mass smaller.) What vLLM has not stands where Hugging Face has it, and what neither has
//! where its authors or llama.cpp advise it beside a temperature that comes first. Each filter sees probabilities over
//! what the stages before it kept. docs/sampling.md has the formulas and where they are from.
//!
//! # Ties and exactness
//! Among equal logits the lower id is the more likely one, everywhere; only top-k keeps all that equal the last one
//! kept, as vLLM's and Hugging Face's do. Logits are f32; probabilities and their sums are f64, added up in an order
//! that depends on the logits alone. Exponentials are off by less than 2 parts in 10^15, and nothing of it depends on
//! the instruction set: each gives the same bits.
//!
//! # Speed
//! A row is read once for the maxima of its blocks; what then happens depends on how many can still be drawn (see
//! `candidates`). Few are listed, many are weighed in passes over the row, and a whole row is never sorted.
//!
//! # Random numbers
//! A uniform number depends on the request's seed, the token's position and the purpose alone (see [`rng`]). That is
//! what makes a seeded request the same alone, in a batch, after preemption, and under speculation.
//!
//! # Beams
//! Of a beam search nothing is drawn. The stages down to `dry` act on log-probabilities, as Hugging Face's do there, and
//! what the row is asked for is its most likely tokens (see `beams`); the others are refused beside it.
//!
//! # What stages remember
//! Counts, indexes of repeats and mirostat's bound are in the [`History`], which a sequence carries along: successive
//! positions are sampled and pushed one after another.
//!
//! # A new stage
//! One file with a `Stage`, one line in `STAGES` and in the table above, its parameters in `SamplingParams`, and a line
//! in docs/sampling.md.

mod allowed_token_ids;
mod bad_words;
mod beams;
mod candidates;
mod draw;
mod dry;
mod dynamic_temperature;
mod epsilon_cutoff;
mod eta_cutoff;
mod greedy;
mod history;
mod logit_bias;
mod logits_processors;
mod logprobs;
mod min_p;
mod min_tokens;
mod mirostat;
mod no_repeat_ngram;
mod nucleus;
mod penalties;
mod repeats;
pub mod rng;
mod structured_outputs;
mod temperature;
#[cfg(test)]
mod tests;
mod top_h;
mod top_k;
mod top_n_sigma;
mod top_p;
mod trace;
mod typical_p;
mod xtc;

pub(crate) use beams::Continuation;
pub use history::History;
pub use logits_processors::{LogitsProcessor, SharedProcessor};
pub use logprobs::{TokenLogprob, TokenLogprobs};
pub use trace::{SampleTrace, StageEffect, TraceCandidate};

use ferrule_kernels::arch::Isa;

use crate::SamplingParams;
use crate::structured::TokenMask;
use candidates::{Candidates, Room};

/// Every stage, in the order in which they act.
const STAGES: &[&dyn Stage] = &[
    &structured_outputs::StructuredOutputs,
    &allowed_token_ids::AllowedTokenIds,
    &bad_words::BadWords,
    &no_repeat_ngram::NoRepeatNgram,
    &logit_bias::LogitBias,
    &min_tokens::MinTokens,
    &logits_processors::LogitsProcessors,
    &penalties::Penalties,
    &dry::Dry,
    &greedy::Greedy,
    &top_n_sigma::TopNSigma,
    &temperature::Temperature,
    &dynamic_temperature::DynamicTemperature,
    &min_p::MinP,
    &top_k::TopK,
    &top_p::TopP,
    &typical_p::TypicalP,
    &epsilon_cutoff::EpsilonCutoff,
    &eta_cutoff::EtaCutoff,
    &top_h::TopH,
    &xtc::Xtc,
    &mirostat::Mirostat,
];

/// What is named where a logit is negative infinity before any stage.
const MODEL: &str = "model";

/// What a stage may know besides the logits.
#[derive(Clone, Copy)]
struct Context<'a> {
    params: &'a SamplingParams,
    history: &'a History,
    /// Of the token that is to be sampled.
    position: usize,
    /// The tokens that the request's grammar allows, where it has one.
    mask: Option<&'a TokenMask>,
}

/// One step on the way from logits to a choice.
trait Stage: Sync {
    /// The parameter's name, as a trace shows it.
    fn name(&self) -> &'static str;

    /// Whether it would change anything.
    fn is_active(&self, context: Context<'_>) -> bool;

    /// Changes logits, or drops candidates; a logit of negative infinity is dropped. There is always one left before; a
    /// filter leaves one.
    ///
    /// # Errors
    /// What ends the request.
    fn apply(&self, candidates: &mut Candidates<'_>, context: Context<'_>) -> Result<(), SampleError>;
}

/// Why a row of logits gives no token. Only the request it belongs to is concerned.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SampleError {
    /// The model computed something that is not a logit.
    #[error(
        "{count} of {vocab_size} logits of position {position} are NaN or infinite, the first that of token {token}"
    )]
    NotFinite {
        /// Logits that are NaN or positive infinity.
        count: usize,
        /// The lowest id of them.
        token: u32,
        /// Logits in the row.
        vocab_size: usize,
        /// Position of the token that was to be sampled.
        position: usize,
    },
    /// Every token is forbidden.
    #[error("no token is left to sample at position {position}: every one is forbidden (last by {stage})")]
    NothingLeft {
        /// Position of the token that was to be sampled.
        position: usize,
        /// The stage after which nothing was left.
        stage: &'static str,
    },
    /// The caller's own function failed.
    #[error("at position {position}: {message}")]
    Processor {
        /// Position of the token that was to be sampled.
        position: usize,
        /// What went wrong.
        message: String,
    },
}

/// A sampled token, and what was asked to be told about it.
#[derive(Debug, Clone, PartialEq)]
pub struct Sample {
    /// The token.
    pub token: u32,
    /// Its log-probability and those of the most likely ones, if asked for.
    pub logprobs: Option<TokenLogprobs>,
    /// The entropy of the raw logits in nats, if asked for.
    pub entropy: Option<f64>,
    /// How it was picked, if asked for.
    pub trace: Option<SampleTrace>,
}

/// What is left of a row of logits after all stages.
#[derive(Debug, Clone, PartialEq)]
pub struct Distribution {
    /// The ids kept, ascending.
    pub ids: Vec<u32>,
    /// The probability of each, in the order of `ids`; their sum is 1.
    pub probabilities: Vec<f64>,
    /// The token drawn.
    pub chosen: u32,
    /// The uniform number in [0, 1) that drew it; none when greedy.
    pub draw: Option<f64>,
}

/// Samples tokens; keeps its memory from one to the next.
#[derive(Debug)]
pub struct Sampler {
    isa: Isa,
    room: Room,
    /// Log-probabilities of a row, where it is one of a beam search.
    logprobs: Vec<f32>,
}

impl Default for Sampler {
    /// With the instruction set that the environment asks for, as everything else. It does not change what is sampled.
    fn default() -> Self {
        Self {
            isa: Isa::from_environment().unwrap_or_else(|_| Isa::best()),
            room: Room::default(),
            logprobs: Vec::new(),
        }
    }
}

impl Sampler {
    /// Samples the token at `position` from `logits [vocab]`, one of `mask` where there is one. The history moves on
    /// when the token is pushed to it; what it knows of logits, it learns here.
    ///
    /// # Errors
    /// [`SampleError`] if the row gives no token.
    pub fn sample(
        &mut self,
        logits: &[f32],
        params: &SamplingParams,
        history: &mut History,
        mask: Option<&TokenMask>,
        position: usize,
    ) -> Result<Sample, SampleError> {
        let isa = self.isa;
        let mut candidates = self.candidates(logits, position)?;
        let mut trace = params.trace.map(|count| trace::Recorder::new(isa, logits, count));
        filter(&mut candidates, Context { params, history, mask, position }, trace.as_mut())?;
        let uniform = uniform(params, position);
        let weighed = candidates.weigh();
        let token = draw::draw(weighed, uniform.unwrap_or(0.0));
        mirostat::observe(history, params, weighed, token);
        let trace = trace.map(|recorder| recorder.finish(logits, weighed, token, uniform));
        let logprobs = params.logprobs.map(|count| logprobs::logprobs(isa, logits, token, count));
        let entropy = params.entropy.then(|| self.room.entropy(isa, logits));
        Ok(Sample { token, logprobs, entropy, trace })
    }

    /// The log-probability of a token of the prompt, and those of the `count` most likely ones in its place, from the
    /// logits of the `position` that it has.
    ///
    /// # Errors
    /// [`SampleError::NotFinite`].
    pub fn logprobs(
        &mut self,
        logits: &[f32],
        token: u32,
        count: usize,
        position: usize,
    ) -> Result<TokenLogprobs, SampleError> {
        self.candidates(logits, position)?;
        Ok(logprobs::logprobs(self.isa, logits, token, count))
    }

    /// The log-probabilities of the `count` most likely tokens, most likely first, from the logits of a `position`.
    ///
    /// # Errors
    /// [`SampleError::NotFinite`].
    pub fn top_logprobs(
        &mut self,
        logits: &[f32],
        count: usize,
        position: usize,
    ) -> Result<Vec<TokenLogprob>, SampleError> {
        self.candidates(logits, position)?;
        Ok(logprobs::top_logprobs(self.isa, logits, count))
    }

    /// Every token of a row, which must not have NaN or positive infinity. Negative infinity is a model's own way to
    /// forbid a token.
    fn candidates<'a>(&'a mut self, logits: &'a [f32], position: usize) -> Result<Candidates<'a>, SampleError> {
        Candidates::new(self.isa, logits, &mut self.room).ok_or_else(|| {
            let bad = |&(_, logit): &(usize, &f32)| logit.is_nan() || *logit == f32::INFINITY;
            let mut found = logits.iter().enumerate().filter(bad);
            let token = found.next().map_or(0, |(id, _)| id as u32);
            SampleError::NotFinite { count: 1 + found.count(), token, vocab_size: logits.len(), position }
        })
    }
}

/// Runs the active stages.
fn filter(
    candidates: &mut Candidates<'_>,
    context: Context<'_>,
    mut trace: Option<&mut trace::Recorder>,
) -> Result<(), SampleError> {
    let position = context.position;
    if candidates.highest_logit() == f32::NEG_INFINITY {
        return Err(SampleError::NothingLeft { position, stage: MODEL });
    }
    for stage in STAGES.iter().filter(|stage| stage.is_active(context)) {
        stage.apply(candidates, context)?;
        if let Some(trace) = trace.as_deref_mut() {
            trace.record(stage.name(), candidates);
        }
        if candidates.highest_logit() == f32::NEG_INFINITY {
            return Err(SampleError::NothingLeft { position, stage: stage.name() });
        }
    }
    Ok(())
}

/// What the sampler makes of one row of logits: a pure function, which tests compare with other implementations.
///
/// `prompt` and `output` are the tokens before the one to sample; its position is their length together.
///
/// # Errors
/// [`SampleError`] where a request would end with it.
pub fn distribution(
    logits: &[f32],
    params: &SamplingParams,
    prompt: &[u32],
    output: &[u32],
) -> Result<Distribution, SampleError> {
    let position = prompt.len() + output.len();
    let history = History::new(params, prompt, output);
    let mut sampler = Sampler::default();
    let mut candidates = sampler.candidates(logits, position)?;
    filter(&mut candidates, Context { params, history: &history, mask: None, position }, None)?;
    let draw = uniform(params, position);
    let weighed = candidates.weigh();
    let total = weighed.total();
    let (ids, probabilities) = weighed.left().map(|(id, weight)| (id, weight / total)).unzip();
    Ok(Distribution { ids, probabilities, chosen: draw::draw(weighed, draw.unwrap_or(0.0)), draw })
}

fn uniform(params: &SamplingParams, position: usize) -> Option<f64> {
    (!params.is_greedy()).then(|| rng::uniform(params.seed, position as u64))
}
