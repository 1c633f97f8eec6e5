"""`PoolingParams`: parameters of embeddings, classification and scoring, under vLLM's names."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Any, Self

from ferrule._params.compatibility import Ignored, Refused, Rules, compatible
from ferrule._params.declaration import Doc, Flag, Integer, check_bounds

MAX_DIMENSIONS = 2**31 - 1

FOREIGN: Rules = {
    "task": Ignored(None, "the method that is called decides the task"),
    "use_activation": Refused(True, "use the logits of ClassificationOutput"),
    "activation": Refused(True, "use the logits of ClassificationOutput"),
    "softmax": Refused(True, "use the logits of ClassificationOutput"),
    "step_tag_id": Refused(None, "step pooling is not supported"),
    "returned_token_ids": Refused(None, "step pooling is not supported"),
    "skip_reading_prefix_cache": Ignored(None, "texts are encoded without the prefix cache"),
    "extra_kwargs": Refused(None, "plugins are not supported"),
    "requires_token_ids": Ignored(False, "outputs always have prompt_token_ids"),
}
"""Fields of vLLM's PoolingParams that ferrule does not have."""


@compatible(FOREIGN)
@dataclass(frozen=True, kw_only=True)
class PoolingParams:
    """Parameters of `LLM.embed`, `classify` and `score` as one object, as in vLLM.

    Raises InvalidParameterError for an invalid value.
    """

    truncate_prompt_tokens: Annotated[
        int | None,
        Integer(-1, MAX_DIMENSIONS),
        Doc("Number of tokens to keep from the beginning of a text; -1 keeps as many as the model's limit allows."),
    ] = None
    dimensions: Annotated[
        int | None,
        Integer(1, MAX_DIMENSIONS),
        Doc("Number of leading dimensions of an embedding to keep, for models trained for it (Matryoshka)."),
    ] = None
    normalize: Annotated[
        bool | None, Flag(), Doc("Whether to scale embeddings to length 1. None: the setting of the model's files.")
    ] = None

    def __post_init__(self) -> None:
        check_bounds(self)

    def clone(self, **changes: Any) -> Self:
        """Returns a copy, with some fields changed.

        Raises InvalidParameterError.
        """
        return replace(self, **changes)
