"""Every program of examples/ runs on the embedded model with the expected output."""

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
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient
from prometheus_client.parser import text_string_to_metric_families

from ferrule._cli.serve import command as serve
from ferrule.server import metrics
from serve_process import served

EXAMPLES = Path(__file__).parents[1] / "examples"
UNITS = {"short", "s", "reqps", "percentunit", "Bps"}
"""Grafana's names of the units in the dashboard."""
PROGRAMS = sorted(path.relative_to(EXAMPLES).as_posix() for path in EXAMPLES.rglob("*.py"))

pytestmark = pytest.mark.native


def run(program: str, *arguments: str, timeout: float = 120) -> list[str]:
    """Returns the lines that a program prints."""
    command = [sys.executable, "-W", "error", str(EXAMPLES / program), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return done.stdout.splitlines()


def test_readme_lists_every_example() -> None:
    listed = re.findall(r"^\| \[[\w.-]+\]\(([\w./-]+)\)", (EXAMPLES / "README.md").read_text(), re.MULTILINE)
    files = [path.name for path in EXAMPLES.iterdir() if path.is_file() and path.name != "README.md"]
    folders = [f"{path.parent.name}/README.md" for path in EXAMPLES.glob("*/README.md")]
    assert sorted(listed) == sorted(files + folders)


@pytest.mark.parametrize("program", PROGRAMS)
def test_example_docstrings_show_the_command(program: str) -> None:
    docstring = ast.get_docstring(ast.parse((EXAMPLES / program).read_text()))
    assert docstring is not None
    assert f"examples/{program}" in docstring


@pytest.mark.parametrize("program", PROGRAMS)
def test_programs_import_only_public_modules(program: str) -> None:
    tree = ast.parse((EXAMPLES / program).read_text())
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    names = [f"{node.module}.{alias.name}" for node in imports for alias in node.names]
    names += [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    assert [name for name in names if name.startswith("ferrule") and "._" in name] == []


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


def dashboard(prefix: str = "ferrule:") -> dict[str, Any]:
    """Returns the dashboard for a server with this prefix."""
    return json.loads((EXAMPLES / "grafana.json").read_text().replace("ferrule:", prefix))


def targets(of: dict[str, Any]) -> list[dict[str, Any]]:
    return [target for panel in of["panels"] for target in panel["targets"]]


@pytest.mark.parametrize("prefix", ["ferrule:", "vllm:"])
def test_dashboard_queries_existing_metrics(prefix: str) -> None:
    given = dashboard(prefix)
    expressions = [target["expr"] for target in targets(given)]
    (choice,) = (each["query"]["query"] for each in given["templating"]["list"] if each["type"] == "query")
    named, label = re.fullmatch(r"label_values\((\S+), (\w+)\)", choice).groups()  # type: ignore[union-attr]
    queried: dict[str, set[str]] = {named: {label}}
    for expression in expressions:
        grouped = set(re.findall(r"by \((\w+)\)", expression))
        for name, selected in re.findall(rf"({prefix}\w+)(?:{{(.*?)}})?", expression):
            queried.setdefault(name, set()).update(re.findall(r"(\w+)=", selected), grouped)
    with served("-m", "ferrule", "serve", "--port", "0", "--metrics-prefix", prefix) as url:
        body = json.dumps({"prompt": "Once upon a time,", "max_tokens": 4}).encode()
        request = urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            assert answer.status == 200
        families = text_string_to_metric_families(get(f"{url}/metrics"))
    there = {sample.name: set(sample.labels) for family in families for sample in family.samples}
    # Without a quota, the kernel counts nothing.
    counted = {f"{prefix}{name}_total": set[str]() for name in re.findall(r"cgroup_\w+", inspect.getsource(metrics))}
    assert queried.keys() - there.keys() - counted.keys() == set()
    for name, labels in queried.items():
        assert labels <= (counted | there)[name], name
    assert len(queried) > 20


def test_dashboard_panels_have_titles_units_and_descriptions() -> None:
    given = dashboard()
    panels = given["panels"]
    assert sorted(panel["id"] for panel in panels) == list(range(1, len(panels) + 1))
    places: set[tuple[int, int]] = set()
    for panel in panels:
        assert panel["title"]
        assert panel["description"]
        unit = panel["fieldConfig"]["defaults"]["unit"]
        assert unit in UNITS
        metrics = re.findall(r"ferrule:\w+", " ".join(target["expr"] for target in panel["targets"]))
        assert unit != "s" or all("_seconds_" in each and not each.endswith("_total") for each in metrics), panel[
            "title"
        ]
        names = [(target["refId"], target["legendFormat"]) for target in panel["targets"]]
        assert all(legend for _, legend in names)
        assert len({ref for ref, _ in names}) == len({legend for _, legend in names}) == len(names)
        at = panel["gridPos"]
        covered = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not places & covered, "no panel lies on another"
        places |= covered
    assert {x for x, _ in places} == set(range(24)), "the grid has 24 columns"
    for target in targets(given):
        assert target["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        (grouped,) = re.findall(r"by \((\w+)\)", target["expr"]) or ("",)
        assert re.findall(r"{{(\w+)}}", target["legendFormat"]) == [grouped] * (grouped not in ("", "le"))
    variables = set(re.findall(r"\$\{?(\w+)", json.dumps(given)))
    known = {each["name"] for each in given["templating"]["list"]}
    assert variables == known | {"__all", "__rate_interval"}


def test_systemd_unit_has_valid_command(tmp_path: Path) -> None:
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
        # It also checks that the program exists.
        (tmp_path / "ferrule.service").write_text(text.replace(program, sys.executable))
        done = subprocess.run(
            [analyze, "verify", "--man=no", str(tmp_path / "ferrule.service")],
            capture_output=True,
            text=True,
            check=False,
        )
        assert (done.returncode, done.stderr) == (0, "")


def test_notebook_runs_and_has_no_stored_outputs(tmp_path: Path) -> None:
    notebook = nbformat.read(EXAMPLES / "tour.ipynb", as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(cell.outputs == [] and cell.execution_count is None for cell in code)
    NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(tmp_path)}}).execute()
    assert "' capital'" in code[1].outputs[0].data["text/plain"]
