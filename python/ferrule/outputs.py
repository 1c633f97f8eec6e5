"""What a request returns: vLLM's names."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from ferrule._text.parsers import MessageDelta, ParsedMessage


@dataclass(frozen=True)
class Logprob:
    """How likely a token was, before any sampler stage."""

    logprob: float
    """Natural logarithm of the probability."""
    rank: int
    """1 for the likeliest token."""
    decoded_token: str
    """The token's text; U+FFFD where it is part of a character."""


TokenLogprobs: TypeAlias = dict[int, Logprob]
"""By token id: the chosen token first, then the likeliest alternatives."""


@dataclass
class CompletionOutput:
    """One continuation of a prompt."""

    index: int
    """Among the `n` of its prompt."""
    text: str
    token_ids: list[int]
    """All tokens generated, the stop token among them."""
    logprobs: list[TokenLogprobs] | None
    """One for each token, where they were asked for."""
    cumulative_logprob: float | None
    """Sum over the chosen tokens, where log-probabilities were asked for."""
    finish_reason: str | None
    """`stop`, `length` (max_tokens or the end of the context), `abort`, or None while it goes on."""
    stop_reason: int | str | None
    """The stop string or stop token id that ended it; None for the model's own end-of-sequence token."""
    seed: int
    """Of its random numbers: the same seed gives the same tokens."""
    message: ParsedMessage | None = None
    """The text, told apart, where a message format was chosen; the text itself has the format's markers then."""
    entropies: list[float] | None = None
    """How undecided the model was before each token, where it was asked for: the entropy of its probabilities, before
    any sampler stage, in nats."""


@dataclass
class RequestMetrics:
    """How long a request took. Times are seconds."""

    prompt_tokens: int
    output_tokens: int
    """Of all completions."""
    time_to_first_token: float | None
    """From arrival."""
    inter_token_latency: float | None
    """Mean time between tokens of a completion after the first."""
    tokens_per_second: float | None
    """Tokens generated after the first, over the time that they took, for each completion together."""
    total_time: float
    """From arrival to the last token."""
    queue_time: float | None = None
    """From arrival until the engine first computed something of it; None until then."""
    prefill_time: float | None = None
    """From there to the first token."""
    decode_time: float | None = None
    """From the first token to the last."""
    preemptions: int = 0
    """How often its pages were given to others, and had to be computed again."""
    drafted_tokens: int = 0
    """Tokens that were guessed, of all completions."""
    accepted_tokens: int = 0
    """Of these, those that came indeed."""


@dataclass
class RequestOutput:
    """A prompt and its continuations."""

    request_id: str
    prompt: str | None
    """None where the prompt was given as ids."""
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    """One for each token of the prompt, where they were asked for: that token first, then the likeliest alternatives.
    None for the first, which follows nothing."""
    num_cached_tokens: int | None = None
    """Tokens of the prompt that were not computed for it: the prefix cache had them, or another completion of the same
    prompt. None until the engine has said something of it."""


@dataclass
class BeamSearchSequence(CompletionOutput):
    """A continuation that a beam search has found."""

    score: float = 0.0
    """What sequences are compared by: `cumulative_logprob`, over the number of tokens to the power of `length_penalty`.
    The log-probabilities are those that penalties and biases have changed."""


@dataclass
class BeamSearchOutput(RequestOutput):
    """A prompt and what a beam search has found."""

    sequences: list[BeamSearchSequence] = field(default_factory=list[BeamSearchSequence])
    """The best first; `outputs` has the same. Fewer than asked for where no more can be, none where it was aborted."""


@dataclass(frozen=True)
class LoglikelihoodOutput:
    """How likely a continuation is after its prompt."""

    logprob: float
    """Natural logarithm of the probability of the whole continuation: the sum over its tokens."""
    token_logprobs: list[float]
    """One for each token."""
    token_ids: list[int]
    """Of the continuation."""
    is_greedy: bool
    """Whether each token is the likeliest one at its place."""


@dataclass(frozen=True)
class TopLogprobs:
    """The likeliest next tokens after each token of a text: what a student learns from."""

    token_ids: npt.NDArray[np.int32]
    """`[tokens]`: of the text as it was read, special tokens included."""
    top_ids: npt.NDArray[np.int32]
    """`[tokens, k]`: the likeliest tokens after each, the likeliest first, the lower id first among equals."""
    top_logprobs: npt.NDArray[np.float32]
    """`[tokens, k]`: natural logarithms of their probabilities, of all tokens of the vocabulary."""


@dataclass(frozen=True)
class StreamDelta:
    """What a request got in a step of the engine."""

    text: str
    """Whole characters only; empty while a character or a possible stop string is incomplete."""
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None
    output: RequestOutput | None = None
    """All of it, with the last delta."""
    message: MessageDelta | None = None
    """What is new of the message, where a message format was chosen."""
    entropies: list[float] | None = None
    """As in `CompletionOutput`, one for each of these tokens."""
    index: int = 0
    """Of the completion, among the `n` of its prompt."""
    finish_reason: str | None = None
    """With a completion's last delta, as in `CompletionOutput`."""
    stop_reason: int | str | None = None


@dataclass(frozen=True)
class StreamStep:
    """What is new of a request's completions."""

    deltas: list[StreamDelta]
    """One of each completion that got something, or ended."""
    output: RequestOutput
    """The state so far. Until the last step, which is `finished`, it has no `outputs`; it shares its lists then."""


@dataclass(frozen=True)
class Candidate:
    """A token that might have been chosen at a step."""

    token_id: int
    text: str
    logit: float
    probability: float
    """Softmax of the raw logits."""
    final_probability: float
    """After all sampler stages; 0 if dropped."""
    dropped_by: str | None
    """The sampler stage that dropped it."""
    stage_probabilities: list[float] = field(default_factory=list[float])
    """After each active stage; 0 from the one on that dropped it."""


@dataclass(frozen=True)
class StageEffect:
    """What an active sampler stage left."""

    name: str
    tokens_left: int
    entropy: float
    """Of the probabilities of these, in nats."""


@dataclass(frozen=True)
class Explanation:
    """How one token was chosen."""

    position: int
    """Of the token in prompt and output together, from 0."""
    token_id: int
    text: str
    draw: float | None
    """The uniform random number; None where the likeliest was taken."""
    candidates: list[Candidate] = field(default_factory=list[Candidate])
    """Likeliest first."""
    stages: list[StageEffect] = field(default_factory=list[StageEffect])
    """The sampler's active stages, in their order."""


@dataclass(frozen=True)
class EmbeddingOutput:
    """A text as numbers."""

    embedding: npt.NDArray[np.float32]
    """`[dimensions]`, or `[tokens, hidden_size]` where nothing was pooled."""
    prompt_token_ids: list[int]
    """Of the text as it was read, special tokens included."""


@dataclass(frozen=True)
class ClassificationOutput:
    """What a classifier makes of a text, or of a pair of them."""

    probs: npt.NDArray[np.float32]
    """`[labels]`: softmax of the scores, or, of a single label and of labels that do not exclude each other, their
    sigmoid."""
    logits: npt.NDArray[np.float32]
    """`[labels]`: the scores themselves."""
    label: str
    """The likeliest one's name."""
    prompt_token_ids: list[int]


@dataclass(frozen=True)
class RerankOutput:
    """A document's place among others."""

    index: int
    """Among the documents given."""
    relevance_score: float
    """From 0 to 1; comparable among the documents of a query."""
    document: str
    prompt_tokens: int
    """Tokens that were read to rank all of the documents, the query's among them: the same in each of the outputs."""
