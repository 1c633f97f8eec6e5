"""Messages of completions: parsers chosen by name or by the chat template, streams, special tokens, ids."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tokenizers

import fakes
from conftest import TINY
from event_loop import run
from ferrule import LLM, AsyncLLM, InvalidParameterError, MessageDelta, MessageFormat, SamplingParams, TokenizerError
from ferrule._text import derivation
from ferrule._text.tokenizer import Tokenizer

TOOLS: list[dict[str, Any]] = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "é"}}\n</tool_call>'
SAID = f"<think>\nHm.\n</think>\n\nYes. {CALL}"
TEMPLATE = (
    "{% for m in messages %}<|user|>{{ m.content }}{% endfor %}{% if x %}{{ '<tool_call>' }}{% endif %}<|assistant|>"
)
ASK = [{"role": "user", "content": "?"}]
LONG = SamplingParams(max_tokens=200)


@pytest.fixture
def model(fake_engine: type[fakes.Engine], model_with: Callable[..., Path]) -> Iterator[LLM]:
    """A model that answers every prompt with SAID."""
    directory = model_with()
    (directory / "tokenizer.json").write_text((TINY / "tokenizer.json").read_text())
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    with LLM(directory, seed=0) as llm:
        fake_engine.script = staticmethod(lambda _: llm.tokenize(SAID, add_special_tokens=False))  # type: ignore[assignment]
        yield llm


def test_message_is_none_without_parser(model: LLM) -> None:
    completion = model.chat(ASK, LONG, tools=TOOLS)[0].outputs[0]
    assert (completion.text, completion.message) == (SAID, None)
    assert {delta.message for delta in model.stream(model.chat_prompt(ASK), LONG)} == {None}


def test_chat_with_parsers(model: LLM) -> None:
    completion = model.chat(ASK, LONG, tools=TOOLS, tool_call_parser="hermes", reasoning_parser="qwen3")[0].outputs[0]
    assert completion.text == SAID
    message = completion.message
    assert message is not None
    assert (message.content, message.reasoning) == ("Yes.", "Hm.")
    assert [(call.name, json.loads(call.arguments)) for call in message.tool_calls] == [("f", {"a": "é"})]


def test_parsers_are_chosen_by_template(model: LLM) -> None:
    def message(**options: Any) -> Any:
        completion = model.chat(ASK, LONG, tool_call_parser="auto", reasoning_parser="auto", **options)[0].outputs[0]
        return completion.message

    found = message(tools=TOOLS)
    assert (found.reasoning, len(found.tool_calls)) == (None, 1), "the template has <tool_call>, and no <think>"
    assert message() is None, "without tools there are no calls"
    for template in ("{{ '</think>' }}", "{{ 'x' }}"):  # the tools are described in the system message
        assert len(message(tools=TOOLS, chat_template=template).tool_calls) == 1
    reads_tools = "{% for tool in tools %}{{ tool }}{% endfor %}"
    assert message(tools=TOOLS, chat_template="{{ '</think>' }}" + reads_tools).tool_calls == []
    assert message(tools=TOOLS, chat_template=reads_tools) is None


def test_parsers_are_derived_only_for_auto(model: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    derived: list[str] = []
    derive = derivation.derive_format
    monkeypatch.setattr(derivation, "derive_format", lambda *given: derived.append(given[0]) or derive(*given))
    own = TEMPLATE + "{{ tools }}"
    for parsers in ((None, None), ("hermes", None), ("hermes", "qwen3"), ("auto", None)):
        model.message_format(*parsers, chat_template=own)
    model.message_format("auto", "auto", tools=TOOLS, chat_template=own, derive=False)
    assert derived == []
    model.message_format("auto", "auto", tools=TOOLS, chat_template=own)
    assert derived == [own]
    with pytest.raises(InvalidParameterError, match=r"reasoning_parser .*'template'"):
        model.message_format(None, "template", chat_template=own, derive=False)


def test_reasoning_opened_by_prompt(model: LLM) -> None:
    opened = TEMPLATE + "<think>\n"
    for template, reasoning in ((opened, "Hm."), (opened + "</think>", "Hm."), (TEMPLATE, "Hm.")):
        completion = model.chat(ASK, LONG, reasoning_parser="deepseek_r1", chat_template=template)[0].outputs[0]
        assert completion.message is not None
        assert completion.message.reasoning == reasoning
    short = SamplingParams(max_tokens=3)
    prompt = model.chat_prompt(ASK, chat_template=opened)
    form = model.message_format(reasoning_parser="deepseek_r1")
    [output] = model.generate([prompt], short, message_format=form)
    message = output.outputs[0].message
    assert message is not None
    assert message.content is None, "cut off before the reasoning ends"


def test_summed_deltas_equal_message(model: LLM) -> None:
    form = model.message_format("hermes", "qwen3")
    deltas = list(model.stream(model.chat_prompt(ASK), LONG, message_format=form))
    last = deltas[-1].output
    assert last is not None
    total = MessageDelta()
    for delta in deltas:
        assert delta.message is not None
        total += delta.message
    assert total.message() == last.outputs[0].message
    with_news = [delta.message for delta in deltas if delta.message]
    assert len(with_news) > 5
    assert [call.id is not None for part in with_news for call in part.tool_calls] == [True] + [False] * (
        sum(len(part.tool_calls) for part in with_news) - 1
    )


def test_async_stream_messages(engine: type[fakes.Engine]) -> None:
    async def test() -> None:
        async with AsyncLLM(seed=0) as llm:
            engine.script = staticmethod(lambda _: llm.tokenize(SAID, add_special_tokens=False))  # type: ignore[assignment]
            form = llm.message_format("hermes", "qwen3")
            total, whole = MessageDelta(), None
            async for delta in llm.stream("?", SamplingParams(max_tokens=200, seed=1), message_format=form):
                assert delta.message is not None
                total += delta.message
                whole = delta.output or whole
            assert whole is not None
            assert total.message() == whole.outputs[0].message
            states = [
                output.outputs[0].message
                async for output in llm.generate("?", SamplingParams(max_tokens=200, seed=1), message_format=form)
            ]
            assert states[-1] == total.message()
            chat = llm.chat(ASK, LONG, tools=TOOLS, tool_call_parser="hermes", reasoning_parser="qwen3")
            messages = [output.outputs[0].message async for output in chat]
            assert messages[-1] is not None
            assert (messages[-1].content, messages[-1].reasoning) == ("Yes.", "Hm.")
            with pytest.raises(InvalidParameterError, match=r"tool_call_parser must be one of .*, gemma3, got 'x'$"):
                await anext(llm.chat(ASK, tool_call_parser="x"))

    run(test)


def test_tool_call_ids_depend_on_prompt_and_completion(model: LLM) -> None:
    params = SamplingParams(max_tokens=200, n=2, seed=3)
    form = model.message_format("hermes")

    def ids(prompt: str) -> list[str]:
        [output] = model.generate([prompt], params, message_format=form)
        return [call.id for each in output.outputs if each.message for call in each.message.tool_calls]

    assert ids("a") == ids("a")
    assert len({*ids("a"), *ids("b")}) == 4


def test_invalid_message_format(model: LLM) -> None:
    for call in (model.generate, model.stream):
        with pytest.raises(InvalidParameterError, match="message_format must be a MessageFormat, got 'hermes'"):
            call("a", LONG, message_format="hermes")  # type: ignore[arg-type]
    with pytest.raises(InvalidParameterError, match=r"reasoning_parser must be one of .*, deepseek_r1, .*, got 'x'"):
        model.chat(ASK, reasoning_parser="x")
    assert model.message_format() is None


def test_special_tokens_of_format_are_kept(fake_engine: type[fakes.Engine], model_with: Callable[..., Path]) -> None:
    directory = model_with()
    backend = tokenizers.Tokenizer.from_file(str(TINY / "tokenizer.json"))
    description = json.loads(backend.to_str())
    # Two special tokens of the embedded model are used in place of Mistral's.
    renamed = {"<|user|>": "[TOOL_CALLS]", "<|system|>": "[ARGS]"}
    for token in description["added_tokens"]:
        token["content"] = renamed.get(token["content"], token["content"])
    vocabulary = description["model"]["vocab"]
    description["model"]["vocab"] = {renamed.get(token, token): index for token, index in vocabulary.items()}
    (directory / "tokenizer.json").write_text(json.dumps(description))
    with LLM(directory) as llm:
        text = 'ok[TOOL_CALLS]f[ARGS]{"a": 1}<|assistant|>'
        fake_engine.script = staticmethod(lambda _: llm.tokenize(text, add_special_tokens=False))  # type: ignore[assignment]
        plain = llm.generate(["x"], LONG)[0].outputs[0]
        assert plain.text == 'okf{"a": 1}'
        form = llm.message_format("mistral")
        completion = llm.generate(["x"], LONG, message_format=form)[0].outputs[0]
        assert completion.text == 'ok[TOOL_CALLS]f[ARGS]{"a": 1}'
        assert completion.message is not None
        [call] = completion.message.tool_calls
        assert (call.name, call.arguments) == ("f", '{"a": 1}')


@pytest.mark.parametrize("decoder", ["bytes", "window"])
def test_kept_special_tokens_with_both_detokenizers(decoder: str, tmp_path: Path) -> None:
    description = json.loads((TINY / "tokenizer.json").read_text())
    if decoder == "window":
        description["decoder"] = {"type": "Sequence", "decoders": [description["decoder"], {"type": "Fuse"}]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(description))
    tokenizer = Tokenizer(tmp_path)
    ids = tokenizer.encode("<|user|>é<|assistant|>b", add_special_tokens=False)
    for keep, expected in ((set[str](), "éb"), ({"<|user|>"}, "<|user|>éb"), ({"<|user|>", "no such"}, "<|user|>éb")):
        detokenizer = tokenizer.detokenizer(keep=keep)
        assert "".join([*map(detokenizer.feed, ids), detokenizer.flush()]) == expected
    shown = tokenizer.detokenizer(skip_special_tokens=False)
    assert "".join([*map(shown.feed, ids), shown.flush()]) == "<|user|>é<|assistant|>b"


def test_message_format_requires_tokenizer(fake_engine: type[fakes.Engine], model_with: Callable[..., Path]) -> None:
    with LLM(model_with()) as llm, pytest.raises(TokenizerError, match="no such file"):
        llm.generate([{"prompt_token_ids": [7]}], LONG, message_format=MessageFormat("hermes"))
