//! Random arrivals, aborts, cancelled steps and small pools: whatever happens, pages are conserved, the limits hold,
//! every request ends, and gets what it would have got alone.

mod fake;

use std::collections::BTreeMap;

use fake::{FakeModel, Fault, VOCAB, engine, first_state, logits_after, mix};
use ferrule_engine::{
    Engine, EngineConfig, EngineError, FinishReason, Request, RequestError, RequestId, SampleTrace, SamplingParams,
    TokenLogprobs,
};
use ferrule_kernels::Cancel;
use proptest::collection::{btree_map, vec};
use proptest::option;
use proptest::prelude::*;

const SCENARIOS: u32 = 1500;

/// A request, and what happens to it from outside.
#[derive(Debug, Clone)]
struct Arrival {
    step: usize,
    request: Request,
    abort_at: Option<usize>,
}

#[derive(Debug, Clone)]
struct Scenario {
    config: EngineConfig,
    windows: Vec<Option<usize>>,
    arrivals: Vec<Arrival>,
    cancelled: Vec<usize>,
    poison: Option<u32>,
    /// Steps before which the logits of so many tokens are asked for.
    evaluations: BTreeMap<usize, usize>,
}

/// All that a request got.
#[derive(Debug, Clone, Default, PartialEq)]
struct Got {
    tokens: Vec<u32>,
    logprobs: Vec<TokenLogprobs>,
    trace: Vec<SampleTrace>,
    finish: Option<FinishReason>,
}

fn params() -> impl Strategy<Value = SamplingParams> {
    let filters = (
        prop_oneof![Just(0.0), Just(1.0), Just(0.6), Just(3.0)],
        prop_oneof![Just(0_usize), 1..10_usize],
        prop_oneof![Just(1.0), 0.05..1.0],
        prop_oneof![Just(0.0), 0.0..0.5],
    );
    let penalties = (prop_oneof![Just(1.0), 0.5..2.0], prop_oneof![Just(0.0), -1.0..1.0], 0.0..0.3);
    let lengths = (1..40_usize, 0..5_usize, vec(0..VOCAB as u32, 0..3));
    (filters, penalties, lengths, any::<u64>(), option::of(0..3_usize), option::of(0..3_usize)).prop_map(
        |((temperature, top_k, top_p, min_p), (repetition, presence, frequency), lengths, seed, logprobs, trace)| {
            let (max_tokens, min_tokens, stop_token_ids) = lengths;
            SamplingParams {
                temperature,
                top_k,
                top_p,
                min_p,
                repetition_penalty: repetition,
                presence_penalty: presence,
                frequency_penalty: frequency,
                logit_bias: vec![(3, 1.5), (9, -2.0)],
                seed,
                max_tokens,
                min_tokens: min_tokens.min(max_tokens),
                stop_token_ids,
                logprobs,
                trace,
            }
        },
    )
}

fn scenario() -> impl Strategy<Value = Scenario> {
    let group = (2..14_usize, option::of(2..70_usize));
    let limits = (20..140_usize, 1..7_usize, 1..50_usize);
    let arrival = (0..30_usize, vec(0..VOCAB as u32, 1..90), params(), option::weighted(0.2, 0..60_usize));
    (
        (vec(group, 1..4), limits),
        vec(arrival, 1..10),
        vec(0..80_usize, 0..4),
        option::weighted(0.2, 0..VOCAB as u32),
        btree_map(0..40_usize, 1..60_usize, 0..2),
    )
        .prop_map(
            |((groups, (max_model_len, max_num_seqs, batched)), arrivals, cancelled, poison, evaluations)| {
                let (pages, windows) = groups.into_iter().unzip();
                let mut arrivals: Vec<Arrival> = arrivals
                    .into_iter()
                    .map(|(step, prompt, params, abort_at)| Arrival {
                        step,
                        request: Request { prompt, params },
                        abort_at,
                    })
                    .collect();
                arrivals.sort_by_key(|arrival| arrival.step);
                for (index, arrival) in arrivals.iter_mut().enumerate() {
                    // Tells the sequences apart in the fake's record.
                    arrival.request.prompt[0] = index as u32;
                }
                let config = EngineConfig { pages, max_model_len, max_num_seqs, max_num_batched_tokens: batched };
                Scenario { config, windows, arrivals, cancelled, poison, evaluations }
            },
        )
}

fn collect(got: &mut BTreeMap<RequestId, Got>, outputs: Vec<ferrule_engine::StepOutput>) {
    for output in outputs {
        let got = got.get_mut(&output.request).expect("an output for a request that is not there");
        assert_eq!(got.finish, None, "an output after the end");
        got.tokens.extend(output.token_ids);
        got.logprobs.extend(output.logprobs);
        got.trace.extend(output.trace);
        got.finish = output.finish;
    }
}

/// What a request gets with the machine to itself, computed in one go.
fn alone(scenario: &Scenario, request: &Request, max_model_len: usize) -> Got {
    let config = EngineConfig {
        pages: vec![64; scenario.windows.len()],
        max_model_len,
        max_num_seqs: 1,
        max_num_batched_tokens: 1000,
    };
    let mut model = FakeModel::new(&config, &scenario.windows);
    model.poison = scenario.poison;
    let mut engine = Engine::new(model, config).unwrap();
    let id = engine.add_request(request.clone()).unwrap();
    let mut got = BTreeMap::from([(id, Got::default())]);
    while engine.has_unfinished_requests() {
        collect(&mut got, engine.step(&Cancel::new()).unwrap());
    }
    got.remove(&id).unwrap()
}

fn check_pages(engine: &Engine<FakeModel>) {
    for pages in engine.statistics().pages {
        assert_eq!(pages.free + pages.held, pages.total, "pages are lost or held twice");
    }
}

/// Logits of all tokens, in the middle of everything.
fn check_evaluation(engine: &mut Engine<FakeModel>, length: usize) {
    let tokens: Vec<i64> = (0..length as i64).map(|index| 60 + index % 4).collect();
    match engine.logits(&tokens, &Cancel::new()) {
        Ok(logits) => {
            let mut state = first_state(length);
            let expected = tokens.iter().flat_map(|&token| {
                state = mix(state, token as u64);
                logits_after(state)
            });
            assert_eq!(logits, expected.collect::<Vec<_>>());
        }
        Err(EngineError::Cancelled) => {}
        Err(EngineError::Request(_)) => assert!(length > engine.max_model_len()),
        Err(error) => panic!("{error}"),
    }
}

fn play(scenario: &Scenario) -> Result<(), TestCaseError> {
    let mut model = FakeModel::new(&scenario.config, &scenario.windows);
    model.faults = scenario.cancelled.iter().map(|&number| (number, Fault::CancelledMidway)).collect();
    // Logits of evaluation are compared with ones that no poison touched.
    model.poison = scenario.poison.filter(|_| scenario.evaluations.is_empty());
    let scenario = &Scenario { poison: model.poison, ..scenario.clone() };
    let mut engine = Engine::new(model, scenario.config.clone()).unwrap();
    let mut ids: Vec<Option<RequestId>> = vec![None; scenario.arrivals.len()];
    let mut got = BTreeMap::new();
    let mut step = 0;
    while step < 100 || engine.has_unfinished_requests() {
        prop_assert!(step < 20_000, "the requests do not end");
        for (arrival, id) in scenario.arrivals.iter().zip(&mut ids) {
            if arrival.step == step {
                match engine.add_request(arrival.request.clone()) {
                    Ok(new) => {
                        got.insert(new, Got::default());
                        *id = Some(new);
                    }
                    Err(RequestError::PromptTooLong { .. } | RequestError::PromptExceedsKv { .. }) => {
                        prop_assert!(arrival.request.prompt.len() + 1 > engine.max_model_len());
                    }
                    Err(error) => panic!("{error}"),
                }
            }
            if let (Some(aborted), true) = (*id, arrival.abort_at == Some(step)) {
                prop_assert_eq!(engine.abort(aborted), got[&aborted].finish.is_none());
                prop_assert!(!engine.abort(aborted), "aborted twice");
                check_pages(&engine);
                if got[&aborted].finish.is_none() {
                    got.remove(&aborted);
                    *id = None;
                }
            }
        }
        if let Some(&length) = scenario.evaluations.get(&step) {
            check_evaluation(&mut engine, length);
            check_pages(&engine);
        }
        let has_work = engine.has_unfinished_requests();
        let batches = engine.model().batches.borrow().len();
        match engine.step(&Cancel::new()) {
            Ok(outputs) => collect(&mut got, outputs),
            Err(error) => prop_assert_eq!(error, EngineError::Cancelled),
        }
        prop_assert_eq!(engine.model().batches.borrow().len() - batches, usize::from(has_work), "a step does work");
        check_pages(&engine);
        step += 1;
    }
    for pages in engine.statistics().pages {
        prop_assert_eq!(pages.free, pages.total);
    }
    for (arrival, id) in scenario.arrivals.iter().zip(&ids) {
        if let Some(id) = id {
            prop_assert_eq!(&got[id], &alone(scenario, &arrival.request, engine.max_model_len()));
        }
    }
    check_order(&engine, scenario)
}

/// Requests are begun in the order in which they arrived.
fn check_order(engine: &Engine<FakeModel>, scenario: &Scenario) -> Result<(), TestCaseError> {
    let batches = engine.model().batches.borrow();
    let mut begun: Vec<u32> = Vec::new();
    for (first_position, tokens, _) in batches.iter().flatten() {
        if *first_position == 0 && (tokens[0] as usize) < scenario.arrivals.len() && !begun.contains(&tokens[0]) {
            begun.push(tokens[0]);
        }
    }
    prop_assert!(begun.is_sorted(), "begun in the order {:?}", begun);
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: SCENARIOS, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn whatever_happens_each_request_gets_what_it_would_alone(scenario in scenario()) {
        play(&scenario)?;
    }
}

/// FAULTS row 67: four times what the pool holds.
#[test]
fn a_pool_at_a_quarter_of_the_demand_changes_nothing() {
    let config = EngineConfig { pages: vec![16], max_model_len: 200, max_num_seqs: 16, max_num_batched_tokens: 64 };
    let mut small = engine(&config, &[None]);
    let mut large = engine(&EngineConfig { pages: vec![100], ..config }, &[None]);
    let request = |seed: u64| Request {
        prompt: (0..20 + seed as u32).map(|token| token % VOCAB as u32).collect(),
        params: SamplingParams { seed, max_tokens: 40, ..SamplingParams::default() },
    };
    let mut got = [BTreeMap::new(), BTreeMap::new()];
    for (engine, got) in [&mut small, &mut large].into_iter().zip(&mut got) {
        for seed in 0..16 {
            got.insert(engine.add_request(request(seed)).unwrap(), Got::default());
        }
        collect(got, fake::run(engine));
    }
    assert!(small.statistics().preemptions > 0 && large.statistics().preemptions == 0);
    assert_eq!(got[0], got[1]);
    assert!(got[0].values().all(|got| got.tokens.len() == 40));
}
