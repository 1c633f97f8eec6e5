//! What a model takes of memory, told before any of it is taken.

use ferrule_kernels::kv::KvFormat;

use crate::batch::KvGroup;
use crate::kv_layout::KvLayout;
use crate::layer::{FFN_ROWS, MIXTURE_ROWS};
use crate::quantization::Quantization;
use crate::spec::{AttentionSpec, DenseSpec, FfnSpec, LatentProjections, LayerSpec, ModelSpec, ProjectionsSpec};
use crate::weights::{LoadError, Loader, Source, WeightSizes, check_quantization};

/// What a model takes: the figures of one that is loaded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Needs {
    /// Of its weights.
    pub weights: WeightSizes,
    /// Of its keys and values.
    pub kv_groups: Vec<KvGroup>,
}

/// What a model would take. Of a checkpoint's files the headers are looked at, which must have all that the spec names,
/// and nothing else.
///
/// # Errors
/// [`LoadError`], as [`crate::Transformer::load`] where files do not fit the spec.
pub fn measure(
    spec: &ModelSpec,
    source: Source<'_>,
    quantization: Quantization,
    kv_format: KvFormat,
) -> Result<Needs, LoadError> {
    if let Source::Packed { file, .. } = source {
        check_quantization(file, quantization)?;
    }
    let weights = Loader::new(spec, source, quantization).measure()?.sizes(spec);
    Ok(Needs { weights, kv_groups: KvLayout::new(spec, kv_format).groups })
}

/// Bytes of a quantized activation, with its share of what a block of them has besides.
const QUANTIZED_BYTES: f64 = 1.5;

/// About how many bytes lie between the operations of a step of `rows` tokens, of which `logit_rows` have their logits
/// computed: what is kept from one layer to the next, and the widest of each thing that a layer keeps.
#[must_use]
pub fn buffer_bytes(spec: &ModelSpec, rows: usize, logit_rows: usize) -> u64 {
    let most = |of: &dyn Fn(&LayerSpec) -> usize| spec.layers.iter().map(of).max().unwrap_or(0);
    let rotary_dims: usize = spec.ropes.iter().map(|rope| rope.rotary_dim).sum();
    let blocks = most(&|layer| between_blocks(spec, layer));
    let attention = most(&|layer| of_attention(&layer.attention));
    let inputs = most(&|layer| longest_input(spec, layer));
    let floats = rows.saturating_mul(spec.hidden_size + rotary_dims + blocks + attention)
        + most(&|layer| of_ffn(spec, layer, rows))
        + logit_rows.saturating_mul(spec.hidden_size + spec.vocab_size);
    (floats as f64 * size_of::<f32>() as f64 + rows as f64 * inputs as f64 * QUANTIZED_BYTES) as u64
}

/// Floats that a row has before and after a layer's blocks.
fn between_blocks(spec: &ModelSpec, layer: &LayerSpec) -> usize {
    let buffers = [layer.attention_norm.is_some(), layer.ffn_norm.is_some(), layer.parallel, true];
    buffers.into_iter().filter(|there| *there).count() * spec.hidden_size
}

/// Floats that a row has within attention.
fn of_attention(spec: &AttentionSpec) -> usize {
    let heads = spec.heads;
    match &spec.projections {
        ProjectionsSpec::Heads(of) => {
            (heads + of.kv_heads) * of.key_dim + of.kv_heads * of.value_dim + heads * of.value_dim
        }
        ProjectionsSpec::Latent(LatentProjections { query_rank, kv_rank, nope_dim, rope_dim, value_dim, .. }) => {
            let queries = heads * (nope_dim + rope_dim);
            let input = query_rank.map_or(queries, |rank| 2 * rank) + kv_rank + rope_dim;
            let keys = rope_dim + kv_rank;
            let by_head = heads * (nope_dim.max(kv_rank) + value_dim.max(kv_rank));
            input + queries + keys + by_head + heads * (keys + kv_rank + value_dim)
        }
    }
}

/// Floats of all rows within the feed-forward network, which takes so many of them at a time.
fn of_ffn(spec: &ModelSpec, layer: &LayerSpec, rows: usize) -> usize {
    let within = |dense: &DenseSpec| dense.inner_rows() + if dense.gated { dense.intermediate_size } else { 0 };
    match &layer.ffn {
        FfnSpec::Dense(dense) => rows.min(FFN_ROWS) * within(dense),
        FfnSpec::Experts(mixture) => {
            let chosen = 2 * spec.hidden_size + within(&mixture.expert);
            rows.min(MIXTURE_ROWS) * (mixture.experts + mixture.experts_per_token * chosen)
        }
    }
}

/// Numbers of the longest row that a layer multiplies with a matrix, for each of the rows of a step.
fn longest_input(spec: &ModelSpec, layer: &LayerSpec) -> usize {
    let ffn = match &layer.ffn {
        FfnSpec::Dense(dense) => dense.intermediate_size,
        FfnSpec::Experts(mixture) => mixture.experts_per_token * mixture.expert.intermediate_size.max(spec.hidden_size),
    };
    ffn.max(spec.hidden_size).max(layer.attention.output_columns())
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroUsize;
    use std::sync::Arc;

    use ferrule_kernels::arch::Isa;
    use ferrule_kernels::{Cancel, Format, PackedMatrix, Pool};
    use serde_json::{Value, json};

    use super::*;
    use crate::batch::LanguageModel;
    use crate::specs;
    use crate::transformer::{LoadOptions, Transformer};

    /// Heads, one layer with a window; latents, and a head of its own; the same with a mixture in one layer.
    fn specimens() -> [Value; 3] {
        let mut windows = specs::llama(96, 3);
        windows["layers"][1]["attention"]["window"] = json!(40);
        let mut latent = specs::llama(80, 3);
        latent["head"] = json!({"tied": false, "bias": true, "scale": 1.0, "softcap": null});
        latent["ropes"][0]["rotary_dim"] = json!(8);
        let norm = latent["final_norm"].clone();
        for layer in latent["layers"].as_array_mut().unwrap() {
            layer["attention"]["projections"] = json!({
                "type": "latent", "query_rank": 24, "kv_rank": 32, "nope_dim": 16, "rope_dim": 8, "value_dim": 12,
                "norm": norm, "bias": true, "split": false,
            });
        }
        let mut mixture = latent.clone();
        let expert = windows["layers"][0]["ffn"].clone();
        mixture["layers"][1]["ffn"] = json!({
            "type": "experts", "experts": 6, "experts_per_token": 2, "expert": expert,
            "router": {
                "scoring": "sigmoid", "normalize": true, "scale": 2.5, "bias": true, "correction_bias": true,
                "groups": 1, "groups_chosen": 1, "group_score": "top2",
            },
            "shared": expert, "shared_gate": true,
        });
        [windows, latent, mixture]
    }

    fn spec(json: &Value) -> ModelSpec {
        ModelSpec::from_json(&json.to_string()).unwrap()
    }

    #[test]
    fn what_is_measured_is_what_a_loaded_model_has() {
        let pool = Arc::new(Pool::new(NonZeroUsize::MIN));
        for json in &specimens() {
            for (&quantization, &kv_format) in Quantization::ALL.iter().zip(KvFormat::ALL.iter().cycle()) {
                let options = LoadOptions { quantization, kv_format, isa: Isa::best() };
                let cancel = Cancel::new();
                let loaded =
                    Transformer::load(spec(json), Source::Random, options, Arc::clone(&pool), &cancel, &mut |_, _| {});
                let loaded = loaded.unwrap();
                let measured = measure(&spec(json), Source::Random, quantization, kv_format).unwrap();
                assert_eq!(measured.weights, loaded.weight_sizes(), "{}", quantization.name());
                assert_eq!(measured.kv_groups, loaded.kv_groups());
            }
        }
    }

    #[test]
    fn a_token_meets_no_embedding_that_is_not_the_head_and_no_experts_that_do_not_run() {
        let int8 = Quantization::named("int8").unwrap();
        let sizes = |json: &Value| measure(&spec(json), Source::Random, int8, KvFormat::F16).unwrap().weights;
        let [windows, latent, mixture] = specimens();
        let tied = sizes(&windows);
        assert_eq!(tied.parameters, tied.parameters_per_token);
        assert_eq!(tied.weight_bytes, tied.weight_bytes_per_token);
        assert_eq!(tied.layer_parameters, tied.parameters - 96 * 64);
        let untied = sizes(&latent);
        assert_eq!(untied.parameters - untied.layer_parameters, 2 * 80 * 64);
        let embedding = PackedMatrix::bytes_for(Format::Int8, 80, 64).unwrap();
        assert_eq!(untied.weight_bytes - untied.weight_bytes_per_token, embedding);
        let sparse = sizes(&mixture);
        assert_eq!(sparse.parameters - sparse.parameters_per_token, 4 * 3 * 64 * 96);
        assert_eq!(sparse.layer_parameters - sparse.layer_parameters_per_token, 4 * 3 * 64 * 96);
        assert!(sparse.weight_bytes_per_token < sparse.weight_bytes - 4 * 3 * 64 * 96);
        // Beside the latent layers' vectors: biases of the router, of its choice.
        assert_eq!(sparse.vector_bytes - untied.vector_bytes, 4 * 2 * 6);
    }

    #[test]
    fn buffers_grow_with_rows_and_with_logits() {
        for json in specimens() {
            let (spec, vocab) = (spec(&json), json["vocab_size"].as_u64().unwrap());
            let one = buffer_bytes(&spec, 64, 0);
            assert_eq!(buffer_bytes(&spec, 64, 3) - one, 4 * 3 * (64 + vocab));
            assert_eq!(buffer_bytes(&spec, 256, 0), 4 * one);
            // A network takes a part of the rows at a time.
            let [more, most] = [1024, 2048].map(|rows| buffer_bytes(&spec, rows, 0));
            assert!(16 * one > more && more < most && most < 2 * more);
        }
    }
}
