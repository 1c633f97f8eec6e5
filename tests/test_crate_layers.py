"""Layers, features and test files of the crates.

import-linter checks the layers of the Python package by its contracts in pyproject.toml.
"""

import json
import re
import subprocess
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]

# Each crate and the workspace crates that it may depend on.
CRATES = {
    "ferrule-kernels": set[str](),
    "ferrule-formats": {"ferrule-kernels"},
    "ferrule-model": {"ferrule-kernels", "ferrule-formats"},
    "ferrule-engine": {"ferrule-kernels", "ferrule-model"},
    "ferrule-python": {"ferrule-kernels", "ferrule-formats", "ferrule-model", "ferrule-engine"},
}

# Crates without unsafe code.
SAFE_CRATES = ("model", "engine")


# Crates whose integration tests are one binary.
INTEGRATION_TESTS = ("formats", "model", "engine")


@cache
def packages() -> dict[str, dict[str, Any]]:
    command = ["cargo", "metadata", "--no-deps", "--format-version", "1", "--offline"]
    metadata = json.loads(subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout)
    return {package["name"]: package for package in metadata["packages"]}


def crate_dependencies() -> dict[str, set[str]]:
    return {
        name: {dependency["name"] for dependency in package["dependencies"]} & packages().keys()
        for name, package in packages().items()
    }


def test_crates_depend_on_lower_crates_only() -> None:
    found = crate_dependencies()
    assert found.keys() == CRATES.keys(), "a crate is missing from the table, or from the workspace"
    upward = {name: depends - CRATES[name] for name, depends in found.items() if depends - CRATES[name]}
    assert not upward


@pytest.mark.parametrize("crate", SAFE_CRATES)
def test_model_and_engine_forbid_unsafe_code(crate: str) -> None:
    assert "#![forbid(unsafe_code)]" in (ROOT / "rust" / crate / "src" / "lib.rs").read_text().splitlines()


def test_released_wheels_have_all_instruction_sets() -> None:
    """The wheel that CI builds has fewer of them."""
    kernels, extension = (packages()[f"ferrule-{name}"]["features"] for name in ("kernels", "python"))
    isas = kernels.keys() - {"default"}
    assert set(kernels["default"]) == isas
    assert {isa: extension[isa] for isa in isas} == {isa: [f"ferrule-kernels/{isa}"] for isa in isas}
    assert set(extension["default"]) == isas
    maturin = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["maturin"]
    assert "no-default-features" not in maturin


@pytest.mark.parametrize("crate", INTEGRATION_TESTS)
def test_each_file_of_integration_tests_is_compiled(crate: str) -> None:
    folder = ROOT / "rust" / crate / "tests"
    modules = re.findall(r"^mod (\w+);$", (folder / "main.rs").read_text(), re.MULTILINE)
    assert {path.stem for path in folder.glob("*.rs")} - {"main"} <= set(modules)
    folders = {path.parent.name for path in folder.glob("*/main.rs")}
    targets = packages()[f"ferrule-{crate}"]["targets"]
    assert folders <= {target["name"] for target in targets if target["kind"] == ["test"]}
