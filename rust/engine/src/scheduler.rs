//! What the next step computes, for whom, and on which pages.
//!
//! First come, first served. Every step takes one token of each sequence that decodes, then chunks of the prompts that
//! are under way, then new sequences while tokens, places and pages last. When pages run out the youngest sequence
//! gives all of its up and waits at the head of the queue, to be computed again from its tokens.
//!
//! Two facts keep everyone moving. The sequences that run are always the oldest of all, since only the youngest of them
//! is ever sent back and only the oldest of the waiting is let in. And the oldest of all can take the pages of everyone
//! else, while alone it fits: its length is limited to what the pools hold. So it advances in every step, ends, and
//! makes another the oldest.

use std::collections::VecDeque;

use crate::RequestId;
use crate::pages::{PageCopy, Pages};
use crate::sequence::Sequence;

/// The part of a sequence that a step computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Scheduled {
    /// Which of the running sequences.
    pub index: usize,
    /// How many of its pending tokens.
    pub count: usize,
}

/// What a step computes.
#[derive(Debug, Default)]
pub(crate) struct Schedule {
    /// Decode rows, then prefill chunks; a sequence is in it at most once.
    pub chunks: Vec<Scheduled>,
    /// Pages to copy before.
    pub copies: Vec<PageCopy>,
    /// Tokens of all chunks together.
    tokens: usize,
}

/// The queues.
#[derive(Debug)]
pub(crate) struct Scheduler {
    /// Sequences that hold pages, oldest first.
    pub running: Vec<Sequence>,
    /// Sequences that hold none, oldest first; all are younger than those that run.
    pub waiting: VecDeque<Sequence>,
    pub pages: Pages,
    max_num_seqs: usize,
    max_num_batched_tokens: usize,
    /// How often a sequence gave its pages up.
    pub preemptions: u64,
}

impl Scheduler {
    pub fn new(pages: Pages, max_num_seqs: usize, max_num_batched_tokens: usize) -> Self {
        Self {
            running: Vec::new(),
            waiting: VecDeque::new(),
            pages,
            max_num_seqs,
            max_num_batched_tokens,
            preemptions: 0,
        }
    }

    /// Queues a sequence behind all others.
    pub fn add(&mut self, sequence: Sequence) {
        self.waiting.push_back(sequence);
    }

    /// Takes a sequence out, wherever it is; its pages are free.
    pub fn remove(&mut self, id: RequestId) -> Option<Sequence> {
        if let Some(index) = self.running.iter().position(|sequence| sequence.id == id) {
            let mut sequence = self.running.remove(index);
            self.pages.release(&mut sequence.tables);
            return Some(sequence);
        }
        let index = self.waiting.iter().position(|sequence| sequence.id == id)?;
        self.waiting.remove(index)
    }

    /// Every sequence, oldest first.
    pub fn sequences(&self) -> impl Iterator<Item = &Sequence> + Clone {
        self.running.iter().chain(&self.waiting)
    }

    /// Plans a step and gives out the pages for it.
    pub fn schedule(&mut self) -> Schedule {
        let mut plan = Schedule::default();
        for sequence in &mut self.running {
            self.pages.release_passed(&mut sequence.tables, sequence.computed);
        }
        self.schedule_running(&mut plan, |sequence| sequence.pending() == 1);
        self.schedule_running(&mut plan, |sequence| sequence.pending() > 1);
        self.admit(&mut plan);
        plan
    }

    /// Plans a part of each running sequence that is of the kind, oldest first.
    fn schedule_running(&mut self, plan: &mut Schedule, is_of_kind: impl Fn(&Sequence) -> bool) {
        let mut index = 0;
        while index < self.running.len() && plan.tokens < self.max_num_batched_tokens {
            if is_of_kind(&self.running[index]) {
                self.schedule_one(plan, index);
            }
            index += 1;
        }
    }

    /// Plans as much of a running sequence as budget and pages allow; younger ones give way, older ones do not.
    fn schedule_one(&mut self, plan: &mut Schedule, index: usize) {
        loop {
            let sequence = &mut self.running[index];
            let wanted = sequence.pending().min(self.max_num_batched_tokens - plan.tokens);
            let count = self.pages.fits(&sequence.tables, sequence.computed, wanted);
            if count > 0 {
                self.pages.extend(&mut sequence.tables, sequence.computed, count, &mut plan.copies);
                sequence.note_scheduled();
                plan.chunks.push(Scheduled { index, count });
                plan.tokens += count;
                return;
            }
            let youngest = self.running.len() - 1;
            if youngest == index {
                // It keeps what it holds and waits for the older ones to end, or to take it.
                return;
            }
            plan.forget(youngest);
            self.preempt_youngest();
        }
    }

    /// Lets waiting sequences in while there is room for the whole of each: one that starts with less would soon be
    /// sent back, and its work lost.
    fn admit(&mut self, plan: &mut Schedule) {
        let chunk = self.max_num_batched_tokens;
        while plan.tokens < chunk && self.running.len() < self.max_num_seqs {
            let Some(next) = self.waiting.front() else { return };
            let mut promised = vec![0; self.pages.groups()];
            for sequence in self.running.iter().filter(|sequence| sequence.pending() > 1) {
                self.pages.add_promised(&sequence.tables, sequence.tokens.len(), chunk, &mut promised);
            }
            if !self.running.is_empty() && !self.pages.has_room(next.tokens.len(), chunk, &promised) {
                return;
            }
            self.running.extend(self.waiting.pop_front());
            self.schedule_one(plan, self.running.len() - 1);
        }
    }

    /// Sends the youngest running sequence back to the head of the queue, without its pages. False if none runs.
    pub fn preempt_youngest(&mut self) -> bool {
        let Some(mut sequence) = self.running.pop() else { return false };
        self.pages.release(&mut sequence.tables);
        sequence.computed = 0;
        sequence.timing.preemptions += 1;
        self.preemptions += 1;
        self.waiting.push_front(sequence);
        true
    }
}

impl Schedule {
    /// Takes the sequence of an index out of the plan.
    fn forget(&mut self, index: usize) {
        if let Some(place) = self.chunks.iter().position(|chunk| chunk.index == index) {
            self.tokens -= self.chunks.remove(place).count;
        }
    }
}
