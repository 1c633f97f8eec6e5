"""Tasks of a predictor: each computes the output columns of one row."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ferrule._api.async_llm import AsyncLLM
from ferrule._params import pooling, sampling, structured
from ferrule._params.compatibility import Rules
from ferrule._params.lora import LoRA, LoRARequest
from ferrule._params.pooling import PoolingParams
from ferrule._params.sampling import RequestOutputKind, SamplingParams
from ferrule._params.structured import StructuredOutputsParams
from ferrule.errors import InvalidParameterError
from ferrule.outputs import RequestOutput, TokenLogprobs
from ferrule.ray.rows import IMAGE, Row, images, mapping, text

if TYPE_CHECKING:
    from ferrule._text.chat import Message
    from ferrule._text.prompt import Prompt


_FOREIGN: Mapping[type, Rules] = {
    SamplingParams: sampling.FOREIGN,
    PoolingParams: pooling.FOREIGN,
    StructuredOutputsParams: structured.FOREIGN,
}
"""Fields of other libraries that each class of parameters accepts or rejects with advice."""


@dataclass(frozen=True)
class Defaults:
    """Values of a predictor for rows that do not set them."""

    model: str
    """Name of the base model in the column `model`."""
    sampling_params: SamplingParams | None
    pooling_params: PoolingParams | None
    chat_template: str | None
    chat_template_kwargs: Mapping[str, Any] | None
    dynamic_lora_loading_path: str | None


async def generate(llm: AsyncLLM, row: Row, defaults: Defaults) -> dict[str, object]:
    """Generates a completion of the row's prompt, or an answer to its messages."""
    params = _sampling_params(row, defaults.sampling_params) or llm.get_default_sampling_params()
    if params.n != 1:
        raise InvalidParameterError("n", params.n, "1, since a row has one completion; repeat the row instead")
    params = params.clone(output_kind=RequestOutputKind.FINAL_ONLY)
    lora = _adapter(row, defaults)
    if row.get("messages") is None:
        outputs = llm.generate(_prompt(row), params, lora_request=lora)
    else:
        outputs = llm.chat(
            _with_images(row["messages"], images(row)),
            params,
            lora_request=lora,
            tools=cast("Any", row.get("tools")),
            chat_template=defaults.chat_template,
            chat_template_kwargs={
                **(defaults.chat_template_kwargs or {}),
                **(mapping(row, "chat_template_kwargs") or {}),
            },
        )
    (output,) = [output async for output in outputs]
    return _completion_columns(output)


async def embed(llm: AsyncLLM, row: Row, defaults: Defaults) -> dict[str, object]:
    """Computes the embedding of the row's prompt."""
    (output,) = await llm.embed(_prompt(row), pooling_params=defaults.pooling_params)
    return {"embeddings": output.outputs.embedding, "num_input_tokens": len(output.prompt_token_ids)}


async def classify(llm: AsyncLLM, row: Row, defaults: Defaults) -> dict[str, object]:
    """Computes the probabilities of the labels for the row's prompt."""
    (output,) = await llm.classify(text(row, "prompt"), pooling_params=defaults.pooling_params)
    return {
        "label": output.outputs.label,
        "probs": output.outputs.probs,
        "num_input_tokens": len(output.prompt_token_ids),
    }


async def score(llm: AsyncLLM, row: Row, defaults: Defaults) -> dict[str, object]:
    """Computes the similarity of the row's two texts."""
    pair = text(row, "data_1"), text(row, "data_2")
    (output,) = await llm.score(*pair, pooling_params=defaults.pooling_params)
    return {"score": output.outputs.score, "num_input_tokens": len(output.prompt_token_ids)}


@dataclass(frozen=True)
class Task:
    """A task of a predictor."""

    run: Callable[[AsyncLLM, Row, Defaults], Awaitable[dict[str, object]]]
    """Returns the output columns of a row."""
    columns: tuple[str, ...]
    """Names of the columns that every row gets; a row with an error has None in each."""


TASKS = {
    "generate": Task(
        generate,
        ("generated_text", "generated_tokens", "num_generated_tokens", "num_input_tokens", "finish_reason"),
    ),
    "embed": Task(embed, ("embeddings", "num_input_tokens")),
    "classify": Task(classify, ("label", "probs", "num_input_tokens")),
    "score": Task(score, ("score", "num_input_tokens")),
}
"""Tasks by the name that `task_type` has in Ray's processors."""


def check_fields(field: str, given: Mapping[str, Any], kind: type[Any]) -> Mapping[str, Any]:
    """Returns `given`, a dict in `field`, if its keys are fields of the dataclass `kind`.

    Raises InvalidParameterError.
    """
    for name, value in given.items():
        if name not in kind.__dataclass_fields__ and name not in _FOREIGN[kind]:
            raise InvalidParameterError(f"{field}.{name}", value, f"left out; {kind.__name__} has no such field")
    return given


def _prompt(row: Row) -> Prompt:
    ids, given = row.get("tokenized_prompt"), images(row)
    if ids is None and not given:
        return text(row, "prompt")
    prompt: Any = {"prompt": text(row, "prompt")} if ids is None else {"prompt_token_ids": ids}
    if given:
        prompt["multi_modal_data"] = {"image": given}
    return prompt


def _with_images(messages: object, given: list[object]) -> Sequence[Message]:
    """Returns messages in which the images of a row take the places of `{"type": "image"}`, in order.

    Raises InvalidParameterError if there are more or fewer places.
    """
    if not given or not isinstance(messages, list):
        return cast("Sequence[Message]", messages)
    left, places = iter(given), 0
    filled: list[Any] = []
    for message in cast("list[Any]", messages):
        fields: Mapping[str, Any] = cast("Mapping[str, Any]", message) if isinstance(message, Mapping) else {}
        content = fields.get("content")
        if not isinstance(content, list):
            filled.append(message)
            continue
        parts: list[Any] = []
        for part in cast("list[object]", content):
            is_place = part == {"type": "image"}
            parts.append({"type": "image", "image": next(left, None)} if is_place else part)
            places += is_place
        filled.append({**fields, "content": parts})
    if places != len(given):
        raise InvalidParameterError(IMAGE, len(given), f'{places} images, one for each {{"type": "image"}} of messages')
    return filled


def _sampling_params(row: Row, defaults: SamplingParams | None) -> SamplingParams | None:
    """Returns the parameters of a row: the defaults with the fields that the row sets; None if neither exist."""
    found = mapping(row, "sampling_params")
    if found is None:
        return defaults
    # Integers become floats if the field is missing in other rows.
    given: dict[str, Any] = {
        name: int(value) if isinstance(value, float) and value.is_integer() else value
        for name, value in check_fields("sampling_params", found, SamplingParams).items()
    }
    structure = given.get("structured_outputs")
    if isinstance(structure, dict):
        fields = check_fields(
            "sampling_params.structured_outputs", cast("dict[str, Any]", structure), StructuredOutputsParams
        )
        given["structured_outputs"] = StructuredOutputsParams(**fields)
    return SamplingParams(**given) if defaults is None else defaults.clone(**given)


def _adapter(row: Row, defaults: Defaults) -> LoRA | None:
    name = row.get("model")
    if name in (None, defaults.model):
        return None
    if not isinstance(name, str):
        raise InvalidParameterError("model", name, f"{defaults.model} or the name of an adapter")
    folder = defaults.dynamic_lora_loading_path
    if folder is None:
        return name
    if name in ("", ".", "..") or "/" in name or "\\" in name:
        raise InvalidParameterError("model", name, f"{defaults.model} or the name of a directory in {folder}")
    return LoRARequest(name, lora_path=str(Path(folder).absolute() / name))


def _completion_columns(output: RequestOutput) -> dict[str, object]:
    completion = output.outputs[0]
    columns: dict[str, object] = {
        "generated_text": completion.text,
        "generated_tokens": completion.token_ids,
        "num_generated_tokens": len(completion.token_ids),
        "num_input_tokens": len(output.prompt_token_ids),
        "finish_reason": completion.finish_reason,
    }
    reports = {
        "logprobs": _logprobs(completion.logprobs),
        "prompt_logprobs": _logprobs(output.prompt_logprobs),
        "entropies": completion.entropies,
    }
    return columns | {name: report for name, report in reports.items() if report is not None}


def _logprobs(tokens: Sequence[TokenLogprobs | None] | None) -> list[list[dict[str, Any]] | None] | None:
    """Converts log-probabilities to a form that Arrow stores: a list of records for each token."""
    if tokens is None:
        return None
    return [
        None if token is None else [{"token_id": token_id, **asdict(each)} for token_id, each in token.items()]
        for token in tokens
    ]
