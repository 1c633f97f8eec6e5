"""The sampler, compared with a reference in NumPy and with transformers' filters (golden/decoding/warpers.json)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

pytestmark = pytest.mark.native

WARPERS: list[dict[str, Any]] = json.loads((Path(__file__).parent / "golden" / "decoding" / "warpers.json").read_text())
FILTERS = {
    "top_k_5": {"top_k": 5},
    "top_k_1": {"top_k": 1},
    "top_p_0.9": {"top_p": 0.9},
    "top_p_0.3": {"top_p": 0.3},
    "min_p_0.1": {"min_p": 0.1},
    "temperature_0.3": {"temperature": 0.3},
    "temperature_2": {"temperature": 2.0},
    "typical_0.5": {"typical_p": 0.5},
    "typical_0.95": {"typical_p": 0.95},
    "epsilon_0.01": {"epsilon_cutoff": 0.01},
    "top_h_0.4": {"top_h": 0.4},
}
"""Names of the cases in warpers.json."""
NEAR = 1e-6
"""Distance from a threshold within which rounding may decide."""


def sample(
    logits: npt.NDArray[np.float32], params: dict[str, Any], prompt: list[int], output: list[int]
) -> tuple[list[int], list[float], int]:
    """Runs the engine's sampler; returns the ids kept, their probabilities, and the sampled id."""
    from ferrule import _native

    whole = {"seed": 0, "max_tokens": 1000} | params
    return _native.sample_distribution(logits.tolist(), json.dumps(whole), prompt, output)


@np.errstate(invalid="ignore")  # forbidden tokens are minus infinity, whose difference from itself is NaN
def oracle(
    logits: npt.NDArray[np.float32], params: dict[str, Any], prompt: list[int], output: list[int]
) -> tuple[list[int], npt.NDArray[np.float64]]:
    """Returns the tokens to keep and their probabilities: one line per rule."""
    x = logits.astype(np.float64)
    for token, bias in params.get("logit_bias", {}).items():
        x[int(token)] += bias
    if len(output) < params.get("min_tokens", 0):
        x[params.get("stop_token_ids", [])] = -np.inf
    seen = np.array(sorted({*prompt, *output}), dtype=int)
    x[seen] = np.where(x[seen] > 0, x[seen] / params["repetition_penalty"], x[seen] * params["repetition_penalty"])
    counts = np.bincount(np.array(output, dtype=int), minlength=len(x))
    x -= params["frequency_penalty"] * counts + params["presence_penalty"] * (counts > 0)
    order = np.argsort(-x, kind="stable")
    if params["temperature"] == 0:
        assume(len(x) == 1 or x[order[0]] - x[order[1]] > NEAR)
        return [int(order[0])], np.ones(1)
    x = x / params["temperature"]
    ratio = np.exp(x - x.max())
    assume(not (np.abs(ratio - params["min_p"]) < NEAR).any() or params["min_p"] in {0.0, 1.0})
    x[ratio < params["min_p"]] = -np.inf
    if 0 < params["top_k"] < np.isfinite(x).sum():
        last = np.sort(x)[-params["top_k"]]
        assume(not ((x != last) & (np.abs(x - last) < NEAR)).any())
        x[x < last] = -np.inf
    probabilities = np.exp(x - x.max()) / np.exp(x - x.max()).sum()
    before = np.cumsum(probabilities[order]) - probabilities[order]
    if params["top_p"] < 1:
        assume(not (np.abs(before - params["top_p"]) < NEAR).any())
        x[order[before >= params["top_p"]]] = -np.inf
    kept = np.flatnonzero(x > -np.inf)
    weights = np.exp(x[kept] - x[kept].max())
    return kept.tolist(), weights / weights.sum()


@st.composite
def requests(draw: st.DrawFn) -> tuple[npt.NDArray[np.float32], dict[str, Any], list[int], list[int]]:
    """Draws a row of logits, parameters, and the tokens of prompt and output."""
    size = draw(st.integers(1, 60))
    tokens = st.integers(0, size - 1)
    # The logits differ by more than rounding errors: a scaled permutation of integers. Ties have a separate test.
    steps = draw(st.permutations(range(size)))
    logits = np.array(steps, dtype=np.float32) * np.float32(draw(st.floats(0.01, 1))) - np.float32(
        draw(st.floats(0, 20))
    )
    params = {
        "temperature": draw(st.just(0.0) | st.floats(0.05, 3)),
        "top_k": draw(st.just(0) | st.integers(1, size + 2)),
        "top_p": draw(st.just(1.0) | st.floats(0.01, 1)),
        "min_p": draw(st.just(0.0) | st.floats(0, 1)),
        "repetition_penalty": draw(st.just(1.0) | st.floats(0.5, 2)),
        "presence_penalty": draw(st.just(0.0) | st.floats(-2, 2)),
        "frequency_penalty": draw(st.just(0.0) | st.floats(-2, 2)),
        "logit_bias": {
            str(token): bias for token, bias in draw(st.dictionaries(tokens, st.floats(-5, 5), max_size=3)).items()
        },
        "seed": draw(st.integers(0, 2**64 - 1)),
    }
    if size > 1 and draw(st.booleans()):
        stops = draw(st.lists(tokens, max_size=size - 1, unique=True))
        params |= {"min_tokens": draw(st.integers(0, 4)), "stop_token_ids": stops}
    history = st.lists(tokens, max_size=8)
    return logits, params, draw(history), draw(history)


@given(requests())
def test_sampler_equals_numpy_reference(
    request: tuple[npt.NDArray[np.float32], dict[str, Any], list[int], list[int]],
) -> None:
    kept, probabilities = oracle(*request)
    ids, found, chosen = sample(*request)
    assert ids == kept
    np.testing.assert_allclose(found, probabilities, atol=1e-6)
    assert sum(found) == pytest.approx(1)
    assert chosen in ids


@pytest.mark.parametrize("row", range(len(WARPERS)))
@pytest.mark.parametrize("name", FILTERS)
def test_filters_equal_transformers(name: str, row: int) -> None:
    assert FILTERS.keys() == WARPERS[row]["filters"].keys()
    golden = WARPERS[row]["filters"][name]
    logits = np.array(WARPERS[row]["logits"], dtype=np.float32)
    ids, probabilities, _ = sample(logits, FILTERS[name], [], [])
    if len(set(logits.tolist())) == len(logits) or not name.startswith("top_p"):
        assert ids == golden["kept"]
    # If equal logits lie at the limit of top-p, the tokens that transformers keeps depend on its sort.
    assert sorted(logits[ids]) == sorted(logits[golden["kept"]])
    np.testing.assert_allclose(sorted(probabilities), sorted(golden["probabilities"]), atol=1e-6)


def test_ties_of_equal_logits() -> None:
    """The lower id ranks first; top-k keeps all tokens that tie with the last one kept."""
    logits = np.array([1, 3, 2, 3, 2, 0], dtype=np.float32)
    assert sample(logits, {"temperature": 0}, [], [])[0] == [1]
    assert sample(logits, {"top_k": 3}, [], [])[0] == [1, 2, 3, 4]
    assert sample(logits, {"top_p": 0.3}, [], [])[0] == [1]


def test_draw_depends_on_seed_and_position() -> None:
    logits = np.zeros(50, dtype=np.float32)
    first = [sample(logits, {"seed": 7}, [], [0] * position)[2] for position in range(20)]
    assert first == [sample(logits, {"seed": 7}, [1] * position, [])[2] for position in range(20)]
    assert len(set(first)) > 5
    assert first != [sample(logits, {"seed": 8}, [], [0] * position)[2] for position in range(20)]


def test_draws_follow_probabilities() -> None:
    logits = np.array([2.0, 1.0, 0.0, -1.0, 1.5], dtype=np.float32)
    params = {"temperature": 0.8, "top_k": 4}
    ids, probabilities, _ = sample(logits, params, [], [])
    draws = 4000
    counts = dict.fromkeys(ids, 0)
    for seed in range(draws):
        counts[sample(logits, params | {"seed": seed}, [], [])[2]] += 1
    expected = np.array(probabilities) * draws
    chi_squared = float(((np.array([counts[token] for token in ids]) - expected) ** 2 / expected).sum())
    assert chi_squared < 25  # three degrees of freedom: above it once in 60,000, and the seeds are fixed
