//! A request on its way: its tokens so far, how many of them are computed, and the pages that hold them.

use std::sync::Arc;
use std::time::{Duration, Instant};

use ferrule_model::Adapter;

use crate::draft::Drafts;
use crate::pages::PageTables;
use crate::sampling::History;
use crate::structured::Constraint;
use crate::{Request, RequestId, RequestTiming, SamplingParams};

/// What one level of priority is worth: a request goes before those of the next level that came up to so many requests
/// earlier. So a request of any priority is overtaken by a limited number of others, and its turn comes.
const PLACES_A_LEVEL: i64 = 256;

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
    pub params: SamplingParams,
    pub adapter: Option<Arc<Adapter>>,
    pub history: History,
    /// How far it has come in its grammar, where it has one. The tokens decide, not what is computed of them.
    pub constraint: Option<Constraint>,
    pub drafts: Drafts,
    pub timing: RequestTiming,
    /// The request with the same prompt whose pages it shares, once they are computed.
    pub twin: Option<RequestId>,
    /// Position of the first token of the prompt whose log-probability is still to be told; the prompt's end if none.
    pub next_prompt_logprob: usize,
    arrival: Instant,
}

impl Sequence {
    pub fn new(id: RequestId, request: Request, twin: Option<RequestId>, tables: PageTables, drafts: Drafts) -> Self {
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
            twin,
            next_prompt_logprob: untold.min(prompt.len()),
            params,
            adapter,
            tokens: prompt,
            timing: RequestTiming::default(),
            arrival: Instant::now(),
        }
    }

    /// Its place among all: lower ones go first. It never changes.
    pub fn rank(&self) -> (i64, RequestId) {
        let RequestId(arrival) = self.id;
        ((arrival as i64).saturating_add(i64::from(self.params.priority) * PLACES_A_LEVEL), self.id)
    }

    /// Tokens that are not computed yet: one in a decode step, more in a prefill. Never zero while it lives.
    pub fn pending(&self) -> usize {
        self.tokens.len() - self.computed
    }

    /// Tokens sampled so far.
    pub fn output_len(&self) -> usize {
        self.tokens.len() - self.prompt_len
    }

    /// Drafts that are of use in a decode step, at the most: with the token sampled after them the sequence is as long as
    /// it may get, which is `most_tokens` or less.
    pub fn room_for_drafts(&self, most_tokens: usize) -> usize {
        let left = self.params.max_tokens.saturating_sub(self.output_len());
        left.min(most_tokens.saturating_sub(self.tokens.len())).saturating_sub(1)
    }

    /// Leading tokens that need not be computed if their keys and values are known: the last token's logits are wanted,
    /// and those before each token of the prompt whose log-probability is to be told.
    pub fn reusable(&self) -> usize {
        if self.tells_prompt() { self.next_prompt_logprob - 1 } else { self.tokens.len() - 1 }
    }

    /// Whether log-probabilities of its prompt are still to be told.
    pub fn tells_prompt(&self) -> bool {
        self.next_prompt_logprob < self.prompt_len
    }

    /// Tokens that the next chunk has at the most, where each row with logits takes a part of `logit_rows`.
    pub fn chunk_limit(&self, logit_rows: usize) -> usize {
        if !self.tells_prompt() {
            return usize::MAX;
        }
        // Up to the first row whose logits are wanted there is no limit.
        match (self.next_prompt_logprob - 1).saturating_sub(self.computed) {
            0 => logit_rows.max(1),
            before => before,
        }
    }

    /// Whether the logits of a chunk of `count` tokens tell log-probabilities of the prompt.
    pub fn chunk_tells(&self, count: usize) -> bool {
        self.tells_prompt() && self.computed + count >= self.next_prompt_logprob
    }

    /// Takes note that its first tokens are computed, since others did it.
    pub fn note_reused(&mut self, computed: usize) {
        if self.output_len() == 0 {
            self.timing.cached_tokens += computed - self.computed;
        }
        self.computed = computed;
    }

    /// Takes note that it has given its pages back.
    pub fn start_over(&mut self) {
        self.computed = 0;
        self.drafts.clear();
        if self.output_len() == 0 {
            self.timing.cached_tokens = 0;
        }
    }

    /// Takes note that it is part of a batch.
    pub fn note_scheduled(&mut self) {
        self.timing.first_scheduled.get_or_insert_with(|| self.arrival.elapsed());
    }

    /// Takes note that the first so many of its drafts were accepted.
    pub fn note_drafts(&mut self, accepted: usize) {
        self.timing.drafted_tokens += self.drafts.tokens().len();
        self.timing.accepted_tokens += accepted;
        self.drafts.verified(accepted);
    }

    /// Appends a sampled token; the time since the one before, or since its arrival.
    pub fn push(&mut self, token: u32) -> Duration {
        self.tokens.push(token);
        self.history.push(token);
        let now = self.arrival.elapsed();
        let last = self.timing.last_token.replace(now);
        self.timing.first_token.get_or_insert(now);
        now - last.unwrap_or_default()
    }
}
