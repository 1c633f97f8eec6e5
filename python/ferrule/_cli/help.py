"""Help texts with examples and with options grouped under headings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import click

from ferrule._cli.foreign import option_hint

Decorated = TypeVar("Decorated", bound=Callable[..., Any])
CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 100}
"""Context settings of every command. Click creates the help option once, for the first context."""
EXIT_CODES = "Exit codes: 0 success, 1 error, 2 usage error, 130 interrupted (Ctrl-C)."


class Option(click.Option):
    """An option with a heading in the help text."""

    def __init__(self, *arguments: Any, topic: str, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.topic = topic


def options(topic: str, table: Sequence[tuple[tuple[str, ...], dict[str, Any]]]) -> Callable[[Decorated], Decorated]:
    """Adds options under a heading; `table` has the names and the keyword arguments of each."""

    def add(command: Decorated) -> Decorated:
        for names, settings in reversed(table):
            command = click.option(*names, cls=Option, topic=topic, **settings)(command)
        return command

    return add


class Command(click.Command):
    """A command with examples: description and command line."""

    def __init__(self, *arguments: Any, examples: Sequence[tuple[str, str]], **settings: Any) -> None:
        super().__init__(*arguments, context_settings=CONTEXT, **settings)
        self.examples = examples

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parses the arguments; the error for an option of another program names its replacement."""
        given = list(args)
        try:
            return super().parse_args(ctx, args)
        except click.UsageError as error:  # click reads -ngl as -n with the value gl
            own = {name for each in self.get_params(ctx) for name in (*each.opts, *each.secondary_opts)}
            foreign = [word for word in given if word == "--" or word.partition("=")[0] not in own]
            if hint := option_hint(foreign, self.name or ""):
                raise click.UsageError(hint, ctx) from error
            raise

    def format_help_text(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes the examples below the description."""
        super().format_help_text(ctx, formatter)
        with formatter.section("Examples"):
            for description, line in self.examples:
                # A command line is not wrapped, so that it can be copied.
                indent = " " * formatter.current_indent
                formatter.write(f"{indent}# {description}\n{indent}{line}\n")

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes the options, those without a heading first."""
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
