"""Messages and sampling parameters of a chat, saved as the body of a request to /v1/chat/completions."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, cast

import click

from ferrule._params.sampling import SamplingParams
from ferrule._params.structured import StructuredOutputsParams
from ferrule.errors import FerruleError, InvalidParameterError

NOT_IN_CHATS = {"n", "logits_processors"}
"""Fields of SamplingParams that a chat does not support."""
PARAMETERS = sorted({field.name for field in fields(SamplingParams)} - NOT_IN_CHATS)
ROLES = ("system", "user", "assistant", "tool")
MAX_FILE_BYTES = 64 << 20
"""Maximum size of a saved conversation, in bytes."""


@dataclass
class Conversation:
    """Messages and sampling parameters of a chat."""

    params: SamplingParams
    system: str | None = None
    history: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    """Messages without the system prompt."""

    def messages(self) -> list[dict[str, Any]]:
        """Returns all messages, with the system prompt."""
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*system, *self.history]

    def undo(self) -> str | None:
        """Removes the last user message with its answer and returns it; None without one."""
        for place in range(len(self.history) - 1, -1, -1):
            if self.history[place]["role"] == "user":
                message = str(self.history[place]["content"])
                del self.history[place:]
                return message
        return None

    def save(self, path: Path, model: str) -> None:
        """Saves the chat as a request body, which `load` reads and every server of OpenAI's API accepts.

        Raises click.UsageError for a file that cannot be written.
        """
        body = {"model": model, "messages": self.messages(), **parameter_fields(self.params)}
        new = path.with_name(f".{path.name}.tmp")
        try:
            new.write_text(json.dumps(body, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
            new.replace(path)
        except (OSError, UnicodeEncodeError) as error:
            new.unlink(missing_ok=True)
            reason = error.strerror if isinstance(error, OSError) else error
            raise click.UsageError(f"{path} cannot be written: {reason}") from error

    def load(self, path: Path) -> None:
        """Loads a saved chat or a list of messages.

        Raises click.UsageError; the chat is then unchanged.
        """
        try:
            with path.open("rb") as file:
                content = file.read(MAX_FILE_BYTES + 1)
            if len(content) > MAX_FILE_BYTES:
                raise click.UsageError(f"{path} must have at most {MAX_FILE_BYTES} bytes")
            body: object = json.loads(content)
        except OSError as error:
            raise click.UsageError(f"{path} cannot be read: {error.strerror}") from error
        except (ValueError, RecursionError) as error:
            raise click.UsageError(f"{path} is not valid JSON: {error}") from error
        given = cast("dict[str, Any]", body) if isinstance(body, dict) else {"messages": body}
        try:
            messages = _checked_messages(given.pop("messages", None))
            given.pop("model", None)
            params = with_parameters(SamplingParams.with_model_defaults(), given) if given else self.params
        except FerruleError as error:
            raise click.UsageError(f"{path}: {error}") from error
        first = messages[0] if messages and messages[0]["role"] == "system" else None
        self.system = None if first is None else first["content"]
        self.history = messages if first is None else messages[1:]
        self.params = params


def with_parameters(params: SamplingParams, changes: Mapping[str, Any]) -> SamplingParams:
    """Returns a copy of the parameters with changes; values may have JSON types.

    Raises InvalidParameterError for an unknown name or an invalid value.
    """
    unknown = [name for name in changes if name not in PARAMETERS]
    if unknown:
        near = nearest(unknown[0], PARAMETERS)
        hint = "" if near is None else f" (did you mean {near}?)"
        raise InvalidParameterError("parameter", unknown[0], f"the name of a sampling parameter{hint}")
    values = dict(changes)
    structure = values.get("structured_outputs")
    if isinstance(structure, Mapping):
        values["structured_outputs"] = _structured_outputs(cast("Mapping[str, Any]", structure))
    bias = values.get("logit_bias")
    if isinstance(bias, Mapping):  # keys are strings in JSON
        values["logit_bias"] = {_number(key): value for key, value in cast("Mapping[Any, Any]", bias).items()}
    plain = SamplingParams.with_model_defaults()
    values = {name: getattr(plain, name) if value is None else value for name, value in values.items()}
    return SamplingParams.with_model_defaults(**{**{f.name: getattr(params, f.name) for f in fields(params)}, **values})


def _structured_outputs(given: Mapping[str, Any]) -> StructuredOutputsParams:
    known = [field.name for field in fields(StructuredOutputsParams)]
    for name in given:
        if name not in known:
            requirement = f"an object with the fields {', '.join(known)} (no {name:.50})"
            raise InvalidParameterError("structured_outputs", given, requirement)
    return StructuredOutputsParams(**given)


def parameter_fields(params: SamplingParams) -> dict[str, Any]:
    """Returns the parameters that differ from their defaults, as fields of a request."""
    given = {name: value for name, value in params.given().items() if name not in NOT_IN_CHATS}
    if params.structured_outputs is not None:
        structure = asdict(params.structured_outputs)
        given["structured_outputs"] = {name: value for name, value in structure.items() if value not in (None, False)}
    return given


def nearest(name: str, names: list[str]) -> str | None:
    """Returns the most similar name; None if no name is similar."""
    from difflib import get_close_matches

    return next(iter(get_close_matches(name, names, 1)), None)


def _number(key: object) -> object:
    return int(key) if isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 20 else key


def _checked_messages(given: object) -> list[dict[str, Any]]:
    if not isinstance(given, list):
        raise InvalidParameterError("messages", given, "a list of messages")
    for index, message in enumerate(cast("list[object]", given)):
        if not isinstance(message, dict):
            raise InvalidParameterError(f"messages[{index}]", message, "an object")
        role = cast("dict[str, object]", message).get("role")
        content = cast("dict[str, object]", message).get("content")
        if role not in ROLES:
            raise InvalidParameterError(f"messages[{index}].role", role, f"one of {', '.join(ROLES)}")
        if not isinstance(content, str):
            raise InvalidParameterError(f"messages[{index}].content", content, "a string")
    return cast("list[dict[str, Any]]", given)
