"""A model's output, told apart: reasoning, answer and tool calls, while it arrives or at once."""

from __future__ import annotations

from collections.abc import Sequence

from ferrule._text.parsers.draft import Draft, call_ids
from ferrule._text.parsers.families import (
    HARMONY,
    HARMONY_REASONING,
    REASONING_PARSERS,
    TOOL_CALL_PARSERS,
    ToolCallFamily,
    find,
)
from ferrule._text.parsers.message import MessageDelta, ParsedMessage
from ferrule._text.parsers.reader import Read, Reader
from ferrule._text.parsers.state import State
from ferrule._text.parsers.tools import Tools, ToolSchema
from ferrule.errors import InvalidParameterError


class MessageFormat:
    """How a model writes its messages: a parser for its tool calls, one for its reasoning, or both.

    `tools` are those that the request declares, in OpenAI's form. They decide what is a call where no marker does, and
    give types to values that the model writes without. None leaves both open.

    Raises InvalidParameterError.
    """

    def __init__(
        self,
        tool_call_parser: str | None = None,
        reasoning_parser: str | None = None,
        *,
        tools: Sequence[ToolSchema] | None = None,
    ) -> None:
        calls = None if tool_call_parser is None else find("tool_call_parser", TOOL_CALL_PARSERS, tool_call_parser)
        thinks = None if reasoning_parser is None else find("reasoning_parser", REASONING_PARSERS, reasoning_parser)
        if (calls is HARMONY and thinks not in (None, HARMONY_REASONING)) or (
            thinks is HARMONY_REASONING and calls not in (None, HARMONY)
        ):
            alone = "harmony has one form for both: openai and openai_gptoss go together, or alone"
            raise InvalidParameterError(
                f"tool_call_parser is {tool_call_parser!r} and reasoning_parser {reasoning_parser!r}; {alone}"
            )
        if calls is HARMONY or thinks is HARMONY_REASONING:
            calls, thinks = HARMONY, HARMONY_REASONING
        self.tool_call_parser = None if calls is None else calls.names[0]
        self.reasoning_parser = None if thinks is None else thinks.names[0]
        self.keep = frozenset[str]().union(*(family.keep for family in (calls, thinks) if family is not None))
        """Special tokens that must be left in the text."""
        self._calls = calls
        self._thought = None if thinks is None else thinks.thought
        self._tools = Tools(tools)

    def reasoning_open(self, prompt: str) -> bool:
        """Whether a prompt, special tokens and all, ends within reasoning, so that the output begins there.

        The last characters of the prompt are enough. DeepSeek's and Qwen's thinking models have such templates.
        """
        return self._thought is not None and prompt.rstrip().endswith(self._thought.begin.rstrip())

    def parser(self, *, reasoning_open: bool = False, seed: int | str | None = None) -> MessageParser:
        """A parser for one message.

        A seed makes the ids of its calls repeatable; give each message of a conversation a seed of its own, or their
        calls have the same ids.
        """
        calls = self._calls
        prefix, length = ToolCallFamily.call_id if calls is None else calls.call_id
        thought = None if calls is HARMONY else self._thought
        draft = Draft(call_ids(prefix, length, seed))
        return MessageParser(State(Reader(), draft, self._tools, thought, reasoning_open), calls)

    def parse(self, text: str, *, reasoning_open: bool = False, seed: int | str | None = None) -> ParsedMessage:
        """A whole output as a message. Never fails: what is not in the format is content."""
        parser = self.parser(reasoning_open=reasoning_open, seed=seed)
        return (parser.feed(text) + parser.finish()).message()


class MessageParser:
    """One message, in any pieces. Text is given out as soon as it is known what it is.

    However the text is split, the deltas add up to the same message.
    """

    def __init__(self, state: State, calls: ToolCallFamily | None) -> None:
        self._state = state
        self._machine = _machine(state, calls)
        self._finished = False

    def feed(self, text: str) -> MessageDelta:
        """Takes more of the output; what is new of the message.

        One that was interrupted, by Ctrl-C say, takes what it has not read yet for content from then on.

        Raises InvalidParameterError once it is finished.
        """
        if self._finished:
            raise InvalidParameterError("the message is finished; a further one needs a parser of its own")
        if not text:
            return MessageDelta()
        self._state.text.feed(text)
        try:
            next(self._machine)
        except BaseException:  # ends a generator for good
            self._state.as_content()
            self._machine = self._state.content()
            raise
        return self._state.draft.take()

    def finish(self) -> MessageDelta:
        """The output is over, or was cut off: what was still open comes out."""
        if self._finished:
            return MessageDelta()
        self._finished = True
        self._state.text.end()
        for _ in self._machine:
            pass
        self._state.draft.end()
        return self._state.draft.take()


def _machine(state: State, calls: ToolCallFamily | None) -> Read[object]:
    """Waits whenever it has read all there is, and ends with the text."""
    if calls is not HARMONY:  # which has reasoning of its own
        yield from state.begin()
    if calls is not None:
        yield from calls.read(state)
    else:
        yield from state.content()
