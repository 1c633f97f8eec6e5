"""Sixty-four texts together have bitwise the same results as alone.

This holds for any batch and portion, any number of threads, and cached prefixes.
"""

from __future__ import annotations

import asyncio
import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from ferrule import LLM, AsyncLLM, SamplingParams
from ferrule._text.prompt import TokensPrompt
from test_encoders import GOLDEN
from test_invariance import MODELS

pytestmark = pytest.mark.native

CASES = [
    (model, formats)
    for formats in (("f32", "f32"), ("int8", "f16"), ("int4", "int8"))
    for model in ("bert", "modernbert", "gemma3", "xlm_roberta", "qwen3")
] + [("tiny", ("int8", "f16")), ("mistral_swa", ("int8", "f16"))]
"""Encoders with windows and without, and decoders."""
TEXTS = 64
WAYS = [(16, 1), (48, 2), (512, 1), (512, 2)]
"""Tokens in a step, and threads. Each case has two of them: one and two threads by turns, in small and large steps."""
CLASSIFIERS = ("bert_classifier", "modernbert_classifier_mean", "qwen3_classifier", "xlm_roberta_classifier")


def load(model: str, formats: tuple[str, str], tokens: int, threads: int, **more: Any) -> LLM:
    folder: Path | None = MODELS.get(model) if model in ("tiny", "mistral_swa") else GOLDEN / model
    quantization, kv = formats
    return LLM(
        folder,
        quantization=quantization,
        kv_cache_dtype=kv,
        max_num_batched_tokens=tokens,
        threads=threads,
        max_model_len=70,
        **more,
    )


@cache
def texts() -> list[TokensPrompt]:
    """Texts of one to seventy tokens; many share a prefix."""
    numbers = random.Random(2)
    beginning = [numbers.randrange(7, 320) for _ in range(48)]
    made: list[TokensPrompt] = []
    for _ in range(TEXTS):
        shared = beginning[: numbers.choice([0, 0, 16, 17, 48])]
        own = [numbers.randrange(7, 320) for _ in range(numbers.choice([1, 2, 7, 15, 16, 22]))]
        made.append({"prompt_token_ids": shared + own})
    return made


def embedded(llm: LLM, given: list[TokensPrompt]) -> list[tuple[bytes, bytes]]:
    """Pools the last token, for which cached prefixes are shared, and the mean, for which they are not."""
    outputs = [llm.embed(given, pooling=pooling) for pooling in ("last", "mean")]
    last, mean = ([output.outputs.embedding.tobytes() for output in several] for several in outputs)
    return list(zip(last, mean, strict=True))


@cache
def alone(model: str, formats: tuple[str, str]) -> list[tuple[bytes, bytes]]:
    """Encodes each text separately, without sharing, on one thread."""
    with load(model, formats, 512, 1, enable_prefix_caching=False) as llm:
        return [embedded(llm, [text])[0] for text in texts()]


@pytest.mark.parametrize(
    ("model", "formats", "tokens", "threads"),
    [(*case, *way) for number, case in enumerate(CASES) for way in WAYS[number % 2 :: 2]],
)
def test_embeddings_are_batch_invariant(model: str, formats: tuple[str, str], tokens: int, threads: int) -> None:
    with load(model, formats, tokens, threads) as llm:
        assert embedded(llm, texts()) == alone(model, formats)
        computed = llm.metrics().computed_tokens
        assert embedded(llm, texts()) == alone(model, formats)
        length = sum(len(text["prompt_token_ids"]) for text in texts())
        again = llm.metrics().computed_tokens - computed
        shares = llm.info()["enable_prefix_caching"]
        assert again < 2 * length - 32 * 16 if shares else again == 2 * length
    assert len({row for row, _ in alone(model, formats)}) == TEXTS


@pytest.mark.parametrize(
    ("model", "tokens", "threads"),
    [(model, *way) for number, model in enumerate(CLASSIFIERS) for way in WAYS[number % 2 :: 2]],
)
def test_scores_are_batch_invariant(model: str, tokens: int, threads: int) -> None:
    def scores(llm: LLM, given: list[TokensPrompt]) -> list[bytes]:
        return [output.outputs.logits.tobytes() for output in llm.classify(given)]

    with load(model, ("int8", "f16"), 512, 1) as llm:
        expected = [scores(llm, [text])[0] for text in texts()]
    with load(model, ("int8", "f16"), tokens, threads) as llm:
        assert scores(llm, texts()) == expected


def test_concurrent_encoding_and_generation_are_independent() -> None:
    """Concurrent embedding and generation have the same results as alone."""
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    prompts = texts()[:8]
    formats = ("int8", "f16")
    with load("tiny", formats, 512, 1) as llm:
        generated = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]

    async def test() -> None:
        options: dict[str, Any] = {"quantization": "int8", "max_num_batched_tokens": 48, "max_model_len": 70}
        async with AsyncLLM(threads=2, **options) as llm:

            async def generate(number: int) -> list[int]:
                output = [output async for output in llm.generate(prompts[number], params)][-1]
                return output.outputs[0].token_ids

            async def embed(first: int) -> list[bytes]:
                return [
                    o.outputs.embedding.tobytes() for o in await llm.embed(texts()[first : first + 8], pooling="last")
                ]

            embeds = [embed(first) for first in range(0, TEXTS, 8)]
            answers: list[Any] = await asyncio.gather(*(generate(number) for number in range(8)), *embeds)
            assert answers[:8] == generated
            rows = [row for part in answers[8:] for row in part]
            assert rows == [last for last, _ in alone("tiny", formats)]

    asyncio.run(test())
