"""gpt-oss: messages on channels."""

from __future__ import annotations

import pytest

from ferrule import InvalidParameterError
from ferrule._text.parsers import MessageFormat
from parsers.read import Calls, given_out, read

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
        # A preamble, which is for the user, before two calls.
        (
            "<|channel|>commentary<|message|>I do both.<|end|>" + NEXT + CALL + "{}<|call|>" + NEXT
            + "<|channel|>commentary to=functions.g<|message|>{}<|call|>",
            "I do both.",
            None,
            [("f", "{}"), ("g", "{}")],
        ),
        # The recipient where the role is: the prompt has said `assistant`.
        (" to=functions.f<|channel|>commentary json<|message|>{}", None, None, [("f", "{}")]),
        (NEXT + " to=functions.f<|channel|>commentary<|message|>{}", None, None, [("f", "{}")]),
        # Calls that come on the wrong channel, as those of built-in tools do.
        ("<|channel|>analysis to=functions.f code<|message|>{}<|call|>", None, None, [("f", "{}")]),
        ("<|channel|>analysis to=browser.search<|message|>{}<|call|>", None, None, [("browser.search", "{}")]),
        ("<|channel|>analysis to=assistant<|message|>hm<|end|>", None, "hm", []),
        # Several messages of a kind.
        (THOUGHT + "\n" + NEXT + THOUGHT + NEXT + FINAL + "a<|end|>" + NEXT + FINAL + " b ",
         "a\nb ", "They ask for it.\nThey ask for it.", []),
        # A marker that is missing.
        ("<|channel|>analysis<|message|>hm<|channel|>final<|message|>4.", "4.", "hm", []),
        ("<|channel|>other<|message|>x", "x", None, []),
        ("<|start|>x<|message|>y", "y", None, []),
        # Markers are special tokens: within strings too.
        (CALL + '{"a": "<|end|>"}', '"}', None, [("f", '{"a": "')]),
        # Cut off.
        ("<|channel|>analysis<|message|>They a", None, "They a", []),
        (CALL + '{"a": "<|en', None, None, [("f", '{"a": "<|en')]),
        (CALL, None, None, [("f", "")]),
    ],
)  # fmt: skip
def test_messages(text: str, content: str | None, reasoning: str | None, calls: Calls) -> None:
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
def test_what_is_no_message_is_content(text: str) -> None:
    assert read(HARMONY, text) == (text, None, [])


def test_a_header_that_goes_wrong_hides_no_other() -> None:
    text = "<|channel|>commentary?? let me<|end|>" + NEXT + THOUGHT + NEXT + FINAL + "4."
    assert read(HARMONY, text) == ("<|channel|>commentary?? let me\n4.", "They ask for it.", [])


def test_a_prompt_that_has_begun_the_reasoning() -> None:
    text = "They ask.<|end|>" + NEXT + FINAL + "4."
    assert read(HARMONY, text, reasoning_open=True) == ("4.", "They ask.", [])
    assert HARMONY.reasoning_open("<|start|>assistant<|channel|>analysis<|message|>")
    assert not HARMONY.reasoning_open("<|start|>assistant<|channel|>final<|message|>")


def test_parts_are_given_out_while_they_arrive() -> None:
    assert given_out(HARMONY, "<|channel|>analysis<|message|>They a")[1] == "They a"
    assert given_out(HARMONY, CALL + '{"a": "b')[2] == [("f", '{"a": "b')]


def test_either_name_means_both() -> None:
    for form in (MessageFormat("openai"), MessageFormat(None, "openai_gptoss")):
        assert (form.tool_call_parser, form.reasoning_parser) == ("openai", "openai_gptoss")
        assert read(form, THOUGHT + NEXT + CALL + "{}") == (None, "They ask for it.", [("f", "{}")])
    for wrong in (("openai", "qwen3"), ("hermes", "openai_gptoss")):
        with pytest.raises(InvalidParameterError, match="openai and openai_gptoss go together, or alone"):
            MessageFormat(*wrong)
