"""`Stages`: the workers of pipeline stages and their sockets."""

from __future__ import annotations

import logging
import os
import selectors
import socket
from abc import ABC, abstractmethod
from contextlib import suppress
from typing import TypedDict

from ferrule.errors import FerruleError, PipelineStageError

LOGGER = logging.getLogger("ferrule.pipeline")


class StageArguments(TypedDict):
    """Arguments of `_native.serve_stage`, except for the sockets."""

    spec: str
    weights: str | None
    options: str
    layers: tuple[int, int]
    stage: tuple[int, int]
    rank: int
    sharers: int


class Stages(ABC):
    """Workers of pipeline stages that run in other processes and belong to this process.

    They are in the order of their stages, and those of a stage in the order of their ranks.
    """

    def __init__(self, threads: int, ranks: int) -> None:
        self.threads = threads
        """Number of threads of each worker."""
        self.ranks = ranks
        """Number of workers of each stage, which divide the rows of its matrices."""
        self.sockets: list[socket.socket] = []
        """Connection to each worker; the engine uses duplicates of them."""
        self.loaded = False
        """Whether all workers have loaded their weights."""
        self._pid = os.getpid()

    def wait_until_loaded(self) -> None:
        """Waits until each worker has loaded its weights, and logs each that has; Ctrl-C ends the wait.

        Raises the error with which a worker failed, PipelineStageError.
        """
        with selectors.DefaultSelector() as selector:
            for index, connection in enumerate(self.sockets):
                selector.register(connection, selectors.EVENT_READ, index)
            while selector.get_map():
                for key, _ in selector.select():
                    worker: int = key.data
                    if not _has_data(self.sockets[worker]):
                        raise self.failure(worker)
                    selector.unregister(key.fileobj)
                    left = len(selector.get_map())
                    LOGGER.info("%s loaded; %d of %d left", self._name(worker), left, len(self.sockets))
        self.loaded = True

    def check(self) -> None:
        """Raises PipelineStageError if a worker has ended its connection. Only while the workers have no work."""
        for worker, connection in enumerate(self.sockets):
            with suppress(BlockingIOError):  # it is open
                if not _has_data(connection, socket.MSG_DONTWAIT):
                    raise self.loss(worker, ": the connection ended")

    def loss(self, worker: int, reason: str) -> PipelineStageError:
        """Returns the error of a worker; its message is the name of the worker with the reason."""
        return PipelineStageError(self._name(worker) + reason, worker // self.ranks)

    def _name(self, worker: int) -> str:
        stage, rank = divmod(worker, self.ranks)
        return f"pipeline stage {stage}" if self.ranks == 1 else f"pipeline stage {stage}, tensor-parallel rank {rank}"

    def close(self) -> None:
        """Ends the workers. In a forked child, only closes the child's copies of the sockets."""
        owned = os.getpid() == self._pid
        for connection in self.sockets:
            if owned:
                with suppress(OSError):  # the other end has closed it
                    connection.shutdown(socket.SHUT_RDWR)
            connection.close()
        self.sockets.clear()
        if owned:
            self.end()

    @abstractmethod
    def failure(self, worker: int) -> FerruleError:
        """Returns the error of a worker whose connection has ended."""

    @abstractmethod
    def end(self) -> None:
        """Ends the processes of the workers after their connections."""


def _has_data(connection: socket.socket, flags: int = 0) -> bool:
    """Whether a readable connection has data; if not, the other end has closed it.

    Raises BlockingIOError if it is not readable, with the flag MSG_DONTWAIT.
    """
    try:
        return bool(connection.recv(1, socket.MSG_PEEK | flags))
    except BlockingIOError:
        raise
    except OSError:  # reset
        return False
