"""Reasoning between `<think>` and `</think>`, with and without a tool call parser."""

from __future__ import annotations

import pytest

from ferrule._text.parsers import MessageFormat
from parsers.read import emitted, read

THINK = MessageFormat(None, "deepseek_r1")


@pytest.mark.parametrize(
    ("text", "content", "reasoning"),
    [
        ("Yes.", "Yes.", None),
        ("<think>\nSo.\n</think>\n\nYes.\n", "Yes.\n", "So."),
        (" \n<think>So.</think>Yes.", "Yes.", "So."),
        ("<think>\n\n</think>\n\nYes.", "Yes.", None),
        ("<think> a\n b </think> c", "c", "a\n b"),
        # Incomplete output.
        ("<think>So it", None, "So it"),
        ("<think>So it</th", None, "So it</th"),
        ("<th", "<th", None),
        # An answer may mention the markers.
        ("The <think> tag.</think>", "The <think> tag.</think>", None),
        ("<think>So.</think>The <think> tag.", "The <think> tag.", "So."),
        # The end marker alone, which templates write where the model does not think.
        ("</think>Yes.", "Yes.", None),
        ("<think>One <think> more.</think>Yes.", "Yes.", "One <think> more."),
    ],
)
def test_reasoning_only_at_the_beginning(text: str, content: str | None, reasoning: str | None) -> None:
    assert read(THINK, text) == (content, reasoning, [])


@pytest.mark.parametrize(
    ("text", "content", "reasoning"),
    [
        ("So.\n</think>\n\nYes.", "Yes.", "So."),
        ("\n<think>\nSo.</think>Yes.", "Yes.", "So."),
        ("So it", None, "So it"),
        ("</think>Yes.", "Yes.", None),
        ("", None, None),
    ],
)
def test_reasoning_that_begins_in_the_prompt(text: str, content: str | None, reasoning: str | None) -> None:
    assert read(THINK, text, reasoning_open=True) == (content, reasoning, [])


@pytest.mark.parametrize(
    ("prompt", "is_open"),
    [
        ("<｜Assistant｜><think>\n", True),  # noqa: RUF001
        ("<|im_start|>assistant\n<think>", True),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
        ("What is <think>?<|im_end|>\n<|im_start|>assistant\n", False),
        ("", False),
    ],
)
def test_prompts_that_open_the_reasoning(prompt: str, is_open: bool) -> None:
    assert THINK.reasoning_open(prompt) is is_open
    assert not MessageFormat("hermes").reasoning_open(prompt), "nobody asked"


@pytest.mark.parametrize(
    ("name", "text", "content", "reasoning"),
    [
        ("seed_oss", "\n<seed:think>So.</seed:think>\nYes.", "Yes.", "So."),
        (
            "apriel",
            "Here are my reasoning steps:\nSo.\n[BEGIN FINAL RESPONSE]\nYes.\n[END FINAL RESPONSE]",
            "Yes.",
            "So.",
        ),
        (
            "cohere_command3",
            "<|START_THINKING|>So.<|END_THINKING|><|START_RESPONSE|>Yes.<|END_RESPONSE|>",
            "Yes.",
            "So.",
        ),
        ("cohere_command3", "<|START_RESPONSE|>Yes.<|END_RESPONSE|>", "Yes.", None),
        ("cohere_command4", "<|START_THINKING|>So.<|END_THINKING|><|START_TEXT|>Yes.<|END_TEXT|>", "Yes.", "So."),
        ("solar_open", "<|think|>So.<|end|><|begin|>assistant<|content|>Yes.<|end|>", "Yes.", "So."),
        ("solar_open", "<|content|>Yes.", "Yes.", None),
        ("minimax_m3", "<mm:think>So.</mm:think>Yes.", "Yes.", "So."),
        ("minimax_m3", "</mm:think>Yes.", "Yes.", None),
    ],
)
def test_markers_of_other_models(name: str, text: str, content: str, reasoning: str | None) -> None:
    assert read(MessageFormat(None, name), text) == (content, reasoning, [])
    assert read(MessageFormat(None, name), "Yes.") == ("Yes.", None, [])


@pytest.mark.parametrize(
    ("name", "prompt", "text"),
    [
        ("apriel", "\n<|begin_assistant|>\nHere are my reasoning steps:\n", "So.\n[BEGIN FINAL RESPONSE]\nYes."),
        ("cohere_command4", "<|CHATBOT_TOKEN|><|START_THINKING|>", "So.<|END_THINKING|><|START_TEXT|>Yes.<|END_TEXT|>"),
        ("minimax_m3", "]~b]ai\n<mm:think>", "So.</mm:think>Yes."),
    ],
)
def test_prompts_of_other_models_that_open_the_reasoning(name: str, prompt: str, text: str) -> None:
    form = MessageFormat(None, name)
    assert form.reasoning_open(prompt)
    assert read(form, text, reasoning_open=True) == ("Yes.", "So.", [])


def test_reasoning_without_a_parser_is_content() -> None:
    text = '<think>So.</think>\n<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    assert read(MessageFormat("hermes"), text) == ("<think>So.</think>", None, [("f", "{}")])
    assert read(THINK, text)[::2] == (text.removeprefix("<think>So.</think>\n"), [])


def test_calls_in_reasoning_are_ignored() -> None:
    form = MessageFormat("hermes", "qwen3")
    text = '<think><tool_call>{"name": "f", "arguments": {}}</tool_call></think>'
    assert read(form, text)[2] == []


def test_reasoning_is_streamed() -> None:
    assert emitted(THINK, "<think>So it</th")[1] == "So it"
    assert emitted(THINK, "<think>So.</think>Ye")[0] == "Ye"
