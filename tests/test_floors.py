"""An import only ever points down: between the crates, and between the parts of the Python package.

A new part is one entry in a table here, and whoever adds it decides on which floor it stands.
"""

import ast
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "python" / "ferrule"

# Each crate and the crates of ours that it may depend on.
CRATES = {
    "ferrule-kernels": set[str](),
    "ferrule-formats": set[str](),
    "ferrule-model": {"ferrule-kernels", "ferrule-formats"},
    "ferrule-engine": {"ferrule-kernels", "ferrule-model"},
    "ferrule-python": {"ferrule-kernels", "ferrule-formats", "ferrule-model", "ferrule-engine"},
}

# Crates whose every line the compiler checks.
SAFE_CRATES = ("model", "engine")

# The parts of python/ferrule, the lowest floor first. A part imports from lower floors, or from itself.
FLOORS: list[set[str]] = [
    {"errors", "spec", "_native"},
    {"checks", "stop", "detokenizer", "tensors", "picture", "workers"},
    {"parsers", "logits_processors", "speculative", "structured"},
    {"params", "outputs", "metrics", "archs", "chat"},
    {"gguf", "quantized"},
    {"options", "loading", "shapes", "tokenizer"},
    {"fim", "restrictions", "grammars", "calibration"},
    {"prompt", "info", "packing", "quantization"},
    {"encoding"},
    {"driver"},
    {"lora"},
    {"request", "score", "evaluation", "distillation"},
    {"beams"},
    {"run", "loaded", "collector"},
    {"registry"},
    {"engine_thread"},
    {"llm", "async_llm"},
    {"bench", "harness", "server"},
    {"batch"},
    {"cli"},
    {"__main__"},
]


def crate_dependencies() -> dict[str, set[str]]:
    command = ["cargo", "metadata", "--no-deps", "--format-version", "1", "--offline"]
    metadata = json.loads(subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout)
    ours = {package["name"] for package in metadata["packages"]}
    return {
        package["name"]: {dependency["name"] for dependency in package["dependencies"]} & ours
        for package in metadata["packages"]
    }


def test_crates_depend_on_lower_floors_alone() -> None:
    found = crate_dependencies()
    assert found.keys() == CRATES.keys(), "a crate is missing from the table, or from the workspace"
    upward = {name: depends - CRATES[name] for name, depends in found.items() if depends - CRATES[name]}
    assert not upward


@pytest.mark.parametrize("crate", SAFE_CRATES)
def test_model_and_engine_forbid_unsafe_code(crate: str) -> None:
    assert "#![forbid(unsafe_code)]" in (ROOT / "rust" / crate / "src" / "lib.rs").read_text().splitlines()


def part_of(module: str) -> str:
    """The part that a module `ferrule.x.y` belongs to: `x`."""
    return module.split(".")[1]


def imported_modules(path: Path, module: str) -> Iterator[str]:
    """The modules of ferrule that a file imports anywhere, in functions and for types too."""
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            climbed = package.split(".")[: len(package.split(".")) + 1 - node.level] if node.level else []
            base = ".".join([*climbed, *([node.module] if node.module else [])])
            # `from ferrule import x` imports a part; `from ferrule.x import y` one that the base names already.
            yield from (f"{base}.{alias.name}" if base == "ferrule" else base for alias in node.names)


def modules() -> dict[str, Path]:
    """Every module of the package but `ferrule` itself, which names everything and imports it when it is used."""
    found: dict[str, Path] = {}
    for path in PACKAGE.rglob("*.py"):
        inside = path.relative_to(PACKAGE).with_suffix("")
        names = inside.parts[:-1] if inside.name == "__init__" else inside.parts
        if names:
            found[".".join(("ferrule", *names))] = path
    return found


def test_python_imports_point_down() -> None:
    floor = {part: number for number, parts in enumerate(FLOORS) for part in parts}
    for module, path in modules().items():
        part = part_of(module)
        assert part in floor, f"{module} is on no floor: enter {part!r} in the table"
        for imported in imported_modules(path, module):
            if imported == "ferrule.__version__":
                continue
            if not imported.startswith("ferrule."):
                assert imported != "ferrule", f"{module} imports the whole package; name the part"
                continue
            target = part_of(imported)
            assert target in floor, f"{module} imports {imported}, which is on no floor"
            allowed = target == part or floor[target] < floor[part]
            assert allowed, f"{module} (floor {floor[part]}) imports {imported} (floor {floor[target]})"


def test_every_part_in_the_table_exists() -> None:
    there = {part_of(module) for module in modules()} | {"_native"}
    assert set[str]().union(*FLOORS) == there
