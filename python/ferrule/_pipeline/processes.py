"""Workers of pipeline stages in processes of this machine (`distributed_executor_backend="mp"`)."""

from __future__ import annotations

import errno
import os
import pickle
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO, cast

import ferrule
from ferrule._pipeline import worker
from ferrule._pipeline.stages import StageArguments, Stages
from ferrule.errors import EngineError, FerruleError

END_SECONDS = 10.0
"""Seconds in which a process ends after its connection; then it is killed."""


class StageProcesses(Stages):
    """Workers in processes of this machine."""

    def __init__(self, arguments: Sequence[StageArguments], threads: int, ranks: int = 1) -> None:
        """Starts a process for each worker; `threads` is the number of threads in their options.

        Raises EngineError if a process or the connections between the processes cannot be created.
        """
        super().__init__(threads, ranks)
        self._processes: list[subprocess.Popen[bytes]] = []
        try:
            for first in range(0, len(arguments), ranks):
                with ExitStack() as stack:
                    for each, peers in zip(arguments[first : first + ranks], _mesh(ranks, stack), strict=True):
                        self._start(each, peers)
        except OSError as error:
            self.close()
            stages = len(arguments) // ranks
            sizes = f"pipeline_parallel_size={stages}, tensor_parallel_size={ranks}"
            advice = ""
            if error.errno == errno.EMFILE:
                advice = (
                    f"; each stage has {ranks * (ranks - 1)} sockets between its workers: use a smaller "
                    "tensor_parallel_size or a higher limit of open files (ulimit -n)"
                )
            message = f"cannot start {len(arguments)} workers ({sizes}): {error}{advice}"
            raise EngineError(message) from error
        except BaseException:
            self.close()
            raise

    def failure(self, worker: int) -> FerruleError:
        """Returns the error that a process wrote before it ended."""
        process = self._processes[worker]
        try:
            written, _ = process.communicate(timeout=END_SECONDS)
        except subprocess.TimeoutExpired:
            return self.loss(worker, " closed its connection while it loaded")
        if written:
            error: FerruleError = pickle.loads(written)  # noqa: S301  # from a process that this one started
            return error
        return self.loss(worker, f" ended while it loaded (exit status {process.returncode})")

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

    def _start(self, arguments: StageArguments, peers: Sequence[socket.socket]) -> None:
        ours, theirs = socket.socketpair()
        self.sockets.append(ours)
        with theirs:
            given = [each.fileno() for each in (theirs, *peers)]
            process = subprocess.Popen(  # noqa: S603  # no shell; this interpreter runs a module of this package
                [sys.executable, "-P", "-m", worker.__name__, *map(str, given)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                pass_fds=given,
                env={**os.environ, "PYTHONPATH": _python_path()},
                process_group=0,  # Ctrl-C in a terminal does not end it
            )
        self._processes.append(process)
        stdin, process.stdin = cast("IO[bytes]", process.stdin), None
        with suppress(BrokenPipeError), stdin:  # an early end is found by `wait_until_loaded`
            pickle.dump(arguments, stdin)


def _mesh(ranks: int, stack: ExitStack) -> list[list[socket.socket]]:
    """Returns for each worker its connections to the others in the order of ranks; `stack` closes them here."""
    peers: list[list[socket.socket]] = [[] for _ in range(ranks)]
    for low in range(ranks):
        for high in range(low + 1, ranks):
            for rank, connection in zip((low, high), socket.socketpair(), strict=True):
                peers[rank].append(stack.enter_context(connection))
    return peers


def _python_path() -> str:
    """Returns the path on which a process finds this package, wherever it was imported from."""
    folder = str(Path(ferrule.__file__).parents[1])
    return os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH")]))
