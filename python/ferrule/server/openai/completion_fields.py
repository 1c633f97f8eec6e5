"""Fields of requests and responses that chat completions and completions share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import TypeVar

from ferrule import __version__
from ferrule._engine.workers import workers_for
from ferrule._params.structured import StructuredOutputsParams
from ferrule.errors import InvalidParameterError
from ferrule.outputs import RequestOutput, TokenLogprobs
from ferrule.server.models import ServedModel
from ferrule.server.openai.protocol.generation import GenerationFields, PromptLogprobs
from ferrule.server.openai.protocol.usage import CompletionTokensDetails, PromptTokensDetails, Usage
from ferrule.server.schema import llama_cpp

LOGPROB_BYTES = 64
"""Typical size of the JSON of one log-probability, with its token."""
LARGE_OUTPUT = 64 << 10
"""Bytes from which log-probabilities are written in a worker thread."""
T = TypeVar("T")


def fingerprint(served: ServedModel) -> str:
    """Returns `system_fingerprint`: the same fingerprint, request and seed give the same tokens."""
    return f"ferrule-{__version__}-{served.info['quantization']}-{served.info['isa']}"


def usage(outputs: Sequence[RequestOutput], *, predicted: bool = False) -> Usage:
    """Sums the token counts of several prompts and their completions."""
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
    """Returns the name of a token in log-probabilities."""
    return f"token_id:{token_id}" if request.return_tokens_as_token_ids else text


def prompt_logprobs(given: Sequence[TokenLogprobs | None] | None) -> PromptLogprobs | None:
    """Converts log-probabilities of prompt tokens to vLLM's form."""
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


async def write_logprobs(write: Callable[[], T], outputs: Sequence[RequestOutput], *, prompts_only: bool = False) -> T:
    """Returns the result of `write`, which writes the log-probabilities of outputs, or those of their prompts only.

    It runs in a worker thread where they are many, so that the event loop is not blocked.
    """
    all_steps = [output.prompt_logprobs or () for output in outputs]
    if not prompts_only:
        all_steps += [completion.logprobs or () for output in outputs for completion in output.outputs]
    size = LOGPROB_BYTES * sum(len(step) for step in chain.from_iterable(all_steps) if step is not None)
    return write() if size < LARGE_OUTPUT else await workers_for(size).run(write)


def structure_of(request: GenerationFields) -> StructuredOutputsParams | None:
    """Returns the structure of the output that one of several fields asks for.

    Raises InvalidParameterError.
    """
    given = (
        None
        if request.response_format is None
        else StructuredOutputsParams.from_response_format(request.response_format)
    )
    if request.structured_outputs is not None:
        if given is not None:
            raise InvalidParameterError(
                "structured_outputs",
                request.structured_outputs.model_dump(),
                "left out with response_format; both mean the same",
            )
        given = request.structured_outputs.params()
    own = llama_cpp.structure_of(request)
    if own is not None and given is not None:
        name = "grammar" if request.grammar else "json_schema"
        raise InvalidParameterError(name, getattr(request, name), "left out with another field for structured output")
    return own or given


def field_names(request: GenerationFields) -> dict[str, str]:
    """Returns the request's names of the library's fields, where they differ."""
    names = llama_cpp.field_names(request)
    if request.response_format is None or request.structured_outputs is not None:
        return names
    return {
        **names,
        "structured_outputs.json": "response_format.json_schema.schema",
        "structured_outputs": "response_format",
    }


def excluded_fields(request: GenerationFields) -> set[str]:
    """Returns the fields of a stream's chunks that the request does not ask for."""
    options = request.stream_options
    return set() if options is not None and (options.include_usage or options.continuous_usage_stats) else {"usage"}


def wants_usage_per_chunk(request: GenerationFields) -> bool:
    """Whether each chunk of a stream reports the usage so far."""
    return request.stream_options is not None and request.stream_options.continuous_usage_stats


def check_stream_options(request: GenerationFields) -> None:
    """Raises InvalidParameterError for stream_options without stream."""
    if request.stream_options is not None and not request.stream:
        raise InvalidParameterError(
            "stream_options", request.stream_options.model_dump(), "left out unless stream is true"
        )
