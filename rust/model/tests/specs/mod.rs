//! Specs for tests, as JSON, so that a test can change any field.

use serde_json::{Value, json};

/// Returns a spec of Llama's architecture: tied embeddings of `vocab_size` tokens, `layers` layers of width 64, and no
/// tensor names.
pub fn llama(vocab_size: usize, layers: usize) -> Value {
    let norm = json!({"type": "rms", "eps": 1e-5, "weight_offset": 0.0, "weight": true});
    let block = |name: &str, mixer: Value| {
        json!({
            "name": name, "mixer": mixer, "norm": norm, "post_norm": null, "sum_norm": null, "parallel": false,
            "residual_scale": 1.0, "residual_after_norm": false
        })
    };
    let attention = json!({
        "type": "attention", "heads": 4, "scale": 0.25, "output_bias": false, "rope": 0, "window": null,
        "softcap": null, "alibi_slopes": null, "sinks": false,
        "projections": {
            "type": "heads", "kv_heads": 2, "key_dim": 16, "value_dim": 16, "bias": false, "qk_norm": null, "clip": null,
            "values_are_keys": false
        }
    });
    let ffn = json!({
        "type": "dense", "intermediate_size": 96, "activation": "silu", "gated": true, "bias": false, "clamp": null,
        "gate_scale": 1.0
    });
    let layer = json!({"blocks": [block("attention", attention), block("ffn", ffn)], "scalar": false});
    json!({
        "architecture": "llama", "vocab_size": vocab_size, "hidden_size": 64, "max_position_embeddings": 256,
        "embedding": {"scale": 1.0, "width": null, "positions": null, "token_types": 0, "norm": null},
        "ropes": [{"theta": 1e4, "rotary_dim": 16, "interleaved": false, "scaling": {"type": "none"}}],
        "layers": vec![layer; layers],
        "final_norm": norm,
        "lm_head": {"tied": true, "bias": false, "scale": 1.0, "softcap": null},
        "causal": true,
        "classifier": null,
        "text_projections": [],
        "tensors": {},
        "prefixes": []
    })
}
