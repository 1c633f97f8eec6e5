mod in_flight;

use std::sync::Arc;

use ferrule_model::{GroupKind, KvGroup};
use proptest::prelude::*;

use super::*;
use crate::draft::Drafts;
use crate::{Request, SamplingParams};

fn scheduler(pages: usize, max_num_seqs: usize, max_num_batched_tokens: usize) -> Scheduler {
    let group = KvGroup { layers: 1, kind: GroupKind::Pages { window: None }, page_bytes: 1 };
    let limits = StepLimits { max_num_seqs, max_num_batched_tokens, logit_rows: 4, fetch_bytes: 0, batches: 1 };
    Scheduler::new(KvCacheManager::new(&[group], &[pages], false), limits)
}

/// Returns the page pools of a hybrid model, with snapshots of states.
fn hybrid_kv_cache(pages: usize, states: usize) -> KvCacheManager {
    let kinds = [GroupKind::Pages { window: None }, GroupKind::State];
    let groups = kinds.map(|kind| KvGroup { layers: 1, kind, page_bytes: 1 });
    KvCacheManager::new(&groups, &[pages, states], true)
}

fn sequence(scheduler: &Scheduler, id: u64, tokens: usize) -> Sequence {
    let request = Request::new(vec![0; tokens], SamplingParams::default());
    Sequence::new(RequestId(id), request, None, scheduler.kv_cache.private_tables(), Drafts::default())
}

/// Starts a sequence whose first tokens are computed.
fn start(scheduler: &mut Scheduler, id: u64, tokens: usize, computed: usize) {
    let mut new = sequence(scheduler, id, tokens);
    scheduler.kv_cache.allocate_slots(&mut new.tables, 0, computed, &mut Vec::new());
    new.computed = computed;
    scheduler.running.push(new);
}

fn planned(scheduler: &Scheduler, plan: &Schedule) -> Vec<(u64, usize)> {
    plan.chunks.iter().map(|chunk| (scheduler.running[chunk.index].id.0, chunk.count)).collect()
}

/// Sequences of a batch in flight, with the number of tokens of each.
type Batch = Vec<(RequestId, usize)>;

/// Marks the sequences of a plan as in flight.
fn begin(scheduler: &mut Scheduler, plan: &Schedule) -> Batch {
    let begin = |chunk: &Scheduled| {
        let sequence = &mut scheduler.running[chunk.index];
        sequence.in_flight += chunk.count;
        (sequence.id, chunk.count)
    };
    plan.chunks.iter().map(begin).collect()
}

/// Ends a batch: its sequences that still run have computed their tokens, and get another one after the last.
fn finish(scheduler: &mut Scheduler, batch: &Batch) {
    let Scheduler { running, kv_cache, .. } = scheduler;
    for &(id, count) in batch {
        let Some(sequence) = running.iter_mut().find(|sequence| sequence.id == id) else { continue };
        let Sequence { tables, tokens, prompt_len, computed, .. } = &mut *sequence;
        let end = *computed + count;
        *computed = kv_cache.keep_states(tables, *computed, end, end);
        kv_cache.cache_full_pages(tables, tokens, *prompt_len, end);
        assert!(tables.held(0) * 16 >= end);
        sequence.in_flight -= count;
        if sequence.pending() == 0 {
            sequence.push(0);
        }
    }
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
    assert_eq!(planned(&scheduler, &plan), [(1, 1), (2, 1), (0, 4), (3, 4)]);
    scheduler.running[0].computed = 37;
    let plan = scheduler.schedule(usize::MAX);
    // Five tokens of the budget and one slot are left after the last three tokens of the chunk.
    assert_eq!(planned(&scheduler, &plan), [(1, 1), (2, 1), (0, 3), (3, 5)]);
    assert_eq!((scheduler.running.len(), scheduler.waiting.len()), (4, 2));
}

#[test]
fn a_preempted_sequence_leaves_the_plan() {
    let mut scheduler = scheduler(2, 4, 10);
    start(&mut scheduler, 0, 40, 16);
    start(&mut scheduler, 1, 10, 9);
    let plan = scheduler.schedule(usize::MAX);
    // The younger sequence's row was planned first, on the page that the older one's chunk then needs.
    assert_eq!(planned(&scheduler, &plan), [(0, 10)]);
    assert_eq!(plan.tokens, 10);
    assert_eq!(scheduler.waiting[0].id, RequestId(1));
    assert_eq!((scheduler.waiting[0].computed, scheduler.waiting[0].timing.preemptions), (0, 1));
}

#[test]
fn a_sequence_without_a_free_page_keeps_its_pages_and_waits_for_older_ones() {
    let mut scheduler = scheduler(2, 4, 10);
    start(&mut scheduler, 0, 10, 9);
    start(&mut scheduler, 1, 17, 16);
    let plan = scheduler.schedule(usize::MAX);
    assert_eq!(planned(&scheduler, &plan), [(0, 1)]);
    assert_eq!((scheduler.running.len(), scheduler.preemptions), (2, 0));
}

#[test]
fn pages_needed_by_a_running_prefill_are_not_allocated_to_new_sequences() {
    let mut scheduler = scheduler(5, 4, 20);
    start(&mut scheduler, 0, 64, 50);
    scheduler.running[0].computed = 40;
    let new = sequence(&scheduler, 1, 17);
    scheduler.add(new);
    // One page is free; the new sequence needs two.
    scheduler.schedule(usize::MAX);
    assert_eq!(scheduler.waiting.len(), 1);
}

#[test]
fn a_long_prompt_leaves_half_of_a_step_to_others_and_takes_the_rest() {
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
fn prefill_beside_decode_rows_is_limited() {
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
fn a_higher_priority_goes_first_and_preempts_if_needed() {
    let mut scheduler = scheduler(100, 2, 50);
    for (id, priority) in [(0, 1), (1, 1), (2, 1), (3, 0), (4, 1)] {
        let mut new = sequence(&scheduler, id, 5);
        Arc::make_mut(&mut new.params).priority = priority;
        scheduler.add(new);
        if id == 1 {
            scheduler.schedule(usize::MAX);
        }
    }
    let ids = |sequences: &mut dyn Iterator<Item = &Sequence>| sequences.map(|one| one.id.0).collect::<Vec<_>>();
    assert_eq!(ids(&mut scheduler.waiting.iter()), [3, 2, 4]);
    scheduler.schedule(usize::MAX);
    assert_eq!(ids(&mut scheduler.running.iter()), [3, 0]);
    // The preempted sequence is still the first of its priority.
    assert_eq!(ids(&mut scheduler.waiting.iter()), [1, 2, 4]);
    // A priority level outweighs a limited number of arrivals.
    let mut late = sequence(&scheduler, 300, 5);
    Arc::make_mut(&mut late.params).priority = 0;
    scheduler.add(late);
    assert_eq!(ids(&mut scheduler.waiting.iter()), [1, 2, 4, 300]);
}

#[test]
fn a_forked_sequence_waits_for_the_prompt_and_computes_only_its_last_token() {
    let mut scheduler = scheduler(100, 4, 20);
    let leader = sequence(&scheduler, 0, 30);
    scheduler.add(leader);
    let mut fork_parent = sequence(&scheduler, 1, 30);
    fork_parent.fork_parent = Some(RequestId(0));
    scheduler.add(fork_parent);
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
    // Both write to the second page.
    assert_eq!(plan.moves.len(), 1);
    assert_eq!(scheduler.kv_cache.statistics()[0].free, 100 - 3);
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
    #![proptest_config(ProptestConfig { cases: if cfg!(miri) { 10 } else { 10_000 }, failure_persistence: None, ..ProptestConfig::default() })]

    /// The module's invariants: the highest-ranked running sequence progresses, limits hold, and equal priorities are
    /// admitted by arrival.
    #[test]
    fn the_highest_rank_progresses_and_equal_priorities_are_admitted_by_arrival(
        pages in 8..20_usize,
        states in prop::option::of(2..10_usize),
        max_num_seqs in 1..6_usize,
        budget in 1..40_usize,
        batches in 1..=3_usize,
        events in prop::collection::vec(event(), 1..80),
    ) {
        let mut scheduler = scheduler(pages, max_num_seqs.min(budget), budget);
        if let Some(states) = states {
            scheduler.kv_cache = hybrid_kv_cache(pages, states);
        }
        scheduler.limits.batches = batches;
        let mut in_flight: VecDeque<Batch> = VecDeque::new();
        let mut next = 0;
        let mut let_in: Vec<RequestId> = Vec::new();
        // The highest-ranked sequence, the number of plans without it while it was not in flight, and whether a batch was
        // finished since the last plan: a cancelled step plans once more with the same pages.
        let (mut highest, mut skipped, mut is_finished) = (None, 0, true);
        for event in events {
            match event {
                Event::Add { tokens, priority } => {
                    let mut new = sequence(&scheduler, next, tokens);
                    Arc::make_mut(&mut new.params).priority = priority;
                    scheduler.add(new);
                    next += 1;
                }
                Event::Remove(id) => {
                    scheduler.remove(RequestId(id));
                }
                Event::Preempt => {
                    in_flight.drain(..).for_each(|batch| finish(&mut scheduler, &batch));
                    is_finished = true;
                    scheduler.preempt_last();
                }
                Event::Step { cancelled, prompt_tokens } => {
                    while in_flight.len() < batches {
                        let plan = scheduler.schedule(prompt_tokens);
                        prop_assert_eq!(plan.tokens, plan.chunks.iter().map(|chunk| chunk.count).sum::<usize>());
                        prop_assert!(plan.tokens <= budget && plan.chunks.len() <= max_num_seqs);
                        prop_assert!(plan.tokens <= plan.limit);
                        let new = scheduler.running.iter().filter(|one| !let_in.contains(&one.id));
                        let new: Vec<(i32, RequestId)> = new.map(|one| (one.params.priority, one.id)).collect();
                        for &(priority, id) in &new {
                            let earlier = |one: &&Sequence| {
                                one.params.priority == priority && one.id < id && !let_in.contains(&one.id)
                            };
                            prop_assert_eq!(scheduler.waiting.iter().find(earlier).map(|one| one.id), None);
                        }
                        let_in.extend(new.into_iter().map(|(_, id)| id));
                        let batch = begin(&mut scheduler, &plan);
                        let first = scheduler.running.first();
                        prop_assert!(first.is_some() || scheduler.waiting.is_empty());
                        let is_skipped = first.is_some_and(|first| first.in_flight == 0);
                        let same = first.map(|first| first.id) == highest;
                        highest = first.map(|first| first.id);
                        let more = usize::from(std::mem::take(&mut is_finished));
                        skipped = if !is_skipped { 0 } else if same { skipped + more } else { 1 };
                        // The others of a batch may come first, and then keep pages until they are finished.
                        prop_assert!(skipped <= 2 * (batches - 1), "{skipped} plans without the first sequence");
                        if batch.is_empty() {
                            break;
                        }
                        in_flight.push_back(batch);
                    }
                    if !cancelled && let Some(batch) = in_flight.pop_front() {
                        finish(&mut scheduler, &batch);
                        is_finished = true;
                    } else if batches == 1 {
                        // The next step repeats the work.
                        is_finished = true;
                        in_flight.clear();
                        scheduler.running.iter_mut().for_each(|sequence| sequence.in_flight = 0);
                    }
                    // As in the engine, no sequence grows beyond the pool's capacity.
                    let grown = scheduler.sequences().filter(|sequence| sequence.tokens.len() >= pages * 16);
                    let grown: Vec<RequestId> = grown.map(|sequence| sequence.id).collect();
                    assert!(grown.into_iter().all(|id| scheduler.remove(id)));
                }
            }
            prop_assert!(scheduler.running.is_sorted_by_key(Sequence::rank));
            prop_assert!(scheduler.waiting.iter().is_sorted_by_key(|sequence| sequence.rank()));
            prop_assert!(scheduler.running.len() <= max_num_seqs);
            let audit = scheduler.kv_cache.audit(scheduler.sequences().map(|sequence| &sequence.tables));
            prop_assert_eq!(audit, Ok(()));
        }
    }
}
