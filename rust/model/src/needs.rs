//! Memory that a model needs, computed before any of it is allocated.

use std::collections::BTreeMap;

use ferrule_kernels::kv::KvFormat;

use crate::batch::KvGroup;
use crate::memory::MemoryLayout;
use crate::quantization::Quantization;
use crate::spec::{BlockInput, BlockSpec, LayerSpec, ModelSpec};
use crate::stage::{LoadedPart, StageLayers, StagePart};
use crate::streams::StreamsSpec;
use crate::weights::{LoadError, Loader, Source, WeightSizes, check_quantization};

/// Memory that a model needs; equals what the loaded model reports.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Needs {
    /// Sizes of the weights.
    pub weights: WeightSizes,
    /// KV cache groups, with the bytes of one page each.
    pub kv_groups: Vec<KvGroup>,
}

/// Computes the memory that a model needs. Reads only the headers of the files, and checks that they have every tensor
/// that the spec names.
///
/// # Errors
/// [`LoadError`] if the files do not fit the spec, as for [`crate::Transformer::load`].
pub fn measure(
    spec: &ModelSpec,
    source: Source<'_>,
    quantization: Quantization,
    kv_format: KvFormat,
) -> Result<Needs, LoadError> {
    measure_part(spec, StageLayers::whole(spec).into(), source, quantization, kv_format)
}

/// Checks that the memory of this machine holds the weights of all `parts` of a model together, before its workers on
/// this machine load them. Reads only the headers of the files.
///
/// # Errors
/// [`LoadError::Weights`] if not, [`LoadError::Stage`] if layers are not a valid stage, and the errors of [`measure`].
pub fn check_memory(
    spec: &ModelSpec,
    parts: impl IntoIterator<Item = StagePart>,
    source: Source<'_>,
    quantization: Quantization,
) -> Result<(), LoadError> {
    let loader = Loader::new(spec, source, quantization);
    let bytes = |part| loader.clone().of_part(LoadedPart::new(spec, part)?).packed_bytes();
    let needs = parts.into_iter().map(bytes).try_fold(0, |sum: u64, bytes| Ok::<_, LoadError>(sum + bytes?))?;
    loader.check_memory(needs)
}

/// Computes the memory that a part of a model needs.
pub(crate) fn measure_part(
    spec: &ModelSpec,
    part: LoadedPart,
    source: Source<'_>,
    quantization: Quantization,
    kv_format: KvFormat,
) -> Result<Needs, LoadError> {
    if let Source::Packed { file, .. } = source {
        check_quantization(file, quantization)?;
    }
    let layers = part.layers.clone();
    let ranks = part.group.as_ref().map_or(1, |group| group.ranks());
    let weights = Loader::new(spec, source, quantization).of_part(part).measure()?.sizes(spec, &layers);
    let layout = MemoryLayout::new(&spec.layers, layers.range(), spec.causal, kv_format).divided(ranks, kv_format);
    Ok(Needs { weights, kv_groups: layout.groups })
}

/// Upper limit for the bytes of a quantized activation, including its share of scales and of initial values of sums.
const QUANTIZED_BYTES: f64 = 2.5;

/// Estimates the bytes of activation buffers for a step of `rows` tokens, `logit_rows` of which need logits: the
/// buffers kept between layers, those between blocks, and the largest ones inside of each mixer.
#[must_use]
pub fn buffer_bytes(spec: &ModelSpec, rows: usize, logit_rows: usize) -> u64 {
    let hidden = spec.hidden_size;
    let rotary_dims: usize = spec.ropes.iter().map(|rope| rope.rotary_dim).sum();
    let between = spec.layers.iter().map(between_blocks).max().unwrap_or(0) * hidden;
    let mixers = || spec.layers.iter().flat_map(|layer| &layer.blocks).map(|block| &block.mixer);
    let mut within = BTreeMap::new();
    for mixer in mixers() {
        let floats = mixer.buffer_floats(hidden, rows);
        within.entry(mixer.name()).and_modify(|most: &mut usize| *most = floats.max(*most)).or_insert(floats);
    }
    let choices = mixers().map(|mixer| mixer.choice_bytes(rows, spec.max_position_embeddings));
    let blocks = spec.layers.iter().flat_map(|layer| &layer.blocks);
    let inputs = blocks.map(|block| block.mixer.longest_input(block.input.columns(hidden))).max().unwrap_or(0);
    let embedding = if spec.reads_embedding(0) { hidden } else { 0 };
    // Several streams; the one that blocks run on, and what is made of them by mixes and at the beginning.
    let spans = || spec.layers.iter().flat_map(|layer| &layer.spans);
    let (streams, ended, inputs) = match &spec.streams {
        None => (0, 0, inputs),
        Some(StreamsSpec { count, ends }) => {
            let mixes = spans().map(|span| span.mix.floats(*count, hidden)).max().unwrap_or(0);
            let longest = spans().map(|span| span.mix.longest_input(*count, hidden)).max().unwrap_or(0);
            let inputs = inputs.max(longest).max(ends.longest_input(*count, hidden));
            let (begin, end) = (ends.begin_floats(hidden), ends.end_floats(*count, hidden));
            // Before the lm_head: the streams of its rows, and what is made of them.
            (count * hidden + hidden + mixes + begin, count * hidden + end, inputs)
        }
    };
    let kept = hidden + embedding + streams;
    let floats = rows.saturating_mul(kept + rotary_dims + between)
        + within.values().sum::<usize>()
        + logit_rows.saturating_mul(hidden + ended + spec.vocab_size);
    let bytes = floats as f64 * size_of::<f32>() as f64 + rows as f64 * inputs as f64 * QUANTIZED_BYTES;
    bytes as u64 + choices.max().unwrap_or(0)
}

/// Returns the number of rows of `hidden_size` floats per token between the blocks of a layer: a normed input and an
/// output for each of the blocks that are parallel, and what a block reads besides the residual stream.
fn between_blocks(layer: &LayerSpec) -> usize {
    let groups = layer.blocks.chunk_by(|_, next| next.parallel);
    let of_group = |group: &[BlockSpec]| {
        let columns = group[0].input.columns(1);
        let gathered = if group[0].input == BlockInput::Stream { 0 } else { columns + 1 };
        let rows = group.len() + columns * group.iter().filter(|block| block.norm.is_some()).count() + gathered;
        rows * group[0].mixer.streams()
    };
    groups.map(of_group).max().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroUsize;
    use std::sync::Arc;

    use ferrule_kernels::arch::Isa;
    use ferrule_kernels::{Cancel, Format, PackedMatrix, Pool, machine};
    use serde_json::{Value, json};

    use super::*;
    use crate::batch::LanguageModel;
    use crate::specs;
    use crate::stage::TensorParallelGroup;
    use crate::transformer::{LoadOptions, Transformer};

    /// Three specs: attention heads with a window in one layer; latent attention with an untied lm_head; the same with
    /// experts in one layer.
    fn specimens() -> [Value; 3] {
        let mut windows = specs::llama(96, 3);
        windows["layers"][1]["blocks"][0]["mixer"]["window"] = json!(40);
        let mut latent = specs::llama(80, 3);
        latent["lm_head"] = json!({"tied": false, "bias": true, "scale": 1.0, "softcap": null});
        latent["ropes"][0]["rotary_dim"] = json!(8);
        let norm = latent["final_norm"].clone();
        for layer in latent["layers"].as_array_mut().unwrap() {
            layer["blocks"][0]["mixer"]["projections"] = json!({
                "type": "latent", "query_rank": 24, "kv_rank": 32, "nope_dim": 16, "rope_dim": 8, "value_dim": 12,
                "norm": norm, "bias": true, "split": false,
            });
        }
        let mut experts = latent.clone();
        let expert = windows["layers"][0]["blocks"][1]["mixer"].clone();
        experts["layers"][1]["blocks"][1]["mixer"] = json!({
            "type": "experts", "experts": 6, "experts_per_token": 2, "expert": expert,
            "router": {
                "scoring": "sigmoid", "normalize": true, "scale": 2.5, "bias": true, "correction_bias": true,
                "groups": 1, "groups_chosen": 1, "group_score": "top2",
            },
            "shared": expert, "shared_gate": true,
        });
        [windows, latent, experts]
    }

    fn spec(json: &Value) -> ModelSpec {
        ModelSpec::from_json(&json.to_string()).unwrap()
    }

    #[test]
    fn measured_sizes_equal_those_of_a_loaded_model() {
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
    fn sizes_per_token_exclude_untied_embeddings_and_idle_experts() {
        let int8 = Quantization::named("int8").unwrap();
        let sizes = |json: &Value| measure(&spec(json), Source::Random, int8, KvFormat::F16).unwrap().weights;
        let [windows, latent, experts] = specimens();
        let tied = sizes(&windows);
        assert_eq!(tied.parameters, tied.parameters_per_token);
        assert_eq!(tied.weight_bytes, tied.weight_bytes_per_token);
        assert_eq!(tied.layer_parameters, tied.parameters - 96 * 64);
        let untied = sizes(&latent);
        assert_eq!(untied.parameters - untied.layer_parameters, 2 * 80 * 64);
        let embedding = PackedMatrix::bytes_for(Format::Int8, 80, 64).unwrap();
        assert_eq!(untied.weight_bytes - untied.weight_bytes_per_token, embedding);
        let sparse = sizes(&experts);
        assert_eq!(sparse.parameters - sparse.parameters_per_token, 4 * 3 * 64 * 96);
        assert_eq!(sparse.layer_parameters - sparse.layer_parameters_per_token, 4 * 3 * 64 * 96);
        assert!(sparse.weight_bytes_per_token < sparse.weight_bytes - 4 * 3 * 64 * 96);
        // Vectors besides those of the latent layers: the router's bias and its correction bias.
        assert_eq!(sparse.vector_bytes - untied.vector_bytes, 4 * 2 * 6);
    }

    #[test]
    fn the_parts_of_one_machine_must_fit_its_memory_together() {
        // Nothing is allocated. The embeddings of `models` models have six tenths of the memory.
        const MAX_VOCAB: u64 = 1 << 28;
        let rows = machine::available_memory() / 10 * 6 / (64 * 4);
        let models = rows.div_ceil(MAX_VOCAB);
        let spec = spec(&specs::llama((rows / models / 16 * 16) as usize, 2));
        let stage = |stage: usize| StagePart { layers: stage..stage + 1, stage, stages: 2, group: None };
        let group = |rank| Some(TensorParallelGroup::unconnected(rank, 2));
        let rank = |rank| StagePart { layers: 1..2, stage: 0, stages: 1, group: group(rank) };
        let check = |count: u64, parts: &dyn Fn() -> Vec<StagePart>| {
            check_memory(&spec, (0..count * models).flat_map(|_| parts()), Source::Random, Quantization::F32)
        };
        check(1, &|| vec![stage(0), stage(1)]).unwrap();
        check(1, &|| vec![rank(0), rank(1), rank(0)]).unwrap();
        for parts in [&(|| vec![stage(0), stage(1)]) as &dyn Fn() -> _, &|| vec![rank(0), rank(1)]] {
            let LoadError::Weights { needs, available } = check(2, parts).unwrap_err() else { panic!("another error") };
            assert!(needs > available && needs < 2 * available, "{needs} {available}");
        }
    }

    #[test]
    fn shared_weights_are_stored_once_and_read_and_multiplied_by_each_layer() {
        let plain = specs::llama(96, 3);
        let mut shared = plain.clone();
        for layer in [1, 2] {
            shared["layers"][layer]["blocks"][1]["weights_of"] = json!(0);
            shared["layers"][layer]["blocks"][1]["low_rank"] = json!([{"outputs": ["gate", "up"], "rank": 16}]);
        }
        let (options, pool) = (
            LoadOptions { quantization: Quantization::F32, kv_format: KvFormat::F32, isa: Isa::best() },
            Arc::new(Pool::new(NonZeroUsize::MIN)),
        );
        let sizes =
            |json: &Value| measure(&spec(json), Source::Random, Quantization::F32, KvFormat::F32).unwrap().weights;
        let (plain, found) = (sizes(&plain), sizes(&shared));
        // The rank is that of whole panels, which have no padding.
        let (network, additions) = (3 * 64 * 96, 16 * (64 + 2 * 96));
        assert_eq!(found.parameters, plain.parameters - 2 * network + 2 * additions);
        assert_eq!(plain.vector_bytes - found.vector_bytes, 2 * 4 * 64);
        assert_eq!(found.weight_bytes_per_token - plain.weight_bytes_per_token, 2 * 4 * additions);
        assert_eq!(found.layer_parameters_per_token - plain.layer_parameters_per_token, 2 * additions);
        let loaded =
            Transformer::load(spec(&shared), Source::Random, options, pool, &Cancel::new(), &mut |_, _| {}).unwrap();
        assert_eq!(loaded.weight_sizes(), found);
    }

    #[test]
    fn buffers_grow_with_rows_and_with_logits() {
        for json in specimens() {
            let (spec, vocab) = (spec(&json), json["vocab_size"].as_u64().unwrap());
            let one = buffer_bytes(&spec, 64, 0);
            assert_eq!(buffer_bytes(&spec, 64, 3) - one, 4 * 3 * (64 + vocab));
            assert_eq!(buffer_bytes(&spec, 256, 0), 4 * one);
            // The network processes rows in chunks.
            let [more, most] = [1024, 2048].map(|rows| buffer_bytes(&spec, rows, 0));
            assert!(16 * one > more && more < most && most < 2 * more);
        }
    }
}
