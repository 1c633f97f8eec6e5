//! Draft model: a smaller model with the same vocabulary that drafts for all sequences.
//!
//! It has its own pages with the KV cache of the sequences that it drafts for. It samples with the request's parameters
//! and the random number of each position, so that at any temperature the two models mostly agree on the token where
//! they agree on the probabilities. When its pages run out, higher-ranked sequences keep them and the others get no
//! drafts.
//!
//! Groups of state advance with every draft. The states after the tokens of the sequence are therefore held while it
//! drafts; after a rejected draft the sequence returns to them and the accepted ones are computed again.

use std::collections::BTreeMap;
use std::time::Instant;

use ferrule_kernels::Cancel;
use ferrule_model::{Batch, ForwardError, LanguageModel, LogitRows, SequenceChunk};

use crate::pages::{KvCacheManager, PageTables};
use crate::sampling::{History, Sampler};
use crate::sequence::Sequence;
use crate::{ConfigError, RequestId, SamplingParams};

/// Weight of a new measurement of the time per draft.
const SMOOTHING: f64 = 0.2;

/// A draft model and its limits.
#[derive(Debug)]
pub struct DraftModel<M> {
    /// The model. It must have the vocabulary of the target model.
    pub model: M,
    /// Number of KV pages per group of layers.
    pub pages: Vec<usize>,
    /// Maximum number of tokens of a sequence.
    pub max_model_len: usize,
}

/// Limits of a forward pass.
#[derive(Debug, Clone, Copy)]
pub(super) struct Limits {
    /// Maximum number of sequences.
    pub sequences: usize,
    /// Maximum number of tokens.
    pub tokens: usize,
}

/// Runs the draft model.
#[derive(Debug)]
pub(super) struct DraftModelRunner<M> {
    model: M,
    pages: KvCacheManager,
    max_model_len: usize,
    limits: Limits,
    states: BTreeMap<RequestId, DraftState>,
    logits: Vec<f32>,
    /// Seconds per draft step for all sequences together; 0 until measured.
    pub seconds: f64,
}

/// KV cache of a sequence in the draft model.
#[derive(Debug)]
struct DraftState {
    tables: PageTables,
    /// Tokens whose keys and values are in the pages, including drafts of the latest step.
    tokens: Vec<u32>,
    /// States after the first `verified` tokens, which are not drafts.
    states: PageTables,
    verified: usize,
    /// The request's parameters without log-probabilities, trace and logits processors, which apply to sampled tokens
    /// only.
    params: SamplingParams,
}

/// A sequence that gets drafts in the current step.
struct Drafting {
    /// Index in the running sequences.
    index: usize,
    /// Maximum number of drafts.
    limit: usize,
    history: History,
    /// Tokens of the next forward pass.
    next: Vec<u32>,
    /// Whether the pass reaches the last token, so that its logits are needed.
    is_last: bool,
}

impl<M: LanguageModel> DraftModelRunner<M> {
    /// # Errors
    /// Returns [`ConfigError`] if the vocabularies differ, the draft model has no logits, or the page pools do not
    /// match it.
    pub fn new(draft: DraftModel<M>, target: &M, limits: Limits) -> Result<Self, ConfigError> {
        let DraftModel { model, pages, max_model_len } = draft;
        let (expected, given) = (target.vocab_size(), model.vocab_size());
        if expected != given {
            return Err(ConfigError::DraftVocab { expected, given });
        }
        if !model.capabilities().logits {
            return Err(ConfigError::DraftNoLogits);
        }
        let groups = model.kv_groups();
        if groups.len() != pages.len() {
            return Err(ConfigError::PoolCount { expected: groups.len(), given: pages.len() });
        }
        let pages = KvCacheManager::new(groups, &pages, false);
        let max_model_len = max_model_len.min(pages.tokens_of_one_sequence());
        Ok(Self { model, pages, max_model_len, limits, states: BTreeMap::new(), logits: Vec::new(), seconds: 0.0 })
    }

    /// Returns how many drafts fit into the context after `tokens` tokens.
    pub fn max_drafts(&self, tokens: usize) -> usize {
        self.max_model_len.saturating_sub(tokens)
    }

    /// Drafts tokens for running sequences, given as (index, maximum) by rank. It prefills at most `prompt_tokens`
    /// tokens in total; a sequence that is not fully prefilled gets no draft in this step.
    ///
    /// # Errors
    /// Returns the draft model's [`ForwardError`].
    pub fn draft(
        &mut self,
        running: &mut [Sequence],
        wanted: &[(usize, usize)],
        prompt_tokens: usize,
        sampler: &mut Sampler,
        cancel: &Cancel,
    ) -> Result<(), ForwardError> {
        self.release(|id| !running.iter().any(|sequence| sequence.id == id));
        let mut batch = self.prepare(running, wanted, prompt_tokens);
        let mut depth = 0;
        while !batch.is_empty() {
            let begin = Instant::now();
            self.forward(running, &batch, cancel)?;
            if depth == 0 {
                batch.iter().for_each(|drafting| self.hold_states(running[drafting.index].id));
            } else {
                let weight = if self.seconds == 0.0 { 1.0 } else { SMOOTHING };
                self.seconds += weight * (begin.elapsed().as_secs_f64() - self.seconds);
            }
            depth += 1;
            let mut rows = self.logits.chunks_exact(self.model.vocab_size());
            let Self { pages, states, .. } = self;
            batch.retain_mut(|drafting| {
                if !drafting.is_last {
                    return false;
                }
                let (Some(row), sequence) = (rows.next(), &mut running[drafting.index]) else { return false };
                let Some(DraftState { tables, tokens, params, .. }) = states.get_mut(&sequence.id) else {
                    return false;
                };
                let position = tokens.len();
                let Ok(sample) = sampler.sample(row, params, &mut drafting.history, None, position) else {
                    return false;
                };
                sequence.drafts.push(sample.token);
                drafting.history.push(sample.token);
                drafting.next = vec![sample.token];
                if depth == drafting.limit || pages.allocatable_slots(tables, tokens.len(), 1) == 0 {
                    return false;
                }
                let mut moves = Vec::new();
                pages.allocate_slots(tables, tokens.len(), 1, &mut moves);
                true
            });
        }
        Ok(())
    }

    /// Selects the tokens to prefill for each sequence and allocates their pages.
    fn prepare(&mut self, running: &[Sequence], wanted: &[(usize, usize)], prompt_tokens: usize) -> Vec<Drafting> {
        let mut left = self.limits.tokens;
        let mut prefill_left = prompt_tokens;
        let mut batch = Vec::new();
        for &(index, limit) in wanted.iter().take(self.limits.sequences) {
            let sequence = &running[index];
            let tables = || self.pages.private_tables();
            let draft_state = self.states.entry(sequence.id).or_insert_with(|| DraftState {
                tables: tables(),
                tokens: Vec::new(),
                states: tables(),
                verified: 0,
                params: SamplingParams {
                    logprobs: None,
                    entropy: false,
                    trace: None,
                    logits_processor: None,
                    ..(*sequence.params).clone()
                },
            });
            let DraftState { tables, tokens, states, verified, .. } = draft_state;
            let same = tokens.iter().zip(&sequence.tokens).take_while(|(read, token)| read == token).count();
            let mut read = same.min(sequence.tokens.len() - 1);
            if self.pages.has_states() && read < tokens.len() {
                if read < *verified {
                    // No token was sampled after the latest drafts, since the step was cancelled or pages were missing.
                    continue;
                }
                read = *verified;
                self.pages.return_to_states(tables, states);
            }
            tokens.truncate(read);
            self.pages.release_beyond(tables, read);
            self.pages.release_out_of_window(tables, read);
            // Older states are not needed: all tokens that were read are verified.
            self.hold_states(sequence.id);
            let pending = sequence.tokens.len() - read;
            // Tokens accepted in the latest step do not count as prefill.
            let max_read = if pending <= limit + 1 { pending } else { prefill_left };
            let count = pending.min(max_read).min(left);
            let fits = self.evict_lower_ranked(running, index, count);
            if fits == 0 {
                continue;
            }
            let Some(DraftState { tables, .. }) = self.states.get_mut(&sequence.id) else { continue };
            let mut moves = Vec::new();
            self.pages.allocate_slots(tables, read, fits, &mut moves);
            left -= fits;
            prefill_left = prefill_left.saturating_sub(fits);
            batch.push(Drafting {
                index,
                limit,
                // The history may be as long as the sequence, so it is cloned only for sequences that are sampled.
                history: if fits == pending { sequence.history.clone() } else { History::default() },
                next: sequence.tokens[read..][..fits].to_vec(),
                is_last: fits == pending,
            });
        }
        batch
    }

    /// Returns how many of `count` tokens can get pages, evicting the draft KV cache of lower-ranked sequences if
    /// needed.
    fn evict_lower_ranked(&mut self, running: &[Sequence], index: usize, count: usize) -> usize {
        let mut behind = running[index + 1..].iter().rev();
        loop {
            let fits = self.states.get(&running[index].id).map_or(0, |DraftState { tables, tokens, .. }| {
                self.pages.allocatable_slots(tables, tokens.len(), count)
            });
            if fits == count {
                return fits;
            }
            let Some(last) = behind.next() else { return fits };
            self.release(|id| id == last.id);
        }
    }

    /// Holds the states after the tokens that a sequence has read, instead of earlier ones.
    fn hold_states(&mut self, id: RequestId) {
        if let Some(DraftState { tables, tokens, states, verified, .. }) = self.states.get_mut(&id) {
            self.pages.release(states);
            *states = self.pages.hold_states(tables);
            *verified = tokens.len();
        }
    }

    /// Releases the pages of the sequences for which `is_gone` holds.
    pub fn release(&mut self, is_gone: impl Fn(RequestId) -> bool) {
        let Self { pages, states, .. } = self;
        states.retain(|&id, DraftState { tables, states, .. }| {
            let gone = is_gone(id);
            if gone {
                pages.release(tables);
                pages.release(states);
            }
            !gone
        });
    }

    /// Runs one forward pass over the next tokens of each sequence.
    fn forward(&mut self, running: &[Sequence], batch: &[Drafting], cancel: &Cancel) -> Result<(), ForwardError> {
        let Self { model, pages, states, logits, .. } = self;
        let chunks = batch.iter().filter_map(|drafting| {
            let sequence = &running[drafting.index];
            let DraftState { tables, tokens, .. } = states.get(&sequence.id)?;
            Some(SequenceChunk {
                tokens: &drafting.next,
                first_position: tokens.len(),
                prompt_len: sequence.prompt_len,
                pages: tables.tables(),
                token_types: &[],
                features: &[],
                logits: if drafting.is_last { LogitRows::Last } else { LogitRows::None },
                adapter: None,
            })
        });
        let sequences: Vec<SequenceChunk<'_>> = chunks.collect();
        model.forward(Batch { sequences: &sequences }, cancel, logits)?;
        for drafting in batch {
            if let Some(DraftState { tables, tokens, .. }) = states.get_mut(&running[drafting.index].id) {
                let begin = tokens.len();
                tokens.extend(&drafting.next);
                pages.keep_states(tables, begin, tokens.len(), tokens.len());
            }
        }
        Ok(())
    }

    /// Checks that every page belongs to a sequence that exists.
    ///
    /// # Errors
    /// Returns a description of the first inconsistency.
    pub fn audit(&self, is_there: impl Fn(RequestId) -> bool) -> Result<(), String> {
        if let Some(RequestId(id)) = self.states.keys().copied().find(|&id| !is_there(id)) {
            return Err(format!("the draft model has pages of request {id}, which is gone"));
        }
        self.pages.audit(self.states.values().flat_map(|state| [&state.tables, &state.states]))
    }
}
