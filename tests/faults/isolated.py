"""Runs Python code in a separate process, which may crash, hang or exhaust memory.

The tests require that any bad input ends in a typed error within a second, with a peak memory of at most the
file's size plus 16 MiB. Wall-clock limits are asserted with fivefold slack, because machines are noisy.
"""

import json
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

PROMISED_SECONDS = 1.0
SLACK = 5.0
PROMISED_EXTRA_BYTES = 16 << 20

# Reports as JSON on the last line of stdout. The peak of resident memory is reset after the warm-up, so that
# the cost of imports is not counted; clear_refs and VmHWM are described in proc(5).
_CHILD = """
import json, pathlib, resource, sys, time

warm_up, fault, address_space, arguments = json.loads(sys.stdin.read())
if address_space is not None:
    resource.setrlimit(resource.RLIMIT_AS, (address_space, address_space))

def memory(field):
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024

scope = {"arguments": arguments}
exec(warm_up, scope)
pathlib.Path("/proc/self/clear_refs").write_text("5")
before, started = memory("VmRSS"), time.monotonic()
report = {"error": None, "bases": [], "message": ""}
try:
    exec(fault, scope)
except BaseException as error:
    classes = type(error).__mro__
    report = {"error": type(error).__name__, "bases": [c.__name__ for c in classes], "message": str(error)}
report["seconds"] = time.monotonic() - started
report["extra_bytes"] = memory("VmHWM") - before
print()
print(json.dumps(report))
"""


@dataclass(frozen=True)
class Outcome:
    """Result of a process."""

    error: str | None
    """Class of the exception that ended the process, or None."""
    bases: list[str]
    """Class of the exception and all of its base classes."""
    message: str
    seconds: float
    """Duration of the fault in seconds, without the start of Python and the warm-up."""
    extra_bytes: int
    """Peak resident memory minus resident memory at the start of the fault."""


def run(
    fault: str,
    *arguments: str | int,
    warm_up: str = "import ferrule",
    address_space: int | None = 8 << 30,
    timeout: float = 60.0,
    environment: dict[str, str] | None = None,
) -> Outcome:
    """Runs `fault` after `warm_up` in a new process; both see `arguments`.

    The process may map `address_space` bytes and take `timeout` seconds. Fails if it is killed by a signal or hangs.
    """
    given = json.dumps([textwrap.dedent(warm_up), textwrap.dedent(fault), address_space, arguments])
    try:
        child = subprocess.run(
            # Optimized, so that no Python `assert` can guard against the fault.
            [sys.executable, "-O", "-X", "faulthandler", "-c", _CHILD],
            input=given,
            capture_output=True,
            text=True,
            timeout=timeout,
            env=environment,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise AssertionError(f"hangs: not done after {timeout} s; stderr: {error.stderr}") from None
    assert child.returncode >= 0, f"died of signal {-child.returncode}; stderr: {child.stderr}"
    assert child.returncode == 0, f"the warm-up failed; stderr: {child.stderr}"
    return Outcome(**json.loads(child.stdout.splitlines()[-1]))


def assert_refused(outcome: Outcome, error: str, fragments: list[str], *, file_bytes: int = 0) -> None:
    """Asserts that the outcome is this error, its message has all `fragments`, and time and memory are in bounds."""
    assert outcome.error is not None, "was accepted"
    assert outcome.error == error, f"{outcome.error}: {outcome.message}"
    assert "FerruleError" in outcome.bases
    for fragment in fragments:
        assert fragment in outcome.message, f"{fragment!r} is not in {outcome.message!r}"
    assert outcome.seconds < PROMISED_SECONDS * SLACK, f"took {outcome.seconds:.2f} s"
    allowed = file_bytes + PROMISED_EXTRA_BYTES
    assert outcome.extra_bytes <= allowed, f"took {outcome.extra_bytes} bytes more; {allowed} are promised"


def folder_bytes(folder: Path) -> int:
    """Returns the total size of all files in a directory, in bytes."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
