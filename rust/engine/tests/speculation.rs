//! Speculative decoding: saved steps, finish reasons inside drafts, and priorities. That drafts never change outputs is
//! tested by the random scenarios in `scheduling.rs`.

use crate::fake::{self, FakeModel, STATE, VOCAB, config, run};
use ferrule_engine::{
    ConfigError, DraftModel, Engine, EngineConfig, FinishReason, Metrics, Request, RequestId, SamplingParams,
    SpeculativeConfig, SpeculativeMethod, StepOutput,
};
use ferrule_kernels::Cancel;

/// Returns a non-adaptive configuration.
fn always(num_speculative_tokens: usize) -> SpeculativeConfig {
    SpeculativeConfig { method: None, num_speculative_tokens, adaptive: false }
}

fn engine(speculative: SpeculativeConfig) -> Engine<FakeModel> {
    fake::engine(&EngineConfig { speculative, ..config() }, &[None])
}

/// Returns an engine with a draft model that gets the given eighths wrong.
fn with_draft_model(mistakes: u64, config: EngineConfig) -> Engine<FakeModel> {
    let mut draft = FakeModel::new(&config, &[None]);
    draft.mistakes = mistakes;
    let draft = DraftModel { model: draft, pages: config.pages.clone(), max_model_len: config.max_model_len };
    Engine::with_draft_model(FakeModel::new(&config, &[None]), Some(draft), config).unwrap()
}

fn params(seed: u64) -> SamplingParams {
    SamplingParams { seed, max_tokens: 40, logprobs: Some(2), trace: Some(2), ..SamplingParams::default() }
}

fn request(params: SamplingParams) -> Request {
    Request::new((0..20).map(|index| index * 3 % VOCAB as u32).collect(), params)
}

fn tokens(outputs: &[StepOutput], id: RequestId) -> Vec<u32> {
    outputs.iter().filter(|output| output.request == id).flat_map(|output| output.token_ids.clone()).collect()
}

/// Returns the output and metrics of a request that runs alone.
fn outcome(engine: &mut Engine<FakeModel>, params: SamplingParams) -> (Vec<u32>, Option<FinishReason>, Metrics) {
    let id = engine.add_request(request(params)).unwrap();
    let outputs = run(engine);
    for output in &outputs {
        assert_eq!((output.logprobs.len(), output.trace.len()), (output.token_ids.len(), output.token_ids.len()));
    }
    assert_eq!(engine.audit_pages(), Ok(()));
    assert!(engine.page_statistics().iter().all(|pages| pages.free == pages.total));
    let finish = outputs.last().and_then(|output| output.finish.clone());
    (tokens(&outputs, id), finish, engine.metrics().clone())
}

fn plain(params: SamplingParams) -> Vec<u32> {
    outcome(&mut engine(always(0)), params).0
}

#[test]
fn a_matching_prediction_saves_steps() {
    let expected = plain(params(1));
    let prediction = expected.clone();
    let (tokens, finish, metrics) = outcome(&mut engine(always(4)), SamplingParams { prediction, ..params(1) });
    assert_eq!((tokens, finish), (expected, Some(FinishReason::Length)));
    // The prefill step yields one token, seven steps yield five each, and the last one four: its own and three drafts.
    assert_eq!((metrics.steps, metrics.drafted_tokens, metrics.accepted_tokens), (9, 7 * 4 + 3, 7 * 4 + 3));
    assert_eq!((metrics.generated_tokens, metrics.computed_tokens), (40, 20 + 8 + 31));
}

#[test]
fn a_wrong_prediction_costs_only_rows() {
    let expected = plain(params(1));
    let prediction = expected.iter().map(|token| (token + 1) % VOCAB as u32).collect();
    let (tokens, _, metrics) = outcome(&mut engine(always(4)), SamplingParams { prediction, ..params(1) });
    assert_eq!(tokens, expected);
    assert_eq!((metrics.steps, metrics.generated_tokens), (40, 40));
    assert!(metrics.drafted_tokens > 100 && metrics.accepted_tokens < 20, "{metrics:?}");
}

#[test]
fn zero_speculative_tokens_disable_drafts() {
    let prediction = plain(params(1));
    let (_, _, metrics) = outcome(&mut engine(always(0)), SamplingParams { prediction, ..params(1) });
    assert_eq!((metrics.steps, metrics.drafted_tokens), (40, 0));
}

#[test]
fn repetitive_text_is_drafted_by_prompt_lookup() {
    // Greedy sampling always takes the most likely token.
    let repeats = SamplingParams { temperature: 0.0, logit_bias: vec![(5, 90.0)], ..params(0) };
    let method = Some(SpeculativeMethod::Ngram { shortest: 1, longest: 3 });
    let (tokens, _, metrics) = outcome(&mut engine(SpeculativeConfig { method, ..always(7) }), repeats);
    assert_eq!(tokens, [5; 40]);
    assert!(metrics.steps < 10, "{} steps", metrics.steps);
}

#[test]
fn a_stop_token_among_the_drafts_ends_the_request() {
    let prediction = plain(params(2));
    let stop = prediction[12];
    let first = prediction.iter().position(|&token| token == stop).unwrap();
    let stopped = SamplingParams { stop_token_ids: vec![stop], prediction: prediction.clone(), ..params(2) };
    let (tokens, finish, _) = outcome(&mut engine(always(30)), stopped.clone());
    assert_eq!((&*tokens, finish), (&prediction[..=first], Some(FinishReason::Stop { token: stop })));
    // `min_tokens` forbids it even if it was predicted.
    let later = SamplingParams { min_tokens: 20, ..stopped };
    let expected = plain(SamplingParams { prediction: Vec::new(), ..later.clone() });
    assert_eq!(outcome(&mut engine(always(30)), later).0, expected);
}

#[test]
fn no_draft_exceeds_max_tokens_or_the_context() {
    let prediction = plain(params(3));
    for max_tokens in 1..12 {
        let short = SamplingParams { max_tokens, prediction: prediction.clone(), ..params(3) };
        let (tokens, _, metrics) = outcome(&mut engine(always(30)), short);
        assert_eq!(tokens, prediction[..max_tokens]);
        assert_eq!(metrics.computed_tokens, 20 + max_tokens as u64 - 1);
    }
    let short = EngineConfig { max_model_len: 30, speculative: always(30), ..config() };
    let (tokens, finish, _) =
        outcome(&mut fake::engine(&short, &[None]), SamplingParams { prediction: prediction.clone(), ..params(3) });
    assert_eq!((&*tokens, finish), (&prediction[..10], Some(FinishReason::Length)));
}

#[test]
fn no_sequence_is_preempted_for_drafts() {
    let expected: Vec<_> = (0..4).map(|seed| plain(params(seed))).collect();
    let mut preemptions = Vec::new();
    for num_speculative_tokens in [0, 9] {
        // Slots for three of the four, and tokens for one draft per step.
        let speculative = always(num_speculative_tokens);
        let config = EngineConfig { pages: vec![12], max_num_batched_tokens: 20, speculative, ..config() };
        let mut engine = fake::engine(&config, &[None]);
        let add = |(seed, prediction): (u64, &Vec<u32>)| {
            engine.add_request(request(SamplingParams { prediction: prediction.clone(), ..params(seed) })).unwrap()
        };
        let ids: Vec<_> = (0..).zip(&expected).map(add).collect();
        let outputs = run(&mut engine);
        assert!(ids.iter().zip(&expected).all(|(&id, expected)| tokens(&outputs, id) == *expected));
        assert_eq!(engine.audit_pages(), Ok(()));
        preemptions.push(engine.metrics().preemptions);
    }
    assert!(preemptions[1] <= preemptions[0], "{preemptions:?}");
}

#[test]
fn a_perfect_draft_model_saves_the_most_steps() {
    let expected = plain(params(4));
    let config = EngineConfig { speculative: always(4), ..config() };
    let (tokens, _, metrics) = outcome(&mut with_draft_model(0, config.clone()), params(4));
    assert_eq!((tokens, metrics.steps, metrics.accepted_tokens), (expected.clone(), 9, 31));
    // A model that is half wrong gives the same tokens in more steps.
    let (tokens, _, metrics) = outcome(&mut with_draft_model(4, config.clone()), params(4));
    assert_eq!(tokens, expected);
    assert!((15..32).contains(&metrics.steps), "{} steps", metrics.steps);
    // Predicted outputs are tried first.
    let predicted = SamplingParams { prediction: expected.clone(), ..params(4) };
    let (tokens, _, metrics) = outcome(&mut with_draft_model(8, config), predicted);
    assert_eq!((tokens, metrics.steps), (expected, 9));
}

#[test]
fn a_draft_model_with_states_returns_to_the_accepted_tokens() {
    let expected = plain(params(4));
    // With two states a sequence drafts up to two tokens; three suffice for any number.
    for (states, mistakes, steps) in [(3, 0, 9..=9), (2, 0, 14..=14), (3, 4, 15..=31)] {
        let config = EngineConfig { speculative: always(4), ..config() };
        let windows = [None, STATE];
        let pages = vec![32, states];
        let mut model = FakeModel::new(&EngineConfig { pages: pages.clone(), ..config.clone() }, &windows);
        model.mistakes = mistakes;
        let draft = DraftModel { model, pages, max_model_len: config.max_model_len };
        let target = FakeModel::new(&config, &[None]);
        let mut engine = Engine::with_draft_model(target, Some(draft), config).unwrap();
        let (tokens, _, metrics) = outcome(&mut engine, params(4));
        assert_eq!(tokens, expected);
        assert!(steps.contains(&metrics.steps), "{} steps with {states} states, {mistakes} mistakes", metrics.steps);
    }
}

#[test]
fn a_draft_model_drafts_for_all_sequences_and_frees_its_pages() {
    let config = EngineConfig { pages: vec![16], speculative: always(5), ..config() };
    let mut engine = with_draft_model(1, config);
    let ids: Vec<_> = (0..6).map(|seed| engine.add_request(request(params(seed))).unwrap()).collect();
    for _ in 0..4 {
        engine.step(&Cancel::new()).unwrap();
        assert_eq!(engine.audit_pages(), Ok(()));
    }
    assert!(engine.abort(ids[1]));
    let outputs = run(&mut engine);
    assert_eq!(engine.audit_pages(), Ok(()));
    let rest = tokens(&outputs, ids[5]);
    assert!(!rest.is_empty() && plain(params(5)).ends_with(&rest));
    assert!(engine.metrics().accepted_tokens > 50, "{:?}", engine.metrics());
}

#[test]
fn a_draft_model_that_does_not_fit_is_rejected() {
    let config = config();
    let refused = |draft: FakeModel, pages: Vec<usize>| {
        let draft = DraftModel { model: draft, pages, max_model_len: 100 };
        Engine::with_draft_model(FakeModel::new(&config, &[None]), Some(draft), config.clone()).unwrap_err()
    };
    let mut other = FakeModel::new(&config, &[None]);
    other.vocab = 100;
    let error = refused(other, vec![32]);
    assert_eq!(error, ConfigError::DraftVocab { expected: VOCAB, given: 100 });
    assert!(error.to_string().contains("100 tokens") && error.to_string().contains("64"));
    let mut reads_both_ways = FakeModel::new(&config, &[None]);
    reads_both_ways.causal = false;
    assert_eq!(refused(reads_both_ways, vec![32]), ConfigError::DraftNoLogits);
    let one = FakeModel::new(&config, &[None]);
    assert_eq!(refused(one, vec![32, 32]), ConfigError::PoolCount { expected: 1, given: 2 });
}

#[test]
fn a_request_reports_drafted_and_accepted_tokens() {
    let mut engine = engine(always(4));
    let prediction = plain(params(1));
    engine.add_request(request(SamplingParams { prediction, ..params(1) })).unwrap();
    let outputs = run(&mut engine);
    let timing = outputs.last().unwrap().timing;
    assert_eq!((timing.drafted_tokens, timing.accepted_tokens), (31, 31));
}
