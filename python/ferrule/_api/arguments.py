"""Rules for method arguments of other libraries, and conversion of PoolingParams to arguments."""

from __future__ import annotations

from typing import Any, cast

from ferrule._params.compatibility import Ignored, Refused, Rules
from ferrule._params.pooling import PoolingParams
from ferrule.errors import InvalidParameterError

FOREIGN: Rules = {
    "tokenization_kwargs": Refused(None, 'pass token ids, {"prompt_token_ids": [...]}'),
    "prompt_token_ids": Refused(None, 'pass {"prompt_token_ids": [...]} as the prompt'),
    "guided_options_request": Refused(None, "use SamplingParams(structured_outputs=...)"),
    "prompt_adapter_request": Refused(None, "prompt adapters are not supported; use lora_request"),
    "mm_processor_kwargs": Refused(None, "prompts are text"),
    "trace_headers": Ignored(None, "`ferrule serve` traces requests"),
    "prompt_text": Ignored(None, "the prompt is in the output"),
    "data_parallel_rank": Ignored(None, "one process uses all threads of the machine"),
    "session_id": Ignored(None, "the prefix cache detects common prefixes by itself"),
    "reasoning_ended": Ignored(None, "the message format decides it"),
    "reasoning_parser_kwargs": Ignored(None, "the message format decides it"),
    "concurrency_limit": Ignored(None, "the scheduler limits sequences by max_num_seqs"),
    "max_tokens": Refused(None, "pass SamplingParams(max_tokens=...)"),
    "temperature": Refused(None, "pass SamplingParams(temperature=...)"),
    "streamer": Refused(None, "iterate over LLM.stream(prompt, params)"),
}
"""Arguments of `generate` and `beam_search` in other libraries."""
FOREIGN_POOLING: Rules = {
    "lora_request": Refused(None, "texts are encoded without adapters"),
    "tokenization_kwargs": Refused(None, "use truncate_prompt_tokens"),
    "pooling_task": Ignored(None, "the method decides the task"),
    "chat_template": Refused(None, "the prompt of Qwen3-Reranker is built in"),
}
"""Arguments of vLLM's `embed`, `classify` and `score` that ferrule does not have."""
FOREIGN_ABORT: Rules = {"internal": Ignored(False, "a request has one id")}
"""Arguments of vLLM's `abort` that ferrule does not have."""
FOREIGN_START: Rules = {
    "start_engine_loop": Ignored(True, "the engine starts with the first request"),
    "usage_context": Ignored(None, "usage is not reported"),
    "stat_loggers": Ignored(None, "read metrics()"),
}
"""Arguments of vLLM's `from_engine_args` that ferrule does not have."""


def pooling_arguments(pooling_params: object, **given: Any) -> dict[str, Any]:
    """Returns the arguments `given`; values that are None are taken from `pooling_params`.

    Raises InvalidParameterError.
    """
    if pooling_params is None:
        return given
    if not isinstance(pooling_params, PoolingParams):
        raise InvalidParameterError("pooling_params", pooling_params, "a PoolingParams for all texts, or None")
    return {
        name: cast("object", getattr(pooling_params, name)) if value is None else value for name, value in given.items()
    }
