//! A request on its way: its tokens so far, how many of them are computed, and the pages that hold them.

use std::time::Instant;

use crate::pages::PageTables;
use crate::sampling::History;
use crate::{Request, RequestId, RequestTiming, SamplingParams};

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
    pub history: History,
    pub timing: RequestTiming,
    arrival: Instant,
}

impl Sequence {
    pub fn new(id: RequestId, request: Request, tables: PageTables) -> Self {
        let Request { prompt, params } = request;
        Self {
            id,
            prompt_len: prompt.len(),
            computed: 0,
            tables,
            history: History::new(&params, &prompt, &[]),
            params,
            tokens: prompt,
            timing: RequestTiming::default(),
            arrival: Instant::now(),
        }
    }

    /// Tokens that are not computed yet: one in a decode step, more in a prefill. Never zero while it lives.
    pub fn pending(&self) -> usize {
        self.tokens.len() - self.computed
    }

    /// Tokens sampled so far.
    pub fn output_len(&self) -> usize {
        self.tokens.len() - self.prompt_len
    }

    /// Takes note that it is part of a batch.
    pub fn note_scheduled(&mut self) {
        self.timing.first_scheduled.get_or_insert_with(|| self.arrival.elapsed());
    }

    /// Appends a sampled token.
    pub fn push(&mut self, token: u32) {
        self.tokens.push(token);
        self.history.push(token);
        let now = self.arrival.elapsed();
        self.timing.first_token.get_or_insert(now);
        self.timing.last_token = Some(now);
    }
}
