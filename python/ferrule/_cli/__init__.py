"""The command `ferrule`: text on stdout, everything else on stderr, JSON where a program reads.

Exit codes: 0 done, 1 an error while working, 2 a command line that cannot be, 130 Ctrl-C.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence

import ferrule._cli.parent_process  # reads the parent's id before anything slow


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code."""
    from ferrule._cli.streams import usable_streams

    with usable_streams():
        return _main(arguments)


def _main(arguments: Sequence[str] | None) -> int:
    import click

    from ferrule._cli.app import app
    from ferrule._cli.streams import discard_output
    from ferrule.errors import FerruleError, InvalidParameterError

    warnings.showwarning = _show_warning
    try:
        # A click command returns what its function does, or the code of ctx.exit(): of --help, for one.
        code = app(args=None if arguments is None else list(arguments), prog_name="ferrule", standalone_mode=False)
        sys.stdout.flush()
    except click.ClickException as error:  # usage errors among them, whose code is 2
        return _fail(error.format_message(), error.exit_code)
    except FerruleError as error:
        return _fail(str(error), 2 if isinstance(error, InvalidParameterError) else 1)
    except (click.Abort, KeyboardInterrupt):
        return 130
    except BrokenPipeError:
        # `| head` has read enough.
        discard_output()
        return 1
    except OSError as error:  # a full disk, most likely: files of models have errors of their own
        discard_output()
        return _fail(str(error), 1)
    return code if isinstance(code, int) else 0


def _fail(message: str, code: int) -> int:
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    return code


def _show_warning(message: Warning | str, *_: object) -> None:
    print(f"warning: {' '.join(str(message).split())}", file=sys.stderr)
