"""Conversations with the embedded model: send, stop, regenerate, edit, settings and reload."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from playwright.sync_api import Route, expect

from server.page.chat_page import ChatPage

CAPITAL = "What is the capital of France?"
ENDLESS_TOKENS = 30_000
ENDLESS = json.dumps({"ignore_eos": True, "min_tokens": ENDLESS_TOKENS})
DEFAULTS = {
    "temperature": 0.7,
    "top_p": 0.95,
    "top_k": 0,
    "min_p": 0.05,
    "repetition_penalty": 1,
    "max_tokens": 2048,
}
"""Parameters of an answer where neither the user nor the model sets them."""
RESERVED_FIELD = "Extra body must not have the field {}, which the page sets"


def test_conversation(chat: ChatPage) -> None:
    chat.set(temperature="0")
    assert chat.ask(CAPITAL) == "The capital of France is Paris."
    assert "Rome" in chat.ask("What is the capital of Italy?")
    chat.expect_messages(CAPITAL, "What is the capital of Italy?")
    assert [message["role"] for message in chat.requests[1]["messages"]] == ["user", "assistant", "user"]
    chat.expect_titles(CAPITAL)
    expect(chat.page).to_have_title(f"{CAPITAL} · ferrule")


def test_statistics_of_an_answer(chat: ChatPage) -> None:
    chat.set(temperature="0")
    chat.ask(CAPITAL)
    statistics = chat.answer().locator(".statistics")
    ttft = re.compile(r"\d+ ms to first token|\d\.\d s to first token")
    expect(statistics.locator("[data-statistic=ttft]")).to_have_text(ttft)
    expect(statistics.locator("[data-statistic=count]")).to_have_text("10 tokens")
    expect(chat.find("#context")).to_contain_text("23 of 32,768 tokens")


def metric(chat: ChatPage, name: str) -> float:
    """Returns the sum of a server metric over all models."""
    lines = chat.page.request.get("/metrics").text().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"ferrule:{name}{{"))


def test_stop_during_generation(chat: ChatPage) -> None:
    before = metric(chat, "generation_tokens_total")
    chat.set(extra_body=ENDLESS)
    chat.send("Tell me a story.")
    expect(chat.answer().locator(".body")).not_to_be_empty()
    chat.find("#send[aria-label=Stop]").click()
    chat.wait()
    expect(chat.answer().locator("[data-statistic=finish]")).to_have_text("stopped")
    stopped = chat.answers()[-1]
    assert stopped
    # The server stops the request too.
    chat.wait_for(lambda: metric(chat, "num_requests_running") == 0, "no request is running")
    assert metric(chat, "generation_tokens_total") - before < ENDLESS_TOKENS
    chat.set(extra_body="", temperature="0")
    chat.ask(CAPITAL)
    assert chat.answers()[0] == stopped


def test_the_elapsed_time_is_shown_during_prefill(chat: ChatPage) -> None:
    routes: list[Route] = []

    def hold(route: Route) -> None:
        routes.append(route)

    chat.page.route("**/v1/chat/completions", hold)
    chat.send("Hello")
    expect(chat.answer().locator("[data-statistic=elapsed]")).to_have_text(re.compile(r"\d m?s elapsed"))
    expect(chat.answer()).to_have_attribute("aria-busy", "true")
    chat.wait_for(lambda: routes, "the request was sent")
    routes[0].continue_()
    chat.wait()
    expect(chat.answer().locator("[data-statistic=elapsed]")).to_have_count(0)
    expect(chat.answer().locator("[data-statistic=ttft]")).to_have_count(1)


def test_escape_stops(chat: ChatPage) -> None:
    chat.set(extra_body=ENDLESS)
    chat.send("Tell me a story.")
    expect(chat.answer().locator(".body")).not_to_be_empty()
    chat.page.keyboard.press("Escape")
    chat.wait()
    expect(chat.answer().locator("[data-statistic=finish]")).to_have_text("stopped")


def test_a_stopped_answer_is_continued(chat: ChatPage) -> None:
    chat.set(temperature="0", max_tokens="4")
    assert chat.ask(CAPITAL) != "The capital of France is Paris."
    chat.set(max_tokens="")
    chat.press("continue")
    chat.wait()
    chat.expect_answers("The capital of France is Paris.")
    chat.expect_version("2/2")
    assert chat.requests[-1]["continue_final_message"] is True


def test_regenerate_keeps_every_version(chat: ChatPage) -> None:
    # Some random seeds have the same answer.
    chat.set(temperature="1.5", seed="0")
    versions = [chat.ask("Tell me a short story.")]
    for seed in ("1", "2"):
        chat.set(seed=seed)
        chat.press("regenerate")
        chat.wait()
        versions.append(chat.answers()[-1])
    chat.expect_version("3/3")
    assert len(set(versions)) == 3
    chat.press("previous")
    chat.expect_version("2/3")
    chat.expect_answers(versions[1])
    chat.press("previous")
    chat.expect_version("1/3")
    chat.expect_answers(versions[0])
    expect(chat.answer().locator("[data-action=previous]")).to_be_disabled()
    # The new version is selected, although another one was visible.
    chat.press("regenerate")
    chat.wait()
    chat.expect_version("4/4")


def test_a_message_is_sent_again(chat: ChatPage) -> None:
    chat.set(temperature="0")
    chat.ask(CAPITAL)
    chat.ask("What is the capital of Italy?")
    chat.press("resend", chat.find(".user").first)
    chat.wait()
    chat.expect_messages(CAPITAL)
    assert chat.requests[-1]["messages"] == [{"role": "user", "content": CAPITAL}]
    chat.expect_version("2/2")
    chat.press("previous")
    chat.expect_messages(CAPITAL, "What is the capital of Italy?")


def test_an_edited_message_is_a_version_with_a_separate_answer(chat: ChatPage) -> None:
    chat.set(temperature="0")
    chat.ask(CAPITAL)
    chat.ask("What is the capital of Spain?")
    first = chat.find(".user").first
    chat.press("edit", first)
    first.locator("textarea").fill("What is the capital of Italy?")
    chat.page.keyboard.press("Enter")
    chat.wait()
    chat.expect_messages("What is the capital of Italy?")
    assert "Rome" in chat.answers()[0]
    assert len(chat.requests[-1]["messages"]) == 1
    chat.press("previous", chat.find(".user").first)
    chat.expect_messages(CAPITAL, "What is the capital of Spain?")
    assert "Paris" in chat.answers()[0]


def test_an_edited_answer_is_sent_to_the_model(chat: ChatPage) -> None:
    chat.set(temperature="0")
    chat.ask(CAPITAL)
    chat.press("edit")
    chat.answer().locator("textarea").fill("It is **Lyon**.")
    chat.answer().get_by_role("button", name="Save as new version").click()
    chat.expect_answers("It is Lyon.")
    chat.ask("Why?")
    assert chat.requests[-1]["messages"][1] == {"role": "assistant", "content": "It is **Lyon**."}


def test_a_new_message_stops_the_running_answer(chat: ChatPage) -> None:
    chat.set(extra_body=ENDLESS)
    chat.send("Tell me a story.")
    expect(chat.answer().locator(".body")).not_to_be_empty()
    chat.find("#open-settings").click()
    chat.find("#extra_body").fill("")
    chat.find("#temperature").fill("0")
    chat.press("edit", chat.find(".user"))
    chat.find(".user textarea").fill(CAPITAL)
    chat.page.keyboard.press("Enter")
    chat.wait()
    chat.expect_answers("The capital of France is Paris.")
    chat.press("previous", chat.find(".user"))
    chat.expect_messages("Tell me a story.")
    expect(chat.answer().locator("[data-statistic=finish]")).to_have_text("stopped")


def test_a_canceled_edit_changes_nothing(chat: ChatPage) -> None:
    chat.set(temperature="0")
    chat.ask(CAPITAL)
    chat.press("edit", chat.find(".user"))
    chat.find(".user textarea").fill("Something else")
    chat.page.keyboard.press("Escape")
    chat.expect_messages(CAPITAL)
    expect(chat.find(".user [data-action=edit]")).to_be_focused()


def test_a_reload_keeps_the_conversation(chat: ChatPage) -> None:
    chat.set(temperature="0", system="Be brief.")
    chat.ask(CAPITAL)
    chat.press("regenerate")
    chat.wait()
    chat.press("previous")
    before = chat.answers()
    chat.expect_version("1/2")
    chat.reload()
    chat.expect_messages(CAPITAL)
    chat.expect_answers(*before)
    chat.expect_version("1/2")
    chat.expect_titles(CAPITAL)
    expect(chat.find("#system")).to_have_value("Be brief.")
    expect(chat.find("#temperature")).to_have_value("0")
    chat.answer().locator(".token").first.hover()
    expect(chat.find(".alternatives")).to_be_visible()


def test_a_reload_during_generation_keeps_the_text(chat: ChatPage) -> None:
    chat.set(extra_body=ENDLESS)
    chat.send("Tell me a story.")
    expect(chat.answer().locator(".body")).not_to_be_empty()
    # The list has the title once the conversation is saved.
    chat.expect_titles("Tell me a story.")
    chat.open()
    chat.expect_messages("Tell me a story.")
    expect(chat.answer().locator("[data-statistic=finish]")).to_have_text("stopped")


def test_settings_are_sent_in_the_request(chat: ChatPage) -> None:
    chat.set(
        system="You speak of cats.",
        temperature="0.7",
        top_p="0.9",
        top_k="40",
        min_p="0.05",
        max_tokens="5",
        seed="7",
        repetition_penalty="1.1",
        frequency_penalty="0.5",
        presence_penalty="-0.5",
        stop="dog\nbird",
        alternatives="3",
        extra_body='{"ignore_eos": true}',
    )
    chat.ask("Hello")
    request = chat.requests[-1]
    assert request.pop("messages")[0] == {"role": "system", "content": "You speak of cats."}
    assert request == {
        "model": "tiny",
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.05,
        "max_tokens": 5,
        "seed": 7,
        "repetition_penalty": 1.1,
        "frequency_penalty": 0.5,
        "presence_penalty": -0.5,
        "stop": ["dog", "bird"],
        "logprobs": True,
        "top_logprobs": 3,
        "ignore_eos": True,
        "stop_on_loop": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    expect(chat.answer().locator("[data-statistic=count]")).to_have_text("5 tokens")


def test_an_invalid_setting_shows_an_error_and_is_not_sent(chat: ChatPage) -> None:
    chat.find("#open-settings").click()
    for name, value, error in (
        ("temperature", "-1", "Temperature must be a number from 0 to 100, got -1"),
        ("top_k", "1.5", "Top k must be an integer >= -1, got 1.5"),
        ("top_p", "much", "Top p must be a number from 0 to 1, got much"),
        ("extra_body", "[1]", 'Extra body must be a JSON object, such as {"ignore_eos": true}'),
        ("extra_body", "{", re.compile("^Extra body is not valid JSON: .")),
        *(
            ("extra_body", json.dumps({"ignore_eos": True, name: value}), RESERVED_FIELD.format(name))
            for name, value in (("n", 2), ("stream", False), ("messages", []), ("model", "other"))
        ),
    ):
        chat.find(f"#{name}").fill(value)
        expect(chat.find(f"#{name}-error")).to_have_text(error)
        expect(chat.find(f"#{name}")).to_have_attribute("aria-invalid", "true")
    chat.ask("Hello")
    assert not {"n", "ignore_eos"} & chat.requests[-1].keys()
    assert {name: chat.requests[-1][name] for name in DEFAULTS} == DEFAULTS


def test_another_conversation_during_generation(chat: ChatPage) -> None:
    chat.set(extra_body=json.dumps({"ignore_eos": True}), max_tokens="1500")
    chat.send("Tell me a story.")
    expect(chat.answer().locator(".body")).not_to_be_empty()
    chat.find("#new").click()
    chat.set(extra_body="", max_tokens="", temperature="0")
    assert "Paris" in chat.ask(CAPITAL)
    chat.find(".open-conversation").get_by_text("Tell me a story.").click()
    chat.wait()
    chat.expect_messages("Tell me a story.")
    expect(chat.answer().locator("[data-statistic=count]")).to_have_text("1,500 tokens")


def test_a_model_is_selected(open_chat: Callable[..., ChatPage]) -> None:
    chat = open_chat()
    expect(chat.find("#model option")).to_have_text(["tiny", "other"])
    chat.ask(CAPITAL)
    chat.find("#model").select_option("other")
    chat.press("regenerate")
    chat.wait()
    assert [request["model"] for request in chat.requests] == ["tiny", "other"]
    expect(chat.answer().locator(".author")).to_have_text("other")
    chat.reload()
    expect(chat.find("#model")).to_have_value("other")
