"""Image parts of messages: their forms, their place in the template's form of a message, and models without support."""

from __future__ import annotations

import base64
import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import fakes
from ferrule import LLM, ChatTemplateError, ImageError
from ferrule._text.chat import (
    ImageSource,
    adapt_messages,
    data_url,
    describe_tools,
    render_chat,
    take_images,
)
from ferrule._text.chat.values import MAX_CHARACTERS
from ferrule._vision.images import read_image

IMAGE = Image.new("RGB", (2, 1), "red")
ARRAY = np.asarray(IMAGE)
URL = "data:image/png;base64,aGk="
PART = {"type": "image"}
SMOLVLM = (
    "<|im_start|>{% for message in messages %}{{message['role'] | capitalize}}"
    "{% if message['content'][0]['type'] == 'image' %}{{':'}}{% else %}{{': '}}{% endif %}"
    "{% for line in message['content'] %}{% if line['type'] == 'text' %}{{line['text']}}"
    "{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}<end_of_utterance>\n"
    "{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
"""Chat template of SmolVLM."""
EITHER = (
    "{% for m in messages %}{{ m.role }}:{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{% if p.type == 'image' %}<image>{% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %};"
    "{% endfor %}"
)
"""Template that reads texts and lists."""
TEXT = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
TOOL = {"type": "function", "function": {"name": "look", "parameters": {}}}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def user(*parts: object) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


def rendered(template: str, *messages: dict[str, Any]) -> tuple[str, list[ImageSource]]:
    """The prompt and the images of a conversation, as a model that reads images gets them."""
    taken, sources = take_images(messages, supported=True)
    return render_chat(template, adapt_messages(template, taken, {}), special_tokens={}), sources


@dataclass
class Part:
    """Part in the form of an object."""

    type: str
    image: object


@pytest.mark.parametrize(
    ("part", "value", "field"),
    [
        ({"type": "image_url", "image_url": {"url": URL}}, URL, ".image_url.url"),
        ({"type": "image_url", "image_url": {"url": URL, "detail": "low"}}, URL, ".image_url.url"),
        ({"type": "image_url", "image_url": URL}, URL, ".image_url"),
        ({"type": "input_image", "image_url": URL, "detail": "auto"}, URL, ".image_url"),
        ({"type": "image_pil", "image_pil": IMAGE}, IMAGE, ".image_pil"),
        ({"type": "image", "image": IMAGE}, IMAGE, ".image"),
        ({"type": "image", "image": ARRAY}, ARRAY, ".image"),
        ({"type": "image", "image": URL, "url": None}, URL, ".image"),
        ({"type": "image", "url": URL}, URL, ".url"),
        ({"type": "image", "path": "a.png"}, "a.png", ".path"),  # a string is not a file
        ({"type": "image", "path": Path("a.png")}, Path("a.png"), ".path"),
        ({"type": "image", "base64": "aGk="}, "data:image/*;base64,aGk=", ".base64"),
        (Part("image", IMAGE), IMAGE, ".image"),
    ],
)
def test_forms_of_image_parts(part: object, value: object, field: str) -> None:
    messages = [{"role": "system", "content": "Hi"}, user(text("What is it?"), part, "And")]
    taken, (source,) = take_images(messages, supported=True)
    assert source.value is value or source.value == value
    assert source.field == f"messages[1].content[1]{field}"
    assert taken[1]["content"] == [text("What is it?"), PART, "And"]
    assert taken[0] is messages[0]
    assert messages[1]["content"][1] is part


def test_sources_may_stand_in_messages() -> None:
    source = ImageSource(URL, "input[0].content[0].image_url")
    taken, sources = take_images([user(source, text("?"))], supported=True)
    assert sources == [source]
    assert taken[0]["content"] == [PART, text("?")]


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"type": "image"}, "must have one of image, url, path, base64 beside the type 'image', got none"),
        ({"type": "image", "url": URL, "path": "a"}, "must have one of image, url, path, base64 .* got url and path"),
        ({"type": "image_url"}, "must have image_url beside the type 'image_url', got none"),
        ({"type": "image_url", "image_url": None}, "must have image_url"),
        ({"type": "input_image", "file_id": "f"}, "must have image_url beside the type 'input_image', got none"),
        ({"type": "image_pil", "image": IMAGE}, "must have image_pil"),
    ],
)
def test_parts_without_one_source_are_refused(part: dict[str, Any], message: str) -> None:
    with pytest.raises(ImageError, match=rf"^messages\[0\]\.content\[1\] {message}") as caught:
        take_images([user("a", part)], supported=True)
    assert caught.value.field == "messages[0].content[1]"


@pytest.mark.parametrize("messages", [5, "hi", b"hi", None, {"a": 1}, [5], [{"role": "user"}], [user(5, None, ["a"])]])
def test_other_values_are_left_as_they_are(messages: Any) -> None:
    assert take_images(messages, supported=True) == (messages, [])


def test_images_are_in_the_order_of_the_messages() -> None:
    urls = [f"data:image/png;base64,{index}" for index in range(4)]
    parts = [{"type": "image", "url": url} for url in urls]
    prompt, sources = rendered(SMOLVLM, user(parts[0], text("a"), parts[1]), user(text("b"), parts[2], parts[3]))
    assert [source.value for source in sources] == urls
    assert prompt == (
        "<|im_start|>User:<image>a<image><end_of_utterance>\nUser: b<image><image><end_of_utterance>\nAssistant:"
    )


def test_template_that_reads_texts_and_lists_gets_lists_with_images_in_every_role() -> None:
    image = {"type": "image", "image": IMAGE}
    system = {"role": "system", "content": [text("a"), text("b")]}
    tool = {"role": "tool", "content": [text("c"), image]}
    prompt, sources = rendered(EITHER, system, user(image, text("d")), tool)
    assert prompt == "system:a\nb;user:<image>d;tool:c<image>;"
    assert len(sources) == 2


def test_template_that_reads_text_only_is_an_error() -> None:
    with pytest.raises(ChatTemplateError, match=r"^messages\[1\]\.content must not have images"):
        rendered(TEXT, user(text("a")), user({"type": "image", "image": IMAGE}))


def test_long_data_urls_do_not_count_as_text() -> None:
    long = data_url("A" * (MAX_CHARACTERS + 1))
    prompt, sources = rendered(EITHER, user({"type": "image_url", "image_url": {"url": long}}))
    assert prompt == "user:<image>;"
    assert sources[0].value is long


def test_base64_is_read_as_an_image() -> None:
    file = io.BytesIO()
    IMAGE.save(file, "WEBP", lossless=True)
    part = {"type": "image", "base64": base64.b64encode(file.getvalue()).decode()}
    _, (source,) = take_images([user(part)], supported=True)
    assert np.array_equal(np.asarray(read_image(source.value, source.field)), ARRAY)


def test_tools_in_the_system_message_keep_images() -> None:
    """Tools that are described in a message do not remove its images, nor those of tool results."""
    image = {"type": "image", "image": IMAGE}
    messages = [
        user(image, text("Look.")),
        {"role": "assistant", "content": [text("Yes."), image], "tool_calls": [{"function": {"name": "look"}}]},
        {"role": "tool", "content": [image, text("seen")]},
        {"role": "tool", "content": "nothing"},
    ]
    without_system = "{% for m in messages if m.role != 'system' %}" + EITHER.removeprefix("{% for m in messages %}")
    for template in (EITHER, without_system):
        taken, sources = take_images(messages, supported=True)
        adapted = adapt_messages(template, taken, {})
        adapted = adapt_messages(template, describe_tools(template, adapted, [TOOL], {}), {})
        prompt = render_chat(template, adapted, special_tokens={})
        assert prompt.count("<image>") == len(sources) == 3
        assert "<image>Look.;assistant:Yes.<image>\n<tool_call>\n" in prompt
        assert "<tool_response>\n<image>seen\n</tool_response>\n<tool_response>\nnothing\n</tool_response>;" in prompt
        assert "# Tools" in prompt


def test_a_model_that_reads_text_only_refuses_images(llm: LLM, fake_engine: type[fakes.Engine]) -> None:
    messages = [{"role": "system", "content": "a"}, user(text("b"), {"type": "image_url", "image_url": {"url": URL}})]
    for call in (llm.apply_chat_template, llm.chat_prompt, llm.chat):
        with pytest.raises(ImageError) as caught:
            call(messages)
        field = "messages[1].content[1].image_url.url"
        assert str(caught.value) == f"{field} must not be an image: the model reads text only"
        assert caught.value.field == field
