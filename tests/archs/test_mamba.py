"""Mamba 2 and its hybrids: how config.json is read, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from archs.specs import LEFT_OUT, assert_refused, spec_of
from ferrule.archs.spec import Attention, Dense, Experts, Mamba2, ModelSpec, Part, Tensor

REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("mamba2", {"num_heads": 3}, "num_heads must be such that num_heads * head_dim is expand * hidden_size (128)"),
    ("mamba2", {"n_groups": 3}, "n_groups must be a divisor of the number of heads (8)"),
    ("mamba2", {"time_step_limit": [1.0, 0.5]}, "time_step_limit must be a list of two numbers"),
    ("bamba", {"mamba_n_heads": 5}, "mamba_n_heads must be such that mamba_n_heads * mamba_d_head is 128"),
    (
        "granitemoehybrid",
        {"layer_types": ["conv"] * 3},
        "layer_types must be a list of 3 items, each mamba or attention",
    ),
    ("nemotron_h", {"hybrid_override_pattern": "MX"}, "hybrid_override_pattern must be a string of M, *, E, -"),
    ("nemotron_h", {"hybrid_override_pattern": LEFT_OUT}, "layers_block_type must be a list of mamba"),
    ("nemotron_h", {"moe_latent_size": 8}, "moe_latent_size must be null"),
]


@pytest.mark.parametrize(("case", "changes", "message"), REFUSED)
def test_unsupported_values(case: str, changes: dict[str, Any], message: str) -> None:
    assert_refused(case, changes, message)


def mixer(spec: ModelSpec) -> Mamba2:
    return spec.layers[0].mixers(Mamba2)[0]


def test_step_limits() -> None:
    assert (mixer(spec_of("mamba2")).min_step, mixer(spec_of("mamba2")).max_step) == (0.0, None)
    limited = mixer(spec_of("mamba2", time_step_limit=[0.001, 0.1]))
    assert (limited.min_step, limited.max_step) == (0.001, 0.1)
    assert mixer(spec_of("mamba2", time_step_limit=[0.0, float("inf")])).max_step is None


def test_tensors_of_a_mixer() -> None:
    tensors = spec_of("mamba2").tensors
    at = "backbone.layers.1.mixer"
    assert tensors["layers.1.mamba2.step.weight"] == Tensor((f"{at}.in_proj.weight",), part=Part(320, 8, 328))
    assert tensors["layers.1.mamba2.decay_log.weight"] == Tensor((f"{at}.A_log",))
    assert tensors["layers.1.mamba2.kernel.bias"] == Tensor((f"{at}.conv1d.bias",))


def test_layers_of_nemotron_have_one_mixer_each() -> None:
    spec = spec_of("nemotron_h")
    kinds = [type(block.mixer) for layer in spec.layers for block in layer.blocks]
    assert kinds == [Mamba2, Experts, Attention, Dense, Mamba2, Experts, Attention, Dense]
    assert spec.layers[2].attention.rope is None
    new = {"hybrid_override_pattern": LEFT_OUT, "layers_block_type": ["mamba", "moe", "attention", "mlp"]}
    assert [type(layer.blocks[0].mixer) for layer in spec_of("nemotron_h", **new).layers] == kinds[:4]


def test_granite_is_hybrid_dense_or_without_mamba() -> None:
    hybrid = spec_of("granitemoehybrid")
    assert [bool(layer.mixers(Attention)) for layer in hybrid.layers] == [False, True, False]
    assert (hybrid.layers[1].attention.rope, hybrid.layers[0].mixers(Experts)[0].shared) == (None, Dense(32))
    assert spec_of("granitemoehybrid_dense").layers[0].mixers(Experts) == []
    assert spec_of("granitemoehybrid_rope").layers[0].attention.rope == 0
