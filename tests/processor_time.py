"""Processor time of another process: unlike wall-clock time it does not depend on the other load of the machine."""

from __future__ import annotations

import os
import resource
import time
from pathlib import Path

WITHIN = 60.0
"""Seconds within which a process must have computed for the time that a test waits for."""


def processor_seconds(pid: int) -> float:
    """Returns the processor time of all threads of a running process so far, in seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def processor_seconds_of_children() -> float:
    """Returns the processor time of the children of this process that have been waited for, in seconds."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def wait_until_computing(pid: int, seconds: float = 0.3) -> float:
    """Waits until a process has computed for some seconds from now; returns its processor time then, in seconds."""
    wanted = processor_seconds(pid) + seconds
    deadline = time.monotonic() + WITHIN
    while (used := processor_seconds(pid)) < wanted:
        assert time.monotonic() < deadline, f"process {pid} does not compute"
        time.sleep(0.01)
    return used
