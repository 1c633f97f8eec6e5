"""Properties of all parsers: any split gives the same message, no text is lost, time is linear."""

from __future__ import annotations

import itertools
import json
import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ferrule._text.parsers import TOOL_CALL_PARSERS, MessageFormat, ParsedMessage
from ferrule._text.parsers.deepseek import CALL_BEGIN, CALL_END, CALLS_BEGIN, CALLS_END, SEPARATOR
from ferrule._text.parsers.dsml import PARAMETER_END
from ferrule._text.parsers.dsml import TAGS as DSML
from parsers.read import WEATHER, in_pieces

EVERYWHERE = [" ", "\n", "text", "é😀日", "{", "}", "[", "]", "(", ")", ",", ":", '"', "'", "\\", "<", "=", "0", "null"]
OBJECTS = [
    '{"name": "get_weather", "arguments": {"city": "#"}}',
    '{"name": "#", "parameters": {"#": [{"b": "}]"}, #]}}',
    '{"arguments": {"a": "#"}, "name": "f"}',
    '{"name": "#", "arguments": ',
    '{"arguments": "#", ',
    '"name": "get_time"',
    '"</tool_call>[TOOL_CALLS]<|end|>"',
    '"a \\" b \\\\"',
]
PYTHON = [
    "get_weather(city='#', days=\"3\", spots=[#, (2,), {'k': None}])",
    'f(a="""#, \')"\',""", b=\'\\\'\', #)',
    *("get_weather(", "f(a=", "city='Pa\\'ris'", "print(", '"""', "get_time()", "x=[1, (2,), {'k': #}]"),
]
M3 = "]<]minimax[>["
THINK = ["<think>", "</think>", "<think>#</think>"]
# Parts of messages, complete and incomplete; `#` stands for any word.
FORMS = {
    "hermes": (
        MessageFormat("hermes", "qwen3"),
        ["<tool_call>", "</tool_call>", *(f"<tool_call>{each}</tool_call>" for each in OBJECTS), *THINK],
    ),
    "qwen3_coder": (
        MessageFormat("qwen3_coder", "qwen3", tools=WEATHER),
        [
            "<tool_call>\n<function=get_weather>\n<parameter=city>\n#\n</parameter>\n",
            "<function=#><parameter=#>#</parameter><parameter=days>#</parameter></function>#</tool_call>",
            *("<tool_call>", "</tool_call>", "<function=get_weather>", "<function=", "</function>", "<parameter=city>"),
            *("<parameter=days>\n", "<parameter=", "</parameter>", "\n</parameter>", *THINK),
        ],
    ),
    "seed_oss": (
        MessageFormat("seed_oss", "seed_oss", tools=WEATHER),
        [
            "<seed:tool_call>\n<function=get_weather>\n<parameter=city>#</parameter>\n",
            "<function=#><parameter=#>#</parameter><parameter=days>#</parameter></function>#</seed:tool_call>",
            *("<seed:tool_call>", "</seed:tool_call>", "<function=get_weather>", "</function>", "</parameter>"),
            *("<seed:think>", "</seed:think>", "<seed:think>#</seed:think>"),
        ],
    ),
    "functionary": (
        MessageFormat("functionary"),
        [
            '<function=#>{"#": 1}#</function>#',
            *(f"<function=get_weather>{each}</function>" for each in OBJECTS),
            *("<function=", "<function=f>", "</function>"),
        ],
    ),
    "minimax_m3": (
        MessageFormat("minimax_m3", "minimax_m3", tools=WEATHER),
        [
            f'{M3}<tool_call>\n{M3}<invoke name="get_weather">{M3}<city>#{M3}</city>{M3}</invoke>\n{M3}</tool_call>#',
            f'{M3}<invoke name="#">{M3}<where>{M3}<x>#{M3}</x>#{M3}</where>{M3}</invoke>',
            f"{M3}<spots>{M3}<item>#{M3}</item>{M3}</spots>{M3}<a>{M3}<a>#{M3}</a>{M3}</a>",
            *(M3, f"{M3}<tool_call>", f"{M3}</tool_call>", f'{M3}<invoke name="f">', f"{M3}</invoke>", f"{M3}<days>"),
            *(f"{M3}</days>", f"{M3}</city>", "<mm:think>", "</mm:think>", "<mm:think>#</mm:think>#"),
        ],
    ),
    "deepseek_v4": (
        MessageFormat("deepseek_v4", "deepseek_r1", tools=WEATHER),
        [
            f'{DSML.begin}\n{DSML.call}#">\n{DSML.argument}city" string="true">#{PARAMETER_END}\n',
            f'{DSML.argument}days" string="false">#{PARAMETER_END}\n{DSML.argument}days">#{PARAMETER_END}\n',
            *(DSML.begin, DSML.end, DSML.call, f"{DSML.call_end}#", PARAMETER_END, *THINK),
        ],
    ),
    "minimax_m2": (
        MessageFormat("minimax_m2", "qwen3", tools=WEATHER),
        [
            '<minimax:tool_call>\n<invoke name="#">\n<parameter name="city">#</parameter>\n</invoke>\n',
            '<parameter name="days">#</parameter>\n</invoke>\n</minimax:tool_call>#',
            *(
                "<minimax:tool_call>",
                "</minimax:tool_call>",
                '<invoke name="',
                "</invoke>",
                '<parameter name="',
                *THINK,
            ),
        ],
    ),
    "minimax": (
        MessageFormat("minimax"),
        ["<tool_calls>", "</tool_calls>", *(f"<tool_calls>\n{each}\n{each}\n</tool_calls>" for each in OBJECTS)],
    ),
    "kimi_k2": (
        MessageFormat("kimi_k2", "qwen3"),
        [
            '<|tool_calls_section_begin|><|tool_call_begin|>functions.#:0<|tool_call_argument_begin|>{"#": 1}#',
            "<|tool_call_begin|>#<|tool_call_argument_begin|>",
            *("<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<|tool_call_end|>", "<|tool_calls_section_end|>"),
            *(*OBJECTS, *THINK),
        ],
    ),
    "lfm2": (
        MessageFormat("lfm2", "qwen3", tools=WEATHER),
        [
            *("<|tool_call_start|>", "<|tool_call_end|>", "<|tool_call_start|>[", "]<|tool_call_end|>", *PYTHON),
            *(f"<|tool_call_start|>[get_weather({each}), {each}]<|tool_call_end|>" for each in PYTHON),
            *(f"<|tool_call_start|>[{each}, {each}]" for each in OBJECTS),
        ],
    ),
    "olmo3": (
        MessageFormat("olmo3", "qwen3", tools=WEATHER),
        [
            *("<function_calls>", "</function_calls>", *PYTHON),
            *(f"<function_calls>\n{each}\nget_time()\n</function_calls>" for each in PYTHON),
        ],
    ),
    "apertus": (
        MessageFormat("apertus", "apertus"),
        [
            '<|tools_prefix|>[{"#": {"#": 1}#}, {"f": {}}]<|tools_suffix|>#',
            *("<|tools_prefix|>", "<|tools_suffix|>", "<|inner_prefix|>#<|inner_suffix|>", "<|inner_prefix|>"),
            *(f"<|tools_prefix|>[{{{each}" for each in OBJECTS),
        ],
    ),
    "nemotron_json": (
        MessageFormat("nemotron_json", "qwen3"),
        ["<TOOLCALL>", "</TOOLCALL>", *(f"<TOOLCALL>[{each}, {each}]</TOOLCALL>" for each in OBJECTS), *THINK],
    ),
    "glm45": (
        MessageFormat("glm45", "qwen3", tools=WEATHER),
        [
            "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>#</arg_value>\n</tool_call>",
            "<tool_call>#<arg_key>#</arg_key>#<arg_value>#</arg_value>#",
            *("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", *THINK),
        ],
    ),
    "hunyuan_v3": (
        MessageFormat("hunyuan_v3", "hunyuan_v3", tools=WEATHER),
        [
            "<tool_calls:opensource>\n<tool_call:opensource>#<tool_sep:opensource>\n<arg_key:opensource>#",
            "</arg_key:opensource>\n<arg_value:opensource>#</arg_value:opensource>\n</tool_call:opensource>\n",
            *("</tool_calls:opensource>", "<tool_call:opensource>", "<tool_sep:opensource>", "<think:opensource>"),
            *("</think:opensource>", "<arg_key:opensource>", "</arg_value:opensource>"),
        ],
    ),
    "jamba": (
        MessageFormat("jamba", "apriel"),
        [
            *("<tool_calls>", "</tool_calls>", *(f"<tool_calls>[{each}, {each}]</tool_calls>" for each in OBJECTS)),
            *("Here are my reasoning steps:\n#", "[BEGIN FINAL RESPONSE]\n#", "[END FINAL RESPONSE]"),
        ],
    ),
    "cohere_command3": (
        MessageFormat("cohere_command3", "cohere_command3"),
        [
            '<|START_ACTION|>[\n{"tool_call_id": "0", "tool_name": "#", "parameters": {"#": 1}}#]<|END_ACTION|>#',
            *("<|START_ACTION|>", "<|END_ACTION|>", *(f"<|START_ACTION|>[{each}, {each}]" for each in OBJECTS)),
            *("<|START_THINKING|>#<|END_THINKING|>#", "<|START_RESPONSE|>#<|END_RESPONSE|>", "<|START_TEXT|>"),
        ],
    ),
    "solar_open": (
        MessageFormat("solar_open", "solar_open"),
        [
            '<|tool_call:begin|>a1b2c3d4e5<|tool_call:name|>#<|tool_call:args|>{"#": 1}#<|tool_call:end|>#',
            *("<|tool_call:begin|>", "<|tool_call:name|>", "<|tool_call:args|>", "<|tool_call:end|>", "get_weather"),
            *("<|tool_call:begin|>#", "<|tool_calls|>", "<|calls|>", "<|begin|>assistant", "<|content|>", *OBJECTS),
            *("<|think|>#<|end|>#", "<|think|>", "<|end|>"),
        ],
    ),
    "deepseek_v3": (
        MessageFormat("deepseek_v3", "deepseek_r1"),
        [
            CALLS_BEGIN + CALL_BEGIN + "#" + SEPARATOR + '#\n```json\n{"#": 1}\n```' + CALL_END,
            CALLS_BEGIN + CALL_BEGIN + "function" + SEPARATOR + '#\n```json\n{"#": 1}#\n```#' + CALL_END,
            CALLS_BEGIN + CALL_BEGIN + "#" + SEPARATOR + '{"#": 1}#' + CALL_END + "#" + CALLS_END,
            *(CALLS_BEGIN, CALLS_END, CALL_BEGIN, CALL_END, SEPARATOR, "function", "get_weather", "```json", "```"),
            *(*OBJECTS, *THINK),
        ],
    ),
    "mistral": (
        MessageFormat("mistral", "mistral"),
        [
            '#[TOOL_CALLS]#[ARGS]{"#": [#',
            "[TOOL_CALLS]#[CALL_ID]abcDEF123[ARGS]{}",
            "[TOOL_CALLS]f[CALL_ID]#[ARGS]{}",
            *(f"[TOOL_CALLS][{each}, {each}]" for each in OBJECTS),
            *("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "abcDEF123", "get_weather", "[THINK]", "[/THINK]", "[THINK]#"),
        ],
    ),
    "openai": (
        MessageFormat("openai", "openai_gptoss"),
        [
            "<|channel|>analysis<|message|>#<|end|>#<|start|>assistant",
            '<|channel|>commentary to=functions.# <|constrain|>json<|message|>{"#": 1}<|call|>',
            " to=functions.#<|channel|>commentary<|message|>#",
            "<|channel|>#<|end|>",
            *("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>", "<|return|>"),
            *("assistant", "analysis", "commentary", "final", "json", " to=functions.f", "to=", *OBJECTS),
        ],
    ),
    "llama3_json": (
        MessageFormat("llama3_json", "deepseek_r1"),
        [
            *("<|python_tag|>", "<|python_start|>", "<|python_end|>", ";", "<|python_tag|>#"),
            *(f"<|python_tag|>{each};" for each in OBJECTS),
            *(f"[{each}, {each}]<|python_end|>" for each in OBJECTS),
            *(*OBJECTS, *THINK),
        ],
    ),
    "pythonic": (
        MessageFormat("pythonic", tools=WEATHER),
        [
            *("<|python_tag|>", "<|python_start|>", "<|python_end|>", "[get_weather(", *PYTHON),
            *(f"<|python_start|>[get_weather({each}), {each}]" for each in PYTHON),
        ],
    ),
    "gemma3": (
        MessageFormat("gemma3"),
        [
            *("```tool_code\n", "```json\n", "```", "`", *PYTHON, *OBJECTS),
            *(f"#```tool_code\n{each}\nprint({each})\n#```" for each in PYTHON),
            *(f"```json\n{each}\n```" for each in OBJECTS),
        ],
    ),
    "gemma4": (
        MessageFormat("gemma4", "gemma4"),
        [
            '<|tool_call>call:#{#:<|"|>#}<|"|>,n:[#,{#:1}]}#<tool_call|>',
            "<|channel>thought\n#<channel|>#",
            "<|tool_call>call:f{#}#<tool_call|>#",
            "<|tool_call>call:#{#:[#}#]<tool_call|>",
            *("<|tool_call>", "<tool_call|>", "call:", "get_weather", '<|"|>', "city:", "<|channel>", "thought\n"),
            *("<channel|>", "<|tool_call>call:f{", "<|channel>thought\n", "true"),
        ],
    ),
    "functiongemma": (
        MessageFormat("functiongemma"),
        [
            "<start_function_call>call:#{#:<escape>#}<escape>,n:#}<end_function_call>#",
            *("<start_function_call>", "<end_function_call>", "call:", "f{", "<escape>", "a:"),
        ],
    ),
}
NAMES = sorted(FORMS)
HEADER = re.compile(
    r"(?:<\|start\|>|<\|channel\|>|^\s*to=)(?:(?!<\|(?:start|end|call|return)\|>).)*?<\|message\|>", re.DOTALL
)
WORD = re.compile(r"w\d+w")


def texts(name: str) -> st.SearchStrategy[str]:
    """Generates texts of markers, parts of markers, and text between them."""
    fragments = FORMS[name][1]
    halves = [fragment[: len(fragment) // 2] for fragment in fragments]
    rests = [fragment[len(fragment) // 2 :] for fragment in fragments]
    several = [*EVERYWHERE, *fragments, *fragments, *halves, *rests]
    return st.lists(st.sampled_from(several), max_size=20).map("".join)


def pieces(text: str, cuts: list[int]) -> list[str]:
    """Splits a text into pieces, some of which may be empty."""
    bounds = sorted([0, len(text), *(cut % (len(text) + 1) for cut in cuts)])
    return [text[start:end] for start, end in itertools.pairwise(bounds)]


def everything(message: ParsedMessage) -> str:
    """Returns all text of a message."""
    parts = [message.content or "", message.reasoning or ""]
    return "\0".join(parts + [text for call in message.tool_calls for text in (call.name, call.arguments)])


def test_every_parser_has_examples() -> None:
    assert {family.names[0] for family in TOOL_CALL_PARSERS} == set(FORMS)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=100)
@given(data=st.data(), cuts=st.lists(st.integers(0, 2000), max_size=12), reasoning_open=st.booleans())
def test_any_split_gives_the_same_message(
    name: str, data: st.DataObject, cuts: list[int], reasoning_open: bool
) -> None:
    form, text = FORMS[name][0], data.draw(texts(name))
    whole = form.parse(text, seed=0, reasoning_open=reasoning_open)
    assert in_pieces(form, pieces(text, cuts), reasoning_open=reasoning_open) == whole
    assert in_pieces(form, text, reasoning_open=reasoning_open) == whole


LARGE = "0x" + "f" * 4000  # more digits than Python writes


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("pythonic", f"[get_weather(days={LARGE}, spots=[{LARGE}], where={{{LARGE}: 1}})]"),
        ("gemma3", f"```tool_code\nprint(f(days={LARGE}))\n```"),
        ("qwen3_coder", f"<function=get_weather><parameter=spots>[{LARGE}]</parameter></function></tool_call>"),
    ],
)
def test_huge_number_becomes_string(name: str, text: str) -> None:
    form = FORMS[name][0]
    whole = form.parse(text, seed=0)
    assert LARGE in next(iter(json.loads(whole.tool_calls[0].arguments).values()))
    assert in_pieces(form, text) == whole


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=100)
@given(data=st.data(), reasoning_open=st.booleans())
def test_no_text_is_lost(name: str, data: st.DataObject, reasoning_open: bool) -> None:
    """All words of a text are part of the message, except harmony's headers."""
    form = FORMS[name][0]
    fragments = [*FORMS[name][1], " ", "\n", "{", "}", "[", "]", "(", ")", ",", "#", "#"]
    drawn = "".join(data.draw(st.lists(st.sampled_from(fragments), max_size=15)))
    words = itertools.count()
    text = re.sub("#", lambda _: f"w{next(words)}w", drawn)
    message = form.parse(text, reasoning_open=reasoning_open)
    if name == "openai":
        text = HEADER.sub("", text)
    assert set(WORD.findall(text)) <= set(WORD.findall(everything(message)))


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=100)
@given(text=st.text("ab {}:;.,\"'\\\n\t\u00a0é日😀()", max_size=60))
def test_text_without_a_marker_is_content_to_the_last_character(name: str, text: str) -> None:
    form = MessageFormat(FORMS[name][0].tool_call_parser, FORMS[name][0].reasoning_parser, tools=[])
    assert form.parse(text) == ParsedMessage(text or None, None, [])


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=100)
@given(data=st.data(), cuts=st.lists(st.integers(0, 2000), min_size=1, max_size=12))
def test_emitted_text_is_final(name: str, data: st.DataObject, cuts: list[int]) -> None:
    form, text = FORMS[name][0], data.draw(texts(name))
    whole = form.parse(text, seed=0)
    for end in {cut % (len(text) + 1) for cut in cuts}:
        parser = form.parser(seed=0)
        so_far = parser.feed(text[:end])
        assert (whole.content or "").startswith(so_far.content or "")
        assert (whole.reasoning or "").startswith(so_far.reasoning or "")
        for call, known in zip(whole.tool_calls, so_far.tool_calls, strict=False):
            assert (call.id, call.name) == (known.id, known.name)
            assert call.arguments.startswith(known.arguments)
        assert len(so_far.tool_calls) <= len(whole.tool_calls)


BEGINNINGS = [
    *((name, "") for name in NAMES),
    ("hermes", '<tool_call>{"name": "f", "arguments": '),
    ("hermes", '<tool_call>{"arguments": "'),
    ("qwen3_coder", "<function=f><parameter=a>"),
    ("qwen3_coder", "<function=get_weather><parameter=days>"),
    ("openai", "<|channel|>"),
    ("pythonic", "[get_weather(city="),
    ("pythonic", "[get_weather("),
    ("gemma4", "<|tool_call>call:f{a:"),
    ("minimax_m3", f'{M3}<invoke name="get_weather">{M3}<where>{M3}'),
]
LENGTH, SECONDS = 300_000, 10
"""Number of characters, and most seconds that parsing them takes."""


@pytest.mark.parametrize(("name", "beginning"), BEGINNINGS)
def test_parsing_takes_linear_time(name: str, beginning: str) -> None:
    """Parses 300,000 characters in at most 10 s of processor time; quadratic time would take an hour."""
    form = FORMS[name][0]
    for character in "<{[":
        start = time.process_time()
        text = beginning + character * LENGTH
        found = everything(form.parse(text))
        assert found.count(character) >= LENGTH - 1
        assert time.process_time() - start < SECONDS
    start = time.process_time()
    parser = form.parser()
    for character in beginning + "{" * (LENGTH // 10):
        parser.feed(character)
    assert time.process_time() - start < SECONDS
