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

#[cfg(test)]
mod tests {
    use ferrule_model::KvGroup;
    use proptest::prelude::*;

    use super::*;
    use crate::{Request, SamplingParams};

    fn scheduler(pages: usize, max_num_seqs: usize, max_num_batched_tokens: usize) -> Scheduler {
        let group = KvGroup { layers: 1, window: None, page_bytes: 1 };
        Scheduler::new(Pages::new(&[group], &[pages]), max_num_seqs, max_num_batched_tokens)
    }

    fn sequence(scheduler: &Scheduler, id: u64, tokens: usize) -> Sequence {
        let request = Request { prompt: vec![0; tokens], params: SamplingParams::default() };
        Sequence::new(RequestId(id), request, scheduler.pages.empty_tables())
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
        let plan = scheduler.schedule();
        assert_eq!(planned(&scheduler, &plan), [(1, 1), (2, 1), (0, 8)]);
        scheduler.running[0].computed = 37;
        let plan = scheduler.schedule();
        // Five tokens of the budget are left after the last three of the chunk, and one place.
        assert_eq!(planned(&scheduler, &plan), [(1, 1), (2, 1), (0, 3), (3, 5)]);
        assert_eq!((scheduler.running.len(), scheduler.waiting.len()), (4, 2));
    }

    #[test]
    fn a_planned_sequence_that_gives_way_leaves_the_plan() {
        let mut scheduler = scheduler(2, 4, 10);
        start(&mut scheduler, 0, 40, 16);
        start(&mut scheduler, 1, 10, 9);
        let plan = scheduler.schedule();
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
        let plan = scheduler.schedule();
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
        scheduler.schedule();
        assert_eq!(scheduler.waiting.len(), 1);
    }

    #[derive(Debug, Clone)]
    enum Event {
        Add(usize),
        Remove(u64),
        Step { cancelled: bool },
        Preempt,
    }

    fn event() -> impl Strategy<Value = Event> {
        prop_oneof![
            2 => (1..100_usize).prop_map(Event::Add),
            1 => (0..20_u64).prop_map(Event::Remove),
            8 => prop::bool::weighted(0.2).prop_map(|cancelled| Event::Step { cancelled }),
            1 => Just(Event::Preempt),
        ]
    }

    proptest! {
        /// What the module says of itself: those that run are the oldest, and the oldest of all advances.
        #[test]
        fn the_oldest_run_and_the_oldest_of_all_advances(
            pages in 8..20_usize,
            max_num_seqs in 1..6_usize,
            budget in 1..40_usize,
            events in prop::collection::vec(event(), 1..80),
        ) {
            let mut scheduler = scheduler(pages, max_num_seqs, budget);
            let mut next = 0;
            for event in events {
                match event {
                    Event::Add(tokens) => {
                        let new = sequence(&scheduler, next, tokens);
                        scheduler.add(new);
                        next += 1;
                    }
                    Event::Remove(id) => {
                        scheduler.remove(RequestId(id));
                    }
                    Event::Preempt => {
                        scheduler.preempt_youngest();
                    }
                    Event::Step { cancelled } => {
                        let oldest = scheduler.sequences().map(|sequence| sequence.id).min();
                        let plan = scheduler.schedule();
                        prop_assert_eq!(plan.tokens, plan.chunks.iter().map(|chunk| chunk.count).sum::<usize>());
                        prop_assert!(plan.tokens <= budget && plan.chunks.len() <= max_num_seqs);
                        let is_planned = |id| plan.chunks.iter().any(|chunk| scheduler.running[chunk.index].id == id);
                        prop_assert!(oldest.is_none_or(is_planned));
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
                prop_assert!(scheduler.sequences().map(|sequence| sequence.id).is_sorted());
                prop_assert!(scheduler.running.len() <= max_num_seqs);
                let statistics = scheduler.pages.statistics(scheduler.sequences().map(|sequence| &sequence.tables))[0];
                prop_assert_eq!(statistics.free + statistics.held, pages);
            }
        }
    }
}
