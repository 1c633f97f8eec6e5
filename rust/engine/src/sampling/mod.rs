//! Sampling: from a row of logits to a token.
//!
//! # Order
//! The order is vLLM's. Log-probabilities are computed from the raw logits, before any stage. Then the stages run in
//! the order of `STAGES`:
//!
//! | stage | effect |
//! |---|---|
//! | `structured_outputs` | drops tokens that the grammar does not allow |
//! | `allowed_token_ids` | keeps only the given tokens |
//! | `bad_words` | drops tokens that complete a forbidden sequence |
//! | `no_repeat_ngram_size` | drops tokens that would repeat an n-gram |
//! | `logit_bias` | adds a bias to the logits of given tokens |
//! | `min_tokens` | drops stop tokens while the output is too short |
//! | `logits_processors` | applies the caller's own functions |
//! | `penalties` | applies repetition, then frequency, then presence penalty |
//! | `dry` | penalizes tokens that extend a repetition, growing with its length |
//! | `greedy` | at temperature 0 keeps only the most likely token |
//! | `top_n_sigma` | keeps logits within this many standard deviations of the highest |
//! | `temperature` | divides the logits |
//! | `dynatemp` | divides the logits by a temperature that follows the entropy, instead of `temperature` |
//! | `min_p` | drops tokens whose probability is below this fraction of the highest |
//! | `top_k` | keeps this many of the most likely tokens |
//! | `top_p` | keeps the smallest set of most likely tokens with this total probability |
//! | `typical_p` | keeps the tokens of this total probability whose surprisal is nearest to the entropy |
//! | `epsilon_cutoff` | drops tokens below this probability |
//! | `eta_cutoff` | drops tokens below a probability that falls with the entropy |
//! | `top_h` | keeps the most likely tokens that hold this share of the entropy |
//! | `xtc` | with some probability drops all likely tokens except the least likely of them |
//! | `mirostat` | drops tokens above a surprisal bound, adapted so that the surprisal stays near a target |
//!
//! Finally one of the remaining tokens is drawn. (Hugging Face's order differs in min-p, which it applies after top-p.
//! Results differ only if both are active: min-p compares with the most likely token, which top-k and top-p never drop,
//! but the tokens that it drops reduce top-p's mass.) Stages that vLLM lacks are in the position of Hugging Face, and
//! otherwise where their authors or llama.cpp recommend them for a temperature that is applied first. Each filter sees
//! the probabilities over the tokens that the earlier stages kept. docs/sampling.md has the formulas and sources.
//!
//! # Ties and exactness
//! Among equal logits the lower id counts as more likely; only top-k keeps all tokens that tie with the last one kept,
//! like vLLM and Hugging Face. Logits are f32; probabilities and their sums are f64, added in an order that depends on
//! the logits alone. Exponentials are accurate to 2 parts in 10^15, and results are bitwise the same on every
//! instruction set.
//!
//! # Speed
//! A row is read once for the maxima of its blocks; further work depends on how many tokens remain (see `candidates`).
//! Few tokens are copied, many are processed in passes over the row, and a whole row is never sorted.
//!
//! # Random numbers
//! A uniform random number depends on the request's seed, the token's position and the purpose alone (see [`rng`]). So
//! a seeded request gives the same output alone, in a batch, after preemption, and under speculative decoding.
//!
//! # Beam search
//! A beam search draws no token. The stages down to `dry` act on log-probabilities, as in Hugging Face, and the most
//! likely tokens are returned (see `beams`); other stages are rejected together with beam search.
//!
//! # State of stages
//! Counts, repetition indexes and mirostat's bound are in the [`History`] of a sequence: successive positions are
//! sampled and pushed one after another.
//!
//! # Adding a stage
//! Add one file with a `Stage`, one line in `STAGES` and in the table above, its parameters in `SamplingParams`, and a
//! line in docs/sampling.md.

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
use candidates::{Buffers, Candidates};

/// All stages, in the order in which they run.
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

/// Stage name for tokens whose raw logit is negative infinity.
const MODEL: &str = "model";

/// Inputs of a stage besides the logits.
#[derive(Clone, Copy)]
struct Context<'a> {
    params: &'a SamplingParams,
    history: &'a History,
    /// Position of the token to sample.
    position: usize,
    /// Tokens that the grammar allows, if there is a grammar.
    mask: Option<&'a TokenMask>,
}

/// A stage of the sampling chain.
trait Stage: Sync {
    /// Returns the parameter's name, as in traces.
    fn name(&self) -> &'static str;

    /// Returns whether the stage has an effect.
    fn is_active(&self, context: Context<'_>) -> bool;

    /// Changes logits or drops candidates; a logit of negative infinity is dropped. At least one candidate remains
    /// before the stage, and a filter keeps at least one.
    ///
    /// # Errors
    /// Returns the error that ends the request.
    fn apply(&self, candidates: &mut Candidates<'_>, context: Context<'_>) -> Result<(), SampleError>;
}

/// Reason why a row of logits yields no token. Other requests are not affected.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SampleError {
    /// The model computed NaN or infinite logits.
    #[error("{count} of {vocab_size} logits at position {position} are NaN or infinite (first: token {token})")]
    NotFinite {
        /// Number of logits that are NaN or positive infinity.
        count: usize,
        /// Lowest token id with such a logit.
        token: u32,
        /// Vocabulary size.
        vocab_size: usize,
        /// Position of the token to sample.
        position: usize,
    },
    /// Every token is forbidden.
    #[error("no token is left to sample at position {position}: every one is forbidden (last by {stage})")]
    NothingLeft {
        /// Position of the token to sample.
        position: usize,
        /// Stage that dropped the last token.
        stage: &'static str,
    },
    /// A logits processor failed.
    #[error("at position {position}: {message}")]
    Processor {
        /// Position of the token to sample.
        position: usize,
        /// Error message.
        message: String,
    },
}

/// A sampled token with the requested details.
#[derive(Debug, Clone, PartialEq)]
pub struct Sample {
    /// The token.
    pub token: u32,
    /// Log-probabilities of the token and of the most likely tokens, if requested.
    pub logprobs: Option<TokenLogprobs>,
    /// Entropy of the raw logits in nats, if requested.
    pub entropy: Option<f64>,
    /// Sampling trace, if requested.
    pub trace: Option<SampleTrace>,
}

/// The distribution after all stages.
#[derive(Debug, Clone, PartialEq)]
pub struct Distribution {
    /// Remaining token ids, ascending.
    pub ids: Vec<u32>,
    /// Probabilities of these tokens; the sum is 1.
    pub probabilities: Vec<f64>,
    /// The sampled token.
    pub chosen: u32,
    /// Uniform random number in [0, 1) that selected it; `None` for greedy sampling.
    pub draw: Option<f64>,
}

/// Samples tokens; reuses its buffers between calls.
#[derive(Debug)]
pub struct Sampler {
    isa: Isa,
    buffers: Buffers,
    /// Log-probabilities of a beam search row.
    logprobs: Vec<f32>,
}

impl Default for Sampler {
    /// Uses the instruction set selected by the environment. It does not affect the results.
    fn default() -> Self {
        Self {
            isa: Isa::from_environment().unwrap_or_else(|_| Isa::best()),
            buffers: Buffers::default(),
            logprobs: Vec::new(),
        }
    }
}

impl Sampler {
    /// Samples the token at `position` from `logits [vocab]`, restricted to `mask` if there is one. The caller pushes
    /// the token to the history afterwards; mirostat's state is updated here.
    ///
    /// # Errors
    /// Returns [`SampleError`] if the row yields no token.
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
        let weighted = candidates.weigh();
        let token = draw::draw(weighted, uniform.unwrap_or(0.0));
        mirostat::observe(history, params, weighted, token);
        let trace = trace.map(|recorder| recorder.finish(logits, weighted, token, uniform));
        let logprobs = params.logprobs.map(|count| match params.processed_logprobs {
            true => logprobs::processed_logprobs(weighted, token, count),
            false => logprobs::logprobs(isa, logits, token, count),
        });
        let entropy = params.entropy.then(|| self.buffers.entropy(isa, logits));
        Ok(Sample { token, logprobs, entropy, trace })
    }

    /// Returns the log-probability of a prompt token and those of the `count` most likely tokens, from the logits at
    /// its `position`.
    ///
    /// # Errors
    /// Returns [`SampleError::NotFinite`] for NaN or infinite logits.
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

    /// Returns the log-probabilities of the `count` most likely tokens, most likely first.
    ///
    /// # Errors
    /// Returns [`SampleError::NotFinite`] for NaN or infinite logits.
    pub fn top_logprobs(
        &mut self,
        logits: &[f32],
        count: usize,
        position: usize,
    ) -> Result<Vec<TokenLogprob>, SampleError> {
        self.candidates(logits, position)?;
        Ok(logprobs::top_logprobs(self.isa, logits, count))
    }

    /// Returns all tokens of a row, which must not contain NaN or positive infinity. A model may forbid a token with
    /// negative infinity.
    fn candidates<'a>(&'a mut self, logits: &'a [f32], position: usize) -> Result<Candidates<'a>, SampleError> {
        Candidates::new(self.isa, logits, &mut self.buffers).ok_or_else(|| {
            let bad = |&(_, logit): &(usize, &f32)| logit.is_nan() || *logit == f32::INFINITY;
            let mut found = logits.iter().enumerate().filter(bad);
            let token = found.next().map_or(0, |(id, _)| id as u32);
            SampleError::NotFinite { count: 1 + found.count(), token, vocab_size: logits.len(), position }
        })
    }
}

/// Returns whether a sample needs only the largest logit of a row, the first one among equals: it is greedy, no stage acts
/// before, and no details are requested that depend on other logits. Negative infinity may then stand for all others.
///
/// Other samples need all of them. With a temperature, also those that `top_k` drops have an effect: scaled logits may be
/// equal where raw ones differ.
pub(crate) fn needs_only_largest(params: &SamplingParams, history: &History, position: usize) -> bool {
    if params.logprobs.is_some() || params.entropy || params.trace.is_some() || params.structured_outputs.is_some() {
        return false;
    }
    let context = Context { params, history, mask: None, position };
    let first = STAGES.iter().find(|stage| stage.is_active(context));
    first.is_some_and(|stage| stage.name() == greedy::Greedy.name())
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

/// Returns the sampling distribution of one row of logits: a pure function, compared with other implementations in
/// tests.
///
/// `prompt` and `output` are the tokens before the one to sample; its position is the sum of their lengths.
///
/// # Examples
/// ```
/// use ferrule_engine::{SamplingParams, sampling::distribution};
///
/// let params = SamplingParams { temperature: 0.7, top_k: 2, seed: 42, ..SamplingParams::default() };
/// let distribution = distribution(&[1.0, 3.0, 2.0, 0.5], &params, &[0], &[]).unwrap();
/// assert_eq!(distribution.ids, [1, 2]);
/// assert!(distribution.ids.contains(&distribution.chosen));
/// ```
///
/// # Errors
/// Returns [`SampleError`] where a request would end with it.
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
    let weighted = candidates.weigh();
    let total = weighted.total();
    let (ids, probabilities) = weighted.remaining().map(|(id, weight)| (id, weight / total)).unzip();
    Ok(Distribution { ids, probabilities, chosen: draw::draw(weighted, draw.unwrap_or(0.0)), draw })
}

fn uniform(params: &SamplingParams, position: usize) -> Option<f64> {
    (!params.is_greedy()).then(|| rng::uniform(params.seed, position as u64))
}
