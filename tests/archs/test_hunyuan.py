"""HunYuan, dense and with experts: how config.json is read, and what is refused."""

from __future__ import annotations

import pytest

from archs.specs import LEFT_OUT, experts, last_experts, sparse, spec_of
from ferrule import ConfigError, UnsupportedModelError
from ferrule.archs.spec import Dense, DynamicScaling, NoScaling, Rope


def test_hunyuan_alpha_changes_the_rope_base() -> None:
    (rope,) = spec_of("hunyuan_v1_dense").ropes
    assert (rope.rotary_dim, rope.scaling) == (16, NoScaling())
    assert rope.theta == pytest.approx(10_000 * 50 ** (16 / 14))
    dynamic = spec_of("hunyuan_v1_dense", rope_scaling={"type": "dynamic", "factor": 2.0, "alpha": 0})
    assert isinstance(dynamic.ropes[0].scaling, DynamicScaling)
    assert spec_of("hunyuan_v1_dense", rope_scaling=None).ropes == [Rope(10_000.0, rotary_dim=16)]
    for alpha in (1e37, 1e300):
        with pytest.raises(ConfigError, match=r"rope_scaling\.alpha must be small enough"):
            spec_of("hunyuan_v1_dense", rope_scaling={"type": "dynamic", "alpha": alpha})
    with pytest.raises(ConfigError, match=r"an even number of elements is rotated \(not 15\)"):
        spec_of("hunyuan_v1_dense", head_dim=15)


def test_hunyuan_moe_counts_by_layer() -> None:
    found = [mixture for mixture in experts(spec_of("hunyuan_v1_moe")) if mixture is not None]
    assert [(mixture.experts, mixture.experts_per_token) for mixture in found] == [(6, 2), (6, 3)]
    with pytest.raises(ConfigError, match=r"moe_topk must be an integer, or a list of 2 integers, got \[2\]"):
        spec_of("hunyuan_v1_moe", moe_topk=[2])
    with pytest.raises(ConfigError, match=r"moe_topk must be a list of integers from 1"):
        spec_of("hunyuan_v1_moe", moe_topk=[2, 0])


def test_hunyuan_3_experts() -> None:
    found = last_experts(spec_of("hy_v3"))
    assert (found.router.scoring, found.router.correction_bias, found.router.scale) == ("sigmoid", True, 2.826)
    assert (found.expert, found.shared) == (Dense(16), Dense(16))
    assert sparse(spec_of("hy_v3")) == [False, True, True]
    assert sparse(spec_of("hy_v3", mlp_layer_types=LEFT_OUT, first_k_dense_replace=2)) == [False, False, True]
    with pytest.raises(UnsupportedModelError, match="route_norm must be true, got False"):
        spec_of("hy_v3", route_norm=False)
