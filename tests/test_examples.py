"""Every program of examples/ runs on the embedded model, and does what it says."""

from __future__ import annotations

import ast
import inspect
import json
import re
import shlex
import shutil
import subprocess
import sys
import urllib.request
from configparser import ConfigParser
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from ferrule.cli.serve import command as serve
from ferrule.server import metrics
from serve_process import served

EXAMPLES = Path(__file__).parents[1] / "examples"
PROGRAMS = sorted(path.name for path in EXAMPLES.glob("*.py"))

pytestmark = pytest.mark.native


def run(program: str, *arguments: str, timeout: float = 120) -> list[str]:
    """The lines that a program prints."""
    command = [sys.executable, "-W", "error", str(EXAMPLES / program), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return done.stdout.splitlines()


def test_the_list_names_all() -> None:
    listed = re.findall(r"^\| \[[\w.-]+\]\(([\w.-]+)\)", (EXAMPLES / "README.md").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(
        path.name for path in EXAMPLES.iterdir() if path.is_file() and path.name != "README.md"
    )


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_says_what_it_shows_and_how_to_run_it(program: str) -> None:
    said = ast.get_docstring(ast.parse((EXAMPLES / program).read_text()))
    assert said is not None
    assert f"examples/{program}" in said


def test_asyncio_fan_out() -> None:
    lines = run("asyncio_fan_out.py")
    assert lines[0] == "The capital of France is Paris."
    assert [line.split()[3] for line in lines[:8]] == [
        "France", "Italy", "Japan", "Spain", "Germany", "Egypt", "Norway", "Peru",
    ]  # fmt: skip
    assert lines[8].startswith("Once upon a time,")


def test_structured_extraction() -> None:
    (line,) = run("structured_extraction.py")
    found = re.fullmatch(r"Character\(animal='(cat|dog|duck|fish|fox)', name='.+', age=\d+, friends=\[.*\]\)", line)
    assert found is not None, line


def test_tool_agent() -> None:
    lines = run("tool_agent.py")
    assert lines[0] == "user: What is the capital of France?"
    assert lines[1] == 'assistant: {"name":"capital_of","arguments":{"country":"France"}}'
    assert lines[2] == 'tool: "Paris"'
    assert lines[-1] == "assistant: The capital of France is Paris."


def test_retrieval() -> None:
    found, _, answer = run("retrieval.py")
    assert found.endswith("The capital of France is Paris.")
    assert answer == "The capital of France is Paris."


def test_fastapi_app() -> None:
    with served(str(EXAMPLES / "fastapi_app.py"), "0", health="/llm/health") as url:
        assert get(f"{url}/capitals/France") == '{"answer":"The capital of France is Paris."}'
        assert get(f"{url}/stories/fox").startswith("Once upon a time, there was a fox")
        assert '"id":"tiny"' in get(f"{url}/llm/v1/models")


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=60) as answer:
        return answer.read().decode()


def test_openai_client() -> None:
    with served("-m", "ferrule", "serve", "--port", "0") as url:
        lines = run("openai_client.py", url)
    assert lines[:2] == ["model: tiny", "chat: The capital of Japan is Tokyo."]
    assert re.fullmatch(r"stream: A KV cache keeps .* \(\d+ tokens\)", lines[2])
    assert lines[3] == 'schema: { "colour" : "blue" }'


def test_the_dashboard_asks_for_metrics_that_there_are() -> None:
    dashboard = json.loads((EXAMPLES / "grafana.json").read_text())
    asked = {
        name
        for panel in dashboard["panels"]
        for target in panel["targets"]
        for name in re.findall(r"ferrule:\w+", target["expr"])
    } | set(re.findall(r"ferrule:\w+", dashboard["templating"]["list"][1]["query"]["query"]))
    with served("-m", "ferrule", "serve", "--port", "0") as url:
        body = json.dumps({"prompt": "Once upon a time,", "max_tokens": 4}).encode()
        request = urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            assert answer.status == 200
        there = set(re.findall(r"^(ferrule:\w+)", get(f"{url}/metrics"), re.MULTILINE))
    # Where no quota is set, the kernel counts nothing.
    counted = {f"ferrule:{name}_total" for name in re.findall(r"cgroup_\w+", inspect.getsource(metrics))}
    assert asked - there - counted == set()
    assert len(asked) > 20
    assert sorted(panel["id"] for panel in dashboard["panels"]) == list(range(1, len(dashboard["panels"]) + 1))


def test_the_systemd_unit_starts_what_there_is(tmp_path: Path) -> None:
    text = (EXAMPLES / "ferrule.service").read_text()
    unit = ConfigParser(strict=False, interpolation=None)
    unit.read_string(text)
    program, command, *arguments = shlex.split(unit["Service"]["ExecStart"])
    assert (Path(program).name, command) == ("ferrule", "serve")
    options = serve.make_context("serve", arguments).params
    assert options["host"] == "127.0.0.1"
    assert options["drain_timeout"] < int(unit["Service"]["TimeoutStopSec"])
    analyze = shutil.which("systemd-analyze")
    if analyze is not None:
        # It looks for the program, too.
        (tmp_path / "ferrule.service").write_text(text.replace(program, sys.executable))
        done = subprocess.run(
            [analyze, "verify", "--man=no", str(tmp_path / "ferrule.service")],
            capture_output=True,
            text=True,
            check=False,
        )
        assert (done.returncode, done.stderr) == (0, "")


def test_the_notebook_runs_and_is_kept_without_outputs(tmp_path: Path) -> None:
    notebook = nbformat.read(EXAMPLES / "tour.ipynb", as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(cell.outputs == [] and cell.execution_count is None for cell in code)
    NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(tmp_path)}}).execute()
    assert "' capital'" in code[1].outputs[0].data["text/plain"]
