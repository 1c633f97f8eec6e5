//! Asks the sources of all sequences for drafts, and takes those that are worth it.

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

/// What a step may spend on drafts.
#[derive(Debug, Clone, Copy)]
pub(crate) struct DraftLimits {
    /// Tokens of a sequence, with its drafts and the token that follows them.
    pub max_total_tokens: usize,
    /// Tokens of prompts that a draft model may read.
    pub prompt_tokens: usize,
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Speculator<M> {
    config: SpeculativeConfig,
    costs: StepCosts,
    model: Option<DraftModelRunner<M>>,
}

impl<M: LanguageModel> Speculator<M> {
    /// # Errors
    /// [`ConfigError`] if a draft model does not fit.
    pub fn new(config: &EngineConfig, draft: Option<DraftModel<M>>, target: &M) -> Result<Self, ConfigError> {
        let limits = Limits { sequences: config.max_num_seqs, tokens: config.max_num_batched_tokens };
        let model = draft.map(|draft| DraftModelRunner::new(draft, target, limits)).transpose()?;
        Ok(Self { config: config.speculative.clone(), costs: StepCosts::new(), model })
    }

    /// The sources of a request's sequence, with the request's prediction. A beam has none: its next token is not sampled.
    pub fn sources(&self, request: &Request, prediction: Vec<u32>) -> Drafts {
        if request.params.beam_search.is_some() {
            return Drafts::default();
        }
        let grammar = request.params.structured_outputs.is_some();
        Drafts::new(self.config.method, self.model.is_some(), request.prompt.len(), prediction, grammar)
    }

    /// Gives the sequences that decode their drafts for the next step.
    ///
    /// # Errors
    /// [`ForwardError`] of a draft model.
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
        for (index, sequence) in running.iter_mut().enumerate() {
            sequence.drafts.clear();
            if sequence.pending() != 1 || sequence.wants_prompt_logprobs() {
                continue;
            }
            rows += 1;
            let most = sequence.max_drafts(limits.max_total_tokens).min(self.config.num_speculative_tokens);
            if most > 0
                && let Some(proposal) = self.proposal(sequence, most)
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
            let probes = count == 0 && drafts.acceptance().is_some_and(Acceptance::rest);
            let count = if probes { 1 } else { count };
            drafts.truncate(count);
            if count > 0 && drafts.are_from_model() {
                from_model.push((index, count));
            }
        }
        match &mut self.model {
            Some(model) if !from_model.is_empty() => {
                model.guess(running, &from_model, limits.prompt_tokens, sampler, cancel)
            }
            _ => Ok(()),
        }
    }

    /// Up to `most` drafts of a sequence: those of its own sources are there, those of the model are to be made.
    fn proposal(&self, sequence: &mut Sequence, most: usize) -> Option<Proposal> {
        let Sequence { drafts, tokens, constraint, .. } = sequence;
        drafts.look_up(tokens, most, constraint.as_mut());
        let (count, seconds) = match &self.model {
            Some(model) if drafts.are_from_model() => (most.min(model.room(tokens.len())), model.seconds),
            _ => (drafts.tokens().len(), 0.0),
        };
        let rate = drafts.acceptance().filter(|_| count > 0)?.rate();
        Some(Proposal { count, rate, seconds })
    }

    /// Takes note of a step that decoded so many rows and nothing else.
    pub fn record(&mut self, rows: usize, seconds: f64) {
        self.costs.record(rows, seconds);
    }

    /// Gives back a draft model's pages of sequences that are gone.
    pub fn forget(&mut self, is_gone: impl Fn(RequestId) -> bool) {
        if let Some(model) = &mut self.model {
            model.forget(is_gone);
        }
    }

    /// Checks that every page of a draft model is accounted for, and is that of a sequence which is there.
    ///
    /// # Errors
    /// What is wrong.
    pub fn audit(&self, is_there: impl Fn(RequestId) -> bool) -> Result<(), String> {
        self.model.as_ref().map_or(Ok(()), |model| model.audit(is_there))
    }
}
