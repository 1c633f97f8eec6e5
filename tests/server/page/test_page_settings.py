"""Settings: the defaults of the model, sliders, the fields that are sent, and the end of endless loops."""

from __future__ import annotations

import json
from collections.abc import Callable

from playwright.sync_api import Route, expect

from server.page.chat_page import ChatPage
from server.page.test_page_conversation import DEFAULTS


def sent(chat: ChatPage) -> dict[str, object]:
    """Returns the fields that the settings show as sent."""
    return json.loads(chat.find("#sent").text_content() or "")


def test_empty_fields_have_the_defaults_of_the_model(chat: ChatPage) -> None:
    chat.find("#open-settings").click()
    for name, value in DEFAULTS.items():
        expect(chat.find(f"#{name}")).to_have_value("")
        expect(chat.find(f"#{name}")).to_have_attribute("placeholder", str(value))
        expect(chat.find(f"#{name}-slider")).to_have_value(str(value))
        expect(chat.find(f"#{name}-slider")).to_have_attribute("aria-valuetext", f"{value}, default")
    chat.ask("Hello")
    request = chat.requests[-1]
    assert {name: request[name] for name in DEFAULTS} == DEFAULTS
    assert request["stop_on_loop"] is True
    assert sent(chat) == {name: request[name] for name in sent(chat)}
    assert set(sent(chat)) == request.keys() - {"model", "messages", "stream", "stream_options"}


def test_a_slider_and_its_field_have_one_value(chat: ChatPage) -> None:
    chat.find("#open-settings").click()
    slider, number = chat.find("#temperature-slider"), chat.find("#temperature")
    slider.fill("1.25")
    expect(number).to_have_value("1.25")
    assert sent(chat)["temperature"] == 1.25
    number.fill("0.4")
    expect(slider).to_have_value("0.4")
    expect(slider).to_have_attribute("aria-valuetext", "0.4")
    # The slider ends before the largest value that is allowed.
    number.fill("5")
    expect(slider).to_have_value("2")
    assert sent(chat)["temperature"] == 5
    number.fill("")
    expect(slider).to_have_value("0.7")
    assert sent(chat)["temperature"] == 0.7
    slider.fill("1")
    chat.find("#settings").get_by_role("button", name="Reset to defaults").click()
    expect(number).to_have_value("")
    expect(slider).to_have_value("0.7")


def test_the_defaults_are_those_of_the_selected_model(open_chat: Callable[..., ChatPage]) -> None:
    chat = open_chat()
    chat.page.route(
        "**/v1/models",
        lambda route: route.fulfill(
            json={
                "data": [
                    {"id": "tiny", "max_model_len": 1000, "answer_defaults": {"temperature": 0.6, "top_k": 20}},
                    {"id": "other", "max_model_len": 1000, "answer_defaults": {"temperature": 0.2}},
                ]
            }
        ),
    )
    chat.open()
    chat.find("#open-settings").click()
    expect(chat.find("#temperature")).to_have_attribute("placeholder", "0.6")
    chat.find("#model").select_option("other")
    expect(chat.find("#temperature")).to_have_attribute("placeholder", "0.2")
    assert "top_k" not in sent(chat)


def test_a_model_loaded_on_demand_gets_its_defaults_with_the_first_answer(open_chat: Callable[..., ChatPage]) -> None:
    chat = open_chat()
    loaded = {"max_model_len": 1000, "answer_defaults": {"temperature": 0.6}}

    counted: list[str] = []
    chat.page.on("request", lambda request: counted.append(request.url) if "tokenize" in request.url else None)

    def fulfill(route: Route) -> None:
        route.fulfill(json={"data": [{"id": "tiny", **(loaded if counted else {})}]})

    chat.page.route("**/v1/models", fulfill)
    chat.open()
    chat.find("#open-settings").click()
    expect(chat.find("#temperature")).to_have_attribute("placeholder", "default")
    expect(chat.find("#temperature-slider")).to_have_attribute("aria-valuetext", "default")
    expect(chat.find("#seed")).to_have_attribute("placeholder", "random")
    chat.ask("Hello")
    assert chat.requests[-1]["temperature"] == 0.6
    chat.ask("Hello again")
    assert len(counted) == 1, "the model is loaded once"
    expect(chat.find("#temperature")).to_have_attribute("placeholder", "0.6")
    expect(chat.find("#context")).to_contain_text("of 1,000 tokens")


def test_a_minimum_length_above_the_default_limit_is_the_limit(chat: ChatPage) -> None:
    chat.set(extra_body='{"min_tokens": 3000}')
    assert sent(chat)["max_tokens"] == 3000
    chat.set(max_tokens="5")
    assert sent(chat)["max_tokens"] == 5


def test_an_endless_loop_is_stopped(chat: ChatPage) -> None:
    chat.set(extra_body=json.dumps({"allowed_token_ids": [300]}))
    chat.ask("Hello")
    finish = chat.answer().locator("[data-statistic=finish]")
    expect(finish).to_have_text("stopped, because the answer repeats itself")
