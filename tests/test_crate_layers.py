"""Crates depend on lower crates only; import-linter checks the Python package by the contracts in pyproject.toml."""

import json
import subprocess
from pathlib import Path

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


def crate_dependencies() -> dict[str, set[str]]:
    command = ["cargo", "metadata", "--no-deps", "--format-version", "1", "--offline"]
    metadata = json.loads(subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout)
    ours = {package["name"] for package in metadata["packages"]}
    return {
        package["name"]: {dependency["name"] for dependency in package["dependencies"]} & ours
        for package in metadata["packages"]
    }


def test_crates_depend_on_lower_crates_only() -> None:
    found = crate_dependencies()
    assert found.keys() == CRATES.keys(), "a crate is missing from the table, or from the workspace"
    upward = {name: depends - CRATES[name] for name, depends in found.items() if depends - CRATES[name]}
    assert not upward


@pytest.mark.parametrize("crate", SAFE_CRATES)
def test_model_and_engine_forbid_unsafe_code(crate: str) -> None:
    assert "#![forbid(unsafe_code)]" in (ROOT / "rust" / crate / "src" / "lib.rs").read_text().splitlines()
