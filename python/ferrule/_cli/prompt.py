"""`[MODEL] PROMPT` on a command line: one word is the prompt."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TypeVar

import click

from ferrule._cli.model import check_model, complete_model

Command = TypeVar("Command", bound=Callable[..., Any])


def prompt_arguments(command: Command) -> Command:
    """Adds the arguments; the command gets them as `words` and hands them to `split_words`."""
    return click.argument("words", nargs=-1, metavar="[MODEL] PROMPT", shell_complete=complete_model)(command)


def split_words(words: tuple[str, ...]) -> tuple[str | None, str]:
    """Model and prompt, which comes from stdin where it is "-", or where there is none and something is piped in.

    Raises click.UsageError.
    """
    if len(words) > 2:
        raise click.UsageError(f"{len(words)} arguments; give MODEL and PROMPT, the prompt in quotes")
    if not words:
        piped = "" if sys.stdin.isatty() else _piped()
        if not piped:
            raise click.UsageError("PROMPT is missing; give it in quotes, or pipe it in")
        return None, piped
    *model, prompt = words
    return check_model(model[0]) if model else None, _piped() if prompt == "-" else prompt


def _piped() -> str:
    """All of stdin but for the end of its last line, which is `echo`'s or an editor's and ends what a model says."""
    return sys.stdin.read().removesuffix("\n")
