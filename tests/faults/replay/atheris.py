"""Stands in for atheris in tests: passes the seeds of a folder to a fuzz target, and then random damage to them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from random import Random

from faults.mutations import damaged_bytes

_prepared: list[Callable[[], None]] = []


def instrument_imports(include: list[str]) -> AbstractContextManager[None]:
    """Imports modules as they are."""
    del include
    return nullcontext()


def Setup(argv: list[str], target: Callable[[bytes], None]) -> None:
    """Takes the folder of seeds, and `-runs=N` for the number of inputs, as libFuzzer does."""
    folder, runs = argv[1:]
    _prepared.append(lambda: _replay(target, Path(folder), int(runs.removeprefix("-runs="))))


def Fuzz() -> None:
    """Runs the target."""
    _prepared.pop()()


def _replay(target: Callable[[bytes], None], folder: Path, runs: int) -> None:
    seeds = [path.read_bytes() for path in sorted(folder.iterdir())]
    for seed in seeds:
        target(seed)
    for number in range(runs):
        random = Random(number)
        seed = random.choice(seeds)
        damaged = damaged_bytes(seed, random, len(seed))
        try:
            target(damaged)
        except BaseException:
            print(f"input {number}: {damaged!r}")
            raise
    print(f"{len(seeds)} seeds and {runs} damaged inputs")
