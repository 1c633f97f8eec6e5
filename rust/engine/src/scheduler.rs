//! Chooses what the next step computes and allocates pages for it.
//!
//! Requests are served first come, first served within a priority. Each step takes one token of every decoding
//! sequence, then prefill chunks of running sequences, then new sequences, as far as tokens, slots and pages last.
//! Beside decoding sequences the prefill tokens are limited, so that no step takes long; a prompt with more tokens than a
//! step can have leaves half of each step to the prompts behind it. Drafts use what is left. When pages run out, the
//! lowest-ranked running sequence is preempted: it frees all its pages and waits to be computed again. The same happens
//! when a request of higher priority finds no free slot or pages.
//!
//! Two invariants prevent starvation. First, of the running sequences with pending tokens, the highest-ranked one can
//! take the pages of all others, and alone it fits, because its length is limited to the capacity of the pools. So it
//! progresses in every step until it finishes. Second, a rank never changes, and only a limited number of later
//! arrivals can rank before it, so every waiting request reaches the head of the queue.
//!
//! A model may compute several batches at the same time ([`ferrule_model::BatchQueue`]). Then a step schedules a batch of
//! sequences that are not in flight, and at most its share of all sequences, so that as many are left for the other
//! batches. The next chunks of prompts in flight take the tokens that are left: the model computes the batches in order, so
//! a chunk may begin behind the one before. While no sequence decodes, a batch has its share of all prompt tokens
//! ([`Cycle::share_of_prompts`]), so that the batches soon fill all stages of a pipeline. A prompt that exceeds only this
//! share leaves nothing to others, which come first in the next batch.
//!
//! Sequences in flight keep their pages. If a sequence lacks the pages of a lower-ranked one in flight, no lower-ranked
//! sequence is scheduled or admitted until it has got them. A prompt in flight preempts no sequence and takes no pages that
//! other prompts still need. A prompt that ranks behind a waiting sequence is in one batch at a time, so that it can be
//! preempted between its chunks.
//!
//! A beam that waits for its siblings ([`crate::beams`]) has nothing to compute, and its expansion survives preemption
//! (it depends on tokens, not on pages). So the highest-ranked sequence may preempt such beams even if they rank before
//! it. If only such beams run, they are preempted for the first waiting sequence, which may be the sibling that they
//! wait for, since beams of a request have neighbouring ranks. So all beams of the first request advance to the same
//! length, if necessary one after another.

mod beams;

use std::collections::VecDeque;

use crate::RequestId;
use crate::pages::{FetchBudget, KvCacheManager, PageMove};
use crate::prefill_budget::Cycle;
use crate::sequence::{Rank, Sequence};

/// The tokens of one sequence that a step computes: a prefill chunk or a decode row, and drafts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Scheduled {
    /// Index in the running sequences.
    pub index: usize,
    /// Number of pending tokens.
    pub count: usize,
    /// Number of draft tokens after them.
    pub drafts: usize,
}

impl Scheduled {
    /// Returns the number of rows in the batch.
    pub fn rows(&self) -> usize {
        self.count + self.drafts
    }
}

/// The running sequences to which a part of a batch is given.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Pass {
    /// Decoding sequences.
    Decode,
    /// Prompts that are not in flight.
    Prefill,
    /// The prompts of [`Pass::Prefill`] again: those that were held to their share take what the prompts behind them left.
    Rest,
    /// Prompts whose last scheduled chunk is in flight.
    Overlap,
}

/// The work of one step.
#[derive(Debug)]
pub(crate) struct Schedule {
    /// At most one entry per sequence; entries with the same adapter are adjacent, so that a pass reads each adapter
    /// once.
    pub chunks: Vec<Scheduled>,
    /// Page copies and loads to apply before the forward pass.
    pub moves: Vec<PageMove>,
    /// Total number of tokens.
    tokens: usize,
    /// Maximum number of tokens.
    limit: usize,
    /// Maximum number of prompt tokens of a step that is not divided among batches in flight.
    undivided_limit: usize,
    /// Maximum number of sequences.
    max_sequences: usize,
    /// Remaining rows of logits for prompt log-probabilities.
    logit_rows: usize,
    fetch: FetchBudget,
}

/// Limits of one step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct StepLimits {
    /// Maximum number of running sequences.
    pub max_num_seqs: usize,
    /// Maximum number of tokens.
    pub max_num_batched_tokens: usize,
    /// Maximum rows of logits for prompt log-probabilities.
    pub logit_rows: usize,
    /// Maximum bytes read from the disk tier.
    pub fetch_bytes: usize,
    /// Number of batches that the model computes at the same time.
    pub batches: usize,
}

/// The waiting and running queues, and the pages of all sequences.
#[derive(Debug)]
pub(crate) struct Scheduler {
    /// Sequences that hold pages, ordered by rank.
    pub running: Vec<Sequence>,
    /// Sequences without pages, ordered by rank.
    pub waiting: VecDeque<Sequence>,
    pub kv_cache: KvCacheManager,
    limits: StepLimits,
    /// Rank of a running sequence that needs pages of lower-ranked ones in flight.
    blocked: Option<Rank>,
    /// Number of preemptions.
    pub preemptions: u64,
    /// Tokens looked up and found in the prefix cache.
    pub prefix_queries: u64,
    pub prefix_hits: u64,
}

impl Scheduler {
    pub fn new(kv_cache: KvCacheManager, limits: StepLimits) -> Self {
        Self {
            running: Vec::new(),
            waiting: VecDeque::new(),
            kv_cache,
            limits,
            blocked: None,
            preemptions: 0,
            prefix_queries: 0,
            prefix_hits: 0,
        }
    }

    /// Adds a sequence to the waiting queue, ordered by rank.
    pub fn add(&mut self, sequence: Sequence) {
        let index = self.waiting.partition_point(|other| other.rank() < sequence.rank());
        self.waiting.insert(index, sequence);
    }

    /// Returns the number of sequences that could still run.
    pub fn free_slots(&self) -> usize {
        self.limits.max_num_seqs - self.running.len()
    }

    /// Removes all sequences of a request and frees their pages. Returns false if there are none.
    pub fn remove(&mut self, id: RequestId) -> bool {
        let mut taken = self.take(id);
        taken.iter_mut().for_each(|sequence| self.kv_cache.release(&mut sequence.tables));
        !taken.is_empty()
    }

    /// Removes and returns all sequences of a request.
    fn take(&mut self, id: RequestId) -> Vec<Sequence> {
        let is_of_request = |sequence: &mut Sequence| sequence.id == id;
        let mut taken: Vec<Sequence> = self.running.extract_if(.., is_of_request).collect();
        while let Some(index) = self.waiting.iter().position(|sequence| sequence.id == id) {
            taken.extend(self.waiting.remove(index));
        }
        taken
    }

    /// Returns the numbers of running and waiting requests. A beam search counts where its first beam is.
    pub fn requests(&self) -> (usize, usize) {
        let count = |queue: &mut dyn Iterator<Item = &Sequence>| queue.filter(|sequence| sequence.is_primary()).count();
        (count(&mut self.running.iter()), count(&mut self.waiting.iter()))
    }

    /// Returns all sequences: running, then waiting, each ordered by rank.
    pub fn sequences(&self) -> impl Iterator<Item = &Sequence> + Clone {
        self.running.iter().chain(&self.waiting)
    }

    /// Returns the running sequences, and waiting ones as far as slots are free.
    fn candidates(&self) -> impl Iterator<Item = &Sequence> {
        let admitted = self.admissible().take(self.free_slots()).map(|index| &self.waiting[index]);
        self.running.iter().chain(admitted)
    }

    /// Returns the batches that running sequences, and waiting ones as far as slots are free, form at the same time.
    pub fn cycle(&self) -> Cycle {
        let limit = self.limits.batches;
        if self.candidates().any(|sequence| sequence.pending() > 1 && self.may_overlap(sequence)) {
            return Cycle { batches: limit, prefill_batches: limit };
        }
        let batches = |pending_above: usize| {
            self.candidates().filter(|sequence| sequence.pending() > pending_above).count().min(limit)
        };
        Cycle { batches: batches(0), prefill_batches: batches(1) }
    }

    /// Returns whether several batches in flight may have chunks of a prompt. With groups of state they may not, because a
    /// table has the states of one chunk. Prompt log-probabilities limit a chunk by what the ones before have returned.
    fn may_overlap(&self, sequence: &Sequence) -> bool {
        let is_behind = |first: &Sequence| first.rank() < sequence.rank();
        self.limits.batches > 1
            && !self.kv_cache.has_states()
            && !sequence.wants_prompt_logprobs()
            && !self.waiting.front().is_some_and(is_behind)
    }

    /// Returns the maximum number of prompt tokens in a batch while no sequence decodes.
    fn share_of_prompts(&self) -> usize {
        self.cycle().share_of_prompts(self.candidates().map(Sequence::unscheduled).sum())
    }

    /// Schedules a step and allocates its pages. Beside decoding sequences, prefill gets at most `prompt_tokens`.
    pub fn schedule(&mut self, prompt_tokens: usize) -> Schedule {
        let mut plan = Schedule::new(self.limits);
        let waits =
            |rank: &Rank| self.running.iter().any(|sequence| sequence.rank() == *rank && sequence.pending() > 0);
        self.blocked = self.blocked.filter(waits);
        for sequence in &mut self.running {
            self.kv_cache.release_out_of_window(&mut sequence.tables, sequence.computed);
        }
        if self.free_slots() == 0
            && self.blocked.is_none()
            && let Some(waiting_index) = self.next_waiting()
        {
            // Before the running sequences, which may fill the batch.
            self.preempt_for(&mut plan, waiting_index);
        }
        plan.max_sequences = self.share_of_batch(false);
        self.schedule_running(&mut plan, Pass::Decode);
        let decodes = plan.tokens > 0 || self.running.iter().any(|one| one.in_flight > 0 && one.pending() == 1);
        if decodes {
            plan.limit = plan.limit.min(plan.tokens.saturating_add(prompt_tokens.max(1)));
        }
        plan.undivided_limit = plan.limit - plan.tokens;
        if !decodes {
            plan.limit = plan.limit.min(self.share_of_prompts());
        }
        self.schedule_running(&mut plan, Pass::Prefill);
        self.admit(&mut plan);
        self.schedule_running(&mut plan, Pass::Rest);
        self.schedule_running(&mut plan, Pass::Overlap);
        self.schedule_drafts(&mut plan);
        self.allocate_snapshots(&plan);
        plan.chunks
            .sort_by_key(|chunk| self.running[chunk.index].adapter.as_ref().map(|adapter| *adapter.fingerprint()));
        plan
    }

    /// Returns the maximum number of sequences in a batch if all batches in flight have as many: of those that run, and with
    /// `admits` of those that can be admitted too.
    fn share_of_batch(&self, admits: bool) -> usize {
        if self.limits.batches == 1 {
            return usize::MAX;
        }
        let running = self.running.iter().filter(|sequence| sequence.pending() > 0).count();
        let admitted = if admits { self.admissible().take(self.free_slots().max(1)).count() } else { 0 };
        (running + admitted).div_ceil(self.limits.batches)
    }

    /// Schedules the running sequences of a pass, by rank.
    fn schedule_running(&mut self, plan: &mut Schedule, pass: Pass) {
        let mut index = 0;
        while index < self.running.len() && plan.tokens < plan.limit {
            let sequence = &self.running[index];
            let is_of_pass = match pass {
                Pass::Decode => sequence.in_flight == 0 && sequence.pending() == 1,
                Pass::Prefill | Pass::Rest => sequence.in_flight == 0 && sequence.pending() > 1,
                Pass::Overlap => sequence.in_flight > 0 && sequence.unscheduled() > 0 && self.may_overlap(sequence),
            };
            if is_of_pass && self.blocked.is_none_or(|rank| sequence.rank() <= rank) {
                let planned = if pass == Pass::Rest { plan.planned(index) } else { 0 };
                if planned > 0 || pass == Pass::Overlap || plan.chunks.len() < plan.max_sequences {
                    self.schedule_one(plan, index, planned);
                }
            }
            index += 1;
        }
    }

    /// Schedules as much of a running sequence as limits and pages allow, beyond the `planned` tokens that it already
    /// has. Lower-ranked sequences may be preempted for it, higher-ranked ones not.
    fn schedule_one(&mut self, plan: &mut Schedule, mut index: usize, planned: usize) {
        let is_in_flight = self.running[index].in_flight > 0;
        if planned == 0 && self.running[index].pending() > 1 && !is_in_flight {
            let Self { running, kv_cache, .. } = self;
            let (found, more_on_disk) = reuse(kv_cache, &mut running[index], plan);
            self.prefix_hits += found as u64;
            if more_on_disk {
                return;
            }
        }
        let running = if is_in_flight { &self.running[..] } else { &[] };
        let others = running.iter().enumerate().filter(|(other, _)| *other != index);
        let reserved = self.reserved(others.map(|(_, sequence)| sequence));
        loop {
            let left = plan.limit - plan.tokens;
            let needs_more_steps =
                planned == 0 && !is_in_flight && self.running[index].pending() > plan.undivided_limit;
            let is_prompt = |other: &Sequence| other.pending() > 1 && other.in_flight == 0;
            let must_share =
                needs_more_steps && (!self.waiting.is_empty() || self.running[index + 1..].iter().any(is_prompt));
            let sequence = &mut self.running[index];
            let logit_rows = plan.logit_rows + if sequence.chunk_has_prompt_logprobs(planned) { planned } else { 0 };
            let wanted = sequence.unscheduled().min(sequence.chunk_limit(logit_rows));
            let share = if must_share { left.div_ceil(2) } else { left };
            let first = sequence.begun();
            let wanted = wanted.min(planned + share);
            let count = self.kv_cache.allocatable_slots_beside(&reserved, &sequence.tables, first, wanted);
            if count > planned {
                self.kv_cache.allocate_slots(&mut sequence.tables, first, count, &mut plan.moves);
                sequence.record_scheduled();
                self.blocked.take_if(|rank| *rank == sequence.rank());
                if sequence.chunk_has_prompt_logprobs(count) {
                    plan.logit_rows = logit_rows.saturating_sub(count);
                }
                plan.set(index, planned, count);
                return;
            }
            if planned > 0 || is_in_flight {
                return;
            }
            let last = self.lowest_ranked().unwrap_or(index);
            let higher_ranked = &self.running[..index];
            if last == index && index + 1 < self.running.len() {
                self.blocked = Some(self.running[index].rank());
            }
            if last == index && (index == 0 || higher_ranked.iter().any(|other| other.pending() > 0)) {
                // Keep its pages and wait until the sequences before it finish or preempt it, or until the sequences in
                // flight can be preempted.
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

    /// Admits waiting sequences while there are pages for the whole of each: one that starts with fewer would soon be
    /// preempted and its work lost.
    fn admit(&mut self, plan: &mut Schedule) {
        let chunk = self.limits.max_num_batched_tokens;
        plan.max_sequences = self.share_of_batch(true);
        while plan.tokens < plan.limit && plan.chunks.len() < plan.max_sequences && self.blocked.is_none() {
            let Some(waiting_index) = self.next_waiting() else { return };
            if self.free_slots() == 0 {
                if !self.preempt_for(plan, waiting_index) {
                    return;
                }
                continue;
            }
            let Some(mut next) = self.waiting.remove(waiting_index) else { return };
            let found = self.share_computed_pages(&mut next);
            let reserved = self.reserved(self.running.iter());
            if !self.running.is_empty()
                && !self.kv_cache.can_allocate(&next.tables, next.tokens.len(), chunk, &reserved)
            {
                self.kv_cache.release(&mut next.tables);
                next.reset();
                self.waiting.insert(waiting_index, next);
                if !self.preempt_for(plan, waiting_index) {
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

    /// Returns, per group, the pages that running sequences still need: for the rest of a prompt, and for the states that
    /// each sequence reads and writes in a step.
    pub fn reserved<'a>(&self, sequences: impl Iterator<Item = &'a Sequence>) -> Vec<usize> {
        let mut reserved = vec![0; self.kv_cache.groups()];
        for sequence in sequences {
            let tokens = if sequence.pending() > 1 { sequence.tokens.len() } else { 0 };
            self.kv_cache.add_reserved(&sequence.tables, tokens, self.limits.max_num_batched_tokens, &mut reserved);
        }
        reserved
    }

    /// Schedules drafts with the tokens, logits and pages that are left. No sequence is preempted for drafts.
    fn schedule_drafts(&mut self, plan: &mut Schedule) {
        for chunk in &mut plan.chunks {
            let sequence = &mut self.running[chunk.index];
            let wanted = sequence.drafts.tokens().len();
            if wanted == 0 {
                continue;
            }
            let left = self.limits.max_num_batched_tokens.saturating_sub(plan.tokens);
            let limit = wanted.min(left).min(plan.logit_rows);
            let fits = self.kv_cache.allocatable_slots(&sequence.tables, sequence.computed, chunk.count + limit);
            chunk.drafts = fits.saturating_sub(chunk.count);
            sequence.drafts.truncate(chunk.drafts);
            if chunk.drafts > 0 {
                self.kv_cache.allocate_slots(&mut sequence.tables, sequence.computed, fits, &mut plan.moves);
                plan.tokens += chunk.drafts;
                plan.logit_rows -= chunk.drafts;
            }
        }
    }

    /// Allocates snapshots of states on pages that the running sequences do not need while the batch is computed.
    fn allocate_snapshots(&mut self, plan: &Schedule) {
        let mut is_planned = vec![false; self.running.len()];
        plan.chunks.iter().for_each(|chunk| is_planned[chunk.index] = true);
        let others = self.running.iter().zip(&is_planned).filter(|(_, is_planned)| !**is_planned);
        let reserved = self.reserved(others.map(|(sequence, _)| sequence));
        for chunk in &plan.chunks {
            let sequence = &mut self.running[chunk.index];
            let first = sequence.begun();
            self.kv_cache.allocate_snapshots(&mut sequence.tables, first, first + chunk.rows(), &reserved);
        }
    }

    /// Returns the first waiting sequence that can run.
    fn next_waiting(&self) -> Option<usize> {
        self.admissible().next()
    }

    /// Returns the waiting sequences that can run: neither a beam that is expanded nor a fork whose parent has to compute
    /// the common prompt.
    fn admissible(&self) -> impl Iterator<Item = usize> {
        let is_in_prefill =
            |parent| self.running.iter().any(|sequence| sequence.id == parent && sequence.output_len() == 0);
        let may_run =
            move |sequence: &Sequence| !sequence.is_expanded() && !sequence.fork_parent.is_some_and(is_in_prefill);
        self.waiting.iter().enumerate().filter(move |(_, sequence)| may_run(sequence)).map(|(index, _)| index)
    }

    /// Returns the lowest-ranked running sequence that can be preempted.
    fn lowest_ranked(&self) -> Option<usize> {
        self.running.iter().rposition(|sequence| sequence.in_flight == 0)
    }

    /// Gives a sequence that is about to run the pages that already hold its tokens: from the prefix cache, its fork
    /// parent or another beam. Returns the number of tokens from the prefix cache.
    fn share_computed_pages(&mut self, next: &mut Sequence) -> usize {
        let limit = next.reusable();
        let (tables, keys) = next.pages_and_keys();
        let cached = self.kv_cache.reuse(tables, keys, 0, limit);
        next.record_reused(cached);
        let donor = self.running.iter().map(|other| (next.shared_with(other), other)).max_by_key(|&(shared, _)| shared);
        if let Some((shared, donor)) = donor.filter(|&(shared, _)| shared > next.computed)
            && self.kv_cache.fork(&mut next.tables, &donor.tables, shared)
        {
            next.record_reused(shared);
        }
        cached
    }

    /// Preempts the lowest-ranked running sequence for a waiting one that ranks before it and has a higher priority, or
    /// if no running sequence has pending tokens. Returns whether it did.
    fn preempt_for(&mut self, plan: &mut Schedule, waiting_index: usize) -> bool {
        let next = &self.waiting[waiting_index];
        let Some(index) = self.lowest_ranked() else { return false };
        let last = &self.running[index];
        let has_lower_priority = last.params.priority > next.params.priority && last.rank() > next.rank();
        if !has_lower_priority && self.running.iter().any(|sequence| sequence.pending() > 0) {
            return false;
        }
        self.preempt(plan, index);
        true
    }

    /// Preempts the lowest-ranked running sequence while no batch is in flight. Returns false if no sequence runs.
    pub fn preempt_last(&mut self) -> bool {
        let Some(sequence) = self.running.pop() else { return false };
        self.requeue(sequence);
        true
    }

    /// Preempts a running sequence and removes it from the plan.
    fn preempt(&mut self, plan: &mut Schedule, index: usize) {
        plan.remove(index);
        let sequence = self.running.remove(index);
        self.requeue(sequence);
    }

    fn requeue(&mut self, mut sequence: Sequence) {
        self.kv_cache.release(&mut sequence.tables);
        sequence.reset();
        sequence.timing.preemptions += 1;
        self.preemptions += 1;
        self.add(sequence);
    }
}

/// Lets a sequence take cached pages for its next tokens, first from memory, then from disk. Returns the number of
/// tokens found, and whether the disk has more for the next step.
fn reuse(kv_cache: &mut KvCacheManager, sequence: &mut Sequence, plan: &mut Schedule) -> (usize, bool) {
    let (before, limit) = (sequence.computed, sequence.reusable());
    let (tables, keys) = sequence.pages_and_keys();
    let mut computed = kv_cache.reuse(tables, keys, before, limit);
    let more_on_disk = kv_cache.fetch(tables, keys, (computed, limit), &mut plan.fetch, &mut plan.moves);
    computed = kv_cache.reuse(tables, keys, computed, limit);
    sequence.record_reused(computed);
    (computed - before, more_on_disk)
}

impl Schedule {
    fn new(limits: StepLimits) -> Self {
        Self {
            chunks: Vec::new(),
            moves: Vec::new(),
            tokens: 0,
            limit: limits.max_num_batched_tokens,
            undivided_limit: limits.max_num_batched_tokens,
            max_sequences: usize::MAX,
            logit_rows: limits.logit_rows,
            fetch: FetchBudget::new(limits.fetch_bytes),
        }
    }

    /// Returns the number of tokens scheduled for the sequence at `index`.
    fn planned(&self, index: usize) -> usize {
        self.chunks.iter().find(|chunk| chunk.index == index).map_or(0, |chunk| chunk.count)
    }

    /// Schedules `count` tokens of the sequence at `index` instead of the `planned` ones.
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

    /// Removes a running sequence from the plan and shifts the indices behind it.
    fn remove(&mut self, index: usize) {
        if let Some(chunk) = self.chunks.iter().position(|chunk| chunk.index == index) {
            self.tokens -= self.chunks.remove(chunk).count;
        }
        for chunk in self.chunks.iter_mut().filter(|chunk| chunk.index > index) {
            chunk.index -= 1;
        }
    }

    /// Shifts the indices from `index` on by one, for another sequence.
    fn insert(&mut self, index: usize) {
        for chunk in self.chunks.iter_mut().filter(|chunk| chunk.index >= index) {
            chunk.index += 1;
        }
    }
}

#[cfg(test)]
mod tests;
