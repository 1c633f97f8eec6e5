"""Sources of the answers of a chat: a model in this process, or a server."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Protocol

from ferrule._api.answer_defaults import (
    ANSWER_TOKENS,
    CONTINUATION_TOKENS,
    is_greedy_toy,
    shown_defaults,
    with_defaults,
)
from ferrule._api.llm import LLM
from ferrule._cli.sampling import summary
from ferrule._cli.status import StatusLine
from ferrule._params.sampling import SamplingParams
from ferrule._text.loop_guard import LoopGuard
from ferrule._text.parsers import MessageFormat
from ferrule._text.prompt import Prompt
from ferrule.outputs import RequestOutput


@dataclass(frozen=True)
class Usage:
    """Tokens and times of an answer."""

    summary: str
    """Tokens and times in one line."""
    prompt_tokens: int | None = None
    """Number of prompt tokens; None if the server does not report it."""
    output_tokens: int | None = None


@dataclass(frozen=True)
class Delta:
    """New part of an answer."""

    content: str = ""
    reasoning: str = ""
    usage: Usage | None = None
    """Usage of the answer; None except in the last delta."""
    output: RequestOutput | None = None
    """The whole output of a local model; None except in the last delta."""
    notice: str = ""
    """Reason that the answer ended early, for the user."""


class Answers(Protocol):
    """Source of answers."""

    @property
    def name(self) -> str:
        """Name of the model."""
        ...

    @property
    def context(self) -> int | None:
        """Context length in tokens; None if unknown."""
        ...

    def defaults(self, params: SamplingParams) -> dict[str, Any]:
        """Returns the values of sampling parameters that `params` leaves open, as far as they are known."""
        ...

    def stream(self, messages: Sequence[dict[str, Any]], params: SamplingParams) -> Generator[Delta, None, None]:
        """Streams the next message of a conversation. Closing the generator aborts the request.

        A notice says that an answer ended at a limit that `params` does not set. Raises FerruleError.
        """
        ...


class LocalAnswers:
    """Answers of a model in this process. Raises ChatTemplateError for a model without a chat template."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._format = llm.message_format(reasoning_parser="auto")
        llm.chat_prompt([{"role": "user", "content": "?"}])
        info = llm.info()
        self.name: str = info["model"]
        self.context: int | None = info["max_model_len"]

    def defaults(self, params: SamplingParams) -> dict[str, Any]:
        """Implements `Answers.defaults`."""
        return shown_defaults(params, self._llm)

    def stream(self, messages: Sequence[dict[str, Any]], params: SamplingParams) -> Generator[Delta, None, None]:
        """Implements `Answers.stream`."""
        return stream_deltas(self._llm, self._llm.chat_prompt(messages), params, self._format)


def stream_deltas(
    llm: LLM,
    prompt: Prompt,
    params: SamplingParams,
    message_format: MessageFormat | None = None,
    *,
    continues: bool = False,
    as_json: bool = False,
) -> Generator[Delta, None, None]:
    """Streams an answer of a local model, or a text that `continues` the prompt; an endless loop ends it.

    With `as_json` nothing is printed before the end, and an endless loop goes on.

    Raises FerruleError.
    """
    guard = LoopGuard() if not (as_json or params.ignore_eos or is_greedy_toy(llm)) else None
    given = with_defaults(params, llm, CONTINUATION_TOKENS if continues else ANSWER_TOKENS)
    default_limit = given.max_tokens if params.max_tokens is None and not continues else None
    with (
        StatusLine("reading the prompt") as status,
        closing(llm.stream(prompt, given, message_format=message_format, progress=status.read_tokens)) as stream,
    ):
        tokens = 0
        for delta in stream:
            usage, notice = None, ""
            if delta.output is not None:
                status.clear()
                metrics = delta.output.metrics
                usage = Usage(summary(delta.output), metrics.prompt_tokens, metrics.output_tokens)
                # Without --max-tokens, an answer may also end at the context length, which no option raises.
                if delta.output.outputs[0].finish_reason == "length" and metrics.output_tokens == default_limit:
                    notice = limit_notice(f"the limit of {default_limit:,} tokens")
            content, reasoning = delta.text, ""
            if message_format is not None:
                message = delta.message
                content, reasoning = ("", "") if message is None else (message.content or "", message.reasoning or "")
            if not as_json and is_visible(content, reasoning):
                status.clear()
            tokens += len(delta.token_ids)
            status.update(f"generating the answer: {tokens:,} tokens")
            yield Delta(content, reasoning, usage, delta.output, notice)
            if guard is not None and delta.output is None and guard.loops(delta.token_ids):
                yield Delta(notice="stopped: the answer repeats itself; a higher temperature may help")
                return


def is_visible(content: str, reasoning: str) -> bool:
    """Whether a part of an answer is visible once it is printed: a terminal shows all, and a pipe may show the content.

    A file shows nothing.
    """
    if sys.stdout.isatty():
        return bool(content or reasoning)
    try:
        return bool(content) and not stat.S_ISREG(os.fstat(sys.stdout.fileno()).st_mode)
    except (OSError, ValueError):  # not a file
        return bool(content)


def limit_notice(limit: str) -> str:
    """Returns the notice of an answer that ended at a limit that an option sets."""
    return f"stopped at {limit}; --max-tokens (in a chat, /params max_tokens) sets another"
