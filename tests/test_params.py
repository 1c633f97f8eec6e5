"""SamplingParams: invalid values, and defaults from model files."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import fakes
from ferrule import LLM, ConfigError, InvalidParameterError, SamplingParams
from ferrule.errors import shown

BAD: list[tuple[str, object, str]] = [
    ("temperature", -1, "0 to 100"),
    ("temperature", math.nan, "0 to 100"),
    ("temperature", math.inf, "0 to 100"),
    ("temperature", 1e308, "0 to 100"),
    ("temperature", 10**400, "0 to 100"),
    ("temperature", "1", "0 to 100"),
    ("temperature", True, "0 to 100"),
    ("top_p", -1, "<= 1"),
    ("top_p", 0, "a number > 0"),
    ("top_p", 2, "<= 1"),
    ("min_p", 2, "0 to 1"),
    ("min_p", -0.1, "0 to 1"),
    ("repetition_penalty", 0, "a number > 0"),
    ("presence_penalty", 2.5, "-2 to 2"),
    ("frequency_penalty", -3, "-2 to 2"),
    ("top_k", -5, "-1 to 2147483647"),
    ("top_k", 2**63, "-1 to 2147483647"),
    ("top_k", 1.5, "integer"),
    ("n", 10**9, "1 to 128"),
    ("n", 0, "1 to 128"),
    ("logprobs", 10**6, "0 to 20"),
    ("logprobs", -1, "0 to 20"),
    ("prompt_logprobs", 21, "0 to 20"),
    ("prompt_logprobs", "all", "0 to 20"),
    ("max_tokens", -1, "1 to 2147483647"),
    ("max_tokens", 0, "1 to 2147483647"),
    ("max_tokens", 2**63, "1 to 2147483647"),
    ("max_tokens", 2**5000, "1 to 2147483647"),
    ("min_tokens", -1, "0 to 2147483647"),
    ("seed", -2, "0 to 18446744073709551615"),
    ("seed", 2**64, "0 to 18446744073709551615"),
    ("logit_bias", {-1: 1.0}, "0 to 4294967295"),
    ("logit_bias", {3: math.nan}, "-100 to 100"),
    ("logit_bias", {3: 101}, "-100 to 100"),
    ("logit_bias", [3], "mapping from token ids"),
    ("stop_token_ids", [-1], "0 to 4294967295"),
    ("stop_token_ids", [2**32], "0 to 4294967295"),
    ("stop_token_ids", "2", "list of token ids"),
    ("stop_token_ids", [2] * 100_000, "at most 1024"),
    ("stop", "", "non-empty"),
    ("stop", ["a", ""], "non-empty"),
    ("stop", [3], "a non-empty string"),
    ("stop", 3, "string or a list"),
    ("stop", ["a"] * 100_000, "at most 256"),
    ("stop", "a" * 5000, "at most 4096"),
    ("dynatemp_range", -0.1, "0 to 100"),
    ("dynatemp_exponent", math.nan, "0 to 100"),
    ("top_n_sigma", -2, "-1 to 100"),
    ("typical_p", 0, "a number > 0"),
    ("typical_p", 1.1, "<= 1"),
    ("epsilon_cutoff", 2, "0 to 1"),
    ("eta_cutoff", -1, "0 to 1"),
    ("top_h", math.inf, "0 to 1"),
    ("xtc_probability", 1.5, "0 to 1"),
    ("xtc_threshold", "high", "0 to 1"),
    ("dry_multiplier", -1, "0 to 100"),
    ("dry_base", 0.5, "1 to 100"),
    ("dry_base", 1e308, "1 to 100"),
    ("dry_allowed_length", 0, "1 to 2147483647"),
    ("dry_penalty_last_n", -2, "-1 to 2147483647"),
    ("dry_penalty_last_n", 2**63, "-1 to 2147483647"),
    ("dry_sequence_breakers", ["a", ""], "non-empty"),
    ("dry_sequence_breakers", ["a"] * 65, "at most 64"),
    ("mirostat", 3, "0 to 2"),
    ("mirostat", True, "0 to 2"),
    ("mirostat_tau", 0, "a number > 0"),
    ("mirostat_eta", 2, "<= 1"),
    ("no_repeat_ngram_size", -1, "0 to 1024"),
    ("no_repeat_ngram_size", 10**6, "0 to 1024"),
    ("bad_words", 5, "string or a list"),
    ("bad_words", [""], "non-empty"),
    ("bad_words", ["a"] * 100_000, "at most 512"),
    ("bad_words_ids", [[1], []], "at least one token id"),
    ("bad_words_ids", [1], "list of token ids"),
    ("bad_words_ids", "12", "list of lists of token ids"),
    ("bad_words_ids", [[1] * 257], "at most 256"),
    ("bad_words_ids", [[-1]], "0 to 4294967295"),
    ("bad_words_ids", [[1]] * 100_000, "at most 512"),
    ("allowed_token_ids", [], "at least one token id"),
    ("allowed_token_ids", [2**32], "0 to 4294967295"),
    ("allowed_token_ids", [1] * (2**20 + 1), "at most 1048576"),
    ("allowed_token_ids", 7, "list of token ids"),
    ("logits_processors", [3], "a function"),
    ("logits_processors", print, "a list of functions"),
    ("logits_processors", [print] * 33, "at most 32"),
    ("entropy", 1, "True or False"),
    ("ignore_eos", 1, "True or False"),
    ("skip_special_tokens", None, "True or False"),
]


@pytest.mark.parametrize(("field", "value", "limit"), BAD)
def test_invalid_value_names_field_and_limit(field: str, value: Any, limit: str) -> None:
    with pytest.raises(InvalidParameterError) as caught:
        SamplingParams(**{field: value})
    message = str(caught.value)
    assert caught.value.field.startswith(field)
    assert limit in caught.value.requirement
    assert message == f"{caught.value.field} must be {caught.value.requirement}, got {shown(caught.value.value)}"
    assert len(message) < 300
    assert isinstance(caught.value, ValueError)


def test_min_tokens_above_max_tokens() -> None:
    with pytest.raises(InvalidParameterError, match=r"min_tokens must be at most max_tokens \(5\), got 9"):
        SamplingParams(min_tokens=9, max_tokens=5)


@given(
    temperature=st.floats(0, 100),
    top_p=st.floats(0, 1, exclude_min=True),
    top_k=st.integers(-1, 2**31 - 1),
    min_p=st.floats(0, 1),
    seed=st.integers(0, 2**64 - 1),
)
def test_values_within_limits_are_kept(temperature: float, top_p: float, top_k: int, min_p: float, seed: int) -> None:
    params = SamplingParams(temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, seed=seed)
    assert (params.temperature, params.top_p, params.min_p, params.seed) == (temperature, top_p, min_p, seed)
    assert params.top_k == max(top_k, 0)


def test_numpy_scalars_are_numbers() -> None:
    import numpy as np

    params = SamplingParams(temperature=np.float32(0.5), top_k=np.int64(4))  # type: ignore[arg-type]
    assert params == SamplingParams(temperature=0.5, top_k=4)


def test_params_are_immutable() -> None:
    with pytest.raises(FrozenInstanceError):
        SamplingParams().seed = 1  # type: ignore[misc]


def test_unset_fields_default_to_model_then_neutral_values() -> None:
    model = SamplingParams(temperature=0.6, top_p=0.9, top_k=50)
    params = SamplingParams.with_model_defaults(temperature=0.0, min_p=0.1).completed(model)
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.0, 0.9, 50, 0.1)
    assert params.repetition_penalty == 1.0


@pytest.mark.parametrize(
    ("generation", "expected"),
    [
        ({}, {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "repetition_penalty": 1.0}),
        ({"temperature": 0.6, "top_k": 20, "top_p": 0.95}, {"temperature": 0.6, "top_k": 20, "top_p": 0.95}),
        ({"do_sample": True, "temperature": 0.6}, {"temperature": 0.6}),
        ({"top_k": 50.0, "max_new_tokens": 7}, {"top_k": 50, "max_tokens": 7}),
        ({"do_sample": False, "temperature": 0.6}, {"temperature": 0.0}),
        ({"repetition_penalty": 1.1, "temperature": None}, {"repetition_penalty": 1.1, "temperature": 1.0}),
    ],
)
def test_generation_config_fills_unset_fields(
    generation: dict[str, object],
    expected: dict[str, object],
    model_with: Callable[..., Path],
    fake_engine: type[fakes.Engine],
    engine_of: Callable[[LLM], fakes.Engine],
) -> None:
    llm = LLM(model_with(generation_config=json.dumps(generation)))
    stream = llm.stream({"prompt_token_ids": [1]})
    next(stream)
    passed = next(iter(engine_of(llm).running.values())).params
    assert expected.items() <= passed.items()
    stream.close()


@pytest.mark.parametrize(
    ("generation", "field"),
    [
        ({"temperature": -1}, "temperature must be a number from 0 to 100, got -1"),
        ({"top_p": "high"}, "top_p must be a number > 0 and <= 1, got 'high'"),
        ({"eos_token_id": 4096}, "eos_token_id must be a token id from 0 to 4095, or a list of them, got 4096"),
        ({"eos_token_id": [2, -1]}, r"eos_token_id must be .*, got \[2, -1\]"),
        ({"eos_token_id": "2"}, r"eos_token_id must be .*, got '2'"),
        ({"do_sample": "no"}, "do_sample must be true or false, got 'no'"),
    ],
)
def test_invalid_generation_config(
    generation: dict[str, object], field: str, model_with: Callable[..., Path], fake_engine: type[fakes.Engine]
) -> None:
    with pytest.raises(ConfigError, match=f"generation_config.json: {field}"):
        LLM(model_with(generation_config=json.dumps(generation)))


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        ({"eos_token_id": 2}, {"eos_token_id": [2, 6]}, [2, 6]),
        ({"eos_token_id": 3}, {}, [3]),
        ({"eos_token_id": None}, {}, []),
    ],
)
def test_eos_token_ids_from_config_and_generation_config(
    config: dict[str, object],
    generation: dict[str, object],
    expected: list[int],
    model_with: Callable[..., Path],
    fake_engine: type[fakes.Engine],
) -> None:
    llm = LLM(model_with(config, generation_config=json.dumps(generation)))
    assert llm.info()["eos_token_ids"] == expected


@pytest.mark.parametrize(
    ("params", "stop_ids"),
    [
        (SamplingParams(), [2, 6]),
        (SamplingParams(stop_token_ids=[9, 2]), [2, 6, 9]),
        (SamplingParams(ignore_eos=True), []),
        (SamplingParams(ignore_eos=True, stop_token_ids=[9]), [9]),
    ],
)
def test_stop_token_ids_passed_to_engine(
    params: SamplingParams, stop_ids: list[int], llm: LLM, engine_of: Callable[[LLM], fakes.Engine]
) -> None:
    stream = llm.stream({"prompt_token_ids": [1]}, params)
    next(stream)
    assert next(iter(engine_of(llm).running.values())).params["stop_token_ids"] == stop_ids
    stream.close()


def test_max_tokens_is_limited_by_context(llm: LLM, engine_of: Callable[[LLM], fakes.Engine]) -> None:
    for wanted, expected in ((None, 2038), (5, 5), (10_000, 2038)):
        stream = llm.stream({"prompt_token_ids": [1] * 10}, SamplingParams(max_tokens=wanted))
        next(stream)
        assert next(iter(engine_of(llm).running.values())).params["max_tokens"] == expected
        stream.close()


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(stop_token_ids=[4096]),
        SamplingParams(logit_bias={4096: 1.0, 5: 1.0}),
        SamplingParams(allowed_token_ids=[5, 4096]),
        SamplingParams(bad_words_ids=[[5], [5, 4096]]),
    ],
)
def test_token_ids_outside_the_vocabulary(params: SamplingParams, llm: LLM) -> None:
    with pytest.raises(InvalidParameterError, match=" must be token ids from 0 to 4095, the vocabulary, got 4096"):
        llm.generate("x", params)


def test_equivalent_params_are_equal() -> None:
    assert SamplingParams(allowed_token_ids=[7, 5, 7]) == SamplingParams(allowed_token_ids=[5, 7])
    assert SamplingParams(top_n_sigma=-1) == SamplingParams()


def test_drawn_seed_is_reported(llm: LLM) -> None:
    params = SamplingParams(max_tokens=5, temperature=1.0)
    first, second = (llm.generate("x", params)[0].outputs[0] for _ in range(2))
    assert first.seed != second.seed
    again = llm.generate("x", SamplingParams(max_tokens=5, temperature=1.0, seed=first.seed))[0].outputs[0]
    assert again.token_ids == first.token_ids
    assert again.seed == first.seed


def test_llm_seed_makes_drawn_seeds_reproducible(fake_engine: type[fakes.Engine]) -> None:
    seeds = [LLM(seed=7).generate("x", SamplingParams(max_tokens=1))[0].outputs[0].seed for _ in range(2)]
    assert seeds[0] == seeds[1]
    assert LLM().generate("x", SamplingParams(max_tokens=1))[0].outputs[0].seed != seeds[0]


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("quantization", "int3"),
        ("kv_cache_dtype", "int4"),
        ("threads", 0),
        ("threads", 1.5),
        ("max_model_len", -1),
        ("kv_cache_memory", 2**63),
        ("max_num_seqs", 0),
        ("max_num_batched_tokens", "512"),
        ("enable_prefix_caching", 1),
        ("prefix_cache_dir", 5),
        ("prefix_cache_dir", ""),
        ("prefix_cache_dir", b"x"),
        ("prefix_cache_dir_limit", 0),
        ("prefix_cache_dir_limit", 5),
        ("max_queued_requests", 0),
        ("target_itl", 0),
        ("target_itl", math.nan),
        ("target_itl", "fast"),
        ("seed", -1),
    ],
)
def test_invalid_engine_option(option: str, value: Any, fake_engine: type[fakes.Engine]) -> None:
    with pytest.raises(InvalidParameterError, match=f"^{option} (must be|is not supported) "):
        LLM(**{option: value})
