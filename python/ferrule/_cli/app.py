"""The group of commands. A command's module is imported when it is run, so that each starts quickly."""

from __future__ import annotations

from difflib import get_close_matches
from importlib import import_module

import click
from click.shell_completion import CompletionItem

from ferrule import __version__
from ferrule._cli.help import CONTEXT, EXIT_CODES

TOPICS = {
    "Use a model": {
        "run": "Continue a prompt.",
        "chat": "Talk with a model.",
        "serve": "Answer over HTTP, as OpenAI's API does, with a chat page.",
        "run-batch": "Answer a file of requests.",
    },
    "Understand and measure": {
        "explain": "Show how each token comes about.",
        "info": "Show what a model is and what it needs.",
        "bench": "Measure prefill and decode.",
        "eval": "Measure perplexity, distance from a reference, and tasks.",
    },
    "Keep models": {
        "pull": "Download a model.",
        "quantize": "Pack a model into a directory that loads at once.",
        "list": "Show the models that were downloaded, and packed files.",
        "rm": "Remove them.",
    },
    "And": {
        "completion": "Let the shell complete commands and options.",
    },
}
COMMANDS = {name: text for topic in TOPICS.values() for name, text in topic.items()}
"""Each is the function `command` of the module of its name, or of the one below."""
MODULES = {"list": "listing", "run-batch": "run_batch"}
"""A module `list` would hide the builtin in this package."""

WELCOME = """\
ferrule runs language models on this computer's processors.

A small model is inside, so that you can try everything at once:

  ferrule run "The capital of France is"       it continues a text
  ferrule chat                                 it answers you
  ferrule explain "The capital of France is"   why it writes what it writes

It is a toy. Real models come from the Hugging Face hub, or from a directory:

  ferrule chat Qwen/Qwen3-0.6B

`ferrule --help` lists all commands, `ferrule chat --help` explains one."""


class _LazyGroup(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = import_module(f"ferrule._cli.{MODULES.get(cmd_name, cmd_name)}").command
        return command

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Without importing what is only named."""
        options = click.Command.shell_complete(self, ctx, incomplete)
        return options + [CompletionItem(name, help=COMMANDS[name]) for name in COMMANDS if name.startswith(incomplete)]

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name not in COMMANDS and not name.startswith("-") and not ctx.resilient_parsing:
            ctx.fail(f"No such command {name!r}.{_suggestion(name)}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        width = max(map(len, COMMANDS))
        for topic, commands in TOPICS.items():
            with formatter.section(topic):
                formatter.write_dl([(f"{name:{width}}", text) for name, text in commands.items()])


def _suggestion(name: str) -> str:
    """What may have been meant: a prompt, or a command of nearly that name."""
    if " " in name:
        return " A prompt needs a command before it: ferrule run PROMPT."
    near = get_close_matches(name, COMMANDS, 1)
    return f" Did you mean {near[0]!r}?" if near else " `ferrule --help` lists them."


@click.group(
    cls=_LazyGroup,
    context_settings=CONTEXT,
    invoke_without_command=True,
    epilog=EXIT_CODES,
)
@click.version_option(__version__, prog_name="ferrule")
@click.pass_context
def app(context: click.Context) -> None:
    """LLM inference on CPUs.

    MODEL is a directory of a Hugging Face model, a GGUF file, org/repo on the hub, or org/repo:Q4_K_M for one of its
    GGUF files. Left out, it is the small model that ships with ferrule:

    \b
      ferrule run "The capital of France is"
      ferrule explain "The capital of France is" -n 3
      ferrule chat
      ferrule run Qwen/Qwen3-0.6B "Once upon a time," --temperature 0.8 --seed 1

    Where NO_COLOR is set, or the output is no terminal, it is plain text.
    """  # noqa: D301  # \b keeps click from filling the examples
    if context.invoked_subcommand is None:
        click.echo(WELCOME)
