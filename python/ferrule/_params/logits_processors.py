"""Logits processors: functions of the caller that change the logits before each token."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from ferrule._validation import shown
from ferrule.errors import LogitsProcessorError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

Tokens: TypeAlias = "npt.NDArray[np.int32]"
"""Token ids: `[tokens]`."""
Logits: TypeAlias = "npt.NDArray[np.float32]"
"""Logits: `[vocab]`."""
LogitsProcessor: TypeAlias = (
    "Callable[[Tokens, Logits], Logits | None] | Callable[[Tokens, Tokens, Logits], Logits | None]"
)
"""Function that is called before each token with the output tokens so far, int32 `[tokens]`, and the logits, float32
`[vocab]`. A function with three parameters gets the prompt tokens as its first argument. (vLLM's signatures.)

The function changes the logits in place, or returns an array of the same shape. Minus infinity forbids a token. The
engine reuses the array of logits for the next token and for other requests, so copy it to keep it. Arrays of tokens are
read-only.
"""


def allocate_logits(vocab_size: int) -> Logits:
    """Allocates an array that cannot be resized, so that its address stays valid for the engine."""
    import numpy as np

    return np.frombuffer(bytearray(np.dtype(np.float32).itemsize * vocab_size), dtype=np.float32)


class LogitsProcessors:
    """The logits processors of one completion, which the engine calls on its thread with the GIL held."""

    def __init__(self, processors: Sequence[LogitsProcessor], prompt_token_ids: Sequence[int], logits: Logits) -> None:
        import numpy as np

        self.logits = logits
        """Array into which the engine writes the logits and from which it reads them back."""
        self.error: LogitsProcessorError | None = None
        """Error that ended the request, if a processor failed."""
        self._processors: list[tuple[Callable[..., Any], bool]] = [(each, _wants_prompt(each)) for each in processors]
        self._prompt = np.array(prompt_token_ids, dtype=np.int32)
        self._prompt.flags.writeable = False

    def __call__(self, output: bytes) -> None:
        """Changes the logits of the token after `output`, which holds int32 ids.

        Raises LogitsProcessorError, which ends the request, for any exception of a processor except KeyboardInterrupt.
        """
        import numpy as np

        tokens = np.frombuffer(output, dtype=np.int32)
        for index, (processor, wants_prompt) in enumerate(self._processors):
            try:
                given = (self._prompt, tokens) if wants_prompt else (tokens,)
                # Each processor gets a new view, so that it cannot change shape, dtype or flags for the next one.
                logits = self.logits.view()
                self._take(processor(*given, logits), logits)
                highest = self.logits.max()
                if not highest < np.inf:
                    raise ValueError(f"logits must be finite or minus infinity, got {highest}")
            except KeyboardInterrupt:
                raise
            except BaseException as error:
                message = f"logits_processors[{index}] raised {type(error).__name__}: {error}"
                self.error = LogitsProcessorError(message)
                raise self.error from error

    def _take(self, returned: object, given: Logits) -> None:
        if returned is None or returned is given:
            return
        import numpy as np

        what = shown(type(returned))
        others = cast("npt.NDArray[Any] | None", returned if isinstance(returned, np.ndarray) else None)
        if others is None or others.shape != self.logits.shape:
            what = what if others is None else f"an array of shape {others.shape}"
            raise TypeError(f"a logits processor must return None or an array of shape {self.logits.shape}, got {what}")
        np.copyto(self.logits, others, casting="same_kind")


def _wants_prompt(processor: Callable[..., Any]) -> bool:
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    try:
        parameters = inspect.signature(processor).parameters.values()
    except (TypeError, ValueError):  # functions written in C may have no signature
        return False
    return sum(each.kind in positional and each.default is inspect.Parameter.empty for each in parameters) == 3
