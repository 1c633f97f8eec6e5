"""Group of all commands. The module of a command is imported when it runs, which keeps startup fast."""

from __future__ import annotations

from difflib import get_close_matches
from importlib import import_module
from itertools import takewhile

import click
from click.shell_completion import CompletionItem

from ferrule import __version__
from ferrule._cli import foreign
from ferrule._cli.help import CONTEXT, EXIT_CODES
from ferrule._cli.status import StatusLine

TOPICS = {
    "Use a model": {
        "run": "Answer or continue a prompt, or chat.",
        "chat": "Chat with a model.",
        "serve": "Serve models over HTTP (OpenAI's API), with a chat page.",
        "run-batch": "Run a file of requests.",
    },
    "Understand and measure": {
        "explain": "Show the candidates and probabilities of each token.",
        "info": "Show architecture, size and memory requirements of a model.",
        "bench": "Measure prefill and decode speed.",
        "eval": "Measure perplexity, distance from a reference, and task accuracy.",
    },
    "Manage models": {
        "search": "Search the catalogue of models with short names.",
        "pull": "Download a model.",
        "quantize": "Quantize and pack a model into a directory that loads fast.",
        "list": "List downloaded models and packed files.",
        "rm": "Remove downloaded models and packed files.",
    },
    "Shell": {
        "completion": "Print the shell completion script.",
    },
}
COMMANDS = {name: text for topic in TOPICS.values() for name, text in topic.items()}
"""Commands with their descriptions, by heading. A command is the function `command` of its module, see `MODULES`."""
MODULES = {"list": "listing", "run-batch": "run_batch"}
"""Modules whose name differs from that of their command; a module `list` would hide the builtin."""

WELCOME = """\
ferrule runs language models on CPUs.

A small model is included for first steps:

  ferrule run "The capital of France is"       continue a text
  ferrule chat                                 chat with the model
  ferrule explain "The capital of France is"   show token probabilities

Larger models are downloaded by name:

  ferrule run smollm2:135m "Why is the sky blue?"   94 MiB
  ferrule run qwen3:0.6b                            chat; 610 MiB
  ferrule search                                    all short names

`ferrule --help` lists all commands; `ferrule chat --help` describes one."""


class _LazyGroup(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = import_module(f"ferrule._cli.{MODULES.get(cmd_name, cmd_name)}").command
        return command

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parses the options before a command; the error for one of another program names its replacement."""
        first = list(takewhile(lambda word: word.startswith("-"), args))
        try:
            return super().parse_args(ctx, args)
        except click.UsageError as error:
            if hint := foreign.option_hint(first, "run"):
                raise click.UsageError(hint, ctx) from error
            raise

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Completes command names without importing their modules."""
        options = click.Command.shell_complete(self, ctx, incomplete)
        return options + [CompletionItem(name, help=COMMANDS[name]) for name in COMMANDS if name.startswith(incomplete)]

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name not in COMMANDS and not name.startswith("-") and not ctx.resilient_parsing:
            ctx.fail(f"No such command {name!r}.{_suggestion(name)}")
        logs_json = name == "serve" and "--log-format json" in " ".join(args).replace("=", " ")
        # Neither a completion nor a program that reads the log expects a status line.
        with StatusLine(f"starting ferrule {name}", quiet=ctx.resilient_parsing or logs_json):
            return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        width = max(map(len, COMMANDS))
        for topic, commands in TOPICS.items():
            with formatter.section(topic):
                formatter.write_dl([(f"{name:{width}}", text) for name, text in commands.items()])


def _suggestion(name: str) -> str:
    """Suggests `run` for a prompt or a model, the replacement of another program's command, or a similar name."""
    from ferrule._cli.prompt import names_model

    if " " in name:
        return " A prompt needs a command before it: ferrule run PROMPT."
    if name in foreign.COMMANDS:
        return f" Use {foreign.COMMANDS[name]}."
    if names_model(name):
        return f" A model needs a command before it: ferrule run {name}."
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

    MODEL is a name of `ferrule search` such as qwen3:0.6b, a GGUF file, a directory with a Hugging Face model, org/repo
    on the hub, or org/repo:Q4_K_M for one of its GGUF files. The default is the small model that ships with ferrule:

    \b
      ferrule run "The capital of France is"
      ferrule explain "The capital of France is" -n 3
      ferrule chat
      ferrule run qwen3:0.6b "Why is the sky blue?"

    Output is plain text if NO_COLOR is set or stdout is not a terminal.
    """  # noqa: D301  # \b keeps click from wrapping the examples
    if context.invoked_subcommand is None:
        click.echo(WELCOME)
