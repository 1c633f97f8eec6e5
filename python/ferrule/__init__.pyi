"""Names that `ferrule` exports; `__init__.py` reads this list."""

from ._api.allocation import AllocatedMatrix as AllocatedMatrix
from ._api.allocation import BitAllocation as BitAllocation
from ._api.allocation import allocate_bits as allocate_bits
from ._api.async_llm import AsyncLLM as AsyncLLM
from ._api.generated_calibration import generate_calibration as generate_calibration
from ._api.info import model_info as model_info
from ._api.llm import LLM as LLM
from ._api.quantization import quantize as quantize
from ._api.recipe import Recipe as Recipe
from ._api.tokenizer import PreTrainedTokenizer as PreTrainedTokenizer
from ._engine.beams import BeamSearchParams as BeamSearchParams
from ._engine.lora import (
    LoRAAdapter as LoRAAdapter,
)
from ._engine.metrics import EngineMetrics as EngineMetrics
from ._evaluation import (
    Comparison as Comparison,
)
from ._evaluation import (
    Perplexity as Perplexity,
)
from ._params.lora import LoRARequest as LoRARequest
from ._params.options import AsyncEngineArgs as AsyncEngineArgs
from ._params.options import EngineArgs as EngineArgs
from ._params.pooling import PoolingParams as PoolingParams
from ._params.sampling import RequestOutputKind as RequestOutputKind
from ._params.sampling import SamplingParams as SamplingParams
from ._params.structured import StructuredOutputsParams as StructuredOutputsParams
from ._text.parsers import (
    MessageDelta as MessageDelta,
)
from ._text.parsers import (
    MessageFormat as MessageFormat,
)
from ._text.parsers import (
    ParsedMessage as ParsedMessage,
)
from ._text.parsers import (
    ToolCall as ToolCall,
)
from .errors import (
    ChatTemplateError as ChatTemplateError,
)
from .errors import CompatibilityWarning as CompatibilityWarning
from .errors import (
    ConfigError as ConfigError,
)
from .errors import (
    EngineError as EngineError,
)
from .errors import (
    FerruleError as FerruleError,
)
from .errors import (
    ImageError as ImageError,
)
from .errors import (
    InsufficientMemoryError as InsufficientMemoryError,
)
from .errors import (
    InvalidParameterError as InvalidParameterError,
)
from .errors import (
    LogitsProcessorError as LogitsProcessorError,
)
from .errors import (
    MissingDependencyError as MissingDependencyError,
)
from .errors import (
    ModelFileError as ModelFileError,
)
from .errors import (
    ModelNotFoundError as ModelNotFoundError,
)
from .errors import (
    ModelWriteError as ModelWriteError,
)
from .errors import (
    PipelineStageError as PipelineStageError,
)
from .errors import (
    PromptError as PromptError,
)
from .errors import (
    QueueFullError as QueueFullError,
)
from .errors import (
    RequestFailedError as RequestFailedError,
)
from .errors import (
    TokenizerError as TokenizerError,
)
from .errors import (
    UnsupportedModelError as UnsupportedModelError,
)
from .errors import (
    UnsupportedTaskError as UnsupportedTaskError,
)
from .outputs import (
    BeamSearchOutput as BeamSearchOutput,
)
from .outputs import (
    BeamSearchSequence as BeamSearchSequence,
)
from .outputs import (
    ClassificationOutput as ClassificationOutput,
)
from .outputs import ClassificationRequestOutput as ClassificationRequestOutput
from .outputs import (
    CompletionOutput as CompletionOutput,
)
from .outputs import (
    EmbeddingOutput as EmbeddingOutput,
)
from .outputs import EmbeddingRequestOutput as EmbeddingRequestOutput
from .outputs import (
    LoglikelihoodOutput as LoglikelihoodOutput,
)
from .outputs import (
    Logprob as Logprob,
)
from .outputs import PoolingRequestOutput as PoolingRequestOutput
from .outputs import (
    RequestMetrics as RequestMetrics,
)
from .outputs import (
    RequestOutput as RequestOutput,
)
from .outputs import (
    RerankOutput as RerankOutput,
)
from .outputs import ScoringOutput as ScoringOutput
from .outputs import ScoringRequestOutput as ScoringRequestOutput
from .outputs import (
    StreamDelta as StreamDelta,
)
from .outputs import (
    StreamStep as StreamStep,
)
from .outputs import (
    TopLogprobs as TopLogprobs,
)

__version__: str
__all__: list[str]
