"""The fuzz targets in Python, run without a fuzzer: on their seeds, and on random damage to them.

`FERRULE_FUZZ_INPUTS=100000 pytest tests/faults/test_fuzz_seeds.py` damages more.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
FUZZ = TESTS.parent / "fuzz"
INPUTS = {"chat_template": 500, "gbnf": 2000, "request": 500}


@pytest.mark.parametrize("target", sorted(path.stem for path in (FUZZ / "python").glob("*.py")))
def test_damaged_inputs_are_accepted_or_refused_with_a_typed_error(target: str) -> None:
    runs = os.environ.get("FERRULE_FUZZ_INPUTS", INPUTS[target])
    path = os.pathsep.join([str(TESTS / "faults" / "replay"), str(TESTS), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, FUZZ / "python" / f"{target}.py", FUZZ / "seeds" / target, f"-runs={runs}"],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": path},
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    assert done.stdout.endswith(f" seeds and {runs} damaged inputs\n")
