"""DeepSeek-V2 and DeepSeek-V3: how config.json is read, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from archs.specs import LEFT_OUT, assert_refused, experts, last_experts, latents, renamed, spec_of
from ferrule import ConfigError, UnsupportedModelError
from ferrule.archs.rope import yarn_mscale
from ferrule.archs.spec import Dense, LatentProjections, ModelSpec, RmsNorm, Router

REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func must be \"sigmoid\", got 'softmax'"),
    ("deepseek_v3", {"topk_method": "greedy"}, "topk_method must be \"noaux_tc\", got 'greedy'"),
    ("deepseek_v3", {"moe_layer_freq": 2}, "moe_layer_freq must be 1, got 2"),
    ("deepseek_v3", {"mlp_bias": True}, "mlp_bias must be false, got True"),
    ("deepseek_v3", {"kv_lora_rank": 0}, "kv_lora_rank must be an integer from 1"),
    (
        "deepseek_v3",
        {"rope_parameters": {"rope_type": "yarn", "mscale_all_dim": 1e308, "factor": 4}},
        "rope_parameters.mscale_all_dim must be small enough for scores to be finite, got 1e+308",
    ),
]


@pytest.mark.parametrize(("case", "changes", "message"), REFUSED)
def test_unsupported_values(case: str, changes: dict[str, Any], message: str) -> None:
    assert_refused(case, changes, message)


def deepseek_v2(**changes: Any) -> ModelSpec:
    """Spec of DeepSeek-V2-Lite, derived from the golden case of V3."""
    lite = {"q_lora_rank": None, "topk_method": "greedy", "norm_topk_prob": False}
    return renamed("deepseek_v3", "DeepseekV2ForCausalLM", "deepseek_v2", **{**lite, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"topk_method": "noaux_tc"}, "topk_method must be greedy or group_limited_greedy, got 'noaux_tc'"),
        ({"norm_topk_prob": True}, "norm_topk_prob must be false, got True"),
        ({"scoring_func": "sigmoid"}, "scoring_func must be \"softmax\", got 'sigmoid'"),
        ({"topk_method": "group_limited_greedy", "n_group": None}, "n_group must be an integer"),
    ],
)
def test_deepseek_v2_unsupported_values(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        deepseek_v2(**changes)
    assert message in str(caught.value)


def test_deepseek_v3_unsupported_values_raise_unsupported_model_error() -> None:
    for changes in ({"moe_layer_freq": 2}, {"scoring_func": "softmax"}):
        with pytest.raises(UnsupportedModelError):
            spec_of("deepseek_v3", **changes)


def test_deepseek_router() -> None:
    spec = spec_of("deepseek_v3", n_group=4, topk_group=2, norm_topk_prob=LEFT_OUT, routed_scaling_factor=LEFT_OUT)
    assert last_experts(spec).router == Router(
        scoring="sigmoid", normalize=True, scale=2.5, correction_bias=True, groups=4, groups_chosen=2
    )
    greedy = deepseek_v2(n_group=4, topk_group=2)
    assert last_experts(greedy).router == Router(scale=2.5, group_score="max")
    limited = deepseek_v2(topk_method="group_limited_greedy", n_group=4, topk_group=2)
    assert last_experts(limited).router == Router(scale=2.5, groups=4, groups_chosen=2, group_score="max")
    assert last_experts(deepseek_v2(n_shared_experts=3)).shared == Dense(144)


def test_deepseek_first_layers_are_dense() -> None:
    assert [found is None for found in experts(spec_of("deepseek_v3"))] == [True, False, False]
    assert [found is None for found in experts(spec_of("deepseek_v3", first_k_dense_replace=2))] == [True, True, False]
    assert [found is None for found in experts(deepseek_v2(first_k_dense_replace=LEFT_OUT))] == [False] * 3
    assert [found is None for found in experts(spec_of("deepseek_v3", first_k_dense_replace=9))] == [True] * 3


def test_deepseek_latent_projections() -> None:
    fields = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "q_lora_rank")
    bare = spec_of("deepseek_v3", **dict.fromkeys(fields, LEFT_OUT))
    assert latents(bare) == LatentProjections(1536, 512, 128, 64, 128, RmsNorm(1e-6))
    # The norm of the latents has a separate eps.
    assert latents(spec_of("deepseek_v3", rms_norm_eps=1e-3)).norm == RmsNorm(1e-6)
    assert latents(deepseek_v2()).query_rank is None
    assert "layers.0.attention.q.weight" in deepseek_v2().tensors
    paired = [spec_of("deepseek_v3", rope_interleave=value).ropes[0].interleaved for value in (True, False, LEFT_OUT)]
    assert paired == [True, False, True]


def test_deepseek_yarn_scales_attention_scores() -> None:
    yarn: dict[str, Any] = {"rope_type": "yarn", "factor": 40, "original_max_position_embeddings": 64}

    def scale(**more: float) -> float:
        return spec_of("deepseek_v3", rope_parameters={**yarn, **more}).layers[0].attention.scale

    plain = 32**-0.5
    assert spec_of("deepseek_v3").layers[0].attention.scale == scale() == scale(mscale_all_dim=0) == plain
    assert scale(mscale=1.0, mscale_all_dim=1.0) == pytest.approx(plain * yarn_mscale(40, 1.0) ** 2)
    assert scale(mscale=0.5, mscale_all_dim=0.7) == pytest.approx(plain * yarn_mscale(40, 0.7) ** 2)
