"""gpt-oss: messages on channels."""

from __future__ import annotations

import pytest

from ferrule import InvalidParameterError
from ferrule._text.parsers import MessageFormat
from parsers.read import Calls, emitted, read

HARMONY = MessageFormat("openai", "openai_gptoss")
THOUGHT = "<|channel|>analysis<|message|>They ask for it.<|end|>"
NEXT = "<|start|>assistant"
FINAL = "<|channel|>final<|message|>"
CALL = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>"


@pytest.mark.parametrize(
    ("text", "content", "reasoning", "calls"),
    [
        (THOUGHT + NEXT + FINAL + "4.<|return|>", "4.", "They ask for it.", []),
        (FINAL + "4.", "4.", None, []),
        (THOUGHT + NEXT + CALL + '{"a": 1}<|call|>', None, "They ask for it.", [("f", '{"a": 1}')]),
        (CALL + '{"a": 1}', None, None, [("f", '{"a": 1}')]),
        # A preamble for the user before two calls.
        (
            "<|channel|>commentary<|message|>I do both.<|end|>" + NEXT + CALL + "{}<|call|>" + NEXT
            + "<|channel|>commentary to=functions.g<|message|>{}<|call|>",
            "I do both.",
            None,
            [("f", "{}"), ("g", "{}")],
        ),
        # The recipient follows the role, which is in the prompt.
        (" to=functions.f<|channel|>commentary json<|message|>{}", None, None, [("f", "{}")]),
        (NEXT + " to=functions.f<|channel|>commentary<|message|>{}", None, None, [("f", "{}")]),
        # Calls on another channel, as those of built-in tools.
        ("<|channel|>analysis to=functions.f code<|message|>{}<|call|>", None, None, [("f", "{}")]),
        ("<|channel|>analysis to=browser.search<|message|>{}<|call|>", None, None, [("browser.search", "{}")]),
        ("<|channel|>analysis to=assistant<|message|>hm<|end|>", None, "hm", []),
        # Several messages of the same kind.
        (THOUGHT + "\n" + NEXT + THOUGHT + NEXT + FINAL + "a<|end|>" + NEXT + FINAL + " b ",
         "a\nb ", "They ask for it.\nThey ask for it.", []),
        # A missing marker.
        ("<|channel|>analysis<|message|>hm<|channel|>final<|message|>4.", "4.", "hm", []),
        ("<|channel|>other<|message|>x", "x", None, []),
        ("<|start|>x<|message|>y", "y", None, []),
        # Markers are special tokens, also within strings.
        (CALL + '{"a": "<|end|>"}', '"}', None, [("f", '{"a": "')]),
        # Incomplete output.
        ("<|channel|>analysis<|message|>They a", None, "They a", []),
        (CALL + '{"a": "<|en', None, None, [("f", '{"a": "<|en')]),
        (CALL, None, None, [("f", "")]),
    ],
)  # fmt: skip
def test_channels_of_messages(text: str, content: str | None, reasoning: str | None, calls: Calls) -> None:
    assert read(HARMONY, text) == (content, reasoning, calls)


@pytest.mark.parametrize(
    "text",
    [
        "Just text.",
        "\n text \n",
        "<|channel|>anal",
        "<|channel|>commentary to=functions.f <|constrain|>js",
        "<|chan",
        "to=functions.f and so on",
    ],
)
def test_other_text_is_content(text: str) -> None:
    assert read(HARMONY, text) == (text, None, [])


def test_an_invalid_header_does_not_hide_the_next() -> None:
    text = "<|channel|>commentary?? let me<|end|>" + NEXT + THOUGHT + NEXT + FINAL + "4."
    assert read(HARMONY, text) == ("<|channel|>commentary?? let me\n4.", "They ask for it.", [])


def test_reasoning_that_begins_in_the_prompt() -> None:
    text = "They ask.<|end|>" + NEXT + FINAL + "4."
    assert read(HARMONY, text, reasoning_open=True) == ("4.", "They ask.", [])
    assert HARMONY.reasoning_open("<|start|>assistant<|channel|>analysis<|message|>")
    assert not HARMONY.reasoning_open("<|start|>assistant<|channel|>final<|message|>")


def test_parts_are_streamed() -> None:
    assert emitted(HARMONY, "<|channel|>analysis<|message|>They a")[1] == "They a"
    assert emitted(HARMONY, CALL + '{"a": "b')[2] == [("f", '{"a": "b')]


def test_either_parser_selects_both() -> None:
    for form in (MessageFormat("openai"), MessageFormat(None, "openai_gptoss")):
        assert (form.tool_call_parser, form.reasoning_parser) == ("openai", "openai_gptoss")
        assert read(form, THOUGHT + NEXT + CALL + "{}") == (None, "They ask for it.", [("f", "{}")])
    with pytest.raises(
        InvalidParameterError,
        match="reasoning_parser must be openai_gptoss or None with tool_call_parser openai, got 'qwen3'",
    ):
        MessageFormat("openai", "qwen3")
    with pytest.raises(
        InvalidParameterError,
        match="tool_call_parser must be openai or None with reasoning_parser openai_gptoss, got 'hermes'",
    ):
        MessageFormat("hermes", "openai_gptoss")
