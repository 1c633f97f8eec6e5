"""Conversion of requests of llama.cpp's own routes to generations."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias, cast

from ferrule._engine.request import Reports
from ferrule._engine.workers import workers_for
from ferrule._params.sampling import SamplingParams
from ferrule._text.prompt import Prompt, TextPrompt
from ferrule.errors import InvalidParameterError
from ferrule.server.early_end import EndCondition, GenerationTime, Outdent
from ferrule.server.errors import unsupported
from ferrule.server.generation import Generation, new_request_id
from ferrule.server.llama_cpp.protocol import (
    InfillRequest,
    NativeCompletionRequest,
    NativeFields,
    NativePrompt,
    PromptObject,
)
from ferrule.server.models import ServedModel
from ferrule.server.request_record import name_fields
from ferrule.server.schema import llama_cpp
from ferrule.server.schema.base import one_of
from ferrule.server.schema.sampling import sampling_params
from ferrule.server.schema.timings import MILLISECONDS

SinglePrompt: TypeAlias = str | PromptObject | list[int | str]
MAX_PROMPTS = 1024
"""Maximum number of prompts of a request."""
RANDOM_SEED = 0xFFFFFFFF
"""llama.cpp's number for a seed that is chosen at random."""
MAX_DIGITS = 10
"""Digits of a text that is a token id."""
SETTINGS = (
    *("temperature", "dynatemp_range", "dynatemp_exponent", "top_k", "top_p", "min_p", "top_n_sigma"),
    *("xtc_probability", "xtc_threshold", "typical_p", "presence_penalty", "frequency_penalty", "dry_multiplier"),
    *("dry_base", "dry_allowed_length", "dry_penalty_last_n", "dry_sequence_breakers", "mirostat", "mirostat_tau"),
    *("mirostat_eta", "stop", "ignore_eos"),
)
"""Parameters of which llama.cpp reports the values under the same names."""


async def completions(served: ServedModel, request: NativeCompletionRequest) -> list[Generation]:
    """Converts a request to one generation for each prompt.

    Raises ApiError, FerruleError.
    """
    prompts = await read_prompts(served, "prompt", request.prompt)
    return await _generations(served, request, prompts, {"prompt_token_ids": "prompt"})


async def infill(served: ServedModel, request: InfillRequest) -> list[Generation]:
    """Converts a request for the text between a prefix and a suffix to a generation.

    Raises ApiError, FerruleError.
    """
    prompt: TextPrompt = {"prompt": request.input_prefix, "suffix": request.input_suffix, "middle": request.prompt}
    return await _generations(served, request, [prompt], {"prompt": "input_prefix", "suffix": "input_suffix"})


async def read_prompts(served: ServedModel, field: str, given: NativePrompt) -> list[Prompt]:
    """Returns the prompts of a field: one, or those of a list that has no token ids at its top.

    Raises InvalidParameterError, TokenizerError.
    """
    if not isinstance(given, list) or any(isinstance(part, int) for part in given):
        return [await _read_prompt(served, cast("SinglePrompt", given))]
    if not 1 <= len(given) <= MAX_PROMPTS:
        raise InvalidParameterError(field, len(given), f"a list of 1 to {MAX_PROMPTS} prompts")
    return [await _read_prompt(served, cast("SinglePrompt", part)) for part in given]


async def _read_prompt(served: ServedModel, given: SinglePrompt) -> Prompt:
    """Returns a prompt; texts between token ids are tokenized without special tokens, except at the beginning."""
    if isinstance(given, str):
        return given
    if isinstance(given, PromptObject):
        return given.prompt_string
    tokens: list[int] = []
    for index, part in enumerate(given):
        if isinstance(part, str):
            tokens += await workers_for().run(served.llm.tokenize, part, add_special_tokens=index == 0)
        else:
            tokens.append(part)
    return {"prompt_token_ids": tokens}


def limit_of(request: NativeFields) -> int | None:
    """Returns the maximum number of tokens; None for the rest of the context.

    Raises InvalidParameterError.
    """
    return llama_cpp.max_tokens(request, "max_tokens")


def settings(params: SamplingParams, served: ServedModel) -> dict[str, Any]:
    """Returns sampling parameters under llama.cpp's names, with the model's values where a request gives none."""
    completed = params.completed(served.llm.generation_config)
    structure = completed.structured_outputs
    biases: dict[int, float | None] = dict(completed.logit_bias or {})
    if completed.ignore_eos:
        biases |= dict.fromkeys(served.info["eos_token_ids"])  # JSON has no -infinity
    return {
        **{name: getattr(completed, name) for name in SETTINGS},
        "seed": RANDOM_SEED if completed.seed is None else completed.seed,
        "adaptive_target": -1.0,  # the sampler does not exist
        "adaptive_decay": 0.9,
        "n_predict": -1 if completed.max_tokens is None else completed.max_tokens,
        "max_tokens": -1 if completed.max_tokens is None else completed.max_tokens,
        "n_probs": completed.logprobs or 0,
        "repeat_penalty": completed.repetition_penalty,
        "repeat_last_n": -1,
        "grammar": "" if structure is None else structure.grammar or "",
        "logit_bias": [{"bias": bias, "token": token} for token, bias in biases.items()],
        "samplers": list(llama_cpp.SAMPLERS),
    }


async def _generations(
    served: ServedModel, request: NativeFields, prompts: Sequence[Prompt], names: Mapping[str, str]
) -> list[Generation]:
    name_fields({**llama_cpp.field_names(request), **names})
    if request.n not in (None, 1) or request.best_of not in (None, 1):
        raise unsupported("n", "n is not supported by this route; use /v1/completions")
    limit, logprobs = limit_of(request), one_of(request, "n_probs")
    others = llama_cpp.sampling_values(request)
    if request.logit_bias is not None:
        others |= await workers_for().run(_biases, served, request)
    params = sampling_params(
        request.model_copy(update={"logit_bias": None}),
        max_tokens=1 if limit == 0 else limit,  # the engine generates at least one token, which the answer drops
        logprobs=logprobs or None,
        structure=llama_cpp.structure_of(request),
        others=others,
    )
    name = new_request_id("completion")
    reports = Reports(
        prompt_progress=request.stream and request.return_progress is True,
        processed_logprobs=request.post_sampling_probs,
    )
    conditions = _end_conditions(request)
    return [
        Generation(served, prompt, params, f"{name}-{index}", reports=reports, end_conditions=conditions)
        for index, prompt in enumerate(prompts)
    ]


def _end_conditions(request: NativeFields) -> list[Callable[[], EndCondition]]:
    found: list[Callable[[], EndCondition]] = []
    if request.n_indent < 0:
        raise InvalidParameterError("n_indent", request.n_indent, "an integer >= 0")
    if request.n_indent:
        found.append(partial(Outdent, request.n_indent))
    if request.t_max_predict_ms > 0:
        found.append(partial(GenerationTime, request.t_max_predict_ms / MILLISECONDS))
    return found


def _biases(served: ServedModel, request: NativeFields) -> dict[str, Any]:
    """Returns biases by token id, and the tokens that are forbidden.

    Raises InvalidParameterError, TokenizerError.
    """
    given = request.logit_bias or {}
    pairs: Iterable[Sequence[object]] = given.items() if isinstance(given, dict) else given
    added: dict[int, object] = {}
    forbidden = list(request.bad_words_ids or ())
    for token, bias in pairs:
        if bias is not False and not isinstance(bias, (int, float)):
            raise InvalidParameterError("logit_bias", bias, "numbers or false for token ids or texts")
        if isinstance(token, str) and not (token.isascii() and token.isdigit() and len(token) <= MAX_DIGITS):
            ids = served.llm.tokenize(token, add_special_tokens=False)
        elif isinstance(token, (int, str)):
            ids = [int(token)]
        else:
            raise InvalidParameterError("logit_bias", token, "numbers or false for token ids or texts")
        if bias is False:
            forbidden += [[each] for each in ids]
        else:
            added |= dict.fromkeys(ids, bias)
    return {"logit_bias": added} | ({"bad_words_ids": forbidden} if forbidden else {})
