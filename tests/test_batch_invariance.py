"""Sixty-four concurrent requests have bitwise the same outputs as alone, with sharing, chunking and preemption."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from ferrule import LLM, RequestOutput, SamplingParams, StructuredOutputsParams
from ferrule._params.logits_processors import Logits, Tokens
from ferrule._text.prompt import TokensPrompt
from test_invariance import bits, load

pytestmark = pytest.mark.native

CASES = [
    ("tiny", ("f32", "f32")),
    ("tiny", ("int8", "f16")),
    ("tiny", ("int4", "int8")),
    ("mistral_swa", ("f32", "f16")),
    ("mistral_swa", ("int8", "int8")),
    ("bloom", ("f32", "f16")),
    ("deepseek_v3", ("f32", "f16")),
    ("deepseek_v3", ("int4", "int8")),
    ("gpt_oss", ("f32", "f16")),
    ("gpt_oss", ("int8", "int8")),
    ("qwen2_moe", ("int4", "f16")),
    ("llama_dynamic", ("f32", "f16")),
    ("phi3_longrope", ("int8", "f16")),
    ("gemma3n", ("int8", "int8")),
    ("gemma4_e", ("int8", "f16")),
    ("jamba", ("int8", "f32")),
    ("kimi_linear", ("int8", "f32")),
    ("minimax", ("int8", "f32")),
    ("recurrent_gemma", ("int8", "int8")),
    ("rwkv", ("int8", "auto")),
    ("deepseek_v4", ("f32", "f32")),
    ("deepseek_v4", ("int8", "int8")),
    ("glm_moe_dsa", ("f32", "f16")),
    ("glm_moe_dsa", ("int4", "int8")),
    ("lfm2", ("f32", "f16")),
    ("lfm2", ("int8", "int8")),
    ("minimax_m3", ("f32", "f32")),
    ("minimax_m3", ("int8", "int8")),
    ("qwen4_exp", ("f32", "f32")),
    ("qwen4_exp", ("int8", "f32")),
    ("zamba2", ("int8", "f32")),
]
"""Models, and formats of the weights and of the KV cache, whose kernels are chosen separately."""
REQUESTS = 64
PAGE_TOKENS = 16
FEW_PAGES = 20
"""Pages of a KV cache that holds a few requests."""
FEW_STATES = 6
"""States for which a KV cache of few pages has memory as well."""
LARGE_STATES = 13
"""States whose bytes a KV cache must have for two sequences, if states are so large that they get a quarter of it."""
GROWTH = {"gemma3n": 420, "jamba": 420, "kimi_linear": 420, "qwen4_exp": 250}
"""Generated tokens that fill the pages of such a KV cache; 100 for other models."""
NEVER_PREEMPTED = ("mistral_swa", "recurrent_gemma", "rwkv")
"""Models whose requests are admitted only if all pages and states that they will ever hold are available."""

Bits = list[tuple[int, list[tuple[int, str]]]]


STRUCTURES = {
    3: StructuredOutputsParams(regex="[a-z ]{0,40}"),
    8: StructuredOutputsParams(json_object=True),
    11: StructuredOutputsParams(
        json={"type": "object", "properties": {"name": {"enum": ["a", "b"]}}, "required": ["name"]}
    ),
}
"""Parameters of some requests, for the model with a tokenizer."""
LONGEST = {"llama_dynamic": 44}
"""Maximum number of tokens of a prompt, for models with a short context."""


@cache
def prompts(model: str = "tiny") -> list[TokensPrompt]:
    """Returns prompts of one to about two hundred tokens; most share a prefix with others."""
    numbers = random.Random(1)
    templates = [[numbers.randrange(7, 320) for _ in range(160)] for _ in range(4)]
    made: list[TokensPrompt] = []
    for number in range(REQUESTS):
        shared = templates[number % 4][: numbers.choice([0, 15, 16, 17, 40, 64, 100, 160])]
        own = [numbers.randrange(7, 320) for _ in range(numbers.choice([1, 2, 15, 16, 40]))]
        made.append({"prompt_token_ids": (shared + own)[: LONGEST.get(model)]})
    return made


def favour_new(prompt: Tokens, output: Tokens, logits: Logits) -> None:
    """Returns the prompts with fewer tokens."""
    logits[prompt] -= 1
    logits[output] -= 2


STAGES: list[dict[str, Any]] = [
    {},
    {"dynatemp_range": 0.5, "top_n_sigma": 2.0, "entropy": True},
    {"typical_p": 0.9, "epsilon_cutoff": 1e-4, "eta_cutoff": 1e-3, "top_h": 0.9},
    {"xtc_probability": 0.5, "xtc_threshold": 0.05},
    {"dry_multiplier": 1.0, "dry_allowed_length": 1, "repetition_penalty": 1.1},
    {"dry_multiplier": 1.0, "dry_penalty_last_n": 20, "no_repeat_ngram_size": 2},
    {"mirostat": 1, "mirostat_tau": 3.0, "mirostat_eta": 0.3},
    {"mirostat": 2, "mirostat_tau": 3.0, "mirostat_eta": 0.3},
    {"bad_words_ids": [[9], [10, 11]], "presence_penalty": 0.5, "frequency_penalty": 0.5},
    {"allowed_token_ids": list(range(7, 300, 3)), "logit_bias": {10: 2.0}, "min_tokens": 3},
    {"logits_processors": [favour_new], "min_p": 0.02},
]
"""Additional sampling parameters; their number is odd, so that each is greedy and seeded in turn."""


def params(number: int, model: str = "tiny") -> SamplingParams:
    """Returns parameters: half greedy, half seeded, of different lengths, with every stage and some prompt_logprobs."""
    return SamplingParams(
        **STAGES[number % len(STAGES)],
        structured_outputs=STRUCTURES.get(number % 16) if model == "tiny" else None,
        temperature=0.0 if number % 2 else 0.9,
        top_p=0.95,
        seed=number,
        max_tokens=4 + number % 13,
        logprobs=3,
        prompt_logprobs=1 if number % 16 == 5 else None,
        ignore_eos=True,
    )


def result_of(output: RequestOutput) -> tuple[Bits, list[str], list[list[tuple[int, str]]]]:
    """Returns tokens, log-probabilities and entropies of an output for bitwise comparison, with prompt_logprobs."""
    rows = [row or {} for row in output.prompt_logprobs or []]
    completion = output.outputs[0]
    entropies = [entropy.hex() for entropy in completion.entropies or []]
    return bits(completion), entropies, [[(token, entry.logprob.hex()) for token, entry in row.items()] for row in rows]


@cache
def alone(model: str, formats: tuple[str, str]) -> list[Any]:
    """Runs each request separately, without sharing, on one thread."""
    with load(model, formats, 512, 1, enable_prefix_caching=False) as llm:
        return [result_of(llm.generate(prompt, params(n, model))[0]) for n, prompt in enumerate(prompts(model))]


def at_once(llm: LLM, model: str) -> list[Any]:
    """Runs all requests together."""
    outputs = llm.generate(prompts(model), [params(number, model) for number in range(REQUESTS)])
    return [result_of(output) for output in outputs]


def growing(llm: LLM, model: str) -> list[Any]:
    """Runs four requests that need several times the pages of their prompts."""
    numbers = random.Random(2)
    given: list[TokensPrompt] = [{"prompt_token_ids": [numbers.randrange(7, 320) for _ in range(90)]} for _ in range(4)]
    usual = SamplingParams(temperature=0.9, max_tokens=GROWTH.get(model, 100), logprobs=3, ignore_eos=True)
    sampling = [replace(usual, seed=number) for number in range(4)]
    return [result_of(output) for output in llm.generate(given, sampling)]


@pytest.mark.parametrize(("model", "formats"), CASES)
def test_small_prefill_chunks_without_prefix_cache(model: str, formats: tuple[str, str]) -> None:
    with load(model, formats, 16, 1, enable_prefix_caching=False) as llm:
        assert at_once(llm, model) == alone(model, formats)


@pytest.mark.parametrize(("model", "formats"), CASES)
def test_prefix_cache_in_memory(model: str, formats: tuple[str, str]) -> None:
    with load(model, formats, 64, 2) as llm:
        assert at_once(llm, model) == alone(model, formats)
        first = llm.metrics()
        assert first.prefix_hits_tokens > 0
        assert at_once(llm, model) == alone(model, formats)
        assert llm.metrics().prefix_hits_tokens > 2 * first.prefix_hits_tokens


@pytest.mark.parametrize(("model", "formats"), CASES)
def test_prefix_cache_on_disk(model: str, formats: tuple[str, str], tmp_path: Path) -> None:
    hits: list[int] = []
    for restarted in (False, True):
        with load(model, formats, 512, 2, prefix_cache_dir=tmp_path / "pages") as llm:
            assert at_once(llm, model) == alone(model, formats)
            hits.append(llm.metrics().prefix_hits_tokens)
            assert (llm.metrics().disk_hits_tokens > 0) == restarted
    assert hits[1] > hits[0]


@pytest.mark.parametrize(
    ("model", "formats", "enable_prefix_caching"), [(*case, bool(n % 2)) for n, case in enumerate(CASES)]
)
def test_kv_cache_smaller_than_batch(model: str, formats: tuple[str, str], enable_prefix_caching: bool) -> None:
    """Sequences are preempted and computed again, in half of the cases from pages of the prefix cache."""
    with load(model, formats, 512, 1, enable_prefix_caching=False) as llm:
        page_bytes, state_bytes = PAGE_TOKENS * llm.info()["kv_bytes_per_token"], llm.info()["state_bytes"]
        expected = growing(llm, model) if model not in LONGEST else []
    memory = max(FEW_PAGES * page_bytes + FEW_STATES * state_bytes, LARGE_STATES * state_bytes)
    few = {"kv_cache_memory": memory, "enable_prefix_caching": enable_prefix_caching}
    with load(model, formats, 64, 2, **few) as llm:
        assert at_once(llm, model) == alone(model, formats)
        if model not in LONGEST:
            assert growing(llm, model) == expected
        metrics = llm.metrics()
        assert (metrics.preemptions > 0) == (model not in NEVER_PREEMPTED)
        assert metrics.pages_free == metrics.pages_total


def test_structured_outputs_sampling_stages_and_speculation_in_small_cache() -> None:
    """All features at once: each request gets the same output as alone without speculative tokens."""
    formats = ("int8", "int8")
    text = {"type": "string", "maxLength": 8}
    schema = {"type": "object", "properties": {"name": text, "other": text}, "required": ["name", "other"]}
    structures = [None, StructuredOutputsParams(json=schema), None, StructuredOutputsParams(regex="([a-d]{3} ){4,20}")]
    stages: list[dict[str, Any]] = [
        {"xtc_probability": 0.5, "xtc_threshold": 0.05, "presence_penalty": 0.5, "frequency_penalty": 0.5},
        {"mirostat": 2, "mirostat_tau": 3.0, "mirostat_eta": 0.3, "repetition_penalty": 1.2},
        {"mirostat": 1, "mirostat_tau": 2.0, "dry_multiplier": 0.5, "logits_processors": [favour_new]},
    ]
    sampling = [
        SamplingParams(
            structured_outputs=structures[number % 4], **stages[number % 3], seed=number, max_tokens=40, logprobs=3
        )
        for number in range(12)
    ]
    given = prompts()[:12]
    with load("tiny", formats, 512, 1, enable_prefix_caching=False) as llm:
        page_bytes = PAGE_TOKENS * llm.info()["kv_bytes_per_token"]
        plain = [llm.generate(prompt, params)[0] for prompt, params in zip(given, sampling, strict=True)]
        assert {output.outputs[0].finish_reason for output in plain} == {"stop", "length"}
    drafts = {"method": "ngram", "prompt_lookup_min": 1, "num_speculative_tokens": 5, "adaptive": False}
    with load("tiny", formats, 64, 2, speculative_config=drafts, kv_cache_memory=FEW_PAGES * page_bytes) as llm:
        for _ in range(2):
            outputs = llm.generate(given, sampling)
            assert [result_of(output) for output in outputs] == [result_of(output) for output in plain]
        # The prediction is right up to its middle.
        halves = [output.outputs[0].token_ids[:20] + [7] * 20 for output in plain]
        predicted = [replace(one, prediction=tokens) for one, tokens in zip(sampling, halves, strict=True)]
        outputs = llm.generate(given, predicted)
        assert [result_of(output) for output in outputs] == [result_of(output) for output in plain]
        assert all(output.metrics.accepted_tokens > 0 for output in outputs)
        metrics = llm.metrics()
        assert metrics.preemptions > 0
        assert metrics.prefix_hits_tokens > 0
        assert 0 < metrics.accepted_tokens < metrics.drafted_tokens
        assert metrics.pages_free == metrics.pages_total


@pytest.mark.parametrize("enable_prefix_caching", [False, True])
@pytest.mark.parametrize(
    "model",
    [
        *("tiny", "gemma3n", "gemma4_e", "glm_moe_dsa", "jamba", "kimi_linear", "lfm2", "minimax", "recurrent_gemma"),
        *("rwkv", "zamba2"),
    ],
)
def test_completions_of_one_prompt(model: str, enable_prefix_caching: bool) -> None:
    """Each completion equals the output for its own seed; the prompt is computed once, up to the last snapshot."""
    prompt = prompts(model)[-1]
    length = len(prompt["prompt_token_ids"])
    several = SamplingParams(n=4, temperature=0.9, seed=5, max_tokens=6, logprobs=3, ignore_eos=True)
    with load(model, ("int8", "f16"), 512, 2, enable_prefix_caching=enable_prefix_caching) as llm:
        outputs = llm.generate(prompt, several)[0].outputs
        # A fork computes the last token of the prompt, or the tokens after the last whole page where the parent has
        # another state or has freed pages before its window.
        from_snapshot = length % PAGE_TOKENS if enable_prefix_caching else length
        info = llm.info()
        whole = info["state_bytes"] or any(each["window"] for each in info["kv_windows"])
        forks = 3 * (from_snapshot if whole else 1)
        assert llm.metrics().computed_tokens == length + forks + 4 * 5
    for output in outputs:
        with load(model, ("int8", "f16"), 512, 1) as llm:
            one = SamplingParams(temperature=0.9, seed=output.seed, max_tokens=6, logprobs=3, ignore_eos=True)
            assert bits(llm.generate(prompt, one)[0].outputs[0]) == bits(output)


@pytest.mark.parametrize(
    ("model", "kv"),
    [
        ("tiny", "f32"),
        ("tiny", "f16"),
        ("tiny", "int8"),
        ("gemma3n", "int8"),
        ("gemma4_e", "f16"),
        ("glm_moe_dsa", "f16"),
        ("jamba", "f16"),
        ("kimi_linear", "int8"),
        ("lfm2", "int8"),
        ("minimax", "f16"),
        ("minimax_m3", "int8"),
        ("qwen4_exp", "int8"),
        ("recurrent_gemma", "int8"),
        ("rwkv", "auto"),
        ("zamba2", "f32"),
    ],
)
def test_state_restored_with_other_threads_and_chunks(model: str, kv: str) -> None:
    prompt = prompts(model)[-1]
    with load(model, ("int8", kv), 64, 2) as llm:
        state = llm.save_state(prompt)
    with load(model, ("int8", kv), 512, 1) as llm:
        restored = llm.restore_state(state)
        assert restored == prompt
        output = llm.generate(restored, params(REQUESTS - 1, model))[0]
        assert result_of(output) == alone(model, ("int8", kv))[-1]
        assert (output.num_cached_tokens or 0) >= len(prompt["prompt_token_ids"]) - PAGE_TOKENS
