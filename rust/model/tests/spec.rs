//! A spec is data from outside: whatever is wrong with it is an error that names the field, the value and the limit.

use ferrule_model::{ModelSpec, SpecError};
use serde_json::{Value, json};

fn spec() -> Value {
    let norm = json!({"type": "rms", "eps": 1e-5});
    let layer = json!({
        "attention_norm": norm,
        "ffn_norm": norm,
        "attention": {
            "heads": 4, "kv_heads": 2, "key_dim": 16, "value_dim": 16, "scale": 0.25, "window": null, "rope": 0,
            "qkv_bias": false, "output_bias": false, "qk_norm": null
        },
        "ffn": {"type": "gated", "intermediate_size": 160, "activation": "silu", "bias": false}
    });
    json!({
        "architecture": "llama", "vocab_size": 320, "hidden_size": 64, "max_position_embeddings": 256,
        "ropes": [{"theta": 1e4, "rotary_dim": 16, "interleaved": false, "scaling": {"type": "none"}}],
        "layers": [layer, layer],
        "final_norm": norm,
        "head": {"tied": true, "bias": false},
        "tensors": {"embedding.weight": {"name": "embed"}}
    })
}

fn with(path: &str, value: Value) -> Result<ModelSpec, SpecError> {
    let mut changed = spec();
    let (parent, key) = path.rsplit_once('/').unwrap();
    changed.pointer_mut(parent).unwrap()[key] = value;
    ModelSpec::from_json(&changed.to_string())
}

#[test]
fn a_whole_spec_is_read() {
    let read = ModelSpec::from_json(&spec().to_string()).unwrap();
    assert_eq!((read.layers.len(), read.tensor("embedding.weight").unwrap()), (2, "embed"));
    assert_eq!(read.tensor("head.weight"), Err(SpecError::Role { role: "head.weight".to_owned() }));
}

#[test]
fn an_unknown_switch_is_refused_by_its_name() {
    for (path, value) in [
        ("/layers/0/attention/sinks", json!(true)),
        ("/layers/1/ffn/experts", json!(8)),
        ("/layers/0/parallel_residual", json!(true)),
        ("/ropes/0/mrope_section", json!([1, 2])),
        ("/head/logit_softcap", json!(30.0)),
        ("/final_norm/sandwich", json!(true)),
        ("/logit_scale", json!(2.0)),
        ("/ropes/0/scaling/short_factor", json!([1.0])),
    ] {
        let (_, name) = path.rsplit_once('/').unwrap();
        let error = with(path, value).unwrap_err().to_string();
        assert!(error.contains(name), "{path}: {error}");
    }
    for (path, name) in
        [("/layers/0/ffn/activation", "relu"), ("/layers/0/ffn/type", "mixture"), ("/ropes/0/scaling/type", "longrope")]
    {
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
        ("/layers/0/attention/heads", json!(0)),
        ("/layers/0/attention/kv_heads", json!(0)),
        ("/layers/0/attention/kv_heads", json!(3)),
        ("/layers/1/attention/key_dim", json!(1u64 << 27)),
        ("/layers/0/attention/rope", json!(1)),
        ("/layers/0/attention/window", json!(0)),
        ("/layers/0/ffn/intermediate_size", json!(0)),
        ("/ropes/0/rotary_dim", json!(15)),
        ("/ropes/0/rotary_dim", json!(18)),
        ("/ropes/0/theta", json!(0.0)),
        ("/ropes/0/scaling", json!({"type": "linear", "factor": 0.0})),
        ("/final_norm/eps", json!(-1.0)),
        ("/layers", json!([])),
    ] {
        let error = with(path, value.clone()).unwrap_err();
        let SpecError::Number { field, limit, .. } = &error else { panic!("{path}: {error:?}") };
        let key = path.rsplit('/').find(|key| key.parse::<usize>().is_err()).unwrap();
        assert!(field.contains(key) && !limit.is_empty(), "{path} = {value}: {error}");
    }
    assert!(with("/vocab_size", json!(-1)).is_err());
    assert!(with("/layers", json!(vec![spec()["layers"][0].clone(); 4097])).is_err());
}

#[test]
fn what_is_not_a_spec_is_an_error() {
    for text in ["", "{", "[]", "null", &"[".repeat(100_000), r#"{"architecture": "llama"}"#] {
        assert!(matches!(ModelSpec::from_json(text), Err(SpecError::Json(_))));
    }
}
