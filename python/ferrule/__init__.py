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
    from ferrule.beams import BeamSearchParams
    from ferrule.errors import (
        ChatTemplateError,
        ConfigError,
        EngineError,
        FerruleError,
        InsufficientMemoryError,
        InvalidParameterError,
        LogitsProcessorError,
        ModelFileError,
        ModelNotFoundError,
        ModelWriteError,
        PromptError,
        QueueFullError,
        RequestFailedError,
        TokenizerError,
        UnsupportedModelError,
        UnsupportedTaskError,
    )
    from ferrule.evaluation import Comparison, Perplexity
    from ferrule.info import model_info
    from ferrule.llm import LLM
    from ferrule.lora import LoRAAdapter, LoRARequest
    from ferrule.metrics import EngineMetrics
    from ferrule.outputs import (
        BeamSearchOutput,
        BeamSearchSequence,
        ClassificationOutput,
        CompletionOutput,
        EmbeddingOutput,
        Logprob,
        RequestMetrics,
        RequestOutput,
        RerankOutput,
        Score,
        StreamDelta,
        StreamStep,
        TopLogprobs,
    )
    from ferrule.params import SamplingParams
    from ferrule.parsers import MessageDelta, MessageFormat, ParsedMessage, ToolCall
    from ferrule.quantization import quantize
    from ferrule.structured import StructuredOutputsParams

__version__ = "0.1.0"

_HOME = {
    "LLM": "llm",
    "AsyncLLM": "async_llm",
    "BeamSearchParams": "beams",
    "LoRAAdapter": "lora",
    "LoRARequest": "lora",
    "SamplingParams": "params",
    "MessageDelta": "parsers",
    "MessageFormat": "parsers",
    "ParsedMessage": "parsers",
    "ToolCall": "parsers",
    "Comparison": "evaluation",
    "Perplexity": "evaluation",
    "model_info": "info",
    "quantize": "quantization",
    "EngineMetrics": "metrics",
    "BeamSearchOutput": "outputs",
    "BeamSearchSequence": "outputs",
    "ClassificationOutput": "outputs",
    "CompletionOutput": "outputs",
    "EmbeddingOutput": "outputs",
    "Logprob": "outputs",
    "RequestMetrics": "outputs",
    "RequestOutput": "outputs",
    "RerankOutput": "outputs",
    "Score": "outputs",
    "StreamDelta": "outputs",
    "StreamStep": "outputs",
    "StructuredOutputsParams": "structured",
    "TopLogprobs": "outputs",
    "ChatTemplateError": "errors",
    "ConfigError": "errors",
    "EngineError": "errors",
    "FerruleError": "errors",
    "InsufficientMemoryError": "errors",
    "InvalidParameterError": "errors",
    "LogitsProcessorError": "errors",
    "ModelFileError": "errors",
    "ModelNotFoundError": "errors",
    "ModelWriteError": "errors",
    "PromptError": "errors",
    "QueueFullError": "errors",
    "RequestFailedError": "errors",
    "TokenizerError": "errors",
    "UnsupportedModelError": "errors",
    "UnsupportedTaskError": "errors",
}

__all__ = [
    "LLM",
    "AsyncLLM",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "ChatTemplateError",
    "ClassificationOutput",
    "Comparison",
    "CompletionOutput",
    "ConfigError",
    "EmbeddingOutput",
    "EngineError",
    "EngineMetrics",
    "FerruleError",
    "InsufficientMemoryError",
    "InvalidParameterError",
    "LoRAAdapter",
    "LoRARequest",
    "LogitsProcessorError",
    "Logprob",
    "MessageDelta",
    "MessageFormat",
    "ModelFileError",
    "ModelNotFoundError",
    "ModelWriteError",
    "ParsedMessage",
    "Perplexity",
    "PromptError",
    "QueueFullError",
    "RequestFailedError",
    "RequestMetrics",
    "RequestOutput",
    "RerankOutput",
    "SamplingParams",
    "Score",
    "StreamDelta",
    "StreamStep",
    "StructuredOutputsParams",
    "TokenizerError",
    "ToolCall",
    "TopLogprobs",
    "UnsupportedModelError",
    "UnsupportedTaskError",
    "__version__",
    "model_info",
    "quantize",
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
