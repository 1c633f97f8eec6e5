"""Renders small conversations with marked words, whose places in the text show how a template writes a message."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ferrule._text.chat import Message, adapt_messages, render_chat
from ferrule.errors import ChatTemplateError

ANSWER, REASONING = "Qzanswer.", "Qzreasoning."
NAMES = ("qzalpha", "qzbeta")
ARGUMENTS: tuple[dict[str, Any], ...] = ({"qzcity": "qzparis", "qzdays": 98761}, {"qzzone": "qztokyo"})
IDS = ("qzcall001", "qzcall002")
"""Ids in the form that Mistral's templates require."""
NAMED_IDS = tuple(f"functions.{name}:{index}" for index, name in enumerate(NAMES))
"""Ids in the form of Kimi's templates, some of which write the id of a call instead of its name."""
MAX_TURN = 4096
"""Maximum number of characters of a rendered turn."""
MAX_SECONDS = 0.5
"""Seconds of processor time after which no rendering begins; those of a usual template take a small part of it.

The time is checked between renderings only, so the last one may exceed it, by as much as `budget` allows."""

_TYPES = {"qzcity": "string", "qzdays": "integer", "qzzone": "string"}
TOOLS: tuple[dict[str, Any], ...] = tuple(
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "A function.",
            "parameters": {
                "type": "object",
                "properties": {key: {"type": _TYPES[key], "description": "An argument."} for key in arguments},
                "required": list(arguments),
            },
        },
    }
    for name, arguments in zip(NAMES, ARGUMENTS, strict=True)
)
_QUESTION: Message = {"role": "user", "content": "Qzquestion?"}
_THINKS = {"enable_thinking": True, "thinking": True}
"""Variables with which templates render reasoning that they omit otherwise."""


@dataclass(frozen=True)
class Probes:
    """Rendered turns of the assistant, without the text before them; empty if the template does not render one."""

    header: str
    """Beginning of the turn that all renderings share, the prompt's end included, such as `<|assistant|>`."""
    answer: str
    call: str
    calls: str
    """Turn with two calls; empty if the template renders only one."""
    reasoned_answer: str
    reasoned_call: str
    named_ids: bool
    """Whether the template writes ids instead of names, so that the ids are NAMED_IDS."""


def render_probes(template: str, special_tokens: Mapping[str, str]) -> Probes | str:
    """Returns the renderings of a template, or why it has none."""
    renderer = _Renderer(template, special_tokens, {}, time.thread_time() + MAX_SECONDS)
    try:
        before = renderer.text([_QUESTION], prompt=False)
        prompt = renderer.text([_QUESTION], prompt=True)
        answer = renderer.text([_QUESTION, _message(ANSWER)])
    except ChatTemplateError as error:
        return f"the template refuses a conversation: {error}"
    if ANSWER not in answer:
        return "the template does not render the answer"
    named_ids = False
    call = renderer.calls(IDS[:1])
    if not _has(call, NAMES[0], before):
        call, named_ids = renderer.calls(NAMED_IDS[:1]), True
    if not _has(call, NAMES[0], before):
        call, named_ids = "", False
    calls = renderer.calls(NAMED_IDS if named_ids else IDS) if call else ""
    if not _has(calls, NAMES[1], before):
        calls = ""
    reasoned = reasoned_call = ""
    for thinker in (renderer, replace(renderer, arguments=_THINKS)):
        reasoned = thinker.turn(_message(ANSWER, reasoning_content=REASONING))
        reasoned_call = thinker.calls((NAMED_IDS if named_ids else IDS)[:1], reasoning_content=REASONING)
        if REASONING in reasoned or REASONING in reasoned_call:
            break
    turns = [answer, call, calls, *(turn if REASONING in turn else "" for turn in (reasoned, reasoned_call))]
    header = prompt
    for turn in filter(None, turns):
        header = header[: common_length(header, turn)]
    header = header[: _whole(header)]
    start = common_length(before, header)
    cut = [turn[len(header) :] for turn in turns]
    if max(map(len, (header[start:], *cut))) > MAX_TURN:
        return f"the template renders a turn of more than {MAX_TURN} characters"
    return Probes(header[start:], *cut, named_ids=named_ids)


@dataclass(frozen=True)
class _Renderer:
    template: str
    special_tokens: Mapping[str, str]
    arguments: Mapping[str, Any]
    deadline: float
    """Time of the thread's clock after which no rendering begins."""

    def text(self, messages: Sequence[Message], *, prompt: bool = False) -> str:
        """Returns a rendered conversation.

        Raises ChatTemplateError.
        """
        if time.thread_time() > self.deadline:
            raise ChatTemplateError("the template is too slow to try further conversations")
        return render_chat(
            self.template,
            adapt_messages(self.template, messages, self.special_tokens),
            special_tokens=self.special_tokens,
            tools=TOOLS,
            add_generation_prompt=prompt,
            arguments=self.arguments,
        )

    def turn(self, message: Message) -> str:
        """Returns a conversation with an answer; empty if the template refuses it."""
        try:
            return self.text([_QUESTION, message])
        except ChatTemplateError:
            return ""

    def calls(self, ids: Sequence[str], **fields: str) -> str:
        """Returns a conversation with calls; empty if the template refuses it, with empty content and without."""
        calls = [
            {"id": each, "type": "function", "function": {"name": name, "arguments": arguments}}
            for each, name, arguments in zip(ids, NAMES, ARGUMENTS, strict=False)
        ]
        return self.turn(_message("", tool_calls=calls, **fields)) or self.turn(
            {name: value for name, value in _message("", tool_calls=calls, **fields).items() if name != "content"}
        )


def _message(content: str, **fields: object) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **fields}


def _has(turn: str, word: str, before: str) -> bool:
    """Whether a turn has a word, which descriptions of tools `before` the turn may have too."""
    return word in turn[common_length(turn, before) :]


def common_length(first: str, second: str) -> int:
    """Returns the number of characters with which both texts begin."""
    pairs = zip(first, second, strict=False)
    return next((index for index, (one, other) in enumerate(pairs) if one != other), min(len(first), len(second)))


def _whole(text: str) -> int:
    """Returns the length of a text without a tag that is incomplete at its end."""
    start = max(text.rfind("<"), text.rfind("["))
    opened = start >= 0 and (">" if text[start] == "<" else "]") not in text[start:]
    return start if opened else len(text)
