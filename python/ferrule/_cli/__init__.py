"""The command `ferrule`: results on stdout, messages on stderr, JSON for programs.

Exit codes: 0 success, 1 error, 2 usage error, 130 interrupted (Ctrl-C).
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence

from ferrule._cli.parent_process import PARENT_PID as PARENT_PID  # reads it before any slow import


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code."""
    from ferrule._cli.streams import usable_streams

    try:
        with usable_streams():
            return _main(arguments)
    except KeyboardInterrupt:
        return 130


def _main(arguments: Sequence[str] | None) -> int:
    import click

    from ferrule._cli.status import SILENCE

    SILENCE.end()  # of an earlier command in this process
    from ferrule._cli.app import app
    from ferrule._cli.streams import discard_output
    from ferrule.errors import FerruleError, InvalidParameterError, MissingDependencyError

    warnings.showwarning = _show_warning
    try:
        # The result is the return value of the command, or the code of ctx.exit(), for example after --help.
        code = app(args=None if arguments is None else list(arguments), prog_name="ferrule", standalone_mode=False)
        sys.stdout.flush()
    except click.ClickException as error:  # includes usage errors, whose exit code is 2
        return _fail(error.format_message(), error.exit_code)
    except FerruleError as error:
        return _fail(str(error), 2 if isinstance(error, (InvalidParameterError, MissingDependencyError)) else 1)
    except click.Abort:
        return 130
    except BrokenPipeError:
        # The reader closed the pipe, for example `| head`.
        discard_output()
        return 1
    except OSError as error:  # most likely a full disk, since model files have their own error classes
        discard_output()
        return _fail(str(error), 1)
    return code if isinstance(code, int) else 0


def _fail(message: str, code: int) -> int:
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    return code


def _show_warning(message: Warning | str, *_: object) -> None:
    print(f"warning: {' '.join(str(message).split())}", file=sys.stderr)
