//! Collects proposals from the sources of all sequences and chooses how many drafts to verify.

use ferrule_kernels::Cancel;
use ferrule_model::{ForwardError, LanguageModel};

use super::Drafts;
use super::acceptance::Acceptance;
use super::config::SpeculativeConfig;
use super::cost::StepCosts;
use super::length::{Proposal, draft_lengths};
use super::model::{DraftModel, DraftModelRunner, Limits};
use crate::sampling::Sampler;
use crate::sequence::Sequence;
use crate::{ConfigError, EngineConfig, Request, RequestId};

/// Limits on the drafts of a step.
#[derive(Debug, Clone, Copy)]
pub(crate) struct DraftLimits {
    /// Maximum number of tokens of a sequence, including drafts and the token sampled after them.
    pub max_total_tokens: usize,
    /// Prompt tokens that a draft model may prefill.
    pub prompt_tokens: usize,
}

/// Chooses the drafts of each step.
#[derive(Debug)]
pub(crate) struct Speculator<M> {
    config: SpeculativeConfig,
    costs: StepCosts,
    model: Option<DraftModelRunner<M>>,
}

impl<M: LanguageModel> Speculator<M> {
    /// # Errors
    /// Returns [`ConfigError`] if the draft model does not fit.
    pub fn new(config: &EngineConfig, draft: Option<DraftModel<M>>, target: &M) -> Result<Self, ConfigError> {
        let limits = Limits { sequences: config.max_num_seqs, tokens: config.max_num_batched_tokens };
        let model = draft.map(|draft| DraftModelRunner::new(draft, target, limits)).transpose()?;
        Ok(Self { config: config.speculative.clone(), costs: StepCosts::new(), model })
    }

    /// Creates the draft sources of a request. A beam has none, because its next token is not sampled.
    pub fn sources(&self, request: &Request, prediction: Vec<u32>) -> Drafts {
        if request.params.beam_search.is_some() {
            return Drafts::default();
        }
        let grammar = request.params.structured_outputs.is_some();
        Drafts::new(self.config.method, self.model.is_some(), request.prompt.len(), prediction, grammar)
    }

    /// Sets the drafts of all decoding sequences that the next step can compute.
    ///
    /// # Errors
    /// Returns the draft model's [`ForwardError`].
    pub fn propose(
        &mut self,
        running: &mut [Sequence],
        limits: DraftLimits,
        sampler: &mut Sampler,
        cancel: &Cancel,
    ) -> Result<(), ForwardError> {
        let mut rows = 0;
        let mut proposals = Vec::new();
        let mut proposing = Vec::new();
        for (index, sequence) in running.iter_mut().enumerate().filter(|(_, sequence)| sequence.in_flight == 0) {
            sequence.drafts.clear();
            if sequence.pending() != 1 || sequence.wants_prompt_logprobs() {
                continue;
            }
            rows += 1;
            let limit = sequence.max_drafts(limits.max_total_tokens).min(self.config.num_speculative_tokens);
            if limit > 0
                && let Some(proposal) = self.proposal(sequence, limit)
            {
                proposals.push(proposal);
                proposing.push(index);
            }
        }
        let counts = if self.config.adaptive {
            draft_lengths(&self.costs, rows, &proposals)
        } else {
            proposals.iter().map(|proposal| proposal.count).collect()
        };
        let mut from_model = Vec::new();
        for (index, count) in proposing.into_iter().zip(counts) {
            let drafts = &mut running[index].drafts;
            let is_probe = count == 0 && drafts.acceptance().is_some_and(Acceptance::skip_step);
            let count = if is_probe { 1 } else { count };
            drafts.truncate(count);
            if count > 0 && drafts.are_from_model() {
                from_model.push((index, count));
            }
        }
        match &mut self.model {
            Some(model) if !from_model.is_empty() => {
                model.draft(running, &from_model, limits.prompt_tokens, sampler, cancel)
            }
            _ => Ok(()),
        }
    }

    /// Proposes up to `limit` drafts for a sequence. Its own drafters fill them in now; the draft model runs later.
    fn proposal(&self, sequence: &mut Sequence, limit: usize) -> Option<Proposal> {
        let Sequence { drafts, tokens, constraint, .. } = sequence;
        drafts.propose(tokens, limit, constraint.as_mut());
        let (count, seconds) = match &self.model {
            Some(model) if drafts.are_from_model() => (limit.min(model.max_drafts(tokens.len())), model.seconds),
            _ => (drafts.tokens().len(), 0.0),
        };
        let rate = drafts.acceptance().filter(|_| count > 0)?.rate();
        Some(Proposal { count, rate, seconds })
    }

    /// Records the duration of a decode-only step.
    pub fn record(&mut self, rows: usize, seconds: f64) {
        self.costs.record(rows, seconds);
    }

    /// Releases the draft model's pages of the sequences for which `is_gone` holds.
    pub fn release(&mut self, is_gone: impl Fn(RequestId) -> bool) {
        if let Some(model) = &mut self.model {
            model.release(is_gone);
        }
    }

    /// Checks that every page of the draft model belongs to a sequence that exists.
    ///
    /// # Errors
    /// Returns a description of the first inconsistency.
    pub fn audit(&self, is_there: impl Fn(RequestId) -> bool) -> Result<(), String> {
        self.model.as_ref().map_or(Ok(()), |model| model.audit(is_there))
    }
}
