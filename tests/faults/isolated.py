"""Runs Python code in a separate process, which may crash, hang or exhaust memory.

The tests require that any bad input ends in a typed error within a second of processor time, with a peak memory of at
most the file's size plus 16 MiB. Time is asserted with fivefold slack, because machines are noisy. A separate limit of
elapsed time finds faults that block without using a processor.
"""

import atexit
import json
import os
import signal
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

PROMISED_SECONDS = 1.0
SLACK = 5.0
PROMISED_EXTRA_BYTES = 16 << 20
MAX_ELAPSED_SECONDS = 20.0

# Each fault runs in a fork of this process, which has imported ferrule and has no engine: an import for each fault took
# most of the time. SIGALRM ends a fork that hangs. It reports as JSON on the last line of stdout. The peak of resident
# memory is reset after the warm-up, so that its cost is not counted; clear_refs and VmHWM are described in proc(5).
_PARENT = """
import gc, json, os, pathlib, resource, signal, sys, time

import ferrule
for name in ferrule.__all__:
    getattr(ferrule, name)
import ferrule._native
gc.freeze()  # a collection in a fork would copy all pages of these objects

def memory(field):
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024

while line := sys.stdin.readline():
    if (child := os.fork()) == 0:
        break
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
else:
    sys.exit()

folder, environment, timeout, warm_up, fault, address_space, arguments = json.loads(line)
signal.setitimer(signal.ITIMER_REAL, timeout)
for number, name, flags in [(0, os.devnull, os.O_RDONLY), (1, "stdout", os.O_WRONLY), (2, "stderr", os.O_WRONLY)]:
    os.dup2(os.open(os.path.join(folder, name), flags | os.O_CREAT), number)
os.environ.clear()
os.environ.update(environment)
if address_space is not None:
    resource.setrlimit(resource.RLIMIT_AS, (address_space, address_space))
scope = {"arguments": arguments}
exec(warm_up, scope)
pathlib.Path("/proc/self/clear_refs").write_text("5")
before, started, start = memory("VmRSS"), time.process_time(), time.monotonic()
report = {"error": None, "bases": [], "message": ""}
try:
    exec(fault, scope)
except BaseException as error:
    classes = type(error).__mro__
    report = {"error": type(error).__name__, "bases": [c.__name__ for c in classes], "message": str(error)}
report["seconds"] = time.process_time() - started
report["elapsed_seconds"] = time.monotonic() - start
report["extra_bytes"] = memory("VmHWM") - before
print()
print(json.dumps(report))
"""


@cache
def _parent() -> subprocess.Popen[str]:
    """Starts the process whose forks run the faults; it ends with this one."""
    parent = subprocess.Popen(
        # Optimized, so that no Python `assert` can guard against the fault.
        [sys.executable, "-O", "-X", "faulthandler", "-c", _PARENT],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    atexit.register(parent.communicate)
    return parent


@dataclass(frozen=True)
class Outcome:
    """Result of a process."""

    error: str | None
    """Class of the exception that ended the process, or None."""
    bases: list[str]
    """Class of the exception and all of its base classes."""
    message: str
    seconds: float
    """Processor time of the fault in seconds, without the warm-up."""
    elapsed_seconds: float
    """Elapsed time of the fault in seconds, without the warm-up."""
    extra_bytes: int
    """Peak resident memory minus resident memory at the start of the fault."""


def run(
    fault: str,
    *arguments: str | int,
    warm_up: str = "import ferrule",
    address_space: int | None = 8 << 30,
    timeout: float = 60.0,
) -> Outcome:
    """Runs `fault` after `warm_up` in a new process with this environment; both see `arguments`.

    The process may map `address_space` bytes and take `timeout` seconds. Fails if it is killed by a signal or hangs.
    """
    parent = _parent()
    assert parent.stdin is not None
    assert parent.stdout is not None
    code = textwrap.dedent(warm_up), textwrap.dedent(fault)
    with TemporaryDirectory() as folder:
        request = [folder, dict(os.environ), timeout, *code, address_space, arguments]
        print(json.dumps(request), file=parent.stdin, flush=True)
        reply = parent.stdout.readline()
        if not reply:
            _parent.cache_clear()
            raise AssertionError(f"the parent of the forks ended with exit code {parent.wait()}")
        status = int(reply)
        stdout, stderr = ((Path(folder) / name).read_text() for name in ("stdout", "stderr"))
    assert status != -signal.SIGALRM, f"hangs: not done after {timeout} s; stderr: {stderr}"
    assert status >= 0, f"died of signal {-status}; stderr: {stderr}"
    assert status == 0, f"the warm-up failed; stderr: {stderr}"
    return Outcome(**json.loads(stdout.splitlines()[-1]))


def assert_refused(outcome: Outcome, error: str, fragments: list[str], *, file_bytes: int = 0) -> None:
    """Asserts that the outcome is this error, its message has all `fragments`, and time and memory are in bounds."""
    assert outcome.error is not None, "was accepted"
    assert outcome.error == error, f"{outcome.error}: {outcome.message}"
    assert "FerruleError" in outcome.bases
    for fragment in fragments:
        assert fragment in outcome.message, f"{fragment!r} is not in {outcome.message!r}"
    assert outcome.seconds < PROMISED_SECONDS * SLACK, f"took {outcome.seconds:.2f} s"
    elapsed = outcome.elapsed_seconds
    assert elapsed < MAX_ELAPSED_SECONDS, f"took {elapsed:.2f} s of elapsed time"
    allowed = file_bytes + PROMISED_EXTRA_BYTES
    assert outcome.extra_bytes <= allowed, f"took {outcome.extra_bytes} bytes more; {allowed} are promised"


def folder_bytes(folder: Path) -> int:
    """Returns the total size of all files in a directory, in bytes."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
