"""Conditions that end a completion before the engine does."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

from ferrule._text.loop_guard import LoopGuard
from ferrule.outputs import CompletionOutput, RequestOutput, StreamDelta, StreamStep

ABORT = "abort"
"""The finish reason of an aborted request."""
LOOP = "loop"
"""The stop reason of a completion that repeated itself endlessly."""


class Ending(NamedTuple):
    """End of a completion by a condition."""

    finish_reason: str
    stop_reason: str | None = None
    characters: int | None = None
    """Characters of the new text to keep, after which the completion ends; None to keep what is generated until the
    engine has aborted the request."""


class EndCondition(Protocol):
    """A condition that reads the new text of a completion."""

    def check(self, new: StreamDelta) -> Ending | None:
        """Returns how the completion ends with this delta; None if it goes on."""
        ...


class EndlessLoop:
    """The completion repeats itself endlessly."""

    def __init__(self) -> None:
        self._guard = LoopGuard()

    def check(self, new: StreamDelta) -> Ending | None:
        """Reads the new tokens."""
        return Ending("stop", LOOP) if self._guard.loops(new.token_ids) else None


class Outdent:
    """A line after the first is indented by fewer than `minimum` spaces and tabs (llama.cpp's `n_indent`).

    An empty line counts. The text ends with the indentation of that line.
    """

    def __init__(self, minimum: int) -> None:
        self._minimum = minimum
        self._indentation: int | None = None
        """Spaces and tabs so far at the beginning of a line; None elsewhere, and in the first line."""

    def check(self, new: StreamDelta) -> Ending | None:
        """Reads the new text."""
        for index, character in enumerate(new.text):
            if self._indentation is not None and character in " \t":
                self._indentation += 1
            elif self._indentation is not None and self._indentation < self._minimum:
                return Ending("length", characters=index)
            else:
                self._indentation = 0 if character == "\n" else None
        return None


class GenerationTime:
    """A line ends when the time since the first token exceeds a limit (llama.cpp's `t_max_predict_ms`)."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.perf_counter) -> None:
        self._seconds = seconds
        self._clock = clock
        self._first: float | None = None

    def check(self, new: StreamDelta) -> Ending | None:
        """Reads the new text."""
        now = self._clock()
        if self._first is None:
            self._first = now
        if "\n" in new.text and now - self._first > self._seconds:
            return Ending("length", characters=len(new.text))
        return None


@dataclass
class EarlyEnd:
    """Applies conditions to the steps of a request with one completion."""

    conditions: list[EndCondition]
    ending: Ending | None = None
    """End of the completion; None before a condition has ended it."""
    _characters: int = 0
    _tokens: int = 0

    def apply(self, step: StreamStep) -> StreamStep:
        """Checks the conditions and returns the step with the part that is kept, and the reasons of its end."""
        deltas = [self._kept(delta) for delta in step.deltas]
        if self.ending is None:
            return step
        return StreamStep(deltas, self._cut_output(step.output, self.ending))

    def _kept(self, new: StreamDelta) -> StreamDelta:
        is_cut = self.ending is not None and self.ending.characters is not None
        if self.ending is None:
            found = (condition.check(new) for condition in self.conditions)
            self.ending = next((each for each in found if each is not None), None)
        elif is_cut:
            new = replace(new, text="", token_ids=[], logprobs=None if new.logprobs is None else [], entropies=None)
        if not is_cut and self.ending is not None and self.ending.characters is not None:
            new = replace(new, text=new.text[: self.ending.characters])
        self._characters += len(new.text)
        self._tokens += len(new.token_ids)
        return new if self.ending is None else self._with_reasons(new, self.ending)

    @staticmethod
    def _with_reasons(new: StreamDelta, ending: Ending) -> StreamDelta:
        if new.finish_reason is None or (ending.characters is None and new.finish_reason != ABORT):
            return new
        return replace(new, finish_reason=ending.finish_reason, stop_reason=ending.stop_reason)

    def _cut_output(self, output: RequestOutput, ending: Ending) -> RequestOutput:
        outputs = [self._cut_completion(each, ending) for each in output.outputs]
        if ending.characters is None:
            return replace(output, outputs=outputs)
        return replace(output, outputs=outputs, metrics=replace(output.metrics, output_tokens=self._tokens))

    def _cut_completion(self, found: CompletionOutput, ending: Ending) -> CompletionOutput:
        if ending.characters is None:
            if found.finish_reason != ABORT:
                return found
            return replace(found, finish_reason=ending.finish_reason, stop_reason=ending.stop_reason)
        return replace(
            found,
            text=found.text[: self._characters],
            token_ids=found.token_ids[: self._tokens],
            logprobs=None if found.logprobs is None else found.logprobs[: self._tokens],
            finish_reason=ending.finish_reason,
            stop_reason=ending.stop_reason,
        )
