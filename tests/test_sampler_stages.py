"""Each sampler stage alone, compared with a few lines of NumPy: tokens kept, their probabilities, and draws."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import assume, currently_in_test_context, given
from hypothesis import strategies as st

from ferrule import LLM, SamplingParams
from test_samplers import NEAR, sample

pytestmark = pytest.mark.native

Row = npt.NDArray[np.float64]


def softmax(x: Row) -> Row:
    weights = np.exp(x - x.max())
    return weights / weights.sum()


def entropy(p: Row) -> float:
    """Entropy of a row, in nats."""
    some = p[p > 0]
    return float(-(some * np.log(some)).sum())


def suppose(condition: bool) -> None:
    """Works like `assume` in a test of hypothesis; elsewhere the condition must hold."""
    if currently_in_test_context():
        assume(condition)
    assert condition


def far_from(values: Row, bound: float) -> None:
    """Assumes that no value is so near a bound that rounding decides."""
    suppose(not (np.abs(values - bound) < NEAR).any())


def drop(x: Row, dropped: npt.NDArray[np.bool_]) -> Row:
    return np.where(dropped, -np.inf, x)


def top_n_sigma(x: Row, params: dict[str, Any], text: list[int]) -> Row:
    bound = x.max() - params["top_n_sigma"] * x.std()
    far_from(x, bound)
    return drop(x, x < bound)


def dynamic_temperature(x: Row, params: dict[str, Any], text: list[int]) -> Row:
    middle, reach = params.get("temperature", 1.0), params["dynatemp_range"]
    low, high = max(0.0, middle - reach), middle + reach
    share = entropy(softmax(x)) / math.log(len(x)) if len(x) > 1 else 1.0
    suppose(low > 0 or share > 0.01)
    return x / (low + (high - low) * share ** params["dynatemp_exponent"])


def typical_p(x: Row, params: dict[str, Any], text: list[int]) -> Row:
    p = softmax(x)
    distance = np.abs(-np.log(p) - entropy(p)).round(9)
    order = np.argsort(distance, kind="stable")
    sums = np.cumsum(p[order])
    far_from(sums[:-1], params["typical_p"])
    farthest = distance[order[np.argmax(sums >= params["typical_p"] - NEAR)]]
    return drop(x, distance > farthest)


def epsilon_cutoff(x: Row, params: dict[str, Any], text: list[int]) -> Row:
    p = softmax(x)
    far_from(p, params["epsilon_cutoff"])
    return drop(x, (p < params["epsilon_cutoff"]) & (x < x.max()))


def eta_cutoff(x: Row, params: dict[str, Any], text: list[int]) -> Row:
    p, eta = softmax(x), params["eta_cutoff"]
    cutoff = min(eta, math.sqrt(eta) * math.exp(-entropy(p)))
    far_from(p, cutoff)
    return drop(x, (p < cutoff) & (x < x.max()))


def top_h(x: Row, params: dict[str, Any], text: list[int]) -> Row:
    order = np.argsort(-x, kind="stable")[:100]
    p = softmax(x[order])
    sums = np.cumsum(-p * np.log(p))
    far_from(sums, params["top_h"] * sums[-1])
    kept = order[: max(1, int((sums <= params["top_h"] * sums[-1]).sum()))]
    return drop(x, ~np.isin(np.arange(len(x)), kept))


def xtc(x: Row, params: dict[str, Any], text: list[int]) -> Row:
    p = softmax(x)
    far_from(p, params["xtc_threshold"])
    likely = [token for token in np.argsort(-x, kind="stable") if p[token] >= params["xtc_threshold"]]
    return drop(x, np.isin(np.arange(len(x)), likely[:-1]))


def mirostat_2(x: Row, params: dict[str, Any], text: list[int]) -> Row:
    surprise = -np.log2(softmax(x))
    far_from(surprise, 2 * params["mirostat_tau"])
    return drop(x, (surprise > 2 * params["mirostat_tau"]) & (x < x.max()))


def mirostat_1(x: Row, params: dict[str, Any], text: list[int]) -> Row:
    p = np.sort(softmax(x))[::-1][:100]
    ranks = np.arange(1, len(p))
    steps = np.log((ranks + 1) / ranks)
    exponent = float((steps * np.log(p[:-1] / p[1:])).sum() / (steps**2).sum()) if len(p) > 1 else math.nan
    suppose(not exponent < 0.01)  # equal probabilities have no defined exponent
    excess = exponent - 1
    count = (excess * 2 ** (2 * params["mirostat_tau"]) / (1 - float(len(x)) ** -excess)) ** (1 / exponent)
    if not count < len(x):
        return x
    suppose(abs(count - round(count)) > NEAR)
    return drop(x, x < np.sort(x)[::-1][max(1, int(count)) - 1])


def no_repeat_ngram(x: Row, params: dict[str, Any], text: list[int]) -> Row:
    size = params["no_repeat_ngram_size"]
    ngrams = {tuple(text[i : i + size]) for i in range(len(text) - size + 1)}
    end = text[len(text) - size + 1 :] if size > 1 else []
    return drop(x, np.array([len(end) == size - 1 and (*end, token) in ngrams for token in range(len(x))]))


def bad_words(x: Row, params: dict[str, Any], text: list[int]) -> Row:
    words = params["bad_words"]
    return drop(x, np.array([any([*text, t][-len(w) :] == w for w in words) for t in range(len(x))]))


def allowed_token_ids(x: Row, params: dict[str, Any], text: list[int]) -> Row:
    return drop(x, ~np.isin(np.arange(len(x)), params["allowed_token_ids"]))


def dry(x: Row, params: dict[str, Any], text: list[int]) -> Row:
    """Implements DRY like its author's code, position by position."""
    breakers, most = params["dry_sequence_breaker_ids"], params["dry_penalty_last_n"]
    text = text[max(0, len(text) - most) :] if most >= 0 else text
    lengths: dict[int, int] = {}
    for place, token in enumerate(text):
        length = 0
        while length < 50 and length < place and text[place - 1 - length] == text[-1 - length] not in breakers:
            length += 1
        if token not in breakers:
            lengths[token] = max(lengths.get(token, 0), length)
    x = x.copy()
    for token, length in lengths.items():
        if length >= params["dry_allowed_length"]:
            x[token] -= params["dry_multiplier"] * params["dry_base"] ** (length - params["dry_allowed_length"])
    return x


Oracle = Callable[[Row, dict[str, Any], list[int]], Row]
STAGES: dict[str, tuple[Oracle, dict[str, st.SearchStrategy[Any]]]] = {
    "top_n_sigma": (top_n_sigma, {"top_n_sigma": st.floats(0.01, 5)}),
    "dynatemp": (
        dynamic_temperature,
        {"temperature": st.floats(0.3, 2), "dynatemp_range": st.floats(0.01, 3), "dynatemp_exponent": st.floats(0, 3)},
    ),
    "typical_p": (typical_p, {"typical_p": st.floats(0.01, 0.99)}),
    "epsilon_cutoff": (epsilon_cutoff, {"epsilon_cutoff": st.floats(1e-4, 1)}),
    "eta_cutoff": (eta_cutoff, {"eta_cutoff": st.floats(1e-4, 1)}),
    "top_h": (top_h, {"top_h": st.floats(0.01, 0.99)}),
    "xtc": (xtc, {"xtc_probability": st.just(1.0), "xtc_threshold": st.floats(0.001, 0.5)}),
    "mirostat_1": (mirostat_1, {"mirostat": st.just(1), "mirostat_tau": st.floats(0.05, 4)}),
    "mirostat_2": (mirostat_2, {"mirostat": st.just(2), "mirostat_tau": st.floats(0.05, 4)}),
    "no_repeat_ngram_size": (no_repeat_ngram, {"no_repeat_ngram_size": st.integers(1, 5)}),
    "bad_words": (bad_words, {"bad_words": st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=3), max_size=4)}),
    "allowed_token_ids": (allowed_token_ids, {"allowed_token_ids": st.lists(st.integers(0, 3), min_size=1)}),
    "dry": (
        dry,
        {
            "dry_multiplier": st.floats(0.01, 5),
            "dry_base": st.floats(1, 3),
            "dry_allowed_length": st.integers(1, 4),
            "dry_penalty_last_n": st.integers(-1, 30),
            "dry_sequence_breaker_ids": st.lists(st.integers(0, 3), max_size=1),
        },
    ),
}
"""Oracle of each stage, and the parameters that activate it."""


@pytest.mark.parametrize("name", STAGES)
@given(data=st.data())
def test_stage_equals_numpy_reference(name: str, data: st.DataObject) -> None:
    oracle, strategies = STAGES[name]
    params = {field: data.draw(strategy, field) for field, strategy in strategies.items()}
    size = data.draw(st.integers(4, 150), "size")
    # Multiples of an eighth, so that many logits are equal.
    eighths = data.draw(st.lists(st.integers(-80, 80), min_size=size, max_size=size), "logits")
    logits = (np.array(eighths) / 8).astype(np.float32)
    text = data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=60), "text")
    expected = oracle(logits.astype(np.float64), params, text)
    assume(np.isfinite(expected).any())
    ids, found, chosen = sample(logits, params, text[:1], text[1:])
    assert ids == np.flatnonzero(np.isfinite(expected)).tolist()
    np.testing.assert_allclose(found, softmax(expected[ids]), atol=1e-6)
    assert chosen in ids


DRAWN: dict[str, dict[str, Any]] = {
    "top_n_sigma": {"top_n_sigma": 1.2},
    "dynatemp": {"temperature": 1.0, "dynatemp_range": 0.8, "dynatemp_exponent": 1.5},
    "typical_p": {"typical_p": 0.7},
    "epsilon_cutoff": {"epsilon_cutoff": 0.06},
    "eta_cutoff": {"eta_cutoff": 0.3},
    "top_h": {"top_h": 0.7},
    "xtc": {"xtc_probability": 1.0, "xtc_threshold": 0.15},
    "mirostat_1": {"mirostat": 1, "mirostat_tau": 1.1},
    "mirostat_2": {"mirostat": 2, "mirostat_tau": 1.8},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 2},
    "bad_words": {"bad_words": [[1, 0], [5]]},
    "allowed_token_ids": {"allowed_token_ids": [0, 2, 6]},
    "dry": {
        "dry_multiplier": 0.5,
        "dry_base": 1.5,
        "dry_allowed_length": 1,
        "dry_penalty_last_n": -1,
        "dry_sequence_breaker_ids": [],
    },
}


@pytest.mark.parametrize("name", STAGES)
def test_draws_follow_stage_probabilities(name: str) -> None:
    logits = np.array([2.0, 1.5, 1.25, 0.75, 0.5, 0.0, -0.5, -1.0], dtype=np.float32)
    text, draws = [0, 1, 2, 0, 1, 3, 0, 1], 2000
    expected = softmax(STAGES[name][0](logits.astype(np.float64), DRAWN[name], text)) * draws
    assert np.count_nonzero(expected) > 1
    assert name == "dynatemp" or not np.allclose(expected, softmax(logits.astype(np.float64)) * draws)
    drawn = [sample(logits, DRAWN[name] | {"seed": seed}, text, [])[2] for seed in range(draws)]
    counts = np.bincount(drawn, minlength=len(logits))
    some = expected > 0
    assert counts[~some].sum() == 0
    # With at most seven degrees of freedom, a value above 30 occurs once in ten thousand; the seeds are fixed.
    assert ((counts[some] - expected[some]) ** 2 / expected[some]).sum() < 30


def test_xtc_probability_is_independent_of_token_draw() -> None:
    logits, count = np.array([1.0, 0.9, 0.0], dtype=np.float32), 4000
    params = {"xtc_probability": 0.3, "xtc_threshold": 0.2}
    rows = [sample(logits, params | {"seed": seed}, [], [0] * (seed % 7)) for seed in range(count)]
    acted = np.array([ids == [1, 2] for ids, _, _ in rows])
    assert all(ids in ([0, 1, 2], [1, 2]) for ids, _, _ in rows)
    # Four standard deviations.
    assert abs(acted.mean() - 0.3) < 4 * math.sqrt(0.3 * 0.7 / count)
    # If XTC was not applied, the probabilities are unchanged.
    shares = np.bincount([chosen for _, _, chosen in rows], weights=~acted, minlength=3) / (~acted).sum()
    np.testing.assert_allclose(shares, softmax(logits.astype(np.float64)), atol=4 * 0.5 / math.sqrt(count * 0.7))


def test_stages_keep_a_token_for_extreme_logits() -> None:
    """Tests logits that are equal, forbidden, or as far apart as possible."""
    huge = np.finfo(np.float32).max
    rows = [[0.0], [5.0] * 200, [-np.inf, 1.0, -np.inf], [huge, -huge, 0.0], [-huge] * 3, [1e-40, 0.0, -1e-40]]
    for row in rows:
        logits = np.array(row, dtype=np.float32)
        for name, params in DRAWN.items():
            if name in {"bad_words", "allowed_token_ids", "no_repeat_ngram_size"}:
                continue
            ids, probabilities, chosen = sample(logits, params, [0], [])
            assert chosen in ids, (row, name)
            assert sum(probabilities) == pytest.approx(1), (row, name)
            assert np.isfinite(logits[ids]).all(), (row, name)


@pytest.mark.parametrize(("version", "target"), [(1, 3.0), (2, 2.0), (2, 3.0)])
def test_mirostat_reaches_target_surprise(version: int, target: float) -> None:
    """The mean surprise is within 5 % of the target on a model whose own surprise is far above it."""
    prompts, temperature, count = ["Once upon a time,", "The capital of", "Dear", "In the year"], 2.0, 400
    free = SamplingParams(temperature=temperature, max_tokens=count, seed=1, ignore_eos=True)
    held = replace(free, mirostat=version, mirostat_tau=target)

    def surprise(llm: LLM, params: SamplingParams) -> float:
        """Returns the mean surprise over all tokens, in bits."""
        found: list[Row] = []
        for output in llm.generate(prompts, params):
            tokens = output.outputs[0].token_ids
            rows = llm.logits([*output.prompt_token_ids, *tokens], first=len(output.prompt_token_ids) - 1)[:-1]
            rows = rows.astype(np.float64) / temperature
            found.append(np.log2(np.exp(rows - rows[range(count), tokens][:, None]).sum(axis=1)))
        return float(np.mean(found))

    with LLM(threads=2) as llm:
        assert surprise(llm, free) > 2 * target
        assert surprise(llm, held) == pytest.approx(target, rel=0.05)
