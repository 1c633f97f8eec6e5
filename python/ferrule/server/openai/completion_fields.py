"""Parts of the answers that both of OpenAI's APIs for text have."""

from __future__ import annotations

from collections.abc import Sequence

from ferrule import __version__
from ferrule._params.structured import StructuredOutputsParams
from ferrule.errors import InvalidParameterError
from ferrule.outputs import RequestOutput, TokenLogprobs
from ferrule.server.models import ServedModel
from ferrule.server.openai.protocol import (
    CompletionTokensDetails,
    GenerationFields,
    PromptLogprobs,
    PromptTokensDetails,
    Usage,
)


def fingerprint(served: ServedModel) -> str:
    """What the numbers depend on: the same fingerprint and seed give the same tokens."""
    return f"ferrule-{__version__}-{served.info['quantization']}-{served.info['isa']}"


def usage(outputs: Sequence[RequestOutput], *, predicted: bool = False) -> Usage:
    """The tokens of some prompts and of what followed."""
    prompt = sum(output.metrics.prompt_tokens for output in outputs)
    written = sum(output.metrics.output_tokens for output in outputs)
    accepted = sum(output.metrics.accepted_tokens for output in outputs)
    drafted = sum(output.metrics.drafted_tokens for output in outputs)
    details = CompletionTokensDetails(
        accepted_prediction_tokens=accepted, rejected_prediction_tokens=drafted - accepted
    )
    return Usage(
        prompt_tokens=prompt,
        completion_tokens=written,
        total_tokens=prompt + written,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=sum(each.num_cached_tokens or 0 for each in outputs)),
        completion_tokens_details=details if predicted else None,
    )


def token_name(request: GenerationFields, token_id: int, text: str) -> str:
    """How log-probabilities call a token."""
    return f"token_id:{token_id}" if request.return_tokens_as_token_ids else text


def prompt_logprobs(given: Sequence[TokenLogprobs | None] | None) -> PromptLogprobs | None:
    """As vLLM writes them."""
    if given is None:
        return None
    return [
        None
        if each is None
        else {
            token: {"logprob": found.logprob, "rank": found.rank, "decoded_token": found.decoded_token}
            for token, found in each.items()
        }
        for each in given
    ]


def structure_of(request: GenerationFields) -> StructuredOutputsParams | None:
    """What the output must be, by `response_format` or by `structured_outputs`.

    Raises InvalidParameterError.
    """
    given = (
        None
        if request.response_format is None
        else StructuredOutputsParams.from_response_format(request.response_format)
    )
    if request.structured_outputs is None:
        return given
    if given is not None:
        raise InvalidParameterError("structured_outputs is given beside response_format; the output has one structure")
    return request.structured_outputs.params()


def structure_field_names(request: GenerationFields) -> dict[str, str]:
    """What `response_format` calls the parts of a structure, where it says what that is."""
    if request.response_format is None or request.structured_outputs is not None:
        return {}
    return {
        "structured_outputs.json": "response_format.json_schema.schema",
        "structured_outputs": "response_format",
    }


def excluded_fields(request: GenerationFields) -> set[str]:
    """Fields of a stream's chunks that were not asked for."""
    options = request.stream_options
    return set() if options is not None and (options.include_usage or options.continuous_usage_stats) else {"usage"}


def wants_usage_per_chunk(request: GenerationFields) -> bool:
    """Whether each chunk of a stream tells the usage so far."""
    return request.stream_options is not None and request.stream_options.continuous_usage_stats


def check_stream_options(request: GenerationFields) -> None:
    """Raises InvalidParameterError where they are given without a stream."""
    if request.stream_options is not None and not request.stream:
        raise InvalidParameterError("stream_options is given, but stream is not true")
