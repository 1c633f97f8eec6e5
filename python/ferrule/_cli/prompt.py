"""The arguments `[MODEL] PROMPT`: a single argument is a model if it names one, else the prompt."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import click

from ferrule._cli.model import check_model, complete_model
from ferrule._loading.catalogue import similar_names
from ferrule._loading.resolve import EMBEDDED, catalogued, is_repository

Command = TypeVar("Command", bound=Callable[..., Any])
PATHS = ("./", "../", "/", "~/")
"""Beginnings of a path; with one of them a single word is a model even if the file is missing."""
_TAGGED = re.compile(r"[\w.-]+:[\w.-]+", re.ASCII)


def prompt_arguments(command: Command) -> Command:
    """Adds the arguments; the command receives them as `words` and passes them to `split_words`."""
    return click.argument("words", nargs=-1, metavar="[MODEL] PROMPT", shell_complete=complete_model)(command)


def split_words(words: tuple[str, ...]) -> tuple[str | None, str]:
    """Returns model and prompt. The prompt is read from stdin if it is "-", or if it is absent and stdin is piped.

    Raises click.UsageError.
    """
    model, prompt = split_model(words)
    if not prompt:
        raise click.UsageError("PROMPT is missing; give it in quotes or pipe it in")
    return model, prompt


def split_model(words: tuple[str, ...]) -> tuple[str | None, str | None]:
    """Returns model and prompt like `split_words`; the prompt is None or empty if it is missing.

    Raises click.UsageError.
    """
    if len(words) > 2:
        raise click.UsageError(f"expected [MODEL] PROMPT, got {len(words)} arguments; put the prompt in quotes")
    if len(words) == 2:
        return check_model(words[0]), _piped() if words[1] == "-" else words[1]
    if words and not names_model(words[0]):
        return None, _piped() if words[0] == "-" else words[0]
    model = check_model(words[0]) if words else None
    return model, None if sys.stdin.isatty() else _piped()


def names_model(word: str) -> bool:
    """Whether a single argument is a model rather than a prompt.

    It is if it is an existing file or directory, a path, org/repo, a name of the catalogue, or a misspelled one with a
    tag.
    """
    if word == EMBEDDED or is_repository(word):
        return True
    if not word or any(map(str.isspace, word)):
        return False
    if os.path.exists(word) or word.startswith(PATHS) or word.lower().endswith(".gguf"):  # noqa: PTH110  # never raises
        return True
    if catalogued(word) is not None:
        return True
    return _TAGGED.fullmatch(word) is not None and bool(similar_names(word))


def _piped() -> str:
    """Reads stdin without its final newline, which would make a model begin a new paragraph."""
    return sys.stdin.read().removesuffix("\n")
