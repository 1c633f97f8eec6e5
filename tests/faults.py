"""Runs a hostile case in a process of its own, with little memory and little time."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

MEMORY_BYTES = 4 << 30
"""Address space, not what is resident: libraries reserve much and use little."""
SECONDS = 10
"""The promise is one second for a refusal, asserted with slack, and the interpreter has to start."""

TESTS = Path(__file__).parent


def run(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Python code on a fake engine; `arguments` are its sys.argv[1:]."""
    return subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", f"import fakes; fakes.install()\n{code}", *arguments],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
        cwd=TESTS,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES)),
    )


def refusal(code: str, *arguments: str) -> str:
    """The name and message of the FerruleError that the code must end with."""
    wrapped = "\n".join(
        [
            "import sys",
            "from ferrule import LLM, SamplingParams, FerruleError",
            "try:",
            *(f"    {line}" for line in code.splitlines()),
            "except FerruleError as error:",
            "    print(type(error).__name__, error)",
            "else:",
            "    sys.exit('nothing was refused')",
        ]
    )
    process = run(wrapped, *arguments)
    assert process.returncode == 0, process.stderr
    return process.stdout.strip()
