"""`ferrule chat`: a chat in the terminal."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from ferrule._cli.help import Command
from ferrule._cli.model import (
    check_model,
    complete_model,
    load,
    model_options,
    prefix_cache_option,
    speculative_options,
)
from ferrule._cli.sampling import params, sampling_options, split_options

if TYPE_CHECKING:
    from ferrule._cli.chat.session import Session


@click.command(
    "chat",
    cls=Command,
    examples=[
        ("With the model that ships with ferrule:", "ferrule chat"),
        ("With a model of the hub:", 'ferrule chat Qwen/Qwen3-0.6B --system "Answer in one sentence."'),
        ("With a server:", "ferrule chat --url http://127.0.0.1:8000/v1"),
        ("From a script, one message a line:", "ferrule chat < questions.txt > answers.txt"),
    ],
)
@click.argument("model", required=False, shell_complete=complete_model)
@click.option("--system", help="System prompt (default: none).")
@click.option("--url", metavar="URL", help="Chat with a server of OpenAI's API at this URL (default: load MODEL).")
@click.option(
    "--api-key",
    envvar=["FERRULE_API_KEY", "OPENAI_API_KEY"],
    show_envvar=True,
    help="API key for --url (default: none).",
)
@click.option("--plain", is_flag=True, help="Print answers as plain text instead of rendered Markdown.")
@click.option("--no-history", is_flag=True, help="Do not save the input history.")
@sampling_options(max_tokens=None, unset="the model's, else 2048 for an answer")
@model_options
@prefix_cache_option
@speculative_options
@click.option("-v", "--verbose", is_flag=True, help="Print statistics to stderr after each answer.")
@click.pass_context
def command(
    context: click.Context,
    model: str | None,
    *,
    system: str | None,
    url: str | None,
    api_key: str | None,
    plain: bool,
    no_history: bool,
    verbose: bool,
    **options: Any,
) -> int:
    """Chat with MODEL (default: the small model that ships with ferrule). Ctrl-D exits.

    /help lists the commands of the chat. The input history is saved in ~/.local/state/ferrule.
    """
    from ferrule._cli.chat.answers import Answers, LocalAnswers
    from ferrule._cli.chat.conversation import Conversation
    from ferrule._cli.chat.remote import RemoteAnswers
    from ferrule._cli.chat.session import Session

    sampling, loading = split_options(options)
    conversation = Conversation(params(sampling), system)
    with ExitStack() as stack:
        if url is None:
            name = None if model is None else check_model(model)
            answers: Answers = LocalAnswers(stack.enter_context(load(name, loading)))
        else:
            _refuse_options_of_loading(context, loading)
            answers = RemoteAnswers(url, model, api_key)
        return run_session(Session(answers, conversation, verbose=verbose, plain=plain), history=not no_history)


def run_session(session: Session, *, history: bool = True) -> int:
    """Runs a chat with messages from stdin and returns the exit code; `history` keeps the input on disk."""
    from ferrule._cli.chat.commands import complete
    from ferrule._cli.chat.lines import Lines, history_path

    lines = Lines(history_path() if history else None, complete)
    session.run(lines)
    return 1 if session.failed and not lines.interactive else 0


def _refuse_options_of_loading(context: click.Context, loading: dict[str, Any]) -> None:
    for name in loading:
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            option = next(each.opts[0] for each in context.command.params if each.name == name)
            raise click.UsageError(f"{option} has no effect with --url: the server has loaded the model")
