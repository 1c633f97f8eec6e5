"""Chat templates: rendering, and what a template may not do (FAULTS rows 42 and 45)."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import fakes
from conftest import TINY
from ferrule import LLM, ChatTemplateError, SamplingParams
from ferrule.chat import render_chat

MESSAGES = [{"role": "user", "content": "Hi <b> é"}]


def render(template: str, **more: Any) -> str:
    return render_chat(template, MESSAGES, special_tokens={"bos_token": "<s>"}, **more)


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
    ],
)
def test_rendered_as_transformers_does(template: str, text: str) -> None:
    assert render(template) == text


def test_the_date() -> None:
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", render("{{ strftime_now('%Y-%m-%d') }}"))


def test_further_arguments() -> None:
    assert render("{{ enable_thinking }}", arguments={"enable_thinking": False}) == "False"
    for name in ("messages", "tools", "documents", "add_generation_prompt"):
        with pytest.raises(ChatTemplateError, match=name):
            render("", arguments={name: []})


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% if %}", "line 1"),
        ("{{ messages[0]['missing']['deeper'] }}", "UndefinedError|undefined|has no"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ messages.append(1) }}", "SecurityError|not safe|unsafe|append"),
        ("{% include 'x' %}", "TypeError|no loader"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "nested too deeply"),
    ],
)
def test_errors_are_of_one_kind(template: str, message: str) -> None:
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
        "{{ '{0.__class__.__base__}'.format('') }}",
    ],
)
def test_the_sandbox_holds(template: str) -> None:
    """Either refused, or nothing of Python shows in the text."""
    try:
        text = render(template)
    except ChatTemplateError:
        return
    assert "class" not in text


def test_an_empty_conversation() -> None:
    with pytest.raises(ChatTemplateError, match="empty"):
        render_chat("x", [], special_tokens={})


def test_chat_goes_through_the_models_template(llm: LLM, fake_engine: type[fakes.Engine]) -> None:
    asked: list[list[int]] = []

    def script(prompt: list[int]) -> list[int]:
        asked.append(prompt)
        return llm.tokenize("Hello", add_special_tokens=False)

    fake_engine.script = staticmethod(script)
    one = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}]
    two = [{"role": "user", "content": "Bye"}]
    outputs = llm.chat([one, two], SamplingParams(max_tokens=20))
    assert [output.outputs[0].text for output in outputs] == ["Hello", "Hello"]
    texts = [llm.detokenize(prompt, skip_special_tokens=False) for prompt in asked[:2]]
    assert texts[0] == "<|bos|><|system|>Be kind.<|end|>\n<|user|>Hi<|end|>\n<|assistant|>"
    assert texts[1] == "<|bos|><|user|>Bye<|end|>\n<|assistant|>"
    assert llm.chat(two, SamplingParams(max_tokens=20))[0].outputs[0].finish_reason == "stop"


def test_another_template_or_one_of_the_models_by_name(
    model_with: Callable[..., Path], fake_engine: type[fakes.Engine]
) -> None:
    directory = model_with(tokenizer_config=json.dumps({"chat_template": [{"name": "rag", "template": "RAG"}]}))
    (directory / "tokenizer.json").write_text((TINY / "tokenizer.json").read_text())
    llm = LLM(directory)
    with pytest.raises(ChatTemplateError, match="no chat template"):
        llm.chat(MESSAGES)
    for chosen, text in (("rag", "RAG"), ("{{ messages[0].role }}", "user")):
        prompt = llm.chat_prompt(MESSAGES, chat_template=chosen)
        assert llm.detokenize(list(prompt["prompt_token_ids"])) == text
