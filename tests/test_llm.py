"""The API on a fake engine: order, text, stop strings, streams, log-probabilities, errors."""

from __future__ import annotations

import io
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import fakes
from ferrule import (
    LLM,
    AsyncLLM,
    BeamSearchParams,
    ChatTemplateError,
    EngineError,
    InvalidParameterError,
    ModelNotFoundError,
    PromptError,
    QueueFullError,
    RequestOutput,
    SamplingParams,
)
from ferrule._api import progress

EngineOf = Callable[[LLM], fakes.Engine]
GREEDY = SamplingParams(temperature=0, max_tokens=6)


def says(engine: type[fakes.Engine], llm: LLM, *texts: str) -> None:
    """Makes the engine continue prompt [n] with the n-th text, every other prompt with the first."""

    def script(prompt: list[int]) -> list[int]:
        return llm.tokenize(texts[prompt[0] if prompt[0] < len(texts) else 0])

    engine.script = staticmethod(script)


def test_outputs_have_the_order_of_the_prompts(llm: LLM) -> None:
    prompts = ["The capital", {"prompt_token_ids": [7, 8, 9]}, {"prompt": "once"}, "x" * 100]
    lengths = [5, 2, 9, 1]
    params = [SamplingParams(temperature=0, max_tokens=length) for length in lengths]
    outputs = llm.generate(prompts, params)  # type: ignore[arg-type]
    assert [output.prompt for output in outputs] == ["The capital", None, "once", "x" * 100]
    assert [len(output.outputs[0].token_ids) for output in outputs] == lengths
    assert outputs[1].prompt_token_ids == [7, 8, 9]
    assert [output.request_id for output in outputs] == ["0", "1", "2", "3"]
    alone = [llm.generate(prompt, each)[0] for prompt, each in zip(prompts, params, strict=True)]  # type: ignore[arg-type]
    assert [o.outputs[0].text for o in alone] == [o.outputs[0].text for o in outputs]


def test_empty_prompt_list(llm: LLM) -> None:
    assert llm.generate([]) == []


def test_number_of_params_must_match_prompts(llm: LLM) -> None:
    with pytest.raises(InvalidParameterError, match="sampling_params must be a list of 2, one for each prompt, got"):
        llm.generate(["a", "b"], [GREEDY])


def test_output_fields(llm: LLM) -> None:
    output = llm.generate("The capital", SamplingParams(max_tokens=4, seed=3, temperature=1.0))[0]
    completion = output.outputs[0]
    assert (output.finished, completion.finish_reason, completion.stop_reason) == (True, "length", None)
    assert completion.seed == 3
    assert completion.text == llm.detokenize(completion.token_ids)
    metrics = output.metrics
    assert (metrics.prompt_tokens, metrics.output_tokens) == (2, 4)
    assert metrics.time_to_first_token is not None
    assert 0 < metrics.time_to_first_token <= metrics.total_time
    assert metrics.inter_token_latency is not None
    assert metrics.tokens_per_second == pytest.approx(1 / metrics.inter_token_latency)


def test_n_completions(llm: LLM) -> None:
    output = llm.generate("x", SamplingParams(n=3, seed=5, temperature=1.0, max_tokens=8))[0]
    assert [completion.index for completion in output.outputs] == [0, 1, 2]
    assert [completion.seed for completion in output.outputs] == [5, 6, 7]
    assert len({tuple(completion.token_ids) for completion in output.outputs}) == 3
    alone = llm.generate("x", SamplingParams(seed=6, temperature=1.0, max_tokens=8))[0]
    assert alone.outputs[0].token_ids == output.outputs[1].token_ids
    with pytest.raises(InvalidParameterError, match="n must be 1: a stream has one completion, got 2"):
        llm.stream("x", SamplingParams(n=2))


def test_completions_fork_the_first_sequence(llm: LLM, engine_of: EngineOf) -> None:
    engine = engine_of(llm)
    outputs = llm.generate(["a b c", "d", "e f"], SamplingParams(n=3, max_tokens=4, ignore_eos=True))
    assert engine.forks == [(2, 1), (3, 1), (5, 4), (6, 4), (8, 7), (9, 7)]
    assert [len(output.outputs) for output in outputs] == [3, 3, 3]
    assert not engine.running


def test_priority_decides_order(llm: LLM, fake_engine: type[fakes.Engine]) -> None:
    fake_engine.max_num_seqs = 1
    outputs = llm.generate(["a", "b", "c"], GREEDY, priority=[3, -1, 0])
    waited = [output.metrics.queue_time or 0 for output in outputs]
    assert waited[1] < waited[2] < waited[0]
    outputs = llm.generate(["a", "b"], GREEDY, priority=5)
    assert (outputs[0].metrics.queue_time or 0) < (outputs[1].metrics.queue_time or 0)
    for wrong, message in [
        (2**31, "priority must be an integer from -2147483648 to 2147483647, got 2147483648"),
        ("high", "priority must be an integer from -2147483648 to 2147483647, got 'high'"),
        ([1, 2, 3], "priority must be a list of 2, one for each prompt"),
        ([1, None], "priority must be an integer from .*, got None"),
    ]:
        with pytest.raises(InvalidParameterError, match=message):
            llm.generate(["a", "b"], GREEDY, priority=wrong)  # type: ignore[arg-type]
    with pytest.raises(InvalidParameterError, match=r"priority must be an integer .*, got 0\.5"):
        llm.stream("a", priority=0.5)  # type: ignore[arg-type]


def test_full_queue_rejects_the_whole_call(fake_engine: type[fakes.Engine], engine_of: EngineOf) -> None:
    with LLM(max_queued_requests=2, max_num_seqs=1) as llm:
        with pytest.raises(
            QueueFullError, match=r"the request queue is full \(3 waiting; the limit is max_queued_requests 2\)"
        ):
            llm.generate(["a", "b"], SamplingParams(n=2))
        assert not engine_of(llm).running
        assert llm.metrics().requests_refused == 1
        assert len(llm.generate(["a", "b", "c"], GREEDY)) == 3


@pytest.mark.parametrize(
    ("params", "text", "reason"),
    [
        (SamplingParams(), "Paris is big.", None),
        (SamplingParams(stop="is"), "Par", "is"),
        (SamplingParams(stop=["big", "s b"]), "Paris i", "s b"),
        (SamplingParams(stop="is", include_stop_str_in_output=True), "Paris", "is"),
        (SamplingParams(stop="small"), "Paris is big.", None),
        (SamplingParams(stop="big.!"), "Paris is big.", None),
        (SamplingParams(stop="is", min_tokens=2), "Paris ", "is"),
    ],
)
def test_stop_strings(
    params: SamplingParams,
    text: str,
    reason: str | None,
    llm: LLM,
    fake_engine: type[fakes.Engine],
    engine_of: EngineOf,
) -> None:
    says(fake_engine, llm, "Paris is big.")
    assert len(llm.tokenize("Paris")) <= 2
    completion = llm.generate("x", params)[0].outputs[0]
    assert (completion.text, completion.stop_reason) == (text, reason)
    assert completion.finish_reason == "stop"
    assert not engine_of(llm).running


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    text=st.text("ab🙂", min_size=1, max_size=12),
    stops=st.lists(st.text("ab🙂", min_size=1, max_size=3), max_size=3),
)
def test_concatenated_deltas_equal_text(
    llm: LLM, fake_engine: type[fakes.Engine], engine_of: EngineOf, text: str, stops: list[str]
) -> None:
    says(fake_engine, llm, text)
    deltas = list(llm.stream("x", SamplingParams(stop=stops, max_tokens=None)))
    output = deltas[-1].output
    assert isinstance(output, RequestOutput)
    assert all(delta.output is None for delta in deltas[:-1])
    completion = output.outputs[0]
    ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
    if not ends:
        assert completion.text == text
    assert "".join(delta.text for delta in deltas) == completion.text
    assert [token for delta in deltas for token in delta.token_ids] == completion.token_ids
    assert not any(stop in completion.text for stop in stops)
    assert not engine_of(llm).running


def test_stop_tokens(llm: LLM, fake_engine: type[fakes.Engine]) -> None:
    says(fake_engine, llm, "Paris is big.")
    token = llm.tokenize(" is")[0]
    completion = llm.generate("x", SamplingParams(stop_token_ids=[token]))[0].outputs[0]
    assert (completion.text, completion.finish_reason, completion.stop_reason) == ("Paris", "stop", token)
    assert completion.token_ids[-1] == token
    kept = llm.generate("x", SamplingParams(stop_token_ids=[token], include_stop_str_in_output=True))[0].outputs[0]
    assert kept.text == "Paris is"
    ended = llm.generate("x")[0].outputs[0]
    assert (ended.token_ids[-1], ended.text, ended.stop_reason) == (2, "Paris is big.", None)
    special = SamplingParams(skip_special_tokens=False, include_stop_str_in_output=True)
    assert llm.generate("x", special)[0].outputs[0].text == "Paris is big.<|eos|>"
    long = llm.generate("x", SamplingParams(ignore_eos=True, max_tokens=20))[0].outputs[0]
    assert (long.finish_reason, len(long.token_ids)) == ("length", 20)


def test_logprobs(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=3, logprobs=2)
    completion = llm.generate("x", params)[0].outputs[0]
    assert completion.logprobs is not None
    for token, entries in zip(completion.token_ids, completion.logprobs, strict=True):
        assert next(iter(entries)) == token
        assert [entry.rank for entry in entries.values()] == [1, 2]
        assert entries[token].decoded_token == llm.token_text(token)
    total = sum(
        entries[token].logprob for token, entries in zip(completion.token_ids, completion.logprobs, strict=True)
    )
    assert completion.cumulative_logprob == pytest.approx(total)
    only = llm.generate("x", SamplingParams(temperature=0, max_tokens=3, logprobs=0))[0].outputs[0]
    assert [len(entries) for entries in only.logprobs or []] == [1, 1, 1]
    streamed = [entry for delta in llm.stream("x", params) for entry in delta.logprobs or []]
    assert streamed == completion.logprobs
    assert llm.generate("x", GREEDY)[0].outputs[0].logprobs is None


def test_logprobs_cover_tokens_up_to_stop_string(llm: LLM, fake_engine: type[fakes.Engine]) -> None:
    says(fake_engine, llm, "Paris is big.")
    completion = llm.generate("x", SamplingParams(stop="is", logprobs=0))[0].outputs[0]
    assert len(completion.logprobs or []) == len(completion.token_ids)


def test_logits(llm: LLM) -> None:
    logits = llm.logits([5, 6, 7])
    assert logits.shape == (3, 4096)
    assert logits.dtype == np.float32
    assert (logits[:2] == llm.logits([5, 6])).all()
    assert (logits[2:] == llm.logits([5, 6, 7], first=2)).all()
    for first in (-1, 3):
        with pytest.raises(
            InvalidParameterError,
            match=f"first must be an integer from 0 to 2, got {first}",
        ):
            llm.logits([5, 6, 7], first=first)


def test_next_token_probs(llm: LLM) -> None:
    ids = llm.tokenize("The capital")
    row = llm.logits(ids)[-1].astype(np.float64)
    probabilities = np.exp(row) / np.exp(row).sum()
    found = llm.next_token_probs("The capital", top=3)
    assert [text for text, _ in found] == [llm.token_text(token) for token in np.argsort(-probabilities)[:3].tolist()]
    assert [p for _, p in found] == pytest.approx(sorted(probabilities, reverse=True)[:3], rel=0.05)
    assert all(math.isfinite(p) for _, p in found)
    with pytest.raises(InvalidParameterError, match="top must be an integer from 1 to 20, got 21"):
        llm.next_token_probs("x", top=21)


def test_explain(llm: LLM) -> None:
    steps = list(llm.explain("The capital", GREEDY, candidates=4))
    assert [step.token_id for step in steps] == llm.generate("The capital", GREEDY)[0].outputs[0].token_ids
    assert [step.position for step in steps] == list(range(2, 8))
    assert all(len(step.candidates) == 4 and step.draw is None for step in steps)
    assert steps[0].candidates[3].dropped_by == "top_k"
    with pytest.raises(InvalidParameterError, match="candidates must be an integer from 1 to 1000, got 0"):
        llm.explain("x", candidates=0)


PROMPTS: list[tuple[Any, str]] = [
    ("", "the prompt has no tokens"),
    ({"prompt_token_ids": []}, "the prompt has no tokens"),
    ({"prompt_token_ids": [1, -1]}, r"prompt_token_ids\[1\] must be from 0 to 4095 \(the vocabulary\), got -1"),
    ({"prompt_token_ids": [4096]}, r"prompt_token_ids\[0\] must be from 0 to 4095 \(the vocabulary\), got 4096"),
    ({"prompt_token_ids": [2**70]}, r"prompt_token_ids\[0\] must be from 0 to 4095 \(the vocabulary\), got"),
    ({"prompt_token_ids": [1.5]}, r"prompt_token_ids must be a list of integers, got \[1\.5\]"),
    ({"prompt_token_ids": 5}, "prompt_token_ids must be a list of integers, got 5"),
    ({"prompt_token_ids": b"ab"}, "prompt_token_ids must be a list of integers, got b'ab'"),
    ({"prompt_token_ids": {1, 2}}, r"prompt_token_ids must be a list of integers, got \{1, 2\}"),
    ({"prompt_token_ids": [1] * 2048}, "the prompt has 2048 tokens, more than the limit of 2047: max_model_len allows"),
    ({"tokens": [1]}, r"a prompt must be a string or \{.prompt_token_ids.: \[\.\.\.\]\}, got \{'tokens': \[1\]\}"),
    (
        {"prompt": "x", "tokens": [1]},
        "a prompt with prompt may also have suffix, middle, cache_salt and multi_modal_data, got 'tokens'",
    ),
    ({"prompt": 5, "prompt_token_ids": [1]}, "prompt must be a string, got 5"),
    (
        {"prompt_token_ids": [1], 7: 1},
        "a prompt with prompt_token_ids may also have prompt, cache_salt and multi_modal_data, got 7",
    ),
    ({"prompt": 5}, "prompt must be a string, got 5"),
    ({"prompt": "x", "cache_salt": ""}, "cache_salt must be a string of 1 to 256 characters, got ''"),
    ({"prompt": "x", "cache_salt": "s" * 257}, "cache_salt must be a string of 1 to 256 characters, got"),
    ({"prompt_token_ids": [1], "cache_salt": 5}, "cache_salt must be a string of 1 to 256 characters, got 5"),
    ({"prompt_token_ids": [1], "cache_salt": "\udc00"}, "lone surrogate"),
    (None, r"a prompt must be a string or \{.prompt_token_ids.: \[\.\.\.\]\}, got None"),
    ([5], r"a prompt must be a string or \{.prompt_token_ids.: \[\.\.\.\]\}, got 5"),
]


@pytest.mark.parametrize(("prompt", "message"), PROMPTS)
def test_invalid_prompt_is_rejected_before_running(prompt: Any, message: str, llm: LLM, engine_of: EngineOf) -> None:
    several: list[Any] = prompt if isinstance(prompt, list) else [prompt]
    with pytest.raises(PromptError, match=message):
        llm.generate(prompt)
    with pytest.raises(PromptError, match=message):
        llm.generate(["fine", *several])
    for call in (llm.stream, llm.explain):
        with pytest.raises(PromptError, match=message):
            call(several[0])
    assert engine_of(llm).steps == 0
    assert not engine_of(llm).running


@pytest.mark.parametrize("params", [5, "x", {"temperature": 0}, [5], b"x"])
def test_sampling_params_of_wrong_type(params: Any, llm: LLM) -> None:
    for call in (llm.generate, llm.stream, llm.explain):
        with pytest.raises(InvalidParameterError, match="sampling_params must be a SamplingParams"):
            call("x", params)


@pytest.mark.parametrize("value", [5, None, b"x", ["x"]])
def test_prompts_of_wrong_type(value: Any, llm: LLM) -> None:
    with pytest.raises(PromptError, match="the text must be a string, got "):
        llm.tokenize(value)
    with pytest.raises(PromptError):
        llm.next_token_probs(value)
    with pytest.raises(PromptError, match="prompt_token_ids must be a list of integers, got "):
        llm.detokenize(value)
    with pytest.raises(ChatTemplateError):
        llm.chat(value)


@pytest.mark.parametrize("model", [5, b"tiny", ["tiny"], math.nan])
def test_model_of_wrong_type(model: Any) -> None:
    with pytest.raises(InvalidParameterError, match="model must be a string or a path, got "):
        LLM(model)
    with pytest.raises(ModelNotFoundError, match="home directory"):
        LLM("~no-such-user/model")


@pytest.mark.usefixtures("fake_engine")
@pytest.mark.parametrize(
    ("unknown", "hint"),
    [("max_model_length", ". Did you mean 'max_model_len'?"), ("dtyp", ". Did you mean 'dtype'?"), ("xyz", "")],
)
@pytest.mark.parametrize("cls", [LLM, AsyncLLM])
def test_unknown_argument(cls: type[LLM | AsyncLLM], unknown: str, hint: str) -> None:
    options: Any = {unknown: 1}
    with pytest.raises(TypeError) as caught:
        cls(**options)
    assert str(caught.value) == f"{cls.__name__}() got an unexpected keyword argument {unknown!r}{hint}"


@pytest.mark.parametrize("cls", [LLM, AsyncLLM])
def test_a_second_positional_argument_is_refused_by_the_name_of_the_class(cls: Any) -> None:
    message = rf"^{cls.__name__}\(\) takes one positional argument, the model, got 2; name the others$"
    with pytest.raises(TypeError, match=message):
        cls("model", "int8")


WITH_BARS: dict[str, Callable[[LLM], object]] = {
    "generate": lambda llm: llm.generate(["one", "two"], GREEDY),
    "chat": lambda llm: llm.chat([{"role": "user", "content": "one"}], GREEDY),
    "embed": lambda llm: llm.embed(["one", "two"]),
    "score": lambda llm: llm.score("one", "two"),
}
"""Calls that show a progress bar by default."""
WITHOUT_BARS: dict[str, Callable[[LLM], object]] = {
    "use_tqdm": lambda llm: llm.generate("one", GREEDY, use_tqdm=False),
    "beam_search": lambda llm: llm.beam_search("one", BeamSearchParams(beam_width=2, max_tokens=2)),
    "next_token_probs": lambda llm: llm.next_token_probs("one"),
    "rerank": lambda llm: llm.rerank("one", ["two"]),
}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("call", WITH_BARS.values(), ids=WITH_BARS)
def test_nothing_is_printed_without_a_terminal(
    call: Callable[[LLM], object], llm: LLM, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "BAR_DELAY", 0.0)
    call(llm)
    monkeypatch.setattr(sys, "stderr", None)
    call(llm)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("call", WITH_BARS.values(), ids=WITH_BARS)
def test_slow_calls_show_progress_bar_on_terminal(
    call: Callable[[LLM], object], llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    call(llm)
    assert terminal.getvalue() == ""
    monkeypatch.setattr(progress, "BAR_DELAY", 0.0)
    call(llm)
    assert "Processed prompts: 100%" in terminal.getvalue()


@pytest.mark.parametrize("call", WITHOUT_BARS.values(), ids=WITHOUT_BARS)
def test_calls_without_progress_bar(call: Callable[[LLM], object], llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(progress, "BAR_DELAY", 0.0)
    call(llm)
    assert terminal.getvalue() == ""


def test_custom_progress_bar_class(llm: LLM) -> None:
    counts: list[float] = []

    class Bar:
        def __init__(self, *, total: int, desc: str) -> None:
            assert (total, desc) == (2, "Processed prompts")

        def __enter__(self) -> Bar:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def update(self, count: float) -> None:
            counts.append(count)

    llm.generate(["one", "two"], SamplingParams(max_tokens=2), use_tqdm=Bar)
    assert counts == [1, 1]
    llm.embed(["one", "two"], use_tqdm=Bar)
    assert sum(counts) == 4
    not_a_bar: Any = 3
    with pytest.raises(
        InvalidParameterError, match=r"^use_tqdm must be True, False, or a class such as tqdm\.tqdm, got 3"
    ):
        llm.generate("one", use_tqdm=not_a_bar)


def test_longest_prompt_leaves_room_for_one_token(llm: LLM) -> None:
    output = llm.generate({"prompt_token_ids": [1] * 2047}, SamplingParams(max_tokens=50))[0]
    assert len(output.outputs[0].token_ids) == 1


def test_engine_error_ends_the_call(llm: LLM, fake_engine: type[fakes.Engine], engine_of: EngineOf) -> None:
    fake_engine.error_at = 2
    with pytest.raises(EngineError, match="logits are not finite"):
        llm.generate(["a", "b"], GREEDY)
    assert not engine_of(llm).running
    assert llm.generate("a", GREEDY)[0].finished


def test_rejection_by_engine_leaves_nothing_running(
    llm: LLM, engine_of: EngineOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(llm)
    add = engine.add_request

    def add_or_refuse(prompt: list[int], *more: Any) -> int:
        if prompt == [9]:
            raise PromptError("no room")
        return add(prompt, *more)

    monkeypatch.setattr(engine, "add_request", add_or_refuse)
    with pytest.raises(PromptError, match="no room"):
        llm.generate([{"prompt_token_ids": [8]}, {"prompt_token_ids": [9]}], GREEDY)
    assert not engine.running


def test_closing_a_stream_aborts_its_request(llm: LLM, engine_of: EngineOf) -> None:
    stream = llm.stream("x")
    next(stream)
    assert engine_of(llm).running
    stream.close()
    assert not engine_of(llm).running
    assert engine_of(llm).aborted


def test_stream_all_interleaves_prompts(llm: LLM, engine_of: EngineOf) -> None:
    prompts = ["The capital of", "Once", "x"]
    params = [SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for count in (4, 2, 3)]
    alone = [output.outputs[0] for output in llm.generate(prompts, params)]
    deltas = list(llm.stream_all(prompts, params))
    assert [position for position, _ in deltas] == [0, 1, 2, 0, 1, 2, 0, 2, 0]
    for number, expected in enumerate(alone):
        mine = [delta for position, delta in deltas if position == number]
        assert [token for delta in mine for token in delta.token_ids] == expected.token_ids
        assert "".join(delta.text for delta in mine) == expected.text
        assert [delta.output is not None for delta in mine] == [False] * (len(mine) - 1) + [True]
    stream = llm.stream_all(prompts, GREEDY)
    next(stream)
    stream.close()
    assert not engine_of(llm).running


def test_unread_stream_starts_no_request(llm: LLM, engine_of: EngineOf) -> None:
    llm.stream("x")
    assert not engine_of(llm).running


def test_closed_llm_raises(fake_engine: type[fakes.Engine]) -> None:
    with LLM() as llm:
        stream = llm.stream("x")
        next(stream)
    for call in (lambda: llm.generate("x"), lambda: next(stream), lambda: llm.logits([1])):
        with pytest.raises(EngineError, match="the engine is closed"):
            call()
    llm.close()
    assert llm.tokenize("x")


def test_progress_and_options_are_passed_to_engine(
    fake_engine: type[fakes.Engine], engine_of: EngineOf, tmp_path: Path
) -> None:
    seen: list[tuple[int, int]] = []
    llm = LLM(
        "tiny",
        quantization="bf16",
        threads=3,
        max_model_len=100,
        kv_cache_memory=1 << 20,
        enable_prefix_caching=False,
        max_queued_requests=7,
        target_itl=0.5,
        progress=lambda done, total: seen.append((done, total)),
    )
    assert seen == [(0, 100), (50, 100), (100, 100)]
    assert engine_of(llm).options == {
        "quantization": "bf16",
        "mmap": True,
        "allow_paging": False,
        "threads": 3,
        "numa": "auto",
        "max_model_len": 100,
        "kv_cache_dtype": "auto",
        "kv_cache_memory": 1 << 20,
        "max_num_seqs": None,
        "max_num_batched_tokens": None,
        "enable_prefix_caching": False,
        "prefix_cache_dir": None,
        "prefix_cache_dir_limit": None,
        "max_queued_requests": 7,
        "target_itl": 0.5,
        "speculative_config": None,
    }
    llm = LLM("tiny", prefix_cache_dir=tmp_path, prefix_cache_dir_limit=1 << 20)
    assert engine_of(llm).options["prefix_cache_dir"] == str(tmp_path)
    assert engine_of(llm).options["prefix_cache_dir_limit"] == 1 << 20
    llm = LLM("tiny", max_model_len=100, threads=3)
    assert engine_of(llm).options["enable_prefix_caching"] is True
    assert engine_of(llm).options["max_queued_requests"] is None
    info = llm.info()
    assert (info["model"], info["architecture"], info["threads"], info["max_model_len"]) == ("tiny", "llama", 3, 100)
