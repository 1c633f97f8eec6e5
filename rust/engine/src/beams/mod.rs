//! Beam search: finds the most likely continuations of a prompt.
//!
//! A beam search is one request with up to `beam_width` sequences, the beams. Beams are scheduled, computed and
//! preempted like all sequences, and share pages: a fork copies the page tables only, and a page is copied on write.
//! When the last token of a beam is computed, the beam is expanded: its most likely continuations are stored with it,
//! and it has nothing to compute until its siblings are expanded too. With a small budget or pool this may take several
//! steps; expansions belong to tokens and survive preemption. Then [`Search`] selects the continuations that become the
//! next beams.
//!
//! Results and scores depend on the request alone, because each beam's row of logits does, bit for bit.
//!
//! The algorithm is `_beam_search` of Hugging Face transformers (`generation/utils.py`, 5.23), including stop handling,
//! length penalty and the three forms of early stopping. Sums are f64 instead of f32. Ties, which transformers leaves
//! open, go to the better beam, then to the lower token id.

mod search;

use std::collections::{BTreeMap, BTreeSet};

use crate::sampling::{Continuation, SampleError, Sampler};
use crate::scheduler::Scheduler;
use crate::sequence::Sequence;
use crate::{FinishReason, Metrics, RequestId, SamplingParams, StepOutput};
pub(crate) use search::Child;
use search::Search;

/// A finished sequence of a beam search.
#[derive(Debug, Clone, PartialEq)]
pub struct Hypothesis {
    /// Output token ids, including a final stop token.
    pub token_ids: Vec<u32>,
    /// Sum of the tokens' log-probabilities after the sampling stages.
    pub cumulative_logprob: f64,
    /// Length-normalized score: the sum divided by `tokens ^ length_penalty`.
    pub score: f64,
    /// Stop token that finished it; `None` if it reached the length limit.
    pub stop_token: Option<u32>,
}

impl Hypothesis {
    /// Returns the finish reason.
    #[must_use]
    pub fn finish(&self) -> FinishReason {
        self.stop_token.map_or(FinishReason::Length, |token| FinishReason::Stop { token })
    }
}

/// Beam search state of a sequence.
#[derive(Debug, Default)]
pub(crate) struct Beam {
    /// Index among its siblings, best first.
    pub index: usize,
    /// Sum of the log-probabilities of its output tokens.
    pub score: f64,
    /// Candidate continuations, once its last token is computed. The beam has no pending tokens then.
    pub expansion: Option<Result<Vec<Continuation>, SampleError>>,
}

/// All running beam searches.
#[derive(Debug, Default)]
pub(crate) struct BeamSearches(BTreeMap<RequestId, Search>);

impl BeamSearches {
    /// Starts a search if the request is a beam search; its sequences have at most `max_output_tokens` output tokens.
    pub fn start(&mut self, id: RequestId, params: &SamplingParams, max_output_tokens: usize) {
        self.0.extend(Search::new(params, max_output_tokens).map(|search| (id, search)));
    }

    /// Removes a finished request, whether or not it is a beam search.
    pub fn remove(&mut self, id: RequestId) {
        self.0.remove(&id);
    }

    /// Advances those of the given searches whose beams are all expanded. Returns the outputs of searches that finish.
    pub fn advance(
        &mut self,
        searches: &BTreeSet<RequestId>,
        scheduler: &mut Scheduler,
        metrics: &mut Metrics,
    ) -> Vec<StepOutput> {
        searches.iter().filter_map(|&id| self.advance_one(id, scheduler, metrics)).collect()
    }

    fn advance_one(&mut self, id: RequestId, scheduler: &mut Scheduler, metrics: &mut Metrics) -> Option<StepOutput> {
        let search = self.0.get_mut(&id)?;
        let mut beams = scheduler.take_expanded_beams(id)?;
        let (continuations, errors): (Vec<_>, Vec<_>) = beams.iter_mut().map(Sequence::take_expansion).unzip();
        let mut errors: Vec<SampleError> = errors.into_iter().flatten().collect();
        // A beam without continuations is dropped; any other error ends the search.
        let fatal = errors.iter().position(|error| !matches!(error, SampleError::NothingLeft { .. }));
        let children = if fatal.is_some() { Vec::new() } else { search.advance(&search_beams(&beams, &continuations)) };
        let preemptions = beams.iter().map(|beam| beam.timing.preemptions).sum();
        let first = beams.first_mut()?;
        first.timing.preemptions = preemptions;
        if fatal.is_none() {
            let since_last = first.record_token();
            metrics.record_token(since_last, &first.timing, children.is_empty());
        }
        if !children.is_empty() {
            scheduler.queue_beams(beams, &children);
            return None;
        }
        let mut output = StepOutput::empty(first);
        let best = self.0.remove(&id)?.into_hypotheses();
        output.finish = match (fatal, best.first()) {
            (Some(fatal), _) => Some(FinishReason::Sampling(errors.swap_remove(fatal))),
            (None, Some(best)) => Some(best.finish()),
            // No beam has a continuation.
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

/// Returns the beams in the form that [`Search`] takes.
fn search_beams<'a>(beams: &'a [Sequence], continuations: &'a [Vec<Continuation>]) -> Vec<search::Beam<'a>> {
    let view = |(sequence, continuations): (&'a Sequence, &'a Vec<Continuation>)| search::Beam {
        output: &sequence.tokens[sequence.prompt_len..],
        score: sequence.beam.as_ref().map_or(0.0, |beam| beam.score),
        continuations,
    };
    beams.iter().zip(continuations).map(view).collect()
}

/// Expands a beam: stores its most likely continuations from the logits of its last token. Returns the error if it has
/// none.
pub(crate) fn expand_beam(sequence: &mut Sequence, row: &[f32], sampler: &mut Sampler) -> Option<SampleError> {
    let Sequence { params, history, tokens, beam, .. } = sequence;
    let expansion = sampler.continuations(row, params, history, tokens.len(), Search::candidates_per_beam(params));
    let error = expansion.as_ref().err().cloned();
    beam.as_mut()?.expansion = Some(expansion);
    error
}
