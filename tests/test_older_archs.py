"""The older families: what each reads from its config.json in a way of its own, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from ferrule import LLM, ConfigError, UnsupportedModelError
from ferrule.archs import model_spec
from ferrule.archs.alibi import alibi_slopes
from ferrule.archs.config import Config
from ferrule.archs.spec import (
    Dense,
    HeadNorm,
    HeadProjections,
    Layer,
    LayerNorm,
    LearnedPositions,
    LinearScaling,
    ModelSpec,
    NoScaling,
    Part,
    SinusoidalPositions,
)

GOLDEN = Path(__file__).parent / "golden" / "logits"
EMBEDDING = "transformer.wte.weight"


def spec_of(case: str, **changes: Any) -> ModelSpec:
    """The spec of a golden case with other values; None leaves a field out."""
    values = {**json.loads((GOLDEN / case / "config.json").read_text()), **changes}
    return model_spec(Config({key: value for key, value in values.items() if value is not None}, Path("config.json")))


def projections(layer: Layer) -> HeadProjections:
    assert isinstance(layer.attention.projections, HeadProjections)
    return layer.attention.projections


def width(spec: ModelSpec) -> int:
    """Of the first feed-forward network."""
    ffn = spec.layers[0].ffn
    assert isinstance(ffn, Dense)
    return ffn.intermediate_size


def parts(spec: ModelSpec) -> list[Part | None]:
    """Where the first layer's queries, keys and values lie in their tensor."""
    return [spec.tensors[f"layers.0.attention.{role}.weight"].part for role in ("q", "k", "v")]


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("gpt2", {"add_cross_attention": True}, "add_cross_attention is True; it must be false"),
    ("gpt2", {"n_embd": 66}, "n_embd is 66; it must be a multiple of num_attention_heads, 4"),
    ("gpt2", {"n_head": 2048}, "n_head is 2048; it must be a whole number from 1 to 1024"),
    ("gpt2", {"n_layer": 0}, "n_layer is 0; it must be a whole number from 1"),
    ("gpt2", {"activation_function": "mish"}, "activation_function is 'mish'; it must be one of silu, "),
    ("gpt_bigcode", {"add_cross_attention": True}, "add_cross_attention is True; it must be false"),
    ("gptj", {"rotary_dim": None}, "rotary_dim is 64; it must be a whole number from 2 to 16"),
    ("gptj", {"rotary_dim": 7}, "rotary_dim is 7; it must be such that an even number of elements is rotated, not 7"),
    ("gptj", {"rotary_dim": 18}, "rotary_dim is 18; it must be a whole number from 2 to 16"),
    ("gpt_neox", {"rope_parameters": None, "rotary_pct": 1.5}, "rotary_pct is 1.5; it must be at most 1"),
    ("gpt_neox", {"rope_parameters": None, "rotary_emb_base": 0}, "rotary_emb_base is 0; it must be a finite number"),
    ("opt", {"word_embed_proj_dim": 0}, "word_embed_proj_dim is 0; it must be a whole number from 1"),
    ("mpt", {"no_bias": False}, "no_bias is False; it must be true"),
    ("mpt", {"logit_scale": "inv_sqrt_d_model"}, "logit_scale is 'inv_sqrt_d_model'; it must be null"),
    ("mpt", {"norm_type": "rmsnorm"}, "norm_type is 'rmsnorm'; it must be layernorm or low_precision_layernorm"),
    ("mpt", {"attn_config": {"alibi": False}}, "attn_config.alibi is False; it must be true"),
    ("mpt", {"attn_config": {"qk_ln": True}}, "attn_config.qk_ln is True; it must be false"),
    ("mpt", {"attn_config": {"prefix_lm": True}}, "attn_config.prefix_lm is True; it must be false"),
    (
        "mpt",
        {"attn_config": {"attn_type": "multiquery_attention"}},
        "attn_config.attn_type is 'multiquery_attention'; it must be \"multihead_attention\"",
    ),
    ("mpt", {"attn_config": {"clip_qkv": -1}}, "attn_config.clip_qkv is -1; it must be a finite number from 0"),
    ("mpt", {"attn_config": {"alibi_bias_max": 0}}, "attn_config.alibi_bias_max is 0; it must be a finite number"),
    ("xglm", {"pad_token_id": 2}, "pad_token_id is 2; it must be below 2"),
    (
        "xglm",
        {"max_position_embeddings": 1 << 20},
        "max_position_embeddings is 1048576; it must be a whole number from 1 to",
    ),
    ("xglm", {"add_cross_attention": True}, "add_cross_attention is True; it must be false"),
    (
        "falcon",
        {"new_decoder_architecture": True, "num_kv_heads": 3},
        "num_kv_heads is 3; it must be a divisor of num_attention_heads, 4",
    ),
    (
        "falcon",
        {"new_decoder_architecture": True, "num_ln_in_parallel_attn": 3},
        "num_ln_in_parallel_attn is 3; it must be a whole number from 1 to 2",
    ),
    ("phi", {"qk_layernorm": "yes"}, "qk_layernorm is 'yes'; it must be true or false"),
    ("stablelm", {"num_key_value_heads": None}, "num_key_value_heads is 32; it must be a divisor"),
    ("starcoder2", {"sliding_window": 0}, "sliding_window is 0; it must be a whole number from 1"),
]


@pytest.mark.parametrize(("case", "changes", "message"), REFUSED)
def test_a_value_that_does_not_run_is_named(case: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        spec_of(case, **changes)
    assert f"config.json: {message}" in str(caught.value)


def test_what_could_run_elsewhere_is_unsupported() -> None:
    with pytest.raises(UnsupportedModelError):
        spec_of("mpt", no_bias=False)


def test_scores_of_gpt2() -> None:
    def scales(**changes: Any) -> list[float]:
        return [layer.attention.scale for layer in spec_of("gpt2", **changes).layers]

    assert scales() == [0.25, 0.25, 0.25]
    assert scales(scale_attn_by_inverse_layer_idx=True) == [0.25, 0.125, 0.25 / 3]
    assert scales(scale_attn_weights=False) == [1, 1, 1]
    assert spec_of("gpt_bigcode", scale_attn_weights=False).layers[0].attention.scale == 1


@pytest.mark.parametrize("case", ["gpt2", "gpt_bigcode", "gptj"])
def test_networks_are_four_times_as_wide_where_nobody_says(case: str) -> None:
    assert width(spec_of(case)) == 4 * 64
    assert width(spec_of(case, n_inner=96)) == 96


def test_gpt2_keeps_its_matrices_transposed() -> None:
    spec = spec_of("gpt2")
    assert parts(spec) == [Part(0, 64, 192), Part(64, 64, 192), Part(128, 64, 192)]
    transposed = {role.split(".", 2)[-1] for role, tensor in spec.tensors.items() if tensor.transposed}
    assert {role for role in transposed if role.endswith("weight")} == {
        "attention.q.weight",
        "attention.k.weight",
        "attention.v.weight",
        "attention.output.weight",
        "ffn.up.weight",
        "ffn.down.weight",
    }
    assert spec.embedding.positions == LearnedPositions(rows=256)


def test_queries_of_bigcode_share_keys_and_values() -> None:
    single, many = spec_of("gpt_bigcode"), spec_of("gpt_bigcode", multi_query=False)
    assert (projections(single.layers[0]).kv_heads, projections(many.layers[0]).kv_heads) == (1, 4)
    assert parts(single) == [Part(0, 64, 96), Part(64, 16, 96), Part(80, 16, 96)]
    assert parts(many) == [Part(0, 16, 48), Part(16, 16, 48), Part(32, 16, 48)]


def test_codegen_is_gptj_in_four_shards() -> None:
    spec = spec_of("gptj", architectures=["CodeGenForCausalLM"], model_type="codegen")
    assert parts(spec) == [Part(0, 16, 48), Part(32, 16, 48), Part(16, 16, 48)]
    assert spec.layers == spec_of("gptj").layers
    with pytest.raises(ConfigError, match="n_head is 2; it must be a multiple of 4"):
        spec_of("gptj", architectures=["CodeGenForCausalLM"], n_head=2)


def test_old_spellings_of_neox() -> None:
    old = spec_of("gpt_neox", rope_parameters=None, rotary_pct=0.5, rotary_emb_base=5000)
    assert (old.ropes[0].theta, old.ropes[0].rotary_dim) == (5000, 8)
    scaled = spec_of("gpt_neox", rope_parameters=None, rope_scaling={"type": "linear", "factor": 2})
    assert (scaled.ropes[0].rotary_dim, scaled.ropes[0].scaling) == (4, LinearScaling(2.0))
    assert spec_of("gpt_neox").ropes[0].scaling == NoScaling()


def test_blocks_of_neox_stand_side_by_side_or_not() -> None:
    aside, serial = spec_of("gpt_neox"), spec_of("gpt_neox", use_parallel_residual=False, attention_bias=False)
    assert (aside.layers[0].parallel, serial.layers[0].parallel) == (True, False)
    assert aside.layers[0].ffn_norm == serial.layers[0].ffn_norm == LayerNorm(1e-5)
    assert (projections(aside.layers[0]).bias, projections(serial.layers[0]).bias) == (True, False)
    assert spec_of("gpt_neox", num_key_value_heads=2) == aside


def test_the_odd_opt() -> None:
    """opt-350m has its norms after the sums and narrow embeddings."""
    usual = spec_of("opt")
    assert usual.embedding.positions == LearnedPositions(rows=258, offset=2)
    assert (usual.embedding.width, usual.final_norm) == (None, LayerNorm(1e-5))
    odd = spec_of("opt", do_layer_norm_before=False, word_embed_proj_dim=32)
    layer = odd.layers[0]
    assert (layer.attention_norm, layer.attention_sum_norm, odd.final_norm) == (None, LayerNorm(1e-5), None)
    assert odd.embedding.width == 32
    assert odd.tensors["head_projection.weight"].names == ("model.decoder.project_out.weight",)
    bare = spec_of("opt", enable_bias=False, layer_norm_elementwise_affine=False)
    assert not [role for role in bare.tensors if role.endswith("bias") or "norm" in role]
    assert spec_of("opt", _remove_final_layer_norm=True).final_norm is None


def test_bloom_in_old_files() -> None:
    spec = spec_of("bloom", hidden_size=None, n_embed=128, seq_length=512)
    assert (spec.hidden_size, spec.max_position_embeddings) == (128, 512)
    assert spec_of("bloom").max_position_embeddings == 2048
    assert spec_of("bloom", apply_residual_connection_post_layernorm=True).layers[0].residual_after_norm


@pytest.mark.parametrize("heads", [1, 2, 6, 8, 12, 71, 112])
def test_slopes_are_those_of_the_paper(heads: int) -> None:
    """Press et al. take the slopes of the nearest lower power of two, then every second one of the next power's."""

    def of_power(count: int) -> list[float]:
        first = 2 ** (-8 / count)
        return [first ** (index + 1) for index in range(count)]

    lower = 1 << (heads.bit_length() - 1)
    expected = of_power(lower) + of_power(2 * lower)[::2][: heads - lower]
    assert alibi_slopes(heads) == pytest.approx(expected, rel=1e-12)


def test_mpt_as_its_makers_wrote_it() -> None:
    changes = {"architectures": ["MPTForCausalLM"], "attn_config": {"alibi": True, "alibi_bias_max": 16, "clip_qkv": 6}}
    layer = spec_of("mpt", **changes).layers[0]
    assert layer.attention.alibi_slopes == (2.0**-4, 2.0**-8, 2.0**-12, 2.0**-16)
    assert (layer.attention.scale, projections(layer).clip) == (0.25, 6)
    layer = spec_of("mpt", attn_config={"clip_qkv": 0, "softmax_scale": 0.5}).layers[0]
    assert layer.attention.alibi_slopes == (2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8)
    assert (layer.attention.scale, projections(layer).clip) == (0.5, None)


def test_embeddings_of_xglm() -> None:
    assert spec_of("xglm").embedding.positions == SinusoidalPositions(offset=2)
    assert spec_of("xglm").embedding.scale == 8
    assert spec_of("xglm", scale_embedding=False).embedding.scale == 1


NEW = {"new_decoder_architecture": True, "num_attention_heads": 8}
FALCONS: list[tuple[str, dict[str, Any], int, bool, str | None, Part]] = [
    ("7B", {}, 1, True, None, Part(64, 16, 96)),
    ("7B, one after the other", {"parallel_attn": False}, 1, False, "post_attention_layernorm", Part(64, 16, 96)),
    ("1B", {"multi_query": False, "num_kv_heads": 2}, 4, True, None, Part(16, 16, 48)),
    ("40B", NEW | {"num_kv_heads": 2}, 2, True, "ln_mlp", Part(32, 8, 48)),
    ("40B, one switch ignored", NEW | {"num_kv_heads": 2, "parallel_attn": False}, 2, True, "ln_mlp", Part(32, 8, 48)),
    ("11B", NEW | {"num_kv_heads": 4, "num_ln_in_parallel_attn": 1}, 4, True, None, Part(16, 8, 32)),
    ("as many keys as queries", NEW | {"num_kv_heads": None}, 8, True, "ln_mlp", Part(8, 8, 24)),
]


@pytest.mark.parametrize(
    ("changes", "kv_heads", "parallel", "ffn_norm", "keys"), [case[1:] for case in FALCONS], ids=[c[0] for c in FALCONS]
)
def test_forms_of_falcon(
    changes: dict[str, Any], kv_heads: int, parallel: bool, ffn_norm: str | None, keys: Part
) -> None:
    spec = spec_of("falcon", **changes)
    layer = spec.layers[0]
    assert (projections(layer).kv_heads, layer.parallel) == (kv_heads, parallel)
    assert parts(spec)[1] == keys
    if ffn_norm is None:
        assert layer.ffn_norm is None
    else:
        assert spec.tensors["layers.0.ffn_norm.weight"].names == (f"transformer.h.0.{ffn_norm}.weight",)
    before = "ln_attn" if ffn_norm == "ln_mlp" else "input_layernorm"
    assert spec.tensors["layers.0.attention_norm.weight"].names == (f"transformer.h.0.{before}.weight",)


def test_falcon_scales_its_slopes_with_its_scores() -> None:
    spec = spec_of("falcon", alibi=True)
    assert spec.layers[0].attention.alibi_slopes == (2.0**-4, 2.0**-6, 2.0**-8, 2.0**-10)
    assert (spec.layers[0].attention.rope, spec.ropes) == (None, [])


def test_norms_of_heads() -> None:
    assert projections(spec_of("phi", qk_layernorm=True).layers[0]).qk_norm == HeadNorm(LayerNorm(1e-5))
    spec = spec_of("stablelm", qk_layernorm=True, use_parallel_residual=True, rope_parameters=None)
    assert projections(spec.layers[0]).qk_norm == HeadNorm(LayerNorm(1e-5, bias=False), over="each_head")
    norms = [spec.tensors[f"layers.1.attention.{role}_norm.weight"].names for role in ("q", "k")]
    at = "model.layers.1.self_attn"
    assert norms[0] == tuple(f"{at}.q_layernorm.norms.{head}.weight" for head in range(4))
    assert norms[1] == tuple(f"{at}.k_layernorm.norms.{head}.weight" for head in range(2))
    assert (spec.layers[0].parallel, spec.layers[0].ffn_norm) == (True, None)
    assert spec.ropes[0].rotary_dim == 4


def test_heads_with_a_bias() -> None:
    for case in ("gptj", "phi"):
        head = spec_of(case, tie_word_embeddings=True).head
        assert head is not None
        assert (head.tied, head.bias) == (True, True)


@pytest.mark.native
def test_a_tied_head_keeps_its_bias(tmp_path: Path) -> None:
    """GPT-J's checkpoint with the head's matrix made the embedding's says the same as one that calls it tied."""
    content = bytearray((GOLDEN / "gptj" / "model.safetensors").read_bytes())
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    spans = [slice(*(start + end for end in header[name]["data_offsets"])) for name in ("lm_head.weight", EMBEDDING)]
    content[spans[0]] = content[spans[1]]
    config = json.loads((GOLDEN / "gptj" / "config.json").read_text())
    logits: list[npt.NDArray[np.float32]] = []
    for tied in (True, False):
        model = tmp_path / str(tied)
        model.mkdir()
        (model / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": tied}))
        (model / "model.safetensors").write_bytes(content)
        with LLM(model, quantization="f32") as llm:
            logits.append(llm.logits([5, 6, 7]))
    np.testing.assert_array_equal(logits[0], logits[1])


def test_the_window_of_starcoder2() -> None:
    assert [layer.attention.window for layer in spec_of("starcoder2", sliding_window=8).layers] == [8, 8, 8]
    assert [layer.attention.window for layer in spec_of("starcoder2").layers] == [None, None, None]
    assert projections(spec_of("starcoder2", num_key_value_heads=None).layers[0]).kv_heads == 2
