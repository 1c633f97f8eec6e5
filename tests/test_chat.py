"""Chat templates: the same text as transformers, errors, and the sandbox."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ferrule import ChatTemplateError
from ferrule._text.chat import render_chat

GOLDEN = Path(__file__).parent / "golden" / "chat"
MESSAGES = [{"role": "user", "content": "Hi <b> é"}]
TURNS = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)


def render(template: str, messages: Any = MESSAGES, **more: Any) -> str:
    return render_chat(template, messages, special_tokens={"bos_token": "<s>"}, **more)


def golden_cases() -> Iterator[Any]:
    for file in sorted(GOLDEN.glob("*.json")):
        golden = json.loads(file.read_text())
        for number, case in enumerate(golden["cases"]):
            yield pytest.param(golden, case, id=f"{file.stem}-{number}")


@pytest.mark.parametrize(("golden", "case"), list(golden_cases()))
def test_same_text_as_transformers(golden: dict[str, Any], case: dict[str, Any]) -> None:
    """Compares the text byte for byte; errors of transformers are errors here, with the message of the template."""
    own = ("tools", "documents", "add_generation_prompt", "continue_final_message")
    kwargs = case["kwargs"]
    given = {name: kwargs[name] for name in own if name in kwargs}
    given["arguments"] = {name: value for name, value in kwargs.items() if name not in own}
    tokens = {"bos_token": golden["bos_token"], "eos_token": golden["eos_token"]}
    if "text" in case:
        assert render_chat(golden["template"], case["messages"], special_tokens=tokens, **given) == case["text"]
        return
    kind, _, words = case["error"].partition(": ")
    with pytest.raises(ChatTemplateError, match=re.escape(words) if kind == "TemplateError" else "empty"):
        render_chat(golden["template"], case["messages"], special_tokens=tokens, **given)


def test_golden_cases_exist() -> None:
    assert len(list(golden_cases())) == 60


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{{ bos_token }}{{ messages[0].content }}", "<s>Hi <b> é"),
        ("  {% if true %}\nx\n  {% endif %}\ny", "x\ny"),
        ("{{ messages[0] | tojson }}", '{"role": "user", "content": "Hi <b> é"}'),
        ("{{ {'b': 1, 'a': 2} | tojson(indent=1, sort_keys=true) }}", '{\n "a": 2,\n "b": 1\n}'),
        ("{% for m in [1, 2, 3] %}{% if m == 2 %}{% continue %}{% endif %}{{ m }}{% endfor %}", "13"),
        ("{% for m in [1, 2, 3] %}{% if m == 2 %}{% break %}{% endif %}{{ m }}{% endfor %}", "1"),
        ("a{% generation %}b{% endgeneration %}c", "abc"),
        ("{{ add_generation_prompt }}{{ tools }}{{ missing }}", "TrueNone"),
        ("{% set ns = namespace(x=1) %}{% set ns.x = 2 %}{{ ns.x }}", "2"),
        ("{% for a in range(6) if a is odd %}{{ a }}{{ ',' if not loop.last }}{% endfor %}", "1,3,5"),
        ("{% for x in [[1, [2]], [3]] recursive %}{{ loop(x) if x is iterable else x }}{% endfor %}", "123"),
        ("{% macro f(x) %}[{{ x }}{{ caller() }}]{% endmacro %}{% call f(1) %}z{% endcall %}", "[1z]"),
        ("{% set x %}a{{ 1 }}{% endset %}{{ x ~ 'b' }}{{ 'abcd'[1:3] }}{{ [1, 2][::-1] }}", "a1bbc[2, 1]"),
        ("{{ 'a' * 3 }}{{ [0] * 2 }}{{ 2 ** 10 }}{{ 7 % 4 }}{{ '%s-%03d' % ('x', 5) }}", "aaa[0, 0]10243x-005"),
        ("{{ '{}-{b:>3}'.format(1, b=2) }}{{ ', '.join(['a', 'b'] | map('upper')) }}", "1-  2A, B"),
        (
            "{{ tools | selectattr('x') | list }}{{ 'a-b'.split('-') }}{{ {'k': 1}.items() | list }}",
            "[]['a', 'b'][('k', 1)]",
        ),
        ("{{ 1 < 2 <= 2 }}{{ 'b' in 'abc' }}{{ 3 not in [1, 2] }}{{ 'x' == 'x' }}", "TrueTrueTrueTrue"),
        ("{% for g in [{'k': 1}, {'k': 1}] | groupby('k') %}{{ g.grouper }}{{ g.list | length }}{% endfor %}", "12"),
        ("{{ dict(a=1)['a'] }}{{ cycler(1, 2).next() }}{% filter upper %}a{{ 'b' }}{% endfilter %}", "11AB"),
    ],
)
def test_jinja_features(template: str, text: str) -> None:
    assert render(template) == text


@pytest.mark.parametrize("operator", ["~", "+"])
def test_templates_that_append_to_one_text_render_long_conversations(operator: str) -> None:
    """Reka's template appends three times for each message, which copies 300 MB for 60 tools and 301 messages."""
    template = """
        {%- set ns = namespace(out='') -%}
        {%- for tool in tools %}{% set ns.out = ns.out ~ '\n' ~ (tool | tojson) %}{% endfor -%}
        {%- for m in messages -%}
            {%- set ns.out = ns.out ~ m.role -%}
            {%- set ns.out = ns.out ~ ': ' ~ m.content -%}
            {%- set ns.out = ns.out ~ '</s>' -%}
        {%- endfor -%}
        {{- ns.out -}}
    """.replace("~", operator)
    tools = [{"name": f"tool_{number}", "description": "d" * 6900} for number in range(60)]
    messages = [{"role": "user", "content": f"{number} words"} for number in range(301)]
    text = render(template, messages, tools=tools)
    assert text.startswith('\n{"name": "tool_0", "description": "ddd')
    assert text.endswith("user: 299 words</s>user: 300 words</s>")
    assert len(text) > 400_000


def test_strftime_now() -> None:
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", render("{{ strftime_now('%Y-%m-%d') }}"))
    # Local time without a time zone, as in transformers.
    assert render("[{{ strftime_now('%Z') }}]") == "[]"


def test_null_fields_are_removed() -> None:
    message = {"role": "assistant", "content": None, "tool_calls": None}
    assert render("{{ messages[0] }}", [message]) == "{'role': 'assistant'}"


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_fields_are_aliases(field: str) -> None:
    message = {"role": "assistant", "content": "4", field: "2 + 2"}
    assert render("{{ messages[0].reasoning_content }}|{{ messages[0].thinking }}", [message]) == "2 + 2|2 + 2"


def test_chat_template_kwargs() -> None:
    assert render("{{ enable_thinking }}", arguments={"enable_thinking": False}) == "False"
    assert render("{{ bos_token }}", arguments={"bos_token": "<other>"}) == "<other>"


@pytest.mark.parametrize(
    "name", ["messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template"]
)
def test_reserved_arguments_cannot_be_overridden(name: str) -> None:
    with pytest.raises(ChatTemplateError, match=f"chat_template_kwargs must not have {name}, which"):
        render("", arguments={name: []})


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"messages": "Hi"}, "messages must be a list of messages, got 'Hi'"),
        ({"messages": ["Hi"]}, r"messages\[0\] must be a dict, got 'Hi'"),
        (
            {"messages": [{"role": "user", "content": {1, 2}}]},
            r"messages\[0\]\['content'\] must be a dict, list, string, number, bool or None, got \{1, 2\}",
        ),
        (
            {"messages": [{"role": 1 << 70_000}]},
            r"messages\[0\]\['role'\] must have at most 65536 bits, got a number of 70001 bits",
        ),
        ({"tools": {"a": 1}}, "tools must be a list of dicts or functions, got {'a': 1}"),
        ({"tools": [3]}, r"tools\[0\] must be a dict, got 3"),
        ({"documents": ["text"]}, r"documents\[0\] must be a dict, got 'text'"),
        ({"arguments": [1]}, r"chat_template_kwargs must be a dict, got \[1\]"),
        ({"arguments": {1: 2}}, "names in chat_template_kwargs must be strings, got 1"),
        ({"add_generation_prompt": "no"}, "add_generation_prompt must be True or False, got 'no'"),
        ({"continue_final_message": 1}, "continue_final_message must be True or False, got 1"),
    ],
)
def test_invalid_arguments(more: dict[str, Any], message: str) -> None:
    messages = more.pop("messages", MESSAGES)
    with pytest.raises(ChatTemplateError, match=message):
        render("{{ messages }}", messages, **more)


def test_recursive_values() -> None:
    itself: list[Any] = []
    itself.append(itself)
    doubled: list[Any] = ["x"]
    for _ in range(60):
        doubled = [doubled, doubled]
    for content, message in (
        (itself, "is nested too deeply; the maximum is 100 levels"),
        (doubled, "exceeds 16777216 characters"),
    ):
        with pytest.raises(ChatTemplateError, match=message):
            render("", [{"role": "user", "content": content}])


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% if %}", "line 1"),
        ("{{ messages[0]['missing']['deeper'] }}", "has no attribute 'missing'"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ messages.append(1) }}", "'append' of 'list' object is unsafe"),
        ("{% include 'x' %}", "TypeError: no loader"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "nested too deeply"),
        ("{{ 'a' | urlize }}", "No filter named 'urlize'"),
        ("{{ lipsum() }}", "'lipsum' is undefined"),
        ("{{ '\\x00'.encode('utf-8') }}", "'encode' of 'str' object is unsafe"),
        ("{{ namespace(_a=1) }}", "namespace attribute '_a' must not begin with an underscore"),
        ("{% set ns = namespace() %}{% set ns._a = 1 %}", "namespace attribute '_a' must not begin with an underscore"),
    ],
)
def test_template_errors_are_chat_template_errors(template: str, message: str) -> None:
    with pytest.raises(ChatTemplateError, match=message):
        render(template)


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__class__.__base__.__subclasses__() }}",
        "{{ raise_exception.__globals__ }}",
        "{{ namespace.__init__.__globals__ }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{{ ''|attr('__class__') }}",
        "{{ [''] | map(attribute='__class__') | list }}",
        "{{ '{0.__class__.__base__}'.format('') }}",
        "{{ '{a.__class__}'.format_map({'a': 1}) }}",
        "{{ self._TemplateReference__context.environment }}",
        "{% macro f() %}{% endmacro %}{{ f._func.__globals__ }}",
        "{{ (messages | map('upper')).gi_frame.f_builtins }}",
        "{{ dict.mro() }}{{ namespace.mro() }}",
    ],
)
def test_sandbox_blocks_python_internals(template: str) -> None:
    """The template is rejected, or its text shows no Python internals."""
    try:
        text = render(template)
    except ChatTemplateError:
        return
    assert not re.search("class|object|function|builtin|environment", text)


class TestContinueFinalMessage:
    """`continue_final_message`."""

    @pytest.mark.parametrize(
        ("template", "final", "text"),
        [
            (TURNS, "1, 2,", "<user>q</s><assistant>1, 2,"),
            (TURNS, "1, 2, ", "<user>q</s><assistant>1, 2, "),
            (TURNS.replace("m.content", "m.content | trim"), "1, 2, ", "<user>q</s><assistant>1, 2,"),
            (TURNS, "", "<user>q</s><assistant>"),
            (TURNS, "q</s><assistant>", "<user>q</s><assistant>q</s><assistant>"),
        ],
    )
    def test_the_prompt_ends_at_the_end_of_the_message(self, template: str, final: str, text: str) -> None:
        messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": final}]
        assert render(template, messages, add_generation_prompt=False, continue_final_message=True) == text

    def test_the_last_text_part_is_continued(self) -> None:
        template = "{% for m in messages %}{% for p in m.content %}[{{ p.text }}]{% endfor %}{% endfor %}"
        parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
        messages = [{"role": "assistant", "content": parts}]
        assert render(template, messages, add_generation_prompt=False, continue_final_message=True) == "[a][b"
        assert parts[1]["text"] == "b"

    @pytest.mark.parametrize("field", ["reasoning_content", "reasoning", "thinking"])
    def test_reasoning_is_continued(self, field: str) -> None:
        template = "{% for m in messages %}<think>{{ m.thinking }}</think>{{ m.content }}{% endfor %}"
        messages = [{"role": "assistant", "content": "", field: "so"}]
        text = render(template, messages, add_generation_prompt=False, continue_final_message=field)
        assert text == "<think>so"

    @pytest.mark.parametrize(
        ("template", "messages", "more", "message"),
        [
            (
                TURNS,
                MESSAGES,
                {"add_generation_prompt": True},
                "add_generation_prompt must be False with",
            ),
            ("fixed content", MESSAGES, {}, "does not render content"),
            (
                "{{ messages[0].content | upper }}",
                [{"role": "user", "content": "ab"}],
                {},
                "does not render content of the final message unchanged",
            ),
            (TURNS, [{"role": "assistant"}], {}, "the final message has no content"),
            (TURNS, [{"role": "assistant", "content": None}], {}, "the final message has no content"),
            (TURNS, [{"role": "assistant", "content": []}], {}, "content of the final message has no text part"),
            (
                TURNS,
                [{"role": "assistant", "content": 5}],
                {},
                "must be a string or a list of parts, got 5",
            ),
            (
                TURNS,
                [{"role": "assistant", "content": "", "thinking": "x"}],
                {"continue_final_message": "thinking"},
                "the chat template does not read the field thinking",
            ),
        ],
    )
    def test_errors(self, template: str, messages: Any, more: dict[str, Any], message: str) -> None:
        given = {"add_generation_prompt": False, "continue_final_message": True} | more
        with pytest.raises(ChatTemplateError, match=message):
            render(template, messages, **given)
