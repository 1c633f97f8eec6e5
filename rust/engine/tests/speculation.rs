//! Examples of speculation: what drafts save, what ends in the middle of them, and to whom they give way. That they never
//! change what a request gets is what the random scenarios of `scheduling.rs` are about.

mod fake;

use fake::{FakeModel, VOCAB, config, run};
use ferrule_engine::{
    ConfigError, DraftModel, Engine, EngineConfig, FinishReason, Metrics, Request, RequestId, SamplingParams,
    SpeculativeConfig, SpeculativeMethod, StepOutput,
};
use ferrule_kernels::Cancel;

/// As many drafts as there are, up to so many.
fn always(num_speculative_tokens: usize) -> SpeculativeConfig {
    SpeculativeConfig { method: None, num_speculative_tokens, adaptive: false }
}

fn engine(speculative: SpeculativeConfig) -> Engine<FakeModel> {
    fake::engine(&EngineConfig { speculative, ..config() }, &[None])
}

/// An engine with a model that guesses and gets so many eighths wrong.
fn guided(mistakes: u64, config: EngineConfig) -> Engine<FakeModel> {
    let mut draft = FakeModel::new(&config, &[None]);
    draft.mistakes = mistakes;
    let draft = DraftModel { model: draft, pages: config.pages.clone(), max_model_len: config.max_model_len };
    Engine::with_draft_model(FakeModel::new(&config, &[None]), Some(draft), config).unwrap()
}

fn params(seed: u64) -> SamplingParams {
    SamplingParams { seed, max_tokens: 40, logprobs: Some(2), trace: Some(2), ..SamplingParams::default() }
}

fn request(params: SamplingParams) -> Request {
    Request { prompt: (0..20).map(|index| index * 3 % VOCAB as u32).collect(), params, adapter: None }
}

fn tokens(outputs: &[StepOutput], id: RequestId) -> Vec<u32> {
    outputs.iter().filter(|output| output.request == id).flat_map(|output| output.token_ids.clone()).collect()
}

/// All that a request gets by itself, and what the engine says of it.
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
fn a_prediction_that_comes_true_saves_steps() {
    let expected = plain(params(1));
    let prediction = expected.clone();
    let (tokens, finish, metrics) = outcome(&mut engine(always(4)), SamplingParams { prediction, ..params(1) });
    assert_eq!((tokens, finish), (expected, Some(FinishReason::Length)));
    // The prompt's step gives one token, seven give five, and the last one the four that are left: its own and three.
    assert_eq!((metrics.steps, metrics.drafted_tokens, metrics.accepted_tokens), (9, 7 * 4 + 3, 7 * 4 + 3));
    assert_eq!((metrics.generated_tokens, metrics.computed_tokens), (40, 20 + 8 + 31));
}

#[test]
fn one_that_does_not_costs_rows_and_nothing_else() {
    let expected = plain(params(1));
    let prediction = expected.iter().map(|token| (token + 1) % VOCAB as u32).collect();
    let (tokens, _, metrics) = outcome(&mut engine(always(4)), SamplingParams { prediction, ..params(1) });
    assert_eq!(tokens, expected);
    assert_eq!((metrics.steps, metrics.generated_tokens), (40, 40));
    assert!(metrics.drafted_tokens > 100 && metrics.accepted_tokens < 20, "{metrics:?}");
}

#[test]
fn no_drafts_are_made_where_there_may_be_none() {
    let prediction = plain(params(1));
    let (_, _, metrics) = outcome(&mut engine(always(0)), SamplingParams { prediction, ..params(1) });
    assert_eq!((metrics.steps, metrics.drafted_tokens), (40, 0));
}

#[test]
fn a_text_that_repeats_is_looked_up() {
    // Of two tokens that are likely by far the likelier one is taken every time.
    let repeats = SamplingParams { temperature: 0.0, logit_bias: vec![(5, 90.0)], ..params(0) };
    let method = Some(SpeculativeMethod::Ngram { shortest: 1, longest: 3 });
    let (tokens, _, metrics) = outcome(&mut engine(SpeculativeConfig { method, ..always(7) }), repeats);
    assert_eq!(tokens, [5; 40]);
    assert!(metrics.steps < 10, "{} steps", metrics.steps);
}

#[test]
fn a_stop_id_within_the_drafts_is_the_last_token() {
    let prediction = plain(params(2));
    let stop = prediction[12];
    let first = prediction.iter().position(|&token| token == stop).unwrap();
    let stopped = SamplingParams { stop_token_ids: vec![stop], prediction: prediction.clone(), ..params(2) };
    let (tokens, finish, _) = outcome(&mut engine(always(30)), stopped.clone());
    assert_eq!((&*tokens, finish), (&prediction[..=first], Some(FinishReason::Stop { token: stop })));
    // Too early it may not be sampled, whatever was predicted.
    let later = SamplingParams { min_tokens: 20, ..stopped };
    let expected = plain(SamplingParams { prediction: Vec::new(), ..later.clone() });
    assert_eq!(outcome(&mut engine(always(30)), later).0, expected);
}

#[test]
fn nothing_is_computed_beyond_max_tokens_or_the_context() {
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
fn nobody_gives_way_to_a_draft() {
    let expected: Vec<_> = (0..4).map(|seed| plain(params(seed))).collect();
    let mut preemptions = Vec::new();
    for num_speculative_tokens in [0, 9] {
        // Room for three of the four, and tokens for one draft a step.
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
fn a_model_that_always_knows_saves_all_that_there_is_to_save() {
    let expected = plain(params(4));
    let config = EngineConfig { speculative: always(4), ..config() };
    let (tokens, _, metrics) = outcome(&mut guided(0, config.clone()), params(4));
    assert_eq!((tokens, metrics.steps, metrics.accepted_tokens), (expected.clone(), 9, 31));
    // One that is half wrong has the same effect on the tokens, and less on the steps.
    let (tokens, _, metrics) = outcome(&mut guided(4, config.clone()), params(4));
    assert_eq!(tokens, expected);
    assert!((15..32).contains(&metrics.steps), "{} steps", metrics.steps);
    // What a caller predicts is tried first.
    let predicted = SamplingParams { prediction: expected.clone(), ..params(4) };
    let (tokens, _, metrics) = outcome(&mut guided(8, config), predicted);
    assert_eq!((tokens, metrics.steps), (expected, 9));
}

#[test]
fn a_model_guesses_for_all_at_once_and_its_pages_come_back() {
    let config = EngineConfig { pages: vec![16], speculative: always(5), ..config() };
    let mut engine = guided(1, config);
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
fn a_model_that_does_not_fit_is_refused() {
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
fn a_request_says_how_its_drafts_fared() {
    let mut engine = engine(always(4));
    let prediction = plain(params(1));
    engine.add_request(request(SamplingParams { prediction, ..params(1) })).unwrap();
    let outputs = run(&mut engine);
    let timing = outputs.last().unwrap().timing;
    assert_eq!((timing.drafted_tokens, timing.accepted_tokens), (31, 31));
}
