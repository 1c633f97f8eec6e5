"""`ferrule run` with instruct models: answers, chats, models as single arguments, defaults, and the loop guard."""

from __future__ import annotations

import io
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import fakes
from cli.terminal import Terminal
from conftest import TINY
from ferrule import LLM, SamplingParams
from ferrule._api.answer_defaults import ANSWER_TOKENS, SEEDS, shown_defaults, with_defaults
from ferrule._cli import foreign, main
from ferrule._cli.app import app
from ferrule._cli.chat import answers
from ferrule._cli.chat.commands import complete
from ferrule._cli.prompt import names_model
from ferrule._text.loop_guard import LoopGuard

QUESTION = "What is the capital of Japan?"
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.fixture(scope="module")
def instruct(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded model under another name, which makes it an instruct model rather than the toy."""
    return Path(shutil.copytree(TINY, tmp_path_factory.mktemp("models") / "instruct"))


def output(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["run", *arguments, "-q", "--temperature", "0", "-n", "12"]) == 0
    return capsys.readouterr().out


def test_instruct_model_answers_through_its_chat_template(instruct: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answer = output(capsys, str(instruct), QUESTION)
    with LLM(instruct) as llm:
        params = SamplingParams(temperature=0, max_tokens=12)
        expected = llm.chat([{"role": "user", "content": QUESTION}], params)[0].outputs[0].text
        continued = llm.generate(QUESTION, params)[0].outputs[0].text
    assert answer == f"{expected}\n"
    assert expected != continued
    assert output(capsys, str(instruct), QUESTION, "--raw") == f"{continued}\n"
    assert output(capsys, QUESTION) == f"{continued}\n", "the embedded model continues"


def test_system_prompt_is_part_of_the_answer(instruct: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["run", str(instruct), QUESTION, "--json", "-n", "2"]
    assert main(arguments) == 0
    plain = json.loads(capsys.readouterr().out)["metrics"]["prompt_tokens"]
    assert main([*arguments, "--system", "Be brief."]) == 0
    assert json.loads(capsys.readouterr().out)["metrics"]["prompt_tokens"] > plain
    assert main(["run", "Once", "--system", "Be brief."]) == 2


def test_single_argument_that_is_a_model_takes_its_prompt_from_stdin(
    instruct: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = output(capsys, str(instruct), QUESTION)
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{QUESTION}\n"))
    assert output(capsys, str(instruct)) == answer
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    assert main(["run", str(instruct)]) == 2
    assert "PROMPT is empty" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("qwen3:0.6b", True),
        ("qwen3", True),
        ("org/repo", True),
        ("org/repo:Q4_K_M", True),
        ("./missing", True),
        ("missing.gguf", True),
        ("smoll2:135m", True),
        (str(TINY), True),
        ("tiny", True),
        ("Hello", False),
        ("Question: why?", False),
        ("Once upon a time,", False),
        ("", False),
        ("\x00", False),
    ],
)
def test_single_argument_is_a_model_or_a_prompt(word: str, expected: bool) -> None:
    assert names_model(word) is expected


def test_run_starts_chat_on_a_terminal(instruct: Path) -> None:
    with Terminal([sys.executable, "-m", "ferrule", "run", str(instruct), "--temperature", "0"]) as terminal:
        assert "Ctrl-D exits" in terminal.read_until("> ")
        terminal.send(f"{QUESTION}\n")
        assert "Tokyo" in terminal.read_until("tokens/s")
        terminal.read_until("> ")
        terminal.send("/set parameter top_k 3\n")
        terminal.read_until("top_k = 3")
        terminal.send("/bye\n")
        assert terminal.end() == 0


def test_defaults_apply_where_neither_user_nor_model_sets_them(instruct: Path) -> None:
    llm = LLM(instruct)
    full = with_defaults(SamplingParams.with_model_defaults(), llm)
    assert (full.temperature, full.top_p, full.min_p, full.max_tokens) == (0.7, 0.95, 0.05, ANSWER_TOKENS)
    assert full.seed is not None
    assert full.seed < SEEDS
    own = with_defaults(SamplingParams.with_model_defaults(temperature=1.5, min_p=0, max_tokens=3, seed=4), llm)
    assert (own.temperature, own.top_p, own.min_p, own.max_tokens, own.seed) == (1.5, 0.95, 0, 3, 4)
    assert shown_defaults(SamplingParams.with_model_defaults(top_p=0.5), llm)["temperature"] == 0.7
    assert with_defaults(SamplingParams.with_model_defaults(), LLM()).temperature == 0


def test_defaults_of_model_take_precedence(instruct: Path, tmp_path: Path) -> None:
    model = Path(shutil.copytree(instruct, tmp_path / "model"))
    (model / "generation_config.json").write_text('{"temperature": 0.6, "top_k": 20}')
    full = with_defaults(SamplingParams.with_model_defaults(), LLM(model))
    assert (full.temperature, full.top_k, full.top_p, full.min_p) == (0.6, 20, 1, 0)


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([7] * 127, False),
        ([7] * 128, True),
        ([1, 2, 3, *range(10, 50)] * 4, True),
        ([1, 2, 3, *range(10, 50)] * 3, False),
        (list(range(300)) * 4, False),  # longer than the longest pattern
        (list(range(5000)), False),
        ([each for number in range(200) for each in (5, 6, 7, 1000 + number)], False),
    ],
)
def test_guard_detects_loops(tokens: list[int], expected: bool) -> None:
    guard = LoopGuard()
    assert guard.loops(tokens) is expected
    guard = LoopGuard()
    assert any(guard.loops([token]) for token in tokens) is expected


def test_guard_ends_an_answer_in_a_loop(instruct: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["run", str(instruct), "x", "--raw", "-n", "600", "--allowed-token-ids", "300"]
    assert main(arguments) == 0
    assert "stopped: the answer repeats itself" in capsys.readouterr().err
    assert main([*arguments, "--ignore-eos"]) == 0
    assert "600 tokens" in capsys.readouterr().err


@pytest.fixture
def thinker(fake_engine: type[fakes.Engine], model_with: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model that is still thinking after 12 tokens, the default limit of this test."""
    directory = model_with()
    shutil.copy(TINY / "tokenizer.json", directory)
    (directory / "chat_template.jinja").write_text(f"{TEMPLATE}{{{{ '<think>' }}}}")
    text = " ".join(["Hm, so"] * 9)
    with LLM(directory) as llm:
        tokens = llm.tokenize(text, add_special_tokens=False)
    fake_engine.script = staticmethod(lambda _: tokens)  # type: ignore[assignment]
    monkeypatch.setattr(answers, "ANSWER_TOKENS", 12)
    monkeypatch.setattr(answers, "CONTINUATION_TOKENS", 12)
    return directory


def test_answer_that_ends_at_the_default_limit_says_so(thinker: Path, capsys: pytest.CaptureFixture[str]) -> None:
    notice = "[stopped at the limit of 12 tokens; --max-tokens (in a chat, /params max_tokens) sets another]\n"
    assert main(["run", str(thinker), QUESTION, "-q"]) == 0
    assert capsys.readouterr() == ("\n", notice)
    assert main(["run", str(thinker), QUESTION]) == 0
    errors = capsys.readouterr().err
    assert errors.startswith(notice)
    assert "12 tokens, " in errors.removeprefix(notice)
    assert main(["run", str(thinker), QUESTION, "-n", "12", "-q"]) == 0, "the user chose the limit"
    assert capsys.readouterr().err == ""
    assert main(["run", str(thinker), QUESTION, "--raw", "-q"]) == 0, "a continuation has no other end"
    assert capsys.readouterr().err == ""
    assert main(["run", str(thinker), QUESTION, "--json"]) == 0, "the object has finish_reason"
    assert capsys.readouterr().err == ""


def test_chat_reports_an_answer_of_reasoning_alone(
    thinker: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{QUESTION}\n/stats\n"))
    assert main(["chat", str(thinker), "-v"]) == 0
    errors = capsys.readouterr().err
    assert "stopped at the limit of 12 tokens" in errors
    assert "the answer has no text; the message was removed" in errors
    assert "12 tokens, " in errors
    assert "1 answers, 0 messages" in errors


def test_stopped_answer_has_no_statistics_of_another(
    instruct: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    typed = "Hi\n/params max_tokens 600\n/params allowed_token_ids [300]\nHi\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
    assert main(["chat", str(instruct), "-v", "-n", "4", "--ignore-eos", "--temperature", "0"]) == 0
    assert capsys.readouterr().err.count("first token after") == 2
    monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
    assert main(["chat", str(instruct), "-v", "-n", "4", "--temperature", "0"]) == 0
    errors = capsys.readouterr().err
    assert "stopped: the answer repeats itself" in errors
    assert errors.count("first token after") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "-m", "model.gguf", "-p", "Hi"], "-m is an option of another program: MODEL is an argument"),
        (["run", "-hf", "org/repo"], "-hf is an option of another program: the repository is the argument MODEL"),
        (["serve", "-hf", "org/repo"], "as in `ferrule serve org/repo:Q4_K_M`"),
        (["run", "qwen3", "Hi", "--temp", "0.5"], "--temp is an option of another program: use --temperature"),
        (["bench", "-ngl", "99"], "ferrule runs on the CPU"),
        (["show", "qwen3"], "Use ferrule info MODEL."),
        (["ps"], "Use ferrule list, or GET /api/ps of a server."),
        (["cli", "-hf", "org/repo"], "Use ferrule run MODEL."),
        (["launch", "claude"], "Use ferrule serve MODEL, and the address of the server"),
        (["openai", "endpoint", "http://localhost:1234/v1"], "Use ferrule chat --url URL MODEL."),
        (["run", "Extract the text", "-a", "scan.pdf"], "the chat page of `ferrule serve` takes text and PDF files"),
        (["perplexity", "-m", "x"], "Use ferrule eval MODEL TEXT_FILE."),
        (["qwen3:0.6b"], "A model needs a command before it: ferrule run qwen3:0.6b."),
        (["Ten fun names"], "A prompt needs a command before it"),
    ],
)
def test_commands_of_other_programs_name_their_replacement(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(arguments) == 2
    assert message in capsys.readouterr().err


def test_no_command_hides_the_replacement_of_another_program() -> None:
    assert not set(foreign.COMMANDS) & set(app.list_commands(None))  # type: ignore[arg-type]


def test_ollama_commands_are_completed() -> None:
    assert complete("/set par") == ["parameter "]
    assert "temperature " in complete("/set parameter temp")
