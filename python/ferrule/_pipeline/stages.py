"""`Stages`: the stages of a pipeline and their sockets."""

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
    """Arguments of `_native.serve_stage`, except for the socket."""

    spec: str
    weights: str | None
    options: str
    layers: tuple[int, int]
    sharers: int


class Stages(ABC):
    """Stages of a pipeline, first to last, that run in other processes and belong to this process."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        """Number of threads of each stage."""
        self.sockets: list[socket.socket] = []
        """Connection to each stage; the engine uses duplicates of them."""
        self.loaded = False
        """Whether all stages have loaded their layers."""
        self._pid = os.getpid()

    def wait_until_loaded(self) -> None:
        """Waits until each stage has loaded its layers, and logs each that has; Ctrl-C ends the wait.

        Raises the error with which a stage failed, PipelineStageError.
        """
        with selectors.DefaultSelector() as selector:
            for index, connection in enumerate(self.sockets):
                selector.register(connection, selectors.EVENT_READ, index)
            while selector.get_map():
                for key, _ in selector.select():
                    stage: int = key.data
                    if not _has_data(self.sockets[stage]):
                        raise self.failure(stage)
                    selector.unregister(key.fileobj)
                    left = len(selector.get_map())
                    LOGGER.info("pipeline stage %d loaded; %d of %d left", stage, left, len(self.sockets))
        self.loaded = True

    def check(self) -> None:
        """Raises PipelineStageError if a stage has ended its connection. Only while the stages have no work."""
        for stage, connection in enumerate(self.sockets):
            with suppress(BlockingIOError):  # it is open
                if not _has_data(connection, socket.MSG_DONTWAIT):
                    raise PipelineStageError(f"pipeline stage {stage}: the connection ended", stage)

    def close(self) -> None:
        """Ends the stages. In a forked child, only closes the child's copies of the sockets."""
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
    def failure(self, stage: int) -> FerruleError:
        """Returns the error of a stage whose connection has ended."""

    @abstractmethod
    def end(self) -> None:
        """Ends the processes of the stages after their connections."""


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
