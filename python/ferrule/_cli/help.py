"""Help that teaches by example, with options under headings by what they are about."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import click

Decorated = TypeVar("Decorated", bound=Callable[..., Any])
CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 100}
"""Of every command, by itself too: click makes an option for help once, for the context that asks first."""
EXIT_CODES = "Exit codes: 0 done, 1 an error while working, 2 a command line that cannot be, 130 Ctrl-C."


class Option(click.Option):
    """An option that stands under a heading."""

    def __init__(self, *arguments: Any, topic: str, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.topic = topic


def options(topic: str, table: Sequence[tuple[tuple[str, ...], dict[str, Any]]]) -> Callable[[Decorated], Decorated]:
    """Adds options under a heading: for each its names, and what click.option wants to know of it."""

    def add(command: Decorated) -> Decorated:
        for names, settings in reversed(table):
            command = click.option(*names, cls=Option, topic=topic, **settings)(command)
        return command

    return add


class Command(click.Command):
    """A command with examples: what they do, and how they are typed."""

    def __init__(self, *arguments: Any, examples: Sequence[tuple[str, str]], **settings: Any) -> None:
        super().__init__(*arguments, context_settings=CONTEXT, **settings)
        self.examples = examples

    def format_help_text(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Puts the examples below what the command is."""
        super().format_help_text(ctx, formatter)
        with formatter.section("Examples"):
            for meaning, typed in self.examples:
                # A command line stays whole, so that it can be copied.
                formatter.write(f"{'':{formatter.current_indent}}# {meaning}\n{'':{formatter.current_indent}}{typed}\n")

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Lists those of no topic first, which are the command's own."""
        topics: dict[str, list[tuple[str, str]]] = {"Options": []}
        for parameter in self.get_params(ctx):
            record = None if isinstance(parameter, click.Argument) else parameter.get_help_record(ctx)
            if record is not None:
                topic = parameter.topic if isinstance(parameter, Option) else "Options"
                topics.setdefault(topic, []).append(record)
        for topic, records in topics.items():
            if records:
                with formatter.section(topic):
                    formatter.write_dl(records)
