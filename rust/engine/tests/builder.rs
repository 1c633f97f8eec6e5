//! `EngineBuilder`: engines built from a spec and weights, the figures of a model, and errors that name the option.

use std::path::{Path, PathBuf};

use ferrule_engine::{BuildError, EngineBuilder, EngineOptions, Request, SamplingParams};
use ferrule_kernels::Cancel;
use ferrule_model::{Calibration, LanguageModel, ModelSpec, Quantization};

#[path = "../examples/generate.rs"]
#[expect(dead_code, reason = "tests call the example's function, not its main")]
mod example;

const TINY: &str = include_str!("../examples/tiny.json");
/// Smallest KV cache that these tests need, in bytes.
const KV_CACHE_MEMORY: u64 = 8 << 20;

fn builder() -> EngineBuilder<'static> {
    EngineBuilder::new(ModelSpec::from_json(TINY).unwrap()).kv_cache_memory(KV_CACHE_MEMORY)
}

fn embedded_model() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../python/ferrule/models/tiny")
}

fn refused(builder: EngineBuilder<'_>) -> BuildError {
    builder.build().map(|_| ()).unwrap_err()
}

#[test]
fn generates_the_same_tokens_twice() {
    let run = || {
        let mut engine = builder().weights(embedded_model()).build().unwrap();
        let params = SamplingParams { temperature: 0.0, max_tokens: 8, ..SamplingParams::default() };
        engine.add_request(Request::new(vec![1, 2, 3], params)).unwrap();
        let mut tokens = Vec::new();
        while engine.has_unfinished_requests() {
            tokens.extend(engine.step(&Cancel::new()).unwrap().into_iter().flat_map(|output| output.token_ids));
        }
        tokens
    };
    let tokens = run();
    assert_eq!((tokens.len(), &tokens), (8, &run()));
}

#[test]
fn the_example_continues_a_prompt() {
    let (spec, model) = (Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/tiny.json"), embedded_model());
    let run = |ids: &[&str]| {
        let ids: Vec<String> = ids.iter().map(|id| (*id).to_owned()).collect();
        example::generate(&spec.to_string_lossy(), &model.to_string_lossy(), &ids)
    };
    assert_eq!(run(&["1", "2", "3"]).unwrap().len(), 16);
    let outside = run(&["1", "4096"]).unwrap_err();
    assert!(outside.to_string().contains("4096"), "{outside}");
}

#[test]
fn engine_info_equals_measured_sizes() {
    let (engine, info) =
        builder().quantization(Quantization::named("int8")).max_model_len(64).build_with_info().unwrap();
    let measured = builder().quantization(Quantization::named("int8")).max_model_len(64).measure().unwrap();
    assert_eq!(info.model, measured.model);
    assert_eq!((info.max_model_len, measured.max_model_len), (64, 64));
    assert_eq!(engine.max_model_len(), 64);
    assert!(info.kv_cache_bytes <= KV_CACHE_MEMORY);
    assert_eq!(measured.memory.weights, engine.model().weight_sizes().weight_bytes);
}

/// Half of the memory for both KV caches goes to each of two equal models.
#[test]
fn a_draft_model_shares_the_kv_memory() {
    let spec = || ModelSpec::from_json(TINY).unwrap();
    let (alone, info) = builder().max_num_seqs(1024).build_with_info().unwrap();
    let with_draft = builder().max_num_seqs(1024).draft_model(spec(), None, EngineOptions::default());
    let (_, shared) = with_draft.build_with_info().unwrap();
    let page_bytes: u64 = alone.model().kv_groups().iter().map(|group| group.page_bytes).sum();
    assert!(shared.kv_cache_bytes.abs_diff(info.kv_cache_bytes / 2) <= page_bytes, "{shared:?}");
}

#[test]
fn errors_name_the_option() {
    let parameter = |builder: EngineBuilder<'_>| match refused(builder) {
        BuildError::Parameter(error) => error,
        error => panic!("{error}"),
    };
    let long = parameter(builder().max_model_len(1 << 40));
    assert_eq!((long.field.as_str(), long.value), ("max_model_len", (1_u64 << 40).into()));
    assert_eq!(parameter(builder().threads(0)).to_string(), "threads must be an integer from 1 to 1024, got 0");
    assert_eq!(parameter(builder().max_num_seqs(0)).field, "max_num_seqs");
    let cache = builder().prefix_cache_dir("pages", 1 << 20).enable_prefix_caching(false);
    assert_eq!(parameter(cache).field, "enable_prefix_caching");
    let huge = refused(builder().kv_cache_memory(i64::MAX as u64));
    assert!(matches!(huge, BuildError::KvMemory { requested, .. } if requested == i64::MAX as u64), "{huge}");
    let missing = refused(builder().weights("no such directory"));
    assert!(matches!(missing, BuildError::Load(_)), "{missing}");
}

#[test]
fn invalid_calibration_sequences_are_refused() {
    let pack = |sequences: &[Vec<u32>]| {
        let calibration = Some(Calibration { sequences, kept_layers: None });
        let error =
            builder().pack(Path::new("never written"), &Default::default(), calibration, None, None).unwrap_err();
        let BuildError::Parameter(error) = error else { panic!("{error}") };
        error.field
    };
    assert_eq!(pack(&[]), "calibration");
    assert_eq!(pack(&[vec![1], Vec::new()]), "calibration[1]");
    assert_eq!(pack(&[vec![1, u32::MAX]]), "calibration[0][1]");
}
