"""Pipeline stages in processes of this machine (`distributed_executor_backend="mp"`)."""

from __future__ import annotations

import os
import pickle
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, cast

import ferrule
from ferrule._pipeline import worker
from ferrule._pipeline.stages import StageArguments, Stages
from ferrule.errors import FerruleError, PipelineStageError

END_SECONDS = 10.0
"""Seconds in which a process ends after its connection; then it is killed."""


class StageProcesses(Stages):
    """Stages in processes of this machine."""

    def __init__(self, arguments: Sequence[StageArguments], threads: int) -> None:
        """Starts a process for each stage; `threads` is the number of threads in their options.

        Raises OSError if a process cannot be started.
        """
        super().__init__(threads)
        self._processes: list[subprocess.Popen[bytes]] = []
        try:
            for each in arguments:
                self._start(each)
        except BaseException:
            self.close()
            raise

    def failure(self, stage: int) -> FerruleError:
        """Returns the error that a process wrote before it ended."""
        process = self._processes[stage]
        try:
            written, _ = process.communicate(timeout=END_SECONDS)
        except subprocess.TimeoutExpired:
            return PipelineStageError(f"pipeline stage {stage} closed its connection while it loaded", stage)
        if written:
            error: FerruleError = pickle.loads(written)  # noqa: S301  # from a process that this one started
            return error
        return PipelineStageError(
            f"pipeline stage {stage} ended while it loaded (exit status {process.returncode})", stage
        )

    def end(self) -> None:
        """Waits until the processes have ended; kills those that do not end in time, or have not loaded yet."""
        deadline = time.monotonic() + (END_SECONDS if self.loaded else 0.0)
        processes, self._processes = self._processes, []
        try:
            for process in processes:
                with suppress(subprocess.TimeoutExpired):
                    process.communicate(timeout=max(deadline - time.monotonic(), 0.0))
        finally:
            for process in processes:
                process.kill()
                process.communicate()

    def _start(self, arguments: StageArguments) -> None:
        ours, theirs = socket.socketpair()
        self.sockets.append(ours)
        with theirs:
            process = subprocess.Popen(  # noqa: S603  # no shell; this interpreter runs a module of this package
                [sys.executable, "-P", "-m", worker.__name__, str(theirs.fileno())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                pass_fds=[theirs.fileno()],
                env={**os.environ, "PYTHONPATH": _python_path()},
                process_group=0,  # Ctrl-C in a terminal does not end it
            )
        self._processes.append(process)
        stdin, process.stdin = cast("IO[bytes]", process.stdin), None
        with suppress(BrokenPipeError), stdin:  # an early end is found by `wait_until_loaded`
            pickle.dump(arguments, stdin)


def _python_path() -> str:
    """Returns the path on which a process finds this package, wherever it was imported from."""
    folder = str(Path(ferrule.__file__).parents[1])
    return os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH")]))
