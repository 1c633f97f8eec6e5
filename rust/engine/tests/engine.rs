//! Life of a request: finish reasons, outputs, rejection, and the effect of faults.

use std::sync::Arc;
use std::time::Duration;

use crate::fake::{FakeModel, Fault, VOCAB, config, engine, run};
use ferrule_engine::{
    ConfigError, Engine, EngineConfig, EngineError, EngineFailure, FinishReason, LogitsProcessor, Request,
    RequestError, RequestId, SampleError, SamplingParams, SharedProcessor, StepOutput,
};
use ferrule_kernels::Cancel;
use ferrule_model::LogitRows;

fn greedy(max_tokens: usize) -> SamplingParams {
    SamplingParams { temperature: 0.0, max_tokens, ..SamplingParams::default() }
}

fn prompt(first: u32, len: usize) -> Vec<u32> {
    (0..len as u32).map(|index| (first + index * 7) % VOCAB as u32).collect()
}

fn add(engine: &mut Engine<FakeModel>, prompt: Vec<u32>, params: SamplingParams) -> RequestId {
    engine.add_request(Request::new(prompt, params)).unwrap()
}

fn tokens_of(outputs: &[StepOutput], id: RequestId) -> Vec<u32> {
    outputs.iter().filter(|output| output.request == id).flat_map(|output| output.token_ids.clone()).collect()
}

fn finish_of(outputs: &[StepOutput], id: RequestId) -> Option<FinishReason> {
    outputs.iter().rfind(|output| output.request == id).and_then(|output| output.finish.clone())
}

fn free(engine: &Engine<FakeModel>) -> Vec<usize> {
    engine.page_statistics().iter().map(|pages| pages.free).collect()
}

#[test]
fn a_request_finishes_at_max_tokens_a_stop_token_or_the_context_length() {
    let mut engine = engine(&config(), &[None]);
    let plain = add(&mut engine, prompt(1, 10), greedy(12));
    let long = add(&mut engine, prompt(2, 250), greedy(1000));
    let outputs = run(&mut engine);
    let tokens = tokens_of(&outputs, plain);
    assert_eq!((tokens.len(), finish_of(&outputs, plain)), (12, Some(FinishReason::Length)));
    assert_eq!((tokens_of(&outputs, long).len(), finish_of(&outputs, long)), (6, Some(FinishReason::Length)));

    let token = tokens[5];
    let stop = add(&mut engine, prompt(1, 10), SamplingParams { stop_token_ids: vec![token], ..greedy(12) });
    let outputs = run(&mut engine);
    let until = tokens.iter().position(|&other| other == token).unwrap();
    // The stop token is the last token.
    assert_eq!(tokens_of(&outputs, stop), tokens[..=until]);
    let finish = finish_of(&outputs, stop).unwrap();
    assert_eq!((finish.name(), finish.stop_token(), finish.error()), ("stop", Some(token), None));
}

/// A processor that raises the logits of odd tokens and fails at a given length.
#[derive(Debug)]
struct Odd {
    fails_at: usize,
    bad: f32,
}

impl LogitsProcessor for Odd {
    fn process(&self, output: &[u32], logits: &mut [f32]) -> Result<(), String> {
        if output.len() == self.fails_at {
            logits[3] = self.bad;
            return if self.bad == 0.0 { Err(format!("after {output:?}")) } else { Ok(()) };
        }
        logits.iter_mut().skip(1).step_by(2).for_each(|logit| *logit += 100.0);
        Ok(())
    }
}

#[test]
fn a_logits_processor_affects_only_its_request() {
    let mut engine = engine(&config(), &[None]);
    let with = |fails_at, bad| SamplingParams {
        logits_processor: Some(SharedProcessor(Arc::new(Odd { fails_at, bad }))),
        ..greedy(12)
    };
    let plain = add(&mut engine, prompt(1, 10), greedy(12));
    let alone = tokens_of(&run(&mut engine), plain);
    let before = free(&engine);
    let cases = [(usize::MAX, 0.0), (4, 0.0), (4, f32::NAN), (4, f32::INFINITY)];
    let ids = cases.map(|(fails_at, bad)| add(&mut engine, prompt(1, 10), with(fails_at, bad)));
    let neighbour = add(&mut engine, prompt(1, 10), greedy(12));
    let outputs = run(&mut engine);
    let odd = tokens_of(&outputs, ids[0]);
    assert_eq!((odd.len(), odd.iter().all(|token| token % 2 == 1)), (12, true));
    let messages = [
        format!("after {:?}", &odd[..4]),
        "the logits processors gave token 3 a logit that is NaN or infinite".into(),
        "the logits processors gave token 3 a logit that is NaN or infinite".into(),
    ];
    for (id, message) in ids[1..].iter().zip(messages) {
        assert_eq!(tokens_of(&outputs, *id), odd[..4]);
        let error = SampleError::Processor { position: 14, message };
        assert_eq!(finish_of(&outputs, *id), Some(FinishReason::Sampling(error)));
    }
    assert_eq!(tokens_of(&outputs, neighbour), alone);
    assert_eq!(free(&engine), before);
}

#[test]
fn min_tokens_forbids_only_stop_tokens() {
    let mut engine = engine(&config(), &[None]);
    let stops: Vec<u32> = (0..VOCAB as u32 - 2).collect();
    let params = SamplingParams { stop_token_ids: stops.clone(), min_tokens: 4, ..greedy(30) };
    let id = add(&mut engine, prompt(3, 5), params);
    let outputs = run(&mut engine);
    let tokens = tokens_of(&outputs, id);
    assert!(tokens[..4].iter().all(|token| !stops.contains(token)));
    assert!(tokens.len() > 4 && stops.contains(tokens.last().unwrap()));
}

#[test]
fn a_long_prompt_is_prefilled_in_chunks_beside_decoding_sequences() {
    let mut engine = engine(&EngineConfig { max_num_batched_tokens: 16, ..config() }, &[None]);
    let neighbours: Vec<RequestId> = (0..4).map(|first| add(&mut engine, prompt(first, 3), greedy(100))).collect();
    engine.step(&Cancel::new()).unwrap();
    let long = add(&mut engine, prompt(9, 100), greedy(1));
    let mut steps = 0;
    loop {
        let outputs = engine.step(&Cancel::new()).unwrap();
        steps += 1;
        assert!(neighbours.iter().all(|&id| tokens_of(&outputs, id).len() == 1));
        if finish_of(&outputs, long).is_some() {
            break;
        }
    }
    // Twelve of each step's sixteen tokens are left for the prompt.
    assert_eq!(steps, 9);
    let batches = engine.model().batches.borrow();
    let wanted: Vec<LogitRows> =
        batches.iter().flatten().filter(|chunk| chunk.1.len() > 3).map(|chunk| chunk.2).collect();
    // A greedy request needs only the largest logit.
    assert_eq!(wanted, [vec![LogitRows::None; 8], vec![LogitRows::LastLargest]].concat());
}

#[test]
fn an_abort_frees_all_pages_in_any_state() {
    let mut engine = engine(&EngineConfig { max_num_seqs: 2, ..config() }, &[None]);
    let decoding = add(&mut engine, prompt(0, 20), greedy(100));
    let prefilling = add(&mut engine, prompt(1, 200), greedy(100));
    let waiting = add(&mut engine, prompt(2, 20), greedy(100));
    engine.step(&Cancel::new()).unwrap();
    engine.step(&Cancel::new()).unwrap();
    assert!(!engine.abort(RequestId(99)));
    assert_eq!(free(&engine), [32 - 2 - 7]);
    assert!(engine.abort(prefilling));
    assert_eq!(free(&engine), [30]);
    assert!(engine.abort(decoding) && engine.abort(waiting));
    assert_eq!(free(&engine), [32]);
    assert!(!engine.has_unfinished_requests() && !engine.abort(waiting));
    assert_eq!(engine.step(&Cancel::new()), Ok(vec![]));
}

/// Requests that can never be served are rejected with field names and numbers, and never queued.
#[test]
fn unservable_requests_are_rejected_at_once() {
    let mut small = engine(&EngineConfig { pages: vec![4], ..config() }, &[None]);
    let mut refuse = |prompt: Vec<u32>, params: SamplingParams| {
        let error = small.add_request(Request::new(prompt, params)).unwrap_err();
        assert!(!small.has_unfinished_requests());
        error
    };
    assert_eq!(refuse(vec![], greedy(1)), RequestError::EmptyPrompt);
    let unknown = refuse(vec![1, 64], greedy(1));
    assert_eq!(unknown, RequestError::PromptToken { index: 1, id: 64, vocab_size: 64 });
    let error = refuse(prompt(0, 300), greedy(1));
    assert_eq!(error, RequestError::PromptTooLong { tokens: 300, max_model_len: 256 });
    assert!(error.to_string().contains("300") && error.to_string().contains("256"));
    let error = refuse(prompt(0, 64), greedy(1));
    assert_eq!(error, RequestError::PromptExceedsKv { tokens: 64, capacity: 64 });
    assert!(error.to_string().contains("kv_cache_memory"));
    let nan = refuse(prompt(0, 4), SamplingParams { temperature: f64::NAN, ..greedy(1) });
    let RequestError::Parameter(nan) = nan else { panic!("{nan}") };
    assert_eq!(nan.field, "temperature");
    for params in [
        SamplingParams { logit_bias: vec![(64, 0.0)], ..greedy(1) },
        SamplingParams { stop_token_ids: vec![64], ..greedy(1) },
    ] {
        let unknown = refuse(prompt(0, 4), params);
        assert!(
            matches!(&unknown, RequestError::Parameter(error) if error.requirement.contains("a token id of the model")),
            "{unknown}"
        );
    }
    assert_eq!(small.max_model_len(), 64);
    let id = add(&mut small, prompt(0, 60), greedy(100));
    assert_eq!(tokens_of(&run(&mut small), id).len(), 4);
}

#[test]
fn an_unusable_configuration_is_rejected() {
    let refused = |config: EngineConfig, windows: &[Option<usize>]| {
        // The check precedes the allocation of that many pages.
        let model = FakeModel::new(&EngineConfig { pages: vec![1], ..config.clone() }, windows);
        Engine::new(model, config).unwrap_err()
    };
    let zero = refused(EngineConfig { max_num_seqs: 0, ..config() }, &[None]);
    assert_eq!(zero, ConfigError::Zero { field: "max_num_seqs" });
    assert_eq!(refused(config(), &[None, None]), ConfigError::PoolCount { expected: 2, given: 1 });
    let large = refused(EngineConfig { pages: vec![1 << 40], ..config() }, &[None]);
    assert!(matches!(large, ConfigError::PoolTooLarge { pages, .. } if pages == 1 << 40));
}

#[test]
fn a_cancelled_step_loses_no_token() {
    let two_groups = EngineConfig { pages: vec![32, 32], ..config() };
    let requests = |engine: &mut Engine<FakeModel>| -> Vec<RequestId> {
        (0..3).map(|first| add(engine, prompt(first, 40 + first as usize), greedy(20))).collect()
    };
    let mut undisturbed = engine(&two_groups, &[Some(20), None]);
    let ids = requests(&mut undisturbed);
    let expected = run(&mut undisturbed);

    let mut model = FakeModel::new(&two_groups, &[Some(20), None]);
    model.faults.extend([0, 1, 5, 7].map(|number| (number, Fault::CancelledMidway)));
    let mut disturbed = Engine::new(model, two_groups).unwrap();
    assert_eq!(requests(&mut disturbed), ids);
    let (raised, lowered) = (Cancel::new(), Cancel::new());
    raised.cancel();
    let mut outputs = Vec::new();
    for step in 0..200 {
        match disturbed.step(if step % 3 == 0 { &raised } else { &lowered }) {
            Ok(new) => outputs.extend(new),
            Err(error) => assert_eq!(error, EngineError::Cancelled),
        }
    }
    for id in ids {
        assert_eq!(tokens_of(&outputs, id), tokens_of(&expected, id));
        assert_eq!(finish_of(&outputs, id), Some(FinishReason::Length));
    }
}

/// A panic ends the engine, whether or not the thread pool caught it.
#[test]
fn a_panic_ends_the_engine_with_an_error_for_every_request() {
    for (fault, words) in [(Fault::Panicked, "index out of bounds"), (Fault::Unwinds, "a slice was too short")] {
        let mut model = FakeModel::new(&config(), &[None]);
        model.faults.insert(2, fault);
        let mut engine = Engine::new(model, config()).unwrap();
        let ids = [add(&mut engine, prompt(0, 5), greedy(50)), add(&mut engine, prompt(1, 200), greedy(50))];
        let outputs = run_until_dead(&mut engine);
        for id in ids {
            let finish = finish_of(&outputs, id).unwrap();
            assert_eq!(finish.name(), "error");
            assert!(finish.error().unwrap().contains(words));
        }
        assert!(!engine.has_unfinished_requests());
        let failure = EngineFailure { reason: words.into(), lost_stage: None };
        let dead = EngineError::Dead(failure.clone());
        assert_eq!(engine.step(&Cancel::new()), Err(dead.clone()));
        assert_eq!(engine.logits(&[1], 0, None, &Cancel::new()), Err(dead));
        let refused = engine.add_request(Request::new(vec![1], greedy(1)));
        assert_eq!(refused, Err(RequestError::Dead(failure)));
        assert!(!engine.abort(ids[0]));
        assert_eq!(engine.dead(), Some(words));
    }
}

fn run_until_dead(engine: &mut Engine<FakeModel>) -> Vec<StepOutput> {
    let mut outputs = Vec::new();
    while engine.dead().is_none() {
        outputs.extend(engine.step(&Cancel::new()).unwrap());
    }
    outputs
}

#[test]
fn after_a_panic_in_an_evaluation_the_next_step_returns_errors() {
    let mut model = FakeModel::new(&config(), &[None]);
    model.faults.insert(0, Fault::Panicked);
    let mut engine = Engine::new(model, config()).unwrap();
    let id = add(&mut engine, prompt(0, 5), greedy(50));
    assert!(matches!(engine.logits(&[1, 2], 0, None, &Cancel::new()), Err(EngineError::Dead(_))));
    assert!(engine.has_unfinished_requests());
    let outputs = engine.step(&Cancel::new()).unwrap();
    assert_eq!(finish_of(&outputs, id).unwrap().name(), "error");
    assert!(!engine.has_unfinished_requests() && engine.step(&Cancel::new()).is_err());
}

/// Non-finite logits end only their request.
#[test]
fn non_finite_logits_end_only_their_request() {
    let mut healthy = engine(&config(), &[None]);
    let neighbour = add(&mut healthy, prompt(0, 5), greedy(30));
    let expected = run(&mut healthy);

    let mut model = FakeModel::new(&config(), &[None]);
    let met = [prompt(0, 5), tokens_of(&expected, neighbour)].concat();
    let poison = (0..VOCAB as u32).find(|token| !met.contains(token)).unwrap();
    model.poison = Some(poison);
    let mut engine = Engine::new(model, config()).unwrap();
    let neighbour = add(&mut engine, prompt(0, 5), greedy(30));
    let poisoned = add(&mut engine, vec![1, 2, poison], greedy(30));
    let outputs = run(&mut engine);
    let error = SampleError::NotFinite { count: VOCAB, token: 0, vocab_size: VOCAB, position: 3 };
    assert_eq!(finish_of(&outputs, poisoned), Some(FinishReason::Sampling(error)));
    assert_eq!(tokens_of(&outputs, poisoned), [0_u32; 0]);
    assert_eq!(tokens_of(&outputs, neighbour), met[5..]);
    assert_eq!(free(&engine), [32]);
}

#[test]
fn timings_are_in_order() {
    let mut engine = engine(&config(), &[None]);
    add(&mut engine, prompt(0, 100), greedy(3));
    std::thread::sleep(Duration::from_millis(2));
    let outputs = run(&mut engine);
    let timing = outputs.last().unwrap().timing;
    let (scheduled, first, last) =
        (timing.first_scheduled.unwrap(), timing.first_token.unwrap(), timing.last_token.unwrap());
    assert!(Duration::from_millis(2) <= scheduled && scheduled <= first && first <= last);
    assert_eq!(outputs[0].timing.first_token, timing.first_token);
    let metrics = engine.metrics();
    // The last token is sampled but never computed.
    assert_eq!((metrics.computed_tokens, metrics.generated_tokens, metrics.steps), (102, 3, 4));
    assert_eq!((metrics.prompt_tokens, metrics.cached_prompt_tokens), (100, 0));
    let counts = [&metrics.queue_seconds, &metrics.inter_token_seconds, &metrics.decode_seconds, &metrics.step_seconds];
    assert_eq!(counts.map(|histogram| histogram.count), [1, 2, 1, 4]);
    assert_eq!((metrics.step_tokens.count, metrics.step_tokens.sum), (4, 102.0));
    assert_eq!(metrics.requests_finished.length, 1);
    assert_eq!(*engine.published_metrics().lock().unwrap(), *metrics);
}

#[test]
fn the_progress_of_a_prompt_is_reported_after_each_chunk() {
    let mut engine = engine(&config(), &[None]);
    let with = |prompt_progress| SamplingParams { prompt_progress, ..greedy(2) };
    add(&mut engine, prompt(0, 150), with(false));
    assert!(run(&mut engine).iter().all(|output| !output.token_ids.is_empty()));
    for cached in [0, 144] {
        add(&mut engine, prompt(9, 150), with(true));
        let timings: Vec<_> = run(&mut engine).iter().map(|each| each.timing).collect();
        let processed: Vec<usize> = timings.iter().map(|timing| timing.processed_tokens).collect();
        assert!(timings.iter().all(|timing| timing.cached_tokens == cached));
        // Each step computes 64 tokens; the last two outputs have a token.
        assert_eq!(processed, if cached == 0 { vec![64, 128, 150, 150] } else { vec![150, 150] });
        assert!(timings.is_sorted_by_key(|timing| timing.last_prefill.unwrap()));
        let last = timings.last().unwrap();
        assert!(last.first_scheduled <= last.last_prefill && last.last_prefill <= last.first_token);
    }
}

#[test]
fn logprobs_and_traces_are_parallel_to_the_tokens() {
    let mut engine = engine(&config(), &[None]);
    let params = SamplingParams { logprobs: Some(3), trace: Some(5), seed: 3, max_tokens: 8, ..Default::default() };
    add(&mut engine, prompt(0, 5), params);
    for output in run(&mut engine) {
        let ([token], [logprobs], [trace]) = (&output.token_ids[..], &output.logprobs[..], &output.trace[..]) else {
            panic!("{output:?}")
        };
        assert_eq!((*token, *token), (logprobs.sampled.id, trace.chosen));
        assert_eq!((logprobs.top.len(), logprobs.top[0].rank), (3, 1));
        assert!(trace.candidates.len() >= 5 && trace.draw.is_some());
    }
}
