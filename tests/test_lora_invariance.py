"""Sixty-four requests with a base model and three adapters; each has bitwise the same output as alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ferrule import LLM
from lora_files import Array, linear_modules, random_adapter, random_matrices, write_adapter
from test_batch_invariance import FEW_PAGES, PAGE_TOKENS, REQUESTS, params, prompts, result_of
from test_batch_invariance import alone as base_alone
from test_invariance import MODELS, load

pytestmark = pytest.mark.native

CASES = [
    ("tiny", ("f32", "f32")),
    ("tiny", ("int8", "f16")),
    ("tiny", ("int4", "int8")),
    ("mistral_swa", ("int8", "f16")),
    ("bloom", ("f32", "f16")),
    ("deepseek_v3", ("f32", "f16")),
    ("deepseek_v3", ("int4", "int8")),
    ("qwen2_moe", ("int4", "f16")),
]
"""Formats of the weights and of the KV cache."""
NAMES = [None, "all", "some", "halves"]


@pytest.fixture(scope="session")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three adapters for each model: of all modules, of half the modules with another rank, and stored in f16."""
    folder = tmp_path_factory.mktemp("adapters")
    for model in {model for model, _ in CASES}:
        base = MODELS[model]
        random_adapter(folder / model / "all", base, rank=8, alpha=0.8, seed=1)
        some = random_matrices(base, list(linear_modules(base))[::2], 17, 2)
        write_adapter(folder / model / "some", some, 17, 1.7)
        halves = random_matrices(base, linear_modules(base), 3, 3)
        write_adapter(folder / model / "halves", {name: half(matrix) for name, matrix in halves.items()}, 3, 0.3)
    return folder


def half(matrix: Array) -> Any:
    return matrix.astype(np.float16)


def with_adapters(folder: Path, model: str, formats: tuple[str, str], tokens: int, threads: int, **more: Any) -> LLM:
    modules = {name: folder / model / name for name in NAMES if name is not None}
    return load(model, formats, tokens, threads, lora_modules=modules, **more)


def name_of(number: int) -> str | None:
    """Returns the adapter of a request; it differs for adjacent requests and for requests with a common prefix."""
    return NAMES[(number + number // 4) % len(NAMES)]


_alone: dict[tuple[str, tuple[str, str]], list[Any]] = {}


def alone(folder: Path, model: str, formats: tuple[str, str]) -> list[Any]:
    """Runs each request separately, without sharing, on one thread."""
    if (model, formats) not in _alone:
        with with_adapters(folder, model, formats, 512, 1, enable_prefix_caching=False) as llm:
            _alone[model, formats] = [
                result_of(llm.generate(prompt, params(n, model), lora_request=name_of(n))[0])
                for n, prompt in enumerate(prompts(model))
            ]
    return _alone[model, formats]


def at_once(llm: LLM, model: str) -> list[Any]:
    """Runs all requests together."""
    numbers = range(REQUESTS)
    sampling = [params(number, model) for number in numbers]
    outputs = llm.generate(prompts(model), sampling, lora_request=[name_of(number) for number in numbers])
    return [result_of(output) for output in outputs]


@pytest.mark.parametrize(("model", "formats"), CASES)
def test_requests_without_adapter_equal_base_model(adapters: Path, model: str, formats: tuple[str, str]) -> None:
    found, of_base = alone(adapters, model, formats), base_alone(model, formats)
    for number in range(REQUESTS):
        if name_of(number) is None:
            assert found[number] == of_base[number]
    others = [number for number in range(REQUESTS) if name_of(number) is not None]
    assert sum(found[number] != of_base[number] for number in others) > len(others) * 0.9


@pytest.mark.parametrize("enable_prefix_caching", [False, True])
@pytest.mark.parametrize(("number", "model", "formats"), [(number, *case) for number, case in enumerate(CASES)])
def test_mixed_adapters_equal_single_requests(
    adapters: Path, number: int, model: str, formats: tuple[str, str], enable_prefix_caching: bool
) -> None:
    """Each case with and without the prefix cache, in small and large steps by turns."""
    tokens, threads = ((16, 1), (512, 2))[(number + enable_prefix_caching) % 2]
    cached = {"enable_prefix_caching": enable_prefix_caching}
    with with_adapters(adapters, model, formats, tokens, threads, **cached) as llm:
        for _ in range(2 if enable_prefix_caching else 1):
            assert at_once(llm, model) == alone(adapters, model, formats)
        assert (llm.metrics().prefix_hits_tokens > 0) == enable_prefix_caching


@pytest.mark.parametrize(("model", "formats"), CASES)
def test_prefix_cache_on_disk(adapters: Path, model: str, formats: tuple[str, str], tmp_path: Path) -> None:
    for restarted in (False, True):
        with with_adapters(adapters, model, formats, 512, 2, prefix_cache_dir=tmp_path / "pages") as llm:
            assert at_once(llm, model) == alone(adapters, model, formats)
            assert (llm.metrics().disk_hits_tokens > 0) == restarted


@pytest.mark.parametrize(("model", "formats"), CASES)
def test_kv_cache_smaller_than_batch(adapters: Path, model: str, formats: tuple[str, str]) -> None:
    with with_adapters(adapters, model, formats, 64, 2) as llm:
        page_bytes = PAGE_TOKENS * llm.info()["kv_bytes_per_token"]
    with with_adapters(adapters, model, formats, 64, 2, kv_cache_memory=FEW_PAGES * page_bytes) as llm:
        assert at_once(llm, model) == alone(adapters, model, formats)
        metrics = llm.metrics()
        assert metrics.preemptions > 0 or model == "mistral_swa"
        assert metrics.pages_free == metrics.pages_total
