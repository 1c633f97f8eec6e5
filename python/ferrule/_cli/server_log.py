"""Log and banner of `ferrule serve`: readable lines on a terminal, JSON lines for other programs."""

from __future__ import annotations

import logging
import sys
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from datetime import datetime
from typing import Any, cast

from ferrule._api.info import size_text
from ferrule._cli.terminal import harmless, is_styled
from ferrule.server.middleware.log import JSONFormatter, place_of
from ferrule.server.settings import ServerSettings


class TextFormatter(logging.Formatter):
    """Formats log records as lines for a person: requests with status, time, model and tokens; others with fields."""

    def format(self, record: logging.LogRecord) -> str:
        """Returns the line of a record."""
        when = datetime.fromtimestamp(record.created).strftime("%H:%M:%S")  # local time
        fields: dict[str, Any] = dict(getattr(record, "fields", {}))
        if record.getMessage() == "request":
            return harmless(f"{when}  {_request(fields)}")
        if record.exc_info is not None and record.exc_info[1] is not None:
            fields = {**place_of(record.exc_info[1]), **fields}
        level = "" if record.levelno <= logging.INFO else f"{record.levelname.lower()}: "
        rest = ", ".join(f"{name} {_text(value)}" for name, value in fields.items() if name != "request_id")
        return harmless(f"{when}  {level}{record.getMessage()}{': ' if rest else ''}{rest}")


def _text(value: object) -> str:
    return "; ".join(map(str, cast("list[object]", value))) if isinstance(value, list) else str(value)


def _request(fields: Mapping[str, Any]) -> str:
    parts = [f"{fields['status']}  {fields['method']} {fields['path']}", f"{fields['seconds']:.2f} s"]
    if "model" in fields:
        parts.append(str(fields["model"]))
    if "prompt_tokens" in fields:
        first = fields.get("time_to_first_token")
        after = "" if first is None else f", first after {first:.2f} s"
        parts.append(f"{fields['prompt_tokens']} + {fields['output_tokens']} tokens{after}")
    if "error" in fields:
        parts.append(str(fields["error"]))
    return "  ".join(parts)


class StderrHandler(logging.Handler):
    """Writes records to the present `sys.stderr`, which a progress bar replaces to stay below other output.

    With `erases`, a line on a terminal first erases a status line, which may be longer; JSON has no escape sequences.
    """

    def __init__(self, *, erases: bool) -> None:
        super().__init__()
        self._erases = erases

    def emit(self, record: logging.LogRecord) -> None:
        """Writes the line of a record."""
        try:
            erase = "\x1b[K" if self._erases and is_styled(sys.stderr) else ""
            print(f"{erase}{self.format(record)}", file=sys.stderr, flush=True)
        except Exception:  # as in logging's own handlers
            self.handleError(record)


@contextmanager
def log_to_stderr(form: str) -> Generator[bool]:
    """Writes all log records to stderr; yields whether they are for a person, which `auto` decides by the terminal."""
    readable = form == "text" or (form == "auto" and sys.stderr.isatty())
    handler = StderrHandler(erases=readable)
    handler.setFormatter(TextFormatter() if readable else JSONFormatter())
    root = logging.getLogger()
    logging.getLogger("ferrule").setLevel(logging.INFO)
    root.addHandler(handler)
    try:
        yield readable
    finally:
        root.removeHandler(handler)


def banner(url: str, models: list[str], settings: ServerSettings, memory: int | None) -> str:
    """Returns the lines that say what the server offers, once the models are loaded.

    `memory` is the number of bytes of the server's process; None for a server in other processes.
    """
    base = f"{url}{settings.root_path}"
    rows = {
        "Chat page": f"{base}/" if settings.page else "",
        "OpenAI": f"{base}/v1",
        "Anthropic": f"{base}/v1/messages",
        "Ollama": f"{base}/api" if settings.ollama else "",
        "Metrics": f"{base}/metrics",
        "Models": ", ".join(models),
        "Memory": "" if memory is None else size_text(memory),
        "API key": "required" if settings.api_keys else "none",
    }
    lines = [f"  {name:<10} {value}" for name, value in rows.items() if value]
    return "\n".join(["", "ferrule is ready.", "", *lines, "", "Ctrl-C stops the server.", ""])
