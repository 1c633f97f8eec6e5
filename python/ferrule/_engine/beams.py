"""Beam search: what it may be asked for, and its request while it runs.

To the engine it is one request, whose sequences come all at its end.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, cast

from ferrule._engine.request import Completion, Model, Request
from ferrule._params.logits_processors import LogitsProcessor
from ferrule._params.sampling import SamplingParams
from ferrule._text.prompt import ReadPrompt
from ferrule._validation import check_number, check_whole, shown
from ferrule.errors import InvalidParameterError
from ferrule.outputs import BeamSearchOutput, BeamSearchSequence, CompletionOutput, StreamDelta

if TYPE_CHECKING:
    from ferrule import _native

MAX_BEAM_WIDTH = 128
MAX_LENGTH_PENALTY = 10
"""Of either sign. Beyond it the longest sequence wins, or the shortest, whatever it says."""
NEVER = "never"

OWN = ("beam_width", "n", "length_penalty", "early_stopping", "temperature", "stop", "structured_outputs")
"""Fields that are none of SamplingParams, or that mean something else there."""


@dataclass(frozen=True, kw_only=True)
class BeamSearchParams:
    """What a beam search looks for, with vLLM's names and, for what vLLM has not, Hugging Face's.

    Penalties, biases and what is forbidden act on log-probabilities, as Hugging Face's do in a beam search: scores are
    sums of what they make of them. Nothing is drawn.

    Raises InvalidParameterError for a value outside its limits, and for what a beam search cannot do.
    """

    beam_width: int
    """Sequences that are gone on with side by side, the likeliest, and the complete ones that are kept."""
    max_tokens: int
    """Most tokens of a sequence."""
    n: int | None = None
    """Sequences to return, the best; None for all, `beam_width`."""
    length_penalty: float = 1.0
    """The power of its length by which a sequence's sum of log-probabilities is divided: above 0 longer sequences gain
    by it, below 0 shorter ones."""
    early_stopping: bool | Literal["never"] = False
    """When the search ends: True as soon as `beam_width` sequences are complete; False when the best beam, ended now,
    would not be better than the worst of these; `"never"` when it could not become better at any length."""
    ignore_eos: bool = False
    """Whether to go on after the model's own end-of-sequence tokens."""
    stop_token_ids: Sequence[int] = ()
    """Tokens that complete a sequence, beside the model's own."""
    min_tokens: int = 0
    """Tokens before which nothing but `max_tokens` completes a sequence."""
    repetition_penalty: float | None = None
    """As in SamplingParams, and likewise the fields that follow."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    no_repeat_ngram_size: int = 0
    bad_words: str | Sequence[str] = ()
    bad_words_ids: Sequence[Sequence[int]] = ()
    allowed_token_ids: Sequence[int] | None = None
    logits_processors: Sequence[LogitsProcessor] = ()
    logit_bias: Mapping[int, float] = field(default_factory=dict[int, float])
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    """Whether the text keeps that of the stop token."""
    temperature: float = 0.0
    """Nothing but 0, which is vLLM's default: nothing is drawn."""
    stop: str | Sequence[str] = ()
    """Nothing: a beam is tokens, and no text is read before the search is over. `stop_token_ids` are followed."""
    structured_outputs: None = None
    """Nothing: beams keep to no grammar."""

    def __post_init__(self) -> None:
        width = check_whole("beam_width", self.beam_width, 1, MAX_BEAM_WIDTH)
        object.__setattr__(self, "beam_width", width)
        if self.n is not None:
            check_whole("n", self.n, 1, MAX_BEAM_WIDTH)
            if self.n > width:
                raise InvalidParameterError(f"n is {self.n}; the limit is beam_width, {width}")
        penalty = check_number("length_penalty", self.length_penalty, -MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY)
        object.__setattr__(self, "length_penalty", penalty)
        early = cast("object", self.early_stopping)
        if early != NEVER and not isinstance(early, bool):
            raise InvalidParameterError(f"early_stopping is {shown(early)}; it must be True, False or 'never'")
        for name, neutral in (("temperature", 0), ("stop", ()), ("structured_outputs", None)):
            if getattr(self, name) != neutral:
                given = shown(getattr(self, name))
                raise InvalidParameterError(f"{name} is {given}; a beam search takes nothing but {neutral!r}")
        self.sampling()

    def sampling(self) -> SamplingParams:
        """What is asked of each row of logits, with no stage that makes a draw another one.

        Raises InvalidParameterError.
        """
        shared = {each.name: getattr(self, each.name) for each in fields(self) if each.name not in OWN}
        return SamplingParams(temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, **shared)

    def engine_fields(self) -> dict[str, Any]:
        """The search as the engine reads it."""
        return {
            "beam_width": self.beam_width,
            "n": self.beam_width if self.n is None else self.n,
            "length_penalty": self.length_penalty,
            "early_stopping": self.early_stopping,
        }


class BeamSearch(Completion):
    """A search as it goes on; what it has found has a place of its own."""

    def __init__(self, search: BeamSearchParams, index: int, prompt: ReadPrompt, *arguments: Any, **named: Any) -> None:
        super().__init__(index, prompt, *arguments, **named)
        self._search = search
        self._prompt_token_ids = prompt.token_ids
        self.sequences: list[BeamSearchSequence] = []
        """The best first, once it has ended."""

    def engine_fields(self, trace: int | None, streams: bool) -> dict[str, Any]:
        """As of one that is sampled; nobody waits for single tokens."""
        return {**super().engine_fields(trace, streams=False), "beam_search": self._search.engine_fields()}

    def add(self, step: _native.StepOutput) -> StreamDelta:
        """Takes in what the last step brought: all.

        Raises RequestFailedError, LogitsProcessorError.
        """
        self.step = step
        self.raise_error(step)
        if step.finish_reason is not None:
            self.first_token_time = self.last_token_time = time.perf_counter()
            self.sequences = [self._sequence(index, beam) for index, beam in enumerate(step.beams)]
            self.finish_reason = step.finish_reason
        return StreamDelta("", [], None)

    def _sequence(self, index: int, beam: _native.Beam) -> BeamSearchSequence:
        return BeamSearchSequence(
            index=index,
            text=self._text(beam),
            token_ids=beam.token_ids,
            logprobs=None,
            cumulative_logprob=beam.cumulative_logprob,
            finish_reason="length" if beam.stop_token is None else "stop",
            stop_reason=beam.stop_token if beam.stop_token in self.own_stop_ids else None,
            seed=self.seed,
            score=beam.score,
        )

    def _text(self, beam: _native.Beam) -> str:
        if not self.tokenizer.available:
            return ""
        detokenizer = self.tokenizer.detokenizer(
            self._prompt_token_ids, skip_special_tokens=self._search.skip_special_tokens
        )
        hidden = beam.stop_token is not None and not self._search.include_stop_str_in_output
        tokens = beam.token_ids[:-1] if hidden else beam.token_ids
        return "".join(map(detokenizer.feed, tokens)) + detokenizer.flush()


class BeamRequest(Request):
    """A prompt and the search for its continuations."""

    def __init__(
        self,
        request_id: str,
        prompt: ReadPrompt,
        search: BeamSearchParams,
        params: SamplingParams,
        model: Model,
        *,
        priority: int = 0,
        lora: _native.LoraAdapter | None = None,
    ) -> None:
        """`params` are the search's, completed."""
        super().__init__(
            request_id, prompt, params, 0, model, priority=priority, lora=lora, completion=partial(BeamSearch, search)
        )

    def output(self) -> BeamSearchOutput:
        """What was found; nothing before the end, or where it was aborted."""
        told = super().output()
        sequences = [each for search in self.completions if isinstance(search, BeamSearch) for each in search.sequences]
        outputs: list[CompletionOutput] = list(sequences)
        told.metrics = replace(told.metrics, output_tokens=sum(len(each.token_ids) for each in sequences))
        parts = {each.name: getattr(told, each.name) for each in fields(told) if each.name != "outputs"}
        return BeamSearchOutput(**parts, outputs=outputs, sequences=sequences)
