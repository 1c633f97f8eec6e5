"""GPT-2, GPT-BigCode, GPT-J, CodeGen, GPT-Neo and GPT-NeoX: how config.json is read, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from archs.specs import (
    LEFT_OUT,
    assert_refused,
    folder_of,
    projections,
    qkv_parts,
    spec_of,
    width,
    windows,
)
from ferrule import LLM, ConfigError
from ferrule.archs.spec import LayerNorm, LearnedPositions, LinearScaling, NoScaling, Part

EMBEDDING = "transformer.wte.weight"


WRONG_TYPES: list[Any] = [
    *([[["global"], 3]], [[["far"], 2]], [["global", 2]], [[["global"], "2"]], [[[1], 2]], [[[], 2]], [7], "global"),
]

REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("gpt2", {"add_cross_attention": True}, "add_cross_attention must be false, got True"),
    ("gpt2", {"n_embd": 66}, "n_embd must be a multiple of num_attention_heads (4)"),
    ("gpt2", {"n_head": 2048}, "n_head must be an integer from 1 to 1024, got 2048"),
    ("gpt2", {"n_layer": 0}, "n_layer must be an integer from 1"),
    ("gpt2", {"activation_function": "mish"}, "activation_function must be one of silu, "),
    ("gpt_bigcode", {"add_cross_attention": True}, "add_cross_attention must be false, got True"),
    ("gptj", {"rotary_dim": LEFT_OUT}, "rotary_dim must be an integer from 2 to 16, got 64"),
    ("gptj", {"rotary_dim": 7}, "rotary_dim must be such that an even number of elements is rotated (not 7), got 7"),
    ("gptj", {"rotary_dim": 18}, "rotary_dim must be an integer from 2 to 16, got 18"),
    ("gpt_neox", {"rope_parameters": LEFT_OUT, "rotary_pct": 1.5}, "rotary_pct must be at most 1, got 1.5"),
    (
        "gpt_neox",
        {"rope_parameters": LEFT_OUT, "rotary_emb_base": 0},
        "rotary_emb_base must be a finite number",
    ),
]


@pytest.mark.parametrize(("case", "changes", "message"), REFUSED)
def test_unsupported_values(case: str, changes: dict[str, Any], message: str) -> None:
    assert_refused(case, changes, message)


def test_gpt2_attention_scale() -> None:
    def scales(**changes: Any) -> list[float]:
        return [layer.attention.scale for layer in spec_of("gpt2", **changes).layers]

    assert scales() == [0.25, 0.25, 0.25]
    assert scales(scale_attn_by_inverse_layer_idx=True) == [0.25, 0.125, 0.25 / 3]
    assert scales(scale_attn_weights=False) == [1, 1, 1]
    assert spec_of("gpt_bigcode", scale_attn_weights=False).layers[0].attention.scale == 1


@pytest.mark.parametrize("case", ["gpt2", "gpt_bigcode", "gptj"])
def test_default_intermediate_size_is_four_times_the_hidden_size(case: str) -> None:
    assert width(spec_of(case)) == 4 * 64
    assert width(spec_of(case, n_inner=96)) == 96


def test_gpt2_matrices_are_transposed() -> None:
    spec = spec_of("gpt2")
    assert qkv_parts(spec) == [Part(0, 64, 192), Part(64, 64, 192), Part(128, 64, 192)]
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


def test_gpt_bigcode_multi_query_attention() -> None:
    single, many = spec_of("gpt_bigcode"), spec_of("gpt_bigcode", multi_query=False)
    assert (projections(single.layers[0]).kv_heads, projections(many.layers[0]).kv_heads) == (1, 4)
    assert qkv_parts(single) == [Part(0, 64, 96), Part(64, 16, 96), Part(80, 16, 96)]
    assert qkv_parts(many) == [Part(0, 16, 48), Part(16, 16, 48), Part(32, 16, 48)]


def test_codegen_is_gptj_in_four_shards() -> None:
    spec = spec_of("gptj", architectures=["CodeGenForCausalLM"], model_type="codegen")
    assert qkv_parts(spec) == [Part(0, 16, 48), Part(32, 16, 48), Part(16, 16, 48)]
    assert spec.layers == spec_of("gptj").layers
    with pytest.raises(ConfigError, match="n_head must be a multiple of 4, got 2"):
        spec_of("gptj", architectures=["CodeGenForCausalLM"], n_head=2)


def test_gpt_neox_old_config_spelling() -> None:
    old = spec_of("gpt_neox", rope_parameters=LEFT_OUT, rotary_pct=0.5, rotary_emb_base=5000)
    assert (old.ropes[0].theta, old.ropes[0].rotary_dim) == (5000, 8)
    scaled = spec_of("gpt_neox", rope_parameters=LEFT_OUT, rope_scaling={"type": "linear", "factor": 2})
    assert (scaled.ropes[0].rotary_dim, scaled.ropes[0].scaling) == (4, LinearScaling(2.0))
    assert spec_of("gpt_neox").ropes[0].scaling == NoScaling()


def test_gpt_neox_parallel_residual() -> None:
    aside, serial = spec_of("gpt_neox"), spec_of("gpt_neox", use_parallel_residual=False, attention_bias=False)
    assert (aside.layers[0].block("ffn").parallel, serial.layers[0].block("ffn").parallel) == (True, False)
    assert aside.layers[0].block("ffn").norm == serial.layers[0].block("ffn").norm == LayerNorm(1e-5)
    assert (projections(aside.layers[0]).bias, projections(serial.layers[0]).bias) == (True, False)
    assert spec_of("gpt_neox", num_key_value_heads=2) == aside


def test_gptj_and_phi_lm_head_has_a_bias() -> None:
    for case in ("gptj", "phi"):
        head = spec_of(case, tie_word_embeddings=True).lm_head
        assert head is not None
        assert (head.tied, head.bias) == (True, True)


@pytest.mark.native
def test_tied_lm_head_keeps_its_bias(tmp_path: Path) -> None:
    """A GPT-J checkpoint whose lm_head equals its embedding gives the same logits as one with tied weights."""
    content = bytearray((folder_of("gptj") / "model.safetensors").read_bytes())
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    spans = [slice(*(start + end for end in header[name]["data_offsets"])) for name in ("lm_head.weight", EMBEDDING)]
    content[spans[0]] = content[spans[1]]
    config = json.loads((folder_of("gptj") / "config.json").read_text())
    logits: list[npt.NDArray[np.float32]] = []
    for tied in (True, False):
        model = tmp_path / str(tied)
        model.mkdir()
        (model / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": tied}))
        (model / "model.safetensors").write_bytes(content)
        with LLM(model, quantization="f32") as llm:
            logits.append(llm.logits([5, 6, 7]))
    np.testing.assert_array_equal(logits[0], logits[1])


@pytest.mark.parametrize("types", WRONG_TYPES)
def test_gpt_neo_refuses_bad_attention_types(types: Any) -> None:
    with pytest.raises(ConfigError, match=r"attention_types must be lists of global and local"):
        spec_of("gpt_neo", attention_types=types)


def test_gpt_neo_attention_types() -> None:
    spec = spec_of("gpt_neo", attention_types=[[["local"], 1], [["global"], 1]])
    assert windows(spec) == [16, None]
    assert spec.layers[0].attention.scale == 1
    assert spec.embedding.positions == LearnedPositions(256)
    assert windows(spec_of("gpt_neo", num_layers=24, attention_types=LEFT_OUT)) == [None, 16] * 12
