"""llama.cpp's fields about the text of chats."""

from __future__ import annotations

import pytest

from server.live import Live, events
from server.scripted_server import ANSWER, SAID, THOUGHT, ScriptedServer


def test_reasoning_stays_in_the_content_where_asked(scripted: ScriptedServer) -> None:
    for form in ("auto", "deepseek"):
        message = scripted.live.chat(reasoning_format=form).json["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"].split("<")[0].strip()) == (THOUGHT, SAID)
    whole = scripted.live.chat(reasoning_format="none").json["choices"][0]["message"]
    assert (whole["content"], "reasoning_content" in whole) == (ANSWER, False)
    chunks = events(scripted.live.chat(reasoning_format="none", stream=True).body)
    assert "".join(each["choices"][0]["delta"].get("content", "") for each in chunks) == ANSWER
    refused = scripted.live.chat(reasoning_format="deepseek-legacy")
    assert (refused.status, refused.error["param"]) == (400, "reasoning_format")


def test_verbose_answer_has_prompt_and_output_as_text(scripted: ScriptedServer) -> None:
    answer = scripted.live.chat(verbose=True).json
    assert answer["__verbose"] == {"prompt": scripted.prompts[-1], "content": ANSWER}
    assert answer["choices"][0]["message"]["reasoning_content"] == THOUGHT
    assert "__verbose" not in scripted.live.chat(verbose=False).json


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/apply-template", "/tokenize"])
def test_answer_neither_begins_nor_continues_twice(live: Live, path: str) -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hel"}]
    begun = {"messages": messages, "continue_final_message": True}
    assert live.request(path, begun).status == 200
    answer = live.request(path, begun | {"add_generation_prompt": True})
    assert (answer.status, answer.error["param"]) == (400, "messages")
