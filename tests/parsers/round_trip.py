"""Round trips: a chat template renders a message, and the parsers that the template implies read it back."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ferrule._api.info import implied_parsers
from ferrule._text.chat import adapt_messages, describe_tools, reads_tools, render_chat
from ferrule._text.derivation.probes import common_length
from ferrule._text.parsers import MessageFormat
from ferrule.errors import ChatTemplateError
from parsers.read import in_pieces

SPECIAL_TOKENS = {"bos_token": "<BOS>", "eos_token": "<EOS>"}
TURN_ENDS = (
    *("<EOS>", "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|end|>", "<|eot|>", "<|message_sep|>"),
    *("<|END_OF_TURN_TOKEN|>", "[e~[", "<SPECIAL_12>", "<end_of_sentence>", "<｜end▁of▁sentence｜>", "<seed:eos>"),  # noqa: RUF001
    *("<|end_of_msg|>", "<turn|>", "<end_of_turn>", "<|call|>", "<|return|>", "<|role_end|>", "</assistant>", "<sep>"),
    *("<｜hy_eos:opensource｜>", "<|calls|>", "<|tool_response>"),  # noqa: RUF001
)
"""Tokens at which generation stops, so that no parser sees them."""
SHARED_END = 100
"""Number of characters from which an end that the turns of user and assistant share is text of the template."""


def _tool(name: str, **arguments: str) -> dict[str, Any]:
    properties = {key: {"type": kind, "description": f"The {key}."} for key, kind in arguments.items()}
    parameters = {"type": "object", "properties": properties, "required": list(arguments)}
    return {"type": "function", "function": {"name": name, "description": "A tool.", "parameters": parameters}}


def _call(number: int, name: str, **arguments: object) -> dict[str, Any]:
    return {
        "id": f"abcdef00{number}",
        "type": "function",
        "function": {"name": name, "arguments": json.dumps(arguments)},
    }


TOOLS = [_tool("get_weather", city="string", days="integer"), _tool("get_time", zone="string")]
_FIRST = _call(1, "get_weather", city='Paris <b> "x"', days=3)
_SECOND = _call(2, "get_time", zone="Europe/Berlin")
MESSAGES: dict[str, dict[str, Any]] = {
    "content": {"content": "It rains."},
    "call": {"content": "", "tool_calls": [_FIRST]},
    "calls": {"content": "", "tool_calls": [_FIRST, _SECOND]},
    "reasoning": {"content": "", "reasoning_content": "They ask for it.", "tool_calls": [_FIRST]},
}
_QUESTION = {"role": "user", "content": "How is the weather?"}


@dataclass(frozen=True)
class RoundTrip:
    """Result for one template."""

    calls: str
    """Name of the parser of calls, or `none`."""
    reasoning: str
    problems: tuple[str, ...]
    """Messages that were not read back."""
    omitted: tuple[str, ...]
    """Parts of messages that the template does not render, so that they cannot be read back."""


def round_trip(template: str) -> RoundTrip:
    """Renders each of MESSAGES and reads it back, at once and in pieces of one character."""
    implied = implied_parsers({"default": template}, "", SPECIAL_TOKENS)
    calls, reasoning = (name or "none" for name in implied.names)
    if implied.calls is None:
        return RoundTrip(calls, reasoning, ("no parser of calls",), ())
    form = MessageFormat(*implied, tools=TOOLS)
    problems: list[str] = []
    omitted: list[str] = []
    for name, message in MESSAGES.items():
        try:
            prompt, text = _turn(template, message)
        except ChatTemplateError as error:
            (omitted if name in ("calls", "reasoning") else problems).append(f"{name}: {error}")
            continue
        if message.get("reasoning_content", "") not in text:
            omitted.append("reasoning")
            message = {**message, "reasoning_content": ""}  # noqa: PLW2901
        if name == "calls" and "Europe/Berlin" not in text:
            omitted.append("calls")
            message = MESSAGES["call"]  # noqa: PLW2901
        # A template may omit from past turns the marker with which its prompt opens reasoning.
        opened = dict.fromkeys([form.reasoning_open(prompt), form.reasoning_open(_prompt(template))])
        if not any(_reads(form, text, message, reasoning_open=each) for each in opened):
            problems.append(f"{name}: {text}")
    return RoundTrip(calls, reasoning, tuple(problems), tuple(omitted))


def _render(template: str, *messages: Mapping[str, Any], prompt: bool = False) -> str:
    adapted = adapt_messages(template, messages, SPECIAL_TOKENS)
    if not reads_tools(template):
        described = describe_tools(template, adapted, TOOLS, SPECIAL_TOKENS)
        adapted = adapt_messages(template, described, SPECIAL_TOKENS)
    return render_chat(
        template, adapted, special_tokens=SPECIAL_TOKENS, tools=TOOLS, add_generation_prompt=prompt
    )  # fmt: skip


def _prompt(template: str) -> str:
    return _render(template, _QUESTION, prompt=True)


def _turn(template: str, message: Mapping[str, Any]) -> tuple[str, str]:
    """Returns the text before an answer and the answer, which the model would generate up to the end of its turn."""
    prompt = _prompt(template)
    whole = _render(template, _QUESTION, {"role": "assistant", **message})
    start = common_length(prompt, whole)
    tag = max(prompt.rfind(opener, 0, start) for opener in "<[")
    if tag >= 0 and not any(closer in prompt[tag:start] for closer in ">]"):
        start = tag
    text = whole[start:].rstrip()
    asked = _render(template, _QUESTION).rstrip()
    shared = common_length(text[::-1], asked[::-1])
    if shared > SHARED_END:
        text = text[:-shared].rstrip()
    appended = prompt.partition(_QUESTION["content"])[2].strip()
    text = text.removesuffix(appended).rstrip() if appended else text
    while (end := next((end for end in TURN_ENDS if text.endswith(end)), None)) is not None:
        text = text.removesuffix(end).rstrip()
    return whole[:start], text


def _reads(form: MessageFormat, text: str, expected: Mapping[str, Any], *, reasoning_open: bool) -> bool:
    found = form.parse(text, seed=0, reasoning_open=reasoning_open)
    assert in_pieces(form, text, reasoning_open=reasoning_open) == found
    try:
        calls = [(call.name, json.loads(call.arguments)) for call in found.tool_calls]
    except ValueError:
        return False
    functions = [call["function"] for call in expected.get("tool_calls", ())]
    wanted = [(function["name"], json.loads(function["arguments"])) for function in functions]
    content, reasoning = (found.content or "").strip(), (found.reasoning or "").strip()
    return (calls, content, reasoning) == (wanted, expected["content"], expected.get("reasoning_content", ""))
