"""Sources of the answers of a chat: a model in this process, or a server."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ferrule._api.llm import LLM
from ferrule._cli.sampling import greedy_by_default, summary
from ferrule._params.sampling import SamplingParams


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

    def stream(self, messages: Sequence[dict[str, Any]], params: SamplingParams) -> Generator[Delta, None, None]:
        """Streams the next message of a conversation. Closing the generator aborts the request.

        Raises FerruleError.
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

    def stream(self, messages: Sequence[dict[str, Any]], params: SamplingParams) -> Generator[Delta, None, None]:
        """Implements `Answers.stream`."""
        prompt = self._llm.chat_prompt(messages)
        sampling = greedy_by_default(params, self._llm)
        for delta in self._llm.stream(prompt, sampling, message_format=self._format):
            usage = None
            if delta.output is not None:
                metrics = delta.output.metrics
                usage = Usage(summary(delta.output), metrics.prompt_tokens, metrics.output_tokens)
            if self._format is None:
                yield Delta(delta.text, usage=usage)
            elif delta.message is None:
                yield Delta(usage=usage)
            else:
                yield Delta(delta.message.content or "", delta.message.reasoning or "", usage)
