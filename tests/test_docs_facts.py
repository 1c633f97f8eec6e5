"""Facts on pages of docs/ agree with their sources: paths, figures, messages, environment variables."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from ferrule._cli.app import COMMANDS
from ferrule._cli.chat.commands import COMMANDS as CHAT_COMMANDS
from ferrule._cli.run import command as run
from ferrule._cli.serve import command as serve
from ferrule._loading.gguf.architectures import REGISTRY
from ferrule._text.parsers import REASONING_PARSERS, TOOL_CALL_PARSERS
from ferrule.server import Models, ServerSettings, create_app
from page_blocks import ROOT, blocks

DOCS = ROOT / "docs"
PAGES = sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))
SOURCES = "\n".join(
    path.read_text()
    for folder, pattern in (("python/ferrule", "*.py"), ("rust", "*.rs"))
    for path in sorted((ROOT / folder).rglob(pattern))
)


def rows(page: Path) -> list[str]:
    """The rows of tables, without spaces at cells' ends."""
    return [re.sub(r"\s*\|\s*", "|", line) for line in page.read_text().splitlines() if line.startswith("|")]


@pytest.mark.parametrize("page", PAGES)
def test_paths_exist(page: str) -> None:
    folders = "rust|python|tools|tests|benches|examples|scripts"
    for path in re.findall(rf"(?<![\w/.])(?:{folders})/[\w./-]*\w", (DOCS / page).read_text()):
        assert (ROOT / path).exists() or (ROOT / "python" / "ferrule" / path).exists(), path


@pytest.mark.parametrize("page", PAGES)
def test_titled_blocks_equal_their_files(page: str) -> None:
    def trimmed(text: str) -> str:
        return "\n".join(line.rstrip() for line in text.splitlines())

    for block in blocks(DOCS / page):
        if block.title and "/" in block.title:
            assert trimmed(block.text) in trimmed((ROOT / block.title).read_text())


def test_peer_figures_equal_benchmark_record() -> None:
    found = [row for row in rows(DOCS / "performance.md") if re.match(r"\|(ferrule|llama.cpp) [^|]*\|(\d+\|){2}", row)]
    record = json.loads((ROOT / "benches/record/2026-11-21-intel-avx512vnni/peers-avx512vnni.json").read_text())
    assert found == [
        f"|{each['contender'].replace('-avx512', '').replace(':', ' ')}|{each['total_bytes'] / 1e6:.0f}"
        f"|{each['prefill_tokens_per_second']:.0f}|{each['prefill_peak_fraction']:.0%}"
        f"|{each['decode_tokens_per_second']:.1f}|{each['decode_bandwidth_fraction']:.0%}|".replace("%", " %")
        for each in record["contenders"]
    ]


def test_format_figures_equal_quality_study() -> None:
    study = [
        [cell.strip("*") for cell in row.split("|")[1:-1]] for row in rows(ROOT / "benches" / "quality" / "README.md")
    ]
    # Without the standard error; the first table's divergence has the one without rotation in brackets.
    known = {(name, size, kld.split(" ")[0], ppl, top) for name, size, kld, _, ppl, top in filter(is_figures, study)}
    found = [tuple(row.split("|")[1:-1]) for row in rows(DOCS / "formats.md") if re.search(r"\|18\.\d+\|", row)]
    assert len(found) == 4
    assert set(found) <= known


def is_figures(cells: list[str]) -> bool:
    return len(cells) == 6


def test_client_versions_equal_tested_ones() -> None:
    found = {
        row.split("|")[2].strip("`"): row.split("|")[1] for row in rows(DOCS / "clients.md") if "_client.py`" in row
    }
    for program in sorted((ROOT / "tests" / "clients" / "programs").glob("*.py")):
        clients = re.findall(r'^#     "([\w-]+)(?:\[[\w,]+\])?==([\d.]+)",$', program.read_text(), re.MULTILINE)
        assert found.pop(program.name) == ", ".join(" ".join(client) for client in clients)
    assert not found


def test_troubleshooting_messages_exist_in_sources() -> None:
    loading = (DOCS / "troubleshooting.md").read_text().split("## Requests")[0]
    messages = [row.split("|")[1].strip("`") for row in rows(DOCS / "troubleshooting.md") if row.startswith("|`")]
    messages = [message for message in messages if f"| `{message}`" in loading]
    assert len(messages) > 4
    for message in messages:
        # Names of fields are put in when a message is made.
        assert any(part.strip() in SOURCES for part in re.split(r"'?…'?;?", message) if part), message


def test_environment_variables_match_sources() -> None:
    read = set(re.findall(r'"(FERRULE_[A-Z_]+)"', SOURCES)) - {
        "FERRULE_FUZZ_INPUTS", "FERRULE_FUZZ_SEED", "FERRULE_TEST_DISK_CACHE",
    }  # fmt: skip
    said = set(re.findall(r"`(FERRULE_[A-Z_]+)`", (DOCS / "troubleshooting.md").read_text()))
    assert said == read


def test_offline_inference_page_lists_every_parser() -> None:
    table = (DOCS / "offline-inference.md").read_text().split("## Tool calls and reasoning")[1].split("\n## ")[0]
    columns = [
        set(re.findall(r"`(\w+)`", "".join(row.split("|")[at] for row in table.splitlines() if row[:1] == "|")))
        for at in (2, 3)
    ]
    for families, found in zip((TOOL_CALL_PARSERS, REASONING_PARSERS), columns, strict=True):
        assert found - {"tool_call_parser", "reasoning_parser"} == {name for each in families for name in each.names}


def test_supported_models_page_lists_every_gguf_architecture() -> None:
    section = (DOCS / "supported-models.md").read_text().partition("### GGUF architectures")[2].partition("\n\n## ")[0]
    listed = re.findall("`([^`]+)`", section.partition(" is one of: ")[2].partition(".\n")[0])
    assert listed == sorted(architecture.name for architecture in REGISTRY)


def test_server_page_lists_every_route_and_option() -> None:
    page = (DOCS / "server.md").read_text()
    described = create_app(Models(), ServerSettings(ollama=True, tokenizer_info=True)).openapi()["paths"]
    routes = {f"{method.upper()} {path}" for path, methods in described.items() for method in methods}
    assert set(re.findall(r"`((?:GET|POST|DELETE) /[^`]+)`", page)) == routes
    # What is on by default is described by the option that disables it.
    own = {option for parameter in serve.params for option in parameter.secondary_opts or parameter.opts} - {
        option for parameter in run.params for option in parameter.opts
    }
    said = set(re.findall(r"^\| (.*?) \|", page, re.MULTILINE))
    options = {option for cell in said for option in re.findall(r"`(--[\w-]+)", cell)}
    assert options == {option for option in own if option.startswith("--")}


def test_command_line_page_lists_every_command() -> None:
    page = (DOCS / "command-line.md").read_text()
    assert set(re.findall(r"^\| `ferrule ([\w-]+)` \|", page, re.MULTILINE)) == set(COMMANDS)
    assert set(re.findall(r"^\| `/(\w+)` \|", page, re.MULTILINE)) == set(CHAT_COMMANDS)


def test_examples_page_matches_examples_folder() -> None:
    listed = [
        re.sub(r"\[([\w.]+)\]\([\w./]+\)", r"`examples/\1`", row)
        for row in rows(ROOT / "examples" / "README.md")
        if row.startswith("|[")
    ]
    assert [row for row in rows(DOCS / "examples.md") if "examples/" in row] == listed
