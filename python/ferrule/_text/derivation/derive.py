"""Derived parsers of a template, with the check that they read the template's own messages."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from ferrule._text.derivation.calls import UnknownNotationError, derive_calls
from ferrule._text.derivation.probes import ANSWER, ARGUMENTS, NAMES, REASONING, TOOLS, Probes, render_probes
from ferrule._text.derivation.reasoning import answer_marks, derive_reasoning
from ferrule._text.parsers import MessageFormat
from ferrule._text.parsers.families import DERIVED, ReasoningFamily, ToolCallFamily
from ferrule._text.parsers.notation import JsonObjects, Notation
from ferrule._text.parsers.state import Thought
from ferrule.errors import InvalidParameterError

_TOKEN = re.compile(r"<[^<>\s]+>|\[[^\[\]\s]+\]")
_CALLS = list(zip(NAMES, ARGUMENTS, strict=True))


@dataclass(frozen=True)
class DerivedFormat:
    """Parsers that a template implies; None where none can be derived."""

    calls: ToolCallFamily | None
    reasoning: ReasoningFamily | None
    no_calls: str
    """Reason that there is no parser of calls; empty if there is one."""

    def required_calls(self) -> ToolCallFamily:
        """Returns the parser of calls.

        Raises InvalidParameterError if there is none.
        """
        if self.calls is None:
            requirement = f"another parser, since none can be derived from the chat template ({self.no_calls})"
            raise InvalidParameterError("tool_call_parser", DERIVED, requirement)
        return self.calls

    def required_reasoning(self) -> ReasoningFamily:
        """Returns the parser of reasoning.

        Raises InvalidParameterError if there is none.
        """
        if self.reasoning is None:
            requirement = "another parser, since none can be derived from the chat template"
            raise InvalidParameterError("reasoning_parser", DERIVED, requirement)
        return self.reasoning


def derive_format(template: str, special_tokens: Mapping[str, str]) -> DerivedFormat:
    """Derives the parsers of a template. It raises no errors: a template that fails has no parsers."""
    return _derived(template, tuple(special_tokens.items()))


@lru_cache(maxsize=64)
def _derived(template: str, special_tokens: tuple[tuple[str, str], ...]) -> DerivedFormat:
    probes = render_probes(template, dict(special_tokens))
    if isinstance(probes, str):
        return DerivedFormat(None, None, probes)
    thought = derive_reasoning(probes)
    dropped = answer_marks(probes, thought)
    reasoning = None if thought is None else _reasoning_family(thought, dropped)
    if reasoning is not None and not _reads(probes, None, reasoning):
        reasoning = None
    try:
        calls = _call_family(derive_calls(probes), dropped)
    except UnknownNotationError as error:
        return DerivedFormat(None, reasoning, str(error))
    if calls is None:
        return DerivedFormat(None, reasoning, "calls do not begin with a marker")
    if not _reads(probes, calls, reasoning):
        return DerivedFormat(None, reasoning, "the derived parser does not read the calls that the template renders")
    return DerivedFormat(calls, reasoning, "")


def _call_family(notation: Notation, dropped: tuple[str, ...]) -> ToolCallFamily | None:
    begins = notation.begins
    if not begins or (notation.header and not isinstance(notation.header[0], str)):
        return None
    words = [*notation.section_begin, *notation.section_end, *notation.call_end, *notation.separator, *dropped]
    words += [part for part in notation.header if isinstance(part, str)]
    return ToolCallFamily(
        (DERIVED,),
        (),
        _tokens(*words),
        begin=begins[0],
        json_end=_json_end(notation),
        dropped=dropped,
        read=notation.read,
    )


def _json_end(notation: Notation) -> str:
    """Returns the marker at the end of a call that is one object between two markers."""
    body = notation.body
    if not isinstance(body, JsonObjects) or (body.members.names, body.members.arguments) != (("name",), ("arguments",)):
        return ""
    alone = not notation.section_begin and not notation.section_end and not body.members.inside
    return notation.call_end[0] if alone and len(notation.header) == len(notation.call_end) == 1 else ""


def _reasoning_family(thought: Thought, dropped: tuple[str, ...]) -> ReasoningFamily:
    thought = Thought(thought.begin, thought.end, anywhere=thought.anywhere, dropped=dropped)
    return ReasoningFamily((DERIVED,), (), _tokens(*thought.keep), thought=thought)


def _tokens(*markers: str) -> frozenset[str]:
    """Returns the parts of markers that may be special tokens."""
    return frozenset(markers).union(*map(_TOKEN.findall, markers))


@dataclass(frozen=True)
class _Turn:
    """A rendered turn and what a parser must find in it."""

    text: str
    content: str | None = None
    reasoning: str | None = None
    calls: int = 0
    """Number of calls."""


def _reads(probes: Probes, calls: ToolCallFamily | None, reasoning: ReasoningFamily | None) -> bool:
    """Whether derived parsers read the rendered turns."""
    form = MessageFormat(calls, reasoning, tools=TOOLS)
    turns = [_Turn(probes.answer, content=ANSWER)]
    if calls is not None:
        turns += [_Turn(probes.call, calls=1), _Turn(probes.calls, calls=2)]
    if reasoning is not None:
        turns.append(_Turn(probes.reasoned_answer, content=ANSWER, reasoning=REASONING))
        if calls is not None:
            turns.append(_Turn(probes.reasoned_call, reasoning=REASONING, calls=1))
    is_open = form.reasoning_open(probes.header)
    return all(_reads_turn(form, turn, reasoning_open=is_open) for turn in turns if turn.text)


def _reads_turn(form: MessageFormat, turn: _Turn, *, reasoning_open: bool) -> bool:
    message = form.parse(turn.text, reasoning_open=reasoning_open)
    try:
        found = [(call.name, json.loads(call.arguments)) for call in message.tool_calls]
    except (ValueError, RecursionError):
        return False
    if turn.reasoning is not None and (message.reasoning or "").strip() != turn.reasoning:
        return False
    return found == _CALLS[: turn.calls] and (turn.content or "") in (message.content or "")
