"""The loop of a chat: reads messages, prints answers, and reports errors without exiting."""

from __future__ import annotations

import contextlib
import sys
from contextlib import closing
from typing import TYPE_CHECKING

import click

from ferrule._cli.chat.commands import run_command
from ferrule._cli.chat.display import display
from ferrule._cli.status import SILENCE
from ferrule.errors import FerruleError, PromptError

if TYPE_CHECKING:
    from ferrule._cli.chat.answers import Answers, Usage
    from ferrule._cli.chat.conversation import Conversation
    from ferrule._cli.chat.lines import Lines

EXITS = ("exit", "quit")
"""Words that end a chat on a terminal, as in `llm chat`."""
HINT = "/? lists the commands, Ctrl-C stops an answer, Ctrl-D exits"


class Session:
    """State of a chat."""

    def __init__(self, answers: Answers, conversation: Conversation, *, verbose: bool, plain: bool) -> None:
        self.answers = answers
        self.conversation = conversation
        self.first_params = conversation.params
        self.failed = False
        """Whether a message failed."""
        self.verbose = verbose
        """Whether statistics are printed after each answer."""
        self._plain = plain
        self._usages: list[Usage] = []

    def run(self, lines: Lines) -> None:
        """Runs until the user exits."""
        if lines.interactive:
            print(f"{self.answers.name}: {HINT}", file=sys.stderr)
        while True:
            try:
                line = lines.read()
            except EOFError:
                break
            except KeyboardInterrupt:
                print(f"\n{HINT}", file=sys.stderr)
                continue
            SILENCE.end()
            if lines.interactive and line.strip() in EXITS:
                break
            try:
                # Ctrl-C stopped an answer; the user may have pressed it twice.
                with contextlib.suppress(KeyboardInterrupt):
                    self.say(line)
            except EOFError:
                return
        if lines.interactive:
            print(file=sys.stderr)

    def say(self, line: str) -> None:
        """Runs a command or answers a message. Raises EOFError to exit."""
        try:
            if line.strip().startswith("/"):
                run_command(self, line)
            elif line.strip():
                self.answer(line)
        except PromptError as error:
            self._report(f"{error}; /clear starts a new conversation, /undo removes the last message")
        except click.UsageError as error:
            self._report(error.message)
        except FerruleError as error:
            self._report(str(error))

    def answer(self, message: str) -> None:
        """Answers a message. After Ctrl-C the partial answer is kept; without any text the message is removed.

        Reasoning is not part of the text. After Ctrl-C and after an endless loop there are no statistics.

        Raises FerruleError; the message is then removed.
        """
        history = [*self.conversation.history, {"role": "user", "content": message}]
        self.conversation.history, before = history, self.conversation.history
        text = notice = ""
        usage = None
        shown = display(plain=self._plain)
        try:
            with closing(self.answers.stream(self.conversation.messages(), self.conversation.params)) as deltas:
                for delta in deltas:
                    text += delta.content
                    notice = delta.notice or notice
                    shown.add(delta)
                    usage = delta.usage or usage
        except KeyboardInterrupt:
            pass
        except BaseException:
            self.conversation.history = before
            raise
        finally:
            shown.close()
        if notice:
            print(f"[{notice}]", file=sys.stderr)
        if text:
            history.append({"role": "assistant", "content": text})
        else:
            self.conversation.history = before
            print("[the answer has no text; the message was removed]", file=sys.stderr)
        if usage is not None:
            self._usages.append(usage)
            if self.verbose:
                print(usage.summary, file=sys.stderr)

    def statistics(self) -> str:
        """Returns tokens and times of the session, as lines."""
        answered = f"{self.answers.name}: {len(self._usages)} answers, {len(self.conversation.history)} messages"
        if not self._usages:
            return answered
        read = sum(usage.prompt_tokens or 0 for usage in self._usages)
        written = sum(usage.output_tokens or 0 for usage in self._usages)
        last = self._usages[-1]
        used = (last.prompt_tokens or 0) + (last.output_tokens or 0)
        of = "" if self.answers.context is None else f" of {self.answers.context:,}, {used / self.answers.context:.0%}"
        lines = [answered, f"prompts {read:,} tokens, answers {written:,} tokens", f"context {used:,} tokens{of}"]
        return "\n".join([*lines, f"last answer {last.summary}"])

    def _report(self, message: str) -> None:
        self.failed = True
        print(f"error: {' '.join(message.split())}", file=sys.stderr)
