//! Schedules of models that compute several batches at the same time.

use super::*;

/// Returns a scheduler for a model that computes two batches at the same time.
fn scheduler_of_two_batches(pages: usize) -> Scheduler {
    let mut scheduler = scheduler(pages, 8, 100);
    scheduler.limits.batches = 2;
    scheduler
}

/// Returns a scheduler for a hybrid model with 100 pages that computes two batches at the same time.
fn hybrid_scheduler_of_two_batches(states: usize) -> Scheduler {
    let mut scheduler = scheduler_of_two_batches(100);
    scheduler.kv_cache = hybrid_kv_cache(100, states);
    scheduler
}

#[test]
fn sequences_in_flight_are_neither_scheduled_nor_preempted() {
    let mut scheduler = scheduler_of_two_batches(4);
    for id in 0..4 {
        start(&mut scheduler, id, 17, 16);
    }
    scheduler.running[1].in_flight = 1;
    scheduler.running[3].in_flight = 1;
    // The first sequence needs a page, which the third one has.
    let plan = scheduler.schedule(usize::MAX);
    assert_eq!(planned(&scheduler, &plan), [(0, 1)]);
    assert_eq!(scheduler.running.iter().map(|one| one.id.0).collect::<Vec<_>>(), [0, 1, 3]);
}

#[test]
fn no_sequence_is_admitted_while_another_needs_the_pages_of_one_in_flight() {
    let mut scheduler = scheduler_of_two_batches(2);
    start(&mut scheduler, 0, 17, 16);
    start(&mut scheduler, 1, 10, 9);
    scheduler.running[1].in_flight = 1;
    let new = sequence(&scheduler, 2, 1);
    scheduler.add(new);
    let plan = scheduler.schedule(usize::MAX);
    assert!(plan.chunks.is_empty());
    assert_eq!((scheduler.running.len(), scheduler.waiting.len(), scheduler.preemptions), (2, 1, 0));
    // The batch is finished.
    scheduler.running[1].in_flight = 0;
    let plan = scheduler.schedule(usize::MAX);
    assert_eq!(planned(&scheduler, &plan), [(0, 1)]);
    assert_eq!((scheduler.running.len(), scheduler.waiting.len(), scheduler.preemptions), (1, 2, 1));
}

#[test]
fn a_prompt_gets_the_pages_of_a_lower_ranked_sequence_once_its_batch_is_finished() {
    let mut scheduler = scheduler_of_two_batches(2);
    start(&mut scheduler, 0, 20, 16);
    start(&mut scheduler, 1, 10, 9);
    // The decoding sequence comes first, and is all of this batch's share.
    let plan = scheduler.schedule(usize::MAX);
    assert_eq!(planned(&scheduler, &plan), [(1, 1)]);
    scheduler.running[1].in_flight = 1;
    let plan = scheduler.schedule(usize::MAX);
    assert_eq!(planned(&scheduler, &plan), []);
    scheduler.running[1].in_flight = 0;
    let plan = scheduler.schedule(usize::MAX);
    assert_eq!(planned(&scheduler, &plan), [(0, 4)]);
    assert_eq!((scheduler.running.len(), scheduler.waiting.len(), scheduler.preemptions), (1, 1, 1));
}

#[test]
fn sequences_run_again_after_one_that_waited_for_pages_is_removed() {
    let mut scheduler = scheduler_of_two_batches(2);
    start(&mut scheduler, 0, 20, 16);
    start(&mut scheduler, 1, 10, 9);
    scheduler.running[1].in_flight = 1;
    assert_eq!(scheduler.schedule(usize::MAX).chunks, []);
    assert!(scheduler.remove(RequestId(0)));
    scheduler.running[0].in_flight = 0;
    let plan = scheduler.schedule(usize::MAX);
    assert_eq!(planned(&scheduler, &plan), [(1, 1)]);
}

#[test]
fn a_batch_has_its_share_of_running_and_new_sequences() {
    let mut scheduler = scheduler_of_two_batches(100);
    for id in 0..3 {
        start(&mut scheduler, id, 10, 9);
    }
    scheduler.running[1].in_flight = 1;
    for id in 3..7 {
        let new = sequence(&scheduler, id, 5);
        scheduler.add(new);
    }
    // Seven sequences, of which four are in this batch.
    let plan = scheduler.schedule(usize::MAX);
    assert_eq!(planned(&scheduler, &plan), [(0, 1), (2, 1), (3, 5), (4, 5)]);
}

#[test]
fn as_many_sequences_run_in_two_batches_as_have_two_states_each() {
    for (states, expected) in [(5, 2), (6, 3), (7, 3), (8, 4)] {
        let mut scheduler = hybrid_scheduler_of_two_batches(states);
        for id in 0..4 {
            let new = sequence(&scheduler, id, 20);
            scheduler.add(new);
        }
        let mut in_flight = VecDeque::new();
        for _ in 0..12 {
            let plan = scheduler.schedule(usize::MAX);
            in_flight.push_back(begin(&mut scheduler, &plan));
            if in_flight.len() == 2 {
                assert_eq!((scheduler.running.len(), scheduler.preemptions), (expected, 0), "{states} states");
                let batch = in_flight.pop_front().unwrap();
                finish(&mut scheduler, &batch);
            }
        }
        assert!(scheduler.running.iter().all(|sequence| sequence.output_len() >= 5), "{states} states");
    }
}

#[test]
fn chunks_of_one_prompt_are_in_flight_at_the_same_time() {
    let mut scheduler = scheduler_of_two_batches(100);
    scheduler.limits.max_num_batched_tokens = 2000;
    let prompt = sequence(&scheduler, 0, 1200);
    scheduler.add(prompt);
    let mut in_flight = VecDeque::new();
    // An eighth of the tokens that are left each time.
    for expected in [150, 132] {
        let plan = scheduler.schedule(usize::MAX);
        assert_eq!(planned(&scheduler, &plan), [(0, expected)]);
        in_flight.push_back(begin(&mut scheduler, &plan));
    }
    finish(&mut scheduler, &in_flight.pop_front().unwrap());
    assert_eq!((scheduler.running[0].computed, scheduler.running[0].begun()), (150, 282));
    // A new prompt comes first, and the next chunk fills the batch.
    let other = sequence(&scheduler, 1, 5);
    scheduler.add(other);
    let plan = scheduler.schedule(usize::MAX);
    assert_eq!(planned(&scheduler, &plan), [(1, 5), (0, 127)]);
    in_flight.push_back(begin(&mut scheduler, &plan));
    finish(&mut scheduler, &in_flight.pop_front().unwrap());
    // Beside the decoding sequence, the prompt has a part of each batch.
    finish(&mut scheduler, &in_flight.pop_front().unwrap());
    for expected in [vec![(1, 1)], vec![(0, 40)], vec![(1, 1), (0, 40)], vec![(0, 40)]] {
        let plan = scheduler.schedule(40);
        assert_eq!(planned(&scheduler, &plan), expected);
        in_flight.push_back(begin(&mut scheduler, &plan));
        if in_flight.len() == 2 {
            finish(&mut scheduler, &in_flight.pop_front().unwrap());
        }
    }
}

#[test]
fn short_prompts_form_several_batches_for_each_stage_while_no_sequence_decodes() {
    let mut scheduler = scheduler_of_two_batches(100);
    (scheduler.limits.max_num_seqs, scheduler.limits.max_num_batched_tokens) = (16, 512);
    for id in 0..16 {
        let new = sequence(&scheduler, id, 32);
        scheduler.add(new);
    }
    for _ in 0..4 {
        let plan = scheduler.schedule(usize::MAX);
        assert_eq!((plan.chunks.len(), plan.tokens), (4, 128));
        begin(&mut scheduler, &plan);
    }
    assert_eq!(scheduler.schedule(usize::MAX).chunks, []);
}

#[test]
fn the_next_chunk_of_a_prompt_in_flight_preempts_no_sequence() {
    let mut scheduler = scheduler_of_two_batches(40);
    scheduler.limits.batches = 4;
    start(&mut scheduler, 0, 640, 384);
    start(&mut scheduler, 1, 17, 16);
    let mut in_flight = Vec::new();
    // The decoding sequence has a page, and there is none for its next token.
    scheduler.running[1].in_flight = 1;
    for expected in [100, 100, 40] {
        let plan = scheduler.schedule(usize::MAX);
        assert_eq!(planned(&scheduler, &plan), [(0, expected)]);
        in_flight.push(begin(&mut scheduler, &plan));
    }
    assert_eq!(scheduler.schedule(usize::MAX).chunks, []);
    scheduler.running[1].in_flight = 0;
    assert_eq!(scheduler.schedule(usize::MAX).chunks, []);
    assert_eq!((scheduler.running.len(), scheduler.preemptions), (2, 0));
    in_flight.iter().for_each(|batch| finish(&mut scheduler, batch));
    let plan = scheduler.schedule(usize::MAX);
    assert_eq!(planned(&scheduler, &plan), [(0, 16)]);
    assert_eq!((scheduler.running.len(), scheduler.preemptions), (1, 1));
}

#[test]
fn a_prompt_behind_a_waiting_sequence_can_be_preempted_between_its_chunks() {
    let mut scheduler = scheduler_of_two_batches(100);
    scheduler.limits.max_num_seqs = 2;
    let mut in_flight = Vec::new();
    for id in [0, 1] {
        start(&mut scheduler, id, 400, 0);
        Arc::make_mut(&mut scheduler.running[id as usize].params).priority = 1;
        let plan = scheduler.schedule(usize::MAX);
        assert_eq!(planned(&scheduler, &plan), [(id, 100)]);
        in_flight.push(begin(&mut scheduler, &plan));
    }
    let urgent = sequence(&scheduler, 2, 5);
    scheduler.add(urgent);
    assert_eq!(scheduler.schedule(usize::MAX).chunks, []);
    finish(&mut scheduler, &in_flight[0]);
    let plan = scheduler.schedule(usize::MAX);
    // The preempted prompt ranks before the other one, which is in flight.
    assert_eq!(planned(&scheduler, &plan), [(2, 5)]);
    assert_eq!((scheduler.waiting[0].id, scheduler.preemptions), (RequestId(0), 1));
}

#[test]
fn a_higher_priority_preempts_although_each_running_sequence_fills_a_batch() {
    // A prompt of several chunks, and decoding sequences.
    for (batches, sequences, tokens, computed) in [(2, 1, 400, 0), (2, 1, 20, 19), (3, 2, 20, 19)] {
        let mut scheduler = scheduler_of_two_batches(100);
        (scheduler.limits.batches, scheduler.limits.max_num_seqs) = (batches, sequences);
        let mut in_flight = Vec::new();
        for id in 0..sequences as u64 {
            start(&mut scheduler, id, tokens, computed);
            Arc::make_mut(&mut scheduler.running[id as usize].params).priority = 1;
            let plan = scheduler.schedule(usize::MAX);
            assert_eq!(planned(&scheduler, &plan), [(id, (tokens - computed).min(100))]);
            in_flight.push(begin(&mut scheduler, &plan));
        }
        let urgent = sequence(&scheduler, 9, 5);
        scheduler.add(urgent);
        assert_eq!(scheduler.schedule(usize::MAX).chunks, []);
        finish(&mut scheduler, &in_flight[0]);
        let plan = scheduler.schedule(usize::MAX);
        assert_eq!(planned(&scheduler, &plan), [(9, 5)]);
        assert_eq!((scheduler.waiting[0].id, scheduler.preemptions), (RequestId(0), 1));
    }
}

#[test]
fn prompts_of_a_divided_step_are_whole_or_fill_their_batch() {
    let begin_prompts = |count, tokens| {
        let mut scheduler = scheduler_of_two_batches(100);
        scheduler.limits.max_num_batched_tokens = 512;
        for id in 0..count {
            let new = sequence(&scheduler, id, tokens);
            scheduler.add(new);
        }
        scheduler
    };
    let check = |scheduler: &mut Scheduler, expected: &[(u64, usize)]| {
        let plan = scheduler.schedule(128);
        assert_eq!(planned(scheduler, &plan), expected);
        begin(scheduler, &plan)
    };
    // 800 tokens form six batches.
    let mut scheduler = begin_prompts(8, 100);
    let first = check(&mut scheduler, &[(0, 100), (1, 34)]);
    check(&mut scheduler, &[(2, 100), (3, 34)]);
    finish(&mut scheduler, &first);
    // Beside the first sequence, which decodes, the second prompt ends.
    check(&mut scheduler, &[(0, 1), (1, 66), (4, 62)]);

    // Prompts that are longer than a batch but shorter than a step.
    let mut scheduler = begin_prompts(4, 200);
    let first = check(&mut scheduler, &[(0, 134)]);
    check(&mut scheduler, &[(1, 134)]);
    finish(&mut scheduler, &first);
    check(&mut scheduler, &[(0, 66), (2, 67)]);
}

#[test]
fn chunks_in_flight_leave_the_pages_that_other_prompts_need() {
    let window = GroupKind::Pages { window: Some(33) };
    let groups = [GroupKind::Pages { window: None }, window].map(|kind| KvGroup { layers: 1, kind, page_bytes: 1 });
    let mut scheduler = scheduler_of_two_batches(100);
    // Each of two prompts holds up to seven pages of the window while it is computed in chunks of 64 tokens.
    scheduler.kv_cache = KvCacheManager::new(&groups, &[100, 14], false);
    scheduler.limits.batches = 5;
    for (id, tokens) in [(0, 640), (1, 320)] {
        let new = sequence(&scheduler, id, tokens);
        scheduler.add(new);
    }
    let mut in_flight = VecDeque::new();
    let expected = [
        (64, vec![(0, 64)]),
        (16, vec![(1, 16)]),
        // Six of nine free pages are for the second prompt.
        (64, vec![(0, 48), (1, 16)]),
        (64, vec![(1, 64)]),
        (64, vec![(1, 16)]),
    ];
    for (limit, expected) in expected {
        scheduler.limits.max_num_batched_tokens = limit;
        let plan = scheduler.schedule(usize::MAX);
        assert_eq!(planned(&scheduler, &plan), expected);
        in_flight.push_back(begin(&mut scheduler, &plan));
    }
    while scheduler.running.iter().any(|one| one.output_len() == 0) {
        finish(&mut scheduler, &in_flight.pop_front().unwrap());
        let plan = scheduler.schedule(usize::MAX);
        in_flight.push_back(begin(&mut scheduler, &plan));
    }
    assert_eq!((scheduler.running.len(), scheduler.preemptions), (2, 0));
}

#[test]
fn a_prompt_with_states_or_prompt_logprobs_is_in_one_batch_at_a_time() {
    let mut with_logprobs = scheduler_of_two_batches(100);
    start(&mut with_logprobs, 0, 400, 0);
    with_logprobs.running[0].next_prompt_logprob = 300;
    let mut hybrid = hybrid_scheduler_of_two_batches(8);
    start(&mut hybrid, 0, 400, 0);
    for scheduler in [&mut with_logprobs, &mut hybrid] {
        scheduler.limits.max_num_batched_tokens = 280;
        let plan = scheduler.schedule(usize::MAX);
        // It is not divided for batches that cannot overlap.
        assert_eq!(planned(scheduler, &plan), [(0, 280)]);
        begin(scheduler, &plan);
        assert_eq!(scheduler.schedule(usize::MAX).chunks, []);
    }
}
