//! A smaller model of the same vocabulary, which guesses for all sequences at once.
//!
//! It has pages of its own, in which it follows the tokens of the sequences that want its drafts. It samples as the
//! request does, with the random number of the position that a token is to have: so where the two models agree on what
//! is likely they mostly agree on the token, at any temperature. Its pages are nobody's concern but its own: where they
//! run out the first in rank have them, and the others go without drafts.

use std::collections::BTreeMap;
use std::time::Instant;

use ferrule_kernels::Cancel;
use ferrule_model::{Batch, ForwardError, LanguageModel, LogitRows, SequenceChunk};

use crate::pages::{PageTables, Pages};
use crate::sampling::{History, Sampler};
use crate::sequence::Sequence;
use crate::{ConfigError, RequestId, SamplingParams};

/// The share of a new measurement of what a draft takes.
const SMOOTHING: f64 = 0.2;

/// A model to guess with, and what it may use.
#[derive(Debug)]
pub struct DraftModel<M> {
    /// The model; its vocabulary is that of the model that it guesses for.
    pub model: M,
    /// Pages of its store, for each group of layers.
    pub pages: Vec<usize>,
    /// Tokens that it takes, at the most.
    pub max_model_len: usize,
}

/// What bounds a forward pass.
#[derive(Debug, Clone, Copy)]
pub(super) struct Limits {
    /// Sequences.
    pub sequences: usize,
    /// Tokens.
    pub tokens: usize,
}

/// See the module.
#[derive(Debug)]
pub(super) struct DraftModelRunner<M> {
    model: M,
    pages: Pages,
    max_model_len: usize,
    limits: Limits,
    cached_pages: BTreeMap<RequestId, DraftState>,
    logits: Vec<f32>,
    /// Seconds that one more draft for each of some sequences takes; 0 until it was measured.
    pub seconds: f64,
}

/// A sequence as far as the model has read it.
#[derive(Debug)]
struct DraftState {
    tables: PageTables,
    /// Tokens whose keys and values are in the pages, drafts of the latest step among them.
    tokens: Vec<u32>,
    /// The request's, but for what it wants to be told, and for its own functions: they hear of what is sampled alone.
    params: SamplingParams,
}

/// A sequence that gets drafts in the step at hand.
struct Guess {
    /// Which of the running sequences.
    index: usize,
    /// Drafts that it gets, at the most.
    most: usize,
    history: History,
    /// What the next pass computes.
    next: Vec<u32>,
    /// Whether its logits are wanted.
    is_last: bool,
}

impl<M: LanguageModel> DraftModelRunner<M> {
    /// # Errors
    /// [`ConfigError`] if the model does not fit the one that it guesses for, or its pages do not fit it.
    pub fn new(draft: DraftModel<M>, target: &M, limits: Limits) -> Result<Self, ConfigError> {
        let DraftModel { model, pages, max_model_len } = draft;
        let (expected, given) = (target.vocab_size(), model.vocab_size());
        if expected != given {
            return Err(ConfigError::DraftVocab { expected, given });
        }
        if !model.abilities().logits {
            return Err(ConfigError::DraftNoLogits);
        }
        let groups = model.kv_groups();
        if groups.len() != pages.len() {
            return Err(ConfigError::PoolCount { expected: groups.len(), given: pages.len() });
        }
        let pages = Pages::new(groups, &pages, false);
        let max_model_len = max_model_len.min(pages.tokens_of_one_sequence());
        Ok(Self {
            model,
            pages,
            max_model_len,
            limits,
            cached_pages: BTreeMap::new(),
            logits: Vec::new(),
            seconds: 0.0,
        })
    }

    /// Drafts of a sequence of so many tokens that the model has room for.
    pub fn room(&self, tokens: usize) -> usize {
        self.max_model_len.saturating_sub(tokens)
    }

    /// Gives running sequences, by index and rank, up to so many drafts each. Of what it has not read it reads no more
    /// than `prompt_tokens` in all; who is not read to the end gets no draft in this step.
    ///
    /// # Errors
    /// [`ForwardError`].
    pub fn guess(
        &mut self,
        running: &mut [Sequence],
        wanted: &[(usize, usize)],
        prompt_tokens: usize,
        sampler: &mut Sampler,
        cancel: &Cancel,
    ) -> Result<(), ForwardError> {
        self.forget(|id| !running.iter().any(|sequence| sequence.id == id));
        let mut guesses = self.read_on(running, wanted, prompt_tokens);
        let mut depth = 0;
        while !guesses.is_empty() {
            let begin = Instant::now();
            self.forward(running, &guesses, cancel)?;
            if depth > 0 {
                let easing = if self.seconds == 0.0 { 1.0 } else { SMOOTHING };
                self.seconds += easing * (begin.elapsed().as_secs_f64() - self.seconds);
            }
            depth += 1;
            let mut rows = self.logits.chunks_exact(self.model.vocab_size());
            let Self { pages, cached_pages, .. } = self;
            guesses.retain_mut(|guess| {
                if !guess.is_last {
                    return false;
                }
                let (Some(row), sequence) = (rows.next(), &mut running[guess.index]) else { return false };
                let Some(DraftState { tables, tokens, params }) = cached_pages.get_mut(&sequence.id) else {
                    return false;
                };
                let position = tokens.len();
                let Ok(sample) = sampler.sample(row, params, &mut guess.history, None, position) else { return false };
                sequence.drafts.push(sample.token);
                guess.history.push(sample.token);
                guess.next = vec![sample.token];
                if depth == guess.most || pages.allocatable_slots(tables, tokens.len(), 1) == 0 {
                    return false;
                }
                let mut moves = Vec::new();
                pages.allocate_slots(tables, tokens.len(), 1, &mut moves);
                true
            });
        }
        Ok(())
    }

    /// What there is to read of each sequence, with pages for it.
    fn read_on(&mut self, running: &[Sequence], wanted: &[(usize, usize)], prompt_tokens: usize) -> Vec<Guess> {
        let mut left = self.limits.tokens;
        let mut to_read = prompt_tokens;
        let mut guesses = Vec::new();
        for &(index, most) in wanted.iter().take(self.limits.sequences) {
            let sequence = &running[index];
            let tables = || self.pages.private_tables();
            let DraftState { tables, tokens, .. } =
                self.cached_pages.entry(sequence.id).or_insert_with(|| DraftState {
                    tables: tables(),
                    tokens: Vec::new(),
                    params: SamplingParams {
                        logprobs: None,
                        entropy: false,
                        trace: None,
                        logits_processor: None,
                        ..(*sequence.params).clone()
                    },
                });
            let same = tokens.iter().zip(&sequence.tokens).take_while(|(read, token)| read == token).count();
            let read = same.min(sequence.tokens.len() - 1);
            tokens.truncate(read);
            self.pages.release_beyond(tables, read);
            self.pages.release_out_of_window(tables, read);
            let pending = sequence.tokens.len() - read;
            // What the latest step accepted is not counted as a prompt.
            let most_read = if pending <= most + 1 { pending } else { to_read };
            let count = pending.min(most_read).min(left);
            let fits = self.evict_lower_ranked(running, index, count);
            if fits == 0 {
                continue;
            }
            let Some(DraftState { tables, .. }) = self.cached_pages.get_mut(&sequence.id) else { continue };
            let mut moves = Vec::new();
            self.pages.allocate_slots(tables, read, fits, &mut moves);
            left -= fits;
            to_read = to_read.saturating_sub(fits);
            guesses.push(Guess {
                index,
                most,
                // As long as the sequence, where a stage counts or compares tokens: only for who is sampled.
                history: if fits == pending { sequence.history.clone() } else { History::default() },
                next: sequence.tokens[read..][..fits].to_vec(),
                is_last: fits == pending,
            });
        }
        guesses
    }

    /// How many of so many tokens of a sequence can have pages, if those behind it in rank give theirs up.
    fn evict_lower_ranked(&mut self, running: &[Sequence], index: usize, count: usize) -> usize {
        let mut behind = running[index + 1..].iter().rev();
        loop {
            let fits = self.cached_pages.get(&running[index].id).map_or(0, |DraftState { tables, tokens, .. }| {
                self.pages.allocatable_slots(tables, tokens.len(), count)
            });
            if fits == count {
                return fits;
            }
            let Some(last) = behind.next() else { return fits };
            self.forget(|id| id == last.id);
        }
    }

    /// Gives back what is kept of some sequences.
    pub fn forget(&mut self, is_gone: impl Fn(RequestId) -> bool) {
        let Self { pages, cached_pages, .. } = self;
        cached_pages.retain(|&id, DraftState { tables, .. }| {
            let gone = is_gone(id);
            if gone {
                pages.release(tables);
            }
            !gone
        });
    }

    /// Computes the next tokens of each, which are read then.
    fn forward(&mut self, running: &[Sequence], guesses: &[Guess], cancel: &Cancel) -> Result<(), ForwardError> {
        let Self { model, cached_pages, logits, .. } = self;
        let chunks = guesses.iter().filter_map(|guess| {
            let sequence = &running[guess.index];
            let DraftState { tables, tokens, .. } = cached_pages.get(&sequence.id)?;
            Some(SequenceChunk {
                tokens: &guess.next,
                first_position: tokens.len(),
                prompt_len: sequence.prompt_len,
                pages: tables.tables(),
                token_types: &[],
                logits: if guess.is_last { LogitRows::Last } else { LogitRows::None },
                adapter: None,
            })
        });
        let sequences: Vec<SequenceChunk<'_>> = chunks.collect();
        model.forward(Batch { sequences: &sequences }, cancel, logits)?;
        for guess in guesses {
            if let Some(DraftState { tokens, .. }) = cached_pages.get_mut(&running[guess.index].id) {
                tokens.extend(&guess.next);
            }
        }
        Ok(())
    }

    /// Checks that every page is accounted for, and is that of a sequence which is there.
    ///
    /// # Errors
    /// What is wrong.
    pub fn audit(&self, is_there: impl Fn(RequestId) -> bool) -> Result<(), String> {
        if let Some(RequestId(id)) = self.cached_pages.keys().copied().find(|&id| !is_there(id)) {
            return Err(format!("the draft model has pages of request {id}, which is gone"));
        }
        self.pages.audit(self.cached_pages.values().map(|cached_pages| &cached_pages.tables))
    }
}
