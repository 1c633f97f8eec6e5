"""Parsers by name, and detection of the parser from a chat template."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from ferrule import InvalidParameterError
from ferrule._text.parsers import (
    REASONING_PARSERS,
    TOOL_CALL_PARSERS,
    MessageFormat,
    reasoning_parser_for,
    tool_call_parser_for,
)


@pytest.mark.parametrize(
    ("template", "calls", "reasoning"),
    [
        ("{{ '<|im_start|>assistant\\n' }}{{ '<tool_call>\\n{\"name\": \"' }}", "hermes", None),
        ("{{ '<tool_call>' }}{{ '<think>\\n\\n</think>' }}", "hermes", "deepseek_r1"),
        ("{{ '<tool_call>\\n<function=' + name }}{{ '</think>' }}", "qwen3_coder", "deepseek_r1"),
        ("{{ '<｜tool▁calls▁begin｜>' }}{{ content.split('</think>') }}", "deepseek_v3", "deepseek_r1"),  # noqa: RUF001
        ("{{ '[TOOL_CALLS]' }}{{ '[THINK]' }}", "mistral", "mistral"),
        ("{{ '[INST]' }}{{ '[TOOL_CALLS] [' }}", "mistral", None),
        ("{{ '<|start|>assistant<|channel|>analysis<|message|>' }}", "openai", "openai_gptoss"),
        ("{{ '<|python_tag|>' }}{{ '\"parameters\": ' }}", "llama3_json", None),
        ("{{ '<|python_start|>' }}", "llama3_json", None),
        ("in the format of [func_name1(params_name1=...)]{{ '<|python_tag|>' }}", "pythonic", None),
        ("{{ '<start_of_turn>model' }}", "gemma3", None),
        ("{{ '<start_of_turn>model' }}{{ '<start_function_call>call:' }}", "functiongemma", None),
        ("{{ '<|tool_call>call:' }}{{ '<|channel>thought' }}", "gemma4", "gemma4"),
        ("{{ '<tool_call>' }}{{ '<arg_key>' }}", "glm45", None),
        ("{{ '<arg_key>' + k + '</arg_key>' }}{{ '\\n<think>' }}<tool_call>{{ '</think>' }}", "glm45", "deepseek_r1"),
        ("{%- set a = '<arg_key{}>'.format(x) %}{%- set b = '<think{}>'.format(x) %}", *["hunyuan_v3"] * 2),
        ("List of tools: <|tool_list_start|>[", "lfm2", None),
        ("{{ 'List of tools: [' }}{{ content.split('</think>')[-1] }}", "lfm2", "deepseek_r1"),
        ('{{- "<|tool_call_start|>[" + calls + "]<|tool_call_end|>" -}}', "lfm2", None),
        ("<|tool_calls_section_begin|><|tool_call_begin|>{{ id }}<think></think>", "kimi_k2", "deepseek_r1"),
        ("{%- set a = '<|tools_prefix|>' -%}{%- set b = '<|inner_prefix|>' -%}", *["apertus"] * 2),
        ("{{ '<TOOLCALL>[' }}{{ '<think>' }}", "nemotron_json", "deepseek_r1"),
        ("{{ '<function_calls>' + calls + '</function_calls>' }}", "olmo3", None),
        ("{%- set a = '<minimax:tool_call>' -%}{{ '<think>' }}", "minimax_m2", "deepseek_r1"),
        ("respond with <tool_calls></tool_calls> XML tags", "minimax", None),
        # Lines of published templates.
        (
            """{{- 'Respond in the format {"name": function name, "parameters": dictionary of argument name and its """
            "value}.' }}",  # Llama 3.2
            "llama3_json",
            None,
        ),
        (
            "within <tool_call></tool_call> XML tags{{ '[BEGIN FINAL RESPONSE]' }}{{- '\\n<tool_calls>[' -}}",
            "jamba",
            "apriel",
        ),
        ("{{ '<function=' + tool_call['function']['name'] + '>' + arguments + '</function>' }}", "functionary", None),
        ("{%- set toolcall_begin_token   = '<seed:tool_call>' -%}<function=<parameter=<seed:think>", *["seed_oss"] * 2),
        ("<|START_THINKING|>{{message.reasoning_content}}<|END_THINKING|><|START_ACTION|>[", *["cohere_command3"] * 2),
        (
            '{{- "<|begin|>assistant<|think|>" + message.reasoning + "<|end|>" }}{{- "<|tool_call:begin|>" + id }}',
            *["solar_open"] * 2,
        ),
        ("{%- set ns_token = ']<]minimax[>[' -%}{{ ns_token ~ '<tool_call>' }}<mm:think>", *["minimax_m3"] * 2),
        (
            "{%- set dsml_token = '|DSML|' -%}{{- '<' + dsml_token + 'tool_calls>' -}}</think>",
            "deepseek_v4",
            "deepseek_r1",
        ),
        ("{%- set dsml_token = '|DSML|' -%}{{- '<' + dsml_token + 'function_calls>' -}}</think>", None, "deepseek_r1"),
        ("{{ '<tool_calls>' }}{{ '<|tool_call|>' }}", None, None),
        ("{{ '<|user|>' }}", None, None),
    ],
)
def test_parsers_are_detected_from_the_template(template: str, calls: str | None, reasoning: str | None) -> None:
    assert tool_call_parser_for(template) == calls
    assert reasoning_parser_for(template) == reasoning


def test_parsers_are_detected_from_the_model_type_without_a_template() -> None:
    assert tool_call_parser_for("", "gpt_oss") == "openai"
    assert reasoning_parser_for("", "gpt_oss") == "openai_gptoss"
    assert tool_call_parser_for("", "deepseek_v4") == "deepseek_v4"
    assert reasoning_parser_for("", "deepseek_v4") == "deepseek_r1"
    assert tool_call_parser_for("", "llama") is None
    assert tool_call_parser_for("{{ '<tool_call>' }}", "gpt_oss") == "hermes"


def test_names_are_unique() -> None:
    for families in (TOOL_CALL_PARSERS, REASONING_PARSERS):
        names = [name for family in families for name in family.names]
        assert len(set(names)) == len(names)
    for family in TOOL_CALL_PARSERS:
        for name in family.names:
            assert MessageFormat(name).tool_call_parser == family.names[0]
    for thinker in REASONING_PARSERS:
        for name in thinker.names:
            assert MessageFormat(None, name).reasoning_parser == thinker.names[0]


def test_special_tokens_to_keep() -> None:
    assert MessageFormat("mistral").keep == {"[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"}
    assert MessageFormat("hermes", "qwen3").keep == {"<tool_call>", "</tool_call>", "<think>", "</think>"}
    assert "<|channel|>" in MessageFormat(None, "openai_gptoss").keep
    assert '<|"|>' in MessageFormat("gemma4").keep
    assert MessageFormat("gemma3").keep == set()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: MessageFormat("hermse"), "tool_call_parser must be one of hermes, "),
        (lambda: MessageFormat("qwen3"), "tool_call_parser must be one of qwen3_"),
        (lambda: MessageFormat(3), "tool_call_parser must be one of "),  # type: ignore[arg-type]
        (lambda: MessageFormat(None, "hermes"), "reasoning_parser must be one of "),
        (lambda: MessageFormat("hermes", tools="x"), "tools must be a list of tools in OpenAI's form, got 'x'"),  # type: ignore[arg-type]
        (lambda: MessageFormat("hermes", tools={}), "tools must be a list"),  # type: ignore[arg-type]
        (
            lambda: MessageFormat("hermes", tools=[{"name": "f"}, {"type": "x"}]),
            r"tools\[1\] must be a tool in OpenAI's form, with a non-empty function name, got \{'type': 'x'\}",
        ),
        (
            lambda: MessageFormat("hermes", tools=["f"]),  # type: ignore[list-item]
            r"tools\[0\] must be a tool in OpenAI's form, with a non-empty function name, got 'f'",
        ),
        (
            lambda: MessageFormat("hermes", tools=[{"name": ""}]),
            r"tools\[0\] must be a tool in OpenAI's form, with a non-empty function name, got \{'name': ''\}",
        ),
        (
            lambda: MessageFormat("hermes", tools=[{"function": {"name": 3}}]),
            r"tools\[0\] must be a tool in OpenAI's form, with a non-empty function name, got \{'function':",
        ),
    ],
)
def test_errors(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(InvalidParameterError, match=message):
        make()


def test_a_finished_parser_rejects_text() -> None:
    parser = MessageFormat("hermes").parser()
    assert not parser.feed("")
    assert not parser.feed("<tool_call>")
    assert parser.finish().content == "<tool_call>"
    assert not parser.finish()
    with pytest.raises(
        InvalidParameterError,
        match=r"text is not supported after finish\(\), got .*; create a new parser for each message$",
    ):
        parser.feed("x")


def test_tool_call_ids_depend_on_seed() -> None:
    form = MessageFormat("hermes")
    text = '<tool_call>{"name": "f"}{"name": "f"}</tool_call>'
    ids = [[call.id for call in form.parse(text, seed=seed).tool_calls] for seed in (1, 1, 2, "1", None, None)]
    assert ids[0] == ids[1]
    assert len({each for pair in ids for each in pair}) == 10
    assert all(each.startswith("call_") and len(each) == 29 and each[5:].isalnum() for pair in ids for each in pair)
