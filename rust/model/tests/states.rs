//! State: chunks, retries, snapshots and copies do not change a bit.

use std::num::NonZeroUsize;
use std::sync::Arc;

use crate::specs;
use ferrule_kernels::arch::Isa;
use ferrule_kernels::kv::{KvFormat, PageId};
use ferrule_kernels::{Cancel, Pool};
use ferrule_model::{
    Batch, GroupKind, LanguageModel, LoadOptions, LogitRows, ModelSpec, Quantization, SequenceChunk, Source, SpecError,
    Transformer,
};
use serde_json::{Value, json};

/// Returns a spec with attention in the second of three layers and short convolutions in the others.
fn spec() -> Value {
    let mut spec = specs::llama(64, 3);
    for layer in [0, 2] {
        let block = &mut spec["layers"][layer]["blocks"][0];
        block["name"] = json!("convolution");
        block["mixer"] = json!({"type": "short_convolution", "channels": 64, "taps": 4, "bias": true});
    }
    spec
}

fn model() -> Transformer {
    let spec = ModelSpec::from_json(&spec().to_string()).unwrap();
    let quantization = Quantization::named("f32").unwrap();
    let options = LoadOptions { quantization, kv_format: KvFormat::F32, isa: Isa::best() };
    let pool = Arc::new(Pool::new(NonZeroUsize::new(2).unwrap()));
    let mut model = Transformer::load(spec, Source::Random, options, pool, &Cancel::new(), &mut |_, _| {}).unwrap();
    model.allocate_kv(&[6, 8]).unwrap();
    model
}

const TOKENS: usize = 44;
/// Pages of keys and values; the first group is that of the convolutions, which come first.
const PAGES: [PageId; 3] = [2, 0, 1];

/// Computes a chunk with pages for its states, and returns the logits of its last token.
fn compute(model: &mut Transformer, from: usize, to: usize, states: &[PageId]) -> Vec<f32> {
    let tokens: Vec<u32> = (0..TOKENS as u32).map(|i| i * 7 % 64).collect();
    let sequence = SequenceChunk {
        tokens: &tokens[from..to],
        first_position: from,
        prompt_len: TOKENS,
        pages: &[states.to_vec(), PAGES.to_vec()],
        token_types: &[],
        features: &[],
        logits: LogitRows::Last,
        adapter: None,
    };
    let mut logits = Vec::new();
    model.forward(Batch { sequences: &[sequence] }, &Cancel::new(), &mut logits).unwrap();
    logits
}

#[test]
fn states_are_one_group_of_fixed_size() {
    let model = model();
    let groups: Vec<_> = model.kv_groups().iter().map(|group| (group.kind, group.layers)).collect();
    assert_eq!(groups, [(GroupKind::State, 2), (GroupKind::Pages { window: None }, 1)]);
    assert_eq!(model.kv_groups()[0].page_bytes, 2 * 3 * 64 * 4);
}

#[test]
fn chunks_of_any_length_give_the_same_bits() {
    let whole = compute(&mut model(), 0, TOKENS, &[0, 1]);
    assert!(whole.iter().any(|logit| *logit != 0.0));
    for cuts in [vec![1, 2, 3, 4, 5, 6], vec![16, 32], vec![43], vec![2, 40]] {
        let mut model = model();
        let (mut from, mut pages) = (0, [0, 1]);
        let mut last = Vec::new();
        for to in cuts.iter().copied().chain([TOKENS]) {
            // A failed step is repeated: it reads what it read before.
            compute(&mut model, from, to, &pages);
            last = compute(&mut model, from, to, &pages);
            from = to;
            pages.reverse();
        }
        assert_eq!(last, whole, "{cuts:?}");
    }
}

#[test]
fn earlier_tokens_reach_later_ones_only_through_the_state() {
    let mut right = model();
    compute(&mut right, 0, 40, &[0, 1]);
    let expected = compute(&mut right, 40, TOKENS, &[1, 2]);
    assert_ne!(compute(&mut right, 40, TOKENS, &[5, 2]), expected);
}

#[test]
fn snapshots_hold_the_state_after_the_last_full_page() {
    let mut model = model();
    let whole = compute(&mut model, 0, TOKENS, &[0, 1, 2]);
    assert_eq!(compute(&mut model, 32, TOKENS, &[2, 3]), whole);
    // A chunk that ends at a full page has no rows after it: the state after the chunk is the snapshot.
    compute(&mut model, 0, 32, &[0, 4, 5]);
    assert_eq!(compute(&mut model, 32, TOKENS, &[4, 3]), whole);
}

#[test]
fn copied_states_continue_in_another_model() {
    let (mut first, mut second) = (model(), model());
    compute(&mut first, 0, 32, &[0, 1]);
    second.set_page(0, 4, first.page(0, 1));
    second.copy_page(0, 4, 5);
    for page in PAGES {
        second.set_page(1, page, first.page(1, page));
    }
    assert_eq!(compute(&mut second, 32, TOKENS, &[5, 3]), compute(&mut first, 32, TOKENS, &[1, 2]));
}

#[test]
fn invalid_convolutions_are_refused_by_field() {
    for (field, value) in [("channels", json!(32)), ("taps", json!(0)), ("taps", json!(65))] {
        let mut spec = spec();
        spec["layers"][0]["blocks"][0]["mixer"][field] = value;
        let error = ModelSpec::from_json(&spec.to_string()).unwrap_err();
        let SpecError::Number { field: found, .. } = error else { panic!("{error:?}") };
        assert!(found.ends_with(field), "{found}");
    }
}
