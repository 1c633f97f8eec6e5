"""OPT and XGLM: how config.json is read, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from archs.specs import assert_refused, spec_of
from ferrule.archs.spec import LayerNorm, LearnedPositions, SinusoidalPositions

REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("opt", {"word_embed_proj_dim": 0}, "word_embed_proj_dim must be an integer from 1"),
    ("xglm", {"pad_token_id": 2}, "pad_token_id must be below 2, got 2"),
    (
        "xglm",
        {"max_position_embeddings": 1 << 20},
        "max_position_embeddings must be an integer from 1 to",
    ),
    ("xglm", {"add_cross_attention": True}, "add_cross_attention must be false, got True"),
]


@pytest.mark.parametrize(("case", "changes", "message"), REFUSED)
def test_unsupported_values(case: str, changes: dict[str, Any], message: str) -> None:
    assert_refused(case, changes, message)


def test_opt_350m_has_post_norms_and_narrow_embeddings() -> None:
    """opt-350m has norms after the residual sums, and embeddings narrower than the hidden size."""
    usual = spec_of("opt")
    assert usual.embedding.positions == LearnedPositions(rows=258, offset=2)
    assert (usual.embedding.width, usual.final_norm) == (None, LayerNorm(1e-5))
    odd = spec_of("opt", do_layer_norm_before=False, word_embed_proj_dim=32)
    block = odd.layers[0].block("attention")
    assert (block.norm, block.sum_norm, odd.final_norm) == (None, LayerNorm(1e-5), None)
    assert odd.embedding.width == 32
    assert odd.tensors["lm_head_projection.weight"].names == ("model.decoder.project_out.weight",)
    bare = spec_of("opt", enable_bias=False, layer_norm_elementwise_affine=False)
    assert not [role for role in bare.tensors if role.endswith("bias") or "norm" in role]
    assert spec_of("opt", _remove_final_layer_norm=True).final_norm is None


def test_xglm_embeddings() -> None:
    assert spec_of("xglm").embedding.positions == SinusoidalPositions(offset=2)
    assert spec_of("xglm").embedding.scale == 8
    assert spec_of("xglm", scale_embedding=False).embedding.scale == 1
