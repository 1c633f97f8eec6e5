"""Where the answers of a conversation come from: a model of this process, or a server."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ferrule._api.llm import LLM
from ferrule._cli.sampling import greedy_by_default, summary
from ferrule._params.sampling import SamplingParams


@dataclass(frozen=True)
class Usage:
    """What an answer took."""

    summary: str
    """One line."""
    prompt_tokens: int | None = None
    """None where a server does not say."""
    output_tokens: int | None = None


@dataclass(frozen=True)
class Delta:
    """What is new of an answer."""

    content: str = ""
    reasoning: str = ""
    usage: Usage | None = None
    """With the last delta."""


class Answers(Protocol):
    """Answers conversations."""

    @property
    def name(self) -> str:
        """The model's."""
        ...

    @property
    def context(self) -> int | None:
        """Tokens of the longest conversation, where that is known."""
        ...

    def stream(self, messages: Sequence[dict[str, Any]], params: SamplingParams) -> Generator[Delta, None, None]:
        """The next message of a conversation. Closing the generator ends the request.

        Raises FerruleError.
        """
        ...


class LocalAnswers:
    """A model of this process. Raises ChatTemplateError where it cannot chat."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._format = llm.message_format(reasoning_parser="auto")
        llm.chat_prompt([{"role": "user", "content": "?"}])
        info = llm.info()
        self.name: str = info["model"]
        self.context: int | None = info["max_model_len"]

    def stream(self, messages: Sequence[dict[str, Any]], params: SamplingParams) -> Generator[Delta, None, None]:
        """As `Answers.stream`."""
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
