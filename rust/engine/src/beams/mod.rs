//! Beam search: the likeliest continuations of a prompt, looked for several at a time.
//!
//! It is one request of the caller's and up to `beam_width` sequences of the engine's, the beams. They are scheduled,
//! computed, sent back and computed again like all others, and share pages: a beam that goes on in several ways is
//! copied with its tables alone, and a page is copied when one of its holders writes to it. When the last token of a
//! beam is computed its likeliest continuations are kept with it, and it has nothing to compute until its siblings are
//! as far; what a budget or a small pool lets happen in later steps, since what is kept belongs to tokens and outlives
//! the pages. Then the search ([`Search`]) says which of all continuations go on.
//!
//! What is found depends on the request alone, and so do the scores: each beam's row of logits does, bit for bit.
//!
//! The search is that of Hugging Face's transformers (`_beam_search` in `generation/utils.py`, 5.23): which candidates
//! end, length penalty, and the three forms of early stopping. Sums are f64, where it has f32; among equals the better
//! beam comes first and then the lower token id, where it leaves that open.

mod search;

use std::collections::{BTreeMap, BTreeSet};

use crate::sampling::{Continuation, SampleError, Sampler};
use crate::scheduler::Scheduler;
use crate::sequence::Sequence;
use crate::{FinishReason, Metrics, RequestId, SamplingParams, StepOutput};
pub(crate) use search::Child;
use search::Search;

/// A complete sequence that a beam search has found.
#[derive(Debug, Clone, PartialEq)]
pub struct Hypothesis {
    /// Its tokens behind the prompt, a stop id included.
    pub token_ids: Vec<u32>,
    /// The sum of the tokens' log-probabilities, as the stages have left them.
    pub cumulative_logprob: f64,
    /// That sum divided by the number of tokens to the power of the length penalty.
    pub score: f64,
    /// The stop id that ended it; none where it is as long as it may get.
    pub stop_token: Option<u32>,
}

impl Hypothesis {
    /// Why it ended.
    #[must_use]
    pub fn finish(&self) -> FinishReason {
        self.stop_token.map_or(FinishReason::Length, |token| FinishReason::Stop { token })
    }
}

/// What a sequence is to the search that it is a beam of.
#[derive(Debug, Default)]
pub(crate) struct Beam {
    /// Its place among its siblings, the best first.
    pub index: usize,
    /// The sum of the log-probabilities of its tokens behind the prompt.
    pub score: f64,
    /// How it may go on, once its last token is computed. It has nothing to compute then.
    pub expansion: Option<Result<Vec<Continuation>, SampleError>>,
}

/// The beam searches under way.
#[derive(Debug, Default)]
pub(crate) struct BeamSearches(BTreeMap<RequestId, Search>);

impl BeamSearches {
    /// Takes note of a request, if it is a beam search. Its sequences have up to `max_total_tokens` behind the prompt.
    pub fn begin(&mut self, id: RequestId, params: &SamplingParams, max_total_tokens: usize) {
        self.0.extend(Search::new(params, max_total_tokens).map(|search| (id, search)));
    }

    /// Forgets a request that has ended, whatever it was.
    pub fn end(&mut self, id: RequestId) {
        self.0.remove(&id);
    }

    /// Lets those of the `touched` searches go on whose beams are all computed; what those requests get that end by it.
    pub fn advance(
        &mut self,
        touched: &BTreeSet<RequestId>,
        scheduler: &mut Scheduler,
        metrics: &mut Metrics,
    ) -> Vec<StepOutput> {
        touched.iter().filter_map(|&id| self.advance_one(id, scheduler, metrics)).collect()
    }

    fn advance_one(&mut self, id: RequestId, scheduler: &mut Scheduler, metrics: &mut Metrics) -> Option<StepOutput> {
        let search = self.0.get_mut(&id)?;
        let mut beams = scheduler.take_expanded_beams(id)?;
        let (ways, errors): (Vec<_>, Vec<_>) = beams.iter_mut().map(Sequence::take_expansion).unzip();
        let mut errors: Vec<SampleError> = errors.into_iter().flatten().collect();
        // A beam that cannot go on is none of the next ones; what else goes wrong ends the search.
        let fatal = errors.iter().position(|error| !matches!(error, SampleError::NothingLeft { .. }));
        let children = if fatal.is_some() { Vec::new() } else { search.advance(&views(&beams, &ways)) };
        let preemptions = beams.iter().map(|beam| beam.timing.preemptions).sum();
        let leader = beams.first_mut()?;
        leader.timing.preemptions = preemptions;
        if fatal.is_none() {
            let since_last = leader.record_token();
            metrics.record_token(since_last, &leader.timing, children.is_empty());
        }
        if !children.is_empty() {
            scheduler.queue_beams(beams, &children);
            return None;
        }
        let mut output = StepOutput::empty(leader);
        let best = self.0.remove(&id)?.into_best();
        output.finish = match (fatal, best.first()) {
            (Some(fatal), _) => Some(FinishReason::Sampling(errors.swap_remove(fatal))),
            (None, Some(best)) => Some(best.finish()),
            // No beam could go on.
            (None, None) => errors.pop().map(FinishReason::Sampling),
        };
        if fatal.is_none() {
            output.beams = best;
        }
        scheduler
            .drop_beams(beams, matches!(output.finish, Some(FinishReason::Sampling(SampleError::NotFinite { .. }))));
        Some(output)
    }
}

/// Beams as the search sees them.
fn views<'a>(beams: &'a [Sequence], ways: &'a [Vec<Continuation>]) -> Vec<search::Beam<'a>> {
    let view = |(sequence, continuations): (&'a Sequence, &'a Vec<Continuation>)| search::Beam {
        output: &sequence.tokens[sequence.prompt_len..],
        score: sequence.beam.as_ref().map_or(0.0, |beam| beam.score),
        continuations,
    };
    beams.iter().zip(ways).map(view).collect()
}

/// Keeps with a beam how it may go on, from the logits of its last token; or why it cannot, and says so.
pub(crate) fn expand_beam(sequence: &mut Sequence, row: &[f32], sampler: &mut Sampler) -> Option<SampleError> {
    let Sequence { params, history, tokens, beam, .. } = sequence;
    let expansion = sampler.continuations(row, params, history, tokens.len(), Search::wanted(params));
    let error = expansion.as_ref().err().cloned();
    beam.as_mut()?.expansion = Some(expansion);
    error
}
