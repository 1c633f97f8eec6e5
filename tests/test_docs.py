"""docs/add-an-architecture.md: its examples run, and its table names every option and families that use it."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import inspect
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ferrule import LLM, InvalidParameterError, UnsupportedModelError, archs
from ferrule._cli import main
from ferrule._loading import read_model_files
from ferrule.archs import REGISTRY, Architecture, model_spec, register, spec
from ferrule.archs.config import Config
from ferrule.archs.decoder import decoder
from ferrule.archs.gemma4 import gemma4
from ferrule.archs.llama import llama

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "add-an-architecture.md").read_text()
GOLDEN = Path(__file__).parent / "golden" / "logits"
EXAMPLES: list[str] = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
TABLES: list[list[list[str]]] = [
    [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()]
    for table in re.findall(r"(?:^\|.*\|\n)+", PAGE, re.MULTILINE)
]
SWITCHES = next(table[2:] for table in TABLES if table[0] == ["Reference", "Description", "Example"])

REFUSED = next(table[2:] for table in TABLES if table[0] == ["`model_type`", "Example", "Meaning"])
WRITTEN = json.loads((GOLDEN.parent / "defaults.json").read_text())
"""Default configurations."""

SAID_BY_DECODER = {"config", "modules", "tied", "lm_head", "final_norm"}
"""Arguments that the text explains instead of the table."""


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Removes the architectures that a test registered."""
    monkeypatch.setattr(archs, "_registered", [])


def copy(case: str, directory: Path, **changes: Any) -> Path:
    """A golden case under another name."""
    shutil.copytree(GOLDEN / case, directory)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, **changes}))
    return directory


def run_example(number: int) -> dict[str, Any]:
    """Returns the names that an example of the page defines."""
    names: dict[str, Any] = {"__name__": "example"}
    exec(compile(EXAMPLES[number], "docs/add-an-architecture.md", "exec"), names)
    return names


def check_parity(directory: Path) -> None:
    with np.load(directory / "golden.npz") as golden:
        ids, expected = golden["input_ids"].tolist(), golden["logits"]
        rows = golden["rows"] if "rows" in golden else slice(None)
    with LLM(directory, quantization="f32", kv_cache_dtype="f32") as llm:
        logits = llm.logits(ids)[rows]
    assert np.abs(logits.astype(np.float64) - expected).max() <= 1e-4 * np.abs(expected).max()


@pytest.mark.native
def test_complete_example_defines_a_working_family(tmp_path: Path) -> None:
    model = copy("gpt_neox", tmp_path / "otter", architectures=["OtterForCausalLM"], model_type="otter")
    with pytest.raises(UnsupportedModelError, match="'OtterForCausalLM'; supported "):
        read_model_files(model)
    run_example(0)
    assert read_model_files(model).spec.architecture == "otter"
    check_parity(model)


@pytest.mark.native
def test_smallest_example_is_qwen2(tmp_path: Path) -> None:
    register(Architecture("Ferret", "ferret", run_example(1)["ferret"]))
    check_parity(copy("qwen2", tmp_path / "ferret", architectures=["FerretForCausalLM"], model_type="ferret"))


@pytest.mark.native
def test_example_of_a_hybrid_is_lfm2(tmp_path: Path) -> None:
    model = copy("../variants/lfm2", tmp_path / "stoat", architectures=["StoatForCausalLM"], model_type="stoat")
    run_example(2)
    assert read_model_files(model).spec.architecture == "stoat"
    check_parity(model)


def test_page_has_three_examples() -> None:
    assert len(EXAMPLES) == 3


def switches() -> Iterator[str]:
    """Returns every argument of `decoder`, and every field of its dataclasses in which families differ."""
    yield from inspect.signature(decoder).parameters.keys() - SAID_BY_DECODER
    for kind in (spec.Router, spec.Experts, spec.HeadNorm, spec.Embedding, spec.LmHead, spec.Dense):
        yield from (field.name for field in dataclasses.fields(kind) if field.name != "type")


@pytest.mark.parametrize("switch", sorted(set(switches())))
def test_page_mentions_every_switch(switch: str) -> None:
    code = " ".join(re.findall(r"`([^`\n]+)`", PAGE)) + EXAMPLES[0]
    assert re.search(rf"\b{switch}\b", code), f"docs/add-an-architecture.md does not say what {switch} is for"


def sources(family: str) -> str:
    """Returns the source of a family's file, and of the files that it uses."""
    files: dict[str, str] = {}

    def add(name: str) -> None:
        if name not in files and name not in ("config", "decoder", "rope"):
            files[name] = inspect.getsource(importlib.import_module(f"ferrule.archs.{name}"))
            for base in re.findall(r"^from ferrule\.archs\.(\w+)", files[name], re.MULTILINE):
                add(base)

    add(family)
    return "".join(files.values())


@pytest.mark.parametrize(("switch", "families"), [row[1:] for row in SWITCHES if not row[1].startswith("nothing")])
def test_table_rows_match_family_sources(switch: str, families: str) -> None:
    """All arguments and names of values in its code, in one or another of them; and each of them some of it."""
    code = " ".join(re.findall(r"`([^`]+)`", switch))
    words = re.findall(r'\w+=|"\w+"', code) or [f"{re.split(r'[^a-z_]', code)[0]}="]
    texts = {family: sources(family) for family in families.split(", ")}
    for word in words:
        assert any(word in text for text in texts.values()), f"none of {families} says {word}"
    for family, text in texts.items():
        assert any(word in text for word in words), f"{family} says none of {', '.join(words)}"


def test_paths_on_the_page_exist() -> None:
    paths = re.findall(r"`((?:rust|python|tools|tests|archs)/[\w./-]+)`", PAGE)
    assert len(paths) > 20
    for path in paths:
        places = (ROOT / path, ROOT / "python" / "ferrule" / path)
        assert any(place.exists() for place in places), path


def test_defaults_on_the_page_match_decoder() -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4}
    values = {**sizes, "vocab_size": 10, "model_type": "llama", "max_position_embeddings": 8}
    found = decoder(Config(values, Path("config.json")))
    projections = found.layers[0].attention.projections
    assert isinstance(projections, spec.HeadProjections)
    assert (projections.kv_heads, projections.key_dim) == (4, 16)
    assert found.layers[0].block("attention").norm == spec.RmsNorm(1e-6)
    assert found.layers[0].block("ffn").mixer == spec.Dense(96, "silu")
    assert (found.ropes[0].theta, found.lm_head) == (10_000, spec.LmHead(tied=False))
    for field in ("rms_norm_eps", "rope_theta", "hidden_act", "num_key_value_heads", "head_dim", "tie_word_embeddings"):
        assert f"| `{field}` |" in PAGE


@pytest.mark.parametrize(("model_type", "example"), [row[:2] for row in REFUSED])
def test_unsupported_configurations_are_refused(model_type: str, example: str) -> None:
    usual = next(written for written in WRITTEN if written["model_type"] == model_type)
    assert model_spec(Config(usual, Path("config.json"))).layers
    changes: dict[str, Any] = json.loads(example.strip("`"))
    # The first field, or one in it, is the unsupported one.
    with pytest.raises(UnsupportedModelError, match=rf"config\.json: {next(iter(changes))}(\.\w+)? must be "):
        model_spec(Config(usual | changes, Path("config.json")))


def test_registered_architecture_is_listed_in_errors() -> None:
    config = Config({"architectures": ["StoatForCausalLM"], "model_type": "stoat"}, Path("config.json"))
    with pytest.raises(UnsupportedModelError) as unknown:
        model_spec(config)
    assert "OtterForCausalLM" not in str(unknown.value)
    register(Architecture("Otter", "otter", llama))
    with pytest.raises(UnsupportedModelError, match="OtterForCausalLM"):
        model_spec(config)


def test_registered_architecture_may_read_per_layer_config() -> None:
    written = next(each for each in WRITTEN if each["model_type"] == "gemma4_text")
    config = Config({**written, "model_type": "otter", "per_layer_config": {"0": {}}}, Path("config.json"))
    register(Architecture("Otter", "otter", gemma4))
    with pytest.raises(UnsupportedModelError, match="per_layer_config must be missing"):
        model_spec(config)
    register(Architecture("Otter", "otter", gemma4, layers_differ=True))
    assert len(model_spec(config).layers) == written["num_hidden_layers"]


def test_later_registration_replaces_earlier() -> None:
    first, second = (Architecture("Otter", model_type, llama) for model_type in ("otter", "otter2"))
    register(first)
    register(second)
    assert archs.architectures()[len(REGISTRY) :] == (second,)


@pytest.mark.parametrize(
    ("architecture", "message"),
    [
        (Architecture("Llama", "llama9", llama), "name must be a new name, which no built-in architecture has"),
        (Architecture("Otter", "llama", llama), "model_type must be a new name, which no built-in architecture has"),
        (Architecture("", "otter", llama), "name must be a new name, which no built-in architecture has, got ''"),
        ("otter", "architecture must be an Architecture, got 'otter'"),
    ],
)
def test_invalid_registration(architecture: Any, message: str) -> None:
    with pytest.raises(InvalidParameterError, match=re.escape(message)):
        register(architecture)
    assert archs.architectures() == REGISTRY


PLUGIN = """
from ferrule.archs import Architecture
from ferrule.archs.llama import llama
OTTER = Architecture("Otter", "otter", llama)
NO_OTTER = "otter"
"""


def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str) -> None:
    """A package with an entry point, as pip installs it."""
    (tmp_path / "otter_plugin.py").write_text(PLUGIN)
    about = tmp_path / "otter_plugin-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: otter-plugin\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(f"[{archs.ENTRY_POINTS}]\notter = {target}\n")
    monkeypatch.syspath_prepend(tmp_path)


def test_command_line_loads_entry_points(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], fake_engine: object
) -> None:
    model = copy("llama", tmp_path / "otter", architectures=["OtterForCausalLM"], model_type="otter")
    assert main(["info", str(model)]) == 1
    assert "OtterForCausalLM" in capsys.readouterr().err
    install(tmp_path, monkeypatch, "otter_plugin:OTTER")
    assert main(["info", str(model)]) == 0
    assert "otter, " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("otter_plugin:NOTHING", "AttributeError: module 'otter_plugin' has no attribute 'NOTHING'"),
        ("otter_plugin:NO_OTTER", "architecture must be an Architecture, got 'otter'"),
        ("no_such_module:OTTER", "ModuleNotFoundError: No module named 'no_such_module'"),
    ],
)
def test_broken_entry_point_is_reported(
    target: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, monkeypatch, target)
    config = Config({"architectures": ["OtterForCausalLM"]}, Path("config.json"))
    with pytest.raises(UnsupportedModelError, match=re.escape(message)) as refused:
        model_spec(config)
    assert f"the entry point otter ({target}) of ferrule.architectures cannot be loaded" in str(refused.value)
    assert "unsupported architecture 'OtterForCausalLM'; supported " in str(refused.value)
    assert read_model_files(GOLDEN / "llama").spec.architecture == "llama"


def test_broken_entry_point_does_not_hide_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch, "no_such_module:OTTER\nwhole = otter_plugin:OTTER")
    config = Config.read(GOLDEN / "llama" / "config.json").with_values(architectures=["OtterForCausalLM"])
    assert model_spec(config).architecture == "llama"


def check_golden(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "tools" / "check_golden.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, check=False)


@pytest.mark.native
def test_check_golden_reports_differences(tmp_path: Path) -> None:
    (tmp_path / "otter.py").write_text(EXAMPLES[0])
    changes = {"architectures": ["OtterForCausalLM"], "model_type": "otter"}
    right = copy("gpt_neox", tmp_path / "right", **changes)
    wrong = copy("gpt_neox", tmp_path / "wrong", **changes, rotary_emb_base=77)
    (wrong / "config.json").write_text((wrong / "config.json").read_text().replace("rope_parameters", "unread"))
    done = check_golden("--plugin", "otter", str(right), cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert re.fullmatch(r"right: off by \d\.\de-0[67] of the largest logit\n", done.stdout)
    done = check_golden("--plugin", "otter", str(right), str(wrong), cwd=tmp_path)
    assert done.returncode == 1
    assert "from token 1 on, and earlier ones are right: check the rotary embedding" in done.stdout
    done = check_golden(str(right), cwd=tmp_path)
    assert done.returncode == 1
    assert "right: UnsupportedModelError: " in done.stdout
    done = check_golden(str(tmp_path), cwd=tmp_path)
    assert done.returncode == 2
    assert "has no golden.npz" in done.stderr


def test_check_golden_diagnoses_location_of_differences() -> None:
    found = importlib.util.spec_from_file_location("check_golden", ROOT / "tools" / "check_golden.py")
    assert found is not None
    assert found.loader is not None
    tool = importlib.util.module_from_spec(found)
    found.loader.exec_module(tool)
    wrong = np.zeros((40, 320))
    wrong[3:, 7] = 1.0
    assert tool.diagnosis(wrong, np.arange(40)).startswith("only of token 7:")
    wrong[20:] = 1.0
    assert "from token 3 on" in tool.diagnosis(wrong, np.arange(40))
    assert "a window" in tool.diagnosis(wrong, np.arange(40))
    wrong[0] = 1.0
    assert tool.diagnosis(wrong, np.arange(40)).startswith("from the first token on")
