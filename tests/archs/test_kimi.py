"""Kimi Linear and Bailing hybrid: how config.json is read, and what is refused."""

from __future__ import annotations

import math
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from archs.specs import LEFT_OUT, assert_refused, folder_of, spec_of
from ferrule import LLM
from ferrule.archs.bailing_hybrid import LIMITS
from ferrule.archs.spec import (
    Attention,
    Clamp,
    Decay,
    DeltaNet,
    Experts,
    LatentProjections,
    ModelSpec,
    Part,
    RmsNorm,
    Stack,
    Tensor,
)
from quantized_files import read, write

LINEAR = {"head_dim": 8, "num_heads": 2, "short_conv_kernel_size": 3}
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("kimi_linear", {"mla_use_nope": False}, "mla_use_nope must be true, got False"),
    ("kimi_linear", {"moe_router_activation_func": "softmax"}, 'moe_router_activation_func must be "sigmoid"'),
    ("kimi_linear", {"mla_use_output_gate": True}, "mla_use_output_gate must be false, got True"),
    ("kimi_linear", {"attn_res_block_size": 4}, "attn_res_block_size must be null, got 4"),
    ("kimi_linear", {"dense_ffn_hidden": 64}, "dense_ffn_hidden must be null, got 64"),
    (
        "kimi_linear",
        {"linear_attn_config": {"kda_layers": [1, 2], "full_attn_layers": [3]}},
        "linear_attn_config.kda_layers must be the layers from 1 to 4 that full_attn_layers does not have, got [1, 2]",
    ),
    ("kimi_linear", {"linear_attn_config": {"head_dim": 0}}, "linear_attn_config.head_dim must be an integer from 1"),
    ("kimi_linear", {"num_experts": 0}, "num_experts must be an integer from 1"),
    (
        "bailing_hybrid",
        {"gated_attention_proj_granularity_type": "element_wise"},
        "gated_attention_proj_granularity_type must be \"head_wise\", got 'element_wise'",
    ),
    ("bailing_hybrid", {"no_kda_lora": False}, "no_kda_lora must be true, got False"),
    ("bailing_hybrid", {"kda_lower_bound": 1.0}, "kda_lower_bound must be at most 0, got 1.0"),
    ("bailing_hybrid", {"layer_types": ["conv"] * 3}, "layer_types must be a list of 3 items"),
    *(
        ("bailing_hybrid", {field: limits}, f"{field} must be a list of finite numbers from 0, or null for no limit")
        for field in LIMITS
        for limits in (4.0, [-1], [math.nan], [math.inf], ["4"], [True], [10**400])
    ),
]


@pytest.mark.parametrize(("case", "changes", "message"), REFUSED)
def test_unsupported_values(case: str, changes: dict[str, Any], message: str) -> None:
    assert_refused(case, changes, message)


def attending(spec: ModelSpec) -> list[int]:
    return [index for index, layer in enumerate(spec.layers) if layer.mixers(Attention)]


def delta_net(spec: ModelSpec) -> DeltaNet:
    (mixer,) = spec.layers[0].mixers(DeltaNet)
    return mixer


def experts(spec: ModelSpec) -> Experts:
    (mixer,) = spec.layers[-1].mixers(Experts)
    return mixer


def test_layers_with_attention() -> None:
    assert attending(spec_of("kimi_linear")) == [2]
    by_type = ["full_attention", "linear_attention"] * 2
    assert attending(spec_of("kimi_linear", layer_types=by_type)) == [0, 2]
    more = {"num_hidden_layers": 9, "linear_attn_config": LINEAR}
    assert attending(spec_of("kimi_linear", **more)) == [4, 8]
    assert attending(spec_of("bailing_hybrid")) == [1]
    assert attending(spec_of("bailing_hybrid", layer_types=LEFT_OUT, layer_group_size=3)) == [2]


def test_sizes_of_delta_nets() -> None:
    norm = RmsNorm(1e-5)
    low_rank = DeltaNet(4, 4, 16, 16, 4, norm, decay=Decay(by_key=True, rank=16), gate="sigmoid", gate_rank=16)
    assert delta_net(spec_of("kimi_linear")) == low_rank
    beside = {"linear_head_dim": 8, "linear_num_heads": 2, "linear_conv_kernel_dim": 3}
    found = [delta_net(spec_of("kimi_linear", linear_attn_config=config, **beside)) for config in (LINEAR, LEFT_OUT)]
    assert (
        found[0]
        == found[1]
        == DeltaNet(2, 2, 8, 8, 3, norm, decay=Decay(by_key=True, rank=8), gate="sigmoid", gate_rank=8)
    )
    bounded = spec_of("bailing_hybrid", linear_head_dim=LEFT_OUT, head_dim=8, linear_num_heads=LEFT_OUT)
    assert delta_net(bounded) == DeltaNet(
        4, 4, 8, 8, 4, RmsNorm(1e-6), decay=Decay(by_key=True, lower_bound=-5.0), gate="sigmoid"
    )
    assert delta_net(spec_of("bailing_hybrid", kda_safe_gate=False)).decay == Decay(by_key=True)


def test_activation_after_the_convolution() -> None:
    for case in ("kimi_linear", "bailing_hybrid"):
        spec = spec_of(case, hidden_act="gelu")
        assert (delta_net(spec).activation, experts(spec).expert.activation) == ("gelu", "gelu")


def test_latent_attention_is_rotated_in_bailing_only() -> None:
    kimi, bailing = spec_of("kimi_linear"), spec_of("bailing_hybrid")
    assert (kimi.ropes, kimi.layers[2].attention.rope, kimi.layers[2].attention.output_gate) == ([], None, None)
    (rope,) = bailing.ropes
    assert (rope.theta, rope.rotary_dim, rope.interleaved) == (6e6, 16, True)
    assert bailing.layers[1].attention.output_gate == "heads"
    for spec, layer in ((kimi, 2), (bailing, 1)):
        projections = spec.layers[layer].attention.projections
        assert isinstance(projections, LatentProjections)
        assert (projections.query_rank, projections.rope_dim, projections.norm) == (None, 16, RmsNorm(1e-6))
    assert spec_of("bailing_hybrid", rope_parameters=LEFT_OUT, rope_theta=1e4).ropes[0].theta == 1e4


def test_experts() -> None:
    kimi = spec_of("kimi_linear", moe_renormalize=False, num_shared_experts=2)
    router = experts(kimi).router
    assert (router.scoring, router.normalize, router.scale, router.groups) == ("sigmoid", False, 2.446, 1)
    assert experts(kimi).shared is not None
    assert [len(layer.mixers(Experts)) for layer in kimi.layers] == [0, 1, 1, 1]
    assert len(spec_of("kimi_linear", first_k_dense_replace=0).layers[0].mixers(Experts)) == 1
    sparse_first = {"mlp_layer_types": ["sparse", "dense", "dense", "sparse"]}
    assert [len(layer.mixers(Experts)) for layer in spec_of("kimi_linear", **sparse_first).layers] == [1, 0, 0, 1]
    router = experts(spec_of("bailing_hybrid")).router
    assert (router.groups, router.groups_chosen) == (2, 1)


def test_tensors() -> None:
    kimi, bailing = spec_of("kimi_linear"), spec_of("bailing_hybrid")
    convolutions = ("q_conv1d", "k_conv1d", "v_conv1d")
    for spec, at in ((kimi, "model.layers.0.self_attn"), (bailing, "model.layers.0.attention")):
        assert spec.tensors["layers.0.delta_net.kernel.weight"].names == tuple(f"{at}.{n}.weight" for n in convolutions)
        assert spec.tensors["lm_head.weight"] == Tensor(("lm_head.weight",))
    assert kimi.tensors["layers.0.delta_net.decay_a.weight"].names == ("model.layers.0.self_attn.f_a_proj.weight",)
    assert kimi.tensors["layers.0.delta_net.gate_b.weight"].names == ("model.layers.0.self_attn.g_b_proj.weight",)
    assert bailing.tensors["layers.0.delta_net.decay.weight"].names == ("model.layers.0.attention.f_proj.weight",)
    assert kimi.tensors["layers.2.ffn.experts.3.up.weight"] == Tensor(
        ("model.layers.2.block_sparse_moe.experts.3.w3.weight",),
        alternative=Tensor(
            ("model.layers.2.block_sparse_moe.experts.gate_up_proj",), part=Part(16, 16, 32), stack=Stack(3, 6)
        ),
    )
    assert kimi.tensors["layers.0.ffn.up.weight"] == Tensor(
        ("model.layers.0.mlp.up_proj.weight",),
        alternative=Tensor(("model.layers.0.block_sparse_moe.up_proj.weight",)),
    )
    bias = bailing.tensors["layers.2.ffn.router.correction_bias"]
    assert bias == Tensor(("model.layers.2.mlp.gate.expert_bias",))


def test_published_tensors_of_bailing() -> None:
    """Ling 3 tiny has queries of low rank. The outputs of delta nets and of attention have different names."""
    spec = spec_of("bailing_hybrid", q_lora_rank=8)
    projections = spec.layers[1].attention.projections
    assert isinstance(projections, LatentProjections)
    assert projections.query_rank == 8
    at = "model.layers.1.attention"
    for role, name in (("q_a", "q_a_proj"), ("q_a_norm", "q_a_layernorm"), ("q_b", "q_b_proj")):
        assert spec.tensors[f"layers.1.attention.{role}.weight"].names == (f"{at}.{name}.weight",)
    output = spec.tensors["layers.0.delta_net.output.weight"]
    assert output == Tensor(
        ("model.layers.0.attention.dense.weight",), alternative=Tensor(("model.layers.0.attention.o_proj.weight",))
    )


@pytest.mark.native
def test_published_names_of_bailing_load(tmp_path: Path) -> None:
    published = tmp_path / "model"
    shutil.copytree(folder_of("bailing_hybrid"), published)
    (published / "model.safetensors").chmod(0o644)
    tensors = read(published)
    write(published, {re.sub(r"([02]\.attention)\.dense", r"\1.o_proj", name): each for name, each in tensors.items()})
    with LLM(folder_of("bailing_hybrid"), quantization="f32") as llm, LLM(published, quantization="f32") as other:
        assert (llm.logits([1, 2, 3]) == other.logits([1, 2, 3])).all()


def test_limits_of_bailings_experts() -> None:
    """The limit of silu(gate) is a limit of the gate; lists may end before the last layer."""
    spec = spec_of("bailing_hybrid", **dict(zip(LIMITS, ([0, 4], [None, 0, 5.0]), strict=True)))

    def clamps(layer: int) -> list[Clamp | None]:
        (mixer,) = spec.layers[layer].mixers(Experts)
        assert mixer.shared is not None
        return [mixer.expert.clamp, mixer.shared.clamp]

    assert not spec.layers[0].mixers(Experts)
    (limited, none), (no_limit, shared) = clamps(1), clamps(2)
    assert none is no_limit is None
    for clamp, limit in ((limited, 4.0), (shared, 5.0)):
        assert clamp is not None
        assert (clamp.alpha, clamp.limit, clamp.offset) == (1.0, limit, 0.0)
        assert clamp.gate_limit is not None
        assert clamp.gate_limit / (1 + math.exp(-clamp.gate_limit)) == pytest.approx(limit, rel=1e-15)
    assert spec_of("bailing_hybrid", **dict.fromkeys(LIMITS)).layers == spec_of("bailing_hybrid").layers


def test_published_fields_of_bailing_load() -> None:
    """Published files name another class, and state a factor of the rotated part that has no effect."""
    ropes = {"rope_type": "default", "rope_theta": 6e6, "partial_rotary_factor": 0.5}
    published = spec_of(
        "bailing_hybrid", architectures=["BailingMoeV3ForCausalLM"], partial_rotary_factor=0.5, rope_parameters=ropes
    )
    assert published == spec_of("bailing_hybrid")


def test_defaults_of_experts_differ_between_kimi_and_bailing() -> None:
    missing = {"first_k_dense_replace": LEFT_OUT, "moe_intermediate_size": LEFT_OUT, "mlp_layer_types": LEFT_OUT}
    for name, dense, size in (("kimi_linear", 1, 1024), ("bailing_hybrid", 2, 768)):
        networks = [layer.blocks[-1].mixer for layer in spec_of(name, **missing).layers]
        sparse = [network for network in networks if isinstance(network, Experts)]
        assert len(networks) - len(sparse) == dense
        assert {network.expert.intermediate_size for network in sparse} == {size}
