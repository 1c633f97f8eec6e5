"""The newer families: what each reads from its config.json in a way of its own, and what it refuses."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest

from ferrule import LLM, ConfigError, UnsupportedModelError
from ferrule._loading import read_model_files
from ferrule.archs import model_spec
from ferrule.archs.config import Config
from ferrule.archs.rope import yarn_mscale
from ferrule.archs.spec import (
    Clamp,
    Dense,
    Experts,
    Head,
    HeadProjections,
    LatentProjections,
    LinearScaling,
    LongRopeScaling,
    ModelSpec,
    NoScaling,
    Part,
    RmsNorm,
    Router,
    Stack,
    Tensor,
    YarnScaling,
)
from lora_files import read_header

GOLDEN = Path(__file__).parent / "golden" / "logits"
LEFT_OUT = object()


def spec_of(case: str, **changes: Any) -> ModelSpec:
    """The spec of a golden case with other values; LEFT_OUT is for fields to leave out, None for null ones."""
    values = {**json.loads((GOLDEN / case / "config.json").read_text()), **changes}
    kept = {key: value for key, value in values.items() if value is not LEFT_OUT}
    return model_spec(Config(kept, Path("config.json")))


def renamed(case: str, name: str, model_type: str, **changes: Any) -> ModelSpec:
    """As `spec_of`, for a family whose files look like those of a golden case."""
    return spec_of(case, architectures=[name], model_type=model_type, **changes)


def windows(spec: ModelSpec) -> list[int | None]:
    return [layer.attention.window for layer in spec.layers]


def rotated(spec: ModelSpec) -> list[bool]:
    return [layer.attention.rope is not None for layer in spec.layers]


def mixtures(spec: ModelSpec) -> list[Experts | None]:
    return [layer.ffn if isinstance(layer.ffn, Experts) else None for layer in spec.layers]


def mixture(spec: ModelSpec) -> Experts:
    """Of the last layer."""
    ffn = spec.layers[-1].ffn
    assert isinstance(ffn, Experts)
    return ffn


def heads(spec: ModelSpec) -> HeadProjections:
    projections = spec.layers[0].attention.projections
    assert isinstance(projections, HeadProjections)
    return projections


def latents(spec: ModelSpec) -> LatentProjections:
    projections = spec.layers[0].attention.projections
    assert isinstance(projections, LatentProjections)
    return projections


def deepseek_v2(**changes: Any) -> ModelSpec:
    """DeepSeek-V2-Lite's form, by the golden case of V3."""
    lite = {"q_lora_rank": None, "topk_method": "greedy", "norm_topk_prob": False}
    return renamed("deepseek_v3", "DeepseekV2ForCausalLM", "deepseek_v2", **{**lite, **changes})


LONGROPE: dict[str, Any] = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("gemma", {"use_bidirectional_attention": True}, "use_bidirectional_attention is True; it must be false"),
    ("gemma", {"hidden_act": "mish"}, "hidden_act is 'mish'; it must be one of silu, "),
    ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention is True; it must be false"),
    ("gemma2", {"hidden_activation": "mish"}, "hidden_activation is 'mish'; it must be one of silu, "),
    ("gemma2", {"sliding_window": None}, "sliding_window is None; it must be a whole number, switched on"),
    ("gemma2", {"sliding_window": None, "layer_types": None}, "sliding_window is None; it must be a whole number"),
    ("gemma2", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar is 0; it must be a finite number above 0"),
    ("gemma2", {"attn_logit_softcapping": -1}, "attn_logit_softcapping is -1; it must be a finite number above 0"),
    ("gemma3", {"sliding_window_pattern": 0}, "sliding_window_pattern is 0; it must be a whole number from 1"),
    (
        "gemma3",
        {"rope_parameters": {"full_attention": {}}},
        "rope_parameters.sliding_attention is missing; it must be an object",
    ),
    ("phi3", {"rope_parameters": {"rope_type": "yarn"}}, "rope_parameters.rope_type is 'yarn'; it must be default or"),
    (
        "phi3",
        {"rope_parameters": {**LONGROPE, "short_factor": [1.0] * 7}},
        "rope_parameters.short_factor is [1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]; it must be a list of 8 numbers",
    ),
    ("olmo", {"clip_qkv": 0}, "clip_qkv is 0; it must be a finite number above 0"),
    ("cohere", {"logit_scale": "big"}, "logit_scale is 'big'; it must be a finite number above 0"),
    ("cohere2", {"sliding_window": None}, "sliding_window is None; it must be a whole number, switched on"),
    ("granite", {"logits_scaling": 0}, "logits_scaling is 0; it must be a finite number from 1e-30"),
    ("smollm3", {"no_rope_layers": [1, 0]}, "no_rope_layers is [1, 0]; it must be a list of 3"),
    (
        "smollm3",
        {"no_rope_layers": [1, 2, 0]},
        "no_rope_layers is [1, 2, 0]; it must be a list of whole numbers from 0",
    ),
    ("smollm3", {"no_rope_layers": [True, 1, 0]}, "no_rope_layers is [True, 1, 0]; it must be a list of whole numbers"),
    ("smollm3", {"no_rope_layers": 1}, "no_rope_layers is 1; it must be a list of whole numbers from 0 to 1"),
    ("mixtral", {"num_local_experts": 0}, "num_local_experts is 0; it must be a whole number from 1"),
    ("qwen2_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step is 0; it must be a whole number from 1"),
    ("qwen2_moe", {"mlp_only_layers": [-1]}, "mlp_only_layers is [-1]; it must be a list of whole numbers from 0"),
    (
        "qwen2_moe",
        {"layer_types": ["sliding_attention"] * 3},
        "sliding_window is 0; it must be a whole number, switched on, as the model has sliding layers",
    ),
    ("qwen3_moe", {"num_local_experts": "6"}, "num_local_experts is '6'; it must be a whole number from 1"),
    ("gpt_oss", {"swiglu_limit": 0}, "swiglu_limit is 0; it must be a finite number above 0"),
    ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func is 'softmax'; it must be \"sigmoid\""),
    ("deepseek_v3", {"topk_method": "greedy"}, "topk_method is 'greedy'; it must be \"noaux_tc\""),
    ("deepseek_v3", {"moe_layer_freq": 2}, "moe_layer_freq is 2; it must be 1"),
    ("deepseek_v3", {"mlp_bias": True}, "mlp_bias is True; it must be false"),
    ("deepseek_v3", {"kv_lora_rank": 0}, "kv_lora_rank is 0; it must be a whole number from 1"),
    (
        "deepseek_v3",
        {"rope_parameters": {"rope_type": "yarn", "mscale_all_dim": 1e308, "factor": 4}},
        "rope_parameters.mscale_all_dim is 1e+308; it must be small enough for scores to be finite",
    ),
]


@pytest.mark.parametrize(("case", "changes", "message"), REFUSED)
def test_a_value_that_does_not_run_is_named(case: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        spec_of(case, **changes)
    assert f"config.json: {message}" in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"topk_method": "noaux_tc"}, "topk_method is 'noaux_tc'; it must be greedy or group_limited_greedy"),
        ({"norm_topk_prob": True}, "norm_topk_prob is True; it must be false"),
        ({"scoring_func": "sigmoid"}, "scoring_func is 'sigmoid'; it must be \"softmax\""),
        ({"topk_method": "group_limited_greedy", "n_group": None}, "n_group is None; it must be a whole number"),
    ],
)
def test_what_deepseek_v2_does_not_run(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        deepseek_v2(**changes)
    assert message in str(caught.value)


def test_what_could_run_elsewhere_is_unsupported() -> None:
    for changes in ({"moe_layer_freq": 2}, {"scoring_func": "softmax"}):
        with pytest.raises(UnsupportedModelError):
            spec_of("deepseek_v3", **changes)


def test_gelu_of_gemma_is_its_approximation() -> None:
    for name in ("gelu", "gelu_pytorch_tanh", None, LEFT_OUT):
        assert spec_of("gemma", hidden_act=name).layers[0].ffn == Dense(160, "gelu_tanh")
    # Gemma 2 means what it says, and reads no other field.
    assert spec_of("gemma2", hidden_activation="gelu").layers[0].ffn == Dense(160, "gelu")
    assert spec_of("gemma2", hidden_act="relu").layers[0].ffn == Dense(160, "gelu_tanh")


def test_defaults_of_gemma() -> None:
    fields = ("head_dim", "num_key_value_heads", "rms_norm_eps", "max_position_embeddings", "tie_word_embeddings")
    spec = spec_of("gemma", num_attention_heads=16, **dict.fromkeys(fields, LEFT_OUT))
    assert (heads(spec).kv_heads, heads(spec).key_dim, spec.max_position_embeddings) == (16, 256, 8192)
    assert spec.final_norm == RmsNorm(1e-6, weight_offset=1.0)
    assert (spec.embedding.scale, spec.head) == (8.0, Head(tied=True))


def test_windows_and_caps_of_gemma2() -> None:
    fields = ("layer_types", "sliding_window", "attn_logit_softcapping", "final_logit_softcapping")
    spec = spec_of("gemma2", num_key_value_heads=LEFT_OUT, **dict.fromkeys(fields, LEFT_OUT))
    assert windows(spec) == [4096, None, 4096]
    assert (spec.layers[0].attention.softcap, spec.head) == (50.0, Head(tied=True, softcap=30.0))
    bare = spec_of("gemma2", attn_logit_softcapping=None, final_logit_softcapping=None)
    assert (bare.layers[0].attention.softcap, bare.head) == (None, Head(tied=True))
    assert spec_of("gemma2", query_pre_attn_scalar=LEFT_OUT).layers[0].attention.scale == 1 / 16


def test_gemma3_in_old_files() -> None:
    """Five layers of six have windows and a base of their own; scaling is for the others."""
    old = {"layer_types": LEFT_OUT, "rope_parameters": LEFT_OUT, "_sliding_window_pattern": LEFT_OUT}
    scaling = {"rope_type": "linear", "factor": 8.0}
    spec = spec_of("gemma3", **old, rope_theta=2e6, rope_local_base_freq=3e4, rope_scaling=scaling)
    assert windows(spec) == [16, 16, 16, 16, 16, None, 16]
    local, full = (spec.ropes[spec.layers[index].attention.rope or 0] for index in (0, 5))
    assert (local.theta, local.scaling) == (3e4, NoScaling())
    assert (full.theta, full.scaling) == (2e6, LinearScaling(8.0))
    assert windows(spec_of("gemma3", **old, sliding_window_pattern=2))[:4] == [16, None, 16, None]
    bare = spec_of("gemma3", **old)
    assert [bare.ropes[bare.layers[index].attention.rope or 0].theta for index in (0, 5)] == [1e4, 1e6]
    assert bare == spec_of("gemma3")


def test_gemma_for_embeddings_looks_both_ways() -> None:
    spec = spec_of("gemma3", architectures=["Gemma3TextModel"], use_bidirectional_attention=True)
    assert not spec.causal
    assert windows(spec)[0] == 9  # 16 positions: 8 on either side and its own


def test_longrope_of_phi3() -> None:
    """The original length beside the sizes counts; without it and without a factor it is that of the first models."""
    scaled = {"rope_parameters": LONGROPE, "max_position_embeddings": 8192}
    by_default = spec_of("phi3", original_max_position_embeddings=LEFT_OUT, **scaled).ropes[0].scaling
    assert isinstance(by_default, LongRopeScaling)
    assert by_default.original_max_position_embeddings == 4096
    given = spec_of("phi3", **{**scaled, "rope_parameters": {**LONGROPE, "factor": 4096.0}}).ropes[0].scaling
    assert isinstance(given, LongRopeScaling)
    assert given.original_max_position_embeddings == 256
    assert given.attention_factor == pytest.approx((1 + 12 / 8) ** 0.5)
    assert spec_of("phi3", **scaled).max_position_embeddings == 8192


def test_parts_of_phi3() -> None:
    spec = spec_of("phi3", partial_rotary_factor=0.75, rope_parameters=LEFT_OUT, sliding_window=8)
    parts = [spec.tensors[f"layers.2.attention.{role}.weight"].part for role in ("q", "k", "v")]
    assert parts == [Part(0, 64, 128), Part(64, 32, 128), Part(96, 32, 128)]
    name = "model.layers.2.mlp.gate_up_proj.weight"
    assert spec.tensors["layers.2.ffn.up.weight"] == Tensor((name,), part=Part(160, 160, 320))
    assert (spec.ropes[0].rotary_dim, windows(spec)) == (12, [8, 8, 8])


def test_norms_of_cohere() -> None:
    with_norms, without = spec_of("cohere"), spec_of("cohere", use_qk_norm=LEFT_OUT, rope_parameters=LEFT_OUT)
    assert heads(with_norms).qk_norm is not None
    assert (heads(without).qk_norm, without.ropes[0].theta, without.ropes[0].interleaved) == (None, 500_000.0, True)
    assert (without.layers[0].parallel, without.layers[0].ffn_norm) == (True, None)
    assert spec_of("cohere", logit_scale=LEFT_OUT).head == Head(tied=False, scale=0.0625)
    assert spec_of("cohere", tie_word_embeddings=LEFT_OUT).head == Head(tied=True, scale=0.25)


def test_layers_of_cohere2_that_see_all_are_not_rotated() -> None:
    spec = spec_of("cohere2", layer_types=LEFT_OUT, num_hidden_layers=5)
    assert windows(spec) == [16, 16, 16, None, 16]
    assert rotated(spec) == [True, True, True, False, True]
    assert rotated(spec_of("cohere2", layer_types=LEFT_OUT, sliding_window_pattern=2)) == [True, False, True]


def test_glm_without_norms_after() -> None:
    spec = renamed("glm4", "GlmForCausalLM", "glm", attention_bias=LEFT_OUT, rope_parameters=LEFT_OUT)
    layer = spec.layers[0]
    assert (layer.attention_post_norm, layer.ffn_post_norm) == (None, None)
    assert (heads(spec).bias, layer.attention.output_bias) == (True, False)
    assert (spec.ropes[0].rotary_dim, spec.ropes[0].interleaved) == (16, True)
    fields = ("head_dim", "num_key_value_heads", "rms_norm_eps")
    bare = renamed("glm4", "GlmForCausalLM", "glm", **dict.fromkeys(fields, LEFT_OUT))
    assert (heads(bare).kv_heads, heads(bare).key_dim, bare.final_norm) == (2, 128, RmsNorm(1.5625e-7))


def test_factors_of_granite() -> None:
    fields = ("attention_multiplier", "embedding_multiplier", "logits_scaling", "residual_multiplier")
    bare = spec_of("granite", **dict.fromkeys(fields, LEFT_OUT))
    assert (bare.layers[0].attention.scale, bare.layers[0].residual_scale) == (1.0, 1.0)
    assert (bare.embedding.scale, bare.head) == (1.0, Head(tied=False))
    spec = spec_of("granite")
    assert (spec.layers[0].attention.scale, spec.layers[0].residual_scale) == (0.2, 0.3)
    assert (spec.embedding.scale, spec.head) == (6.0, Head(tied=False, scale=0.25))


def test_mixtures_of_granite_lie_in_one_tensor() -> None:
    spec = renamed("granite", "GraniteMoeForCausalLM", "granitemoe", num_local_experts=6)
    assert mixture(spec) == Experts(6, 2, Dense(160), Router(scoring="softmax_of_chosen"))
    name = "model.layers.1.block_sparse_moe.input_linear.weight"
    up = spec.tensors["layers.1.ffn.experts.4.up.weight"]
    assert up == Tensor((name,), part=Part(160, 160, 320), stack=Stack(4, 6))
    with pytest.raises(UnsupportedModelError, match="mlp_bias is True"):
        renamed("granite", "GraniteMoeForCausalLM", "granitemoe", mlp_bias=True)


def test_unrotated_layers_of_smollm3() -> None:
    old = {"no_rope_layers": LEFT_OUT, "layer_types": LEFT_OUT, "num_hidden_layers": 5}
    assert rotated(spec_of("smollm3", **old)) == [True, True, True, False, True]
    assert rotated(spec_of("smollm3", **old, no_rope_layer_interval=2)) == [True, False, True, False, True]
    assert windows(spec_of("smollm3", **old, sliding_window=8)) == [None] * 5
    switched = spec_of("smollm3", **old, sliding_window=8, use_sliding_window=True)
    assert windows(switched) == [None, None, None, 8, None]
    bare = spec_of("smollm3", tie_word_embeddings=LEFT_OUT, rope_parameters=LEFT_OUT, num_key_value_heads=LEFT_OUT)
    assert (bare.head, bare.ropes[0].theta, heads(bare).kv_heads) == (Head(tied=True), 2e6, 4)


def test_defaults_of_mixtral() -> None:
    fields = ("num_local_experts", "num_experts_per_tok", "rms_norm_eps")
    spec = spec_of("mixtral", rope_parameters=LEFT_OUT, **dict.fromkeys(fields, LEFT_OUT))
    assert mixture(spec) == Experts(8, 2, Dense(160), Router(normalize=True))
    assert (spec.final_norm, spec.ropes[0].theta, windows(spec)) == (RmsNorm(1e-5), 1e6, [None] * 3)
    assert windows(spec_of("mixtral", sliding_window=8)) == [8, 8, 8]
    assert mixture(spec_of("mixtral", num_local_experts=LEFT_OUT, num_experts=5)).experts == 5


@pytest.mark.parametrize("case", ["qwen2_moe", "qwen3_moe"])
def test_some_layers_of_qwen_are_dense(case: str) -> None:
    def sparse(**changes: Any) -> list[bool]:
        return [
            found is not None for found in mixtures(spec_of(case, num_hidden_layers=4, layer_types=None, **changes))
        ]

    assert sparse() == [True] * 4
    assert sparse(decoder_sparse_step=2) == [False, True, False, True]
    assert sparse(decoder_sparse_step=2, mlp_only_layers=[1, 9]) == [False, False, False, True]
    assert spec_of(case, mlp_only_layers=[0]).layers[0].ffn == Dense(160)


def test_windows_of_qwens_mixtures() -> None:
    switched = {"use_sliding_window": True, "sliding_window": 8, "num_hidden_layers": 4}
    assert windows(spec_of("qwen2_moe", **switched, layer_types=None, max_window_layers=3)) == [8, None, 8, None]
    assert windows(spec_of("qwen2_moe", **switched, layer_types=None, max_window_layers=1)) == [8, None, None, None]
    assert windows(spec_of("qwen3_moe", **switched)) == [8] * 4
    assert windows(spec_of("qwen3_moe", **{**switched, "use_sliding_window": False})) == [None] * 4


def test_qwens_networks_for_all_tokens() -> None:
    spec = spec_of("qwen2_moe", qkv_bias=False)
    assert mixture(spec) == Experts(6, 2, Dense(48), Router(), shared=Dense(80), shared_gate=True)
    assert not heads(spec).bias
    assert mixture(spec_of("qwen3_moe", num_local_experts=LEFT_OUT, num_experts=7)).experts == 7
    assert mixture(spec_of("qwen3_moe")).router == Router(normalize=True)


def test_gpt_oss_without_its_switches() -> None:
    fields = ("rope_parameters", "layer_types", "sliding_window", "swiglu_alpha", "swiglu_limit", "head_dim")
    spec = spec_of("gpt_oss", **dict.fromkeys(fields, LEFT_OUT))
    assert windows(spec) == [128, None, 128, None]
    assert mixture(spec).expert == Dense(96, bias=True, clamp=Clamp(1.702, 7.0))
    assert (spec.ropes[0].theta, heads(spec).key_dim) == (150_000.0, 64)
    scaling = spec.ropes[0].scaling
    assert isinstance(scaling, YarnScaling)
    assert (scaling.factor, scaling.original_max_position_embeddings, scaling.truncate) == (32.0, 4096, False)
    assert spec_of("gpt_oss", rope_parameters=LEFT_OUT, rope_scaling={"rope_type": "linear", "factor": 2}).ropes[
        0
    ].scaling == LinearScaling(2.0)


def test_rows_of_gpt_oss_alternate() -> None:
    tensors = spec_of("gpt_oss").tensors
    at, stack = "model.layers.1.mlp.experts", Stack(3, 6)
    gate, up = (tensors[f"layers.1.ffn.experts.3.{role}.weight"] for role in ("gate", "up"))
    assert gate == Tensor((f"{at}.gate_up_proj",), transposed=True, part=Part(0, 1, 2), stack=stack)
    assert up == Tensor((f"{at}.gate_up_proj",), transposed=True, part=Part(1, 1, 2), stack=stack)
    bias = tensors["layers.1.ffn.experts.3.up.bias"]
    assert bias == Tensor((f"{at}.gate_up_proj_bias",), part=Part(1, 1, 2), stack=stack)


def test_the_router_of_deepseek() -> None:
    spec = spec_of("deepseek_v3", n_group=4, topk_group=2, norm_topk_prob=LEFT_OUT, routed_scaling_factor=LEFT_OUT)
    assert mixture(spec).router == Router(
        scoring="sigmoid", normalize=True, scale=2.5, correction_bias=True, groups=4, groups_chosen=2
    )
    greedy = deepseek_v2(n_group=4, topk_group=2)
    assert mixture(greedy).router == Router(scale=2.5, group_score="max")
    limited = deepseek_v2(topk_method="group_limited_greedy", n_group=4, topk_group=2)
    assert mixture(limited).router == Router(scale=2.5, groups=4, groups_chosen=2, group_score="max")
    assert mixture(deepseek_v2(n_shared_experts=3)).shared == Dense(144)


def test_the_first_layers_of_deepseek_are_dense() -> None:
    assert [found is None for found in mixtures(spec_of("deepseek_v3"))] == [True, False, False]
    assert [found is None for found in mixtures(spec_of("deepseek_v3", first_k_dense_replace=2))] == [True, True, False]
    assert [found is None for found in mixtures(deepseek_v2(first_k_dense_replace=LEFT_OUT))] == [False] * 3
    assert [found is None for found in mixtures(spec_of("deepseek_v3", first_k_dense_replace=9))] == [True] * 3


def test_latents_of_deepseek() -> None:
    fields = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "q_lora_rank")
    bare = spec_of("deepseek_v3", **dict.fromkeys(fields, LEFT_OUT))
    assert latents(bare) == LatentProjections(1536, 512, 128, 64, 128, RmsNorm(1e-6))
    # The latents' norm is not the layers'.
    assert latents(spec_of("deepseek_v3", rms_norm_eps=1e-3)).norm == RmsNorm(1e-6)
    assert latents(deepseek_v2()).query_rank is None
    assert "layers.0.attention.q.weight" in deepseek_v2().tensors
    paired = [spec_of("deepseek_v3", rope_interleave=value).ropes[0].interleaved for value in (True, False, LEFT_OUT)]
    assert paired == [True, False, True]


def test_yarn_sharpens_scores_of_deepseek() -> None:
    yarn: dict[str, Any] = {"rope_type": "yarn", "factor": 40, "original_max_position_embeddings": 64}

    def scale(**more: float) -> float:
        return spec_of("deepseek_v3", rope_parameters={**yarn, **more}).layers[0].attention.scale

    plain = 32**-0.5
    assert spec_of("deepseek_v3").layers[0].attention.scale == scale() == scale(mscale_all_dim=0) == plain
    assert scale(mscale=1.0, mscale_all_dim=1.0) == pytest.approx(plain * yarn_mscale(40, 1.0) ** 2)
    assert scale(mscale=0.5, mscale_all_dim=0.7) == pytest.approx(plain * yarn_mscale(40, 0.7) ** 2)


@pytest.mark.native
@pytest.mark.parametrize("folder", [GOLDEN / "gpt_oss", GOLDEN.parent / "variants" / "granitemoe"])
def test_experts_in_one_tensor_may_lie_below_one_another(folder: Path, tmp_path: Path) -> None:
    """As DBRX has them: `[experts * rows, columns]`, transposed or not."""
    joined = tmp_path / "joined"
    shutil.copytree(folder, joined)
    file = joined / "model.safetensors"
    file.chmod(0o644)
    header, raw = read_header(file), file.read_bytes()
    spec = read_model_files(folder).spec
    stacked = {name for tensor in spec.tensors.values() if tensor.stack is not None for name in tensor.names}
    for name in stacked:
        experts, rows, *columns = header[name]["shape"]
        header[name]["shape"] = [experts * rows, *columns]
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + int.from_bytes(raw[:8], "little") :])
    with LLM(folder, quantization="f32") as apart, LLM(joined, quantization="f32") as together:
        ids = list(range(7, 40))
        assert (apart.logits(ids) == together.logits(ids)).all()
