//! A model that computes several batches at the same time: their sequences, failures and times, and work between steps.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::fake::between_steps::{check_encoding, check_evaluation};
use crate::fake::outputs::{Got, collect};
use crate::fake::{self, FakeModel, VOCAB};
use ferrule_engine::{Engine, EngineConfig, EngineError, FinishReason, Request, RequestId, SamplingParams};
use ferrule_kernels::Cancel;
use proptest::collection::vec;
use proptest::option;
use proptest::prelude::*;

/// Returns an engine over a fake that computes `batches` batches at the same time, with requests of these prompt lengths.
fn in_flight(config: &EngineConfig, batches: usize, prompts: &[u32]) -> (Engine<FakeModel>, Vec<RequestId>) {
    let mut model = FakeModel::new(config, &[None]);
    model.capacity = batches;
    serve(model, config, prompts)
}

/// Returns an engine over a fake, with requests of these prompt lengths.
fn serve(model: FakeModel, config: &EngineConfig, prompts: &[u32]) -> (Engine<FakeModel>, Vec<RequestId>) {
    let mut engine = Engine::new(model, config.clone()).unwrap();
    let ids = prompts.iter().map(|&length| engine.add_request(request(length, VOCAB as u32)).unwrap()).collect();
    (engine, ids)
}

/// Returns a request for twelve tokens with log-probabilities, after a prompt that repeats the first `different` token ids.
fn request(length: u32, different: u32) -> Request {
    let params = SamplingParams { max_tokens: 12, logprobs: Some(3), ..SamplingParams::default() };
    Request::new((0..length).map(|token| token % different).collect(), params)
}

/// Returns the output of a request alone, with one batch at a time.
fn alone(mut model: FakeModel, config: &EngineConfig, request: Request) -> Got {
    model.capacity = 1;
    let mut engine = Engine::new(model, config.clone()).unwrap();
    let mut got = BTreeMap::from([(engine.add_request(request).unwrap(), Got::default())]);
    collect(&mut got, fake::run(&mut engine));
    assert_eq!(engine.model().most_in_flight, 0);
    got.into_values().next().unwrap()
}

#[test]
fn sequences_are_divided_evenly_among_the_batches_in_flight() {
    let config = EngineConfig { max_num_seqs: 8, ..fake::config() };
    for (batches, expected) in [(2, 4), (3, 3)] {
        let (mut engine, _) = in_flight(&config, batches, &[3; 8]);
        fake::run(&mut engine);
        assert_eq!(engine.model().most_in_flight, batches);
        let sizes: Vec<usize> = engine.model().batches.borrow().iter().map(Vec::len).collect();
        assert!(sizes[..12].iter().all(|size| (expected - 1..=expected).contains(size)), "{sizes:?}");
    }
    // Requests that end leave the batches uneven: the next ones are even again.
    let (mut engine, ids) = in_flight(&config, 2, &[3; 8]);
    (0..4).for_each(|_| drop(engine.step(&Cancel::new()).unwrap()));
    let first = engine.model().batches.borrow().len();
    ids[..2].iter().for_each(|id| assert!(engine.abort(*id)));
    fake::run(&mut engine);
    let sizes: Vec<usize> = engine.model().batches.borrow()[first + 3..].iter().map(Vec::len).collect();
    assert!(sizes.len() > 4 && sizes[..4].iter().all(|size| *size == 3), "{sizes:?}");
}

#[test]
fn a_stage_lost_with_two_batches_in_flight_ends_every_request() {
    let config = fake::config();
    let mut model = FakeModel::new(&config, &[None]);
    (model.capacity, model.lost_after) = (2, Some(3));
    let (mut engine, ids) = serve(model, &config, &[3; 8]);
    let mut got: BTreeMap<_, _> = ids.iter().map(|id| (*id, Got::default())).collect();
    for _ in 0..3 {
        collect(&mut got, engine.step(&Cancel::new()).unwrap());
    }
    assert_eq!(engine.model().most_in_flight, 2);
    assert!(got.values().all(|got| !got.tokens.is_empty() && got.finish.is_none()));
    collect(&mut got, fake::run(&mut engine));
    for got in got.values() {
        let Some(FinishReason::Dead(failure)) = &got.finish else { panic!("{:?}", got.finish) };
        assert_eq!((failure.reason.as_str(), failure.lost_stage), ("stage 1 is lost", Some(1)));
    }
    assert!(matches!(engine.step(&Cancel::new()), Err(EngineError::Dead(_))));
    assert_eq!(engine.audit_pages(), Ok(()));
}

#[test]
fn outputs_of_batches_in_flight_are_not_lost_by_work_between_steps() {
    let (config, prompts) = (fake::config(), [3, 9, 20, 4, 1, 7]);
    let run = |works: bool| {
        let (mut engine, ids) = in_flight(&config, 3, &prompts);
        let mut got: BTreeMap<_, _> = ids.iter().map(|id| (*id, Got::default())).collect();
        while engine.has_unfinished_requests() {
            collect(&mut got, engine.step(&Cancel::new()).unwrap());
            if works {
                check_evaluation(&mut engine, 20);
                check_encoding(&mut engine, 20);
            }
        }
        assert_eq!(engine.model().most_in_flight, 3);
        got.into_values().collect::<Vec<_>>()
    };
    let expected =
        prompts.map(|length| alone(FakeModel::new(&config, &[None]), &config, request(length, VOCAB as u32)));
    assert_eq!(run(true), expected);
    assert_eq!(run(false), expected);
}

#[test]
fn an_aborted_request_has_no_output_of_a_batch_that_was_finished_between_steps() {
    let (mut engine, ids) = in_flight(&fake::config(), 2, &[3; 4]);
    engine.step(&Cancel::new()).unwrap();
    check_evaluation(&mut engine, 20);
    assert!(engine.abort(ids[2]));
    let outputs = engine.step(&Cancel::new()).unwrap();
    assert!(!outputs.is_empty() && outputs.iter().all(|output| output.request != ids[2]), "{outputs:?}");
}

#[test]
fn a_cancelled_step_leaves_its_batches_in_flight() {
    let (mut engine, ids) = in_flight(&fake::config(), 2, &[3; 4]);
    engine.step(&Cancel::new()).unwrap();
    let (cancel, batches) = (Cancel::new(), engine.model().batches.borrow().len());
    cancel.cancel();
    assert_eq!(engine.step(&cancel).map(drop), Err(EngineError::Cancelled));
    assert_eq!(engine.model().batches.borrow().len(), batches);
    ids.iter().for_each(|id| assert!(engine.abort(*id)));
    assert!(!engine.has_unfinished_requests());
    // Nobody reads the logits of the batches in flight.
    assert_eq!(engine.step(&Cancel::new()), Ok(Vec::new()));
    assert_eq!(engine.audit_pages(), Ok(()));
    let statistics = engine.page_statistics();
    assert_eq!(statistics[0].free, statistics[0].total);
}

/// Returns the numbers of tokens of the prefill chunks, while two batches in flight decode and `prompts` long prompts
/// with `tokens` tokens in all are computed. Chunks of a prompt `overlap` unless it has prompt log-probabilities.
fn prefill_chunks(prompts: u32, tokens: u32, overlap: bool) -> Vec<usize> {
    let config = EngineConfig {
        pages: vec![256],
        max_model_len: 2048,
        max_num_batched_tokens: 512,
        target_itl: Duration::from_millis(500),
        enable_prefix_caching: false,
        ..fake::config()
    };
    let mut model = FakeModel::new(&config, &[None]);
    (model.capacity, model.token_time) = (2, Duration::from_millis(5));
    let mut engine = Engine::new(model, config).unwrap();
    let request = |length: u32, params| Request::new((0..length).map(|token| token % VOCAB as u32).collect(), params);
    let decoded = SamplingParams { max_tokens: 1000, ..SamplingParams::default() };
    let decoding: Vec<RequestId> = (0..4).map(|_| engine.add_request(request(1, decoded.clone())).unwrap()).collect();
    (0..12).for_each(|_| drop(engine.step(&Cancel::new()).unwrap()));
    for _ in 0..prompts {
        let prompt_logprobs = (!overlap).then_some(0);
        let params = SamplingParams { max_tokens: 1, prompt_logprobs, ..SamplingParams::default() };
        engine.add_request(request(tokens / prompts, params)).unwrap();
    }
    let mut left = prompts as usize;
    while left > 0 {
        let outputs = engine.step(&Cancel::new()).unwrap();
        left -= outputs.iter().filter(|output| output.finish.is_some()).count();
    }
    assert!(decoding.iter().all(|id| engine.abort(*id)));
    let batches = engine.model().batches.borrow();
    let mut chunks: Vec<usize> = batches.iter().flatten().map(|(_, tokens, _)| tokens.len()).collect();
    chunks.retain(|count| *count > 1);
    chunks
}

#[test]
fn prefill_chunks_beside_decoding_fill_a_cycle_of_the_batches_in_flight() {
    // A cycle of 500 ms has four decode rows and 96 prompt tokens of 5 ms each. The bounds leave room for stalls of
    // 50 ms. Decode times that include the wait behind the other batch show after four chunks, and leave 65 tokens.
    let one = prefill_chunks(1, 560, false);
    assert!(one[4..].iter().any(|count| *count >= 70), "{one:?}");
    // Two prompts share the cycle, and so do the chunks of one prompt; without that each has 96.
    for prompts in [1, 2] {
        let chunks = prefill_chunks(prompts, 220, true);
        assert!(chunks.iter().all(|count| *count <= 76), "{chunks:?}");
    }
}

/// Returns the outputs of requests with these prompt lengths, and how many batches were in flight at most.
fn outputs(model: FakeModel, config: &EngineConfig, prompts: &[u32]) -> (Vec<Got>, usize) {
    let (mut engine, ids) = serve(model, config, prompts);
    let mut got: BTreeMap<_, _> = ids.iter().map(|id| (*id, Got::default())).collect();
    while engine.has_unfinished_requests() {
        collect(&mut got, engine.step(&Cancel::new()).unwrap());
        assert_eq!(engine.audit_pages(), Ok(()));
    }
    assert!(engine.page_statistics().iter().all(|group| group.free == group.total));
    (got.into_values().collect(), engine.model().most_in_flight)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn chunks_of_a_prompt_in_flight_at_the_same_time_do_not_change_outputs(
        prompts in vec(1..1500_u32, 1..4),
        batches in 2..6_usize,
        pages in 95..300_usize,
        window_pages in 6..100_usize,
        max_num_batched_tokens in 100..1000_usize,
        poison in option::weighted(0.2, Just(17)),
    ) {
        let config = EngineConfig {
            pages: vec![pages, window_pages],
            max_model_len: 1520,
            max_num_batched_tokens,
            ..fake::config()
        };
        let model = || {
            let mut model = FakeModel::new(&config, &[None, Some(40)]);
            (model.capacity, model.poison) = (batches, poison);
            model
        };
        let (found, most_in_flight) = outputs(model(), &config, &prompts);
        let expected = prompts.iter().map(|length| alone(model(), &config, request(*length, VOCAB as u32)));
        prop_assert_eq!(found, expected.collect::<Vec<_>>());
        // Two batches have 128 tokens each, on as many pages of the window as a batch of all tokens may need, and one more.
        let overlaps = prompts.iter().sum::<u32>() >= 256 && window_pages >= max_num_batched_tokens.div_ceil(16) + 4;
        prop_assert!(most_in_flight >= 2 || !overlaps, "{most_in_flight} batches in flight");
    }
}

#[test]
fn a_single_prompt_is_divided_among_the_batches_in_flight() {
    let config = EngineConfig { pages: vec![100], max_model_len: 1600, max_num_batched_tokens: 2000, ..fake::config() };
    let (mut engine, ids) = in_flight(&config, 3, &[1200]);
    let mut got = BTreeMap::from([(ids[0], Got::default())]);
    collect(&mut got, engine.step(&Cancel::new()).unwrap());
    assert_eq!(engine.model().most_in_flight, 3);
    collect(&mut got, fake::run(&mut engine));
    assert_eq!(got[&ids[0]], alone(FakeModel::new(&config, &[None]), &config, request(1200, VOCAB as u32)));
    let chunks: Vec<usize> = engine.model().batches.borrow().iter().flatten().map(|chunk| chunk.1.len()).collect();
    assert_eq!(chunks[..9], [134, 134, 134, 133, 133, 133, 133, 133, 133]);
    assert!(chunks[9..].iter().all(|count| *count == 1), "{chunks:?}");
}

#[test]
fn a_prompt_with_several_chunks_in_flight_is_aborted_and_its_pages_given_to_another() {
    let config = EngineConfig { pages: vec![80], max_model_len: 1270, max_num_batched_tokens: 400, ..fake::config() };
    let (mut engine, ids) = in_flight(&config, 3, &[1200]);
    engine.step(&Cancel::new()).unwrap();
    assert_eq!(engine.model().most_in_flight, 3);
    assert!(engine.abort(ids[0]));
    let id = engine.add_request(request(1250, 7)).unwrap();
    let mut got = BTreeMap::from([(id, Got::default())]);
    collect(&mut got, fake::run(&mut engine));
    assert_eq!(got[&id].tokens.len(), 12);
    assert_eq!(got[&id], alone(FakeModel::new(&config, &[None]), &config, request(1250, 7)));
    assert_eq!((engine.audit_pages(), engine.page_statistics()[0].free), (Ok(()), 80));
}
