//! Specs are untrusted data: an invalid one is an error that names the field, the value and the limit.

use crate::specs;
use ferrule_model::{ModelSpec, SpecError};
use serde_json::{Value, json};

fn spec() -> Value {
    let mut spec = specs::llama(320, 2);
    spec["tensors"]["embedding.weight"] = tensor("embed");
    spec
}

fn tensor(name: &str) -> Value {
    json!({"names": [name], "transposed": false, "part": null, "stack": null})
}

/// Returns the spec with experts in its first layer.
fn experts() -> Value {
    let mut spec = spec();
    spec["layers"][0]["blocks"][1]["mixer"] = json!({
        "type": "experts", "experts": 8, "experts_per_token": 2, "shared": null, "shared_gate": false,
        "expert": {
            "type": "dense", "intermediate_size": 48, "activation": "silu", "gated": true, "bias": false, "clamp": null,
            "gate_scale": 1.0
        },
        "router": {
            "scoring": "softmax", "normalize": true, "scale": 1.0, "bias": false, "correction_bias": false,
            "groups": 4, "groups_chosen": 2, "group_score": "max"
        }
    });
    spec
}

/// Returns the spec with latent attention in its first layer.
fn latent() -> Value {
    let mut spec = spec();
    spec["layers"][0]["blocks"][0]["mixer"]["projections"] = json!({
        "type": "latent", "query_rank": 48, "kv_rank": 32, "nope_dim": 16, "rope_dim": 16, "value_dim": 16,
        "norm": {"type": "rms", "eps": 1e-6, "weight_offset": 0.0, "weight": true}, "bias": false, "split": false
    });
    spec
}

/// Returns the spec with a second layer that reads the keys and values of the first.
fn shared() -> Value {
    let mut spec = spec();
    spec["layers"][1]["blocks"][0]["mixer"]["kv_layer"] = json!(0);
    spec
}

/// Returns the spec with an indexer in the first layer, whose choices the second layer reuses.
fn choosing() -> Value {
    let mut spec = spec();
    spec["layers"][0]["blocks"][0]["mixer"]["indexer"] = json!({
        "heads": 2, "head_dim": 24, "choice": "each_head", "block": 16, "blocks": 3, "local_blocks": 1,
        "q_norm": null, "k_norm": spec["final_norm"], "rope": 0
    });
    spec["layers"][1]["blocks"][0]["mixer"]["selection_layer"] = json!(0);
    spec
}

/// Returns the spec with a block that reads a table.
fn per_layer() -> Value {
    let mut spec = spec();
    let norm = spec["final_norm"].clone();
    spec["tables"] = json!([{"rows": 320, "columns": 24}]);
    let block = json!({
        "name": "per_layer", "norm": null, "post_norm": norm, "sum_norm": null, "parallel": false,
        "residual_scale": 1.0, "residual_after_norm": false,
        "mixer": {
            "type": "per_layer_embedding", "width": 12, "activation": "gelu_tanh", "table": 0, "first_column": 12,
            "table_scale": 2.0, "projection_scale": 0.125, "norm": norm, "sum_scale": 0.5
        }
    });
    spec["layers"][0]["blocks"].as_array_mut().unwrap().push(block);
    spec
}

/// Returns the spec with three residual streams.
fn streams() -> Value {
    let mut spec = spec();
    let norm = spec["final_norm"].clone();
    spec["streams"] = json!({"count": 3, "ends": {"type": "projected", "min_square": 1e-5}});
    for layer in spec["layers"].as_array_mut().unwrap() {
        layer["spans"] = json!([
            {"name": "altup", "blocks": 1, "mix": {"type": "alternating", "active": 1, "norm": norm, "clip": 120.0}},
            {"name": "side", "blocks": 1, "mix": {"type": "side", "from_stream": 1, "scaled": true}},
        ]);
    }
    spec
}

/// Returns the spec with gated hyper-connections of three streams, and an embedding of n-grams on all of them.
fn hyper() -> Value {
    let mut spec = spec();
    let norm = spec["final_norm"].clone();
    let gated = json!({"type": "gated", "norm": norm, "rank": 8});
    spec["streams"] = json!({"count": 3, "ends": gated});
    spec["tables"] = json!([{"rows": 20, "columns": 4, "hashed": true}, {"rows": 16, "columns": 4, "hashed": true}]);
    for layer in spec["layers"].as_array_mut().unwrap() {
        layer["spans"] = json!([{"name": "attention_streams", "blocks": 1, "mix": gated},
            {"name": "ffn_streams", "blocks": 1, "mix": gated}]);
    }
    let ngram = json!({
        "name": "ngram", "norm": null, "post_norm": null, "sum_norm": null, "parallel": false, "residual_scale": 1.0,
        "residual_after_norm": false,
        "mixer": {
            "type": "ngram_embedding", "width": 64, "streams": 3, "first_table": 0, "tables": 2, "columns": 4,
            "multipliers": [3, 5, 7], "hash_rows": [17, 19], "end": 2, "norm": norm, "taps": 4, "dilation": 3
        }
    });
    spec["layers"][0]["blocks"].as_array_mut().unwrap().insert(0, ngram);
    let span = json!({"name": "ngram_streams", "blocks": 1, "mix": {"type": "joined"}});
    spec["layers"][0]["spans"].as_array_mut().unwrap().insert(0, span);
    spec
}

/// Returns the spec with attention to compressed entries, and streams that are mixed, in its layers.
fn compressed() -> Value {
    let mut spec = spec();
    let norm = spec["final_norm"].clone();
    let bare = json!({"type": "rms", "eps": 1e-6, "weight_offset": 0.0, "weight": false});
    spec["streams"] = json!({"count": 3, "ends": {"type": "weighted", "norm": bare, "eps": 1e-6}});
    for layer in spec["layers"].as_array_mut().unwrap() {
        let mix = json!({"type": "sinkhorn", "norm": bare, "eps": 1e-6, "iterations": 20});
        layer["spans"] = json!([{"name": "attention_streams", "blocks": 1, "mix": mix},
            {"name": "ffn_streams", "blocks": 1, "mix": mix}]);
        layer["blocks"][0]["mixer"] = json!({
            "type": "compressed_attention", "heads": 4, "head_dim": 16, "scale": 0.25, "window": 32, "query_rank": 24,
            "norm": norm, "query_norm": bare, "rope": 0, "output_groups": 2, "output_rank": 8,
            "compression": {"block": 4, "overlap": true, "indexer": {"heads": 2, "head_dim": 16, "entries": 8}},
        });
    }
    spec
}

fn with(path: &str, value: Value) -> Result<ModelSpec, SpecError> {
    changed(spec(), path, value)
}

fn changed(mut changed: Value, path: &str, value: Value) -> Result<ModelSpec, SpecError> {
    let (parent, key) = path.rsplit_once('/').unwrap();
    changed.pointer_mut(parent).unwrap()[key] = value;
    ModelSpec::from_json(&changed.to_string())
}

#[test]
fn a_complete_spec_is_read() {
    let read = ModelSpec::from_json(&spec().to_string()).unwrap();
    assert_eq!((read.layers.len(), read.tensor("embedding.weight").unwrap().names[0].as_str()), (2, "embed"));
    assert!(ModelSpec::from_json(&experts().to_string()).is_ok());
    assert!(ModelSpec::from_json(&latent().to_string()).is_ok());
    assert!(ModelSpec::from_json(&shared().to_string()).is_ok());
    assert!(ModelSpec::from_json(&choosing().to_string()).is_ok());
    assert!(ModelSpec::from_json(&per_layer().to_string()).is_ok());
    assert!(ModelSpec::from_json(&streams().to_string()).is_ok());
    assert!(ModelSpec::from_json(&hyper().to_string()).is_ok());
    assert!(ModelSpec::from_json(&compressed().to_string()).is_ok());
    assert_eq!(read.tensor("lm_head.weight").cloned(), Err(SpecError::Role { role: "lm_head.weight".to_owned() }));
}

#[test]
fn unknown_fields_and_variants_are_refused_by_name() {
    for (path, value) in [
        ("/layers/0/blocks/0/mixer/temperature", json!(true)),
        ("/layers/0/blocks/0/mixer/projections/kv_lora_rank", json!(32)),
        ("/layers/1/blocks/1/mixer/experts", json!(8)),
        ("/layers/0/blocks/1/parallel_residual", json!(true)),
        ("/ropes/0/mrope_section", json!([1, 2])),
        ("/lm_head/logit_softcap", json!(30.0)),
        ("/final_norm/sandwich", json!(true)),
        ("/logit_scale", json!(2.0)),
        ("/ropes/0/scaling/short_factor", json!([1.0])),
    ] {
        let (_, name) = path.rsplit_once('/').unwrap();
        let error = with(path, value).unwrap_err().to_string();
        assert!(error.contains(name), "{path}: {error}");
    }
    for (path, name) in [
        ("/layers/0/blocks/1/mixer/activation", "swish"),
        ("/layers/0/blocks/1/mixer/type", "mixture"),
        ("/ropes/0/scaling/type", "ntk"),
    ] {
        let error = with(path, json!(name)).unwrap_err().to_string();
        assert!(error.contains(name), "{path}: {error}");
    }
}

#[test]
fn numbers_outside_their_limits_are_named() {
    for (path, value) in [
        ("/vocab_size", json!(0)),
        ("/hidden_size", json!(1u64 << 40)),
        ("/max_position_embeddings", json!(0)),
        ("/embedding/scale", json!(1e39)),
        ("/embedding/width", json!(0)),
        ("/embedding/positions", json!({"type": "learned", "rows": 257, "offset": 2})),
        ("/layers/0/blocks/1/input_scale", json!(1e39)),
        ("/layers/0/blocks/1/residual_scale", json!(1e39)),
        ("/layers/0/blocks/1/stream_scale", json!(1e39)),
        ("/layers/0/blocks/0/input", json!("output")),
        ("/layers/0/blocks/1/input", json!("stream_and_embedding")),
        ("/layers/0/blocks/1/low_rank", json!([{"outputs": ["up"], "rank": 0}])),
        ("/layers/0/blocks/1/weights_of", json!(0)),
        ("/layers/1/blocks/1/weights_of", json!(1)),
        ("/layers/0/blocks/0/mixer/heads", json!(0)),
        ("/layers/0/blocks/0/mixer/scale", json!(1e39)),
        ("/layers/0/blocks/0/mixer/softcap", json!(0.0)),
        ("/layers/0/blocks/0/mixer/alibi_slopes", json!([0.5, 0.25])),
        ("/layers/0/blocks/0/mixer/projections/kv_heads", json!(0)),
        ("/layers/0/blocks/0/mixer/projections/kv_heads", json!(3)),
        ("/layers/0/blocks/0/mixer/projections/clip", json!(-1.0)),
        ("/layers/1/blocks/0/mixer/projections/key_dim", json!(1u64 << 27)),
        ("/layers/0/blocks/0/mixer/rope", json!(1)),
        ("/layers/0/blocks/0/mixer/window", json!(0)),
        ("/layers/0/blocks/0/mixer/chunk", json!(0)),
        ("/layers/0/blocks/0/mixer/query_growth", json!({"beta": 0.1, "length": 0, "offset": 0})),
        (
            "/layers/0/blocks/0/mixer/output_norm",
            json!({"type": "rms", "eps": -1.0, "weight_offset": 0.0, "weight": true}),
        ),
        (
            "/layers/0/blocks/1/mixer/inner_norm",
            json!({"type": "rms", "eps": -1.0, "weight_offset": 0.0, "weight": true}),
        ),
        ("/layers/0/blocks/1/mixer/gate_scale", json!(1e39)),
        ("/layers/0/blocks/1/mixer/gate_cutoff", json!(1e39)),
        ("/layers/0/blocks/1/mixer/xielu", json!({"beta": 1e39, "eps": 0.0})),
        ("/layers/0/blocks/1/mixer/xielu", json!({"beta": 0.5, "eps": 0.0, "alphas": [0.0, 1e39]})),
        ("/layers/0/blocks/1/mixer/intermediate_size", json!(0)),
        ("/ropes/0/rotary_dim", json!(15)),
        ("/ropes/0/rotary_dim", json!(18)),
        ("/ropes/0/theta", json!(0.0)),
        ("/ropes/0/scaling", json!({"type": "linear", "factor": 0.0})),
        (
            "/ropes/0/scaling",
            json!({
                "type": "longrope", "short_factor": vec![1.0; 8], "long_factor": vec![1.0; 7],
                "original_max_position_embeddings": 32, "attention_factor": 1.0
            }),
        ),
        (
            "/ropes/0/scaling",
            json!({
                "type": "longrope", "short_factor": vec![1.0; 8], "long_factor": vec![1.0; 8],
                "original_max_position_embeddings": 32, "attention_factor": 1.0, "long_attention_factor": 0.0
            }),
        ),
        ("/final_norm/eps", json!(-1.0)),
        ("/lm_head/softcap", json!(-30.0)),
        ("/tensors/embedding.weight/names", json!([])),
        ("/tensors/embedding.weight/part", json!({"first": 2, "rows": 2, "stride": 3})),
        ("/tensors/embedding.weight/stack", json!({"index": 4, "of": 4})),
        ("/layers", json!([])),
    ] {
        check(spec(), path, &value);
    }
    for (path, value) in [
        ("/layers/0/blocks/1/mixer/experts", json!(0)),
        ("/layers/0/blocks/1/mixer/experts_per_token", json!(5)),
        ("/layers/0/blocks/1/mixer/expert/intermediate_size", json!(0)),
        ("/layers/0/blocks/1/mixer/router/groups", json!(3)),
        ("/layers/0/blocks/1/mixer/router/groups_chosen", json!(5)),
        ("/layers/0/blocks/1/mixer/router/scale", json!(1e39)),
        ("/layers/0/blocks/1/mixer/router/logit_scale", json!(1e39)),
        ("/layers/0/blocks/1/mixer/latent", json!({"width": 0, "bias": false})),
        ("/layers/0/blocks/1/mixer/shared_gate", json!(true)),
    ] {
        check(experts(), path, &value);
    }
    for (path, value) in [
        ("/layers/0/blocks/0/mixer/kv_layer", json!(0)),
        ("/layers/1/blocks/0/mixer/kv_layer", json!(2)),
        ("/layers/1/blocks/0/mixer/projections/values_are_keys", json!(true)),
        ("/layers/1/blocks/0/mixer/projections/v_norm", spec()["final_norm"].clone()),
    ] {
        check(shared(), path, &value);
    }
    for (path, value) in [
        ("/layers/0/blocks/0/mixer/indexer/heads", json!(3)),
        ("/layers/0/blocks/0/mixer/indexer/head_dim", json!(0)),
        ("/layers/0/blocks/0/mixer/indexer/block", json!(0)),
        ("/layers/0/blocks/0/mixer/indexer/blocks", json!(0)),
        ("/layers/0/blocks/0/mixer/indexer/local_blocks", json!(4)),
        ("/layers/0/blocks/0/mixer/indexer/rope", json!(1)),
        ("/layers/0/blocks/0/mixer/window", json!(8)),
        ("/layers/0/blocks/0/mixer/chunk", json!(8)),
        ("/layers/0/blocks/0/mixer/alibi_slopes", json!([0.5, 0.5, 0.5, 0.5])),
        ("/layers/0/blocks/0/mixer/selection_layer", json!(0)),
        ("/layers/1/blocks/0/mixer/window", json!(8)),
        ("/layers/1/blocks/0/mixer/selection_layer", json!(1)),
    ] {
        check(choosing(), path, &value);
    }
    for (path, value) in [
        ("/streams/count", json!(1)),
        ("/streams/ends/min_square", json!(1e39)),
        ("/streams", Value::Null),
        ("/layers/1/spans", json!([])),
        ("/layers/0/spans/0/name", json!("ffn")),
        ("/layers/0/spans/0/name", json!("side")),
        ("/layers/0/spans/0/blocks", json!(0)),
        ("/layers/0/spans/1/blocks", json!(2)),
        ("/layers/0/blocks/1/parallel", json!(true)),
        ("/layers/0/spans/0/mix/active", json!(3)),
        ("/layers/0/spans/0/mix/clip", json!(0.0)),
        ("/layers/0/spans/1/mix/from_stream", json!(3)),
    ] {
        let error = changed(streams(), path, value.clone()).unwrap_err();
        assert!(matches!(error, SpecError::Number { .. }), "{path} = {value}: {error}");
    }
    for (path, value) in [
        ("/streams/ends/rank", json!(0)),
        ("/layers/1/spans/0/mix/rank", json!(0)),
        ("/layers/0/blocks/0/mixer/streams", json!(2)),
        ("/layers/0/blocks/0/mixer/width", json!(32)),
        ("/layers/0/blocks/0/mixer/tables", json!(3)),
        ("/layers/0/blocks/0/mixer/tables", json!(0)),
        ("/layers/0/blocks/0/mixer/columns", json!(5)),
        ("/layers/0/blocks/0/mixer/multipliers", json!([3])),
        ("/layers/0/blocks/0/mixer/hash_rows", json!([17])),
        ("/layers/0/blocks/0/mixer/hash_rows", json!([17, 20])),
        ("/layers/0/blocks/0/mixer/hash_rows", json!([17, 0])),
        ("/layers/0/blocks/0/mixer/taps", json!(0)),
        ("/layers/0/blocks/0/mixer/dilation", json!(0)),
        ("/layers/0/blocks/0/mixer/end", json!(u32::MAX)),
        ("/layers/0/blocks/0/norm", spec()["final_norm"].clone()),
        ("/layers/0/spans/0/mix", json!({"type": "gated", "norm": spec()["final_norm"], "rank": 8})),
        ("/layers/0/spans/1/mix", json!({"type": "joined"})),
        ("/tables/0/hashed", json!(false)),
        ("/tables/1/rows", json!(15)),
        ("/tables/1/rows", json!(21)),
        ("/tables/0/rows", json!((1u64 << 32) + 1)),
    ] {
        let error = changed(hyper(), path, value.clone()).unwrap_err();
        assert!(matches!(error, SpecError::Number { .. }), "{path} = {value}: {error}");
    }
    changed(hyper(), "/tables/0/rows", json!(1u64 << 32)).unwrap();
    let mixer = "/layers/0/blocks/0/mixer";
    for (path, value) in [
        ("/streams/ends/eps".to_owned(), json!(0.0)),
        ("/layers/0/spans/0/mix/iterations".to_owned(), json!(0)),
        ("/layers/0/spans/0/mix/iterations".to_owned(), json!(1001)),
        (format!("{mixer}/heads"), json!(3)),
        (format!("{mixer}/head_dim"), json!(8)),
        (format!("{mixer}/window"), json!(0)),
        (format!("{mixer}/rope"), json!(1)),
        (format!("{mixer}/output_groups"), json!(0)),
        (format!("{mixer}/compression/block"), json!(3)),
        (format!("{mixer}/compression/block"), json!(24)),
        (format!("{mixer}/compression/indexer/head_dim"), json!(8)),
        (format!("{mixer}/compression/indexer/entries"), json!(0)),
        (
            "/ropes/0/scaling".to_owned(),
            json!({"type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 32}),
        ),
    ] {
        let error = changed(compressed(), &path, value.clone()).unwrap_err();
        assert!(matches!(error, SpecError::Number { .. }), "{path} = {value}: {error}");
    }
    for (path, value) in [
        ("/tables/0/rows", json!(0)),
        ("/tables/0/rows", json!((1u64 << 28) + 1)),
        ("/layers/0/blocks/2/mixer/table", json!(1)),
        ("/layers/0/blocks/2/mixer/first_column", json!(13)),
        ("/layers/0/blocks/2/mixer/width", json!(0)),
        ("/layers/0/blocks/2/mixer/sum_scale", json!(1e39)),
    ] {
        check(per_layer(), path, &value);
    }
    for (path, value) in [
        ("/layers/0/blocks/0/mixer/projections/query_rank", json!(0)),
        ("/layers/0/blocks/0/mixer/projections/kv_rank", json!(1u64 << 27)),
        ("/layers/0/blocks/0/mixer/projections/rope_dim", json!(0)),
    ] {
        check(latent(), path, &value);
    }
    let error = changed(per_layer(), "/tables/0/hashed", json!(true)).unwrap_err().to_string();
    let expected =
        "blocks[2].mixer.table must be such that tables 0..1 are among the 1 of the model, and are not hashed";
    assert!(error.contains(expected), "{error}");
    for (path, value, field) in [
        ("/tables/1/rows", json!(21), "first_table"),
        ("/layers/0/blocks/0/mixer/columns", json!(5), "columns"),
        ("/layers/0/blocks/0/mixer/end", json!(u32::MAX), "end + 1"),
        ("/layers/0/blocks/0/post_norm", spec()["final_norm"].clone(), "post_norm"),
        ("/layers/0/blocks/0/input", json!("stream_and_embedding"), "input"),
    ] {
        let error = changed(hyper(), path, value).unwrap_err().to_string();
        assert!(error.contains(&format!(".{field} must be ")), "{path}: {error}");
    }
    assert!(with("/vocab_size", json!(-1)).is_err());
    assert!(with("/layers", json!(vec![spec()["layers"][0].clone(); 4097])).is_err());
}

#[test]
fn shared_keys_and_values_have_the_same_sizes_and_window() {
    for (path, value) in [
        ("/layers/1/blocks/0/mixer/window", json!(8)),
        ("/layers/1/blocks/0/mixer/projections/kv_heads", json!(4)),
        ("/layers/1/blocks/0/mixer/projections/value_dim", json!(8)),
        ("/layers/0/blocks/0/mixer/kv_layer", json!(0)),
    ] {
        let error = changed(shared(), path, value).unwrap_err().to_string();
        assert!(error.contains("kv_layer must be an earlier layer with one attention"), "{path}: {error}");
    }
    let error = changed(latent(), "/layers/0/blocks/0/mixer/kv_layer", json!(0)).unwrap_err().to_string();
    assert!(error.contains("kv_layer must be null for latent projections"), "{error}");
}

#[test]
fn choices_are_those_of_the_last_indexer_of_a_causal_model() {
    let mut later = choosing();
    let layers = later["layers"].as_array_mut().unwrap();
    layers.insert(1, layers[0].clone());
    let error = ModelSpec::from_json(&later.to_string()).unwrap_err().to_string();
    assert!(error.contains("layers[2].blocks[0].mixer.selection_layer must be the last earlier layer"), "{error}");
    assert!(changed(later, "/layers/2/blocks/0/mixer/selection_layer", json!(1)).is_ok());
    let heads = changed(choosing(), "/layers/1/blocks/0/mixer/projections/kv_heads", json!(1)).unwrap_err();
    assert!(heads.to_string().contains("selection_layer must be the last earlier layer"), "{heads}");
    let error = changed(choosing(), "/causal", json!(false)).unwrap_err().to_string();
    assert!(error.contains("indexer must be null for bidirectional attention"), "{error}");
}

#[test]
fn keys_of_blocks_are_rotated_alike_in_sequences_of_any_length() {
    let mut means = choosing();
    means["layers"][0]["blocks"][0]["mixer"]["indexer"]["keys"] = json!("block_means");
    assert!(ModelSpec::from_json(&means.to_string()).is_ok());
    let dynamic = json!({"type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 32});
    assert!(changed(choosing(), "/ropes/0/scaling", dynamic.clone()).is_ok());
    let error = changed(means, "/ropes/0/scaling", dynamic).unwrap_err().to_string();
    assert!(error.contains("indexer.rope must be one whose scaling does not depend on the length"), "{error}");
}

#[test]
fn blocks_share_weights_only_if_they_are_alike() {
    let mut shared = spec();
    shared["layers"][1]["blocks"][1]["weights_of"] = json!(0);
    assert!(ModelSpec::from_json(&shared.to_string()).is_ok());
    let error = changed(shared, "/layers/0/blocks/1/mixer/intermediate_size", json!(128)).unwrap_err();
    assert!(error.to_string().contains("layers[1].blocks[1].weights_of must be an earlier layer"), "{error}");
}

#[test]
fn an_output_that_the_next_block_takes_has_no_factors() {
    let mut taken = spec();
    taken["layers"][0]["blocks"][1]["input"] = json!("stream_plus_output");
    assert!(ModelSpec::from_json(&taken.to_string()).is_ok());
    for (field, value) in [("residual_scale", json!(0.5)), ("residual_after_norm", json!(true))] {
        let error = changed(taken.clone(), &format!("/layers/0/blocks/0/{field}"), value).unwrap_err();
        assert!(error.to_string().contains("layers[0].blocks[1].input"), "{error}");
    }
}

#[test]
fn malformed_json_is_an_error() {
    for text in ["", "{", "[]", "null", &"[".repeat(100_000), r#"{"architecture": "llama"}"#] {
        assert!(matches!(ModelSpec::from_json(text), Err(SpecError::Json(_))));
    }
}

/// Checks that the value at `path` is refused with the name of the field and a limit.
fn check(spec: Value, path: &str, value: &Value) {
    let error = changed(spec, path, value.clone()).unwrap_err();
    let SpecError::Number { field, limit, .. } = &error else { panic!("{path}: {error:?}") };
    let key = path.rsplit('/').find(|key| key.parse::<usize>().is_err()).unwrap();
    assert!(field.contains(key) && !limit.is_empty(), "{path} = {value}: {error}");
}
