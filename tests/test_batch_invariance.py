"""Sixty-four requests at once, each bit for bit as it is alone: whatever is shared, cut, evicted or computed again."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from ferrule import LLM, RequestOutput, SamplingParams, StructuredOutputsParams
from ferrule.prompt import TokensPrompt
from test_invariance import bits, load

pytestmark = pytest.mark.native

FORMATS = [(weights, kv) for weights in ("f32", "int8", "int4") for kv in ("f32", "f16", "int8")]
"""Of the weights and of the cache."""
CASES = [("tiny", formats) for formats in FORMATS] + [
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
]
REQUESTS = 64
PAGE_TOKENS = 16
FEW_PAGES = 20
"""Of a cache that holds a few requests."""

Bits = list[tuple[int, list[tuple[int, str]]]]


STRUCTURES = {
    3: StructuredOutputsParams(regex="[a-z ]{0,40}"),
    8: StructuredOutputsParams(json_object=True),
    9: StructuredOutputsParams(
        json={"type": "object", "properties": {"name": {"enum": ["a", "b"]}}, "required": ["name"]}
    ),
}
"""What some of the requests ask for, of the model with a tokenizer."""
LONGEST = {"llama_dynamic": 44}
"""Tokens of a prompt, where the model's context is short."""


@cache
def prompts(model: str = "tiny") -> list[TokensPrompt]:
    """Of one token up to some two hundred; most begin like others, for a while."""
    numbers = random.Random(1)
    templates = [[numbers.randrange(7, 320) for _ in range(160)] for _ in range(4)]
    made: list[TokensPrompt] = []
    for number in range(REQUESTS):
        shared = templates[number % 4][: numbers.choice([0, 15, 16, 17, 40, 64, 100, 160])]
        own = [numbers.randrange(7, 320) for _ in range(numbers.choice([1, 2, 15, 16, 40]))]
        made.append({"prompt_token_ids": (shared + own)[: LONGEST.get(model)]})
    return made


def params(number: int, model: str = "tiny") -> SamplingParams:
    """Half greedy, half seeded, of different lengths; the log-probabilities of some prompts too."""
    return SamplingParams(
        structured_outputs=STRUCTURES.get(number % 16) if model == "tiny" else None,
        temperature=0.0 if number % 2 else 0.9,
        top_p=0.95,
        seed=number,
        max_tokens=4 + number % 13,
        logprobs=3,
        prompt_logprobs=1 if number % 16 == 5 else None,
        ignore_eos=True,
    )


def told(output: RequestOutput) -> tuple[Bits, list[list[tuple[int, str]]]]:
    """Tokens and log-probabilities to the last bit, the prompt's too."""
    rows = [row or {} for row in output.prompt_logprobs or []]
    return bits(output.outputs[0]), [[(token, entry.logprob.hex()) for token, entry in row.items()] for row in rows]


@cache
def alone(model: str, formats: tuple[str, str]) -> list[Any]:
    """Each request by itself, nothing shared, on one thread."""
    with load(model, formats, 512, 1, enable_prefix_caching=False) as llm:
        return [told(llm.generate(prompt, params(n, model))[0]) for n, prompt in enumerate(prompts(model))]


def at_once(llm: LLM, model: str) -> list[Any]:
    """All of them."""
    outputs = llm.generate(prompts(model), [params(number, model) for number in range(REQUESTS)])
    return [told(output) for output in outputs]


@pytest.mark.parametrize(("model", "formats"), CASES)
def test_nothing_shared_and_small_chunks(model: str, formats: tuple[str, str]) -> None:
    with load(model, formats, 16, 1, enable_prefix_caching=False) as llm:
        assert at_once(llm, model) == alone(model, formats)


@pytest.mark.parametrize(("model", "formats"), CASES)
def test_prefixes_from_memory(model: str, formats: tuple[str, str]) -> None:
    with load(model, formats, 64, 2) as llm:
        assert at_once(llm, model) == alone(model, formats)
        first = llm.metrics()
        assert first.prefix_hits_tokens > 0
        assert at_once(llm, model) == alone(model, formats)
        assert llm.metrics().prefix_hits_tokens > 2 * first.prefix_hits_tokens


@pytest.mark.parametrize(("model", "formats"), CASES)
def test_prefixes_from_the_disk(model: str, formats: tuple[str, str], tmp_path: Path) -> None:
    for restarted in (False, True):
        with load(model, formats, 512, 2, prefix_cache_dir=tmp_path / "pages") as llm:
            assert at_once(llm, model) == alone(model, formats)
            assert (llm.metrics().disk_hits_tokens > 0) == restarted


@pytest.mark.parametrize("enable_prefix_caching", [False, True])
@pytest.mark.parametrize(("model", "formats"), CASES)
def test_a_cache_that_holds_a_few_of_them(model: str, formats: tuple[str, str], enable_prefix_caching: bool) -> None:
    """FAULTS row 67, on the engine itself."""
    with load(model, formats, 64, 2) as llm:
        page_bytes = PAGE_TOKENS * llm.info()["kv_bytes_per_token"]
    few = {"kv_cache_memory": FEW_PAGES * page_bytes, "enable_prefix_caching": enable_prefix_caching}
    with load(model, formats, 64, 2, **few) as llm:
        assert at_once(llm, model) == alone(model, formats)
        metrics = llm.metrics()
        # Where a window passes, whoever is let in finds room for all that it will ever hold.
        assert metrics.preemptions > 0 or model == "mistral_swa"
        assert metrics.pages_free == metrics.pages_total


@pytest.mark.parametrize("enable_prefix_caching", [False, True])
def test_completions_of_one_prompt(enable_prefix_caching: bool) -> None:
    """Each is what its own seed gives alone; the prompt is computed once."""
    prompt = prompts()[-1]
    length = len(prompt["prompt_token_ids"])
    several = SamplingParams(n=4, temperature=0.9, seed=5, max_tokens=6, logprobs=3, ignore_eos=True)
    with load("tiny", ("int8", "f16"), 512, 2, enable_prefix_caching=enable_prefix_caching) as llm:
        outputs = llm.generate(prompt, several)[0].outputs
        assert llm.metrics().computed_tokens == length + 3 + 4 * 5
    for output in outputs:
        with load("tiny", ("int8", "f16"), 512, 1) as llm:
            one = SamplingParams(temperature=0.9, seed=output.seed, max_tokens=6, logprobs=3, ignore_eos=True)
            assert bits(llm.generate(prompt, one)[0].outputs[0]) == bits(output)


@pytest.mark.parametrize("kv", ["f32", "f16", "int8"])
def test_a_state_restored_elsewhere(kv: str) -> None:
    prompt = prompts()[-1]
    with load("tiny", ("int8", kv), 64, 2) as llm:
        state = llm.save_state(prompt)
    with load("tiny", ("int8", kv), 512, 1) as llm:
        restored = llm.restore_state(state)
        assert restored == prompt
        output = llm.generate(restored, params(REQUESTS - 1))[0]
        assert told(output) == alone("tiny", ("int8", kv))[-1]
        assert (output.num_cached_tokens or 0) >= len(prompt["prompt_token_ids"]) - PAGE_TOKENS
