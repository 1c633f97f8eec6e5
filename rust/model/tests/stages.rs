//! Pipeline stages: in a row they compute the bits of the whole model, and each holds only its layers; so do the workers
//! that divide the rows of matrices.

use std::num::NonZeroUsize;
use std::ops::Range;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use crate::specs;
use ferrule_kernels::arch::Isa;
use ferrule_kernels::kv::{KvFormat, PAGE_TOKENS, PageId};
use ferrule_kernels::{Cancel, Pool};
use ferrule_model::{
    Batch, KvGroup, LanguageModel, LastOutput, LoadError, LoadOptions, LogitRows, ModelSpec, Needs, Quantization,
    SequenceChunk, Source, Stage, StageError, StagePart, StageRunError, StepError, TensorParallelGroup, Transformer,
    divide_layers, measure,
};
use serde_json::{Value, json};

/// Number of tokens, which is not divisible by the number of stages or by the rows of a panel.
const VOCABULARY: usize = 101;
/// Numbers of tokens of the sequences of a batch.
const LENGTHS: [usize; 3] = [44, 7, 19];
/// Pages per sequence and group; the first three of a group of state are used.
const PAGES: usize = 3;

/// Returns a dense model, with a window in two layers.
fn dense() -> Value {
    let mut spec = specs::llama(VOCABULARY, 4);
    for layer in [1, 3] {
        spec["layers"][layer]["blocks"][0]["mixer"]["window"] = json!(20);
    }
    spec
}

/// Returns a model with experts in all layers but the first, and a separate lm_head.
fn experts() -> Value {
    let mut spec = specs::llama(VOCABULARY, 4);
    spec["lm_head"] = json!({"tied": false, "bias": true, "scale": 0.5, "softcap": 20.0});
    for layer in 1..4 {
        let expert = spec["layers"][layer]["blocks"][1]["mixer"].clone();
        spec["layers"][layer]["blocks"][1]["mixer"] = json!({
            "type": "experts", "experts": 6, "experts_per_token": 2, "expert": expert, "shared": null,
            "shared_gate": false,
            "router": {
                "scoring": "softmax", "normalize": true, "scale": 1.0, "bias": false, "correction_bias": false,
                "groups": 1, "groups_chosen": 1, "group_score": "max"
            }
        });
    }
    spec
}

/// Returns a hybrid model: attention in two layers, the last two of which share keys and values, and a state in the
/// others.
fn hybrid() -> Value {
    let mut spec = specs::llama(VOCABULARY, 5);
    for layer in [0, 2] {
        let block = &mut spec["layers"][layer]["blocks"][0];
        block["name"] = json!("convolution");
        block["mixer"] = json!({"type": "short_convolution", "channels": 64, "taps": 4, "bias": true});
    }
    spec["layers"][4]["blocks"][0]["mixer"]["kv_layer"] = json!(3);
    spec
}

/// Returns a model with three residual streams, whose layers read the embedding and a table of the tokens.
fn streams() -> Value {
    let mut spec = specs::llama(VOCABULARY, 4);
    let norm = spec["final_norm"].clone();
    spec["streams"] = json!({"count": 3, "ends": {"type": "projected", "min_square": 1e-5}});
    spec["tables"] = json!([{"rows": VOCABULARY, "columns": 48}]);
    for (index, layer) in spec["layers"].as_array_mut().unwrap().iter_mut().enumerate() {
        layer["blocks"].as_array_mut().unwrap().push(json!({
            "name": "per_layer", "norm": null, "post_norm": norm, "sum_norm": null, "parallel": false,
            "residual_scale": 1.0, "residual_after_norm": false,
            "mixer": {
                "type": "per_layer_embedding", "width": 12, "activation": "gelu_tanh", "table": 0,
                "first_column": 12 * index, "table_scale": 2.0, "projection_scale": 0.125, "norm": norm,
                "sum_scale": 0.5
            }
        }));
        layer["spans"] = json!([
            {"name": "altup", "blocks": 2, "mix": {"type": "alternating", "active": 1, "norm": norm, "clip": 120.0}},
            {"name": "side", "blocks": 1, "mix": {"type": "side", "from_stream": 1, "scaled": true}},
        ]);
    }
    spec
}

fn read(json: &Value) -> ModelSpec {
    ModelSpec::from_json(&json.to_string()).unwrap()
}

fn options() -> LoadOptions {
    LoadOptions { quantization: Quantization::named("int8").unwrap(), kv_format: KvFormat::F16, isa: Isa::best() }
}

fn pool() -> Arc<Pool> {
    Arc::new(Pool::new(NonZeroUsize::new(2).unwrap()))
}

/// Returns a model whose layers attend to compressed entries, with three streams that are mixed.
fn compressed() -> Value {
    let mut spec = specs::llama(VOCABULARY, 4);
    let norm = spec["final_norm"].clone();
    let bare = json!({"type": "rms", "eps": 1e-6, "weight_offset": 0.0, "weight": false});
    spec["streams"] = json!({"count": 3, "ends": {"type": "weighted", "norm": bare, "eps": 1e-6}});
    for (index, layer) in spec["layers"].as_array_mut().unwrap().iter_mut().enumerate() {
        let mix = json!({"type": "sinkhorn", "norm": bare, "eps": 1e-6, "iterations": 20});
        layer["spans"] = json!([
            {"name": "attention_streams", "blocks": 1, "mix": mix},
            {"name": "ffn_streams", "blocks": 1, "mix": mix},
        ]);
        for block in layer["blocks"].as_array_mut().unwrap() {
            block["norm"] = json!(null);
            block["stream_scale"] = json!(0.0);
        }
        let compression = [
            json!(null),
            json!({"block": 4, "overlap": true, "indexer": {"heads": 2, "head_dim": 16, "entries": 3}}),
            json!({"block": 8, "overlap": false, "indexer": null}),
        ];
        layer["blocks"][0]["mixer"] = json!({
            "type": "compressed_attention", "heads": 4, "head_dim": 16, "scale": 0.25, "window": 20, "query_rank": 24,
            "norm": norm, "query_norm": bare, "rope": 0, "output_groups": 2, "output_rank": 8,
            "compression": compression[index % 3],
        });
    }
    spec
}

/// Returns the pages of a model's groups for a sequence of the batch, which has read `steps` chunks.
fn pages(groups: &[KvGroup], sequence: usize, steps: usize) -> Vec<Vec<PageId>> {
    let own = |page: usize| (sequence * PAGES + page) as PageId;
    let of_group = |group: &KvGroup| match group.is_state() {
        true => vec![own(steps % 2), own(1 - steps % 2)],
        false => (0..PAGES).rev().map(own).collect(),
    };
    groups.iter().map(of_group).collect()
}

/// Runs all sequences in steps of at most `rows` tokens each, and returns the results of all steps.
fn run(
    groups: &[KvGroup],
    rows: usize,
    logits: LogitRows,
    step: &mut dyn FnMut(Batch<'_>) -> Vec<f32>,
) -> Vec<Vec<f32>> {
    let tokens = LENGTHS.map(|length| (0..length).map(|i| ((i * i + length) % VOCABULARY) as u32).collect::<Vec<_>>());
    let mut results = Vec::new();
    for first in (0..LENGTHS[0]).step_by(rows) {
        let left = || tokens.iter().enumerate().filter(|(_, tokens)| first < tokens.len());
        let pages: Vec<_> = left().map(|(sequence, _)| pages(groups, sequence, first / rows)).collect();
        let chunks: Vec<_> = left()
            .zip(&pages)
            .map(|((_, tokens), pages)| SequenceChunk {
                tokens: &tokens[first..tokens.len().min(first + rows)],
                first_position: first,
                prompt_len: tokens.len(),
                pages,
                token_types: &[],
                features: &[],
                logits,
                adapter: None,
            })
            .collect();
        results.push(step(Batch { sequences: &chunks }));
    }
    results
}

/// Returns the part of stage `stage` of `stages`, without a group.
fn part(layers: Range<usize>, stage: usize, stages: usize) -> StagePart {
    StagePart { layers, stage, stages, group: None }
}

fn load_stage(json: &Value, part: StagePart) -> Result<Stage, LoadError> {
    Stage::load(read(json), part, Source::Random, options(), pool(), &Cancel::new(), &mut |_, _| {})
}

/// Loads the stages between `cuts`.
fn load_stages(json: &Value, cuts: &[usize]) -> Vec<Stage> {
    let stages = cuts.windows(2).enumerate();
    let parts = stages.map(|(stage, cut)| part(cut[0]..cut[1], stage, cuts.len() - 1));
    parts.map(|part| load_stage(json, part).unwrap()).collect()
}

fn load_whole(json: &Value) -> Transformer {
    Transformer::load(read(json), Source::Random, options(), pool(), &Cancel::new(), &mut |_, _| {}).unwrap()
}

fn allocated(groups: &[KvGroup]) -> Vec<usize> {
    vec![PAGES * LENGTHS.len(); groups.len()]
}

/// Returns what the first stage reads: the rows of the tokens, each from the stage that has it.
fn embedded(stages: &[Stage], batch: Batch<'_>) -> Vec<f32> {
    let tokens = batch.sequences.iter().flat_map(|sequence| sequence.tokens);
    let look_up = |token: &u32| {
        let stage = stages.iter().find(|stage| stage.own_tokens().contains(&(*token as usize))).unwrap();
        stage.look_up(&[*token]).unwrap()
    };
    let rows: Vec<f32> = tokens.clone().flat_map(look_up).collect();
    assert_eq!(rows.len(), tokens.count() * stages[0].input_width());
    rows
}

/// Returns the logits of all stages side by side.
fn joined_logits(stages: &[Stage], rows: &[f32]) -> Vec<f32> {
    let mut parts = Vec::new();
    for stage in stages.iter().filter(|stage| !stage.own_tokens().is_empty()) {
        let mut logits = Vec::new();
        stage.logits(rows, &Cancel::new(), &mut logits).unwrap();
        parts.push((stage.own_tokens().len(), logits));
    }
    let rows = parts[0].1.len() / parts[0].0;
    (0..rows)
        .flat_map(|row| parts.iter().flat_map(move |(own, logits)| &logits[row * own..][..*own]))
        .copied()
        .collect()
}

/// Checks that the stages between `cuts` compute the bits of the whole model, with steps of several sizes.
fn check(json: &Value, cuts: &[usize]) {
    let cancel = Cancel::new();
    for (rows, wanted) in [(LENGTHS[0], LogitRows::All), (5, LogitRows::Last), (17, LogitRows::None)] {
        let mut whole = load_whole(json);
        let groups = whole.kv_groups().to_vec();
        whole.allocate_kv(&allocated(&groups)).unwrap();
        let expected = run(&groups, rows, wanted, &mut |batch| {
            let mut logits = Vec::new();
            whole.forward(batch, &cancel, &mut logits).unwrap();
            logits
        });
        let mut stages = load_stages(json, cuts);
        for stage in &mut stages {
            let groups = stage.kv_groups().to_vec();
            stage.allocate_kv(&allocated(&groups)).unwrap();
        }
        let found = run(&groups, rows, wanted, &mut |batch| {
            let mut hidden = embedded(&stages, batch);
            for stage in &mut stages {
                let input = std::mem::take(&mut hidden);
                stage.forward(batch, &input, LastOutput::Logits, &cancel, &mut hidden).unwrap();
            }
            joined_logits(&stages, &hidden)
        });
        assert_eq!(found, expected, "{cuts:?}, steps of {rows} tokens");
        let numbers = expected.iter().flatten();
        assert_eq!(numbers.clone().count() > 0, wanted != LogitRows::None);
        assert!(numbers.clone().all(|logit| logit.is_finite()));
        // Together the stages have the memory of the whole model, in the same groups.
        for (index, group) in groups.iter().enumerate() {
            let of_stages = || stages.iter().map(|stage| stage.kv_groups()[index].clone());
            assert!(of_stages().all(|part| part.kind == group.kind));
            assert_eq!(of_stages().map(|part| part.layers).sum::<usize>(), group.layers);
            assert_eq!(of_stages().map(|part| part.page_bytes).sum::<u64>(), group.page_bytes);
        }
        // Pages can be copied in groups without a layer here too.
        stages.iter_mut().for_each(|stage| (0..groups.len()).for_each(|group| stage.copy_page(group, 0, 1)));
    }
}

#[test]
fn stages_of_a_dense_model_compute_the_bits_of_the_whole() {
    check(&dense(), &[0, 2, 4]);
    check(&dense(), &[0, 1, 2, 4]);
    // A narrow embedding is projected, scaled and normed in the first stage.
    let mut narrow = dense();
    narrow["embedding"]["width"] = json!(32);
    narrow["embedding"]["scale"] = json!(8.0);
    narrow["embedding"]["norm"] = narrow["final_norm"].clone();
    narrow["lm_head"] = json!({"tied": true, "bias": true, "scale": 0.5, "softcap": 20.0});
    check(&narrow, &[0, 3, 4]);
    // More stages than panels of the vocabulary.
    check(&specs::llama(VOCABULARY, 8), &[0, 1, 2, 3, 4, 5, 6, 7, 8]);
}

#[test]
fn each_stage_looks_up_and_multiplies_its_rows_only() {
    for json in [dense(), experts()] {
        let stages = load_stages(&json, &[0, 2, 4]);
        assert_eq!([stages[0].own_tokens(), stages[1].own_tokens()], [0..48, 48..101]);
        assert_eq!(stages[1].look_up(&[48, 100]).unwrap().len(), 2 * 64);
        for (stage, token) in [(0, 48), (1, 47), (1, 101)] {
            let error = stages[stage].look_up(&[token]).unwrap_err();
            assert!(matches!(error, StepError::Number { value, .. } if value == token as usize), "{error}");
        }
        let error = stages[0].logits(&[0.0; 65], &Cancel::new(), &mut Vec::new()).unwrap_err();
        assert_eq!(error, StageRunError::LogitInput { width: 64, found: 65 });
    }
    // A single stage does not divide its rows.
    let whole = load_stage(&dense(), part(0..4, 0, 1)).unwrap();
    assert_eq!((whole.own_tokens(), whole.input_width()), (0..0, 0));
    let error = whole.logits(&[0.0; 64], &Cancel::new(), &mut Vec::new()).unwrap_err();
    assert_eq!(error, StageRunError::NoLmHead { found: 64 });
    let error = load_stage(&dense(), part(0..4, 2, 2)).err().unwrap();
    assert!(matches!(error, LoadError::Stage(StageError::Index { index: 2, stages: 2 })), "{error}");
}

#[test]
fn stages_of_a_mixture_of_experts_compute_the_bits_of_the_whole() {
    check(&experts(), &[0, 3, 4]);
}

#[test]
fn stages_of_a_hybrid_model_compute_the_bits_of_the_whole() {
    check(&hybrid(), &[0, 1, 3, 5]);
}

#[test]
fn stages_of_a_model_with_streams_and_token_tables_compute_the_bits_of_the_whole() {
    check(&streams(), &[0, 1, 3, 4]);
}

#[test]
fn stages_of_a_model_with_compressed_attention_compute_the_bits_of_the_whole() {
    check(&compressed(), &[0, 1, 3, 4]);
}

/// Returns the places of `ranks` workers that are connected to each other.
fn groups(ranks: usize) -> Vec<TensorParallelGroup> {
    let mut peers: Vec<Vec<UnixStream>> = (0..ranks).map(|_| Vec::new()).collect();
    for low in 0..ranks {
        for high in low + 1..ranks {
            let (ours, theirs) = UnixStream::pair().unwrap();
            peers[low].push(ours);
            peers[high].push(theirs);
        }
    }
    peers.into_iter().enumerate().map(|(rank, peers)| TensorParallelGroup::new(rank, peers).unwrap()).collect()
}

/// Returns the part of a worker that has rows of all layers.
fn all_layers(json: &Value, group: TensorParallelGroup) -> StagePart {
    StagePart { layers: 0..read(json).layers.len(), stage: 0, stages: 1, group: Some(group) }
}

/// Runs all sequences in steps of `rows` tokens on the worker of a group, which has all layers. Returns the results and
/// the bytes of its weights.
fn run_rows(json: &Value, options: LoadOptions, group: TensorParallelGroup, rows: usize) -> (Vec<Vec<f32>>, u64) {
    let (part, pool, cancel) = (all_layers(json, group), pool(), Cancel::new());
    let mut stage = Stage::load(read(json), part, Source::Random, options, pool, &cancel, &mut |_, _| {}).unwrap();
    let groups = stage.kv_groups().to_vec();
    stage.allocate_kv(&allocated(&groups)).unwrap();
    let results = run(&groups, rows, LogitRows::All, &mut |batch| {
        let mut logits = Vec::new();
        stage.forward(batch, &[], LastOutput::Logits, &cancel, &mut logits).unwrap();
        logits
    });
    (results, stage.weight_sizes().weight_bytes)
}

#[test]
fn workers_that_divide_rows_compute_the_bits_of_one() {
    let f32 = LoadOptions { quantization: Quantization::named("f32").unwrap(), ..options() };
    for (json, options, ranks, rows) in [
        (dense(), options(), 2, LENGTHS[0]),
        (dense(), f32, 3, 1),
        (experts(), options(), 2, 5),
        (experts(), f32, 3, LENGTHS[0]),
        (hybrid(), options(), 3, 5),
        (streams(), options(), 2, 17),
        (compressed(), options(), 3, 17),
    ] {
        let mut whole =
            Transformer::load(read(&json), Source::Random, options, pool(), &Cancel::new(), &mut |_, _| {}).unwrap();
        let kv_groups = whole.kv_groups().to_vec();
        whole.allocate_kv(&allocated(&kv_groups)).unwrap();
        let expected = run(&kv_groups, rows, LogitRows::All, &mut |batch| {
            let mut logits = Vec::new();
            whole.forward(batch, &Cancel::new(), &mut logits).unwrap();
            logits
        });
        let parts: Vec<_> = std::thread::scope(|scope| {
            let json = &json;
            let workers: Vec<_> = groups(ranks)
                .into_iter()
                .map(|group| scope.spawn(move || run_rows(json, options, group, rows)))
                .collect();
            workers.into_iter().map(|worker| worker.join().unwrap()).collect()
        });
        for (rank, (results, _)) in parts.iter().enumerate() {
            assert_eq!(*results, expected, "rank {rank} of {ranks}, steps of {rows} tokens");
        }
        let all = whole.weight_sizes().weight_bytes as f64;
        assert!(
            parts.iter().all(|(_, bytes)| (*bytes as f64) < 0.75 * all),
            "{:?} of {all}",
            parts.iter().map(|(_, bytes)| bytes).collect::<Vec<_>>()
        );
    }
}

#[test]
fn workers_that_run_different_batches_fail_and_stay_so() {
    let run = |group: TensorParallelGroup, tokens: &[u32]| {
        let (json, pool, cancel) = (dense(), pool(), Cancel::new());
        let part = all_layers(&json, group);
        let mut stage =
            Stage::load(read(&json), part, Source::Random, options(), pool, &cancel, &mut |_, _| {}).unwrap();
        let groups = stage.kv_groups().to_vec();
        stage.allocate_kv(&allocated(&groups)).unwrap();
        let prompt = SequenceChunk {
            tokens,
            first_position: 0,
            prompt_len: tokens.len(),
            pages: &vec![vec![0]; groups.len()],
            token_types: &[],
            features: &[],
            logits: LogitRows::Last,
            adapter: None,
        };
        [(); 2].map(|()| {
            let batch = Batch { sequences: &[prompt] };
            stage.forward(batch, &[], LastOutput::Logits, &cancel, &mut Vec::new()).unwrap_err()
        })
    };
    let [first, second] = groups(2).try_into().ok().unwrap();
    let (lost, differs) = std::thread::scope(|scope| {
        // The first worker has the embeddings of all these tokens, so the second one notices the difference.
        let first = scope.spawn(|| run(first, &[0, 1]));
        let differs = run(second, &[0]);
        (first.join().unwrap(), differs)
    });
    let width = read(&dense()).hidden_size;
    let (expected, found) = (width, 2 * width as u64);
    assert_eq!(differs, [(); 2].map(|()| StageRunError::Gather { rank: 0, expected, found }));
    assert_eq!(lost, [(); 2].map(|()| StageRunError::RankLost { rank: 1 }));
}

#[test]
fn the_last_stage_has_the_hidden_states_of_the_whole() {
    let (json, cancel) = (dense(), Cancel::new());
    let (mut whole, mut stages) = (load_whole(&json), load_stages(&json, &[0, 1, 4]));
    let groups = whole.kv_groups().to_vec();
    whole.allocate_kv(&allocated(&groups)).unwrap();
    stages.iter_mut().for_each(|stage| stage.allocate_kv(&allocated(&groups)).unwrap());
    let expected = run(&groups, PAGE_TOKENS, LogitRows::First, &mut |batch| {
        let mut hidden = Vec::new();
        whole.hidden_states(batch, &cancel, &mut hidden).unwrap();
        hidden
    });
    let found = run(&groups, PAGE_TOKENS, LogitRows::First, &mut |batch| {
        let (mut between, mut hidden) = (Vec::new(), embedded(&stages, batch));
        let [first, last] = &mut stages[..] else { panic!("two stages") };
        first.forward(batch, &hidden, LastOutput::HiddenStates, &cancel, &mut between).unwrap();
        last.forward(batch, &between, LastOutput::HiddenStates, &cancel, &mut hidden).unwrap();
        hidden
    });
    assert_eq!(found, expected);
}

#[test]
fn stages_hold_only_their_weights() {
    let (int8, f16) = (options().quantization, options().kv_format);
    let mut untied = streams();
    untied["lm_head"]["tied"] = json!(false);
    // Each stage counts the table of the tokens, which stays in its file.
    let of_table = 48 * VOCABULARY as u64;
    for (json, table_numbers) in [(dense(), 0), (experts(), 0), (streams(), of_table), (untied, of_table)] {
        let whole = measure(&read(&json), Source::Random, int8, f16).unwrap().weights;
        let needs =
            |(stage, layers)| Stage::measure(&read(&json), part(layers, stage, 3), Source::Random, int8, f16).unwrap();
        let parts = [(0, 0..1), (1, 1..3), (2, 3..4)].map(needs);
        let sum = |bytes: fn(&Needs) -> u64| parts.iter().map(bytes).sum::<u64>();
        assert_eq!(sum(|part| part.weights.weight_bytes), whole.weight_bytes);
        // Each stage has the whole bias of an lm_head.
        let of_bias = if json["lm_head"]["bias"] == true { 4 * VOCABULARY as u64 } else { 0 };
        assert_eq!(sum(|part| part.weights.vector_bytes), whole.vector_bytes + 2 * of_bias);
        assert_eq!(sum(|part| part.weights.parameters), whole.parameters + 2 * table_numbers);
        assert_eq!(sum(|part| part.weights.weight_bytes_per_token), whole.weight_bytes_per_token);
        let loaded = load_stage(&json, part(1..3, 1, 3)).unwrap();
        assert_eq!((loaded.weight_sizes(), loaded.kv_groups()), (parts[1].weights, parts[1].kv_groups.as_slice()));
        let fingerprints =
            [0..1, 1..3, 1..4].map(|layers| load_stage(&json, part(layers, 1, 3)).unwrap().fingerprint());
        assert_ne!(fingerprints[0], fingerprints[1]);
        assert_ne!(fingerprints[1], fingerprints[2]);
    }
}

#[test]
fn divided_layers_have_the_smallest_largest_stage() {
    let (int8, f16) = (options().quantization, options().kv_format);
    for json in [dense(), experts(), streams()] {
        let spec = read(&json);
        let bytes = |layers: Range<usize>, stage| {
            let weights = Stage::measure(&spec, part(layers, stage, 2), Source::Random, int8, f16).unwrap().weights;
            weights.weight_bytes + weights.vector_bytes
        };
        let larger = |cut: usize| bytes(0..cut, 0).max(bytes(cut..4, 1));
        let found = divide_layers(&spec, Source::Random, int8, 2).unwrap();
        assert_eq!(larger(found[0].end), (1..4).map(larger).min().unwrap(), "{found:?}");
    }
}

#[test]
fn layers_are_divided_by_the_bytes_of_their_weights() {
    let int8 = options().quantization;
    let divide = |json: &Value, stages| divide_layers(&read(json), Source::Random, int8, stages);
    let mut llama = specs::llama(VOCABULARY, 24);
    llama["lm_head"]["tied"] = json!(false);
    let whole = measure(&read(&llama), Source::Random, int8, KvFormat::F16).unwrap().weights;
    let halves = divide(&llama, 2).unwrap();
    assert_eq!(halves, [0..12, 12..24]);
    let bytes = |json: &Value, parts: &[Range<usize>]| -> Vec<u64> {
        let measure = |part| Stage::measure(&read(json), part, Source::Random, int8, KvFormat::F16).unwrap().weights;
        let parts = parts.iter().cloned().enumerate();
        parts.map(|(stage, layers)| measure(part(layers, stage, 2)).weight_bytes).collect()
    };
    assert!(bytes(&llama, &halves).iter().all(|bytes| *bytes as f64 <= 0.55 * whole.weight_bytes as f64));
    // The rows of an embedding with a quarter of the bytes are divided too, tied or not; the first stage has fewer of them.
    for tied in [true, false] {
        llama = specs::llama(4_000, 24);
        llama["lm_head"]["tied"] = json!(tied);
        let whole = measure(&read(&llama), Source::Random, int8, KvFormat::F16).unwrap().weights;
        let halves = divide(&llama, 2).unwrap();
        assert_eq!(halves, [0..12, 12..24]);
        assert!(bytes(&llama, &halves).iter().all(|bytes| *bytes as f64 <= 0.52 * whole.weight_bytes as f64));
        assert_eq!(bytes(&llama, &halves).iter().sum::<u64>(), whole.weight_bytes);
    }
    // The last three layers have experts, each of them much larger than the first.
    assert_eq!(divide(&experts(), 3).unwrap(), [0..2, 2..3, 3..4]);
    // No stage begins between the layers that share keys and values.
    assert_eq!(divide(&hybrid(), 4).unwrap(), [0..1, 1..2, 2..3, 3..5]);
    for stages in [0, 5] {
        let error = divide(&hybrid(), stages).unwrap_err();
        assert!(matches!(error, LoadError::Stage(StageError::Stages { most: 4, layers: 5, .. })), "{error}");
    }
}

#[test]
fn layers_that_read_earlier_ones_stay_in_their_stage() {
    let mut choosing = specs::llama(VOCABULARY, 3);
    choosing["layers"][0]["blocks"][0]["mixer"]["indexer"] = json!({
        "heads": 2, "head_dim": 24, "choice": "each_head", "block": 16, "blocks": 3, "local_blocks": 1,
        "q_norm": null, "k_norm": choosing["final_norm"], "rope": 0
    });
    choosing["layers"][1]["blocks"][0]["mixer"]["selection_layer"] = json!(0);
    let mut shared = specs::llama(VOCABULARY, 3);
    shared["layers"][2]["blocks"][1]["weights_of"] = json!(0);
    for (json, first, layer, what, owner) in
        [(hybrid(), 4, 4, "keys and values", 3), (choosing, 1, 1, "choice of tokens", 0), (shared, 1, 2, "weights", 0)]
    {
        let count = json["layers"].as_array().unwrap().len();
        let error = load_stage(&json, part(first..count, 1, 2)).err().unwrap();
        assert!(
            matches!(&error, LoadError::Stage(found) if *found == StageError::Crossing { first, layer, what, owner })
        );
        let expected =
            format!("cannot begin at layer {first}, because layer {layer} reads the {what} of layer {owner}");
        assert!(error.to_string().contains(&expected), "{error}");
    }
    for range in [2..2, 3..6, Range { start: 5, end: 4 }] {
        let error = load_stage(&hybrid(), part(range.clone(), 1, 2)).err().unwrap();
        let expected = StageError::Range { first: range.start, end: range.end, layers: 5 };
        assert!(matches!(&error, LoadError::Stage(found) if *found == expected), "{error}");
    }
}

#[test]
fn hidden_states_that_do_not_fit_the_batch_are_refused() {
    let mut stage = load_stage(&streams(), part(1..3, 1, 3)).unwrap();
    // Three streams and the embedding, each 64 numbers.
    assert_eq!((stage.input_width(), stage.output_width()), (256, 256));
    let groups = stage.kv_groups().to_vec();
    stage.allocate_kv(&allocated(&groups)).unwrap();
    let chunk = SequenceChunk {
        tokens: &[1, 2],
        first_position: 0,
        prompt_len: 2,
        pages: &pages(&groups, 0, 0),
        token_types: &[],
        features: &[],
        logits: LogitRows::Last,
        adapter: None,
    };
    for found in [0, 511, 513] {
        let (batch, input) = (Batch { sequences: &[chunk] }, vec![0.0; found]);
        let error = stage.forward(batch, &input, LastOutput::Logits, &Cancel::new(), &mut Vec::new()).unwrap_err();
        assert_eq!(error, StageRunError::Input { tokens: 2, expected: 512, found });
    }
}
