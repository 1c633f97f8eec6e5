//! Pages that are copied from one model to another replace the computation of their tokens.

use std::num::NonZeroUsize;
use std::sync::Arc;

use crate::specs;
use ferrule_kernels::arch::Isa;
use ferrule_kernels::kv::{KvFormat, PAGE_TOKENS, PageId};
use ferrule_kernels::{Cancel, Pool};
use ferrule_model::{
    Batch, LanguageModel, LoadOptions, LogitRows, ModelSpec, Quantization, SequenceChunk, Source, Transformer,
};
use serde_json::json;

/// Returns a model with two KV cache groups: all positions, and a window of 40. If `shared`, its last two layers read
/// the keys and values of the first two.
fn model(kv_format: KvFormat, pages: usize, shared: bool) -> Transformer {
    let mut spec = specs::llama(64, 4);
    for layer in [1, 3] {
        spec["layers"][layer]["blocks"][0]["mixer"]["window"] = json!(40);
    }
    for layer in if shared { 2..4 } else { 0..0 } {
        spec["layers"][layer]["blocks"][0]["mixer"]["kv_layer"] = json!(layer - 2);
    }
    let spec = ModelSpec::from_json(&spec.to_string()).unwrap();
    let options = LoadOptions { quantization: Quantization::named("f32").unwrap(), kv_format, isa: Isa::best() };
    let pool = Arc::new(Pool::new(NonZeroUsize::new(2).unwrap()));
    let mut model = Transformer::load(spec, Source::Random, options, pool, &Cancel::new(), &mut |_, _| {}).unwrap();
    model.allocate_kv(&[pages; 2]).unwrap();
    model
}

/// Computes the logits of the last of `tokens`; those before `first_position` are in the pages.
fn last_logits(model: &mut Transformer, tokens: &[u32], first_position: usize, pages: &[Vec<PageId>]) -> Vec<f32> {
    let sequence = SequenceChunk {
        tokens: &tokens[first_position..],
        first_position,
        prompt_len: tokens.len(),
        pages,
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
fn copied_pages_give_the_same_logits() {
    let tokens: Vec<u32> = (0..44).map(|i| i * 7 % 64).collect();
    for (&kv_format, shared) in KvFormat::ALL.iter().flat_map(|format| [(format, false), (format, true)]) {
        let (mut from, mut to) = (model(kv_format, 3, shared), model(kv_format, 5, shared));
        assert_eq!(from.fingerprint(), to.fingerprint());
        let (old, new) = (vec![vec![2, 0, 1]; 2], vec![vec![4, 1, 0], vec![0, 3, 4]]);
        let computed = last_logits(&mut from, &tokens, 0, &old);
        for group in 0..2 {
            for place in 0..2 {
                let bytes = from.page(group, old[group][place]);
                assert_eq!(bytes.len() as u64, from.kv_groups()[group].page_bytes);
                to.set_page(group, new[group][place], bytes);
            }
        }
        let read = last_logits(&mut to, &tokens, 2 * PAGE_TOKENS, &new);
        assert_eq!(computed, read, "{}", kv_format.name());
        assert!(computed.iter().any(|logit| *logit != 0.0));
    }
}

#[test]
fn shared_keys_and_values_are_stored_once() {
    let groups = |shared| model(KvFormat::F32, 1, shared).kv_groups().to_vec();
    let (own, shared) = (groups(false), groups(true));
    for (own, shared) in own.iter().zip(&shared) {
        assert_eq!((own.layers, shared.layers, own.kind), (2, 1, shared.kind));
        assert_eq!(own.page_bytes, 2 * shared.page_bytes);
    }
}
