//! Random scenarios of arrivals, aborts, forks, beams, evictions, drafts, cancelled steps and small pools: pages are
//! conserved, limits hold, every request finishes, and its output is the same as alone.

use std::collections::BTreeMap;
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use crate::fake::between_steps::{check_encoding, check_evaluation};
use crate::fake::outputs::{Got, collect};
use crate::fake::{self, FakeModel, Fault, STATE, VOCAB, engine, mix};
use ferrule_engine::structured::{Token, Whitespace};
use ferrule_engine::{
    BeamSearchParams, DraftModel, EarlyStopping, Engine, EngineConfig, EngineError, Grammar, PrefixCacheDir, Request,
    RequestError, RequestId, SamplingParams, SpeculativeConfig, SpeculativeMethod, StructuredOutputs, Vocabulary,
};
use ferrule_kernels::Cancel;
use ferrule_model::Adapter;
use proptest::collection::{btree_map, vec};
use proptest::option;
use proptest::prelude::*;

const SCENARIOS: u32 = 10_000;

/// Completions of a prompt, and external events.
#[derive(Debug, Clone)]
struct Arrival {
    step: usize,
    request: Request,
    /// Number of completions: the first with the request's seed, the others with other seeds.
    completions: u64,
    /// Step and index of the completion to abort.
    abort: Option<(usize, u64)>,
    /// Eighths of the predicted output that match, and a seed that selects them.
    prediction: Option<(u64, u64)>,
}

impl Arrival {
    fn request(&self, completion: u64) -> Request {
        let mut request = self.request.clone();
        request.params.seed = request.params.seed.wrapping_add(completion);
        request
    }

    /// Returns the predicted output of a request with these tokens.
    fn prediction(&self, tokens: &[u32]) -> Vec<u32> {
        let Some((eighths, coins)) = self.prediction else { return Vec::new() };
        let mistake = |(index, &token): (u64, &u32)| match mix(coins, index) % 8 {
            coin if coin < eighths => Some(token),
            // A substitution or a deletion.
            7 => None,
            _ => Some((token + 1) % VOCAB as u32),
        };
        (0..).zip(tokens).filter_map(mistake).collect()
    }
}

#[derive(Debug, Clone)]
struct Scenario {
    config: EngineConfig,
    windows: Vec<Option<usize>>,
    arrivals: Vec<Arrival>,
    cancelled: Vec<usize>,
    poison: Option<u32>,
    /// Whether the scenario runs twice with one disk tier, and the read limit of a step.
    disk: bool,
    step_bytes: usize,
    /// Prompt length up to which pages can be shared.
    trained: usize,
    /// Steps before which this many tokens are evaluated, and texts of about this length encoded.
    evaluations: BTreeMap<usize, usize>,
    draft: Option<Draft>,
    /// Number of batches that the model computes at the same time.
    batches: usize,
}

/// A draft model: pages and window of each group, eighths that it gets wrong, and its context length.
#[derive(Debug, Clone)]
struct Draft {
    groups: Vec<(usize, Option<usize>)>,
    mistakes: u64,
    max_model_len: usize,
}

impl Draft {
    fn model(&self, scenario: &Scenario) -> DraftModel<FakeModel> {
        let (pages, windows): (Vec<_>, Vec<_>) = self.groups.iter().copied().unzip();
        let mut model = FakeModel::new(&EngineConfig { pages: pages.clone(), ..scenario.config.clone() }, &windows);
        model.mistakes = self.mistakes;
        model.trained = scenario.trained;
        model.faults = scenario.cancelled.iter().map(|&number| (number, Fault::CancelledMidway)).collect();
        DraftModel { model, pages, max_model_len: self.max_model_len }
    }
}

/// Returns one of a few adapters, as if it had just been loaded.
fn adapter() -> impl Strategy<Value = Option<Arc<Adapter>>> {
    option::weighted(0.4, (0..3_u8).prop_map(|number| Arc::new(Adapter::of_nothing([number; 32]))))
}

/// Returns a grammar for some of the requests: with choices, without, short, infinite.
fn grammar(seed: u64) -> Option<Arc<Grammar>> {
    static GRAMMARS: LazyLock<Vec<Arc<Grammar>>> = LazyLock::new(|| {
        let tokens = (b'a'..=b'z').chain(b'0'..=b'9').chain(*b"{}[]\":, -.").map(|byte| vec![byte]);
        let longer = ["{\"", "\":", ",\"", "ab", "abc", "true", "12", "\":[", "}}", "aa", "name", "\",\"", "ame"];
        let tokens = tokens.chain(longer.map(|text| text.as_bytes().to_vec())).map(Token::Text);
        let vocabulary: Vec<Token> = tokens.chain([Token::Special(b"end".into())]).collect();
        let vocabulary = (vocabulary.len() <= VOCAB).then(|| {
            let rest = VOCAB - vocabulary.len();
            Vocabulary::new(&[vocabulary, vec![Token::Text(Vec::new()); rest]].concat()).expect("a vocabulary")
        });
        let schema = r#"{"type":"object","properties":{"name":{"type":"string","maxLength":5},"abc":{"enum":[true,12]}},
            "required":["name","abc"],"additionalProperties":false}"#;
        [
            StructuredOutputs::Json { schema: schema.into(), whitespace: Whitespace::None },
            StructuredOutputs::Json { schema: "true".into(), whitespace: Whitespace::Some },
            StructuredOutputs::Regex { pattern: "(abcabc){1,3}[0-9]*".into() },
            StructuredOutputs::Grammar { grammar: "start: \"{\" start \"}\" | \"aa\"".into() },
            StructuredOutputs::Choice { choices: vec!["true".into(), "trueabc".into(), "name".into()] },
        ]
        .map(|asked| vocabulary.as_ref().expect("few enough tokens").compile(&asked).expect("a grammar"))
        .into()
    });
    seed.is_multiple_of(3).then(|| Arc::clone(&GRAMMARS[seed as usize / 3 % GRAMMARS.len()]))
}

/// Some requests are beam searches.
fn params() -> impl Strategy<Value = SamplingParams> {
    (sampled(), option::weighted(0.3, searched())).prop_map(|(sampled, search)| match search {
        None => sampled,
        Some(search) => SamplingParams {
            beam_search: Some(search),
            repetition_penalty: sampled.repetition_penalty,
            presence_penalty: sampled.presence_penalty,
            logit_bias: sampled.logit_bias,
            no_repeat_ngram_size: sampled.no_repeat_ngram_size,
            bad_words: sampled.bad_words,
            seed: sampled.seed,
            max_tokens: sampled.max_tokens,
            min_tokens: sampled.min_tokens,
            stop_token_ids: sampled.stop_token_ids,
            priority: sampled.priority,
            cache_salt: sampled.cache_salt,
            ..SamplingParams::default()
        },
    })
}

fn searched() -> impl Strategy<Value = BeamSearchParams> {
    let early_stopping =
        prop_oneof![Just(EarlyStopping::Always), Just(EarlyStopping::Heuristic), Just(EarlyStopping::Never)];
    (1..6_usize, -1.0..2.0_f64, early_stopping).prop_map(|(beam_width, length_penalty, early_stopping)| {
        BeamSearchParams { beam_width, n: beam_width.div_ceil(2), length_penalty, early_stopping }
    })
}

fn sampled() -> impl Strategy<Value = SamplingParams> {
    let filters = (
        prop_oneof![Just(0.0), Just(1.0), Just(0.6), Just(3.0)],
        prop_oneof![Just(0_usize), 1..10_usize],
        prop_oneof![Just(1.0), 0.05..1.0],
        prop_oneof![Just(0.0), 0.0..0.5],
    );
    let penalties = (prop_oneof![Just(1.0), 0.5..2.0], prop_oneof![Just(0.0), -1.0..1.0], 0.0..0.3);
    let lengths = (1..40_usize, 0..5_usize, vec(0..VOCAB as u32, 0..3));
    let reported = (
        option::of(0..3_usize),
        option::of(0..3_usize),
        option::weighted(0.2, 0..3_usize),
        prop_oneof![Just(1_usize), 1..60_usize],
    );
    let served = (-1..2_i32, prop_oneof![3 => Just(None), 1 => Just(Some("salt"))]);
    (filters, penalties, lengths, any::<u64>(), reported, served, further()).prop_map(
        |(
            (temperature, top_k, top_p, min_p),
            (repetition, presence, frequency),
            lengths,
            seed,
            reported,
            served,
            further,
        )| {
            let (max_tokens, min_tokens, stop_token_ids) = lengths;
            let (logprobs, trace, prompt_logprobs, prompt_logprobs_from) = reported;
            let (priority, cache_salt) = served;
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
                prompt_logprobs,
                prompt_logprobs_from,
                streams: seed.is_multiple_of(2),
                prompt_progress: seed.is_multiple_of(3),
                priority,
                structured_outputs: grammar(seed),
                cache_salt: cache_salt.map(Into::into),
                ..further
            }
        },
    )
}

/// Returns less common stages, those with state first.
fn further() -> impl Strategy<Value = SamplingParams> {
    let plain = SamplingParams::default;
    prop_oneof![
        4 => Just(plain()),
        1 => (1..3_usize).prop_map(move |mirostat| SamplingParams { mirostat, mirostat_tau: 2.0, ..plain() }),
        1 => option::of(1..30_usize).prop_map(move |dry_penalty_last_n| SamplingParams {
            dry_multiplier: 1.0,
            dry_allowed_length: 1,
            dry_penalty_last_n,
            dry_sequence_breaker_ids: vec![5],
            ..plain()
        }),
        1 => (1..4_usize).prop_map(move |no_repeat_ngram_size| SamplingParams { no_repeat_ngram_size, ..plain() }),
        1 => Just(SamplingParams { bad_words: vec![vec![3], vec![9, 4]], xtc_probability: 0.5, ..plain() }),
        1 => Just(SamplingParams { dynatemp_range: 0.5, typical_p: 0.9, eta_cutoff: 0.01, entropy: true, ..plain() }),
    ]
}

/// Returns prompts with common prefixes.
fn prompt() -> impl Strategy<Value = Vec<u32>> {
    let own = vec(0..VOCAB as u32, 1..40);
    (0..3_u32, 0..60_usize, own).prop_map(|(template, shared, own)| {
        let shared = (0..shared as u32).map(|index| (template * 7 + index * 5) % VOCAB as u32);
        shared.chain(own).collect()
    })
}

fn speculative() -> impl Strategy<Value = SpeculativeConfig> {
    let ngram = (1..3_usize, 0..3_usize)
        .prop_map(|(shortest, more)| SpeculativeMethod::Ngram { shortest, longest: shortest + more });
    (option::of(ngram), 0..12_usize, any::<bool>()).prop_map(|(method, num_speculative_tokens, adaptive)| {
        SpeculativeConfig { method, num_speculative_tokens, adaptive }
    })
}

fn config() -> impl Strategy<Value = (EngineConfig, Vec<Option<usize>>)> {
    let group = (2..14_usize, prop_oneof![3 => option::of(2..70_usize), 1 => Just(STATE)]);
    let limits = (20..140_usize, 1..7_usize, 1..50_usize, option::weighted(0.2, 1..4_usize));
    (vec(group, 1..4), limits, any::<(bool, bool)>(), speculative()).prop_map(|(groups, limits, flags, speculative)| {
        let (caching, unhurried) = flags;
        let (max_model_len, max_num_seqs, max_num_batched_tokens, max_queued_requests) = limits;
        let (pages, windows) = groups.into_iter().unzip();
        let config = EngineConfig {
            pages,
            max_model_len,
            max_num_seqs,
            max_num_batched_tokens,
            max_queued_requests,
            target_itl: if unhurried { Duration::MAX } else { Duration::ZERO },
            enable_prefix_caching: caching,
            prefix_cache_dir: None,
            speculative,
        };
        (config, windows)
    })
}

fn draft() -> impl Strategy<Value = Draft> {
    let group = (2..14_usize, prop_oneof![3 => option::of(2..70_usize), 1 => Just(STATE)]);
    (vec(group, 1..3), 0..9_u64, 10..140_usize).prop_map(|(groups, mistakes, max_model_len)| Draft {
        groups,
        mistakes,
        max_model_len,
    })
}

fn scenario() -> impl Strategy<Value = Scenario> {
    let completions = prop_oneof![3 => Just(1_u64), 1 => 2..5_u64];
    let abort = option::weighted(0.2, (0..60_usize, 0..4_u64));
    let prediction = option::of((0..9_u64, any::<u64>()));
    let arrival = (0..30_usize, (prompt(), params(), adapter()), completions, abort, prediction);
    (
        config(),
        vec(arrival, 1..10),
        vec(0..80_usize, 0..4),
        option::weighted(0.2, 0..VOCAB as u32),
        (prop::bool::weighted(0.1), 0..3000_usize, prop_oneof![2 => Just(usize::MAX), 1 => 10..80_usize]),
        btree_map(0..40_usize, 1..60_usize, 0..2),
        option::weighted(0.3, draft()),
    )
        .prop_map(
            |((config, windows), arrivals, cancelled, poison, (disk, step_bytes, trained), evaluations, draft)| {
                let arrival =
                    |(step, asked, completions, abort, prediction): (_, (_, _, _), u64, Option<(usize, u64)>, _)| {
                        Arrival {
                            step,
                            request: Request { adapter: asked.2, ..Request::new(asked.0, asked.1) },
                            completions,
                            abort: abort.map(|(step, which)| (step, which % completions)),
                            prediction,
                        }
                    };
                let arrivals = arrivals.into_iter().map(arrival).collect();
                Scenario {
                    config,
                    windows,
                    arrivals,
                    cancelled,
                    poison,
                    disk,
                    step_bytes,
                    trained,
                    evaluations,
                    draft,
                    batches: 1,
                }
            },
        )
}

/// Returns the output of a request that runs alone, prefilled in one chunk and without speculation.
fn alone(scenario: &Scenario, request: &Request, max_model_len: usize) -> Got {
    let config = EngineConfig {
        pages: vec![64; scenario.windows.len()],
        max_model_len,
        max_num_seqs: 5,
        max_num_batched_tokens: 1000,
        max_queued_requests: None,
        enable_prefix_caching: false,
        prefix_cache_dir: None,
        speculative: SpeculativeConfig { num_speculative_tokens: 0, ..SpeculativeConfig::default() },
        ..scenario.config
    };
    let mut model = FakeModel::new(&config, &scenario.windows);
    model.poison = scenario.poison;
    model.trained = scenario.trained;
    let mut engine = Engine::new(model, config).unwrap();
    let id = engine.add_request(request.clone()).unwrap();
    let mut got = BTreeMap::from([(id, Got::default())]);
    while engine.has_unfinished_requests() {
        collect(&mut got, engine.step(&Cancel::new()).unwrap());
    }
    got.remove(&id).unwrap()
}

/// Running requests and their outputs so far.
struct Play<'a> {
    scenario: &'a Scenario,
    engine: Engine<FakeModel>,
    /// Completions of each arrival; `None` if rejected or aborted.
    ids: Vec<Vec<Option<RequestId>>>,
    got: BTreeMap<RequestId, Got>,
    /// Expected outputs.
    expected: BTreeMap<RequestId, Got>,
}

impl Play<'_> {
    fn arrive(&mut self, index: usize) -> Result<(), TestCaseError> {
        let Self { scenario, engine, ids, got, expected } = self;
        let arrival = &scenario.arrivals[index];
        for completion in 0..arrival.completions {
            let mut request = arrival.request(completion);
            // A request that is too long is rejected.
            let most = engine.max_model_len();
            let alone = if request.prompt.len() < most { alone(scenario, &request, most) } else { Got::default() };
            request.params.prediction = arrival.prediction(&alone.tokens);
            let added = match ids[index].first() {
                Some(&Some(first)) => engine.fork_request(request, first),
                _ => engine.add_request(request),
            };
            ids[index].push(added.as_ref().ok().copied());
            match added {
                Ok(new) => {
                    got.insert(new, Got::default());
                    expected.insert(new, alone);
                }
                Err(RequestError::PromptTooLong { .. } | RequestError::PromptExceedsKv { .. }) => {
                    prop_assert!(arrival.request.prompt.len() + 1 > engine.max_model_len());
                }
                Err(RequestError::QueueFull { waiting, limit }) => {
                    prop_assert_eq!((Some(limit), waiting >= limit), (scenario.config.max_queued_requests, true));
                }
                Err(RequestError::TooManyBeams { beam_width, limit }) => {
                    let config = &scenario.config;
                    let most = config.max_num_seqs.min(config.max_num_batched_tokens);
                    prop_assert!(beam_width > limit && limit == most);
                }
                Err(RequestError::BeamsExceedKv { beam_width, needed, pages, .. }) => {
                    prop_assert!(beam_width > 1 && needed > pages && scenario.config.pages.contains(&pages));
                }
                Err(error) => panic!("{error}"),
            }
        }
        Ok(())
    }

    fn abort(&mut self, index: usize, completion: u64) -> Result<(), TestCaseError> {
        let Some(id) = self.ids[index].get_mut(completion as usize) else { return Ok(()) };
        let Some(aborted) = *id else { return Ok(()) };
        let is_running = self.got[&aborted].finish.is_none();
        prop_assert_eq!(self.engine.abort(aborted), is_running);
        prop_assert!(!self.engine.abort(aborted), "aborted twice");
        if is_running {
            self.got.remove(&aborted);
            *id = None;
        }
        Ok(())
    }

    fn step(&mut self) -> Result<(), TestCaseError> {
        let has_work = self.engine.has_unfinished_requests();
        let batches = self.engine.model().batches.borrow().len();
        let mut has_outputs = false;
        match self.engine.step(&Cancel::new()) {
            Ok(outputs) => {
                has_outputs = !outputs.is_empty();
                collect(&mut self.got, outputs);
            }
            Err(error) => {
                prop_assert_eq!(error, EngineError::Cancelled);
                if self.scenario.draft.is_some() {
                    // The draft model may have caused it.
                    return Ok(());
                }
            }
        }
        let done = self.engine.model().batches.borrow().len() - batches;
        // A step that reads from disk may have nothing to compute.
        let may_read = self.scenario.disk && done == 0;
        if self.scenario.batches == 1 {
            prop_assert!(may_read || done == usize::from(has_work), "a step does work");
        } else {
            // The outputs of batches that were finished between steps come first. The batch of an aborted request is
            // finished later.
            prop_assert!(done <= 1 && (done == 1 || has_outputs || !has_work), "a step does work");
        }
        Ok(())
    }
}

fn play(scenario: &Scenario) -> Result<(), TestCaseError> {
    if !scenario.disk {
        return play_once(scenario, scenario.config.clone());
    }
    let directory = tempfile::tempdir().unwrap();
    let directory =
        PrefixCacheDir { path: directory.path().join("pages"), limit: 1 << 20, step_bytes: scenario.step_bytes };
    let config = EngineConfig { prefix_cache_dir: Some(directory), ..scenario.config.clone() };
    play_once(scenario, config.clone())?;
    play_once(scenario, config)
}

fn play_once(scenario: &Scenario, config: EngineConfig) -> Result<(), TestCaseError> {
    let mut model = FakeModel::new(&config, &scenario.windows);
    model.faults = scenario.cancelled.iter().map(|&number| (number, Fault::CancelledMidway)).collect();
    model.trained = scenario.trained;
    model.capacity = scenario.batches;
    // Evaluation is compared with logits of a model without faults.
    model.poison = scenario.poison.filter(|_| scenario.evaluations.is_empty());
    let scenario = &Scenario { poison: model.poison, ..scenario.clone() };
    let draft = scenario.draft.as_ref().map(|draft| draft.model(scenario));
    let engine = Engine::with_draft_model(model, draft, config).unwrap();
    let ids = vec![Vec::new(); scenario.arrivals.len()];
    let mut play = Play { scenario, engine, ids, got: BTreeMap::new(), expected: BTreeMap::new() };
    let mut step = 0;
    while step < 70 || play.engine.has_unfinished_requests() {
        prop_assert!(step < 20_000, "the requests do not finish");
        for (index, arrival) in scenario.arrivals.iter().enumerate() {
            if arrival.step == step {
                play.arrive(index)?;
            }
            if let Some((_, completion)) = arrival.abort.filter(|&(at, _)| at == step) {
                play.abort(index, completion)?;
            }
        }
        if let Some(&length) = scenario.evaluations.get(&step) {
            check_evaluation(&mut play.engine, length);
            check_encoding(&mut play.engine, length);
        }
        play.step()?;
        prop_assert_eq!(play.engine.audit_pages(), Ok(()));
        step += 1;
    }
    for pages in play.engine.page_statistics() {
        prop_assert_eq!(pages.free, pages.total);
    }
    for id in play.ids.iter().flatten().flatten() {
        prop_assert_eq!(&play.got[id], &play.expected[id]);
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: SCENARIOS, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn every_request_gets_the_same_output_as_alone(scenario in scenario()) {
        play(&scenario)?;
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: SCENARIOS / 2, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn several_batches_in_flight_do_not_change_outputs(scenario in scenario(), batches in 2..5_usize) {
        // The pages of such a model are in other processes, so that there is no disk tier.
        play(&Scenario { batches, disk: false, ..scenario })?;
    }
}

/// Requests need four times the pool's capacity.
#[test]
fn a_pool_of_a_quarter_of_the_demand_does_not_change_outputs() {
    let config = EngineConfig {
        pages: vec![16],
        max_model_len: 200,
        max_num_seqs: 16,
        enable_prefix_caching: false,
        ..fake::config()
    };
    let mut small = engine(&config, &[None]);
    let mut large = engine(&EngineConfig { pages: vec![100], ..config }, &[None]);
    let request = |seed: u64| {
        let params = SamplingParams { seed, max_tokens: 40, ..SamplingParams::default() };
        Request::new((0..20 + seed as u32).map(|token| token % VOCAB as u32).collect(), params)
    };
    let mut got = [BTreeMap::new(), BTreeMap::new()];
    for (engine, got) in [&mut small, &mut large].into_iter().zip(&mut got) {
        for seed in 0..16 {
            got.insert(engine.add_request(request(seed)).unwrap(), Got::default());
        }
        collect(got, fake::run(engine));
    }
    assert!(small.metrics().preemptions > 0 && large.metrics().preemptions == 0);
    assert_eq!(got[0], got[1]);
    assert!(got[0].values().all(|got| got.tokens.len() == 40));
}
