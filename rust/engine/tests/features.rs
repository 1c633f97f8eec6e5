//! Requests with features: rows that take the place of the embeddings of placeholder tokens.

use std::path::Path;

use ferrule_engine::{
    EncodeTask, Engine, EngineBuilder, EngineModel, FeaturesError, Request, RequestError, SamplingParams, Text,
};
use ferrule_kernels::Cancel;
use ferrule_model::{Features, ModelSpec};

/// Width of the embeddings of the embedded model.
const WIDTH: usize = 256;
/// Id of placeholder tokens; any id works.
const PLACEHOLDER: u32 = 7;

/// Returns an engine of the embedded model, with chunks of at most `chunk` tokens.
fn engine(chunk: usize) -> Engine<EngineModel> {
    let spec = ModelSpec::from_json(include_str!("../examples/tiny.json")).unwrap();
    let weights = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../python/ferrule/models/tiny");
    EngineBuilder::new(spec).weights(weights).kv_cache_memory(8 << 20).max_num_batched_tokens(chunk).build().unwrap()
}

/// Returns features of `tokens` tokens from position `first` on, which differ by `seed`.
fn features(first: usize, tokens: usize, seed: usize) -> Features {
    let rows: Vec<f32> = (0..tokens * WIDTH).map(|i| ((i * 37 + seed * 101) % 97) as f32 / 970.0 - 0.05).collect();
    Features::new(first, rows.into(), WIDTH)
}

/// Returns a request with images of 40 and 9 tokens that differ by `seeds`.
fn request(placeholder: u32, seeds: [usize; 2]) -> Request {
    let text = (0..90).map(|token| token * 13 % 512);
    let prompt = text
        .enumerate()
        .map(|(i, token)| if (5..45).contains(&i) || (50..59).contains(&i) { placeholder } else { token });
    let params = SamplingParams { temperature: 0.0, max_tokens: 8, logprobs: Some(1), ..SamplingParams::default() };
    let features = vec![features(5, 40, seeds[0]), features(50, 9, seeds[1])];
    Request { features, ..Request::new(prompt.collect(), params) }
}

/// Returns the tokens and the bits of their log-probabilities, and the number of tokens that came from the cache.
fn run(engine: &mut Engine<EngineModel>, request: Request) -> (Vec<(u32, u64)>, usize) {
    let before = engine.metrics().cached_prompt_tokens;
    engine.add_request(request).unwrap();
    let mut tokens = Vec::new();
    while engine.has_unfinished_requests() {
        for output in engine.step(&Cancel::new()).unwrap() {
            let logprobs = output.logprobs.iter().map(|logprobs| logprobs.sampled.logprob.to_bits());
            tokens.extend(output.token_ids.iter().copied().zip(logprobs));
        }
    }
    (tokens, (engine.metrics().cached_prompt_tokens - before) as usize)
}

#[test]
fn the_output_depends_on_features_and_not_on_placeholders_chunks_or_the_cache() {
    let mut whole = engine(512);
    let (expected, _) = run(&mut whole, request(PLACEHOLDER, [1, 2]));
    assert_eq!(expected.len(), 8);
    for chunk in [1, 16, 43] {
        assert_eq!(run(&mut engine(chunk), request(PLACEHOLDER, [1, 2])), (expected.clone(), 0));
    }
    // The same images come from the cache; from the first page with another image on, nothing does.
    assert_eq!(run(&mut whole, request(PLACEHOLDER, [1, 2])), (expected.clone(), 80));
    for (seeds, from_cache) in [([3, 2], 0), ([1, 3], 48)] {
        let (other, cached) = run(&mut whole, request(PLACEHOLDER, seeds));
        assert_eq!(cached, from_cache);
        assert_ne!(other, expected);
        assert_eq!(run(&mut engine(512), request(PLACEHOLDER, seeds)), (other, 0));
    }
    assert_eq!(run(&mut whole, request(PLACEHOLDER + 1, [1, 2])), (expected, 0));
}

#[test]
fn invalid_features_are_refused() {
    let mut engine = engine(64);
    let mut refused =
        |features: Vec<Features>| engine.add_request(Request { features, ..request(PLACEHOLDER, [1, 2]) }).unwrap_err();
    let narrow = Features::new(0, vec![0.0; 20].into(), 10);
    assert_eq!(refused(vec![narrow]), RequestError::Features(FeaturesError::Width { found: 10, expected: WIDTH }));
    let error = FeaturesError::Positions { first: 85, end: 95, tokens: 90 };
    assert_eq!(refused(vec![features(85, 10, 0)]), RequestError::Features(error));
    let error = FeaturesError::Positions { first: 3, end: 5, tokens: 90 };
    assert_eq!(refused(vec![features(0, 4, 0), features(3, 2, 0)]), RequestError::Features(error));
    let poisoned = Features::new(0, vec![f32::NAN; WIDTH].into(), WIDTH);
    let text = Text { tokens: vec![1, 2], features: vec![poisoned], ..Text::default() };
    let error = engine.encode(&[text], &EncodeTask::TokenEmbeddings { normalize: false }, &Cancel::new()).unwrap_err();
    assert!(error.to_string().contains("not finite"), "{error}");
}
