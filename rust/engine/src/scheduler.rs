//! What the next step computes, for whom, and on which pages.
//!
//! First come, first served, within a priority. Every step takes one token of each sequence that decodes, then chunks
//! of the prompts that are under way, then new sequences while tokens, places and pages last. Beside sequences that
//! decode the prompts' share is limited, so that no step takes long; a prompt that needs more than one step leaves half
//! of each to those behind it. Drafts get what nobody else wants. When pages run out the last in rank gives all of its
//! up and waits, to be computed again from its tokens; so it does when a request of a higher priority finds no room.
//!
//! Two facts keep everyone moving. Of those that run and have something to compute, the first in rank can take the pages
//! of everyone else, while alone it fits: its length is limited to what the pools hold. So it advances in every step, and
//! ends, and makes another the first. And a rank never changes and is a limited number of arrivals away from the newest
//! one: so whoever waits comes to the head of the queue.
//!
//! A beam that waits for its siblings ([`crate::beams`]) has nothing to compute, and what it knows belongs to its tokens: it
//! loses nothing by its pages but the time to compute them again. So the first in rank takes them too, be it behind such
//! beams; and where nobody else runs, they give pages and places up for the first in the queue. That one may be the
//! sibling that they wait for, since the beams of a request have neighbouring ranks; so the beams of the first request
//! all come as far as each other, one after another if need be, and go on.

mod beams;

use std::collections::VecDeque;

use crate::RequestId;
use crate::pages::{FetchBudget, PageMove, Pages};
use crate::sequence::Sequence;

/// The part of a sequence that a step computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Scheduled {
    /// Which of the running sequences.
    pub index: usize,
    /// How many of its pending tokens.
    pub count: usize,
    /// How many of its drafts behind them.
    pub drafts: usize,
}

impl Scheduled {
    /// Its rows in the batch.
    pub fn rows(&self) -> usize {
        self.count + self.drafts
    }
}

/// What a step computes.
#[derive(Debug)]
pub(crate) struct Schedule {
    /// Those with the same adapter side by side, so that a pass reads it once; a sequence is in it at most once.
    pub chunks: Vec<Scheduled>,
    /// What must be done to pages before.
    pub moves: Vec<PageMove>,
    /// Tokens of all chunks together.
    tokens: usize,
    /// The most that they may be.
    limit: usize,
    /// Rows that may still be planned for the log-probabilities of prompts.
    logit_rows: usize,
    fetch: FetchBudget,
}

/// What bounds a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct StepLimits {
    /// Sequences.
    pub max_num_seqs: usize,
    /// Tokens.
    pub max_num_batched_tokens: usize,
    /// Rows whose logits are wanted for the log-probabilities of prompts.
    pub logit_rows: usize,
    /// Bytes read from a disk.
    pub fetch_bytes: usize,
}

/// The queues.
#[derive(Debug)]
pub(crate) struct Scheduler {
    /// Sequences that hold pages, by rank.
    pub running: Vec<Sequence>,
    /// Sequences that hold none, by rank.
    pub waiting: VecDeque<Sequence>,
    pub pages: Pages,
    limits: StepLimits,
    /// How often a sequence gave its pages up.
    pub preemptions: u64,
    /// Tokens looked for in the prefix cache, and found there.
    pub prefix_queries: u64,
    pub prefix_hits: u64,
}

impl Scheduler {
    pub fn new(pages: Pages, limits: StepLimits) -> Self {
        Self {
            running: Vec::new(),
            waiting: VecDeque::new(),
            pages,
            limits,
            preemptions: 0,
            prefix_queries: 0,
            prefix_hits: 0,
        }
    }

    /// Queues a sequence in the place that its rank gives it.
    pub fn add(&mut self, sequence: Sequence) {
        let place = self.waiting.partition_point(|other| other.rank() < sequence.rank());
        self.waiting.insert(place, sequence);
    }

    /// Places that no running sequence has.
    pub fn free_places(&self) -> usize {
        self.limits.max_num_seqs - self.running.len()
    }

    /// Takes the sequences of a request out, wherever they are; their pages are free. False if there are none.
    pub fn remove(&mut self, id: RequestId) -> bool {
        let mut taken = self.take(id);
        taken.iter_mut().for_each(|sequence| self.pages.release(&mut sequence.tables));
        !taken.is_empty()
    }

    /// Takes the sequences of a request out, wherever they are.
    fn take(&mut self, id: RequestId) -> Vec<Sequence> {
        let is_of_it = |sequence: &mut Sequence| sequence.id == id;
        let mut taken: Vec<Sequence> = self.running.extract_if(.., is_of_it).collect();
        while let Some(place) = self.waiting.iter().position(|sequence| sequence.id == id) {
            taken.extend(self.waiting.remove(place));
        }
        taken
    }

    /// Requests that run, and requests that wait. One with several beams is where the first of them is.
    pub fn requests(&self) -> (usize, usize) {
        let leaders =
            |queue: &mut dyn Iterator<Item = &Sequence>| queue.filter(|sequence| sequence.is_primary()).count();
        (leaders(&mut self.running.iter()), leaders(&mut self.waiting.iter()))
    }

    /// Every sequence: those that run, then those that wait, each by rank.
    pub fn sequences(&self) -> impl Iterator<Item = &Sequence> + Clone {
        self.running.iter().chain(&self.waiting)
    }

    /// Plans a step and gives out the pages for it. Beside sequences that decode, the prompts get no more than
    /// `prompt_tokens`.
    pub fn schedule(&mut self, prompt_tokens: usize) -> Schedule {
        let mut plan = Schedule::new(self.limits);
        for sequence in &mut self.running {
            self.pages.release_out_of_window(&mut sequence.tables, sequence.computed);
        }
        self.schedule_running(&mut plan, false, |sequence| sequence.pending() == 1);
        if plan.tokens > 0 {
            plan.limit = plan.limit.min(plan.tokens.saturating_add(prompt_tokens.max(1)));
        }
        self.schedule_running(&mut plan, false, |sequence| sequence.pending() > 1);
        self.admit(&mut plan);
        // What those behind it did not take.
        self.schedule_running(&mut plan, true, |sequence| sequence.pending() > 1);
        self.schedule_drafts(&mut plan);
        plan.chunks
            .sort_by_key(|chunk| self.running[chunk.index].adapter.as_ref().map(|adapter| *adapter.fingerprint()));
        plan
    }

    /// Plans a part of each running sequence that is of the kind, by rank; `again` if the plan may have a part of it.
    fn schedule_running(&mut self, plan: &mut Schedule, again: bool, is_of_kind: impl Fn(&Sequence) -> bool) {
        let mut index = 0;
        while index < self.running.len() && plan.tokens < plan.limit {
            if is_of_kind(&self.running[index]) {
                let planned = if again { plan.planned(index) } else { 0 };
                self.schedule_one(plan, index, planned);
            }
            index += 1;
        }
    }

    /// Plans as much of a running sequence as limits and pages allow, or more than the `planned` tokens of it; those
    /// behind it in rank give way, those before it do not.
    fn schedule_one(&mut self, plan: &mut Schedule, mut index: usize, planned: usize) {
        if planned == 0 && self.running[index].pending() > 1 {
            let Self { running, pages, .. } = self;
            let (found, more_to_come) = reuse(pages, &mut running[index], plan);
            self.prefix_hits += found as u64;
            if more_to_come {
                return;
            }
        }
        loop {
            let left = plan.limit - plan.tokens;
            let takes_steps = planned == 0 && self.running[index].pending() > left;
            let others_want = takes_steps
                && (!self.waiting.is_empty() || self.running[index + 1..].iter().any(|other| other.pending() > 1));
            let sequence = &mut self.running[index];
            let logit_rows = plan.logit_rows + if sequence.chunk_has_prompt_logprobs(planned) { planned } else { 0 };
            let pending = sequence.pending().min(sequence.chunk_limit(logit_rows));
            let share = if others_want { left.div_ceil(2) } else { left };
            let count = self.pages.allocatable_slots(&sequence.tables, sequence.computed, pending.min(planned + share));
            if count > planned {
                self.pages.allocate_slots(&mut sequence.tables, sequence.computed, count, &mut plan.moves);
                sequence.record_scheduled();
                if sequence.chunk_has_prompt_logprobs(count) {
                    plan.logit_rows = logit_rows.saturating_sub(count);
                }
                plan.set(index, planned, count);
                return;
            }
            let last = self.running.len() - 1;
            let before_it = &self.running[..index];
            if planned > 0 || last == index && (index == 0 || before_it.iter().any(|other| other.pending() > 0)) {
                // It keeps what it holds and waits for those before it to end, or to take it.
                return;
            }
            if last == index {
                index -= 1;
                self.preempt(plan, index);
            } else {
                self.preempt(plan, last);
            }
        }
    }

    /// Lets waiting sequences in while there is room for the whole of each: one that starts with less would soon be
    /// sent back, and its work lost.
    fn admit(&mut self, plan: &mut Schedule) {
        let chunk = self.limits.max_num_batched_tokens;
        while plan.tokens < plan.limit {
            let Some(place) = self.next_waiting() else { return };
            if self.free_places() == 0 {
                if !self.preempt_for(plan, place) {
                    return;
                }
                continue;
            }
            let Some(mut next) = self.waiting.remove(place) else { return };
            let found = self.share_computed_pages(&mut next);
            let mut reserved = vec![0; self.pages.groups()];
            for sequence in self.running.iter().filter(|sequence| sequence.pending() > 1) {
                self.pages.add_reserved(&sequence.tables, sequence.tokens.len(), chunk, &mut reserved);
            }
            if !self.running.is_empty() && !self.pages.can_allocate(&next.tables, next.tokens.len(), chunk, &reserved) {
                self.pages.release(&mut next.tables);
                next.reset();
                self.waiting.insert(place, next);
                if !self.preempt_for(plan, place) {
                    return;
                }
                continue;
            }
            self.prefix_queries += next.reusable() as u64;
            self.prefix_hits += found as u64;
            let index = self.running.partition_point(|other| other.rank() < next.rank());
            plan.insert(index);
            self.running.insert(index, next);
            self.schedule_one(plan, index, 0);
        }
    }

    /// Plans drafts with what tokens, logits and pages are left when all else is planned: nobody gives way to a draft.
    fn schedule_drafts(&mut self, plan: &mut Schedule) {
        for chunk in &mut plan.chunks {
            let sequence = &mut self.running[chunk.index];
            let wanted = sequence.drafts.tokens().len();
            if wanted == 0 {
                continue;
            }
            let left = self.limits.max_num_batched_tokens.saturating_sub(plan.tokens);
            let most = wanted.min(left).min(plan.logit_rows);
            let fits = self.pages.allocatable_slots(&sequence.tables, sequence.computed, chunk.count + most);
            chunk.drafts = fits.saturating_sub(chunk.count);
            sequence.drafts.truncate(chunk.drafts);
            if chunk.drafts > 0 {
                self.pages.allocate_slots(&mut sequence.tables, sequence.computed, fits, &mut plan.moves);
                plan.tokens += chunk.drafts;
                plan.logit_rows -= chunk.drafts;
            }
        }
    }

    /// The first that waits for its turn alone, and not for another to compute the prompt of both.
    fn next_waiting(&self) -> Option<usize> {
        let is_under_way =
            |fork_parent| self.running.iter().any(|sequence| sequence.id == fork_parent && sequence.output_len() == 0);
        let may_run = |sequence: &Sequence| !sequence.is_expanded() && !sequence.fork_parent.is_some_and(is_under_way);
        self.waiting.iter().position(may_run)
    }

    /// Gives a sequence that is about to run what is there of it already: pages that are kept, and those of its parent or
    /// of another beam. Says how many tokens were kept.
    fn share_computed_pages(&mut self, next: &mut Sequence) -> usize {
        let most = next.reusable();
        let kept = self.pages.reuse(&mut next.tables, &next.tokens, 0, most);
        next.record_reused(kept);
        let donor = self.running.iter().map(|other| (next.shared_with(other), other)).max_by_key(|&(shared, _)| shared);
        if let Some((shared, donor)) = donor.filter(|&(shared, _)| shared > next.computed)
            && self.pages.fork(&mut next.tables, &donor.tables, shared)
        {
            next.record_reused(shared);
        }
        kept
    }

    /// Sends the last in rank back for a waiting sequence that goes before it and has a higher priority, or if nobody
    /// who runs has something to compute.
    fn preempt_for(&mut self, plan: &mut Schedule, place: usize) -> bool {
        let next = &self.waiting[place];
        let Some(last) = self.running.last() else { return false };
        let yields = last.params.priority > next.params.priority && last.rank() > next.rank();
        if !yields && self.running.iter().any(|sequence| sequence.pending() > 0) {
            return false;
        }
        self.preempt(plan, self.running.len() - 1);
        true
    }

    /// Sends the last in rank of those that run back to the queue, without its pages. False if none runs.
    pub fn preempt_last(&mut self) -> bool {
        let Some(sequence) = self.running.pop() else { return false };
        self.requeue(sequence);
        true
    }

    /// Sends one of those that run back to the queue, without its pages, and takes it out of the plan.
    fn preempt(&mut self, plan: &mut Schedule, index: usize) {
        plan.remove(index);
        let sequence = self.running.remove(index);
        self.requeue(sequence);
    }

    fn requeue(&mut self, mut sequence: Sequence) {
        self.pages.release(&mut sequence.tables);
        sequence.reset();
        sequence.timing.preemptions += 1;
        self.preemptions += 1;
        self.add(sequence);
    }
}

/// Lets a sequence have kept pages for what it would compute next, from memory and then from the disk. How many tokens
/// were there, and whether the disk has more for the next step.
fn reuse(pages: &mut Pages, sequence: &mut Sequence, plan: &mut Schedule) -> (usize, bool) {
    let (before, most) = (sequence.computed, sequence.reusable());
    let Sequence { tables, tokens, .. } = sequence;
    let mut computed = pages.reuse(tables, tokens, before, most);
    let more_to_come = pages.fetch(tables, tokens, (computed, most), &mut plan.fetch, &mut plan.moves);
    computed = pages.reuse(tables, tokens, computed, most);
    sequence.record_reused(computed);
    (computed - before, more_to_come)
}

impl Schedule {
    fn new(limits: StepLimits) -> Self {
        Self {
            chunks: Vec::new(),
            moves: Vec::new(),
            tokens: 0,
            limit: limits.max_num_batched_tokens,
            logit_rows: limits.logit_rows,
            fetch: FetchBudget::new(limits.fetch_bytes),
        }
    }

    /// Rows of the batch.
    pub fn rows(&self) -> usize {
        self.tokens
    }

    /// Tokens planned of the sequence of an index.
    fn planned(&self, index: usize) -> usize {
        self.chunks.iter().find(|chunk| chunk.index == index).map_or(0, |chunk| chunk.count)
    }

    /// Plans `count` tokens of it, in the place of those `planned`.
    fn set(&mut self, index: usize, planned: usize, count: usize) {
        self.tokens += count - planned;
        if planned == 0 {
            self.chunks.push(Scheduled { index, count, drafts: 0 });
            return;
        }
        for chunk in self.chunks.iter_mut().filter(|chunk| chunk.index == index) {
            chunk.count = count;
        }
    }

    /// Takes one of the running sequences out of the plan, and its index out of those behind it.
    fn remove(&mut self, index: usize) {
        if let Some(place) = self.chunks.iter().position(|chunk| chunk.index == index) {
            self.tokens -= self.chunks.remove(place).count;
        }
        for chunk in self.chunks.iter_mut().filter(|chunk| chunk.index > index) {
            chunk.index -= 1;
        }
    }

    /// Makes an index free for another sequence.
    fn insert(&mut self, index: usize) {
        for chunk in self.chunks.iter_mut().filter(|chunk| chunk.index >= index) {
            chunk.index += 1;
        }
    }
}

#[cfg(test)]
mod tests;
