"""A conversation with the embedded model: asking, stopping, asking again, editing, and what a reload keeps."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from playwright.sync_api import Route, expect

from server.live import until
from server.page.chat_page import ChatPage

CAPITAL = "What is the capital of France?"
ENDLESS_TOKENS = 1800
ENDLESS = json.dumps({"ignore_eos": True, "min_tokens": ENDLESS_TOKENS})


def test_a_whole_conversation(chat: ChatPage) -> None:
    chat.set(temperature="0")
    assert chat.ask(CAPITAL) == "The capital of France is Paris."
    assert "Rome" in chat.ask("What is the capital of Italy?")
    chat.expect_messages(CAPITAL, "What is the capital of Italy?")
    assert [message["role"] for message in chat.requests[1]["messages"]] == ["user", "assistant", "user"]
    chat.expect_titles(CAPITAL)
    expect(chat.page).to_have_title(f"{CAPITAL} · ferrule")


def test_figures_are_those_of_the_server(chat: ChatPage) -> None:
    chat.set(temperature="0")
    chat.ask(CAPITAL)
    figures = chat.answer().locator(".figures")
    expect(figures.locator("[data-figure=ttft]")).to_have_text(re.compile(r"\d+ ms to the first token|\d\.\d s to"))
    expect(figures.locator("[data-figure=count]")).to_have_text("10 tokens")
    expect(chat.at("#context")).to_contain_text("23 of 2,048 tokens")


def metric(chat: ChatPage, name: str) -> float:
    """Returns the counters of the server over all models."""
    lines = chat.page.request.get("/metrics").text().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"ferrule:{name}{{"))


def test_stop_in_mid_stream(chat: ChatPage) -> None:
    before = metric(chat, "generation_tokens_total")
    chat.set(further=ENDLESS)
    chat.send("Tell me a story.")
    expect(chat.answer().locator(".body")).not_to_be_empty()
    chat.at("#send[aria-label=Stop]").click()
    chat.wait()
    expect(chat.answer().locator("[data-figure=finish]")).to_have_text("stopped")
    kept = chat.answers()[-1]
    assert kept
    # The server has stopped, too.
    until(lambda: metric(chat, "num_requests_running") == 0)
    assert metric(chat, "generation_tokens_total") - before < ENDLESS_TOKENS
    chat.set(further="", temperature="0")
    chat.ask(CAPITAL)
    assert chat.answers()[0] == kept


def test_while_the_prompt_is_read_the_time_is_shown(chat: ChatPage) -> None:
    held: list[Route] = []

    def hold(route: Route) -> None:
        held.append(route)

    chat.page.route("**/v1/chat/completions", hold)
    chat.send("Hello")
    expect(chat.answer().locator("[data-figure=waited]")).to_have_text(re.compile(r"\d m?s until now"))
    expect(chat.answer()).to_have_attribute("aria-busy", "true")
    held[0].continue_()
    chat.wait()
    expect(chat.answer().locator("[data-figure=waited]")).to_have_count(0)
    expect(chat.answer().locator("[data-figure=ttft]")).to_have_count(1)


def test_escape_stops(chat: ChatPage) -> None:
    chat.set(further=ENDLESS)
    chat.send("Tell me a story.")
    expect(chat.answer().locator(".body")).not_to_be_empty()
    chat.page.keyboard.press("Escape")
    chat.wait()
    expect(chat.answer().locator("[data-figure=finish]")).to_have_text("stopped")


def test_an_answer_that_was_stopped_goes_on(chat: ChatPage) -> None:
    chat.set(temperature="0", max_tokens="4")
    assert chat.ask(CAPITAL) != "The capital of France is Paris."
    chat.set(max_tokens="")
    chat.act("more")
    chat.wait()
    assert chat.answers() == ["The capital of France is Paris."]
    assert chat.version() == "2/2"
    assert chat.requests[-1]["continue_final_message"] is True


def test_regenerate_keeps_every_version(chat: ChatPage) -> None:
    chat.set(temperature="1.5")
    chat.ask("Tell me a short story.")
    versions = [chat.answers()[-1]]
    for seed in ("1", "2"):
        chat.set(seed=seed)
        chat.act("regenerate")
        chat.wait()
        versions.append(chat.answers()[-1])
    assert chat.version() == "3/3"
    assert len(set(versions)) == 3
    chat.act("back")
    assert (chat.version(), chat.answers()[-1]) == ("2/3", versions[1])
    chat.act("back")
    assert (chat.version(), chat.answers()[-1]) == ("1/3", versions[0])
    expect(chat.answer().locator("[data-act=back]")).to_be_disabled()
    # A new one is shown whichever stood there.
    chat.act("regenerate")
    chat.wait()
    assert chat.version() == "4/4"


def test_an_edited_message_is_a_branch_with_its_own_answer(chat: ChatPage) -> None:
    chat.set(temperature="0")
    chat.ask(CAPITAL)
    chat.ask("What is the capital of Spain?")
    first = chat.at(".user").first
    chat.act("edit", first)
    first.locator("textarea").fill("What is the capital of Italy?")
    chat.page.keyboard.press("Enter")
    chat.wait()
    chat.expect_messages("What is the capital of Italy?")
    assert "Rome" in chat.answers()[0]
    assert len(chat.requests[-1]["messages"]) == 1
    chat.act("back", chat.at(".user").first)
    chat.expect_messages(CAPITAL, "What is the capital of Spain?")
    assert "Paris" in chat.answers()[0]


def test_an_edited_answer_is_sent_to_the_model(chat: ChatPage) -> None:
    chat.set(temperature="0")
    chat.ask(CAPITAL)
    chat.act("edit")
    chat.answer().locator("textarea").fill("It is **Lyon**.")
    chat.answer().get_by_role("button", name="Save as a version").click()
    assert chat.answers() == ["It is Lyon."]
    chat.ask("Why?")
    assert chat.requests[-1]["messages"][1] == {"role": "assistant", "content": "It is **Lyon**."}


def test_what_is_asked_last_ends_what_is_being_written(chat: ChatPage) -> None:
    chat.set(further=ENDLESS)
    chat.send("Tell me a story.")
    expect(chat.answer().locator(".body")).not_to_be_empty()
    chat.at("#open-settings").click()
    chat.at("#further").fill("")
    chat.at("#temperature").fill("0")
    chat.act("edit", chat.at(".user"))
    chat.at(".user textarea").fill(CAPITAL)
    chat.page.keyboard.press("Enter")
    chat.wait()
    assert chat.answers() == ["The capital of France is Paris."]
    chat.act("back", chat.at(".user"))
    chat.expect_messages("Tell me a story.")
    expect(chat.answer().locator("[data-figure=finish]")).to_have_text("stopped")


def test_leaving_an_edit_changes_nothing(chat: ChatPage) -> None:
    chat.set(temperature="0")
    chat.ask(CAPITAL)
    chat.act("edit", chat.at(".user"))
    chat.at(".user textarea").fill("Something else")
    chat.page.keyboard.press("Escape")
    chat.expect_messages(CAPITAL)
    expect(chat.at(".user [data-act=edit]")).to_be_focused()


def test_a_reload_keeps_the_conversation(chat: ChatPage) -> None:
    chat.set(temperature="0", system="Be brief.")
    chat.ask(CAPITAL)
    chat.act("regenerate")
    chat.wait()
    chat.act("back")
    before = chat.answers(), chat.version()
    chat.open()
    chat.expect_messages(CAPITAL)
    assert (chat.answers(), chat.version()) == before
    chat.expect_titles(CAPITAL)
    expect(chat.at("#system")).to_have_value("Be brief.")
    expect(chat.at("#temperature")).to_have_value("0")
    chat.answer().locator(".token").first.hover()
    expect(chat.at(".alternatives")).to_be_visible()


def test_a_reload_in_mid_stream_keeps_what_was_said(chat: ChatPage) -> None:
    chat.set(further=ENDLESS)
    chat.send("Tell me a story.")
    expect(chat.answer().locator(".body")).not_to_be_empty()
    chat.open()
    chat.expect_messages("Tell me a story.")
    expect(chat.answer().locator("[data-figure=finish]")).to_have_text("stopped")


def test_settings_are_the_request(chat: ChatPage) -> None:
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
        further='{"ignore_eos": true}',
    )
    chat.ask("Hello")
    asked = chat.requests[-1]
    assert asked.pop("messages")[0] == {"role": "system", "content": "You speak of cats."}
    assert asked == {
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
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    expect(chat.answer().locator("[data-figure=count]")).to_have_text("5 tokens")


def test_a_value_outside_its_limits_is_named_and_not_taken(chat: ChatPage) -> None:
    chat.at("#open-settings").click()
    for name, value, fault in (
        ("temperature", "-1", "Temperature: a number from 0 to 100"),
        ("top_k", "1.5", "Top k: a whole number from -1"),
        ("top_p", "much", "Top p: a number from 0 to 1"),
        ("further", "[1]", "an object is needed: {…}"),
        ("further", '{"n": 2}', "n is set by the page"),
        ("further", '{"ignore_eos": true, "stream": false}', "stream is set by the page"),
        ("further", '{"messages": []}', "messages is set by the page"),
        ("further", '{"model": "other"}', "model is set by the page"),
    ):
        chat.at(f"#{name}").fill(value)
        expect(chat.at(f"#{name}-fault")).to_have_text(fault)
        expect(chat.at(f"#{name}")).to_have_attribute("aria-invalid", "true")
    chat.ask("Hello")
    assert not {"temperature", "top_k", "top_p", "n", "ignore_eos"} & chat.requests[-1].keys()


def test_another_conversation_while_one_is_written(chat: ChatPage) -> None:
    chat.set(further=ENDLESS)
    chat.send("Tell me a story.")
    expect(chat.answer().locator(".body")).not_to_be_empty()
    chat.at("#new").click()
    chat.set(further="", temperature="0")
    assert "Paris" in chat.ask(CAPITAL)
    chat.at(
        ".opener",
    ).get_by_text("Tell me a story.").click()
    chat.wait()
    chat.expect_messages("Tell me a story.")
    expect(chat.answer().locator("[data-figure=count]")).to_have_text(re.compile(r"1,[89]\d\d tokens|2,0\d\d tokens"))


def test_a_model_is_picked_where_there_are_several(open_chat: Callable[..., ChatPage]) -> None:
    chat = open_chat()
    expect(chat.at("#model option")).to_have_text(["tiny", "other"])
    chat.ask(CAPITAL)
    chat.at("#model").select_option("other")
    chat.act("regenerate")
    chat.wait()
    assert [request["model"] for request in chat.requests] == ["tiny", "other"]
    expect(chat.answer().locator(".who")).to_have_text("other")
    chat.open()
    expect(chat.at("#model")).to_have_value("other")
