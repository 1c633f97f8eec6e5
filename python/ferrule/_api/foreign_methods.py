"""Methods and properties of vLLM and llama-cpp-python that are not supported, with what to use instead."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from ferrule._params.compatibility import refuse_attribute

_ONE_PROCESS = "one process uses all threads of the machine"
_NO_MEDIA = "prompts are text"
_NO_SLEEP = "use close() and load the model again; packed weights load at once"
_NEW_WEIGHTS = "close the model and load the new weights"
_SYSTEM_PROFILER = "use the profiler of the system, such as perf"
_CHECK_HEALTH = "use AsyncLLM.check_health(), which raises EngineError if the engine has failed or is closed"
_DRAIN = "use AsyncLLM.drain(timeout), which refuses new requests and waits for the running ones"

UNSUPPORTED = {
    "encode": "use embed, classify or score",
    "reward": 'use classify, or embed with pooling="none"',
    "enqueue": "use generate, or AsyncLLM",
    "wait_for_completion": "use generate, or AsyncLLM",
    "add_request": "use generate or stream",
    "preprocess_chat": "use chat_prompt(messages)",
    "sleep": _NO_SLEEP,
    "wake_up": _NO_SLEEP,
    "is_sleeping": "there is no sleep mode",
    "collective_rpc": _ONE_PROCESS,
    "get_world_size": _ONE_PROCESS,
    "scale_elastic_ep": _ONE_PROCESS,
    "apply_model": "use logits, info or explain to inspect the model",
    "llm_engine": "use the methods of LLM",
    "model_config": "use info()",
    "tokenizer": "use get_tokenizer()",
    "set_tokenizer": "pass tokenizer to the constructor",
    "get_supported_tasks": "methods that the model does not support raise UnsupportedTaskError",
    "get_metrics": "use metrics()",
    "do_log_stats": "use metrics()",
    "is_tracing_enabled": "`ferrule serve` traces requests",
    "reset_prefix_cache": "give prompts a different cache_salt",
    "reset_mm_cache": _NO_MEDIA,
    "reset_encoder_cache": _NO_MEDIA,
    "start_profile": _SYSTEM_PROFILER,
    "stop_profile": _SYSTEM_PROFILER,
    "init_weight_transfer_engine": _NEW_WEIGHTS,
    "update_weights": _NEW_WEIGHTS,
    "add_lora": "use load_lora_adapter(name, path)",
    "remove_lora": "use unload_lora_adapter(name)",
    "list_loras": "use lora_adapters()",
    "pin_lora": "adapters stay loaded until unload_lora_adapter(name)",
    "wait_for_requests_to_drain": _DRAIN,
    "pause_generation": _DRAIN,
    "resume_generation": "load the model again after AsyncLLM.drain()",
    "is_paused": "metrics() has the numbers of running and waiting requests",
    "is_running": _CHECK_HEALTH,
    "is_stopped": _CHECK_HEALTH,
    "errored": _CHECK_HEALTH,
    "dead_error": _CHECK_HEALTH,
    "from_vllm_config": "use from_engine_args",
    "create_chat_completion": "use chat",
    "create_embedding": "use embed",
}
"""Text after "is not supported; ", by the name of a method or property."""


class RefusingMeta(type):
    """Metaclass of LLM and AsyncLLM; an unsupported method of vLLM raises an error with its replacement."""

    if not TYPE_CHECKING:  # type checkers report unknown attributes themselves

        def __getattr__(cls, name: str) -> NoReturn:
            """Raises an AttributeError that says what to use instead of a method of vLLM's."""
            refuse_attribute(cls, name, UNSUPPORTED)
