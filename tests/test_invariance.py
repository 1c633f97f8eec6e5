"""Results are bitwise the same in any batch, with any chunking, and with any number of threads."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from conftest import TINY
from ferrule import LLM, CompletionOutput, SamplingParams
from ferrule._text.prompt import TokensPrompt

pytestmark = pytest.mark.native

GOLDEN = Path(__file__).parent / "golden" / "logits"
MODELS = {
    "tiny": TINY,
    **{
        name: GOLDEN / name
        for name in (
            "mistral_swa",  # a sliding window
            "qwen3",
            "llama_dynamic",
            "phi3_longrope",
            "bloom",  # ALiBi
            "deepseek_v3",  # latent attention, experts in groups
            "gpt_oss",  # sinks, windows on every second layer, experts with biases
            "qwen2_moe",  # experts and a shared one
        )
    },
    "kimi_linear": GOLDEN.parent / "variants" / "kimi_linear",  # delta nets with a decay by key
    "deepseek_v4": GOLDEN.parent / "variants" / "deepseek_v4",  # compressed entries, mixed streams, experts by token
    "glm_moe_dsa": GOLDEN.parent / "variants" / "glm_moe_dsa",  # tokens that an indexer chose, shared by layers
    "minimax_m3": GOLDEN.parent / "variants" / "minimax_m3",  # a choice of blocks for each key-value head
    "gemma3n": GOLDEN.parent / "variants" / "gemma3n",  # several residual streams, sparse gates
    "gemma4_e": GOLDEN.parent / "variants" / "gemma4_e",  # shared keys and values, per-layer embeddings
    "jamba": GOLDEN.parent / "variants" / "jamba",  # Mamba, experts
    "lfm2": GOLDEN.parent / "variants" / "lfm2",  # short convolutions
    "minimax": GOLDEN.parent / "variants" / "minimax",  # lightning attention, experts
    "nemotron_h": GOLDEN.parent / "variants" / "nemotron_h_latent",  # Mamba 2, experts on a latent without a gate
    "qwen3_5_text": GOLDEN.parent / "variants" / "qwen3_5_text",  # delta nets, gated attention
    "qwen4_exp": GOLDEN.parent / "variants" / "qwen4_exp",  # gated streams, n-grams, an indexer of block means
    "recurrent_gemma": GOLDEN.parent / "variants" / "recurrent_gemma",  # RG-LRU
    "rwkv": GOLDEN.parent / "variants" / "rwkv",  # time mixing and channel mixing, two states a layer
    "zamba2": GOLDEN.parent / "variants" / "zamba2",  # weights that layers share, with additions
}
LENGTHS = {"llama_dynamic": (1, 2, 7, 15, 16, 17, 33, 40), "phi3_longrope": (1, 16, 17, 30, 31, 32, 33, 100)}
"""Lengths of prompts: around a page, a chunk, the windows of the models, and a change of the rotary embedding."""
USUAL_LENGTHS = (1, 2, 15, 16, 17, 63, 100, 200)
DIAGONALS = [[(16, 1), (512, 2)], [(16, 2), (512, 1)]]
"""Tokens in a step, and threads: both differ in a pair, so that a result that depends on one of them does too."""
NEW_TOKENS = 20


FORMATS = [("f32", "auto"), ("bf16", "auto"), ("bf16", "int8"), ("int8", "auto"), ("int4", "int8")]
"""Formats of the weights and of the KV cache."""


def models_and_formats(pairs: Sequence[tuple[str, str]]) -> Iterator[tuple[str, tuple[str, str], int]]:
    """Gives each model with each pair of formats, and a number that alternates over both.

    With FERRULE_ISA, which selects another instruction set than the default one, each model has one of the pairs.
    """
    for number, model in enumerate(MODELS):
        for other, formats in enumerate(pairs):
            if "FERRULE_ISA" not in os.environ or (number + other) % len(pairs) == 0:
                yield model, formats, number + other


def load(model: str, formats: tuple[str, str], tokens: int, threads: int, **more: Any) -> LLM:
    return LLM(
        MODELS[model],
        quantization=formats[0],
        kv_cache_dtype=formats[1],
        max_num_batched_tokens=tokens,
        threads=threads,
        **more,
    )


def prompts(model: str) -> list[TokensPrompt]:
    """Returns eight prompts of different lengths."""
    numbers = random.Random(1)
    lengths = LENGTHS.get(model, USUAL_LENGTHS)
    return [{"prompt_token_ids": [numbers.randrange(7, 320) for _ in range(length)]} for length in lengths]


def params(number: int) -> SamplingParams:
    """Returns parameters: half greedy, half seeded, with the maximum number of log-probabilities."""
    temperature = 0.0 if number % 2 else 0.9
    return SamplingParams(
        temperature=temperature, top_p=0.95, seed=number, max_tokens=NEW_TOKENS, logprobs=20, ignore_eos=True
    )


def bits(output: CompletionOutput) -> list[tuple[int, list[tuple[int, str]]]]:
    """Returns tokens and log-probabilities for bitwise comparison."""
    assert output.logprobs is not None
    rows = [[(token, entry.logprob.hex()) for token, entry in row.items()] for row in output.logprobs]
    return list(zip(output.token_ids, rows, strict=True))


@cache
def alone(model: str, formats: tuple[str, str]) -> list[list[tuple[int, list[tuple[int, str]]]]]:
    """Runs each prompt separately, on one thread."""
    with load(model, formats, 512, 1) as llm:
        return [bits(llm.generate(prompt, params(n))[0].outputs[0]) for n, prompt in enumerate(prompts(model))]


@pytest.mark.parametrize(
    ("model", "formats", "tokens", "threads"),
    [(model, formats, *way) for model, formats, number in models_and_formats(FORMATS) for way in DIAGONALS[number % 2]],
)
def test_batch_of_eight_equals_single_requests(model: str, formats: tuple[str, str], tokens: int, threads: int) -> None:
    """Each model with each pair of formats, in small and large steps, with one thread and with two."""
    with load(model, formats, tokens, threads) as llm:
        outputs = llm.generate(prompts(model), [params(number) for number in range(8)])
        assert [bits(output.outputs[0]) for output in outputs] == alone(model, formats)


@pytest.mark.parametrize(
    ("model", "formats", "ways"),
    [
        (model, formats, DIAGONALS[number % 2])
        for model, formats, number in models_and_formats([*FORMATS, ("f16", "auto"), ("f32", "bf16")])
    ],
)
def test_logits_are_independent_of_chunks_and_threads(
    model: str, formats: tuple[str, str], ways: list[tuple[int, int]]
) -> None:
    prompt = prompts(model)[-1]["prompt_token_ids"]
    seen: set[bytes] = set()
    for tokens, threads in ways:
        with load(model, formats, tokens, threads) as llm:
            seen.add(llm.logits(prompt).tobytes())
    assert len(seen) == 1


@pytest.mark.parametrize("quantization", ["bf16", "int8", "int4"])
def test_logits_of_prefix_equal_prefix_of_logits(quantization: str) -> None:
    prompt = prompts("tiny")[-1]["prompt_token_ids"]
    with load("tiny", (quantization, "auto"), 512, 2) as llm:
        whole = llm.logits(prompt)
        for length in (1, 16, 17, 150):
            assert (llm.logits(prompt[:length]) == whole[:length]).all()
