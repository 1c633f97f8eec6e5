"""`ferrule chat`: a conversation on the terminal."""

from __future__ import annotations

import contextlib
import sys
from importlib import import_module
from typing import Any

import click

from ferrule.cli.model import load, model_argument, model_options, prefix_cache_option, speculative_options
from ferrule.cli.sampling import greedy_by_default, params, sampling_options, split_options, summary
from ferrule.errors import PromptError
from ferrule.llm import LLM
from ferrule.params import SamplingParams

HELP = "/clear forgets the conversation, /exit or Ctrl-D ends it, Ctrl-C stops an answer"


@click.command("chat")
@model_argument
@click.option("--system", help="What the model is told first.")
@sampling_options(max_tokens=None)
@model_options
@prefix_cache_option
@speculative_options
@click.option("-v", "--verbose", is_flag=True, help="Statistics on stderr after each answer.")
def command(model: str | None, system: str | None, verbose: bool, **options: Any) -> None:
    """Talk with MODEL, or with the small model that ships with ferrule. Ctrl-D ends it."""
    sampling, loading = split_options(options)
    wanted = params(sampling)
    with load(model, loading) as llm:
        conversation = Conversation(llm, greedy_by_default(wanted, llm), system, verbose=verbose)
        conversation.check()
        interactive = sys.stdin.isatty()
        if interactive:
            with contextlib.suppress(ImportError):
                import_module("readline")  # gives input() editing and history
            print(f"{llm.info()['model']}: {HELP}", file=sys.stderr)
        while True:
            try:
                line = input("> " if interactive else "")
            except EOFError:
                break
            except KeyboardInterrupt:
                print(f"\n{HELP}", file=sys.stderr)
                continue
            if line.strip() == "/exit":
                break
            # An answer ends itself on Ctrl-C; a second one may come a moment later.
            with contextlib.suppress(KeyboardInterrupt):
                conversation.say(line)


class Conversation:
    """The messages so far."""

    def __init__(self, llm: LLM, sampling: SamplingParams, system: str | None, *, verbose: bool) -> None:
        self._llm = llm
        self._sampling = sampling
        self._system = [] if system is None else [{"role": "system", "content": system}]
        self._messages = list(self._system)
        self._verbose = verbose

    def check(self) -> None:
        """Raises ChatTemplateError before the user has typed anything, if the model cannot chat."""
        self._llm.chat_prompt([*self._system, {"role": "user", "content": "?"}])

    def say(self, line: str) -> None:
        """A line of the user: a command, or a message to answer."""
        match line.strip():
            case "":
                pass
            case "/clear":
                self._messages = list(self._system)
            case "/help":
                print(HELP, file=sys.stderr)
            case _:
                self._answer(line)

    def _answer(self, line: str) -> None:
        messages = [*self._messages, {"role": "user", "content": line}]
        text, output = "", None
        try:
            for delta in self._llm.stream(self._llm.chat_prompt(messages), self._sampling):
                text += delta.text
                output = delta.output
                sys.stdout.write(delta.text)
                sys.stdout.flush()
        except KeyboardInterrupt:  # what was said so far stays said
            pass
        except PromptError as error:
            print(f"error: {error}; /clear starts anew", file=sys.stderr)
            return
        print(flush=True)
        self._messages = [*messages, {"role": "assistant", "content": text}]
        if self._verbose and output is not None:
            print(summary(output), file=sys.stderr)
