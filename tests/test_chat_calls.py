"""`chat` and `chat_prompt`: whose template, what it gets, and how messages in OpenAI's form reach it."""

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


def test_chat_takes_what_the_template_gets(llm: LLM, fake_engine: type[fakes.Engine]) -> None:
    asked: list[str] = []
    fake_engine.script = staticmethod(lambda prompt: asked.append(llm.detokenize(prompt)) or [5])
    for options in (OPTIONS, CONTINUING):
        llm.chat(MESSAGES, SamplingParams(max_tokens=1), **options)
    assert list(dict.fromkeys(asked)) == ["Hi <b> é|t|d|1|False", "Hi <b> é"]


def test_chat_of_async_llm_takes_the_same(engine: type[fakes.Engine]) -> None:
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
    def test_the_one_named_the_one_for_tools_or_the_usual_one(self, llm: LLM, given: Any, text: str) -> None:
        prompt = llm.chat_prompt(MESSAGES, **given)
        assert llm.detokenize(list(prompt["prompt_token_ids"])) == text

    def test_a_name_that_the_model_has_not(self, llm: LLM) -> None:
        with pytest.raises(ChatTemplateError, match=r"chat_template is 'rga'.*names: default, rag, tool_use"):
            llm.chat_prompt(MESSAGES, chat_template="rga")
        wrong: Any = 5
        with pytest.raises(ChatTemplateError, match="chat_template is 5"):
            llm.chat_prompt(MESSAGES, chat_template=wrong)

    def test_a_model_without_a_usual_one(
        self, model_with: Callable[..., Path], fake_engine: type[fakes.Engine]
    ) -> None:
        directory = model_with(tokenizer_config=json.dumps({"chat_template": [{"name": "rag", "template": "RAG"}]}))
        (directory / "tokenizer.json").write_text((TINY / "tokenizer.json").read_text())
        with pytest.raises(ChatTemplateError, match=r"no chat template named default.*named templates: rag"):
            LLM(directory).chat(MESSAGES)


class TestContent:
    """Content as a list of parts."""

    @pytest.mark.parametrize("template", [TEXT, FIRST_PART])
    def test_a_template_for_text_gets_text(self, template: str) -> None:
        """Also one that would read the first part alone."""
        messages = [{"role": "user", "content": parts("a", "b")}, {"role": "tool", "content": ["c"]}]
        assert [message["content"] for message in adapted(template, *messages)] == ["a\nb", "c"]

    def test_a_template_for_both_gets_the_users_parts(self) -> None:
        messages = [{"role": "system", "content": parts("a", "b")}, {"role": "user", "content": parts("c", "d")}]
        messages.append({"role": "user", "content": "e"})
        system, user, text = adapted(EITHER, *messages)
        assert (system["content"], user["content"], text["content"]) == ("a\nb", parts("c", "d"), "e")

    def test_a_template_for_parts_gets_parts(self) -> None:
        system, user = adapted(PARTS, {"role": "system", "content": "a"}, {"role": "user", "content": parts("b", "c")})
        assert (system["content"], user["content"]) == (parts("a"), parts("b", "c"))

    @pytest.mark.parametrize("kind", ["input_text", "output_text"])
    def test_other_names_of_text(self, kind: str) -> None:
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
            ({"content": "x"}, r"messages\[1\].role is None"),
            ({"role": "user", "content": 5}, r"messages\[1\].content is 5; it must be text or a list of parts"),
            ({"role": "user", "content": [5]}, r"messages\[1\].content\[0\].text is 5"),
            (
                {"role": "user", "content": [{"type": "image_url"}]},
                r"content\[0\] has the type 'image_url'; only text is supported",
            ),
            ({"role": "user", "content": [{"text": "x"}]}, r"messages\[1\].content\[0\] has the type None"),
            ({"role": "a", "tool_calls": "f"}, r"messages\[1\].tool_calls is 'f'; it must be a list"),
            (
                {"role": "a", "tool_calls": [{"id": "1"}]},
                r"messages\[1\].tool_calls\[0\] is {'id': '1'}; it must be a map with a",
            ),
        ],
    )
    def test_what_is_neither_is_named(self, message: dict[str, Any], error: str) -> None:
        with pytest.raises(ChatTemplateError, match=error):
            adapted(TEXT, *MESSAGES, message)

    def test_the_callers_messages_stay_as_they_are(self) -> None:
        message = {"role": "user", "content": parts("a"), "tool_calls": [{"function": {"arguments": "{}"}}]}
        before = json.dumps(message)
        adapted(TEXT, message)
        assert json.dumps(message) == before


class TestCalls:
    """Arguments of tool calls, as JSON or as maps."""

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
    def test_each_template_gets_what_it_reads(self, template: str, given: object, expected: object) -> None:
        assert self.arguments(template, given) == expected

    def test_an_empty_list_of_calls_is_none(self) -> None:
        assert adapted(AS_JSON, {"role": "assistant", "content": "x", "tool_calls": []}) == [
            {"role": "assistant", "content": "x"}
        ]


@dataclass
class Said:
    role: str
    content: str


class Dumped:
    """As pydantic's models are, and so the messages that OpenAI's client returns."""

    def model_dump(self) -> dict[str, Any]:
        return {"role": "assistant", "content": "b", "refusal": None}


def test_messages_as_objects(llm: LLM) -> None:
    messages: list[Any] = [Said("user", "a"), Dumped()]
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
    said = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    fake_engine.script = staticmethod(lambda prompt: llm.tokenize(said, add_special_tokens=False))
    output = llm.chat(MESSAGES, SamplingParams(max_tokens=99), tools=[add], tool_call_parser="hermes")[0].outputs[0]
    assert output.message is not None
    assert [call.name for call in output.message.tool_calls] == ["add"]
