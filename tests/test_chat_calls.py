"""`chat` and `chat_prompt`: selection of the template, its variables, and conversion of messages in OpenAI's form."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import fakes
from conftest import TINY
from event_loop import last, run
from ferrule import LLM, AsyncLLM, ChatTemplateError, SamplingParams
from ferrule._text.chat import adapt_messages

MESSAGES = [{"role": "user", "content": "Hi <b> é"}]

TEXT = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
PARTS = "{% for m in messages %}{{ m.role }}:{% for p in m.content %}{{ p.text }}+{% endfor %};{% endfor %}"
EITHER = (
    "{% for m in messages %}{{ m.content if m.content is string else m.content | map(attribute='text') | join }}"
    "{% endfor %}"
)
FIRST_PART = "{% for m in messages %}{{ m.content if m.content is string else m.content[0].text }}{% endfor %}"
CALLS = (
    "{% for m in messages %}{{ m.role }}{% for c in m.tool_calls or [] %}{{ c.function.arguments XX }}{% endfor %}"
    "{% endfor %}"
)
AS_JSON, AS_TEXT, AS_PYTHON = CALLS.replace("XX", "| tojson"), CALLS.replace("XX", "+ ''"), CALLS.replace("XX", "")


def parts(*texts: str, kind: str = "text") -> list[dict[str, str]]:
    return [{"type": kind, "text": text} for text in texts]


def adapted(template: str, *messages: Any) -> list[dict[str, Any]]:
    return adapt_messages(template, messages, {"bos_token": "<s>"})


def test_chat_uses_the_template_of_the_model(llm: LLM, fake_engine: type[fakes.Engine]) -> None:
    prompts: list[list[int]] = []

    def script(prompt: list[int]) -> list[int]:
        prompts.append(prompt)
        return llm.tokenize("Hello", add_special_tokens=False)

    fake_engine.script = staticmethod(script)
    one = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}]
    two = [{"role": "user", "content": "Bye"}]
    outputs = llm.chat([one, two], SamplingParams(max_tokens=20))
    assert [output.outputs[0].text for output in outputs] == ["Hello", "Hello"]
    texts = [llm.detokenize(prompt, skip_special_tokens=False) for prompt in prompts[:2]]
    assert texts[0] == "<|bos|><|system|>Be kind.<|end|>\n<|user|>Hi<|end|>\n<|assistant|>"
    assert texts[1] == "<|bos|><|user|>Bye<|end|>\n<|assistant|>"
    assert llm.chat(two, SamplingParams(max_tokens=20))[0].outputs[0].finish_reason == "stop"


EVERYTHING = (
    "{{ messages[-1].content }}|{{ tools[0].name }}|{{ documents[0].text }}|{{ x }}|{{ add_generation_prompt }}"
)
OPTIONS: dict[str, Any] = {
    "chat_template": EVERYTHING,
    "add_generation_prompt": False,
    "tools": [{"name": "t"}],
    "documents": [{"text": "d"}],
    "chat_template_kwargs": {"x": 1},
}

CONTINUING: dict[str, Any] = {**OPTIONS, "continue_final_message": True}


def test_chat_passes_options_to_the_template(llm: LLM, fake_engine: type[fakes.Engine]) -> None:
    prompts: list[str] = []
    fake_engine.script = staticmethod(lambda prompt: prompts.append(llm.detokenize(prompt)) or [5])
    for options in (OPTIONS, CONTINUING):
        llm.chat(MESSAGES, SamplingParams(max_tokens=1), **options)
    assert list(dict.fromkeys(prompts)) == ["Hi <b> é|t|d|1|False", "Hi <b> é"]


def test_async_chat_accepts_the_same_options(engine: type[fakes.Engine]) -> None:
    async def test() -> None:
        async with AsyncLLM() as llm:
            for options, text in ((OPTIONS, "Hi <b> é|t|d|1|False"), (CONTINUING, "Hi <b> é")):
                output = await last(llm.chat(MESSAGES, SamplingParams(max_tokens=1), **options))
                assert llm.detokenize(output.prompt_token_ids) == text

    run(test)


class TestNamedTemplates:
    """Selection among the templates of a model."""

    @pytest.fixture
    def llm(self, model_with: Callable[..., Path], fake_engine: type[fakes.Engine]) -> LLM:
        names = ("default", "tool_use", "rag")
        templates = [{"name": name, "template": f"{name} {{{{ messages[0].role }}}}"} for name in names]
        directory = model_with(tokenizer_config=json.dumps({"chat_template": templates}))
        (directory / "tokenizer.json").write_text((TINY / "tokenizer.json").read_text())
        return LLM(directory)

    @pytest.mark.parametrize(
        ("given", "text"),
        [
            ({}, "default user"),
            ({"tools": [{"name": "f"}]}, "tool_use user"),
            ({"tools": []}, "tool_use user"),
            ({"chat_template": "rag"}, "rag user"),
            ({"chat_template": "rag", "tools": []}, "rag user"),
            ({"chat_template": "{{ messages[0].content }}"}, "Hi <b> é"),
        ],
    )
    def test_selection_of_a_template(self, llm: LLM, given: Any, text: str) -> None:
        prompt = llm.chat_prompt(MESSAGES, **given)
        assert llm.detokenize(list(prompt["prompt_token_ids"])) == text

    def test_unknown_name(self, llm: LLM) -> None:
        with pytest.raises(ChatTemplateError, match=r"one of the model's names \(default, rag, tool_use\), got 'rga'"):
            llm.chat_prompt(MESSAGES, chat_template="rga")
        wrong: Any = 5
        with pytest.raises(
            ChatTemplateError, match="chat_template must be a template or the name of a template, got 5"
        ):
            llm.chat_prompt(MESSAGES, chat_template=wrong)

    def test_model_without_a_default_template(
        self, model_with: Callable[..., Path], fake_engine: type[fakes.Engine]
    ) -> None:
        directory = model_with(tokenizer_config=json.dumps({"chat_template": [{"name": "rag", "template": "RAG"}]}))
        (directory / "tokenizer.json").write_text((TINY / "tokenizer.json").read_text())
        with pytest.raises(ChatTemplateError, match=r"no default chat template.*named templates: rag"):
            LLM(directory).chat(MESSAGES)


class TestContent:
    """Content as a list of parts."""

    @pytest.mark.parametrize("template", [TEXT, FIRST_PART])
    def test_template_that_reads_text(self, template: str) -> None:
        """A template that reads only the first part gets text too."""
        messages = [{"role": "user", "content": parts("a", "b")}, {"role": "tool", "content": ["c"]}]
        assert [message["content"] for message in adapted(template, *messages)] == ["a\nb", "c"]

    def test_template_that_reads_text_and_parts(self) -> None:
        messages = [{"role": "system", "content": parts("a", "b")}, {"role": "user", "content": parts("c", "d")}]
        messages.append({"role": "user", "content": "e"})
        system, user, text = adapted(EITHER, *messages)
        assert (system["content"], user["content"], text["content"]) == ("a\nb", parts("c", "d"), "e")

    def test_template_that_reads_parts(self) -> None:
        system, user = adapted(PARTS, {"role": "system", "content": "a"}, {"role": "user", "content": parts("b", "c")})
        assert (system["content"], user["content"]) == (parts("a"), parts("b", "c"))

    @pytest.mark.parametrize("kind", ["input_text", "output_text"])
    def test_types_of_text_parts(self, kind: str) -> None:
        assert adapted(TEXT, {"role": "user", "content": parts("a", kind=kind)})[0]["content"] == "a"

    def test_no_content(self) -> None:
        assert adapted(TEXT, {"role": "assistant", "content": None}, {"role": "assistant"}) == [
            {"role": "assistant", "content": None},
            {"role": "assistant"},
        ]
        assert adapted(TEXT, {"role": "user", "content": []})[0]["content"] == ""

    @pytest.mark.parametrize(
        ("message", "error"),
        [
            ({"content": "x"}, r"messages\[1\].role must be a string, got None"),
            (
                {"role": "user", "content": 5},
                r"\[1\].content must be a string or a list of content parts, got 5",
            ),
            ({"role": "user", "content": [5]}, r"messages\[1\].content\[0\].text must be a string, got 5"),
            (
                {"role": "user", "content": [{"type": "audio"}]},
                r"content\[0\].type must be one of text, input_text, output_text, got 'audio'",
            ),
            (
                {"role": "user", "content": [{"text": "x"}]},
                r"\[1\].content\[0\].type must be one of .*, got None",
            ),
            ({"role": "a", "tool_calls": "f"}, r"messages\[1\].tool_calls must be a list of dicts, got 'f'"),
            (
                {"role": "a", "tool_calls": [{"id": "1"}]},
                r"messages\[1\].tool_calls\[0\] must be a dict with a function, got {'id': '1'}",
            ),
        ],
    )
    def test_invalid_messages(self, message: dict[str, Any], error: str) -> None:
        with pytest.raises(ChatTemplateError, match=error):
            adapted(TEXT, *MESSAGES, message)

    def test_messages_of_the_caller_are_not_modified(self) -> None:
        message = {"role": "user", "content": parts("a"), "tool_calls": [{"function": {"arguments": "{}"}}]}
        before = json.dumps(message)
        adapted(TEXT, message)
        assert json.dumps(message) == before


class TestToolCalls:
    """Arguments of tool calls, as JSON or as dicts."""

    @staticmethod
    def arguments(template: str, given: object) -> object:
        calls = [{"id": "call00001", "type": "function", "function": {"name": "f", "arguments": given}}]
        message = adapted(template, *MESSAGES, {"role": "assistant", "tool_calls": calls})[1]
        return message["tool_calls"][0]["function"]["arguments"]

    @pytest.mark.parametrize(
        ("template", "given", "expected"),
        [
            (AS_JSON, '{"a": "é"}', {"a": "é"}),
            (AS_JSON, {"a": 1}, {"a": 1}),
            (AS_JSON, "", {}),
            (AS_JSON, None, {}),
            (AS_JSON, "{a: 1", "{a: 1"),
            (AS_JSON, "[1]", "[1]"),
            (TEXT, '{"a": 1}', {"a": 1}),
            (AS_TEXT, '{"a": 1}', '{"a": 1}'),
            (AS_TEXT, {"a": "é"}, '{"a": "é"}'),
            (AS_TEXT, None, "{}"),
            (AS_PYTHON, {"a": 1}, '{"a": 1}'),
        ],
    )
    def test_form_of_the_arguments(self, template: str, given: object, expected: object) -> None:
        assert self.arguments(template, given) == expected

    def test_an_empty_list_of_calls_is_removed(self) -> None:
        assert adapted(AS_JSON, {"role": "assistant", "content": "x", "tool_calls": []}) == [
            {"role": "assistant", "content": "x"}
        ]


@dataclass
class SimpleMessage:
    role: str
    content: str


class Dumped:
    """An object with `model_dump`, as pydantic's models and the messages of OpenAI's client have."""

    def model_dump(self) -> dict[str, Any]:
        return {"role": "assistant", "content": "b", "refusal": None}


def test_messages_as_objects(llm: LLM) -> None:
    messages: list[Any] = [SimpleMessage("user", "a"), Dumped()]
    prompt = llm.chat_prompt(messages, chat_template=TEXT)
    assert llm.detokenize(prompt["prompt_token_ids"]) == "user:a;assistant:b;"


def add(a: int) -> int:
    """Adds one.

    Args:
        a: the number
    """
    return a + 1


def test_a_function_is_a_tool(llm: LLM) -> None:
    prompt = llm.chat_prompt(MESSAGES, tools=[add], chat_template="{{ tools[0].function.parameters | tojson }}")
    assert json.loads(llm.detokenize(prompt["prompt_token_ids"]))["properties"]["a"]["type"] == "integer"


def test_calls_of_a_function_are_parsed(llm: LLM, fake_engine: type[fakes.Engine]) -> None:
    output_text = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    fake_engine.script = staticmethod(lambda prompt: llm.tokenize(output_text, add_special_tokens=False))
    output = llm.chat(MESSAGES, SamplingParams(max_tokens=99), tools=[add], tool_call_parser="hermes")[0].outputs[0]
    assert output.message is not None
    assert [call.name for call in output.message.tool_calls] == ["add"]
