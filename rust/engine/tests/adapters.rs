//! Sequences with LoRA adapters share pages only with sequences of the same adapter: in memory, on disk, in saved
//! states and among completions of one prompt. Adapters are dropped with their last request.

use std::sync::Arc;

use crate::fake::{self, FakeModel, VOCAB, engine, run};
use ferrule_engine::{Engine, EngineConfig, PrefixCacheDir, Request, SamplingParams};
use ferrule_kernels::Cancel;
use ferrule_model::Adapter;

fn config() -> EngineConfig {
    EngineConfig { pages: vec![64], max_model_len: 600, ..fake::config() }
}

/// Returns an adapter as if it had just been loaded.
fn adapter(number: u8) -> Option<Arc<Adapter>> {
    Some(Arc::new(Adapter::of_nothing([number; 32])))
}

fn prompt(len: usize) -> Vec<u32> {
    (0..len as u32).map(|index| index * 7 % VOCAB as u32).collect()
}

fn request(adapter: Option<Arc<Adapter>>, seed: u64) -> Request {
    let params = SamplingParams { seed, max_tokens: 4, ..SamplingParams::default() };
    Request { adapter, ..Request::new(prompt(100), params) }
}

/// Returns the tokens generated for a prompt of 100 tokens, and the number of tokens computed for them.
fn ask(engine: &mut Engine<FakeModel>, adapter: Option<Arc<Adapter>>) -> (Vec<u32>, u64) {
    let before = engine.metrics().computed_tokens;
    engine.add_request(request(adapter, 1)).unwrap();
    let tokens = run(engine).into_iter().flat_map(|output| output.token_ids).collect();
    assert_eq!(engine.audit_pages(), Ok(()));
    (tokens, engine.metrics().computed_tokens - before)
}

fn alone(adapter: Option<Arc<Adapter>>) -> Vec<u32> {
    ask(&mut engine(&EngineConfig { enable_prefix_caching: false, ..config() }, &[None]), adapter).0
}

const ALL: u64 = 100 + 3;
const REST: u64 = 100 - 96 + 3;

#[test]
fn an_adapter_loaded_twice_shares_pages_and_two_adapters_do_not() {
    let mut engine = engine(&config(), &[None]);
    for computed in [ALL, REST] {
        assert_eq!(ask(&mut engine, None), (alone(None), computed));
        assert_eq!(ask(&mut engine, adapter(1)), (alone(adapter(1)), computed));
        assert_eq!(ask(&mut engine, adapter(2)), (alone(adapter(2)), computed));
    }
    assert_ne!(alone(adapter(1)), alone(adapter(2)));
}

#[test]
fn the_disk_tier_separates_adapters() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("pages");
    let disk = PrefixCacheDir { path, limit: 1 << 30, step_bytes: 32 << 20 };
    let config = EngineConfig { prefix_cache_dir: Some(disk), ..config() };
    let asked = |adapter| ask(&mut engine(&config, &[None]), adapter).1;
    assert_eq!([asked(adapter(1)), asked(None), asked(adapter(2))], [ALL; 3]);
    assert_eq!([asked(adapter(1)), asked(None), asked(adapter(2))], [REST; 3]);
}

#[test]
fn a_saved_state_is_reused_with_the_same_adapter_only() {
    let mut first = engine(&config(), &[None]);
    let tokens: Vec<i64> = prompt(100).into_iter().map(i64::from).collect();
    let state = first.save_state(&tokens, None, adapter(1).as_deref(), &Cancel::new()).unwrap();
    let mut second = engine(&config(), &[None]);
    assert_eq!(second.restore_state(&state), Ok((prompt(100), 96)));
    assert_eq!(ask(&mut second, None), (alone(None), ALL));
    assert_eq!(ask(&mut second, adapter(1)), (alone(adapter(1)), REST));
    assert_eq!(ask(&mut second, adapter(2)), (alone(adapter(2)), ALL));
}

#[test]
fn completions_share_their_prompt_if_they_have_the_same_adapter() {
    for (second, computed) in [(adapter(1), ALL + 4), (adapter(2), 2 * ALL), (None, 2 * ALL)] {
        let mut engine = engine(&EngineConfig { enable_prefix_caching: false, ..config() }, &[None]);
        let first = engine.add_request(request(adapter(1), 1)).unwrap();
        let second = engine.fork_request(request(second, 2), first).unwrap();
        let outputs = run(&mut engine);
        assert_eq!(engine.metrics().computed_tokens, computed);
        assert!(outputs.iter().any(|output| output.request == second && output.finish.is_some()));
    }
}

#[test]
fn an_adapter_is_held_until_its_last_request_ends() {
    let mut engine = engine(&config(), &[None]);
    let kept = adapter(1).unwrap();
    let first = engine.add_request(request(Some(Arc::clone(&kept)), 1)).unwrap();
    engine.add_request(request(Some(Arc::clone(&kept)), 2)).unwrap();
    assert_eq!(Arc::strong_count(&kept), 3);
    engine.abort(first);
    assert_eq!(Arc::strong_count(&kept), 2);
    run(&mut engine);
    assert_eq!(Arc::strong_count(&kept), 1);
}
