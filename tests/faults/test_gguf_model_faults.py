"""Well-formed GGUF files with invalid metadata values and tensor shapes.

Each file is the embedded model with one changed key or tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGUFWriter

from conftest import TINY
from faults.isolated import assert_refused, run
from gguf_convert import add, add_tensor, add_tokenizer

WARM_UP = """
    import ferrule
    from ferrule import LLM, model_info
    model_info(arguments[1])
"""
LOAD = "model_info(arguments[0])"

LLAMA: dict[str, Any] = {
    "llama.block_count": 1,
    "llama.context_length": 256,
    "llama.embedding_length": 32,
    "llama.feed_forward_length": 64,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.dimension_count": 8,
}
TOKENS = 4096
SHAPES = {
    "token_embd": (TOKENS, 32),
    "output_norm": (32,),
    "blk.0.attn_norm": (32,),
    "blk.0.attn_q": (32, 32),
    "blk.0.attn_k": (16, 32),
    "blk.0.attn_v": (16, 32),
    "blk.0.attn_output": (32, 32),
    "blk.0.ffn_norm": (32,),
    "blk.0.ffn_gate": (64, 32),
    "blk.0.ffn_up": (64, 32),
    "blk.0.ffn_down": (32, 64),
}


def write(path: Path, keys: dict[str, Any] | None = None, without: str = "", **shapes: tuple[int, ...]) -> Path:
    """Writes a small Llama with the embedded model's tokenizer; a value may be a function of the default value."""
    writer = GGUFWriter(path, "llama")
    for key, value in LLAMA.items():
        add(writer, key, value)
    add_tokenizer(writer, TINY)
    stored = writer.kv_data[0]
    for key, value in (keys or {}).items():
        usual = stored.pop(key).value if key in stored else None
        changed = value(usual) if callable(value) else value
        if isinstance(changed, gguf.GGUFValue):
            stored[key] = changed
        elif isinstance(changed, list):
            writer.add_array(key, changed)
        elif changed is not None:
            add(writer, key, changed)
    for name, shape in (SHAPES | shapes).items():
        if name != without:
            add_tensor(writer, f"{name}.weight", np.zeros(shape, np.float32), "F32")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def at(index: int, value: object) -> Callable[[list[Any]], list[Any]]:
    """Returns a function that replaces one element of a list."""
    return lambda usual: [*usual[:index], value, *usual[index + 1 :]]


SENTENCEPIECE = {"tokenizer.ggml.model": "llama", "tokenizer.ggml.merges": None}
SCORES, TYPES, MERGES = "tokenizer.ggml.scores", "tokenizer.ggml.token_type", "tokenizer.ggml.merges"
LIST = "tokenizer.ggml.tokens"

FAULTS: list[tuple[str, str, dict[str, Any], list[str]]] = [
    ("18-scores-missing", "TokenizerError", SENTENCEPIECE, [SCORES, "missing"]),
    (
        "18-scores-text",
        "TokenizerError",
        {**SENTENCEPIECE, SCORES: ["a"] * TOKENS},
        [f"{SCORES}[0] must be a finite number, got 'a'"],
    ),
    ("18-scores-nan", "TokenizerError", {**SENTENCEPIECE, SCORES: [float("nan")] * TOKENS}, [SCORES, "nan"]),
    (
        "18-scores-number",
        "TokenizerError",
        {**SENTENCEPIECE, SCORES: 7},
        [SCORES, "must be a list of finite numbers, got 7", "a list"],
    ),
    (
        "18-scores-few",
        "TokenizerError",
        {**SENTENCEPIECE, SCORES: [0.0] * 7},
        [SCORES, "4096 elements, one for each token, got 7", "4096"],
    ),
    ("18-scores-flags", "TokenizerError", {**SENTENCEPIECE, SCORES: [True] * TOKENS}, [SCORES, "True"]),
    (
        "19-eos",
        "ConfigError",
        {"tokenizer.ggml.eos_token_id": 4096},
        ["tokenizer.ggml.eos_token_id must be a token id from 0 to 4095, or a list of them", "4095"],
    ),
    (
        "19-bos",
        "ConfigError",
        {"tokenizer.ggml.bos_token_id": 4_294_967_295},
        ["tokenizer.ggml.bos_token_id must be a token id from 0 to 4095, or a list of them", "4095"],
    ),
    (
        "19-eot",
        "ConfigError",
        {"tokenizer.ggml.eot_token_id": 5000},
        ["tokenizer.ggml.eot_token_id must be a token id from 0 to 4095, or a list of them", "4095"],
    ),
    (
        "19-eos-text",
        "ConfigError",
        {"tokenizer.ggml.eos_token_id": "</s>"},
        ["tokenizer.ggml.eos_token_id must be a token id from 0 to 4095, or a list of them"],
    ),
    ("36-tokens-missing", "TokenizerError", {LIST: None}, [LIST, "missing"]),
    ("36-tokens-numbers", "TokenizerError", {LIST: [1] * TOKENS}, [f"{LIST}[0] must be a string, got 1", "string"]),
    (
        "36-tokens-twice",
        "TokenizerError",
        {LIST: lambda usual: at(7, usual[9])(usual)},
        [f"{LIST}[9]", "[7]", "must be unique"],
    ),
    ("36-types-few", "TokenizerError", {TYPES: [1]}, [TYPES, "4096 elements, one for each token, got 1", "4096"]),
    ("36-tokens-long", "TokenizerError", {LIST: at(7, "a" * 2_000_000)}, [f"{LIST}[7] has 2000000 characters", "4096"]),
    (
        "36-tokens-long-together",
        "TokenizerError",
        {LIST: [f"{index:04096}" for index in range(4097)]},
        [f"{LIST} has 16781312 characters", "16777216"],
    ),
    (
        "36-types-nested",
        "TokenizerError",
        {TYPES: [[1]] * TOKENS},
        [f"{TYPES}[0] must be an integer from 0 to 6, got [1]"],
    ),
    ("36-types-99", "TokenizerError", {TYPES: at(3, 99)}, [f"{TYPES}[3] must be an integer from 0 to 6, got 99"]),
    ("36-merges-missing", "TokenizerError", {MERGES: None}, [MERGES, "missing"]),
    ("36-merges-numbers", "TokenizerError", {MERGES: [1, 2]}, [f"{MERGES}[0] must be", "got 1"]),
    ("36-merge-without-space", "TokenizerError", {MERGES: at(5, "ab")}, [f"{MERGES}[5] must be", "got 'ab'"]),
    (
        "36-merge-of-nothing",
        "TokenizerError",
        {MERGES: at(5, "xyzzy plugh")},
        [f"{MERGES}[5] must be", "got 'xyzzy plugh'"],
    ),
    (
        "36-model",
        "UnsupportedModelError",
        {"tokenizer.ggml.model": "rwkv"},
        [
            "tokenizer.ggml.model must be one of gpt2, gemma4, whitespace, llama, t5, bert",
            "gpt2, gemma4, whitespace, llama, t5, bert",
        ],
    ),
    (
        "36-pre",
        "UnsupportedModelError",
        {"tokenizer.ggml.pre": "zip"},
        [
            "tokenizer.ggml.pre must be one of",
            "llama-bpe",
        ],
    ),
    (
        "36-template",
        "ConfigError",
        {"tokenizer.chat_template": 3},
        ["tokenizer.chat_template must be a string, got 3", "string"],
    ),
    (
        "36-bytes",
        "TokenizerError",
        {**SENTENCEPIECE, SCORES: [0.0] * TOKENS, TYPES: at(9, 6)},
        [f"{LIST}[9]", "<0x00>"],
    ),
    (
        "31-heads-0",
        "ConfigError",
        {"llama.attention.head_count": 0},
        ["llama.attention.head_count must be an integer from 1 to 1024, got 0"],
    ),
    (
        "31-kv-heads",
        "ConfigError",
        {"llama.attention.head_count_kv": 3},
        ["llama.attention.head_count_kv must be a divisor of num_attention_heads (4)", "divisor"],
    ),
    (
        "31-layers",
        "ConfigError",
        {"llama.block_count": 1_000_000_000},
        ["llama.block_count must be an integer from 1 to 4096, got 1000000000", "4096"],
    ),
    (
        "31-layers-text",
        "ConfigError",
        {"llama.block_count": "many"},
        ["llama.block_count must be an integer from 1 to 4096, got 'many'"],
    ),
    (
        "31-values",
        "UnsupportedModelError",
        {"llama.attention.value_length": 16},
        ["llama.attention.value_length must be equal to attention.key_length (8)", "key_length"],
    ),
    (
        "31-by-layer",
        "UnsupportedModelError",
        {"llama.attention.head_count_kv": [1, 2]},
        ["llama.attention.head_count_kv must be the same in all layers"],
    ),
    (
        "31-eps",
        "ConfigError",
        {"llama.attention.layer_norm_rms_epsilon": -1.0},
        ["llama.attention.layer_norm_rms_epsilon must be a finite number above 0"],
    ),
    (
        "33-architecture",
        "UnsupportedModelError",
        {"general.architecture": "lama"},
        [
            "unsupported GGUF architecture 'lama'; supported (nearest first): llama, ",
        ],
    ),
    (
        "35-rope-0",
        "ConfigError",
        {"llama.rope.freq_base": 0.0},
        ["llama.rope.freq_base must be a finite number above 1, got 0.0"],
    ),
    (
        "35-rope-odd",
        "ConfigError",
        {"llama.rope.dimension_count": 7},
        ["llama.rope.dimension_count must be an even number, got 7", "even"],
    ),
    ("35-rope-part", "ConfigError", {"llama.rope.dimension_count": 4}, ["llama.rope.dimension_count", "whole heads"]),
    (
        "35-scaling",
        "UnsupportedModelError",
        {"llama.rope.scaling.type": "spiral"},
        ["llama.rope.scaling.type must be none, linear, yarn or longrope", "yarn"],
    ),
    (
        "35-factor",
        "ConfigError",
        {"llama.rope.scaling.factor": float("nan")},
        ["llama.rope.scaling.factor must be a finite number from 0, got nan"],
    ),
]


@pytest.fixture(scope="module")
def valid(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write(tmp_path_factory.mktemp("valid") / "model.gguf"))


@pytest.mark.parametrize(
    ("error", "keys", "fragments"), [case[1:] for case in FAULTS], ids=[case[0] for case in FAULTS]
)
def test_invalid_metadata_is_a_typed_error(
    tmp_path: Path, valid: str, error: str, keys: dict[str, Any], fragments: list[str]
) -> None:
    path = write(tmp_path / "model.gguf", keys)
    outcome = run(LOAD, str(path), valid, warm_up=WARM_UP)
    assert_refused(outcome, error, ["model.gguf", *fragments], file_bytes=path.stat().st_size)


def test_embedding_width_differs_from_metadata(tmp_path: Path, valid: str) -> None:
    path = write(tmp_path / "model.gguf", token_embd=(TOKENS, 64))
    outcome = run(LOAD, str(path), valid, warm_up=WARM_UP)
    assert_refused(
        outcome, "ConfigError", ["token_embd.weight", "[4096, 64]", "[4096, 32]"], file_bytes=path.stat().st_size
    )


@pytest.mark.parametrize("shape", [(), (TOKENS,)])
def test_embedding_with_too_few_dimensions(shape: tuple[int, ...], tmp_path: Path, valid: str) -> None:
    path = write(tmp_path / "model.gguf", token_embd=shape)
    outcome = run(LOAD, str(path), valid, warm_up=WARM_UP)
    assert_refused(
        outcome,
        "ConfigError",
        ["token_embd.weight", str(list(shape)), "2 dimensions"],
        file_bytes=path.stat().st_size,
    )


def test_missing_tensor_is_named(tmp_path: Path, valid: str) -> None:
    path = write(tmp_path / "model.gguf", without="blk.0.ffn_down")
    outcome = run(LOAD, str(path), valid, warm_up=WARM_UP)
    assert_refused(outcome, "ModelFileError", ["model.gguf", "blk.0.ffn_down.weight"], file_bytes=path.stat().st_size)


def test_rope_factors_of_zero(tmp_path: Path, valid: str) -> None:
    path = write(tmp_path / "model.gguf", rope_freqs=(4,))
    outcome = run(LOAD, str(path), valid, warm_up=WARM_UP)
    assert_refused(
        outcome,
        "ConfigError",
        ["model.gguf", "rope_freqs.weight", "finite numbers above 0, got 0.0"],
        file_bytes=path.stat().st_size,
    )


def test_valid_file_loads(valid: str) -> None:
    assert run(LOAD, valid, valid, warm_up=WARM_UP).error is None
