"""Process of a worker on this machine: `python -m ferrule._pipeline.worker SOCKET [PEER...]`.

SOCKET is the connection to the engine; each PEER is one to another worker of the stage, in the order of their ranks.
The process reads the StageArguments from stdin. If the stage fails, it writes the error to stdout. Both are pickled.
"""

from __future__ import annotations

import pickle
import signal
import sys
from contextlib import suppress

from ferrule._pipeline.stages import StageArguments
from ferrule.errors import FerruleError


def main() -> None:
    """Runs the stage until the engine closes the connection."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the engine's process handles Ctrl-C
    from ferrule import _native

    arguments: StageArguments = pickle.load(sys.stdin.buffer)  # noqa: S301  # from the process that started this one
    try:
        connection, *peers = map(int, sys.argv[1:])
        _native.serve_stage(**arguments, peers=peers, socket=connection)
    except FerruleError as error:
        with suppress(BrokenPipeError):  # the engine's process has ended
            pickle.dump(error, sys.stdout.buffer)
            sys.stdout.flush()
        sys.exit(1)


if __name__ == "__main__":
    main()
