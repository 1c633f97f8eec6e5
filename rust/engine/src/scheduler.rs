//! What the next step computes, for whom, and on which pages.
//!
//! First come, first served, within a priority. Every step takes one token of each sequence that decodes, then chunks of
//! the prompts that are under way, then new sequences while tokens, places and pages last. Beside sequences that decode
//! the prompts' share is limited, so that no step takes long; a prompt that needs more than one step leaves half of each
//! to those behind it. When pages run out the last in rank gives all of its up and waits, to be computed again from its
//! tokens; so it does when a request of a higher priority finds no room.
//!
//! Two facts keep everyone moving. The first in rank of those that run can take the pages of everyone else, while alone
//! it fits: its length is limited to what the pools hold. So it advances in every step, and ends, and makes another the
//! first. And a rank never changes and is a limited number of arrivals away from the newest one: so whoever waits comes
//! to the head of the queue.

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
}

/// What a step computes.
#[derive(Debug)]
pub(crate) struct Schedule {
    /// Decode rows, then prefill chunks; a sequence is in it at most once.
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

    /// Queues a sequence behind all of its rank.
    pub fn add(&mut self, sequence: Sequence) {
        let place = self.waiting.partition_point(|other| other.rank() < sequence.rank());
        self.waiting.insert(place, sequence);
    }

    /// Places that no running sequence has.
    pub fn free_places(&self) -> usize {
        self.limits.max_num_seqs - self.running.len()
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

    /// Every sequence: those that run, then those that wait, each by rank.
    pub fn sequences(&self) -> impl Iterator<Item = &Sequence> + Clone {
        self.running.iter().chain(&self.waiting)
    }

    /// Plans a step and gives out the pages for it. Beside sequences that decode, the prompts get no more than
    /// `prompt_tokens`.
    pub fn schedule(&mut self, prompt_tokens: usize) -> Schedule {
        let mut plan = Schedule::new(self.limits);
        for sequence in &mut self.running {
            self.pages.release_passed(&mut sequence.tables, sequence.computed);
        }
        self.schedule_running(&mut plan, |sequence| sequence.pending() == 1);
        if plan.tokens > 0 {
            plan.limit = plan.limit.min(plan.tokens.saturating_add(prompt_tokens.max(1)));
        }
        self.schedule_running(&mut plan, |sequence| sequence.pending() > 1);
        self.admit(&mut plan);
        // What those behind it did not take.
        self.schedule_running(&mut plan, |sequence| sequence.pending() > 1);
        plan
    }

    /// Plans a part of each running sequence that is of the kind, by rank.
    fn schedule_running(&mut self, plan: &mut Schedule, is_of_kind: impl Fn(&Sequence) -> bool) {
        let mut index = 0;
        while index < self.running.len() && plan.tokens < plan.limit {
            if is_of_kind(&self.running[index]) {
                self.schedule_one(plan, index);
            }
            index += 1;
        }
    }

    /// Plans as much of a running sequence as limits and pages allow, or more than was planned of it; those behind it in
    /// rank give way, those before it do not.
    fn schedule_one(&mut self, plan: &mut Schedule, index: usize) {
        let planned = plan.planned(index);
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
            let others_want = planned == 0
                && (!self.waiting.is_empty() || self.running[index + 1..].iter().any(|other| other.pending() > 1));
            let sequence = &mut self.running[index];
            let logit_rows = plan.logit_rows + if sequence.chunk_tells(planned) { planned } else { 0 };
            let pending = sequence.pending().min(sequence.chunk_limit(logit_rows));
            let share = if others_want && sequence.pending() > left { left.div_ceil(2) } else { left };
            let count = self.pages.fits(&sequence.tables, sequence.computed, pending.min(planned + share));
            if count > planned {
                self.pages.extend(&mut sequence.tables, sequence.computed, count, &mut plan.moves);
                sequence.note_scheduled();
                if sequence.chunk_tells(count) {
                    plan.logit_rows = logit_rows.saturating_sub(count);
                }
                plan.set(index, count);
                return;
            }
            let last = self.running.len() - 1;
            if last == index || planned > 0 {
                // It keeps what it holds and waits for those before it to end, or to take it.
                return;
            }
            plan.remove(last);
            self.preempt_last();
        }
    }

    /// Lets waiting sequences in while there is room for the whole of each: one that starts with less would soon be
    /// sent back, and its work lost.
    fn admit(&mut self, plan: &mut Schedule) {
        let chunk = self.limits.max_num_batched_tokens;
        while plan.tokens < plan.limit {
            let Some(place) = self.next_waiting() else { return };
            if self.free_places() == 0 {
                if !self.make_way(plan, place) {
                    return;
                }
                continue;
            }
            let Some(mut next) = self.waiting.remove(place) else { return };
            let found = self.take_over(&mut next);
            let mut promised = vec![0; self.pages.groups()];
            for sequence in self.running.iter().filter(|sequence| sequence.pending() > 1) {
                self.pages.add_promised(&sequence.tables, sequence.tokens.len(), chunk, &mut promised);
            }
            if !self.running.is_empty() && !self.pages.has_room(&next.tables, next.tokens.len(), chunk, &promised) {
                self.pages.release(&mut next.tables);
                next.start_over();
                self.waiting.insert(place, next);
                if !self.make_way(plan, place) {
                    return;
                }
                continue;
            }
            self.prefix_queries += next.reusable() as u64;
            self.prefix_hits += found as u64;
            let index = self.running.partition_point(|other| other.rank() < next.rank());
            plan.insert(index);
            self.running.insert(index, next);
            self.schedule_one(plan, index);
        }
    }

    /// The first that waits for its turn alone, and not for another to compute the prompt of both.
    fn next_waiting(&self) -> Option<usize> {
        let is_under_way = |twin| self.running.iter().any(|sequence| sequence.id == twin && sequence.output_len() == 0);
        self.waiting.iter().position(|sequence| !sequence.twin.is_some_and(is_under_way))
    }

    /// Gives a sequence that is about to run what is there of it already: pages that are kept, and those of its twin.
    /// Says how many tokens were kept.
    fn take_over(&mut self, next: &mut Sequence) -> usize {
        let most = next.reusable();
        let kept = self.pages.reuse(&mut next.tables, &next.tokens, 0, most);
        next.note_reused(kept);
        let shared = (next.prompt_len - 1).min(next.reusable());
        let twin = self.running.iter().find(|sequence| Some(sequence.id) == next.twin && sequence.computed >= shared);
        if let Some(twin) = twin.filter(|_| shared > next.computed)
            && self.pages.fork(&mut next.tables, &twin.tables, shared)
        {
            next.note_reused(shared);
        }
        kept
    }

    /// Sends the last in rank back for a waiting sequence that goes before it and has a higher priority.
    fn make_way(&mut self, plan: &mut Schedule, place: usize) -> bool {
        let next = &self.waiting[place];
        let yields = |last: &Sequence| last.params.priority > next.params.priority && last.rank() > next.rank();
        if !self.running.last().is_some_and(yields) {
            return false;
        }
        plan.remove(self.running.len() - 1);
        self.preempt_last()
    }

    /// Sends the last in rank of those that run back to the queue, without its pages. False if none runs.
    pub fn preempt_last(&mut self) -> bool {
        let Some(mut sequence) = self.running.pop() else { return false };
        self.pages.release(&mut sequence.tables);
        sequence.start_over();
        sequence.timing.preemptions += 1;
        self.preemptions += 1;
        self.add(sequence);
        true
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
    sequence.note_reused(computed);
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

    /// Tokens planned of the sequence of an index.
    fn planned(&self, index: usize) -> usize {
        self.chunks.iter().find(|chunk| chunk.index == index).map_or(0, |chunk| chunk.count)
    }

    /// Plans `count` tokens of it.
    fn set(&mut self, index: usize, count: usize) {
        match self.chunks.iter_mut().find(|chunk| chunk.index == index) {
            Some(chunk) => self.tokens += count - std::mem::replace(&mut chunk.count, count),
            None => {
                self.chunks.push(Scheduled { index, count });
                self.tokens += count;
            }
        }
    }

    /// Takes the last of the running sequences out of the plan.
    fn remove(&mut self, last: usize) {
        if let Some(place) = self.chunks.iter().position(|chunk| chunk.index == last) {
            self.tokens -= self.chunks.remove(place).count;
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
mod tests {
    use ferrule_model::KvGroup;
    use proptest::prelude::*;

    use super::*;
    use crate::{Request, SamplingParams};

    fn scheduler(pages: usize, max_num_seqs: usize, max_num_batched_tokens: usize) -> Scheduler {
        let group = KvGroup { layers: 1, window: None, page_bytes: 1 };
        let limits = StepLimits { max_num_seqs, max_num_batched_tokens, logit_rows: 4, fetch_bytes: 0 };
        Scheduler::new(Pages::new(&[group], &[pages], false), limits)
    }

    fn sequence(scheduler: &Scheduler, id: u64, tokens: usize) -> Sequence {
        let request = Request { prompt: vec![0; tokens], params: SamplingParams::default() };
        Sequence::new(RequestId(id), request, None, scheduler.pages.private_tables())
    }

    /// A sequence whose first tokens are computed already.
    fn start(scheduler: &mut Scheduler, id: u64, tokens: usize, computed: usize) {
        let mut new = sequence(scheduler, id, tokens);
        scheduler.pages.extend(&mut new.tables, 0, computed, &mut Vec::new());
        new.computed = computed;
        scheduler.running.push(new);
    }

    fn planned(scheduler: &Scheduler, plan: &Schedule) -> Vec<(u64, usize)> {
        plan.chunks.iter().map(|chunk| (scheduler.running[chunk.index].id.0, chunk.count)).collect()
    }

    #[test]
    fn decode_rows_come_first_then_chunks_within_the_budget() {
        let mut scheduler = scheduler(100, 4, 10);
        start(&mut scheduler, 0, 40, 16);
        start(&mut scheduler, 1, 30, 29);
        start(&mut scheduler, 2, 30, 29);
        for id in 3..6 {
            let new = sequence(&scheduler, id, 5);
            scheduler.add(new);
        }
        let plan = scheduler.schedule(usize::MAX);
        assert_eq!(planned(&scheduler, &plan), [(1, 1), (2, 1), (0, 6), (3, 2)]);
        scheduler.running[0].computed = 37;
        let plan = scheduler.schedule(usize::MAX);
        // Five tokens of the budget are left after the last three of the chunk, and one place.
        assert_eq!(planned(&scheduler, &plan), [(1, 1), (2, 1), (0, 3), (3, 5)]);
        assert_eq!((scheduler.running.len(), scheduler.waiting.len()), (4, 2));
    }

    #[test]
    fn a_planned_sequence_that_gives_way_leaves_the_plan() {
        let mut scheduler = scheduler(2, 4, 10);
        start(&mut scheduler, 0, 40, 16);
        start(&mut scheduler, 1, 10, 9);
        let plan = scheduler.schedule(usize::MAX);
        // The younger one's row was planned first, on the page that the older one's chunk then needed.
        assert_eq!(planned(&scheduler, &plan), [(0, 10)]);
        assert_eq!(plan.tokens, 10);
        assert_eq!(scheduler.waiting[0].id, RequestId(1));
        assert_eq!((scheduler.waiting[0].computed, scheduler.waiting[0].timing.preemptions), (0, 1));
    }

    #[test]
    fn one_that_finds_no_page_waits_for_older_ones_and_keeps_its_own() {
        let mut scheduler = scheduler(2, 4, 10);
        start(&mut scheduler, 0, 10, 9);
        start(&mut scheduler, 1, 17, 16);
        let plan = scheduler.schedule(usize::MAX);
        assert_eq!(planned(&scheduler, &plan), [(0, 1)]);
        assert_eq!((scheduler.running.len(), scheduler.preemptions), (2, 0));
    }

    #[test]
    fn nobody_is_let_in_on_pages_that_a_prefill_under_way_will_need() {
        let mut scheduler = scheduler(5, 4, 20);
        start(&mut scheduler, 0, 64, 50);
        scheduler.running[0].computed = 40;
        let new = sequence(&scheduler, 1, 17);
        scheduler.add(new);
        // One page is free; the new one needs two.
        scheduler.schedule(usize::MAX);
        assert_eq!(scheduler.waiting.len(), 1);
    }

    #[test]
    fn a_long_prompt_leaves_half_to_those_behind_it_and_takes_what_they_leave() {
        let mut scheduler = scheduler(100, 4, 20);
        start(&mut scheduler, 0, 400, 16);
        let plan = scheduler.schedule(usize::MAX);
        assert_eq!(planned(&scheduler, &plan), [(0, 20)]);
        for (id, tokens) in [(1, 30), (2, 2)] {
            let new = sequence(&scheduler, id, tokens);
            scheduler.add(new);
        }
        let plan = scheduler.schedule(usize::MAX);
        assert_eq!(planned(&scheduler, &plan), [(0, 13), (1, 5), (2, 2)]);
    }

    #[test]
    fn prompts_beside_decode_rows_get_no_more_than_their_share() {
        let mut scheduler = scheduler(100, 4, 100);
        start(&mut scheduler, 0, 30, 29);
        start(&mut scheduler, 1, 400, 16);
        let plan = scheduler.schedule(30);
        assert_eq!(planned(&scheduler, &plan), [(0, 1), (1, 30)]);
        scheduler.remove(RequestId(0));
        let plan = scheduler.schedule(30);
        assert_eq!(planned(&scheduler, &plan), [(1, 100)]);
    }

    #[test]
    fn a_higher_priority_goes_first_and_takes_a_place_if_it_must() {
        let mut scheduler = scheduler(100, 2, 50);
        for (id, priority) in [(0, 1), (1, 1), (2, 1), (3, 0), (4, 1)] {
            let mut new = sequence(&scheduler, id, 5);
            new.params.priority = priority;
            scheduler.add(new);
            if id == 1 {
                scheduler.schedule(usize::MAX);
            }
        }
        let ids = |sequences: &mut dyn Iterator<Item = &Sequence>| sequences.map(|one| one.id.0).collect::<Vec<_>>();
        assert_eq!(ids(&mut scheduler.waiting.iter()), [3, 2, 4]);
        scheduler.schedule(usize::MAX);
        assert_eq!(ids(&mut scheduler.running.iter()), [3, 0]);
        // The one that gave way is still the first of its priority.
        assert_eq!(ids(&mut scheduler.waiting.iter()), [1, 2, 4]);
        // A level is worth a limited number of arrivals.
        let mut late = sequence(&scheduler, 300, 5);
        late.params.priority = 0;
        scheduler.add(late);
        assert_eq!(ids(&mut scheduler.waiting.iter()), [1, 2, 4, 300]);
    }

    #[test]
    fn a_twin_waits_for_the_prompt_of_both_and_computes_its_last_token_alone() {
        let mut scheduler = scheduler(100, 4, 20);
        let leader = sequence(&scheduler, 0, 30);
        scheduler.add(leader);
        let mut twin = sequence(&scheduler, 1, 30);
        twin.twin = Some(RequestId(0));
        scheduler.add(twin);
        let other = sequence(&scheduler, 2, 4);
        scheduler.add(other);
        let plan = scheduler.schedule(usize::MAX);
        assert_eq!(planned(&scheduler, &plan), [(0, 16), (2, 4)]);
        for (index, count) in [(0, 16), (1, 4)] {
            scheduler.running[index].computed = count;
        }
        scheduler.remove(RequestId(2));
        let plan = scheduler.schedule(usize::MAX);
        assert_eq!(planned(&scheduler, &plan), [(0, 14)]);
        scheduler.running[0].computed = 30;
        scheduler.running[0].push(7);
        let plan = scheduler.schedule(usize::MAX);
        assert_eq!(planned(&scheduler, &plan), [(0, 1), (1, 1)]);
        // Each writes to the second page.
        assert_eq!(plan.moves.len(), 1);
        assert_eq!(scheduler.pages.statistics()[0].free, 100 - 3);
    }

    #[derive(Debug, Clone)]
    enum Event {
        Add { tokens: usize, priority: i32 },
        Remove(u64),
        Step { cancelled: bool, prompt_tokens: usize },
        Preempt,
    }

    fn event() -> impl Strategy<Value = Event> {
        prop_oneof![
            2 => (1..100_usize, -1..2_i32).prop_map(|(tokens, priority)| Event::Add { tokens, priority }),
            1 => (0..20_u64).prop_map(Event::Remove),
            8 => (prop::bool::weighted(0.2), 1..60_usize)
                .prop_map(|(cancelled, prompt_tokens)| Event::Step { cancelled, prompt_tokens }),
            1 => Just(Event::Preempt),
        ]
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 10_000, failure_persistence: None, ..ProptestConfig::default() })]

        /// What the module says of itself: the first in rank of those that run advances, limits hold, and equal
        /// priorities are let in by arrival.
        #[test]
        fn the_first_in_rank_advances_and_equals_are_let_in_by_arrival(
            pages in 8..20_usize,
            max_num_seqs in 1..6_usize,
            budget in 1..40_usize,
            events in prop::collection::vec(event(), 1..80),
        ) {
            let mut scheduler = scheduler(pages, max_num_seqs.min(budget), budget);
            let mut next = 0;
            let mut let_in: Vec<RequestId> = Vec::new();
            for event in events {
                match event {
                    Event::Add { tokens, priority } => {
                        let mut new = sequence(&scheduler, next, tokens);
                        new.params.priority = priority;
                        scheduler.add(new);
                        next += 1;
                    }
                    Event::Remove(id) => {
                        scheduler.remove(RequestId(id));
                    }
                    Event::Preempt => {
                        scheduler.preempt_last();
                    }
                    Event::Step { cancelled, prompt_tokens } => {
                        let plan = scheduler.schedule(prompt_tokens);
                        prop_assert_eq!(plan.tokens, plan.chunks.iter().map(|chunk| chunk.count).sum::<usize>());
                        prop_assert!(plan.tokens <= budget && plan.chunks.len() <= max_num_seqs);
                        prop_assert!(plan.tokens <= plan.limit);
                        let first = scheduler.running.first().map(|first| first.id);
                        let is_planned = |id| plan.chunks.iter().any(|chunk| scheduler.running[chunk.index].id == id);
                        prop_assert!(first.is_some() || scheduler.waiting.is_empty());
                        prop_assert!(first.is_none_or(is_planned));
                        let new = scheduler.running.iter().filter(|one| !let_in.contains(&one.id));
                        let new: Vec<(i32, RequestId)> = new.map(|one| (one.params.priority, one.id)).collect();
                        for &(priority, id) in &new {
                            let earlier = |one: &&Sequence| {
                                one.params.priority == priority && one.id < id && !let_in.contains(&one.id)
                            };
                            prop_assert_eq!(scheduler.waiting.iter().find(earlier).map(|one| one.id), None);
                        }
                        let_in.extend(new.into_iter().map(|(_, id)| id));
                        for chunk in plan.chunks.iter().filter(|_| !cancelled) {
                            let sequence = &mut scheduler.running[chunk.index];
                            sequence.computed += chunk.count;
                            prop_assert!(sequence.tables.held(0) * 16 >= sequence.computed);
                            if sequence.pending() == 0 {
                                sequence.push(0);
                            }
                        }
                        // As in the engine, none grows beyond what the pool holds.
                        let grown = scheduler.sequences().filter(|sequence| sequence.tokens.len() >= pages * 16);
                        let grown: Vec<RequestId> = grown.map(|sequence| sequence.id).collect();
                        grown.into_iter().for_each(|id| drop(scheduler.remove(id)));
                    }
                }
                prop_assert!(scheduler.running.is_sorted_by_key(Sequence::rank));
                prop_assert!(scheduler.waiting.iter().is_sorted_by_key(|sequence| sequence.rank()));
                prop_assert!(scheduler.running.len() <= max_num_seqs);
                let audit = scheduler.pages.audit(scheduler.sequences().map(|sequence| &sequence.tables));
                prop_assert_eq!(audit, Ok(()));
            }
        }
    }
}
