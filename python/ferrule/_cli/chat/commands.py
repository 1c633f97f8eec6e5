"""Commands of the chat, which begin with a slash. Each is a function and a row of the table `COMMANDS`."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ferrule._cli.chat.conversation import PARAMETERS, nearest, with_parameters
from ferrule._validation import shown

if TYPE_CHECKING:
    from ferrule._cli.chat.session import Session


ALIASES = {"?": "help", "bye": "exit", "quit": "exit"}
"""Names of the same commands in Ollama and llama.cpp."""
SET = ("parameter", "system", "verbose", "quiet")
MAX_COLUMNS = 100
"""Width of wrapped text, in columns."""


def _say(text: str) -> None:
    print(text, file=sys.stderr)


def _columns() -> int:
    return min(shutil.get_terminal_size().columns, MAX_COLUMNS)


def _system(session: Session, rest: str) -> None:
    conversation = session.conversation
    if rest:
        conversation.system = None if rest == "none" else rest
    _say("no system prompt" if conversation.system is None else f"system: {conversation.system}")


def _params(session: Session, rest: str) -> None:
    conversation = session.conversation
    if rest == "default":
        conversation.params = session.first_params
        return _say(_given(session))
    if not rest:
        _say(_given(session))
        return _say(click.wrap_text(f"/params NAME VALUE sets one of {', '.join(PARAMETERS)}", _columns()))
    name, value = _name_and_value(rest)
    if value is None:
        with_parameters(conversation.params, {name: None})  # raises an error for an unknown name
        return _say(_setting(name, getattr(conversation.params, name)))
    conversation.params = with_parameters(conversation.params, {name: _parsed(value)})
    return _say(_setting(name, getattr(conversation.params, name)))


def _name_and_value(text: str) -> tuple[str, str | None]:
    """Splits `top_p 0.9` or `top_p=0.9` into name and value."""
    name, space, value = text.replace("=", " ", 1).partition(" ")
    return name.strip().replace("-", "_"), value.strip() if space and value.strip() else None


def _parsed(text: str) -> Any:
    """Parses a value as JSON; other text is returned unchanged."""
    if text == "default":
        return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _given(session: Session) -> str:
    params = session.conversation.params
    given = params.given()
    lines = [_setting(name, value) for name, value in given.items()]
    lines += [f"{name} = {shown(value)} (default)" for name, value in session.answers.defaults(params).items()]
    return "\n".join(lines) or "all parameters have their defaults"


def _set(session: Session, rest: str) -> None:
    """Runs Ollama's forms: `/set parameter temperature 0.7`, `/set system TEXT`, `/set verbose`, `/set quiet`."""
    kind, _, value = rest.partition(" ")
    match kind:
        case "parameter":
            return _params(session, value.strip())
        case "system":
            return _system(session, _unquoted(value.strip()))
        case "verbose" | "quiet":
            session.verbose = kind == "verbose"
            return _say(f"statistics are {'shown' if session.verbose else 'hidden'}")
        case _:
            raise click.UsageError(f"/set must be followed by {', '.join(SET)}, got {kind!r}")


def _unquoted(text: str) -> str:
    return text[1:-1] if len(text) >= 2 and text[0] == text[-1] == '"' else text


def _setting(name: str, value: object) -> str:
    return f"{name} = {'the default' if value is None else shown(value)}"


def _save(session: Session, rest: str) -> None:
    path = _path(rest, "/save FILE.json")
    session.conversation.save(path, session.answers.name)
    _say(f"{path}: {len(session.conversation.history)} messages")


def _load(session: Session, rest: str) -> None:
    path = _path(rest, "/load FILE.json")
    session.conversation.load(path)
    _say(f"{path}: {len(session.conversation.history)} messages")


def _path(rest: str, usage: str) -> Path:
    if not rest:
        raise click.UsageError(f"a file name is required: {usage}")
    try:
        return Path(rest).expanduser()
    except RuntimeError as error:
        raise click.UsageError(f"{rest} is not a valid path: {error}") from None


def _stats(session: Session, _rest: str) -> None:
    _say(session.statistics())


def _clear(session: Session, _rest: str) -> None:
    session.conversation.history.clear()


def _undo(session: Session, _rest: str) -> None:
    message = session.conversation.undo()
    _say("no messages" if message is None else f"removed: {_short(message)}")


def _retry(session: Session, _rest: str) -> None:
    message = session.conversation.undo()
    if message is None:
        return _say("no messages")
    return session.answer(message)


def _help(_session: Session, _rest: str) -> None:
    formatter = click.HelpFormatter(width=_columns())
    formatter.write_dl([(f"/{name} {usage}".rstrip(), text) for name, (_, usage, text) in COMMANDS.items()])
    formatter.write_text('Enclose a message of several lines in """, or end each line except the last with \\.')
    formatter.write_text("Ctrl-C stops an answer, Ctrl-D exits.")
    _say(formatter.getvalue().rstrip("\n"))


def _exit(_session: Session, _rest: str) -> None:
    raise EOFError


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 60 else f"{line[:57]}..."


COMMANDS: dict[str, tuple[Callable[[Session, str], None], str, str]] = {
    "system": (_system, "[TEXT]", "show or set the system prompt; `none` removes it"),
    "params": (_params, "[NAME [VALUE]]", "show or set sampling parameters; `default` resets one"),
    "set": (_set, "KIND VALUE", "as in Ollama: `/set parameter temperature 0.5`, `/set system TEXT`, `/set verbose`"),
    "retry": (_retry, "", "regenerate the last answer"),
    "undo": (_undo, "", "remove the last message and its answer"),
    "clear": (_clear, "", "start a new conversation"),
    "save": (_save, "FILE", "save the conversation to a file"),
    "load": (_load, "FILE", "continue a saved conversation"),
    "stats": (_stats, "", "show tokens and times so far"),
    "help": (_help, "", "show this, as /? does"),
    "exit": (_exit, "", "exit, as /bye, exit and Ctrl-D do"),
}


def run_command(session: Session, line: str) -> None:
    """Runs a line that begins with a slash.

    Raises click.UsageError for an unknown command or a file that cannot be used, InvalidParameterError for an invalid
    sampling parameter, and EOFError to exit.
    """
    name, _, rest = line.strip().removeprefix("/").partition(" ")
    name = ALIASES.get(name, name)
    if name not in COMMANDS:
        near = nearest(name, list(COMMANDS))
        hint = "/help lists the commands" if near is None else f"did you mean /{near}?"
        raise click.UsageError(f"unknown command /{name}; {hint}")
    COMMANDS[name][0](session, rest.strip())


def complete(line: str) -> Sequence[str]:
    """Returns the completions of the last word of a line."""
    if not line.startswith("/"):
        return []
    command, space, rest = line.partition(" ")
    if not space:
        return [f"/{name} " for name in COMMANDS if f"/{name}".startswith(command)]
    if command == "/set" and " " not in rest:
        return [f"{kind} " for kind in SET if kind.startswith(rest)]
    if command == "/set" and rest.startswith("parameter "):
        command, rest = "/params", rest.removeprefix("parameter ")
    if command == "/params" and " " not in rest:
        return [f"{name} " for name in PARAMETERS if name.startswith(rest)]
    if command in ("/save", "/load"):
        return _files(rest)
    return []


def _files(start: str) -> list[str]:
    try:
        path = Path(start).expanduser()
        folder, name = (path, "") if start.endswith("/") or not start else (path.parent, path.name)
        found = sorted(each for each in folder.iterdir() if each.name.startswith(name))
    except (OSError, RuntimeError):
        return []
    return [f"{each}/" if each.is_dir() else str(each) for each in found]
