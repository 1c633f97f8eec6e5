"""MiniCPM3, MiniMax-M2, CWM, dots.llm1 and Nemotron: how config.json is read, and what is refused."""

from __future__ import annotations

import math

import pytest

from archs.specs import LEFT_OUT, spec_of, windows
from ferrule import ConfigError
from ferrule.archs.spec import LatentProjections, LayerNorm, Llama3Scaling


def test_minicpm3_multipliers() -> None:
    spec = spec_of("minicpm3", scale_depth=LEFT_OUT, dim_model_base=LEFT_OUT)
    assert spec.lm_head is not None
    assert (spec.layers[0].block("ffn").residual_scale, spec.lm_head.scale) == (1.4 / math.sqrt(2), 256 / 64)
    spec = spec_of("minicpm3", scale_depth=None, dim_model_base=None, scale_emb=3, v_head_dim=None)
    projections = spec.layers[0].attention.projections
    assert spec.lm_head is not None
    assert isinstance(projections, LatentProjections)
    assert (spec.layers[0].block("ffn").residual_scale, spec.lm_head.scale, spec.embedding.scale) == (1, 1, 3)
    assert projections.value_dim == 16


def test_minimax_m2_rotary_dim() -> None:
    assert spec_of("minimax_m2").ropes[0].rotary_dim == 8
    assert spec_of("minimax_m2", rotary_dim=LEFT_OUT).ropes[0].rotary_dim == 16
    assert spec_of("minimax_m2", partial_rotary_factor=0.25).ropes[0].rotary_dim == 4
    with pytest.raises(ConfigError, match="rotary_dim must be an integer from 2 to 16, got 18"):
        spec_of("minimax_m2", rotary_dim=18)


def test_cwm_default_rope() -> None:
    spec = spec_of("cwm", rope_parameters=LEFT_OUT, layer_types=LEFT_OUT, max_position_embeddings=LEFT_OUT)
    assert windows(spec) == [None, 16, 16]
    (rope,) = spec.ropes
    assert (rope.theta, type(rope.scaling)) == (1e6, Llama3Scaling)
    plain = spec_of("cwm", rope_parameters=LEFT_OUT, rope_scaling={"type": "linear", "factor": 2.0})
    assert type(plain.ropes[0].scaling) is not Llama3Scaling


def test_dots1_max_window_layers() -> None:
    assert windows(spec_of("dots1", layer_types=LEFT_OUT)) == [None, None]
    switched = spec_of("dots1", layer_types=LEFT_OUT, sliding_window=16, max_window_layers=1)
    assert windows(switched) == [None, 16]


def test_nemotron_norm_weights_are_offsets_from_1() -> None:
    assert spec_of("nemotron").final_norm == LayerNorm(1e-5, weight_offset=1.0)
    assert spec_of("nemotron", partial_rotary_factor=LEFT_OUT).ropes[0].rotary_dim == 8
