"""Ling 2.0 and Ring 2.0: how config.json is read, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from archs.specs import LEFT_OUT, assert_refused, heads, last_experts, sparse, spec_of
from ferrule.archs.spec import RmsNorm

CASE = "bailing_moe_v2"


def test_published_fields_load() -> None:
    """The makers' files have the model_type of their first models."""
    assert spec_of(CASE, model_type="bailing_moe").layers == spec_of(CASE).layers


def test_groups_of_experts() -> None:
    router = last_experts(spec_of(CASE, n_group=4, topk_group=2)).router
    assert (router.scoring, router.groups, router.groups_chosen, router.group_score) == ("sigmoid", 4, 2, "top2")
    assert router.correction_bias


def test_defaults_are_those_of_ling_mini() -> None:
    fields = ("rms_norm_eps", "rope_theta", "max_position_embeddings", "partial_rotary_factor", "first_k_dense_replace")
    spec = spec_of(CASE, **dict.fromkeys(fields, LEFT_OUT))
    assert (spec.final_norm, spec.max_position_embeddings) == (RmsNorm(1e-6), 32_768)
    assert (spec.ropes[0].theta, spec.ropes[0].rotary_dim, spec.ropes[0].interleaved) == (6e5, 8, False)
    assert sparse(spec) == [False, True]


def test_biases() -> None:
    assert (heads(spec_of(CASE)).bias, spec_of(CASE).layers[0].attention.output_bias) == (True, False)
    spec = spec_of(CASE, use_qkv_bias=LEFT_OUT, use_bias=True)
    assert (heads(spec).bias, spec.layers[0].attention.output_bias) == (False, True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"norm_head": True}, "norm_head must be false, got True"),
        ({"norm_topk_prob": False}, "norm_topk_prob must be true, got False"),
        ({"score_function": "softmax"}, "score_function must be \"sigmoid\", got 'softmax'"),
        ({"use_qk_norm": False}, "use_qk_norm must be true, got False"),
    ],
)
def test_unsupported_values(changes: dict[str, Any], message: str) -> None:
    assert_refused(CASE, changes, message)
