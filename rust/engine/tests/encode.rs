//! Encoding texts in batches gives the same results as encoding each alone, and does not affect requests.

use std::sync::Arc;

use crate::fake::{
    self, EMBEDDING, FakeModel, Fault, HIDDEN, STATE, TOKEN_TYPES, VOCAB, embedding_of, engine, first_state, hidden_of,
    logits_after, mix, read, run, scores_of,
};
use ferrule_engine::{
    ConfigError, EncodeError, EncodeTask, Engine, EngineConfig, EngineError, EngineFailure, PrefixCacheDir, Request,
    RequestError, SamplingParams, Text,
};
use ferrule_kernels::Cancel;
use ferrule_model::Pooling;
use proptest::collection::vec;
use proptest::option;
use proptest::prelude::*;

fn config() -> EngineConfig {
    EngineConfig { max_num_batched_tokens: 40, ..fake::config() }
}

fn text(tokens: Vec<u32>) -> Text {
    Text { tokens, ..Text::default() }
}

fn bidirectional(config: &EngineConfig) -> Engine<FakeModel> {
    let mut model = FakeModel::new(config, &[None]);
    model.causal = false;
    Engine::new(model, config.clone()).unwrap()
}

fn encode(engine: &mut Engine<FakeModel>, texts: &[Text], task: &EncodeTask) -> Result<Vec<f32>, EngineError> {
    let result = engine.encode(texts, task, &Cancel::new());
    engine.audit_pages().unwrap();
    result
}

fn refused(engine: &mut Engine<FakeModel>, text: Text, task: &EncodeTask) -> EncodeError {
    match encode(engine, &[self::text(vec![1]), text], task) {
        Err(EngineError::Encode(error)) => error,
        other => panic!("{other:?}"),
    }
}

const MEAN: EncodeTask = EncodeTask::Embedding { pooling: Pooling::Mean, normalize: false, dimensions: None };
const LAST: EncodeTask = EncodeTask::Embedding { pooling: Pooling::Last, normalize: false, dimensions: None };

/// Returns the result of a task, computed from the fake model's definition.
fn expected(text: &Text, task: &EncodeTask, causal: bool) -> Vec<f32> {
    let mut state = first_state(text.tokens.len(), usize::MAX, None);
    let step = |(i, &token): (usize, &u32)| {
        let kind = text.token_types.get(i).map_or(0, |&kind| kind as u8);
        state = mix(state, read(token, kind));
        state
    };
    let states: Vec<u64> = text.tokens.iter().enumerate().map(step).collect();
    let last = *states.last().unwrap();
    let row =
        |position: usize| -> Vec<f32> { hidden_of(if causal { states[position] } else { last }, position).collect() };
    let rows: Vec<Vec<f32>> = (0..states.len()).map(row).collect();
    let mean = |column: usize| {
        let sum: f64 = rows.iter().map(|row| f64::from(row[column])).sum();
        (sum / rows.len() as f64) as f32
    };
    let pooled = |pooling| match pooling {
        Pooling::Cls => rows[0].clone(),
        Pooling::Last => rows[rows.len() - 1].clone(),
        Pooling::Mean => (0..HIDDEN).map(mean).collect(),
    };
    let unit = |row: &[f32]| -> Vec<f32> {
        // A row of zeros stays zero.
        let length = row.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>().sqrt().max(1e-12);
        row.iter().map(|x| (f64::from(*x) / length) as f32).collect()
    };
    match task {
        EncodeTask::Embedding { pooling, normalize, dimensions } => {
            let embedding = embedding_of(&pooled(*pooling));
            let kept = &embedding[..dimensions.unwrap_or(EMBEDDING)];
            if *normalize { unit(kept) } else { kept.to_vec() }
        }
        EncodeTask::TokenEmbeddings { normalize: false } => rows.concat(),
        EncodeTask::Features {} => rows.iter().flat_map(|row| embedding_of(row)).collect(),
        EncodeTask::TokenEmbeddings { normalize: true } => rows.iter().flat_map(|row| unit(row)).collect(),
        EncodeTask::Scores {} => scores_of(&pooled(Pooling::Cls)).to_vec(),
        EncodeTask::Logits { tokens } => {
            let logits: Vec<f32> = logits_after(last).collect();
            tokens.iter().map(|&token| logits[token as usize]).collect()
        }
        EncodeTask::TopLogprobs { count } => {
            states.iter().flat_map(|&state| top_of(&logits_after(state).collect::<Vec<_>>(), *count)).collect()
        }
    }
}

/// Returns ids (as bit patterns) and log-probabilities of the most likely tokens of a row.
fn top_of(logits: &[f32], count: usize) -> Vec<f32> {
    let logits: Vec<f64> = logits.iter().copied().map(f64::from).collect();
    let highest = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let total = highest + logits.iter().map(|logit| (logit - highest).exp()).sum::<f64>().ln();
    let mut ids: Vec<usize> = (0..logits.len()).collect();
    ids.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]).then(a.cmp(&b)));
    ids.truncate(count);
    let bits = ids.iter().map(|&id| f32::from_bits(id as u32));
    bits.chain(ids.iter().map(|&id| (logits[id] - total) as f32)).collect()
}

fn texts() -> impl Strategy<Value = Vec<Text>> {
    // Many texts share a prefix, so that there are pages to share.
    let tokens = prop_oneof![vec(0..3_u32, 1..120), vec(Just(5), 1..120)];
    let salt = option::weighted(0.2, Just(Arc::from("salt")));
    let one = (tokens, salt, vec(0..TOKEN_TYPES as u32, 120), any::<bool>());
    let text = one.prop_map(|(tokens, cache_salt, mut kinds, of_kinds)| {
        kinds.truncate(if of_kinds { tokens.len() } else { 0 });
        Text { tokens, token_types: kinds, cache_salt, features: Vec::new() }
    });
    vec(text, 0..12)
}

fn task() -> impl Strategy<Value = EncodeTask> {
    let pooling = prop_oneof![Just(Pooling::Cls), Just(Pooling::Mean), Just(Pooling::Last)];
    let dimensions = option::of(1..=EMBEDDING);
    prop_oneof![
        (pooling, any::<bool>(), dimensions)
            .prop_map(|(pooling, normalize, dimensions)| { EncodeTask::Embedding { pooling, normalize, dimensions } }),
        any::<bool>().prop_map(|normalize| EncodeTask::TokenEmbeddings { normalize }),
        Just(EncodeTask::Features {}),
        Just(EncodeTask::Scores {}),
        vec(0..VOCAB as u32, 0..4).prop_map(|tokens| EncodeTask::Logits { tokens }),
        (1..=VOCAB).prop_map(|count| EncodeTask::TopLogprobs { count }),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn results_do_not_depend_on_the_batch(
        causal in any::<bool>(),
        texts in texts(),
        task in task(),
        windows in prop_oneof![Just(vec![None]), Just(vec![Some(20), None]), Just(vec![None, STATE])],
        max_num_batched_tokens in 1_usize..150,
        max_num_seqs in 1_usize..9,
        pages in 8_usize..40,
        enable_prefix_caching in any::<bool>(),
    ) {
        if !causal && matches!(task, EncodeTask::Logits { .. } | EncodeTask::TopLogprobs { .. }) {
            return Ok(());
        }
        let windows = if causal { windows } else { vec![None] };
        let pages = vec![pages; windows.len()];
        let config = EngineConfig { pages: pages.clone(), max_num_batched_tokens, max_num_seqs, enable_prefix_caching, ..config() };
        let mut model = FakeModel::new(&config, &windows);
        model.causal = causal;
        let mut engine = Engine::new(model, config).unwrap();
        let expected: Vec<f32> = texts.iter().flat_map(|text| expected(text, &task, causal)).collect();
        for _ in 0..2 {
            let found = encode(&mut engine, &texts, &task).unwrap();
            if matches!(task, EncodeTask::TopLogprobs { .. }) {
                // The last bit of a logarithm is library-specific; no two ids are that close.
                prop_assert_eq!(found.len(), expected.len());
                prop_assert!(found.iter().zip(&expected).all(|(a, b)| (a - b).abs() <= 1e-6 * b.abs()));
            } else {
                prop_assert_eq!(found, &expected[..]);
            }
            prop_assert_eq!(engine.page_statistics().iter().map(|pool| pool.free).collect::<Vec<_>>(), &pages[..]);
        }
    }
}

#[test]
fn encoding_may_preempt_requests_without_changing_their_output() {
    let config = EngineConfig { pages: vec![10], max_model_len: 160, ..config() };
    let params = SamplingParams { temperature: 0.0, max_tokens: 60, ..SamplingParams::default() };
    let requests: Vec<_> = (0..3).map(|first| Request::new(vec![first + 8; 20], params.clone())).collect();
    let mut undisturbed = engine(&config, &[None]);
    requests.iter().for_each(|request| _ = undisturbed.add_request(request.clone()).unwrap());
    let expected = run(&mut undisturbed);

    let mut disturbed = engine(&config, &[None]);
    requests.iter().for_each(|request| _ = disturbed.add_request(request.clone()).unwrap());
    let texts = [text(vec![5; 150]), text(vec![1; 30])];
    let mut outputs = Vec::new();
    for step in 0..40 {
        outputs.extend(disturbed.step(&Cancel::new()).unwrap());
        let encoded = encode(&mut disturbed, &texts, if step % 2 == 0 { &MEAN } else { &LAST }).unwrap();
        assert_eq!(encoded.len(), 2 * EMBEDDING);
    }
    assert!(disturbed.metrics().preemptions > 0);
    outputs.extend(run(&mut disturbed));
    for id in expected.iter().map(|output| output.request) {
        let tokens = |outputs: &[ferrule_engine::StepOutput]| -> Vec<u32> {
            outputs.iter().filter(|output| output.request == id).flat_map(|output| output.token_ids.clone()).collect()
        };
        assert_eq!(tokens(&outputs), tokens(&expected));
    }
}

#[test]
fn common_prefixes_are_computed_once_if_only_the_last_row_is_read() {
    let begins = |own: u32| text([vec![5; 32], vec![own; 4]].concat());
    let computed = |task: &EncodeTask, salts: [Option<&str>; 2]| {
        let mut engine = engine(&config(), &[None]);
        for (own, salt) in (0..).zip(salts) {
            let text = Text { cache_salt: salt.map(Arc::from), ..begins(own) };
            let expected = expected(&text, task, true);
            assert_eq!(encode(&mut engine, &[text], task).unwrap(), expected);
        }
        engine.metrics().computed_tokens
    };
    assert_eq!(computed(&LAST, [None, None]), 36 + 4);
    assert_eq!(computed(&LAST, [None, Some("x")]), 36 + 36);
    assert_eq!(computed(&EncodeTask::Logits { tokens: vec![1] }, [None, None]), 36 + 4);
    assert_eq!(computed(&MEAN, [None, None]), 36 + 36);
}

#[test]
fn a_cancelled_call_has_no_effect() {
    for causal in [true, false] {
        let mut model = FakeModel::new(&config(), &[None]);
        model.causal = causal;
        model.faults.insert(1, Fault::CancelledMidway);
        let mut engine = Engine::new(model, config()).unwrap();
        let texts = [text(vec![1; 30]), text(vec![2; 100]), text(vec![3; 10])];
        assert_eq!(encode(&mut engine, &texts, &LAST), Err(EngineError::Cancelled));
        assert_eq!(engine.page_statistics()[0].free, 32);
        let expected: Vec<f32> = texts.iter().flat_map(|text| expected(text, &LAST, causal)).collect();
        assert_eq!(encode(&mut engine, &texts, &LAST).unwrap(), expected);
    }
}

#[test]
fn a_panic_ends_the_engine() {
    for (fault, words) in [(Fault::Panicked, "index out of bounds"), (Fault::Unwinds, "a slice was too short")] {
        let mut model = FakeModel::new(&config(), &[None]);
        model.faults.insert(1, fault);
        let mut engine = Engine::new(model, config()).unwrap();
        let dead = Err(EngineError::Dead(EngineFailure { reason: words.into(), lost_stage: None }));
        for _ in 0..2 {
            assert_eq!(encode(&mut engine, &[text(vec![1; 50])], &MEAN), dead);
        }
    }
}

#[test]
fn non_finite_results_are_reported_and_not_cached() {
    let mut model = FakeModel::new(&config(), &[None]);
    model.poison = Some(9);
    let mut engine = Engine::new(model, config()).unwrap();
    let poisoned = text([vec![5; 32], vec![9]].concat());
    let of_tokens = [EncodeTask::TokenEmbeddings { normalize: true }, EncodeTask::TopLogprobs { count: 2 }];
    for task in [LAST, MEAN, EncodeTask::Logits { tokens: vec![0] }].into_iter().chain(of_tokens) {
        assert_eq!(refused(&mut engine, poisoned.clone(), &task), EncodeError::NotFinite { text: 1 });
    }
    assert_eq!(engine.page_statistics()[0].cached, 0);
    let healthy = text([vec![5; 32], vec![8]].concat());
    assert_eq!(encode(&mut engine, std::slice::from_ref(&healthy), &LAST).unwrap(), expected(&healthy, &LAST, true));
}

#[test]
fn invalid_tasks_and_texts_are_rejected_before_anything_runs() {
    let mut engine = engine(&config(), &[None]);
    let mut of_text = |text| refused(&mut engine, text, &MEAN);
    assert_eq!(of_text(text(vec![])), EncodeError::Empty { text: 1 });
    assert_eq!(of_text(text(vec![1; 257])), EncodeError::TooLong { text: 1, tokens: 257, limit: 256 });
    let id = |field, index, id, limit| EncodeError::Id { field, text: 1, index, id, limit };
    assert_eq!(of_text(text(vec![1, 64])), id("token_ids", 1, 64, VOCAB));
    let typed = |kinds: &[u32]| Text { token_types: kinds.to_vec(), ..text(vec![1, 2]) };
    assert_eq!(of_text(typed(&[0, 4])), id("token_type_ids", 1, 4, TOKEN_TYPES));
    assert_eq!(of_text(typed(&[0])), EncodeError::TypeCount { text: 1, tokens: 2, types: 1 });
    for dimensions in [0, EMBEDDING + 1] {
        let task = EncodeTask::Embedding { pooling: Pooling::Cls, normalize: true, dimensions: Some(dimensions) };
        let refused = refused(&mut engine, text(vec![1]), &task);
        assert_eq!(refused, EncodeError::Dimensions { dimensions, embedding_size: EMBEDDING });
    }
    let refused = refused(&mut engine, text(vec![1]), &EncodeTask::Logits { tokens: vec![3, 64] });
    assert_eq!(refused, EncodeError::Id { field: "tokens", text: 0, index: 1, id: 64, limit: VOCAB });
    for count in [0, VOCAB + 1] {
        let refused = self::refused(&mut engine, text(vec![1]), &EncodeTask::TopLogprobs { count });
        assert_eq!(refused, EncodeError::Count { count, vocab_size: VOCAB });
    }
    assert!(engine.model().batches.borrow().is_empty());
    assert_eq!(encode(&mut engine, &[], &MEAN), Ok(vec![]));
    assert_eq!(encode(&mut engine, &[text(vec![1; 256])], &MEAN).unwrap().len(), EMBEDDING);
}

#[test]
fn a_bidirectional_model_neither_generates_nor_caches() {
    let mut engine = bidirectional(&config());
    let no_logits = EngineError::Request(RequestError::NoLogits);
    assert_eq!(engine.logits(&[1], 0, None, &Cancel::new()), Err(no_logits.clone()));
    assert_eq!(engine.save_state(&[1], None, None, &Cancel::new()), Err(no_logits));
    assert_eq!(engine.restore_state(&[]), Err(EngineError::NoPrefixCache));
    let params = SamplingParams { max_tokens: 1, ..SamplingParams::default() };
    assert_eq!(engine.add_request(Request::new(vec![1], params)), Err(RequestError::NoLogits));
    for task in [EncodeTask::Logits { tokens: vec![1] }, EncodeTask::TopLogprobs { count: 1 }] {
        assert_eq!(refused(&mut engine, text(vec![1]), &task), EncodeError::NoLogits);
    }
    encode(&mut engine, &[text(vec![1; 64])], &LAST).unwrap();
    assert_eq!(engine.page_statistics()[0].cached, 0);

    let directory = PrefixCacheDir { path: "pages".into(), limit: 1, step_bytes: 1 };
    let config = EngineConfig { prefix_cache_dir: Some(directory), ..config() };
    let mut model = FakeModel::new(&config, &[None]);
    model.causal = false;
    assert_eq!(Engine::new(model, config).unwrap_err(), ConfigError::NoPrefixes);
}

#[test]
fn tasks_and_texts_are_parsed_from_untrusted_input() {
    let json = r#"{"type": "embedding", "pooling": "last", "normalize": false, "dimensions": null}"#;
    assert_eq!(EncodeTask::from_json(json), Ok(LAST));
    assert_eq!(EncodeTask::from_json(r#"{"type": "scores"}"#), Ok(EncodeTask::Scores {}));
    for json in ["", "[]", r#"{"type": "magic"}"#, r#"{"type": "scores", "pooling": "cls"}"#, r#"{"type": "logits"}"#] {
        assert!(matches!(EncodeTask::from_json(json), Err(EncodeError::Malformed { .. })), "{json}");
    }
    for (tokens, types, field, id) in
        [(vec![1, -1], vec![], "token_ids", -1), (vec![1, 2], vec![0, 1 << 40], "token_type_ids", 1 << 40)]
    {
        let refused = Text::from_ids(7, &tokens, &types, None).unwrap_err();
        assert_eq!(refused, EncodeError::Id { field, text: 7, index: 1, id, limit: u32::MAX as usize });
    }
    let read = Text::from_ids(0, &[1, 2], &[0, 1], None).unwrap();
    assert_eq!(read, Text { token_types: vec![0, 1], ..text(vec![1, 2]) });
}
