"""The arguments `[MODEL] PROMPT`: a single argument is the prompt."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TypeVar

import click

from ferrule._cli.model import check_model, complete_model

Command = TypeVar("Command", bound=Callable[..., Any])


def prompt_arguments(command: Command) -> Command:
    """Adds the arguments; the command receives them as `words` and passes them to `split_words`."""
    return click.argument("words", nargs=-1, metavar="[MODEL] PROMPT", shell_complete=complete_model)(command)


def split_words(words: tuple[str, ...]) -> tuple[str | None, str]:
    """Returns model and prompt. The prompt is read from stdin if it is "-", or if it is absent and stdin is piped.

    Raises click.UsageError.
    """
    if len(words) > 2:
        raise click.UsageError(f"expected [MODEL] PROMPT, got {len(words)} arguments; put the prompt in quotes")
    if not words:
        piped = "" if sys.stdin.isatty() else _piped()
        if not piped:
            raise click.UsageError("PROMPT is missing; give it in quotes or pipe it in")
        return None, piped
    *model, prompt = words
    return check_model(model[0]) if model else None, _piped() if prompt == "-" else prompt


def _piped() -> str:
    """Reads stdin without its final newline, which would make a model begin a new paragraph."""
    return sys.stdin.read().removesuffix("\n")
