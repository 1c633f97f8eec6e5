"""The first commands of the READMEs of Ollama, llama.cpp and llm, typed with `ferrule` in a terminal.

Each works, or names its replacement, which then works. The names of the models are those of the READMEs; the user's
catalogue maps them to the embedded model, which answers as an instruct model under another path.
"""

from __future__ import annotations

import json
import re
import shutil
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cli.tmux import Tmux
from conftest import TINY
from gguf_convert import convert

pytestmark = pytest.mark.native

GGUF = "my_model.gguf"
QUESTION = "What is the capital of France?"
CHAT = "Ctrl-D exits"
CATALOGUE = """
gemma3 = "{model}"
"llama3.2" = "{model}"
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's home with a model in two formats, a catalogue, and the command `ferrule`."""
    home = tmp_path_factory.mktemp("home")
    model = Path(shutil.copytree(TINY, home / "instruct"))
    (model / "generation_config.json").write_text(json.dumps({"do_sample": False, "eos_token_id": [2, 6]}))
    convert(TINY, home / GGUF, "F16")
    (home / ".config" / "ferrule").mkdir(parents=True)
    (home / ".config" / "ferrule" / "models.toml").write_text(CATALOGUE.format(model=model))
    (home / "README.md").write_text("The capital of Italy is Rome.\n")
    (home / "text.txt").write_text("The capital of France is Paris. The sun is a star. " * 40)
    (home / "json.gbnf").write_text('root ::= "yes" | "no"\n')
    program = home / "bin" / "ferrule"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m ferrule "$@"\n')
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return home


@pytest.fixture
def shell(home: Path) -> Iterator[Tmux]:
    """A shell in the user's home."""
    own = {"HOME": home, "XDG_CONFIG_HOME": home / ".config", "FERRULE_CACHE": home / "cache", "HF_HOME": home / "hf"}
    environment = {name: str(value) for name, value in own.items()}
    # The user's path, and no network: no command of these may need it.
    environment |= {"PATH": f"{home / 'bin'}:/usr/local/bin:/usr/bin:/bin", "HF_HUB_OFFLINE": "1", "NO_COLOR": "1"}
    with Tmux(home, environment) as shell:
        yield shell


def ask(shell: Tmux, leave: str = "/bye") -> None:
    """Asks a question in a chat that has begun, and leaves it."""
    shell.type(QUESTION)
    shell.wait_for(r"Paris[^\n]*\n([^\n]*\n)*>$")
    shell.type(leave)
    shell.wait_for(r"shell\$$")


# Ollama's README.


def test_ollama_run_chats(shell: Tmux) -> None:
    shell.type("ferrule run gemma3")
    shell.wait_for(CHAT)
    ask(shell)


def test_ollama_multiline_message(shell: Tmux) -> None:
    shell.type("ferrule run gemma3")
    shell.wait_for(CHAT)
    shell.type('"""What is the capital')
    shell.type('of France?"""')
    shell.wait_for(r"\w[^\n]*\n([^\n]*\n)*>$")
    shell.type("/?")
    shell.wait_for("/set parameter|/params")
    shell.press("C-d")
    shell.wait_for(r"shell\$$")


def test_ollama_run_answers_a_prompt_with_a_file(shell: Tmux) -> None:
    output, code = shell.run('ferrule run llama3.2 "Summarize this file: $(cat README.md)"')
    assert code == 0
    assert re.search(r"\[prompt \d+ tokens", output)


def test_ollama_run_reads_a_pipe_and_writes_a_file(shell: Tmux, home: Path) -> None:
    _, code = shell.run(f'echo "{QUESTION}" | ferrule run llama3.2 > answer.txt')
    assert code == 0
    assert "Paris" in (home / "answer.txt").read_text()


def test_ollama_pull_says_that_a_local_model_is_there(shell: Tmux) -> None:
    output, code = shell.run("ferrule pull llama3.2")
    assert "local path; there is nothing to download" in output
    assert code != 0


def test_ollama_list_and_remove(shell: Tmux) -> None:
    output, code = shell.run("ferrule list")
    assert (code, "ferrule search" in output) == (0, True)
    output, code = shell.run("ferrule rm llama3.2")
    assert (code, "not in the cache" in output) == (2, True)


def test_ollama_show(shell: Tmux) -> None:
    output, _ = shell.run("ferrule show llama3.2")
    assert "Use ferrule info MODEL." in output
    output, code = shell.run("ferrule info llama3.2")
    assert (code, "5.77 million parameters" in output) == (0, True)


@pytest.mark.parametrize(
    ("command", "replacement"),
    [
        ("ferrule ps", "ferrule list, or GET /api/ps"),
        ("ferrule stop llama3.2", "Ctrl-C in the terminal of `ferrule serve`"),
        ("ferrule cp llama3.2 my-model", "another name in ~/.config/ferrule/models.toml"),
        ("ferrule create mymodel -f ./Modelfile", "ferrule quantize MODEL -o DIR, or a name in"),
        ("ferrule help", "ferrule --help"),
    ],
)
def test_ollama_commands_name_their_replacement(command: str, replacement: str, shell: Tmux) -> None:
    output, code = shell.run(command)
    assert (code, f"Use {replacement}" in output) == (2, True), output


def test_ollama_serve_and_curl(shell: Tmux) -> None:
    # A job in the background would survive its terminal if the test fails.
    shell.type("ferrule serve llama3.2 --port 0 --exit-with-parent &")
    url = shell.wait_for(r"Chat page +(http://127\.0\.0\.1:\d+)/(.|\n)*Ctrl-C stops")[1]
    request = json.dumps({"model": "llama3.2", "prompt": QUESTION, "stream": False})
    output, code = shell.run(f"curl -s {url}/api/generate -d '{request}'")
    assert (code, "Paris" in output) == (0, True), output
    request = json.dumps({"model": "llama3.2", "messages": [{"role": "user", "content": QUESTION}]})
    output, code = shell.run(f"curl -s {url}/api/chat -d '{request}'")
    assert (code, '"done":true' in output) == (0, True), output
    shell.type("fg")
    shell.wait_for("ferrule serve")
    shell.press("C-c")
    shell.wait_for(r"shell\$$")


# llama.cpp's README.


def test_llama_cli_with_a_local_file(shell: Tmux) -> None:
    output, _ = shell.run(f"ferrule llama-cli -m {GGUF}")
    assert "Use ferrule run MODEL." in output
    output, _ = shell.run(f"ferrule run -m {GGUF}")
    assert "MODEL is an argument, as in `ferrule run MODEL`" in output
    shell.type(f"ferrule run {GGUF}")
    shell.wait_for(CHAT)
    ask(shell)


def test_llama_cli_with_a_repository(shell: Tmux) -> None:
    output, _ = shell.run("ferrule run -hf ggml-org/gemma-3-1b-it-GGUF")
    assert "the repository is the argument MODEL, as in `ferrule run org/repo:Q4_K_M`" in output
    output, code = shell.run("ferrule run ggml-org/gemma-3-1b-it-GGUF")
    assert code != 0, output
    assert re.search("offline|network|not (in the cache|downloaded)", output, re.IGNORECASE), output


def test_llama_cli_conversation_flag(shell: Tmux) -> None:
    output, _ = shell.run(f"ferrule run {GGUF} -cnv")
    assert "`ferrule run MODEL` starts a conversation" in output


def test_llama_cli_grammar(shell: Tmux) -> None:
    output, _ = shell.run(f"ferrule run {GGUF} -n 256 --grammar-file json.gbnf 'Is it raining?'")
    assert "use --grammar with the name of the file" in output
    output, code = shell.run(f"ferrule run {GGUF} -n 256 --grammar json.gbnf 'Is it raining?'")
    assert (code, re.search(r"^(yes|no)$", output, re.MULTILINE) is not None) == (0, True), output


def test_llama_simple(shell: Tmux) -> None:
    output, _ = shell.run(f"ferrule llama-simple -m {GGUF}")
    assert "Use ferrule run --raw MODEL PROMPT." in output
    output, code = shell.run(f'ferrule run --raw {GGUF} "The capital of France is" -n 8 --temperature 0')
    assert (code, "The capital of France is Paris" in output) == (0, True), output


def test_llama_server(shell: Tmux) -> None:
    output, _ = shell.run("ferrule llama-server -hf ggml-org/gemma-3-1b-it-GGUF")
    assert "Use ferrule serve MODEL." in output
    output, _ = shell.run(f"ferrule serve -m {GGUF}")
    assert "MODEL is an argument, as in `ferrule serve MODEL`" in output
    shell.type(f"ferrule serve {GGUF} --port 0")
    shell.wait_for(r"http://127\.0\.0\.1:\d+(.|\n)*Ctrl-C stops")
    shell.press("C-c")
    shell.wait_for(r"shell\$$")


def test_llama_perplexity(shell: Tmux) -> None:
    output, _ = shell.run(f"ferrule llama-perplexity -m {GGUF} -f text.txt")
    assert "Use ferrule eval MODEL TEXT_FILE." in output
    output, code = shell.run(f"ferrule eval {GGUF} text.txt")
    assert (code, "perplexity" in output) == (0, True), output


def test_llama_bench(shell: Tmux) -> None:
    output, _ = shell.run(f"ferrule llama-bench -m {GGUF}")
    assert "Use ferrule bench MODEL." in output
    output, code = shell.run(f"ferrule bench {GGUF} --prompt 32 --gen 4 --repeat 1")
    assert (code, "tok/s" in output) == (0, True), output


# llm's README.


def test_llm_prompt_without_a_command(shell: Tmux) -> None:
    output, _ = shell.run('ferrule "Ten fun names for a pet pelican"')
    assert "A prompt needs a command before it: ferrule run PROMPT." in output
    output, code = shell.run('ferrule run "Ten fun names for a pet pelican" -n 8')
    assert code == 0, output
    assert re.search(r"\[prompt \d+ tokens", output), output


def test_llm_model_option(shell: Tmux) -> None:
    output, _ = shell.run(f'ferrule -m llama3.2 "{QUESTION}"')
    assert "-m is an option of another program: MODEL is an argument, as in `ferrule run MODEL`" in output
    output, code = shell.run(f'ferrule run llama3.2 "{QUESTION}"')
    assert (code, "Paris" in output) == (0, True)


def test_llm_chat(shell: Tmux) -> None:
    output, _ = shell.run("ferrule chat -m llama3.2")
    assert "MODEL is an argument, as in `ferrule chat MODEL`" in output
    shell.type("ferrule chat llama3.2")
    shell.wait_for(CHAT)
    ask(shell, leave="exit")


def test_llm_system_prompt_and_a_pipe(shell: Tmux) -> None:
    output, _ = shell.run('cat README.md | ferrule -s "Explain this code"')
    assert "use --system for the system prompt" in output
    output, code = shell.run('cat README.md | ferrule run llama3.2 --system "Explain this code" -n 8')
    assert (code, "8 tokens" in output or "stop]" in output) == (0, True), output


@pytest.mark.parametrize(
    ("command", "replacement"),
    [
        ("ferrule models", "ferrule list, or ferrule search"),
        ("ferrule install llm-ollama", "ferrule pull MODEL"),
        ("ferrule keys set openai", "the environment variable HF_TOKEN"),
        ("ferrule logs", "/save in ferrule chat"),
    ],
)
def test_llm_commands_name_their_replacement(command: str, replacement: str, shell: Tmux) -> None:
    output, code = shell.run(command)
    assert (code, f"Use {replacement}" in output) == (2, True), output
