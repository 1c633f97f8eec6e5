"""Exceptions that ferrule raises.

All derive from FerruleError and from the built-in exception that a Python programmer would catch. Errors of a parameter
or a prompt carry its name as an attribute, so that no caller has to parse messages.
"""

from collections.abc import Collection
from typing import cast

_LEFT_OUT = "left out"
"""Beginning of the requirement of an unsupported parameter."""
MAX_SHOWN_ITEMS = 32
"""Maximum number of items of a collection that a message lists; larger collections are summarized."""


def shown(value: object) -> str:
    """Formats a value for a message, in at most 80 characters; of a long collection only type and size are shown."""
    if (items := _items(value)) > MAX_SHOWN_ITEMS:
        return f"a {type(value).__name__} of {items} items"
    if isinstance(value, int) and abs(value) >= 1 << 128:
        return f"a number of {value.bit_length()} bits"
    try:
        text = repr(value)
    except ValueError:  # a number in the value has more digits than Python converts to text
        return f"a {type(value).__name__} with a very large number"
    return text if len(text) <= 80 else f"{text[:77]}..."


def _items(value: object) -> int:
    """Returns the number of items of a collection; 0 for text and for other values."""
    if isinstance(value, (str, bytes, bytearray)) or not isinstance(value, Collection):
        return 0
    return len(cast("Collection[object]", value))


class FerruleError(Exception):
    """Base class of all exceptions that ferrule raises."""


class InvalidParameterError(FerruleError, ValueError):
    """A parameter of a request or of a constructor has an invalid value.

    The message is derived from the attributes: `InvalidParameterError("temperature", -1, ">= 0")` becomes
    `temperature must be >= 0, got -1`, and `InvalidParameterError("best_of", 3, "left out; use n")` becomes
    `best_of is not supported, got 3; use n`.
    """

    field: str
    """Name of the parameter; `stop[2]` for an item of a list, `speculative_config.method` for a nested field."""
    value: object
    """Value that was found."""
    requirement: str
    """Requirement of the value, as it reads after "must be". It begins with "left out" if the parameter is not
    supported in this context; a replacement may follow after a semicolon."""

    def __init__(self, field: str, value: object, requirement: str) -> None:
        super().__init__(field, value, requirement)
        self.field, self.value, self.requirement = field, value, requirement

    def __str__(self) -> str:
        if not self.requirement.startswith(_LEFT_OUT):
            return f"{self.field} must be {self.requirement}, got {shown(self.value)}"
        context, separator, advice = self.requirement.removeprefix(_LEFT_OUT).partition("; ")
        return f"{self.field} is not supported{context}, got {shown(self.value)}{separator}{advice}"


class PromptError(FerruleError, ValueError):
    """A prompt cannot be processed: it is empty, too long, or has token ids outside the vocabulary."""

    field: str | None
    """Name of the invalid argument or of a part of it, such as `prompts[2]` or `cache_salt`; None for the prompt
    itself."""

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class PromptTooLongError(PromptError):
    """A prompt has more tokens than its context."""

    tokens: int
    """Number of tokens of the prompt, or as many as were counted before the limit was exceeded."""
    context: int
    """Maximum number of tokens of prompt and output together."""

    def __init__(self, message: str, tokens: int, context: int) -> None:
        super().__init__(message)
        self.tokens = tokens
        self.context = context

    def __reduce__(self) -> tuple[type["PromptTooLongError"], tuple[str, int, int]]:
        return type(self), (str(self), self.tokens, self.context)


class ImageError(PromptError):
    """An image of a prompt is malformed, too large, of an unsupported format, or a URL that is not a data URL."""


class ConfigError(FerruleError, ValueError):
    """A configuration file of a model has an invalid value."""


class UnsupportedModelError(ConfigError):
    """A model is well-formed, but ferrule does not support its architecture or one of its options."""


class UnsupportedTaskError(FerruleError, ValueError):
    """A model does not support the task: encoders cannot generate, models without a classifier cannot classify."""


class ModelNotFoundError(FerruleError, FileNotFoundError):
    """No model has this name: it is neither a local path nor a repository on the Hugging Face hub."""


class ModelFileError(FerruleError, OSError):
    """A file of a model is missing, unreadable or malformed."""


class ModelWriteError(FerruleError, OSError):
    """A file of a model cannot be written: the disk is full or not writable."""


class TokenizerError(FerruleError, ValueError):
    """The tokenizer cannot encode a text or decode tokens."""


class ChatTemplateError(FerruleError, ValueError):
    """A chat template is missing, malformed, or rejects the conversation."""


class InsufficientMemoryError(FerruleError, MemoryError):
    """A model or its cache needs more memory than is available."""


class EngineError(FerruleError, RuntimeError):
    """The engine failed or is closed."""


class PipelineStageError(EngineError):
    """A pipeline stage failed or cannot be reached; every unfinished request of its engine gets this error."""

    stage: int
    """Index of the stage, from 0."""

    def __init__(self, message: str, stage: int) -> None:
        super().__init__(message)
        self.stage = stage

    def __reduce__(self) -> tuple[type["PipelineStageError"], tuple[str, int]]:
        return type(self), (str(self), self.stage)


class RequestFailedError(EngineError):
    """The engine cannot continue one request, for example because its parameters forbid every token."""


class LogitsProcessorError(FerruleError, RuntimeError):
    """A logits processor of a request raised an exception, which is the cause; other requests continue."""


class QueueFullError(FerruleError, RuntimeError):
    """The request queue is full: retry later, or on another server."""


class MissingDependencyError(FerruleError, ImportError):
    """An optional dependency is not installed; the message names the extra that installs it."""


class RemoteError(FerruleError, OSError):
    """Another server cannot be reached, refuses a request, or sends an invalid response."""


class CompatibilityWarning(UserWarning):
    """A parameter of another library was accepted, but it has no effect in ferrule."""
