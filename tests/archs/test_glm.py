"""GLM and GLM-4: how config.json is read, and what is refused."""

from __future__ import annotations

from archs.specs import LEFT_OUT, heads, renamed
from ferrule.archs.spec import RmsNorm


def test_glm_has_no_post_norms() -> None:
    spec = renamed("glm4", "GlmForCausalLM", "glm", attention_bias=LEFT_OUT, rope_parameters=LEFT_OUT)
    layer = spec.layers[0]
    assert (layer.block("attention").post_norm, layer.block("ffn").post_norm) == (None, None)
    assert (heads(spec).bias, layer.attention.output_bias) == (True, False)
    assert (spec.ropes[0].rotary_dim, spec.ropes[0].interleaved) == (16, True)
    fields = ("head_dim", "num_key_value_heads", "rms_norm_eps")
    bare = renamed("glm4", "GlmForCausalLM", "glm", **dict.fromkeys(fields, LEFT_OUT))
    assert (heads(bare).kv_heads, heads(bare).key_dim, bare.final_norm) == (2, 128, RmsNorm(1.5625e-7))
