"""Beam search and best-of-n: batch invariance, refused parameters, and aborts at any time."""

from __future__ import annotations

import asyncio
import math
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from conftest import TINY
from ferrule import (
    LLM,
    AsyncLLM,
    BeamSearchOutput,
    BeamSearchParams,
    EngineMetrics,
    InvalidParameterError,
    LogitsProcessorError,
    LoRARequest,
    PromptError,
    RequestOutput,
    SamplingParams,
    StructuredOutputsParams,
)
from ferrule._params.logits_processors import Logits, Tokens
from ferrule._text.prompt import TextPrompt, TokensPrompt
from lora_files import random_adapter
from test_batch_invariance import FEW_PAGES, PAGE_TOKENS, favour_new, prompts, result_of
from test_batch_invariance import params as others_params
from test_invariance import load

pytestmark = pytest.mark.native

FORMATS = [("f32", "f32"), ("int4", "f16")]
OTHERS = 16
OF_SAMPLING = ["bad_words_ids", "skip_special_tokens", "include_stop_str_in_output"]
"""Fields with the same meaning as in SamplingParams."""
SEARCHES: list[BeamSearchParams] = [
    BeamSearchParams(beam_width=4, max_tokens=24),
    BeamSearchParams(beam_width=3, max_tokens=30, n=2, length_penalty=-0.5, early_stopping="never", min_tokens=5),
    BeamSearchParams(
        beam_width=5,
        max_tokens=20,
        early_stopping=True,
        repetition_penalty=1.3,
        no_repeat_ngram_size=2,
        bad_words_ids=[[9], [10, 11]],
        stop_token_ids=list(range(40, 60)),
        logit_bias={70: 1.0},
        logits_processors=[favour_new],
    ),
]

Found = list[list[tuple[list[int], str, str, str | None, int | str | None]]]


def search_prompts() -> list[TokensPrompt]:
    """Prompts with common prefixes."""
    return prompts()[-len(SEARCHES) :]


def found(outputs: list[BeamSearchOutput]) -> Found:
    """Returns tokens and scores for bitwise comparison."""
    return [
        [
            (
                each.token_ids,
                each.score.hex(),
                (each.cumulative_logprob or 0.0).hex(),
                each.finish_reason,
                each.stop_reason,
            )
            for each in output.sequences
        ]
        for output in outputs
    ]


@cache
def alone(formats: tuple[str, str]) -> Found:
    """Runs each search separately, without sharing, on one thread."""
    with load("tiny", formats, 512, 1, enable_prefix_caching=False) as llm:
        outputs = [
            llm.beam_search(prompt, search)[0] for prompt, search in zip(search_prompts(), SEARCHES, strict=True)
        ]
    assert [len(output.sequences) for output in outputs] == [4, 2, 5]
    return found(outputs)


async def beside_others(llm: AsyncLLM) -> tuple[Found, list[Any]]:
    """Runs all searches together with some other requests."""

    async def other(number: int) -> RequestOutput:
        last = None
        async for output in llm.generate(prompts()[number], others_params(number)):
            last = output
        assert last is not None
        return last

    searches = [
        asyncio.create_task(llm.beam_search(prompt, search))
        for prompt, search in zip(search_prompts(), SEARCHES, strict=True)
    ]
    others = [asyncio.create_task(other(number)) for number in range(OTHERS)]
    return found(list(await asyncio.gather(*searches))), [result_of(output) for output in await asyncio.gather(*others)]


@cache
def others_alone(formats: tuple[str, str]) -> list[Any]:
    """Runs each of the other requests separately."""
    with load("tiny", formats, 512, 1, enable_prefix_caching=False) as llm:
        return [result_of(llm.generate(prompts()[number], others_params(number))[0]) for number in range(OTHERS)]


@pytest.mark.parametrize("formats", FORMATS)
@pytest.mark.parametrize("few_pages", [False, True])
def test_search_is_independent_of_concurrent_requests(formats: tuple[str, str], few_pages: bool) -> None:
    """Searches run with small chunks, cached prefixes, structured and speculative requests, and too few pages."""
    drafts = {"method": "ngram", "prompt_lookup_min": 1, "adaptive": False}
    options: dict[str, Any] = {"speculative_config": drafts}
    if few_pages:
        with load("tiny", formats, 64, 2) as small:
            options["kv_cache_memory"] = FEW_PAGES * PAGE_TOKENS * small.info()["kv_bytes_per_token"]
    llm = AsyncLLM(quantization=formats[0], kv_cache_dtype=formats[1], max_num_batched_tokens=64, threads=2, **options)

    async def twice() -> None:
        async with llm:
            for _ in range(2):
                searches, others = await beside_others(llm)
                assert searches == alone(formats)
                assert others == others_alone(formats)
            check(llm.metrics())

    def check(metrics: EngineMetrics) -> None:
        assert metrics.prefix_hits_tokens > 0
        assert (metrics.preemptions > 0) == few_pages
        assert metrics.pages_free == metrics.pages_total
        assert metrics.accepted_tokens > 0

    asyncio.run(twice())


@pytest.mark.parametrize(
    ("arguments", "fragments"),
    [
        ({"beam_width": 0}, ["beam_width must be", "got 0", "1 to 128"]),
        ({"beam_width": 10**9}, ["beam_width must be", "got 1000000000", "1 to 128"]),
        ({"beam_width": 2.5}, ["beam_width must be", "got 2.5"]),
        ({"n": 0}, ["n must be", "got 0"]),
        ({"n": 5}, ["n must be", "got 5", "beam_width (4)"]),
        ({"length_penalty": math.nan}, ["length_penalty must be", "got nan", "-10 to 10"]),
        ({"length_penalty": 11}, ["length_penalty must be", "got 11", "-10 to 10"]),
        ({"early_stopping": "maybe"}, ["early_stopping must be", "got 'maybe'", "'never'"]),
        ({"early_stopping": 1}, ["early_stopping must be", "got 1"]),
        ({"max_tokens": 0}, ["max_tokens must be", "got 0"]),
        ({"min_tokens": 9}, ["min_tokens must be", "got 9", "max_tokens (8)"]),
        ({"temperature": 0.7}, ["temperature must be 0", "got 0.7", "beam search"]),
        ({"stop": "\n"}, ["stop is not supported in a beam search, got '\\n'; use stop_token_ids"]),
        ({"structured_outputs": StructuredOutputsParams(regex="a")}, ["structured_outputs", "beam search"]),
        ({"repetition_penalty": 0}, ["repetition_penalty must be", "got 0"]),
        ({"stop_token_ids": [-1]}, ["stop_token_ids[0]"]),
        ({"ignore_eos": "yes"}, ["ignore_eos"]),
    ],
)
def test_invalid_search_parameters(arguments: dict[str, Any], fragments: list[str]) -> None:
    search: dict[str, Any] = {"beam_width": 4, "max_tokens": 8, **arguments}
    with pytest.raises(InvalidParameterError) as refused:
        BeamSearchParams(**search)
    assert all(fragment in str(refused.value) for fragment in fragments), refused.value


def test_search_exceeding_engine_limits() -> None:
    with LLM(max_num_seqs=3, threads=1) as llm:
        page_bytes = PAGE_TOKENS * llm.info()["kv_bytes_per_token"]
        message = r"beam_width must be <= 3, the sequences that fit in a step \(max_num_seqs, .*\), got 4$"
        with pytest.raises(InvalidParameterError, match=message):
            llm.beam_search("x", BeamSearchParams(beam_width=4, max_tokens=8))
        with pytest.raises(
            InvalidParameterError, match="stop_token_ids must be token ids from 0 to 4095, the vocabulary, got 4096"
        ):
            llm.beam_search("x", BeamSearchParams(beam_width=2, max_tokens=8, stop_token_ids=[4096]))
        with pytest.raises(
            InvalidParameterError, match=r"params must be a BeamSearchParams, got SamplingParams\(n=1, best_of=None,"
        ):
            llm.beam_search("x", SamplingParams())  # type: ignore[arg-type]
        with pytest.raises(PromptError, match="the prompt has no tokens"):
            llm.beam_search({"prompt_token_ids": []}, BeamSearchParams(beam_width=2, max_tokens=8))
        assert not llm.metrics().running
    refused = pytest.raises(
        InvalidParameterError, match=r"beam_width must be smaller, .* 100 tokens it needs 12 KV pages of 8, got 6$"
    )
    with LLM(kv_cache_memory=8 * page_bytes, threads=1) as llm, refused:
        llm.beam_search({"prompt_token_ids": [9] * 100}, BeamSearchParams(beam_width=6, max_tokens=8))


def test_documentation_example() -> None:
    prompt = "The capital of France is"
    with LLM(threads=1) as llm:
        output, other = llm.beam_search([prompt, "Once"], BeamSearchParams(beam_width=3, max_tokens=12))
        assert (output.prompt, output.finished, len(output.sequences), len(other.sequences)) == (prompt, True, 3, 3)
        assert output.outputs == output.sequences
        scores = [each.score for each in output.sequences]
        assert scores == sorted(scores, reverse=True)
        for index, each in enumerate(output.sequences):
            assert each.index == index
            assert each.cumulative_logprob == pytest.approx(each.score * len(each.token_ids))
            assert each.text == llm.detokenize(each.token_ids)
            assert each.finish_reason in ("stop", "length")
        metrics = output.metrics
        assert metrics.output_tokens == sum(len(each.token_ids) for each in output.sequences)
        assert metrics.time_to_first_token is not None
        assert metrics.time_to_first_token <= metrics.total_time
        # The log-probability of the sequence, computed separately.
        best = output.sequences[0]
        score = llm.loglikelihood(prompt, best.token_ids)
        assert score[0].logprob == pytest.approx(best.cumulative_logprob, abs=1e-5)
        # A stop token ends a sequence and is not part of its text.
        stop = best.token_ids[3]
        search = BeamSearchParams(beam_width=3, max_tokens=12, stop_token_ids=[stop], ignore_eos=True)
        ended = llm.beam_search(prompt, search)[0]
        stopped = [each for each in ended.sequences if each.finish_reason == "stop"]
        assert stopped
        assert all(each.token_ids[-1] == stop == each.stop_reason for each in stopped)
        assert all(each.text == llm.detokenize(each.token_ids[:-1]) for each in stopped)


def test_adapters_salts_and_priorities_apply_to_searches(tmp_path: Path) -> None:
    adapter = LoRARequest("a", 1, str(random_adapter(tmp_path / "a", TINY, alpha=64.0)))
    search = BeamSearchParams(beam_width=3, max_tokens=10)
    prompt = "Once upon a time there was a king who had three daughters"
    salted: TextPrompt = {"prompt": prompt, "cache_salt": "mine"}
    with LLM(threads=1) as llm:
        plain = llm.beam_search(prompt, search)
        changed = llm.beam_search(prompt, search, lora_request=adapter)
        assert found(changed) != found(plain)
        both = llm.beam_search([prompt, prompt], search, priority=[1, -1], lora_request=[adapter, None])
        assert (found(both[:1]), found(both[1:])) == (found(changed), found(plain))
        assert both[0].num_cached_tokens == both[1].num_cached_tokens != 0
        other = llm.beam_search(salted, search)
        assert (found(other), other[0].num_cached_tokens) == (found(plain), 0)


def test_failing_logits_processor_ends_search() -> None:
    def nothing(output: Tokens, logits: Logits) -> None:
        if len(output) == 5:
            logits[3] = math.nan

    search = BeamSearchParams(beam_width=3, max_tokens=12, logits_processors=[nothing])
    with LLM(threads=1) as llm:
        with pytest.raises(LogitsProcessorError, match=r"logits_processors\[0\]"):
            llm.beam_search("Once", search)
        metrics = llm.metrics()
        assert metrics.pages_free == metrics.pages_total


def test_aborted_search_frees_pages() -> None:
    search = BeamSearchParams(beam_width=4, max_tokens=2000, ignore_eos=True)

    async def run() -> None:
        async with AsyncLLM(threads=1) as llm:
            aborted = asyncio.create_task(llm.beam_search("Once", search, "one"))
            cancelled = asyncio.create_task(llm.beam_search("Twice", search))
            while llm.metrics().generated_tokens < 10:
                await asyncio.sleep(0.01)
            await llm.abort("one")
            output = await aborted
            assert (output.sequences, output.request_id) == ([], "one")
            cancelled.cancel()
            with pytest.raises(asyncio.CancelledError):
                await cancelled
            while llm.metrics().running:
                await asyncio.sleep(0.01)
            metrics = llm.metrics()
            assert metrics.pages_free == metrics.pages_total
            found = await llm.beam_search("Once", BeamSearchParams(beam_width=2, max_tokens=3))
            assert len(found.sequences) == 2

    asyncio.run(run())


def mean(output: Any) -> float:
    return output.cumulative_logprob / len(output.token_ids)


def test_best_of_returns_highest_mean_logprob() -> None:
    sampled: dict[str, Any] = {"temperature": 1.2, "seed": 3, "max_tokens": 12, "logprobs": 0}
    prompt = "Once upon a time"
    with LLM(threads=1) as llm:
        every = llm.generate(prompt, SamplingParams(n=6, **sampled))[0].outputs
        expected = sorted(every, key=mean, reverse=True)
        assert expected != every
        best = llm.generate(prompt, SamplingParams(n=2, best_of=6, **sampled))[0]
        assert [each.token_ids for each in best.outputs] == [each.token_ids for each in expected[:2]]
        assert [each.index for each in best.outputs] == [0, 1]
        assert [each.seed for each in best.outputs] == [each.seed for each in expected[:2]]
        # Log-probabilities are returned only if they were requested.
        del sampled["logprobs"]
        plain = SamplingParams(n=2, best_of=6, **sampled)
        untold = llm.generate(prompt, plain)[0].outputs
        assert [each.token_ids for each in untold] == [each.token_ids for each in best.outputs]
        assert all(each.logprobs is None and each.cumulative_logprob is None for each in untold)
        # If all completions are returned, they keep their order.
        same = llm.generate(prompt, SamplingParams(n=6, best_of=6, **sampled))[0].outputs
        assert [each.token_ids for each in same] == [each.token_ids for each in every]
        with pytest.raises(InvalidParameterError, match="best_of must be 1: a stream has one completion, got 3"):
            llm.stream(prompt, SamplingParams(best_of=3))

    async def last() -> list[RequestOutput]:
        async with AsyncLLM(threads=1) as llm:
            return [output async for output in llm.generate(prompt, plain)]

    (only,) = asyncio.run(last())
    assert only.finished
    assert [each.token_ids for each in only.outputs] == [each.token_ids for each in best.outputs]


@pytest.mark.parametrize(
    ("arguments", "fragments"),
    [
        ({"best_of": 0}, ["best_of must be", "got 0", "1 to 128"]),
        ({"best_of": 129}, ["best_of must be", "got 129"]),
        ({"best_of": 2, "n": 3}, ["best_of must be", "got 2", "at least n (3)"]),
    ],
)
def test_invalid_best_of(arguments: dict[str, Any], fragments: list[str]) -> None:
    with pytest.raises(InvalidParameterError) as refused:
        SamplingParams(**arguments)
    assert all(fragment in str(refused.value) for fragment in fragments)


def test_beam_search_page_example_runs() -> None:
    page = (Path(__file__).parents[1] / "docs" / "beam-search.md").read_text()
    (example,) = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(example, "docs/beam-search.md", "exec"), names)
    assert len(names["output"].sequences) == 4
    fields = BeamSearchParams.__dataclass_fields__
    assert [name for name in fields if f"`{name}`" not in page and "penalty" not in name] == OF_SAMPLING
