"""Constructor arguments of vLLM's `LLM` and llama-cpp-python's `Llama` that ferrule handles by rule."""

from __future__ import annotations

from ferrule._params.compatibility import Ignored, Refused, Renamed, Rules

DTYPES = {
    "auto": "auto",
    "half": "f16",
    "float16": "f16",
    "bfloat16": "bf16",
    "float": "f32",
    "float32": "f32",
}
"""Quantizations by vLLM's names of the weight types that they keep."""


def quantization_of(dtype: object) -> object:
    """Returns the quantization for a `dtype` of vLLM or PyTorch; other values are returned for the check."""
    name = str(dtype).removeprefix("torch.")
    return DTYPES.get(name, dtype)


_ONE_PROCESS = "one process uses all threads of the machine"
_NO_GPU = "there is no GPU"
_ALWAYS_SCHEDULED = "the scheduler always does this"

FOREIGN: Rules = {
    "dtype": Renamed("quantization", quantization_of),
    "kv_cache_memory_bytes": Renamed("kv_cache_memory"),
    "trust_remote_code": Ignored(False, "code of a model's repository is never run; every architecture is built in"),
    "data_parallel_size": Ignored(1, _ONE_PROCESS),
    "disable_custom_all_reduce": Ignored(False, _ONE_PROCESS),
    "max_parallel_loading_workers": Ignored(None, "weights load in all threads"),
    "gpu_memory_utilization": Ignored(0.9, "there is no GPU; set kv_cache_memory, in bytes"),
    "swap_space": Ignored(4, "there is no GPU; preempted requests are computed again"),
    "cpu_offload_gb": Ignored(0, _NO_GPU),
    "enforce_eager": Ignored(False, "there are no CUDA graphs"),
    "max_seq_len_to_capture": Ignored(8192, "there are no CUDA graphs"),
    "compilation_config": Ignored(None, "models are not compiled"),
    "block_size": Ignored(None, "pages of the KV cache have 16 tokens"),
    "num_gpu_blocks_override": Ignored(None, "set kv_cache_memory, in bytes"),
    "enable_chunked_prefill": Ignored(True, _ALWAYS_SCHEDULED),
    "async_scheduling": Ignored(None, _ALWAYS_SCHEDULED),
    "scheduling_policy": Ignored("fcfs", "requests are scheduled by priority, then by arrival"),
    "disable_log_stats": Ignored(True, "read LLM.metrics()"),
    "enable_log_requests": Ignored(False, "AsyncLLM logs no requests; `ferrule serve` does"),
    "use_tqdm_on_load": Ignored(True, "pass a function as progress"),
    "runner": Ignored("auto", "the method that is called decides the task"),
    "task": Ignored("auto", "the method that is called decides the task"),
    "convert": Ignored("auto", "the method that is called decides the task"),
    "model_impl": Ignored("auto", "there is one implementation of each architecture"),
    "tokenizer_mode": Ignored("auto", "the fast tokenizer is always used"),
    "config_format": Ignored("auto", "config.json or the GGUF file is read"),
    "code_revision": Ignored(None, "code of a model's repository is never run"),
    "enable_lora": Ignored(False, "requests may always use adapters"),
    "max_loras": Ignored(1, "requests may use any number of adapters at once"),
    "max_lora_rank": Ignored(16, "adapters may have any rank"),
    "max_cpu_loras": Ignored(None, "adapters stay loaded until unload_lora_adapter"),
    "lora_dtype": Ignored("auto", "adapters keep their stored type"),
    "max_logprobs": Ignored(20, "the limit is 20"),
    "enable_sleep_mode": Ignored(False, "close() frees the memory"),
    "disable_sliding_window": Refused(False, "set max_model_len to the window instead"),
    "skip_tokenizer_init": Refused(False, "prompts may be token ids, and SamplingParams(detokenize=False) skips text"),
    "tokenizer_revision": Refused(None, "pass tokenizer, a directory"),
    "download_dir": Refused(None, "set the environment variable HF_HOME"),
    "hf_token": Refused(None, "set the environment variable HF_TOKEN"),
    "hf_overrides": Refused(None, "edit config.json in a copy of the model's directory"),
    "hf_config_path": Refused(None, "put config.json beside the weights"),
    "rope_scaling": Refused(None, "edit config.json in a copy of the model's directory"),
    "rope_theta": Refused(None, "edit config.json in a copy of the model's directory"),
    "generation_config": Refused("auto", "set the fields of SamplingParams"),
    "override_generation_config": Refused(None, "set the fields of SamplingParams"),
    "chat_template": Refused(None, "pass chat_template to LLM.chat"),
    "pooler_config": Refused(None, "pass pooling and normalize to LLM.embed"),
    "override_pooler_config": Refused(None, "pass pooling and normalize to LLM.embed"),
    "logits_processors": Refused(None, "use SamplingParams(logits_processors=[function])"),
    "structured_outputs_config": Refused(None, "use StructuredOutputsParams in each request"),
    "guided_decoding_backend": Refused("auto", "llguidance is the one backend"),
    "reasoning_parser": Refused("", "pass reasoning_parser to LLM.chat"),
    "served_model_name": Refused(None, "use `ferrule serve --served-model-name`"),
    "mm_processor_kwargs": Refused(None, "prompts are text"),
    "limit_mm_per_prompt": Refused(None, "prompts are text"),
    "allowed_local_media_path": Refused("", "prompts are text"),
    "allowed_media_domains": Refused(None, "prompts are text"),
    "enable_prompt_embeds": Refused(False, "prompts are text or token ids"),
    "enable_return_routed_experts": Refused(False, "routed experts are not reported"),
    "quantization_config": Refused(None, "pass quantization"),
    "attention_config": Ignored(None, "there is one implementation of attention"),
    "profiler_config": Refused(None, "use the profiler of the system, such as perf"),
    "kv_transfer_config": Refused(None, "use LLM.save_state and LLM.restore_state"),
    "kv_events_config": Refused(None, "read LLM.metrics()"),
    "worker_cls": Refused(None, _ONE_PROCESS),
    "worker_extension_cls": Refused(None, _ONE_PROCESS),
    "additional_config": Refused(None, "there are no plugins"),
    "ignore_patterns": Ignored(None, "only the files that are needed are downloaded"),
    "model_loader_extra_config": Refused(None, "there are no loader plugins"),
    "offload_group_size": Ignored(0, _NO_GPU),
    "offload_num_in_group": Ignored(1, _NO_GPU),
    "offload_prefetch_step": Ignored(1, _NO_GPU),
    "offload_params": Ignored(None, _NO_GPU),
    # llama-cpp-python
    "model_path": Renamed("model"),
    "n_ctx": Renamed("max_model_len"),
    "n_threads": Renamed("threads"),
    "n_batch": Renamed("max_num_batched_tokens"),
    "use_mmap": Renamed("mmap"),
    "use_mlock": Ignored(False, "pages are not locked"),
    "n_gpu_layers": Ignored(0, _NO_GPU),
    "verbose": Ignored(True, "nothing is printed"),
}
"""Rules for arguments of other libraries' constructors."""
