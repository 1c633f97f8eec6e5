"""A caller's own functions between the model and the sampler: `SamplingParams(logits_processors=[...])`."""

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
"""`[tokens]`"""
Logits: TypeAlias = "npt.NDArray[np.float32]"
"""`[vocab]`"""
LogitsProcessor: TypeAlias = (
    "Callable[[Tokens, Logits], Logits | None] | Callable[[Tokens, Tokens, Logits], Logits | None]"
)
"""Called before each token with the tokens of the output so far, int32 `[tokens]`, and the logits, float32 `[vocab]`;
with the prompt's tokens before these where it has three parameters. (vLLM's signatures.)

It changes the logits in place, or returns others of the same shape. Minus infinity forbids a token. The memory of the
logits belongs to the engine and is used again for the next token and for other requests: whoever wants to keep them
makes a copy. Arrays of tokens cannot be written.
"""


def room_for_logits(vocab_size: int) -> Logits:
    """An array whose memory stays where it is, whatever is done to arrays of it: none of them owns it."""
    import numpy as np

    return np.frombuffer(bytearray(np.dtype(np.float32).itemsize * vocab_size), dtype=np.float32)


class LogitsProcessors:
    """Those of one completion, as the engine calls them: with Python's lock, on the thread that steps."""

    def __init__(self, processors: Sequence[LogitsProcessor], prompt_token_ids: Sequence[int], logits: Logits) -> None:
        import numpy as np

        self.logits = logits
        """Where the engine puts the logits, and from where it takes them."""
        self.error: LogitsProcessorError | None = None
        """Why the request ended, if a processor failed."""
        self._processors: list[tuple[Callable[..., Any], bool]] = [(each, _wants_prompt(each)) for each in processors]
        self._prompt = np.array(prompt_token_ids, dtype=np.int32)
        self._prompt.flags.writeable = False

    def __call__(self, output: bytes) -> None:
        """Changes the logits of the token after `output`, int32 ids.

        Raises LogitsProcessorError, which ends the request, whatever a processor raised; only a Ctrl-C passes.
        """
        import numpy as np

        tokens = np.frombuffer(output, dtype=np.int32)
        for index, (processor, wants_prompt) in enumerate(self._processors):
            try:
                given = (self._prompt, tokens) if wants_prompt else (tokens,)
                # An array of its own: what becomes of its shape, type and flags is no concern of whoever comes next.
                logits = self.logits.view()
                self._take(processor(*given, logits), logits)
                highest = self.logits.max()
                if not highest < np.inf:
                    raise ValueError(f"the highest logit is {highest}; logits must be finite, or minus infinity")
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
            raise TypeError(f"it returned {what}; it must return None, or an array of shape {self.logits.shape}")
        np.copyto(self.logits, others, casting="same_kind")


def _wants_prompt(processor: Callable[..., Any]) -> bool:
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    try:
        parameters = inspect.signature(processor).parameters.values()
    except (TypeError, ValueError):  # a function of C says nothing of its parameters
        return False
    return sum(each.kind in positional and each.default is inspect.Parameter.empty for each in parameters) == 3
