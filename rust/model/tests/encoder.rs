//! A bidirectional model: what it supports, and which rows and token types its results depend on.

use std::num::NonZeroUsize;
use std::sync::Arc;

use crate::specs;
use ferrule_kernels::arch::Isa;
use ferrule_kernels::kv::{KvFormat, PageId};
use ferrule_kernels::{Cancel, Pool};
use ferrule_model::{
    Batch, Capabilities, ClassifierInfo, LanguageModel, LoadOptions, LogitRows, ModelSpec, Pooling, Quantization,
    SequenceChunk, Source, SpecError, Transformer,
};
use serde_json::{Value, json};

const HIDDEN: usize = 64;

fn spec() -> Value {
    let mut spec = specs::llama(64, 3);
    spec["causal"] = json!(false);
    spec["lm_head"] = json!(null);
    spec["layers"][1]["blocks"][0]["mixer"]["window"] = json!(4);
    spec["embedding"]["token_types"] = json!(3);
    spec["classifier"] = json!({
        "labels": 2, "pooling": "mean", "activation": "tanh", "dense_bias": true, "norm": null, "bias": true
    });
    spec["text_projections"] =
        json!([{"width": 96, "activation": "gelu", "bias": false}, {"width": 24, "activation": null, "bias": true}]);
    spec
}

fn model() -> Transformer {
    let spec = ModelSpec::from_json(&spec().to_string()).unwrap();
    let options =
        LoadOptions { quantization: Quantization::named("f32").unwrap(), kv_format: KvFormat::F32, isa: Isa::best() };
    let pool = Arc::new(Pool::new(NonZeroUsize::new(2).unwrap()));
    let mut model = Transformer::load(spec, Source::Random, options, pool, &Cancel::new(), &mut |_, _| {}).unwrap();
    model.allocate_kv(&[8]).unwrap();
    model
}

fn hidden(model: &mut Transformer, tokens: &[u32], token_types: &[u32], rows: LogitRows) -> Vec<f32> {
    let pages: [Vec<PageId>; 1] = [vec![0, 1, 2]];
    let sequence = SequenceChunk {
        tokens,
        first_position: 0,
        prompt_len: tokens.len(),
        pages: &pages,
        token_types,
        features: &[],
        logits: rows,
        adapter: None,
    };
    let mut hidden = Vec::new();
    model.hidden_states(Batch { sequences: &[sequence] }, &Cancel::new(), &mut hidden).unwrap();
    hidden
}

#[test]
fn capabilities_of_an_encoder() {
    let model = model();
    let classifier = Some(ClassifierInfo { pooling: Pooling::Mean, labels: 2 });
    let expected = Capabilities {
        causal: false,
        logits: false,
        hidden_size: HIDDEN,
        embedding_size: 24,
        token_types: 3,
        feature_width: Some(HIDDEN),
        embeds_tokens: true,
        merged_rows: 1,
        classifier,
    };
    assert_eq!(model.capabilities(), expected);
    // Layers with and without a window share their pages: no page leaves the window before the whole text is computed.
    let groups: Vec<_> = model.kv_groups().iter().map(|group| (group.layers, group.window())).collect();
    assert_eq!(groups, [(3, None)]);
}

#[test]
fn rows_attend_to_later_tokens() {
    let mut model = model();
    let tokens: Vec<u32> = (0..40).map(|i| i * 7 % 64).collect();
    let all = hidden(&mut model, &tokens, &[], LogitRows::All);
    assert_eq!(all.len(), tokens.len() * HIDDEN);
    assert_eq!(hidden(&mut model, &tokens, &[], LogitRows::First), all[..HIDDEN]);
    assert_eq!(hidden(&mut model, &tokens, &[], LogitRows::Last), all[39 * HIDDEN..]);
    assert!(hidden(&mut model, &tokens, &[], LogitRows::None).is_empty());
    let other = [&tokens[..39], &[63]].concat();
    assert_ne!(hidden(&mut model, &other, &[], LogitRows::First), all[..HIDDEN]);
}

#[test]
fn token_types_matter_and_default_to_the_first() {
    let mut model = model();
    let mut of = |types: &[u32]| hidden(&mut model, &[1, 2, 3], types, LogitRows::All);
    assert_eq!(of(&[]), of(&[0, 0, 0]));
    assert_ne!(of(&[0, 0, 1]), of(&[0, 0, 0]));
    assert_ne!(of(&[0, 0, 1]), of(&[0, 0, 2]));
}

#[test]
fn embeddings_and_scores_are_computed_per_row() {
    let mut model = model();
    let rows = hidden(&mut model, &[1, 2, 3], &[], LogitRows::All);
    let embeddings = model.embeddings(&rows, &Cancel::new()).unwrap();
    let scores = model.scores(&rows, &Cancel::new()).unwrap();
    assert_eq!((embeddings.len(), scores.len()), (3 * 24, 3 * 2));
    for (i, row) in rows.chunks_exact(HIDDEN).enumerate() {
        assert_eq!(model.embeddings(row, &Cancel::new()).unwrap(), embeddings[i * 24..][..24]);
        assert_eq!(model.scores(row, &Cancel::new()).unwrap(), scores[i * 2..][..2]);
    }
    assert_ne!(scores[..2], scores[2..4]);
}

#[test]
fn invalid_fields_are_named() {
    for (at, value, words) in [
        ("/classifier/labels", json!(0), "classifier.labels must be in 1..=1048576, got 0"),
        ("/text_projections/1/width", json!(0), "text_projections[1].width must be in 1..=268435456, got 0"),
        ("/text_projections", json!(vec![spec()["text_projections"][1].clone(); 17]), "must be at most 16, got 17"),
        ("/classifier/pooling", json!("max"), "unknown variant `max`"),
    ] {
        let mut spec = spec();
        *spec.pointer_mut(at).unwrap() = value;
        let error: SpecError = ModelSpec::from_json(&spec.to_string()).unwrap_err();
        assert!(error.to_string().contains(words), "{error}");
    }
}
