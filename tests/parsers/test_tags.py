"""Parsers of calls in tags: Seed-OSS, Functionary, Apriel and Jamba, Cohere, Solar Open."""

from __future__ import annotations

import pytest

from ferrule._text.parsers import MessageFormat
from parsers.read import WEATHER, Calls, emitted, read

SEED = MessageFormat("seed_oss", "seed_oss", tools=WEATHER)
PARIS = '{"city": "Paris"}'


def solar_call(name: str, arguments: str) -> str:
    return f"<|tool_call:begin|>a1b2c3d4e5<|tool_call:name|>{name}<|tool_call:args|>{arguments}<|tool_call:end|>"


def cohere_calls(*names: str) -> str:
    calls = [f'    {{"tool_call_id": "0", "tool_name": "{name}", "parameters": {PARIS}}}' for name in names]
    return "<|START_ACTION|>[\n" + ",\n".join(calls) + "\n]<|END_ACTION|>"


@pytest.mark.parametrize(
    ("name", "text", "content", "calls"),
    [
        (
            "functionary",
            f"<function=get_weather>{PARIS}</function><function=f>\n{{}}\n</function>",
            None,
            [("get_weather", PARIS), ("f", "{}")],
        ),
        ("functionary", f"Sure.\n<function=get_weather>{PARIS}", "Sure.", [("get_weather", PARIS)]),
        ("functionary", "The <function=f> tag.</function>", "The <function=f> tag.</function>", []),
        ("functionary", "<function=>{}", "<function=>{}", []),
        (
            "apriel",
            f'<tool_calls>[{{"name": "get_weather", "arguments": {PARIS}, "id": "x"}}, {{"name": "f"}}]</tool_calls>.',
            ".",
            [("get_weather", PARIS), ("f", "{}")],
        ),
        ("jamba", "<tool_calls>none</tool_calls>", "<tool_calls>none</tool_calls>", []),
        ("jamba", '<tool_calls>[{"name": "f", "arguments": {"a', None, [("f", '{"a')]),
        ("cohere_command3", cohere_calls("get_weather", "f"), None, [("get_weather", PARIS), ("f", PARIS)]),
        (
            "solar_open",
            f"<|tool_calls|>{solar_call('get_weather', PARIS)}{solar_call('f', '{}')}<|calls|>",
            None,
            [("get_weather", PARIS), ("f", "{}")],
        ),
        ("solar_open", "<|tool_call:begin|>a1<|tool_call:name|>f", "<|tool_call:begin|>a1<|tool_call:name|>f", []),
        ("solar_open", solar_call("f", "x"), solar_call("f", "x"), []),
    ],
)
def test_calls(name: str, text: str, content: str | None, calls: Calls) -> None:
    assert read(MessageFormat(name), text) == (content, None, calls)


def test_seed_oss_values_are_the_whole_text() -> None:
    call = (
        "<seed:tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n"
        "<parameter=days>3</parameter>\n</function>\n</seed:tool_call>"
    )
    arguments = '{"city": "\\nParis\\n", "days": 3}'
    text = f"<seed:think>So.</seed:think>\n{call}\n{call}"
    assert read(SEED, text) == (None, "So.", [("get_weather", arguments)] * 2)


def test_reasoning_before_calls() -> None:
    cohere = MessageFormat("cohere_command3", "cohere_command3")
    text = "<|START_THINKING|>So.<|END_THINKING|>" + cohere_calls("f")
    assert read(cohere, text) == (None, "So.", [("f", PARIS)])
    solar = MessageFormat("solar_open", "solar_open")
    text = f"<|think|>So.<|end|><|begin|>assistant<|tool_calls|>{solar_call('f', '{}')}<|calls|>"
    assert read(solar, text) == (None, "So.", [("f", "{}")])
    assert solar.parse(text).tool_calls[0].id == "a1b2c3d4e5"
    assert solar.keep >= {"<|think|>", "<|end|>", "<|content|>", "<|tool_call:args|>"}


def test_arguments_are_streamed() -> None:
    assert emitted(MessageFormat("functionary"), '<function=f>{"a": [1')[2] == [("f", '{"a": [1')]
    unfinished = solar_call("f", '{"a": 1').removesuffix("<|tool_call:end|>")
    assert emitted(MessageFormat("solar_open"), unfinished)[2] == [("f", '{"a": 1')]
