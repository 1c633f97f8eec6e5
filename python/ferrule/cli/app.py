"""The group of commands. A command's module is imported when it is run, so that each starts quickly."""

from __future__ import annotations

from importlib import import_module

import click

from ferrule import __version__

COMMANDS = {
    "run": "Continue a prompt.",
    "chat": "Talk with a model.",
    "explain": "Show how each token comes about.",
    "info": "Show what a model is and what it needs.",
    "serve": "Answer over HTTP, as OpenAI's API does, with a chat page.",
    "bench": "Measure prefill and decode.",
    "eval": "Measure perplexity, distance from a reference, and tasks.",
    "quantize": "Pack a model into a directory that loads at once.",
    "list": "Show the packed files in the cache.",
    "rm": "Remove packed files from the cache.",
}
"""Each is the function `command` of the module of its name, or of the one below."""
MODULES = {"list": "listing"}
"""A module `list` would hide the builtin in this package."""


class _LazyGroup(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = import_module(f"ferrule.cli.{MODULES.get(cmd_name, cmd_name)}").command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(
    cls=_LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    invoke_without_command=True,
)
@click.version_option(__version__, prog_name="ferrule")
@click.pass_context
def app(context: click.Context) -> None:
    """LLM inference on CPUs.

    MODEL is a directory of a Hugging Face model, or org/repo on the hub. Left out, it is the small model that ships
    with ferrule:

    \b
        ferrule run "The capital of France is"
        ferrule explain "The capital of France is" -n 3
        ferrule chat
        ferrule run Qwen/Qwen3-0.6B "Once upon a time," --temperature 0.8 --seed 1
    """  # noqa: D301  # \b keeps click from filling the examples
    if context.invoked_subcommand is None:
        click.echo(context.get_help())
