"""Perplexity and divergence, compared with plain NumPy: windows, figures and errors."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fakes
from ferrule import LLM, EngineError, InvalidParameterError, PromptError, TokenizerError, UnsupportedTaskError
from ferrule._evaluation import Subject, Window, Windowing, compare_each, perplexity
from ferrule._evaluation.compare import CONTEXT_TOKENS, Divergence
from ferrule._evaluation.divergence import BLOCK_ELEMENTS, divergences, token_logprobs
from ferrule._evaluation.windows import cut
from ferrule._text.tokenizer import Tokenizer
from test_encoders import GOLDEN
from word_tokenizer import write_word_tokenizer

TEXT = "Once upon a time, there was a little cat. The capital of France is Paris. " * 12


@pytest.fixture(scope="module")
def f32() -> Iterator[LLM]:
    with LLM(quantization="f32") as llm:
        yield llm


@pytest.fixture(scope="module")
def int4() -> Iterator[LLM]:
    with LLM(quantization="int4") as llm:
        yield llm


def log_softmax(logits: Any) -> Any:
    exact = np.asarray(logits, np.float64)
    exact = exact - exact.max(axis=-1, keepdims=True)
    return exact - np.log(np.exp(exact).sum(axis=-1, keepdims=True))


def sliding_windows(tokens: list[int], prefix: list[int], window: int, stride: int) -> Iterator[tuple[list[int], int]]:
    """Implements Hugging Face's loop; yields each window and the number of its last tokens that are scored."""
    room = window - len(prefix)
    stride, before = min(stride, room), 0
    for begin in range(0, len(tokens), stride):
        end = min(begin + room, len(tokens))
        yield [*prefix, *tokens[begin:end]], end - before
        before = end
        if end == len(tokens):
            break


@pytest.mark.native
@pytest.mark.parametrize(("window", "stride"), [(64, 32), (64, 63), (50, 7), (2048, None), (2, 1)])
def test_perplexity_equals_numpy_reference(window: int, stride: int | None, f32: LLM) -> None:
    tokens, prefix = f32.tokenize(TEXT, add_special_tokens=False), f32.first_token_ids
    losses: list[float] = []
    for read, scored in sliding_windows(tokens, prefix, window, stride or window // 2):
        rows = log_softmax(f32.logits(read))
        first = max(1, len(read) - scored)
        losses.extend(-rows[place - 1, read[place]] for place in range(first, len(read)))
    found = f32.perplexity(TEXT, window=window, stride=stride)
    assert found.tokens == len(losses)
    assert found.nll == pytest.approx(np.mean(losses), rel=1e-9)
    assert found.perplexity == pytest.approx(math.exp(np.mean(losses)), rel=1e-9)
    assert found.nll_error == pytest.approx(np.std(losses, ddof=1) / math.sqrt(len(losses)), rel=1e-9)
    assert found.perplexity_error == pytest.approx(found.perplexity * found.nll_error)


@pytest.mark.native
def test_divergence_from_itself_is_zero(f32: LLM) -> None:
    result = f32.compare(f32, TEXT, window=64)
    assert dataclasses.astuple(result.kld) == (0,) * 7
    assert not result.token_kld.any()
    assert (result.same_top, result.same_top_error) == (1, 0)
    assert (result.perplexity_ratio, result.perplexity_ratio_error) == (1, 0)
    assert result.model == result.reference == f32.perplexity(TEXT, window=64)


@pytest.mark.native
def test_comparison_of_several_models_equals_that_of_each(f32: LLM, int4: LLM) -> None:
    done: list[tuple[int, int]] = []
    together = f32.compare_each([int4, f32], TEXT, window=64, limit=3, progress=lambda *step: done.append(step))
    assert together == [each.compare(f32, TEXT, window=64, limit=3) for each in (int4, f32)]
    assert together[0].kld.mean > 0
    assert done == [(0, 3), (1, 3), (2, 3), (3, 3)]


@pytest.mark.native
def test_comparison_equals_numpy_reference(f32: LLM, int4: LLM) -> None:
    done: list[tuple[int, int]] = []
    result = int4.compare(f32, TEXT, window=64, worst=3, progress=lambda *step: done.append(step))
    prefix = f32.first_token_ids
    read_by = [*sliding_windows(f32.tokenize(TEXT, add_special_tokens=False), prefix, 64, 32)]
    klds, logprobs, same, targets, contexts = list[float](), list[tuple[float, float]](), list[bool](), [], []
    for read, scored in read_by:
        ours, theirs = log_softmax(int4.logits(read)), log_softmax(f32.logits(read))
        for place in range(max(1, len(read) - scored), len(read)):
            p, q = theirs[place - 1], ours[place - 1]
            klds.append(float((np.exp(p) * (p - q)).sum()))
            logprobs.append((q[read[place]], p[read[place]]))
            same.append(bool(p.argmax() == q.argmax()))
            targets.append(read[place])
            contexts.append(read[max(0, place - CONTEXT_TOKENS) : place])
    assert done == [(step, len(read_by)) for step in range(len(read_by) + 1)]
    np.testing.assert_allclose(result.token_kld, klds, rtol=1e-6, atol=1e-12)
    assert result.same_top == np.mean(same)
    difference = np.array([p - q for q, p in logprobs])
    assert result.perplexity_ratio == pytest.approx(math.exp(difference.mean()), rel=1e-9)
    error = difference.std(ddof=1) / math.sqrt(len(difference))
    assert result.perplexity_ratio_error == pytest.approx(result.perplexity_ratio * error, rel=1e-6)
    assert result.perplexity_ratio == pytest.approx(result.model.perplexity / result.reference.perplexity)
    assert 0 < result.kld.median < result.kld.mean < result.kld.p90 < result.kld.max
    order = sorted(range(len(klds)), key=lambda index: -klds[index])[:3]
    assert [token.token_id for token in result.worst] == [targets[index] for index in order]
    assert [token.kld for token in result.worst] == pytest.approx([klds[index] for index in order])
    tokens = f32.tokenize(TEXT, add_special_tokens=False)
    for token, index in zip(result.worst, order, strict=True):
        assert tokens[token.position] == token.token_id
        assert token.context == f32.detokenize(contexts[index], skip_special_tokens=False)
        assert token.token == f32.token_text(token.token_id)
        assert token.probability == pytest.approx(math.exp(logprobs[index][0]))
        assert token.reference_probability == pytest.approx(math.exp(logprobs[index][1]))
        assert token.top.probability >= token.probability


@pytest.mark.native
def test_several_texts_equal_sum_of_single_texts(f32: LLM) -> None:
    texts = [TEXT, "The sun was warm.", f32.tokenize(TEXT)[:30]]
    alone = [f32.perplexity([text], window=48) for text in texts]
    together = f32.perplexity(texts, window=48)
    assert together.tokens == sum(each.tokens for each in alone)
    assert together.windows == sum(each.windows for each in alone)
    assert together.nll * together.tokens == pytest.approx(sum(each.nll * each.tokens for each in alone), rel=1e-12)
    assert f32.perplexity(texts, window=48, limit=2).windows == 2


@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=4),
    prefix=st.integers(0, 2),
    window=st.integers(2, 40),
    data=st.data(),
)
def test_each_token_is_scored_once(lengths: list[int], prefix: int, window: int, data: st.DataObject) -> None:
    stride = data.draw(st.integers(1, window - 1))
    min_context = data.draw(st.integers(0, window - stride))
    windowing = Windowing.of(window, stride, min_context, 40)
    specials = [1000 + i for i in range(prefix)]
    texts = [(specials, [*range(length)]) for length in lengths]
    if window - prefix <= min_context:
        requirement = rf"more than {prefix} \(special tokens\) \+ {min_context} \(min_context\)"
        with pytest.raises(InvalidParameterError, match=f"^window must be {requirement}, got {window}$"):
            list(cut(texts, windowing))
        return
    windows = list(cut(texts, windowing))
    unscored = max(min_context, 0 if prefix else 1)
    for text, length in enumerate(lengths):
        own = [each for each in windows if each.text == text]
        assert [token for each in own for token in each.targets] == [*range(unscored, length)]
    for each in windows:
        assert 1 <= each.first < len(each.token_ids) <= window
        assert each.token_ids[:prefix] == specials
        assert each.first - prefix >= min_context
        assert each.position == each.targets[0]
    kept = min(stride, window - prefix - min_context)
    followers = [each for previous, each in itertools.pairwise(windows) if previous.text == each.text]
    assert all(each.first >= prefix + min(each.position, window - prefix - kept) for each in followers)


def test_windows_begin_with_special_tokens(tmp_path: Path, fake_engine: type[fakes.Engine]) -> None:
    calls: list[list[int]] = []
    logits = fakes.Engine.logits

    def note(self: fakes.Engine, token_ids: list[int], *more: Any) -> bytearray:
        calls.append(token_ids)
        return logits(self, token_ids, *more)

    fake_engine.logits = note  # type: ignore[method-assign]
    with LLM(tokenizer=write_words(tmp_path)) as llm:
        assert llm.first_token_ids == [0]
        llm.perplexity("w10 w11 w12 w13 w14", window=4, stride=2)
        assert calls == [[0, 10, 11], [0, 12, 13]]
        calls.clear()
        llm.perplexity([10, 11, 12, 13, 14], window=4, stride=2)
        assert calls == [[10, 11, 12], [12, 13]]


def write_words(folder: Path) -> Path:
    (folder / "config.json").write_text((GOLDEN / "bert" / "config.json").read_text())
    write_word_tokenizer(folder)
    return folder


logit = st.floats(-30, 30, width=32)


@given(
    rows=st.integers(2, 6).flatmap(
        lambda width: st.lists(
            st.tuples(*[st.lists(logit, min_size=width, max_size=width)] * 2, st.integers(0, width - 1)),
            min_size=1,
            max_size=8,
        )
    ),
    shift=st.floats(-8, 8),
)
def test_divergences_equal_numpy_reference(rows: list[tuple[list[float], list[float], int]], shift: float) -> None:
    ours = np.array([row for row, _, _ in rows], np.float32)
    theirs = np.array([row for _, row, _ in rows], np.float32)
    targets = np.array([target for _, _, target in rows])
    found = divergences(ours, theirs, targets)
    p, q = log_softmax(theirs), log_softmax(ours)
    np.testing.assert_allclose(found.kld, (np.exp(p) * (p - q)).sum(axis=1), rtol=1e-9, atol=1e-12)
    assert (found.kld >= 0).all()
    np.testing.assert_allclose(found.logprob, token_logprobs(ours, targets), rtol=0, atol=0)
    np.testing.assert_allclose(found.reference_logprob, p[np.arange(len(rows)), targets], rtol=1e-9, atol=1e-12)
    assert (found.top == ours.argmax(axis=1)).all()
    assert (found.reference_top_logprob == p.max(axis=1)).all()
    assert not divergences(ours, ours, targets).kld.any()
    # A constant added to a whole row changes no probability, except by rounding in float32.
    moved = divergences(ours, theirs + np.float32(shift), targets)
    np.testing.assert_allclose(moved.kld, found.kld, atol=1e-3)


def test_divergences_are_independent_of_batch_size() -> None:
    generator = np.random.default_rng(1)
    ours, theirs = generator.standard_normal((2, 40, BLOCK_ELEMENTS // 16), np.float32)
    targets = np.arange(40)
    whole = divergences(ours, theirs, targets)
    for row in (0, 15, 16, 39):
        one = divergences(ours[row : row + 1], theirs[row : row + 1], targets[row : row + 1])
        assert dataclasses.astuple(one) == tuple(field[row : row + 1] for field in dataclasses.astuple(whole))


def test_tokens_with_zero_probability() -> None:
    never = -np.inf
    theirs = np.array([[0, 0, never], [0, never, never], [0, 0, 0]], np.float32)
    ours = np.array([[0, 0, never], [0, 0, never], [0, 0, never]], np.float32)
    found = divergences(ours, theirs, np.array([0, 0, 2]))
    assert found.kld.tolist() == [0, pytest.approx(math.log(2)), math.inf]
    assert found.logprob[2] == -math.inf
    summary = Divergence.of(found.kld)
    assert (summary.mean, summary.max, summary.median) == (math.inf, math.inf, pytest.approx(math.log(2)))
    assert math.isnan(summary.error)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_non_finite_logits(bad: float) -> None:
    rows = np.array([[0, 1], [0, bad]], np.float32)
    with pytest.raises(EngineError, match="logits are not finite"):
        token_logprobs(rows, np.array([0, 0]))
    with pytest.raises(EngineError, match="logits are not finite"):
        divergences(rows[:1], rows[1:], np.array([0]))


def test_quantiles_are_observed_values() -> None:
    kld = np.arange(1, 2001, dtype=np.float64)
    np.random.default_rng(0).shuffle(kld)
    found = Divergence.of(kld)
    assert (found.median, found.p90, found.p99, found.p999, found.max) == (1000, 1800, 1980, 1998, 2000)
    assert found.mean == 1000.5
    single = Divergence.of(np.array([3.0]))
    assert (single.mean, single.median, single.max) == (3, 3, 3)
    assert math.isnan(single.error)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"texts": ""}, PromptError, r"texts\[0\]: the prompt has no tokens"),
        ({"texts": []}, PromptError, "texts must not be empty"),
        ({"texts": ["a", ""]}, PromptError, r"texts\[1\]: the prompt has no tokens"),
        ({"texts": 5}, PromptError, "texts must be text, token ids, or a list of either, got 5"),
        ({"texts": b"x"}, PromptError, "texts must be text, token ids, or a list of either, got b'x'"),
        (
            {"texts": [[9, 4096]]},
            PromptError,
            r"texts\[0\]: prompt_token_ids\[1\] must be from 0 to 4095 \(the vocabulary\), got 4096",
        ),
        ({"texts": [[9]]}, PromptError, "texts must have a token with a token before it; give a longer text"),
        (
            {"texts": [[9, 8]], "min_context": 3},
            PromptError,
            "texts must have a token with 3 tokens before it; give a longer text",
        ),
        ({"texts": "\ud800"}, PromptError, "lone surrogate"),
        ({"window": 1}, InvalidParameterError, "window must be an integer from 2 to 2048, got 1"),
        ({"window": 2049}, InvalidParameterError, "window must be an integer from 2 to 2048, got 2049"),
        ({"window": 8, "stride": 8}, InvalidParameterError, "stride must be an integer from 1 to 7, got 8"),
        ({"window": 8, "min_context": 5}, InvalidParameterError, "min_context must be an integer from 0 to 4, got 5"),
        ({"limit": 0}, InvalidParameterError, "limit must be an integer from 1 to 2147483647, got 0"),
    ],
)
def test_invalid_arguments(arguments: dict[str, Any], error: type[Exception], message: str, llm: LLM) -> None:
    given: dict[str, Any] = {"texts": "some text", **arguments}
    with pytest.raises(error, match=message):
        llm.perplexity(**given)
    with pytest.raises(error, match=message):
        llm.compare(llm, **given)


def test_vocabularies_must_be_the_same(tmp_path: Path, llm: LLM, model_with: Callable[..., Path]) -> None:
    smaller = LLM(model_with({"vocab_size": 4000}), load_format="dummy")
    with (
        smaller,
        pytest.raises(
            InvalidParameterError, match="reference must be a model with the vocabulary of tiny: 4096 tokens, not 4000,"
        ),
    ):
        llm.compare(smaller, [9, 8, 7])
    other = LLM(tokenizer=write_words(tmp_path))
    with (
        other,
        pytest.raises(
            InvalidParameterError,
            match=r"reference must be a model with the vocabulary of tiny: token 0 is .* in one",
        ),
    ):
        llm.compare(other, "some text")
    with pytest.raises(InvalidParameterError, match="reference must be an LLM, got 'tiny'"):
        llm.compare("tiny", "some text")  # type: ignore[arg-type]
    with pytest.raises(InvalidParameterError, match="models must be a list of at least one LLM"):
        llm.compare_each([], "some text")
    with pytest.raises(InvalidParameterError, match="models must be a list of at least one LLM, got <"):
        llm.compare_each(llm, "some text")  # type: ignore[arg-type]
    with pytest.raises(InvalidParameterError, match="models must be a list of at least one LLM, got <generator"):
        llm.compare_each((each for each in [llm]), "some text")  # type: ignore[arg-type]
    with pytest.raises(InvalidParameterError, match="worst must be an integer from 0 to 2147483647, got -1"):
        llm.compare(llm, "some text", worst=-1)


def test_models_without_tokenizer_are_compared_by_ids(llm: LLM, model_with: Callable[..., Path]) -> None:
    with LLM(model_with(), load_format="dummy") as bare:
        assert bare.compare(llm, [9, 8, 7, 6]).kld.max == 0
        assert bare.compare(llm, [9, 8, 7, 6]).worst[0].context == ""
        with pytest.raises(TokenizerError, match="give token ids"):
            bare.perplexity("some text")


def test_the_reference_reads_the_text_for_several_models(llm: LLM, model_with: Callable[..., Path]) -> None:
    with LLM(model_with(), load_format="dummy") as bare:
        [first, second] = llm.compare_each([bare, llm], "some text")
        assert first.reference == second.reference
        with pytest.raises(TokenizerError, match="give token ids"):
            bare.compare_each([llm], "some text")
        with pytest.raises(TokenizerError, match="give token ids"):
            bare.compare(llm, "some text")


def test_encoders_are_unsupported(fake_engine: object) -> None:
    with (
        LLM(GOLDEN / "bert") as encoder,
        pytest.raises(UnsupportedTaskError, match=r"/encoders/bert cannot produce logits; it embeds texts$"),
    ):
        encoder.perplexity([1, 2, 3])


def test_zero_probability_gives_infinite_perplexity(tmp_path: Path) -> None:
    def logits(token_ids: list[int], first: int) -> Any:
        rows = np.zeros((len(token_ids) - first, 4), np.float32)
        rows[:, 3] = -np.inf
        return rows

    subject = Subject("fake", Tokenizer(tmp_path), 4, 8, logits)
    arguments: dict[str, Any] = {"window": None, "stride": None, "min_context": 0, "limit": None, "progress": None}
    assert perplexity(subject, [0, 1, 2, 0], **arguments).perplexity == pytest.approx(3)
    assert perplexity(subject, [0, 1, 3, 0], **arguments).perplexity == math.inf
    [found] = compare_each([subject], subject, [0, 1, 3, 0], reader=subject, worst=1, **arguments)
    assert found.kld.max == 0
    assert math.isnan(found.perplexity_ratio)


def test_only_scored_logits_are_computed(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, int]] = []
    logits = fakes.Engine.logits

    def note(self: fakes.Engine, token_ids: list[int], lora: None = None, first: int = 0) -> bytearray:
        calls.append((len(token_ids), first))
        return logits(self, token_ids, lora, first)

    monkeypatch.setattr(fakes.Engine, "logits", note)
    llm.perplexity([*range(7, 27)], window=8, stride=4)
    # The logits after the last token of a window predict no scored token.
    assert calls == [(7, 0), (7, 3), (7, 3), (7, 3)]


def test_window_targets() -> None:
    assert Window([5, 6, 7, 8], 2, 0, 2).targets == [7, 8]
