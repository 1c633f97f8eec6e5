"""Conditions that end a completion before the engine does."""

from __future__ import annotations

import pytest

from ferrule.outputs import CompletionOutput, RequestMetrics, RequestOutput, StreamDelta, StreamStep
from ferrule.server.early_end import EarlyEnd, EndCondition, GenerationTime, Outdent


def run(condition: EndCondition, texts: list[str]) -> tuple[str, StreamStep]:
    """Applies a condition to steps with one token per text; an abort ends them. Returns the text and the last step."""
    early, said, kept, step = EarlyEnd([condition]), "", "", None
    for number, text in enumerate([*texts, ""]):
        said += text
        reason = "abort" if number == len(texts) else None
        ids = list(range(min(number + 1, len(texts))))
        completion = CompletionOutput(0, said, ids, None, None, reason, None, 0)
        metrics = RequestMetrics(1, len(ids), None, None, None, 0)
        output = RequestOutput("a", None, [1], [completion], finished=reason is not None, metrics=metrics)
        delta = StreamDelta(text, [] if reason else [number], None, finish_reason=reason)
        step = early.apply(StreamStep([delta], output))
        kept += step.deltas[0].text
    assert step is not None
    assert step.output.outputs[0].text == kept
    assert step.output.outputs[0].finish_reason == step.deltas[0].finish_reason
    assert step.output.metrics.output_tokens == len(step.output.outputs[0].token_ids)
    return kept, step


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        (["a", "\n", "  ", "b", "\n", " ", "c", "d"], "a\n  b\n "),
        (["a\n\t\tb\nc\n"], "a\n\t\tb\n"),
        (["a\n", "\n", "  b"], "a\n"),
        (["\n  b", "\n  \n", "\nc"], "\n  b\n  \n"),
    ],
)
def test_a_line_with_less_indentation_is_cut(texts: list[str], expected: str) -> None:
    kept, last = run(Outdent(2), texts)
    assert kept == expected
    assert last.deltas[0].finish_reason == "length"
    consumed = next(number for number in range(1, len(texts) + 1) if len("".join(texts[:number])) > len(expected))
    assert last.output.metrics.output_tokens == consumed


@pytest.mark.parametrize("texts", [["a", "b"], ["a\n  b", "\n", " ", " "], ["  a\n   b\n  c"]])
def test_lines_with_enough_indentation_go_on(texts: list[str]) -> None:
    kept, last = run(Outdent(2), texts)
    assert (kept, last.deltas[0].finish_reason) == ("".join(texts), "abort")


def test_the_end_of_a_line_after_the_limit_of_time_ends_the_text() -> None:
    texts = ["a\n", "b\n", "c", "d\n", "e\n"]
    times = iter(range(10, 60, 10))
    kept, last = run(GenerationTime(15, lambda: next(times)), texts)
    assert (kept, last.deltas[0].finish_reason) == ("a\nb\ncd\n", "length")
    assert last.output.metrics.output_tokens == 4
    kept, last = run(GenerationTime(15, lambda: 0), texts)
    assert (kept, last.deltas[0].finish_reason) == ("".join(texts), "abort")
