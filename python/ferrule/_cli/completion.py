"""`ferrule completion`: scripts for shell completion."""

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
    """Print the completion script of SHELL, for commands, options and names of downloaded models."""
    from ferrule._cli.app import app

    kind = get_completion_class(shell)
    assert kind is not None  # noqa: S101  # click knows all three
    # kind.source() would run bash to check its version.
    completion = kind(app, {}, "ferrule", "_FERRULE_COMPLETE")
    click.echo(completion.source_template % completion.source_vars())
    if shell == "bash":
        click.echo("COMP_WORDBREAKS=${COMP_WORDBREAKS//:}  # names such as qwen3:0.6b are one word")
