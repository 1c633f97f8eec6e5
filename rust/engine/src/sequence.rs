//! A sequence: the tokens of a request so far, how many are computed, and the pages that hold them.

use std::sync::Arc;
use std::time::{Duration, Instant};

use ferrule_kernels::kv::PAGE_TOKENS;
use ferrule_model::{Adapter, Features};

use crate::beams::{Beam, Child};
use crate::draft::Drafts;
use crate::pages::{PageKeys, PageTables};
use crate::sampling::{Continuation, History, SampleError, needs_only_largest};
use crate::structured::Constraint;
use crate::{Request, RequestId, RequestTiming, SamplingParams};

/// Number of arrivals that one priority level outweighs: a request ranks before those of the next level that arrived up
/// to this many requests earlier. So only a limited number of others can overtake a request of any priority.
const ARRIVALS_PER_PRIORITY_LEVEL: i64 = 256;

/// Scheduling rank of a sequence, unique among all sequences.
pub(crate) type Rank = (i64, RequestId, usize);

/// A request (or a beam) that the engine works on. Its state, waiting or running, is the scheduler queue that it is in.
#[derive(Debug)]
pub(crate) struct Sequence {
    pub id: RequestId,
    /// Prompt and output tokens.
    pub tokens: Vec<u32>,
    /// Number of prompt tokens. Unchanged by preemption.
    pub prompt_len: usize,
    /// Number of leading tokens whose keys and values are in the pages.
    pub computed: usize,
    pub tables: PageTables,
    /// Number of tokens after the computed ones that batches in flight compute. The sequence is not preempted then, and
    /// only further chunks of a prompt are scheduled.
    pub in_flight: usize,
    pub params: Arc<SamplingParams>,
    pub adapter: Option<Arc<Adapter>>,
    pub features: Arc<[Features]>,
    /// Keys of its pages, if it has features; else these are its tokens.
    page_keys: Option<PageKeys>,
    pub history: History,
    /// Grammar state, if the request has a grammar. It depends on the tokens only, also while they are not computed.
    pub constraint: Option<Constraint>,
    pub drafts: Drafts,
    pub timing: RequestTiming,
    /// State of a beam; the sequences of one beam search request are its beams.
    pub beam: Option<Beam>,
    /// Request with the same prompt whose pages this one shares once they are computed.
    pub fork_parent: Option<RequestId>,
    /// Position of the first prompt token whose log-probability is still to be returned; `prompt_len` if none.
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
        let Request { prompt, params, adapter, features } = request;
        let first_prompt_logprob = params.prompt_logprobs.map_or(usize::MAX, |_| params.prompt_logprobs_from);
        Self {
            id,
            prompt_len: prompt.len(),
            computed: 0,
            tables,
            in_flight: 0,
            history: History::new(&params, &prompt, &[]),
            constraint: params
                .structured_outputs
                .as_deref()
                .map(|grammar| Constraint::new(grammar, &params.stop_token_ids)),
            drafts,
            fork_parent,
            next_prompt_logprob: first_prompt_logprob.min(prompt.len()),
            beam: params.beam_search.as_ref().map(|_| Beam::default()),
            params: Arc::new(params),
            adapter,
            page_keys: (!features.is_empty()).then(|| PageKeys::new(&prompt, &features)),
            features: features.into(),
            tokens: prompt,
            timing: RequestTiming::default(),
            arrival: Instant::now(),
        }
    }

    /// Returns the scheduling rank: lower ranks go first. It never changes, except for a beam that replaces its parent.
    pub fn rank(&self) -> Rank {
        let RequestId(arrival) = self.id;
        let beam = self.beam.as_ref().map_or(0, |beam| beam.index);
        ((arrival as i64).saturating_add(i64::from(self.params.priority) * ARRIVALS_PER_PRIORITY_LEVEL), self.id, beam)
    }

    /// Returns the page tables, and the token ids by which the prefix cache finds the pages.
    pub fn pages_and_keys(&mut self) -> (&mut PageTables, &[u32]) {
        let keys = self.page_keys.as_ref().map_or(&self.tokens[..], PageKeys::ids);
        (&mut self.tables, keys)
    }

    /// Returns whether it represents its request: the only sequence, or the first beam. Every request has exactly one.
    pub fn is_primary(&self) -> bool {
        self.beam.as_ref().is_none_or(|beam| beam.index == 0)
    }

    /// Returns whether it is an expanded beam that waits for its siblings.
    pub fn is_expanded(&self) -> bool {
        self.beam.as_ref().is_some_and(|beam| beam.expansion.is_some())
    }

    /// Returns the number of tokens to compute: one in decode, more in prefill. Zero only for an expanded beam, whether
    /// or not it still holds its pages.
    pub fn pending(&self) -> usize {
        if self.is_expanded() { 0 } else { self.tokens.len() - self.computed }
    }

    /// Returns the number of tokens that are computed or in a batch in flight; the next chunk to schedule starts here.
    pub fn begun(&self) -> usize {
        self.computed + self.in_flight
    }

    /// Returns the number of tokens to schedule: those to compute that are not in a batch in flight.
    pub fn unscheduled(&self) -> usize {
        self.pending().saturating_sub(self.in_flight)
    }

    /// Returns whether its next sample needs only the largest logit.
    pub fn needs_only_largest(&self) -> bool {
        self.beam.is_none() && needs_only_largest(&self.params, &self.history, self.tokens.len())
    }

    /// Returns the number of sampled tokens.
    pub fn output_len(&self) -> usize {
        self.tokens.len() - self.prompt_len
    }

    /// Returns the number of drafts that can be used in a decode step: with the token sampled after them, the sequence
    /// reaches `max_tokens` or `max_total_tokens`.
    pub fn max_drafts(&self, max_total_tokens: usize) -> usize {
        let left = self.params.max_tokens.saturating_sub(self.output_len());
        left.min(max_total_tokens.saturating_sub(self.tokens.len())).saturating_sub(1)
    }

    /// Returns the number of leading tokens that may come from the cache: logits are needed for the last token and
    /// before each prompt token whose log-probability is still to be returned.
    pub fn reusable(&self) -> usize {
        if self.wants_prompt_logprobs() { self.next_prompt_logprob - 1 } else { self.tokens.len() - 1 }
    }

    /// Returns the number of leading tokens that `other`'s pages hold: the common prompt with a fork parent, or full
    /// pages of the common tokens with another beam of the request. (Full pages only, since the smallest possible pool
    /// has no room for a copy of a cached page.)
    pub fn shared_with(&self, other: &Self) -> usize {
        let limit = self.reusable().min(other.computed);
        if Some(other.id) == self.fork_parent {
            return limit.min(self.prompt_len - 1);
        }
        if other.id != self.id {
            return 0;
        }
        let common = self.tokens.iter().zip(&other.tokens).take_while(|(own, other)| own == other).count();
        common.min(limit) / PAGE_TOKENS * PAGE_TOKENS
    }

    /// Returns whether prompt log-probabilities are still to be returned.
    pub fn wants_prompt_logprobs(&self) -> bool {
        self.next_prompt_logprob < self.prompt_len
    }

    /// Returns the maximum tokens of the next chunk, of which each row with logits uses one of `logit_rows`.
    pub fn chunk_limit(&self, logit_rows: usize) -> usize {
        if !self.wants_prompt_logprobs() {
            return usize::MAX;
        }
        // Rows before the first one with logits are not limited.
        match (self.next_prompt_logprob - 1).saturating_sub(self.computed) {
            0 => logit_rows.max(1),
            before => before,
        }
    }

    /// Returns whether a chunk of `count` tokens yields prompt log-probabilities. Chunks of such prompts are not computed
    /// at the same time.
    pub fn chunk_has_prompt_logprobs(&self, count: usize) -> bool {
        self.wants_prompt_logprobs() && self.computed + count >= self.next_prompt_logprob
    }

    /// Records that the first `computed` tokens are in shared or cached pages.
    pub fn record_reused(&mut self, computed: usize) {
        if self.output_len() == 0 {
            self.timing.cached_tokens += computed - self.computed;
        }
        self.computed = computed;
    }

    /// Resets the computed state after the pages were released.
    pub fn reset(&mut self) {
        self.computed = 0;
        self.drafts.clear();
        if self.output_len() == 0 {
            self.timing.cached_tokens = 0;
        }
    }

    /// Records the time at which it was first scheduled.
    pub fn record_scheduled(&mut self) {
        self.timing.first_scheduled.get_or_insert_with(|| self.arrival.elapsed());
    }

    /// Records how much of the prompt is computed, until the first token.
    pub fn record_prefill(&mut self) {
        if self.timing.first_token.is_none() {
            self.timing.last_prefill = Some(self.arrival.elapsed());
            self.timing.processed_tokens = self.computed.min(self.prompt_len);
        }
    }

    /// Records that the first `accepted` drafts were accepted.
    pub fn record_drafts(&mut self, accepted: usize) {
        self.timing.drafted_tokens += self.drafts.tokens().len();
        self.timing.accepted_tokens += accepted;
        self.drafts.record_verified(accepted);
    }

    /// Appends a sampled token. Returns the time since the previous token, or since arrival.
    pub fn push(&mut self, token: u32) -> Duration {
        self.append(token);
        self.record_token()
    }

    fn append(&mut self, token: u32) {
        self.tokens.push(token);
        if let Some(keys) = &mut self.page_keys {
            keys.push(token);
        }
        self.history.push(token);
    }

    /// Records the time of a new token. Returns the time since the previous token, or since arrival.
    pub fn record_token(&mut self) -> Duration {
        let now = self.arrival.elapsed();
        let last = self.timing.last_token.replace(now);
        self.timing.first_token.get_or_insert(now);
        now - last.unwrap_or_default()
    }

    /// Takes the expansion of a beam: its candidate continuations, or the error that ends it.
    pub fn take_expansion(&mut self) -> (Vec<Continuation>, Option<SampleError>) {
        match self.beam.as_mut().and_then(|beam| beam.expansion.take()) {
            Some(Ok(continuations)) => (continuations, None),
            Some(Err(error)) => (Vec::new(), Some(error)),
            None => (Vec::new(), None),
        }
    }

    /// Returns a copy of the sequence with other page tables, without drafts.
    pub fn fork(&self, tables: PageTables) -> Self {
        Self {
            id: self.id,
            tokens: self.tokens.clone(),
            prompt_len: self.prompt_len,
            computed: self.computed,
            tables,
            in_flight: 0,
            params: Arc::clone(&self.params),
            adapter: self.adapter.clone(),
            features: Arc::clone(&self.features),
            page_keys: self.page_keys.clone(),
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

    /// Turns the sequence into the beam at `index`, extended by the child's token.
    pub fn extend_beam(&mut self, index: usize, child: &Child) {
        self.append(child.token);
        self.beam = Some(Beam { index, score: child.score, expansion: None });
    }
}
