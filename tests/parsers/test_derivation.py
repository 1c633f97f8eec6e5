"""Parsers derived from chat templates: small templates in the main notations, and templates that have none."""

from __future__ import annotations

import itertools
import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ferrule import InvalidParameterError
from ferrule._text.derivation import derive_format
from ferrule._text.parsers import MessageFormat, reasoning_parser_for, tool_call_parser_for
from parsers.read import Calls, in_pieces, read
from parsers.round_trip import SPECIAL_TOKENS, TOOLS, round_trip

ABBREVIATIONS = {
    "LOOP": "{% for c in m.tool_calls or [] %}{% set f = c.function %}",
    "ITEMS": "{% for k, v in f.arguments.items() %}",
    "JSON": "{{ f.arguments | tojson }}",
    "COMMA": "{{ ', ' if not loop.last }}",
}


def template(calls: str, *, reasoning: str = "") -> str:
    """Returns a template that renders calls in a loop, with text before LOOP and after END around all calls."""
    before, loop, each = calls.partition("LOOP")
    each, _, after = each.partition("END")
    body = f"{loop}{each}{{% endfor %}}"
    for name, text in ABBREVIATIONS.items():
        body = body.replace(name, text)
    return (
        "{{ tools | tojson }}{% for m in messages %}<|{{ m.role }}|>"
        f"{{% if m.reasoning_content %}}{reasoning}{{% endif %}}{{{{ m.content }}}}"
        f"{{% if m.tool_calls %}}{before}{body}{after}{{% endif %}}{{{{ eos_token }}}}{{% endfor %}}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )


TEMPLATES = {
    "JSON objects in tags": template('LOOP<call>{"name": "{{ f.name }}", "args": JSON}</call>\n'),
    "JSON lines in a section": template('<calls>\nLOOP{"tool": "{{ f.name }}", "parameters": JSON}\nEND</calls>'),
    "a JSON list": template('[CALLS][LOOP{"name": "{{ f.name }}", "arguments": JSON}COMMAEND][/CALLS]'),
    "OpenAI's objects": template(
        'LOOP<call>{"type": "function", "function": {"name": "{{ f.name }}", "arguments": JSON}}</call>'
    ),
    "names as keys": template('<|calls|>[LOOP{"{{ f.name }}": JSON}COMMAEND]<|/calls|>'),
    "names, then JSON": template("LOOPAction: {{ f.name }}\nAction Input: JSON\nEND"),
    "ids and numbers": template(
        "<|section|>LOOP<|call|>{{ c.id }} no. {{ loop.index }} {{ f.name }}<|args|>JSON<|/call|>END<|/section|>"
    ),
    "JSON in a tag with the name": template("LOOP<fn={{ f.name }}>JSON</fn>"),
    "keys and values": template("LOOP<call>{{ f.name }}\nITEMS<k>{{ k }}</k>\n<v>{{ v }}</v>\n{% endfor %}</call>\n"),
    "attributes": template(
        '<calls>\nLOOP<invoke name="{{ f.name }}">\nITEMS'
        '<parameter name="{{ k }}">{{ v }}</parameter>\n{% endfor %}</invoke>\nEND</calls>'
    ),
    "attributes with types": template(
        'LOOP<invoke name="{{ f.name }}">ITEMS'
        '<arg key="{{ k }}" string="{{ "true" if v is string else "false" }}">{{ v }}</arg>{% endfor %}</invoke>'
    ),
    "keys as tags": template("LOOP<call name='{{ f.name }}'>ITEMS<{{ k }}>{{ v }}</{{ k }}>{% endfor %}</call>"),
    "quoted values": template(
        "LOOP<call>{{ f.name }}ITEMS<k>{{ k }}<v>{{ v | tojson if v is string else v }}</v>{% endfor %}</call>"
    ),
    "a Python list": template(
        "<|calls|>[LOOP{{ f.name }}(ITEMS{{ k }}={{ v | tojson }}COMMA{% endfor %})COMMAEND]<|/calls|>"
    ),
    "Python calls": template("LOOP<code>{{ f.name }}(ITEMS{{ k }}={{ v | tojson }}COMMA{% endfor %})</code>"),
    "a single call": template('LOOP{% if loop.first %}<call>{"name": "{{ f.name }}", "args": JSON}</call>{% endif %}'),
    "reasoning": template(
        "LOOP<call>{{ f.name }} JSON</call>", reasoning="<reason>\n{{ m.reasoning_content }}\n</reason>\n\n"
    ),
    "reasoning and calls in channels": template(
        "LOOP<|channel:call|>{{ f.name }}<|json|>JSON<|close|>",
        reasoning="<|channel:thoughts|>{{ m.reasoning_content }}<|close|>",
    ),
}


@pytest.mark.parametrize("name", sorted(TEMPLATES))
def test_derived_parser_reads_what_the_template_renders(name: str) -> None:
    source = TEMPLATES[name]
    assert tool_call_parser_for(source) is None, "another parser is made for it"
    result = round_trip(source)
    assert result.calls == "template"
    assert not result.problems
    assert ("reasoning" in name) == (result.reasoning == "template") == ("reasoning" not in result.omitted)
    assert ("single" in name) == ("calls" in result.omitted)


PARSERS = {name: derive_format(source, SPECIAL_TOKENS) for name, source in TEMPLATES.items()}


INVOKE = '<invoke name="f">'


def derived(name: str) -> MessageFormat:
    return MessageFormat(PARSERS[name].calls, PARSERS[name].reasoning, tools=TOOLS)


@pytest.mark.parametrize(
    ("name", "text", "content", "calls"),
    [
        # White space between markers, text around calls, and calls without arguments.
        ("JSON objects in tags", 'Yes. <call> {"name": "f", "args": {}} </call>', "Yes.", [("f", "{}")]),
        ("JSON objects in tags", 'a <call>{"name": "f", "args": {}}</call> b', "a b", [("f", "{}")]),
        ("JSON objects in tags", '<call>{"name": "f", "arguments": {}}</call>', None, [("f", "{}")]),
        ("OpenAI's objects", '<call>{"function": {"arguments": {}, "name": "f"}}</call>', None, [("f", "{}")]),
        ("attributes", '<calls><invoke name="f"></invoke></calls>', None, [("f", "{}")]),
        ("attributes", '<invoke name="f"><parameter name="a">1</parameter></invoke>', None, [("f", '{"a": "1"}')]),
        ("JSON in a tag with the name", "<fn=f></fn>", None, [("f", "{}")]),
        # Types: those of the notation, those that the tools declare, and strings otherwise.
        ("attributes with types", f'{INVOKE}<arg key="a" string="true">1</arg></invoke>', None, [("f", '{"a": "1"}')]),
        ("attributes with types", f'{INVOKE}<arg key="a" string="false">[1]</arg>', None, [("f", '{"a": [1]')]),
        ("keys and values", "<call>get_weather\n<k>days</k><v>3</v></call>", None, [("get_weather", '{"days": 3}')]),
        ("keys and values", "<call>get_weather\n<k>city</k><v>3</v></call>", None, [("get_weather", '{"city": "3"}')]),
        ("quoted values", '<call>f<k>a<v>"\\n1"</v><k>b<v>[1]</v></call>', None, [("f", '{"a": "\\n1", "b": [1]}')]),
        ("keys and values", "<call>f\n<k>a</k><v><![CDATA[<b>]]></v></call>", None, [("f", '{"a": "<b>"}')]),
        # Text that is not in the notation is content.
        ("names, then JSON", "Action: none", "Action: none", []),
        ("names, then JSON", "Action: f\nAction Input: none", "Action: f\nAction Input: none", []),
        ("attributes", '<calls>\n<invoke name=""></invoke>', '<calls>\n<invoke name=""></invoke>', []),
        ("ids and numbers", "<|section|><|call|>x no. y", "<|section|><|call|>x no. y", []),
        # Output that ends early.
        ("attributes", '<invoke name="f"><parameter name="a">1', None, [("f", '{"a": "1')]),
        ("names, then JSON", 'Action: f\nAction Input: {"a": 1', None, [("f", '{"a": 1')]),
    ],
)
def test_derived_parsers_read_other_texts(name: str, text: str, content: str | None, calls: Calls) -> None:
    assert read(derived(name), text) == (content, None, calls)


def test_ids_of_the_model_are_kept() -> None:
    text = "<|section|><|call|>x7 no. 1 f<|args|>{}<|/call|><|/section|>"
    assert [call.id for call in derived("ids and numbers").parse(text).tool_calls] == ["x7"]


def test_end_of_reasoning_without_its_beginning_is_dropped() -> None:
    assert read(derived("reasoning"), "</reason>\n\nYes.") == ("Yes.", None, [])
    assert read(derived("reasoning"), "Yes. </reason>") == ("Yes. </reason>", None, [])


def test_structures_of_calls() -> None:
    """JSON objects in tags can be constrained to the schemas of tools; other notations only to their first marker."""
    plain = derive_format(template('LOOP<call>{"name": "{{ f.name }}", "arguments": JSON}</call>'), {}).calls
    assert plain is not None
    assert (plain.begin, plain.json_end) == ("<call>", "</call>")
    assert {"<call>", "</call>"} <= plain.keep
    for name in ("JSON objects in tags", "JSON lines in a section", "a JSON list", "keys and values"):
        calls = PARSERS[name].calls
        assert calls is not None
        assert calls.begin
        assert not calls.json_end


WORD = re.compile(r"w\d+w")
FRAGMENTS = re.compile(r"<[^<>{}]*>|\w+=?|\S")


@pytest.mark.parametrize("name", sorted(TEMPLATES))
@settings(max_examples=60)
@given(data=st.data(), cuts=st.lists(st.integers(0, 500), max_size=8))
def test_any_split_gives_the_same_message_and_no_text_is_lost(name: str, data: st.DataObject, cuts: list[int]) -> None:
    form = derived(name)
    source = TEMPLATES[name].partition("{% set f = c.function %}")[2]
    fragments = [*FRAGMENTS.findall(re.sub(r"\{[{%].*?[%}]\}", " f ", source)), "#", "#", " ", "{}", '{"a": "#"}']
    words = itertools.count()
    text = re.sub(
        "#", lambda _: f"w{next(words)}w", "".join(data.draw(st.lists(st.sampled_from(fragments), max_size=25)))
    )
    whole = form.parse(text, seed=0)
    bounds = sorted([0, len(text), *(cut % (len(text) + 1) for cut in cuts)])
    assert in_pieces(form, [text[start:end] for start, end in itertools.pairwise(bounds)]) == whole
    assert in_pieces(form, text) == whole
    told = [whole.content or "", whole.reasoning or "", *(f"{call.name} {call.arguments}" for call in whole.tool_calls)]
    if name != "ids and numbers":  # an id may be any word
        assert set(WORD.findall(text)) <= set(WORD.findall(" ".join(told)))


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{% for m in messages %}{{ m.content }}{% endfor %}", "does not render tool calls"),
        ("{{ tools }}", "does not render the answer"),
        ("{{ raise_exception('no') }}", "refuses a conversation: chat template: no"),
        ("{% for %}", "refuses a conversation"),
        ("{% for m in messages %}{% for i in range(10000000) %}{% endfor %}{% endfor %}", "refuses a conversation"),
        ("{% for m in messages %}{{ m.content }}{{ 'x' * 5000 }}{% endfor %}", "renders a turn of more than 4096"),
        (template('LOOP{"name": "{{ f.name }}", "arguments": JSON}'), "do not begin with a marker"),
        (
            template("LOOP<call>{{ f.name }}ITEMS {{ k }} {{ v }}{% endfor %}</call>"),
            "do not begin with a marker",
        ),
        (template("LOOP<call>JSON{{ f.name }}</call>"), "does not read the calls"),
        (template("LOOP<call>{{ f.name | upper }} JSON</call>"), "does not render tool calls"),
        (template("LOOP<{{ 'a' * loop.length }}>{{ f.name }} JSON</call>"), "written differently"),
    ],
)
def test_templates_without_a_notation(source: str, reason: str) -> None:
    found = derive_format(source, SPECIAL_TOKENS)
    assert found.calls is None
    assert reason in found.no_calls
    with pytest.raises(InvalidParameterError, match=r"tool_call_parser .*'template'"):
        found.required_calls()
    with pytest.raises(InvalidParameterError, match="another parser"):
        found.required_reasoning()


def test_slow_templates_are_given_up() -> None:
    """A template spends nearly its limit of processor time in each rendering."""
    slow = "{% for m in messages %}{{ m.content }}{% endfor %}{% for i in range(20000) %}{% set x = i %}{% endfor %}"
    start = time.thread_time()
    derive_format(slow, {"bos_token": "for this test"})
    assert time.thread_time() - start < 30


def test_deeply_nested_arguments_are_not_read() -> None:
    """The second call has arguments that the JSON parser of Python refuses with RecursionError."""
    nested = "{{ '{\"a\":' + '[' * 1800 + ']' * 1800 + '}' }}"
    arguments = f"{{% if loop.first %}}JSON{{% else %}}{nested}{{% endif %}}"
    found = derive_format(template(f"LOOP<call>{{{{ f.name }}}} {arguments}</call>"), SPECIAL_TOKENS)
    assert "does not read the calls" in found.no_calls


def test_derivation_runs_once() -> None:
    source = TEMPLATES["attributes"]
    assert derive_format(source, SPECIAL_TOKENS) is derive_format(source, dict(SPECIAL_TOKENS))


def test_parsers_that_are_made_for_a_template_come_first() -> None:
    source = template('LOOP<tool_call>{"name": "{{ f.name }}", "arguments": JSON}</tool_call>')
    assert round_trip(source).calls == "hermes"
    assert derive_format(source, SPECIAL_TOKENS).calls is not None
    thinking = template("LOOP<call>{{ f.name }} JSON</call>", reasoning="<think>{{ m.reasoning_content }}</think>")
    assert reasoning_parser_for(thinking) == round_trip(thinking).reasoning == "deepseek_r1"
