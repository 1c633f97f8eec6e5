"""Results of requests, under vLLM's names."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, TypeAlias, TypeVar

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from ferrule._params.lora import LoRARequest
    from ferrule._text.parsers import MessageDelta, ParsedMessage

T_co = TypeVar("T_co", covariant=True)


@dataclass(frozen=True)
class Logprob:
    """Log-probability of a token, before any sampler stage."""

    logprob: float
    """Natural logarithm of the probability."""
    rank: int
    """Rank of the token by probability, from 1 for the most likely token."""
    decoded_token: str
    """Text of the token; U+FFFD if it is part of a character."""


TokenLogprobs: TypeAlias = dict[int, Logprob]
"""Log-probabilities by token id: the chosen token first, then the most likely alternatives."""


@dataclass
class CompletionOutput:
    """One completion of a prompt."""

    index: int
    """Index of the completion among the `n` of its prompt."""
    text: str
    """Generated text, without the stop string unless `include_stop_str_in_output` is set."""
    token_ids: list[int]
    """All generated tokens, the stop token included."""
    logprobs: list[TokenLogprobs] | None
    """Log-probabilities of each token; None unless `logprobs` was set."""
    cumulative_logprob: float | None
    """Sum of the log-probabilities of the chosen tokens; None unless `logprobs` was set."""
    finish_reason: str | None
    """`stop`, `length` (max_tokens or the end of the context), `abort`, or None while the request runs."""
    stop_reason: int | str | None
    """Stop string or stop token id that ended the completion; None for the model's end-of-sequence token."""
    seed: int
    """Seed of the random numbers. The same seed gives the same tokens."""
    message: ParsedMessage | None = None
    """The text parsed into content, reasoning and tool calls; None without a message format."""
    entropies: list[float] | None = None
    """Entropy in nats of the model's distribution for each token, before any sampler stage; None unless `entropy` was
    set."""
    lora_request: LoRARequest | None = None
    """Adapter that generated the completion; None unless the request gave a LoRARequest."""

    def finished(self) -> bool:
        """Returns whether the completion has ended."""
        return self.finish_reason is not None


@dataclass
class RequestMetrics:
    """Timings of a request. Times are in seconds."""

    prompt_tokens: int
    """Number of tokens in the prompt."""
    output_tokens: int
    """Number of generated tokens of all completions."""
    time_to_first_token: float | None
    """Time from arrival to the first token."""
    inter_token_latency: float | None
    """Mean time between tokens of a completion after the first."""
    tokens_per_second: float | None
    """Tokens per second after the first token, over all completions."""
    total_time: float
    """Time from arrival to the last token."""
    queue_time: float | None = None
    """Time from arrival until the engine first computed a part of the request; None before that."""
    prefill_time: float | None = None
    """Time from the first computation to the first token; before that, to the latest part of the prompt."""
    decode_time: float | None = None
    """Time from the first token to the last."""
    preemptions: int = 0
    """Number of times the request was preempted: it lost its pages and was computed again."""
    drafted_tokens: int = 0
    """Number of speculative tokens proposed for all completions."""
    accepted_tokens: int = 0
    """Number of speculative tokens accepted."""
    prefill_joules: float | None = None
    """Energy that the processors and the memory of the machine used from the first computation to the first token,
    other requests and programs included; None where it cannot be measured, and for less than 0.1 s."""
    decode_joules: float | None = None
    """The same from the first token to the last."""
    processed_tokens: int = 0
    """Number of prompt tokens that are computed, or taken from the prefix cache, so far."""


@dataclass
class RequestOutput:
    """A prompt and its completions."""

    request_id: str
    """Id of the request."""
    prompt: str | None
    """Text of the prompt; None if the prompt was given as token ids."""
    prompt_token_ids: list[int]
    """Tokens of the prompt."""
    outputs: list[CompletionOutput]
    """Completions, in the order of their index."""
    finished: bool
    """Whether all completions have ended."""
    metrics: RequestMetrics
    """Timings of the request."""
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    """Log-probabilities of each prompt token, with None for the first; None unless `prompt_logprobs` was set."""
    num_cached_tokens: int | None = None
    """Number of prompt tokens taken from the prefix cache or from another completion of the same prompt instead of
    being computed; None until the engine has computed part of the prompt."""
    lora_request: LoRARequest | None = None
    """Adapter of the request; None unless it was given as a LoRARequest."""


@dataclass
class BeamSearchSequence(CompletionOutput):
    """A sequence that a beam search found."""

    score: float = 0.0
    """`cumulative_logprob` divided by the number of tokens to the power of `length_penalty`. Penalties and biases are
    part of the log-probabilities."""
    prompt_token_ids: list[int] = field(default_factory=list[int], repr=False)
    """Tokens of the prompt."""

    @property
    def tokens(self) -> list[int]:
        """Tokens of the prompt and of the sequence (vLLM's name)."""
        return [*self.prompt_token_ids, *self.token_ids]

    @property
    def cum_logprob(self) -> float:
        """Sum of the log-probabilities of the generated tokens (vLLM's name)."""
        return self.cumulative_logprob or 0.0


@dataclass
class BeamSearchOutput(RequestOutput):
    """A prompt and the sequences found by a beam search."""

    sequences: list[BeamSearchSequence] = field(default_factory=list[BeamSearchSequence])
    """Sequences by score, best first; `outputs` holds the same sequences. There are fewer than requested if no more
    exist, and none if the request was aborted."""


@dataclass(frozen=True)
class LoglikelihoodOutput:
    """Log-probability of a continuation after its prompt."""

    logprob: float
    """Natural logarithm of the probability of the whole continuation: the sum over its tokens."""
    token_logprobs: list[float]
    """Log-probability of each token."""
    token_ids: list[int]
    """Tokens of the continuation."""
    is_greedy: bool
    """Whether each token is the most likely one at its position."""


@dataclass(frozen=True)
class TopLogprobs:
    """The most likely next tokens after each token of a text, as training data for distillation."""

    token_ids: npt.NDArray[np.int32]
    """Tokens of the text, special tokens included: `[tokens]`."""
    top_ids: npt.NDArray[np.int32]
    """The most likely tokens after each token, by probability and then by id: `[tokens, k]`."""
    top_logprobs: npt.NDArray[np.float32]
    """Natural logarithm of the probability of each token in `top_ids`: `[tokens, k]`."""


@dataclass(frozen=True)
class StreamDelta:
    """Tokens and text that one engine step added to a completion."""

    text: str
    """New text, in whole characters; empty while a character or a possible stop string is incomplete."""
    token_ids: list[int]
    """New tokens."""
    logprobs: list[TokenLogprobs] | None
    """Log-probabilities of the new tokens; None unless `logprobs` was set."""
    output: RequestOutput | None = None
    """The whole output, in the last delta; None before it."""
    message: MessageDelta | None = None
    """New parts of the message; None without a message format."""
    entropies: list[float] | None = None
    """Entropies for the new tokens, as in `CompletionOutput`."""
    index: int = 0
    """Index of the completion among the `n` of its prompt."""
    finish_reason: str | None = None
    """Finish reason, as in `CompletionOutput`; None before the last delta."""
    stop_reason: int | str | None = None
    """Stop string or stop token id, as in `CompletionOutput`; None before the last delta."""


@dataclass(frozen=True)
class StreamStep:
    """Deltas that one engine step added to a request."""

    deltas: list[StreamDelta]
    """One delta for each completion that got tokens or ended."""
    output: RequestOutput
    """State of the request. It is `finished` in the last step; before, it has no `outputs`, and its lists still
    grow."""


@dataclass(frozen=True)
class Candidate:
    """A token that the sampler considered at a step."""

    token_id: int
    """Id of the token."""
    text: str
    """Text of the token."""
    logit: float
    """Raw logit."""
    probability: float
    """Probability by the raw logits, before any sampler stage."""
    final_probability: float
    """Probability after all sampler stages; 0 if a stage dropped the token."""
    dropped_by: str | None
    """Sampler stage that dropped the token; None if no stage did."""
    stage_probabilities: list[float] = field(default_factory=list[float])
    """Probability after each active stage; 0 from the stage that dropped the token."""


@dataclass(frozen=True)
class StageEffect:
    """Effect of an active sampler stage."""

    name: str
    """Name of the stage."""
    tokens_left: int
    """Number of tokens that the stage kept."""
    entropy: float
    """Entropy of the distribution over the tokens kept, in nats."""


@dataclass(frozen=True)
class Explanation:
    """Explanation of the sampling of one token."""

    position: int
    """Index of the token in the concatenation of prompt and output."""
    token_id: int
    """Id of the token."""
    text: str
    """Text of the token."""
    draw: float | None
    """Uniform random number that selected the token; None for greedy decoding."""
    candidates: list[Candidate] = field(default_factory=list[Candidate])
    """Candidates by probability, the most likely first."""
    stages: list[StageEffect] = field(default_factory=list[StageEffect])
    """Active sampler stages, in the order in which they run."""


@dataclass(frozen=True)
class PoolingRequestOutput(Generic[T_co]):
    """Result of a pooling task for one text."""

    request_id: str
    """Index of the text in the call, as text."""
    outputs: T_co
    """An EmbeddingOutput, ClassificationOutput or ScoringOutput."""
    prompt_token_ids: list[int]
    """Tokens of the text, special tokens included."""
    num_cached_tokens: int = 0
    """Number of tokens taken from the prefix cache; always 0, since texts are encoded without it."""
    finished: bool = True
    """Whether the request has ended; always True."""


@dataclass(frozen=True)
class EmbeddingOutput:
    """Embedding of a text."""

    embedding: npt.NDArray[np.float32]
    """Embedding vector: `[dimensions]`, or `[tokens, hidden_size]` with `pooling="none"`."""

    @property
    def hidden_size(self) -> int:
        """Number of dimensions."""
        return int(self.embedding.shape[-1])


@dataclass(frozen=True)
class ClassificationOutput:
    """Probabilities that a classifier assigns to its labels."""

    probs: npt.NDArray[np.float32]
    """Probability of each label: `[labels]`. It is the softmax of the logits, or their sigmoid for a single label and
    for labels that are not mutually exclusive."""
    logits: npt.NDArray[np.float32]
    """Logit of each label: `[labels]`."""
    label: str
    """Name of the most likely label."""

    @property
    def num_classes(self) -> int:
        """Number of labels."""
        return len(self.probs)


@dataclass(frozen=True)
class ScoringOutput:
    """Relevance of one text to another."""

    score: float
    """Sigmoid of a cross-encoder's logit, a reranker's probability of "yes", or the cosine similarity of two
    embeddings."""


EmbeddingRequestOutput: TypeAlias = PoolingRequestOutput[EmbeddingOutput]
"""Result of `LLM.embed` for one text."""
ClassificationRequestOutput: TypeAlias = PoolingRequestOutput[ClassificationOutput]
"""Result of `LLM.classify` for one text."""
ScoringRequestOutput: TypeAlias = PoolingRequestOutput[ScoringOutput]
"""Result of `LLM.score` for one pair of texts."""


@dataclass(frozen=True)
class RerankOutput:
    """A document and its relevance to a query."""

    index: int
    """Index of the document in the call."""
    relevance_score: float
    """Relevance from 0 to 1; only comparable between documents of the same query."""
    document: str
    """Text of the document."""
    prompt_tokens: int
    """Number of tokens computed for the query and all documents; the same in each output of a call."""
