//! Prefix caching in memory, on disk and in saved states: shared pages never change a request's output.

use std::collections::BTreeMap;
use std::path::Path;

use crate::fake::{self, FakeModel, STATE, VOCAB, engine, run};
use ferrule_engine::{
    ConfigError, Engine, EngineConfig, EngineError, FinishReason, Metrics, PrefixCacheDir, Request, RequestError,
    RequestId, SamplingParams, StateError, StepOutput,
};
use ferrule_kernels::Cancel;
use ferrule_kernels::kv::PAGE_TOKENS;
use proptest::collection::vec;
use proptest::prelude::*;

fn config() -> EngineConfig {
    EngineConfig { pages: vec![64], max_model_len: 600, ..fake::config() }
}

fn on_disk(directory: &Path) -> EngineConfig {
    let directory = PrefixCacheDir { path: directory.join("pages"), limit: 1 << 30, step_bytes: 32 << 20 };
    EngineConfig { prefix_cache_dir: Some(directory), ..config() }
}

fn greedy(max_tokens: usize) -> SamplingParams {
    SamplingParams { temperature: 0.0, max_tokens, ..SamplingParams::default() }
}

/// Returns a prompt of `len` common tokens and one distinct token.
fn prompt(len: usize, own: u32) -> Vec<u32> {
    (0..len as u32).map(|index| index * 7 % VOCAB as u32).chain([own]).collect()
}

/// Returns the tokens of a request, and the number of tokens computed for it.
fn ask(engine: &mut Engine<FakeModel>, prompt: Vec<u32>, params: SamplingParams) -> (Vec<u32>, u64) {
    let before = engine.metrics().computed_tokens;
    engine.add_request(Request::new(prompt, params)).unwrap();
    let tokens = run(engine).into_iter().flat_map(|output| output.token_ids).collect();
    assert_eq!(engine.audit_pages(), Ok(()));
    (tokens, engine.metrics().computed_tokens - before)
}

fn alone(prompt: Vec<u32>, params: SamplingParams) -> Vec<u32> {
    ask(&mut engine(&EngineConfig { enable_prefix_caching: false, ..config() }, &[None]), prompt, params).0
}

#[test]
fn requests_with_a_common_prefix_compute_only_the_rest() {
    let mut engine = engine(&config(), &[None]);
    assert_eq!(ask(&mut engine, prompt(100, 1), greedy(1)).1, 101);
    // Six pages are cached; the last token is always computed.
    assert_eq!(ask(&mut engine, prompt(100, 2), greedy(1)), (alone(prompt(100, 2), greedy(1)), 5));
    assert_eq!(ask(&mut engine, prompt(95, 35), greedy(1)).1, 16);
    // Sampled tokens are cached too.
    let (answer, computed) = ask(&mut engine, prompt(40, 3), greedy(30));
    assert_eq!(computed, 41 - 32 + 29);
    let next = [prompt(40, 3), answer, vec![5]].concat();
    assert_eq!(ask(&mut engine, next.clone(), greedy(3)), (alone(next, greedy(3)), 72 - 64 + 2));
    let Metrics { prefix_queries_tokens, prefix_hits_tokens, cached_prompt_tokens, .. } = *engine.metrics();
    assert_eq!((prefix_queries_tokens, prefix_hits_tokens), (100 + 100 + 95 + 40 + 71, 96 + 80 + 32 + 64));
    assert_eq!(cached_prompt_tokens, prefix_hits_tokens);
}

#[test]
fn concurrent_requests_compute_a_common_prefix_once() {
    let mut engine = engine(&EngineConfig { max_num_batched_tokens: 32, ..config() }, &[None]);
    let ids: Vec<RequestId> =
        (0..6).map(|own| engine.add_request(Request::new(prompt(300, own), greedy(4))).unwrap()).collect();
    let outputs = run(&mut engine);
    for (own, id) in (0..).zip(ids) {
        let tokens: Vec<u32> = outputs_of(&outputs, id).flat_map(|output| output.token_ids.clone()).collect();
        assert_eq!(tokens, alone(prompt(300, own), greedy(4)));
    }
    let computed = engine.metrics().computed_tokens;
    assert!(computed < 301 + 6 * 64, "{computed} tokens for six requests with 300 in common");
}

fn outputs_of(outputs: &[StepOutput], id: RequestId) -> impl Iterator<Item = &StepOutput> {
    outputs.iter().filter(move |output| output.request == id)
}

#[test]
fn a_prompt_with_states_continues_at_its_last_full_page() {
    let groups = EngineConfig { pages: vec![64; 2], ..config() };
    let mut engine = engine(&groups, &[None, STATE]);
    assert_eq!(ask(&mut engine, prompt(100, 1), greedy(1)).1, 101);
    // Steps compute up to 64 tokens: states are kept after 64 and 96 tokens.
    assert_eq!(ask(&mut engine, prompt(100, 2), greedy(1)), (alone(prompt(100, 2), greedy(1)), 5));
    assert_eq!(ask(&mut engine, prompt(90, 3), greedy(1)), (alone(prompt(90, 3), greedy(1)), 91 - 64));
    // The next turn of a conversation continues at the end of the last prompt, or every 256 tokens of an answer.
    let (answer, _) = ask(&mut engine, prompt(40, 4), greedy(30));
    let next = [prompt(40, 4), answer, vec![5]].concat();
    assert_eq!(ask(&mut engine, next.clone(), greedy(3)), (alone(next.clone(), greedy(3)), 72 - 32 + 2));
    let (answer, _) = ask(&mut engine, prompt(90, 6), greedy(180));
    let next = [prompt(90, 6), answer, vec![5]].concat();
    assert_eq!(ask(&mut engine, next.clone(), greedy(3)), (alone(next, greedy(3)), 272 - 256 + 2));
}

/// The first turn has 15,000 tokens, and other chats run in between.
#[test]
fn the_second_turn_of_a_long_chat_computes_only_its_new_tokens() {
    for (states, others) in [(3, 0), (5, 2)] {
        let config =
            EngineConfig { pages: vec![1600, states], max_model_len: 16_000, max_num_batched_tokens: 512, ..config() };
        let mut chats = engine(&config, &[None, STATE]);
        let (answer, computed) = ask(&mut chats, prompt(15_000, 1), greedy(100));
        assert_eq!(computed, 15_100);
        for other in 0..others {
            ask(&mut chats, vec![other + 7; 3000], greedy(10));
        }
        let next = [prompt(15_000, 1), answer, vec![5; 30]].concat();
        let uncached = EngineConfig { pages: vec![1000], enable_prefix_caching: false, ..config };
        let expected = ask(&mut engine(&uncached, &[None]), next.clone(), greedy(5)).0;
        assert_eq!(ask(&mut chats, next, greedy(5)), (expected, 15_131 - 14_992 + 4), "{states} states");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, failure_persistence: None, ..ProptestConfig::default() })]

    /// Turns of several chats on few or many states: the memory of the states is never exceeded (the pools are audited),
    /// outputs are those without a cache, and while the snapshots of all prompts fit, a turn computes only what follows
    /// the last prompt of its chat.
    #[test]
    fn a_turn_computes_what_follows_the_last_prompt_if_its_snapshot_fits(
        turns in vec((0_u32..3, 16_usize..200, 1_usize..300), 1..7),
        states in 2_usize..20,
    ) {
        let config = EngineConfig { pages: vec![400, states], max_model_len: 3200, ..config() };
        let mut cached = engine(&config, &[None, STATE]);
        let mut alone = engine(&EngineConfig { enable_prefix_caching: false, ..config }, &[None, STATE]);
        let mut chats: BTreeMap<u32, Vec<u32>> = BTreeMap::new();
        let mut prompts: BTreeMap<u32, usize> = BTreeMap::new();
        for (turn, (chat, new, answer)) in turns.into_iter().enumerate() {
            let tokens = chats.entry(chat).or_insert_with(|| vec![chat]);
            let from = tokens.len() as u32;
            tokens.extend((from..from + new as u32).map(|index| (index * 7 + chat) % VOCAB as u32));
            let (expected, all) = ask(&mut alone, tokens.clone(), greedy(answer));
            let (output, computed) = ask(&mut cached, tokens.clone(), greedy(answer));
            prop_assert_eq!(&output, &expected);
            // A step needs two states, and a snapshot is taken in a third one. Two lasting snapshots of every earlier turn:
            // one at the end of its prompt, and the one that it continued from.
            let last = if states >= 3 + 2 * turn { prompts.get(&chat).copied().unwrap_or(0) } else { 0 };
            prop_assert!(computed <= all - (last / PAGE_TOKENS * PAGE_TOKENS) as u64, "{computed} of {all}, {last}");
            prompts.insert(chat, tokens.len());
            tokens.extend(output);
        }
    }
}

#[test]
fn a_snapshot_that_others_continue_from_is_not_evicted_first() {
    let config = EngineConfig { pages: vec![400, 6], ..config() };
    let mut engine = engine(&config, &[None, STATE]);
    // Steps compute up to 64 tokens.
    ask(&mut engine, prompt(100, 1), greedy(1));
    assert_eq!(ask(&mut engine, prompt(70, 2), greedy(1)).1, 71 - 64);
    ask(&mut engine, vec![9; 580], greedy(1));
    assert_eq!(ask(&mut engine, prompt(72, 3), greedy(1)).1, 73 - 64);
}

/// A restart, with the snapshots at the end of the prompts.
#[test]
fn the_second_turn_after_a_restart_continues_at_the_snapshot_on_disk() {
    let directory = tempfile::tempdir().unwrap();
    for windows in [vec![None, STATE], vec![STATE, Some(20), None], vec![STATE]] {
        let config = EngineConfig { pages: vec![64; windows.len()], ..on_disk(directory.path()) };
        let start = |step_bytes| {
            let mut config = config.clone();
            config.prefix_cache_dir.as_mut().unwrap().step_bytes = step_bytes;
            let mut model = FakeModel::new(&config, &windows);
            model.fingerprint = [windows.len() as u8; 32];
            Engine::new(model, config).unwrap()
        };
        let (answer, _) = ask(&mut start(0), prompt(400, 1), greedy(30));
        let next = [prompt(400, 1), answer, vec![5]].concat();
        for step_bytes in [0, 1 << 20] {
            let mut restarted = start(step_bytes);
            let expected = (alone(next.clone(), greedy(3)), 432 - 400 + 2);
            assert_eq!(ask(&mut restarted, next.clone(), greedy(3)), expected, "{windows:?}");
            assert_eq!(restarted.metrics().disk_hits_tokens, 400, "{windows:?}");
        }
    }
}

#[test]
fn cache_salts_separate_tenants() {
    let mut engine = engine(&config(), &[None]);
    let salted = |salt: &str| SamplingParams { cache_salt: Some(salt.into()), ..greedy(1) };
    assert_eq!(ask(&mut engine, prompt(100, 1), salted("a")).1, 101);
    assert_eq!(ask(&mut engine, prompt(100, 1), salted("b")).1, 101);
    assert_eq!(ask(&mut engine, prompt(100, 1), greedy(1)).1, 101);
    assert_eq!(ask(&mut engine, prompt(100, 1), salted("a")).1, 5);
}

#[test]
fn prompt_logprobs_recompute_only_the_tokens_from_the_first_requested_one() {
    let mut engine = engine(&config(), &[None]);
    ask(&mut engine, prompt(100, 1), greedy(1));
    let params = |from| SamplingParams { prompt_logprobs: Some(2), prompt_logprobs_from: from, ..greedy(1) };
    let mut prompt_logprobs = |params: SamplingParams| {
        let before = engine.metrics().computed_tokens;
        engine.add_request(Request::new(prompt(100, 1), params)).unwrap();
        let logprobs: Vec<_> = run(&mut engine).into_iter().flat_map(|output| output.prompt_logprobs).collect();
        (logprobs, engine.metrics().computed_tokens - before)
    };
    let (all, computed) = prompt_logprobs(params(1));
    assert_eq!((all.len(), computed), (100, 101));
    assert!(
        all.iter()
            .zip(&prompt(100, 1)[1..])
            .all(|(logprobs, &token)| logprobs.sampled.id == token && logprobs.top.len() == 2)
    );
    let (some, computed) = prompt_logprobs(params(70));
    assert_eq!((some.as_slice(), computed), (&all[69..], 101 - 64));
    assert_eq!(prompt_logprobs(params(101)).0, []);
}

#[test]
fn pages_that_depend_on_the_prompt_length_are_not_shared() {
    let mut model = FakeModel::new(&config(), &[None]);
    model.trained = 50;
    let mut engine = Engine::new(model, config()).unwrap();
    let mut computed = |len, params| ask(&mut engine, prompt(len, 1), params).1;
    // Within the trained length they are shared.
    assert_eq!((computed(40, greedy(30)), computed(49, greedy(1))), (70, 50 - 32));
    assert_eq!((computed(100, greedy(1)), computed(100, greedy(1)), computed(49, greedy(1))), (101, 101, 2));
}

#[test]
fn the_least_recently_used_pages_are_evicted() {
    let mut engine = engine(&EngineConfig { pages: vec![16], ..config() }, &[None]);
    let first = |tenant: u32| [vec![tenant; 70], vec![0]].concat();
    for tenant in [1, 2, 3] {
        assert_eq!(ask(&mut engine, first(tenant), greedy(1)).1, 71);
    }
    assert_eq!(engine.page_statistics()[0].cached, 12);
    assert_eq!(ask(&mut engine, first(1), greedy(1)).1, 7);
    // Sixteen pages hold three and a half prompts: the fourth evicts the second.
    assert_eq!(ask(&mut engine, first(4), greedy(1)).1, 71);
    assert_eq!(ask(&mut engine, first(1), greedy(1)).1, 7);
    assert_eq!(ask(&mut engine, first(3), greedy(1)).1, 7);
    assert!(ask(&mut engine, first(2), greedy(1)).1 > 7);
}

#[test]
fn a_windowed_prefix_is_reused_where_its_window_is_complete() {
    let two_groups = EngineConfig { pages: vec![64, 6], ..config() };
    let mut engine = engine(&two_groups, &[None, Some(20)]);
    let (answer, computed) = ask(&mut engine, prompt(100, 1), greedy(10));
    assert_eq!(computed, 110);
    // A conversation continues at its end; elsewhere only as far back as the window's pages exist.
    let next = [prompt(100, 1), answer, vec![9, 9]].concat();
    assert_eq!(ask(&mut engine, next.clone(), greedy(1)), (alone(next, greedy(1)), 113 - 96));
    assert_eq!(ask(&mut engine, prompt(40, 1), greedy(1)).1, 41);
}

#[test]
fn forked_requests_compute_their_prompt_once_without_prefix_caching() {
    for enable_prefix_caching in [false, true] {
        let mut engine = engine(&EngineConfig { enable_prefix_caching, ..config() }, &[None]);
        let params = |seed| SamplingParams { seed, max_tokens: 5, ..SamplingParams::default() };
        let request = |seed| Request::new(prompt(100, 1), params(seed));
        let first = engine.add_request(request(0)).unwrap();
        let ids: Vec<RequestId> =
            [first].into_iter().chain((1..4).map(|seed| engine.fork_request(request(seed), first).unwrap())).collect();
        let mut most_held = 0;
        let mut outputs = Vec::new();
        while engine.has_unfinished_requests() {
            outputs.extend(engine.step(&Cancel::new()).unwrap());
            let pages = engine.page_statistics()[0];
            most_held = most_held.max(pages.total - pages.free);
        }
        for (seed, id) in (0..).zip(ids) {
            let tokens: Vec<u32> = outputs_of(&outputs, id).flat_map(|output| output.token_ids.clone()).collect();
            assert_eq!(tokens, alone(prompt(100, 1), params(seed)));
        }
        // The last prompt token of each other completion, and all sampled tokens except the last.
        assert_eq!(engine.metrics().computed_tokens, 101 + 3 + 4 * 4);
        assert!(most_held <= 6 + 4, "{most_held} pages held");
    }
}

#[test]
fn the_last_completion_writes_in_place_if_no_page_is_free_for_a_copy() {
    // The first fills the page that it shares with the second, so the page is cached and no page is free.
    let config = EngineConfig { pages: vec![4], max_model_len: 65, ..config() };
    let mut engine = engine(&config, &[Some(49)]);
    let request = Request::new(prompt(58, 1), greedy(6));
    let first = engine.add_request(request.clone()).unwrap();
    let second = engine.fork_request(request, first).unwrap();
    let mut outputs = Vec::new();
    for _ in 0..100 {
        outputs.extend(engine.step(&Cancel::new()).unwrap());
    }
    for id in [first, second] {
        assert!(outputs_of(&outputs, id).last().unwrap().finish.is_some(), "{id:?} does not end");
    }
}

/// Pages with non-finite values are not cached.
#[test]
fn pages_that_led_to_non_finite_logits_are_invalidated() {
    let directory = tempfile::tempdir().unwrap();
    let poisoned = |config: &EngineConfig| {
        let mut model = FakeModel::new(config, &[None]);
        model.poison = Some(63);
        Engine::new(model, config.clone()).unwrap()
    };
    let mut engine = poisoned(&on_disk(directory.path()));
    ask(&mut engine, prompt(40, 62), greedy(1));
    let id = engine.add_request(Request::new(prompt(100, 63), greedy(1))).unwrap();
    let outputs = run(&mut engine);
    assert!(matches!(outputs[0].finish, Some(FinishReason::Sampling(_))), "{id:?} {outputs:?}");
    // Pages cached earlier by other requests stay.
    assert_eq!(ask(&mut engine, prompt(100, 61), greedy(1)).1, 101 - 32);
    drop(engine);
    // The same on disk: two pages of the first request, and the last one's addition.
    assert_eq!(record_files(&directory.path().join("pages")).len(), 6);
    let mut restarted = poisoned(&on_disk(directory.path()));
    assert_eq!(ask(&mut restarted, prompt(100, 62), greedy(1)).1, 5);
}

/// The same after the request was preempted and its cached pages were evicted.
#[test]
fn pages_are_invalidated_after_a_preemption_too() {
    let config = EngineConfig { pages: vec![9], max_model_len: 140, ..config() };
    let mut model = FakeModel::new(&config, &[None]);
    model.poison = Some(63);
    let mut engine = Engine::new(model, config).unwrap();
    let poisoned = [vec![62; 100], vec![63]].concat();
    engine.add_request(Request::new(poisoned.clone(), greedy(1))).unwrap();
    engine.step(&Cancel::new()).unwrap();
    // It is running when a request of higher priority takes its slot and pages.
    let urgent = SamplingParams { priority: -1, ..greedy(10) };
    engine.add_request(Request::new(vec![5; 120], urgent)).unwrap();
    let outputs = run(&mut engine);
    assert_eq!(engine.metrics().preemptions, 1);
    assert!(outputs.iter().any(|output| matches!(output.finish, Some(FinishReason::Sampling(_)))));
    let healthy = [vec![62; 100], vec![61]].concat();
    assert_eq!(ask(&mut engine, healthy, greedy(1)).1, 101);
}

/// A page larger than the read limit of a step, and no free pages for what the disk has.
#[test]
fn reads_from_disk_never_block_a_sequence_that_could_compute() {
    let directory = tempfile::tempdir().unwrap();
    let step_bytes = |step_bytes| {
        let config = on_disk(directory.path());
        let prefix_cache_dir = config.prefix_cache_dir.map(|directory| PrefixCacheDir { step_bytes, ..directory });
        EngineConfig { prefix_cache_dir, ..config }
    };
    let expected = ask(&mut engine(&step_bytes(0), &[None]), prompt(300, 1), greedy(5)).0;
    for bytes in [0, 1, 1000] {
        let mut restarted = engine(&step_bytes(bytes), &[None]);
        assert_eq!(ask(&mut restarted, prompt(300, 1), greedy(5)), (expected.clone(), 301 - 288 + 4));
    }
    // Other requests fill the pool while the prompt is read page by page.
    let mut small = engine(&EngineConfig { pages: vec![22], ..step_bytes(0) }, &[None]);
    let long = small.add_request(Request::new(prompt(300, 1), greedy(5))).unwrap();
    small.add_request(Request::new(vec![9; 15], greedy(60))).unwrap();
    let outputs = run(&mut small);
    let tokens: Vec<u32> = outputs_of(&outputs, long).flat_map(|output| output.token_ids.clone()).collect();
    assert_eq!(tokens, expected);
}

#[test]
fn the_disk_tier_outlives_the_engine_and_is_verified() {
    let directory = tempfile::tempdir().unwrap();
    let config = on_disk(directory.path());
    for windows in [vec![None], vec![None, Some(20)], vec![None, Some(20), STATE]] {
        let config = EngineConfig { pages: vec![64; windows.len()], ..config.clone() };
        // A model with other groups has another fingerprint.
        let fingerprint = [windows.len() as u8; 32];
        let start = || {
            let mut model = FakeModel::new(&config, &windows);
            model.fingerprint = fingerprint;
            Engine::new(model, config.clone()).unwrap()
        };
        let expected = alone(prompt(200, 1), greedy(20));
        assert_eq!(ask(&mut start(), prompt(200, 1), greedy(20)), (expected.clone(), 220));
        let mut restarted = start();
        assert_eq!(ask(&mut restarted, prompt(200, 1), greedy(20)), (expected.clone(), 220 - 192));
        assert_eq!(restarted.metrics().disk_hits_tokens, 192);
        // From memory this time.
        assert_eq!(ask(&mut restarted, prompt(200, 1), greedy(1)).1, 9);
        assert_eq!(restarted.metrics().disk_hits_tokens, 192);
        drop(restarted);

        let mut other = FakeModel::new(&config, &windows);
        other.fingerprint = [99; 32];
        let mut other = Engine::new(other, config.clone()).unwrap();
        assert_eq!(ask(&mut other, prompt(200, 1), greedy(1)).1, 201);
        drop(other);

        let files = record_files(&directory.path().join("pages"));
        assert!(files.len() >= 13);
        for file in &files {
            let mut bytes = std::fs::read(file).unwrap();
            let middle = bytes.len() / 2;
            bytes[middle] ^= 1;
            std::fs::write(file, bytes).unwrap();
            let (tokens, computed) = ask(&mut start(), prompt(200, 1), greedy(20));
            assert!(tokens == expected && computed >= 28);
            // It was removed and written again.
            assert_eq!(ask(&mut start(), prompt(200, 1), greedy(20)), (expected.clone(), 28));
        }
    }
}

fn record_files(directory: &Path) -> Vec<std::path::PathBuf> {
    let subdirectories = std::fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path());
    subdirectories.flat_map(|path| std::fs::read_dir(path).unwrap().map(|entry| entry.unwrap().path())).collect()
}

#[test]
fn a_directory_with_access_for_others_is_rejected() {
    use std::os::unix::fs::PermissionsExt;
    let directory = tempfile::tempdir().unwrap();
    let config = on_disk(directory.path());
    std::fs::create_dir(directory.path().join("pages")).unwrap();
    std::fs::set_permissions(directory.path().join("pages"), std::fs::Permissions::from_mode(0o755)).unwrap();
    let refused = Engine::new(FakeModel::new(&config, &[None]), config).unwrap_err();
    assert!(matches!(refused, ConfigError::PrefixCacheDir(_)));
    assert!(refused.to_string().contains("755"), "{refused}");
}

#[test]
fn a_saved_state_is_restored_by_another_engine() {
    for windows in [vec![None], vec![None, Some(20)], vec![None, Some(20), STATE]] {
        let config = EngineConfig { pages: vec![64; windows.len()], ..config() };
        let mut first = engine(&config, &windows);
        let tokens: Vec<i64> = prompt(200, 1).into_iter().map(i64::from).collect();
        let state = first.save_state(&tokens, None, None, &Cancel::new()).unwrap();
        assert_eq!(first.metrics().computed_tokens, 0, "nothing of it is a request's");
        assert_eq!(first.audit_pages(), Ok(()));
        if windows.len() == 1 {
            // A second state has fewer pages, since some left the window.
            assert_eq!(first.save_state(&tokens, None, None, &Cancel::new()).as_ref(), Ok(&state));
        }

        let mut second = engine(&config, &windows);
        assert_eq!(second.restore_state(&state), Ok((prompt(200, 1), 192)));
        assert_eq!(second.audit_pages(), Ok(()));
        assert_eq!(second.restore_state(&state), Ok((prompt(200, 1), 192)));
        let (answer, computed) = ask(&mut second, prompt(200, 1), greedy(5));
        assert_eq!((answer, computed), (alone(prompt(200, 1), greedy(5)), 9 + 4));

        let mut damaged = state.clone();
        damaged[100] ^= 1;
        assert!(matches!(second.restore_state(&damaged), Err(EngineError::State(_))));
        let mut other = FakeModel::new(&config, &windows);
        other.fingerprint = [99; 32];
        let refused = Engine::new(other, config.clone()).unwrap().restore_state(&state);
        assert!(matches!(refused, Err(EngineError::State(StateError::OtherModel { .. }))));
        let mut without = engine(&EngineConfig { enable_prefix_caching: false, ..config.clone() }, &windows);
        assert_eq!(without.save_state(&tokens, None, None, &Cancel::new()).as_ref(), Ok(&state));
        assert_eq!(without.restore_state(&state), Err(EngineError::NoPrefixCache));
    }
}

#[test]
fn a_state_larger_than_the_free_pages_is_restored_partially() {
    let mut large = engine(&config(), &[None]);
    let tokens: Vec<i64> = prompt(400, 1).into_iter().map(i64::from).collect();
    let state = large.save_state(&tokens, Some("a".into()), None, &Cancel::new()).unwrap();
    let mut small = engine(&EngineConfig { pages: vec![10], ..config() }, &[None]);
    assert_eq!(small.restore_state(&state).unwrap().1, 160);
    let salted = SamplingParams { cache_salt: Some("a".into()), ..greedy(1) };
    assert_eq!(ask(&mut small, prompt(100, 1), salted).1, 5);
    assert_eq!(ask(&mut small, prompt(100, 1), greedy(1)).1, 101);
}

/// Rejected at once, with the number of waiting requests.
#[test]
fn a_full_queue_rejects_requests() {
    let mut engine = engine(&EngineConfig { max_num_seqs: 2, max_queued_requests: Some(3), ..config() }, &[None]);
    let add = |engine: &mut Engine<FakeModel>| engine.add_request(Request::new(vec![1], greedy(9)));
    // Two slots are free, and three requests may wait.
    let ids: Vec<RequestId> = (0..5).map(|_| add(&mut engine).unwrap()).collect();
    assert_eq!(add(&mut engine), Err(RequestError::QueueFull { waiting: 5, limit: 3 }));
    engine.step(&Cancel::new()).unwrap();
    assert_eq!(add(&mut engine), Err(RequestError::QueueFull { waiting: 3, limit: 3 }));
    engine.abort(ids[4]);
    assert!(add(&mut engine).is_ok());
    assert_eq!((engine.metrics().requests_refused, engine.metrics().requests_finished.abort), (2, 1));
    let finished: BTreeMap<RequestId, usize> = run(&mut engine)
        .iter()
        .filter(|output| output.finish.is_some())
        .map(|output| (output.request, output.token_ids.len()))
        .collect();
    assert_eq!(finished.len(), 5);
}
