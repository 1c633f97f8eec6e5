"""LLM inference on CPUs.

    from ferrule import LLM, SamplingParams

    llm = LLM()  # the small model that ships with ferrule; or a directory, or "org/repo"
    print(llm.generate("The capital of France is", SamplingParams(temperature=0, max_tokens=8))[0].outputs[0].text)

Names are imported when they are first used, so that `import ferrule` costs nearly nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ferrule.async_llm import AsyncLLM
    from ferrule.errors import (
        ChatTemplateError,
        ConfigError,
        EngineError,
        FerruleError,
        InsufficientMemoryError,
        InvalidParameterError,
        ModelFileError,
        ModelNotFoundError,
        PromptError,
        QueueFullError,
        TokenizerError,
        UnsupportedModelError,
    )
    from ferrule.info import model_info
    from ferrule.llm import LLM
    from ferrule.metrics import EngineMetrics
    from ferrule.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput, Score, StreamDelta
    from ferrule.params import SamplingParams

__version__ = "0.1.0"

_HOME = {
    "LLM": "llm",
    "AsyncLLM": "async_llm",
    "SamplingParams": "params",
    "model_info": "info",
    "EngineMetrics": "metrics",
    "CompletionOutput": "outputs",
    "Logprob": "outputs",
    "RequestMetrics": "outputs",
    "RequestOutput": "outputs",
    "Score": "outputs",
    "StreamDelta": "outputs",
    "ChatTemplateError": "errors",
    "ConfigError": "errors",
    "EngineError": "errors",
    "FerruleError": "errors",
    "InsufficientMemoryError": "errors",
    "InvalidParameterError": "errors",
    "ModelFileError": "errors",
    "ModelNotFoundError": "errors",
    "PromptError": "errors",
    "QueueFullError": "errors",
    "TokenizerError": "errors",
    "UnsupportedModelError": "errors",
}

__all__ = [
    "LLM",
    "AsyncLLM",
    "ChatTemplateError",
    "CompletionOutput",
    "ConfigError",
    "EngineError",
    "EngineMetrics",
    "FerruleError",
    "InsufficientMemoryError",
    "InvalidParameterError",
    "Logprob",
    "ModelFileError",
    "ModelNotFoundError",
    "PromptError",
    "QueueFullError",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "Score",
    "StreamDelta",
    "TokenizerError",
    "UnsupportedModelError",
    "__version__",
    "model_info",
]


def __getattr__(name: str) -> object:
    """Imports a public name from its module (PEP 562)."""
    try:
        home = _HOME[name]
    except KeyError:
        raise AttributeError(f"module 'ferrule' has no attribute {name!r}") from None
    value: object = getattr(import_module(f"ferrule.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
