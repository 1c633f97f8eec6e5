"""Everything that can go wrong, as classes.

All derive from FerruleError, and from the built-in exception that a Python programmer would catch. Messages name the
file, the field, its value and the limit.
"""

_ABSENT = object()


def shown(value: object) -> str:
    """Formats a value for a message, in at most 80 characters."""
    if isinstance(value, int) and abs(value) >= 1 << 128:
        return f"a number of {value.bit_length()} bits"
    try:
        text = repr(value)
    except ValueError:  # a number in it has more digits than Python writes
        return f"a {type(value).__name__} with a very large number"
    return text if len(text) <= 80 else f"{text[:77]}..."


class FerruleError(Exception):
    """The base of every error that ferrule raises on purpose."""


class InvalidParameterError(FerruleError, ValueError):
    """A parameter of a request or of a constructor has an invalid value.

    `InvalidParameterError("temperature", -1, ">= 0")` reads `temperature must be >= 0, got -1`.
    """

    field: str | None
    """Name of the parameter; `stop[2]` for an item of a list, `speculative_config.method` for a nested field."""
    value: object
    """Value that was found."""
    requirement: str | None
    """Requirement of the value, as it reads after "must be"."""

    def __init__(self, field: str, value: object = _ABSENT, requirement: str = "") -> None:
        if value is _ABSENT:  # a whole message: the form that is being replaced
            super().__init__(field)
            self.field, self.value, self.requirement = None, None, None
        else:
            super().__init__(field, value, requirement)
            self.field, self.value, self.requirement = field, value, requirement

    def __str__(self) -> str:
        if self.field is None:
            return super().__str__()
        return f"{self.field} must be {self.requirement}, got {shown(self.value)}"


class PromptError(FerruleError, ValueError):
    """A prompt cannot be processed: empty, too long, or with ids outside the vocabulary."""


class ConfigError(FerruleError, ValueError):
    """A configuration file of a model holds something that cannot be."""


class UnsupportedModelError(ConfigError):
    """A model is well-formed, but of a kind that ferrule does not run."""


class UnsupportedTaskError(FerruleError, ValueError):
    """A model is asked for what it is not made for: text of an encoder, or scores without a classifier."""


class ModelNotFoundError(FerruleError, FileNotFoundError):
    """No model under that name: neither a directory here nor a repository on the hub."""


class ModelFileError(FerruleError, OSError):
    """A file of a model is missing, unreadable or malformed."""


class ModelWriteError(FerruleError, OSError):
    """A file of a model cannot be written: the disk is full, or may not be written to."""


class TokenizerError(FerruleError, ValueError):
    """Text cannot be turned into tokens, or tokens into text."""


class ChatTemplateError(FerruleError, ValueError):
    """A chat template is missing, malformed, or refuses the conversation."""


class InsufficientMemoryError(FerruleError, MemoryError):
    """A model or its cache needs more memory than there is."""


class EngineError(FerruleError, RuntimeError):
    """The engine failed, or is closed."""


class RequestFailedError(EngineError):
    """The engine cannot go on with one request, nor could it if asked again: its parameters forbid every token, say."""


class LogitsProcessorError(FerruleError, RuntimeError):
    """A logits processor of a request raised something, its cause; neighbours of the request go on."""


class QueueFullError(FerruleError, RuntimeError):
    """As many requests wait as may: try again later, or elsewhere."""


class RemoteError(FerruleError, OSError):
    """Another server cannot be reached, refuses a request, or answers what it should not."""
