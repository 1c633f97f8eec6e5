"""`ferrule completion`: what a shell has to read to complete commands and options."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from ferrule._cli.help import Command

SHELLS = ("bash", "zsh", "fish")


@click.command(
    "completion",
    cls=Command,
    examples=[
        ("bash, in ~/.bashrc:", 'eval "$(ferrule completion bash)"'),
        ("zsh, in ~/.zshrc:", 'eval "$(ferrule completion zsh)"'),
        ("fish:", "ferrule completion fish > ~/.config/fish/completions/ferrule.fish"),
    ],
)
@click.argument("shell", type=click.Choice(SHELLS))
def command(shell: str) -> None:
    """Print what makes SHELL complete commands, options, and the names of models that were downloaded."""
    from ferrule._cli.app import app

    kind = get_completion_class(shell)
    assert kind is not None  # noqa: S101  # click knows all three
    # The source alone: click would run bash to see whether it is new enough, which bash does itself.
    completion = kind(app, {}, "ferrule", "_FERRULE_COMPLETE")
    click.echo(completion.source_template % completion.source_vars())
