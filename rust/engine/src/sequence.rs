//! A request on its way: its tokens so far, how many of them are computed, and the pages that hold them.

use std::sync::Arc;
use std::time::{Duration, Instant};

use ferrule_kernels::kv::PAGE_TOKENS;
use ferrule_model::Adapter;

use crate::beams::{Beam, Child};
use crate::draft::Drafts;
use crate::pages::PageTables;
use crate::sampling::{Continuation, History, SampleError};
use crate::structured::Constraint;
use crate::{Request, RequestId, RequestTiming, SamplingParams};

/// What one level of priority is worth: a request goes before those of the next level that came up to so many requests
/// earlier. So a request of any priority is overtaken by a limited number of others, and its turn comes.
const ARRIVALS_PER_PRIORITY_LEVEL: i64 = 256;

/// A request that the engine works on. Whether it waits or runs is which of the scheduler's queues it is in.
#[derive(Debug)]
pub(crate) struct Sequence {
    pub id: RequestId,
    /// Prompt and continuation.
    pub tokens: Vec<u32>,
    /// Tokens of the prompt. Fixed: a sequence that is computed again keeps it.
    pub prompt_len: usize,
    /// Leading tokens whose keys and values are in the pages. The next chunk starts here.
    pub computed: usize,
    pub tables: PageTables,
    pub params: Arc<SamplingParams>,
    pub adapter: Option<Arc<Adapter>>,
    pub history: History,
    /// How far it has come in its grammar, where it has one. The tokens decide, not what is computed of them.
    pub constraint: Option<Constraint>,
    pub drafts: Drafts,
    pub timing: RequestTiming,
    /// What it is to a beam search, where its request is one: the sequences of one request are its beams.
    pub beam: Option<Beam>,
    /// The request with the same prompt whose pages it shares, once they are computed.
    pub fork_parent: Option<RequestId>,
    /// Position of the first token of the prompt whose log-probability is still to be told; the prompt's end if none.
    pub next_prompt_logprob: usize,
    arrival: Instant,
}

impl Sequence {
    pub fn new(
        id: RequestId,
        request: Request,
        fork_parent: Option<RequestId>,
        tables: PageTables,
        drafts: Drafts,
    ) -> Self {
        let Request { prompt, params, adapter } = request;
        let untold = params.prompt_logprobs.map_or(usize::MAX, |_| params.prompt_logprobs_from);
        Self {
            id,
            prompt_len: prompt.len(),
            computed: 0,
            tables,
            history: History::new(&params, &prompt, &[]),
            constraint: params
                .structured_outputs
                .as_deref()
                .map(|grammar| Constraint::new(grammar, &params.stop_token_ids)),
            drafts,
            fork_parent,
            next_prompt_logprob: untold.min(prompt.len()),
            beam: params.beam_search.as_ref().map(|_| Beam::default()),
            params: Arc::new(params),
            adapter,
            tokens: prompt,
            timing: RequestTiming::default(),
            arrival: Instant::now(),
        }
    }

    /// Its place among all: lower ones go first. It never changes.
    pub fn rank(&self) -> (i64, RequestId, usize) {
        let RequestId(arrival) = self.id;
        let beam = self.beam.as_ref().map_or(0, |beam| beam.index);
        ((arrival as i64).saturating_add(i64::from(self.params.priority) * ARRIVALS_PER_PRIORITY_LEVEL), self.id, beam)
    }

    /// Whether it is all of its request, or the first of its beams: there is always one.
    pub fn is_primary(&self) -> bool {
        self.beam.as_ref().is_none_or(|beam| beam.index == 0)
    }

    /// Whether it is a beam that knows how it may go on, and waits for its siblings to be as far.
    pub fn is_expanded(&self) -> bool {
        self.beam.as_ref().is_some_and(|beam| beam.expansion.is_some())
    }

    /// Tokens that are to be computed: one in a decode step, more in a prefill. Zero of a beam that waits for its
    /// siblings, whether its pages are still there or not, and of no other sequence.
    pub fn pending(&self) -> usize {
        if self.is_expanded() { 0 } else { self.tokens.len() - self.computed }
    }

    /// Tokens sampled so far.
    pub fn output_len(&self) -> usize {
        self.tokens.len() - self.prompt_len
    }

    /// Drafts that are of use in a decode step, at the most: with the token sampled after them the sequence is as long as
    /// it may get, which is `max_total_tokens` or less.
    pub fn max_drafts(&self, max_total_tokens: usize) -> usize {
        let left = self.params.max_tokens.saturating_sub(self.output_len());
        left.min(max_total_tokens.saturating_sub(self.tokens.len())).saturating_sub(1)
    }

    /// Leading tokens that need not be computed if their keys and values are known: the last token's logits are wanted,
    /// and those before each token of the prompt whose log-probability is to be told.
    pub fn reusable(&self) -> usize {
        if self.wants_prompt_logprobs() { self.next_prompt_logprob - 1 } else { self.tokens.len() - 1 }
    }

    /// Leading tokens that need not be computed since another's pages hold them: those of the prompt that it has in common
    /// with its parent, and whole pages of what it has in common with other beams of its request. (Whole ones, since a
    /// smallest pool holds no copy of a page that others may look for.)
    pub fn shared_with(&self, other: &Self) -> usize {
        let most = self.reusable().min(other.computed);
        if Some(other.id) == self.fork_parent {
            return most.min(self.prompt_len - 1);
        }
        if other.id != self.id {
            return 0;
        }
        let common = self.tokens.iter().zip(&other.tokens).take_while(|(own, other)| own == other).count();
        common.min(most) / PAGE_TOKENS * PAGE_TOKENS
    }

    /// Whether log-probabilities of its prompt are still to be told.
    pub fn wants_prompt_logprobs(&self) -> bool {
        self.next_prompt_logprob < self.prompt_len
    }

    /// Tokens that the next chunk has at the most, where each row with logits takes a part of `logit_rows`.
    pub fn chunk_limit(&self, logit_rows: usize) -> usize {
        if !self.wants_prompt_logprobs() {
            return usize::MAX;
        }
        // Up to the first row whose logits are wanted there is no limit.
        match (self.next_prompt_logprob - 1).saturating_sub(self.computed) {
            0 => logit_rows.max(1),
            before => before,
        }
    }

    /// Whether the logits of a chunk of `count` tokens tell log-probabilities of the prompt.
    pub fn chunk_has_prompt_logprobs(&self, count: usize) -> bool {
        self.wants_prompt_logprobs() && self.computed + count >= self.next_prompt_logprob
    }

    /// Takes note that its first tokens are computed, since others did it.
    pub fn record_reused(&mut self, computed: usize) {
        if self.output_len() == 0 {
            self.timing.cached_tokens += computed - self.computed;
        }
        self.computed = computed;
    }

    /// Takes note that it has given its pages back.
    pub fn reset(&mut self) {
        self.computed = 0;
        self.drafts.clear();
        if self.output_len() == 0 {
            self.timing.cached_tokens = 0;
        }
    }

    /// Takes note that it is part of a batch.
    pub fn record_scheduled(&mut self) {
        self.timing.first_scheduled.get_or_insert_with(|| self.arrival.elapsed());
    }

    /// Takes note that the first so many of its drafts were accepted.
    pub fn record_drafts(&mut self, accepted: usize) {
        self.timing.drafted_tokens += self.drafts.tokens().len();
        self.timing.accepted_tokens += accepted;
        self.drafts.verified(accepted);
    }

    /// Appends a sampled token; the time since the one before, or since its arrival.
    pub fn push(&mut self, token: u32) -> Duration {
        self.append(token);
        self.record_token()
    }

    fn append(&mut self, token: u32) {
        self.tokens.push(token);
        self.history.push(token);
    }

    /// Takes note that it has a token more; the time since the one before, or since its arrival.
    pub fn record_token(&mut self) -> Duration {
        let now = self.arrival.elapsed();
        let last = self.timing.last_token.replace(now);
        self.timing.first_token.get_or_insert(now);
        now - last.unwrap_or_default()
    }

    /// Of a beam, how it may go on, which is forgotten then; or why it cannot.
    pub fn take_expansion(&mut self) -> (Vec<Continuation>, Option<SampleError>) {
        match self.beam.as_mut().and_then(|beam| beam.expansion.take()) {
            Some(Ok(continuations)) => (continuations, None),
            Some(Err(error)) => (Vec::new(), Some(error)),
            None => (Vec::new(), None),
        }
    }

    /// A sequence of the same tokens, with tables that hold as much. Nothing is guessed for it.
    pub fn fork(&self, tables: PageTables) -> Self {
        Self {
            id: self.id,
            tokens: self.tokens.clone(),
            prompt_len: self.prompt_len,
            computed: self.computed,
            tables,
            params: Arc::clone(&self.params),
            adapter: self.adapter.clone(),
            history: self.history.clone(),
            constraint: None,
            drafts: Drafts::default(),
            timing: RequestTiming { preemptions: 0, ..self.timing },
            beam: None,
            fork_parent: self.fork_parent,
            next_prompt_logprob: self.next_prompt_logprob,
            arrival: self.arrival,
        }
    }

    /// Makes it the beam of a place that goes on by a token.
    pub fn become_beam(&mut self, index: usize, child: &Child) {
        self.append(child.token);
        self.beam = Some(Beam { index, score: child.score, expansion: None });
    }
}
