"""Parsers of calls in tags."""

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


def kimi_call(name: str, arguments: str, number: int = 0) -> str:
    return f"<|tool_call_begin|>functions.{name}:{number}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"


KIMI_SECTION = "<|tool_calls_section_begin|>{}<|tool_calls_section_end|>"
KIMI_CALLS = (None, [("get_weather", PARIS), ("f", "{}")])


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
        (
            "lfm2",
            '<|tool_call_start|>[get_weather(city="Paris"), f()]<|tool_call_end|>Ok.',
            "Ok.",
            [("get_weather", PARIS), ("f", "{}")],
        ),
        (
            "lfm2",
            f'<|tool_call_start|>[{{"name": "get_weather", "arguments": {PARIS}}}]<|tool_call_end|>',
            None,
            [("get_weather", PARIS)],
        ),
        ("lfm2", "<|tool_call_start|>[]<|tool_call_end|>", "<|tool_call_start|>[]<|tool_call_end|>", []),
        (
            "olmo3",
            'Sure.\n<function_calls>\nget_weather(city="Paris")\nf()\n</function_calls>',
            "Sure.",
            [("get_weather", PARIS), ("f", "{}")],
        ),
        ("olmo3", "<function_calls>none</function_calls>", "<function_calls>none</function_calls>", []),
        ("kimi_k2", KIMI_SECTION.format(kimi_call("get_weather", PARIS) + kimi_call("f", "{}", 1)), *KIMI_CALLS),
        ("kimi_k2", "<|tool_call_begin|>functions.f:0 {}", "<|tool_call_begin|>functions.f:0 {}", []),
        (
            "apertus",
            f'Ok. <|tools_prefix|>[{{"get_weather": {PARIS}}}, {{"f": {{}}}}]<|tools_suffix|>',
            "Ok.",
            [("get_weather", PARIS), ("f", "{}")],
        ),
        ("apertus", '<|tools_prefix|>[{"f": 3}]', '<|tools_prefix|>[{"f": 3}]', []),
        (
            "nemotron_json",
            f'<TOOLCALL>[{{"name": "get_weather", "arguments": {PARIS}}}]</TOOLCALL>',
            None,
            [("get_weather", PARIS)],
        ),
        (
            "minimax",
            f'<tool_calls>\n{{"name": "get_weather", "arguments": {PARIS}}}\n{{"name": "f"}}\n</tool_calls>',
            None,
            [("get_weather", PARIS), ("f", "{}")],
        ),
        ("glm45", "<tool_call>f</tool_call>\n<tool_call>f\n</tool_call>", None, [("f", "{}")] * 2),
        ("glm45", '<tool_call>{"name": "f"}</tool_call>', '<tool_call>{"name": "f"}</tool_call>', []),
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


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "minimax_m2",
            '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Paris</parameter>\n'
            '<parameter name="days">3</parameter>\n</invoke>\n</minimax:tool_call>',
        ),
        (
            "glm45",
            "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n"
            "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>",
        ),
        (
            "glm45",
            "<tool_call>get_weather<arg_key>city</arg_key>\n<arg_value>Paris</arg_value><arg_key>days</arg_key>"
            "\n<arg_value>3</arg_value>\n</tool_call>",
        ),
        (
            "hunyuan_v3",
            "<tool_calls:opensource>\n<tool_call:opensource>get_weather<tool_sep:opensource>\n"
            "<arg_key:opensource>city</arg_key:opensource>\n<arg_value:opensource>Paris</arg_value:opensource>\n"
            "<arg_key:opensource>days</arg_key:opensource>\n<arg_value:opensource>3</arg_value:opensource>\n"
            "</tool_call:opensource>\n</tool_calls:opensource>",
        ),
    ],
)
def test_values_have_their_declared_types(name: str, text: str) -> None:
    arguments = '{"city": "Paris", "days": 3}'
    assert read(MessageFormat(name, tools=WEATHER), f"Sure.\n{text}") == ("Sure.", None, [("get_weather", arguments)])


def test_ids_of_kimi_are_those_of_the_model() -> None:
    text = KIMI_SECTION.format(kimi_call("get_weather", PARIS, 3))
    assert MessageFormat("kimi_k2").parse(text).tool_calls[0].id == "functions.get_weather:3"


def m3(*tags: str) -> str:
    """Returns tags and texts with MiniMax-M3's token before each tag."""
    return "".join(f"]<]minimax[>[{tag}" if tag.startswith("<") else tag for tag in tags)


@pytest.mark.parametrize(
    ("tags", "arguments"),
    [
        (["<city>", "Köln\n", "</city>"], '{"city": "Köln\\n"}'),
        (["<days>", "3", "</days>", "\n", "<metric>", "true", "</metric>"], '{"days": 3, "metric": true}'),
        ([], "{}"),
        (["<city>", "<city>", "a", "</city>", "</city>"], '{"city": {"city": "a"}}'),
        (["<spots>", "<item>", "a", "</item>", "<item>", "1", "</item>", "</spots>"], '{"spots": ["a", "1"]}'),
        (["<spots>", '["a", 1]', "</spots>"], '{"spots": ["a", 1]}'),
        (
            ["<route>", "<item>", "<lat>", "1.5", "</lat>", "<name>", "2", "</name>", "</item>", "</route>"],
            '{"route": [{"lat": 1.5, "name": "2"}]}',
        ),
        (["<where>", "<item>", "x", "</item>", "</where>"], '{"where": {"item": "x"}}'),
        (["<city>", "a", "<b>", "c", "</b>", "</city>"], '{"city": "a]<]minimax[>[<b>c]<]minimax[>[</b>"}'),
        (["<city>", "a", "</b>", "</city>"], '{"city": "a]<]minimax[>[</b>"}'),
    ],
)
def test_arguments_of_minimax_m3(tags: list[str], arguments: str) -> None:
    point = {"type": "object", "properties": {"lat": {"type": "number"}, "name": {"type": "string"}}}
    properties = WEATHER[0]["function"]["parameters"]["properties"] | {"route": {"type": "array", "items": point}}
    form = MessageFormat("minimax_m3", "minimax_m3", tools=[{"name": "f", "parameters": {"properties": properties}}])
    call = m3("<tool_call>", "\n", '<invoke name="f">', *tags, "</invoke>", "\n", "</tool_call>")
    assert read(form, f"<mm:think>So.</mm:think>Sure.{call}") == ("Sure.", "So.", [("f", arguments)])
    assert read(form, f"</mm:think>{call}{call}") == (None, None, [("f", arguments)] * 2)


def test_incomplete_calls_of_minimax_m3() -> None:
    form = MessageFormat("minimax_m3")
    for text, calls in (
        (m3("<tool_call>", "none"), []),
        (m3("<tool_call>", '<invoke name="">'), []),
        (m3('<invoke name="f">'), [("f", "")]),
        (m3('<invoke name="f">', "<a>", "b"), [("f", '{"a": "b')]),
        (m3('<invoke name="f">', "<a>", "b", "</a>", "</tool_call>"), [("f", '{"a": "b"}')]),
        (m3('<invoke name="f">', "<a>", *["<b>"] * 99, *["</b>"] * 99, "</a>", "</invoke>"), None),
    ):
        content, _, found = read(form, text)
        if calls is None:
            assert found[0][1].startswith('{"a": "]<]minimax[>[<b>'), "too deep, so a string"
        else:
            assert (found, content) == (calls, None if calls else text)


def test_reasoning_before_calls() -> None:
    cohere = MessageFormat("cohere_command3", "cohere_command3")
    text = "<|START_THINKING|>So.<|END_THINKING|>" + cohere_calls("f")
    assert read(cohere, text) == (None, "So.", [("f", PARIS)])
    solar = MessageFormat("solar_open", "solar_open")
    apertus = MessageFormat("apertus", "apertus")
    assert read(apertus, "Hm.<|inner_prefix|>So.<|inner_suffix|>Yes.") == ("Hm.Yes.", "So.", [])
    hunyuan = MessageFormat("hunyuan_v3", "hunyuan_v3")
    assert read(hunyuan, "So.</think:opensource>Yes.", reasoning_open=True) == ("Yes.", "So.", [])
    text = f"<|think|>So.<|end|><|begin|>assistant<|tool_calls|>{solar_call('f', '{}')}<|calls|>"
    assert read(solar, text) == (None, "So.", [("f", "{}")])
    assert solar.parse(text).tool_calls[0].id == "a1b2c3d4e5"
    assert solar.keep >= {"<|think|>", "<|end|>", "<|content|>", "<|tool_call:args|>"}


def test_arguments_are_streamed() -> None:
    assert emitted(MessageFormat("functionary"), '<function=f>{"a": [1')[2] == [("f", '{"a": [1')]
    unfinished = solar_call("f", '{"a": 1').removesuffix("<|tool_call:end|>")
    assert emitted(MessageFormat("solar_open"), unfinished)[2] == [("f", '{"a": 1')]
