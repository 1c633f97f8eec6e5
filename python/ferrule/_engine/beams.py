"""Beam search: parameters, and the running request.

The engine runs a beam search as one request and returns all sequences at the end.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, cast

from ferrule._engine.request import Completion, Model, Request, message_beginning
from ferrule._params.logits_processors import LogitsProcessor
from ferrule._params.lora import LoRARequest
from ferrule._params.sampling import SamplingParams
from ferrule._text.parsers import MessageFormat, ParsedMessage
from ferrule._text.prompt import ReadPrompt
from ferrule._validation import check_integer, check_number
from ferrule.errors import InvalidParameterError
from ferrule.outputs import BeamSearchOutput, BeamSearchSequence, CompletionOutput, StreamDelta

if TYPE_CHECKING:
    from ferrule import _native

MAX_BEAM_WIDTH = 128
MAX_LENGTH_PENALTY = 10
"""Maximum absolute value. Beyond it the longest or the shortest sequence wins regardless of its text."""
NEVER = "never"

OWN = ("beam_width", "n", "length_penalty", "early_stopping", "temperature", "stop", "structured_outputs")
"""Fields that SamplingParams does not have, or that have another meaning there."""


@dataclass(frozen=True, kw_only=True)
class BeamSearchParams:
    """Parameters of a beam search, under vLLM's names, or Hugging Face's where vLLM has none.

    A score is the sum of log-probabilities after penalties, biases and forbidden tokens, as in Hugging Face's beam
    search. Nothing is sampled.

    Raises InvalidParameterError for an invalid value.
    """

    beam_width: int
    """Number of beams, which is also the number of complete sequences to keep."""
    max_tokens: int
    """Maximum number of tokens of a sequence."""
    n: int | None = None
    """Number of sequences to return; None means `beam_width`."""
    length_penalty: float = 1.0
    """Exponent of the sequence length in the score: the sum of log-probabilities is divided by length to this power. A
    value above 0 favours long sequences, a value below 0 short ones."""
    early_stopping: bool | Literal["never"] = False
    """Condition that ends the search. True: `beam_width` sequences are complete. False: in addition, the best
    unfinished beam would not be better than the worst complete sequence if it ended now. `"never"`: in addition, the
    best unfinished beam cannot become better than the worst complete sequence at any length."""
    ignore_eos: bool = False
    """Whether to continue after the model's end-of-sequence tokens."""
    stop_token_ids: Sequence[int] | None = ()
    """Token ids that complete a sequence, besides the model's end-of-sequence tokens."""
    min_tokens: int = 0
    """Minimum number of tokens of a sequence, unless `max_tokens` is less."""
    repetition_penalty: float | None = None
    """Repetition penalty, as in SamplingParams. SamplingParams documents the following fields too."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    no_repeat_ngram_size: int = 0
    bad_words: str | Sequence[str] | None = ()
    bad_words_ids: Sequence[Sequence[int]] | None = ()
    allowed_token_ids: Sequence[int] | None = None
    logits_processors: Sequence[LogitsProcessor] | None = ()
    logit_bias: Mapping[int, float] | None = None
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    """Whether to keep the text of the stop token in the text."""
    temperature: float = 0.0
    """Temperature; it must be 0, since nothing is sampled."""
    stop: str | Sequence[str] | None = ()
    """Stop strings; not supported, since beams have no text before the search ends. Use `stop_token_ids`."""
    structured_outputs: None = None
    """Structured outputs; not supported in a beam search."""

    def __post_init__(self) -> None:
        width = check_integer("beam_width", self.beam_width, 1, MAX_BEAM_WIDTH)
        object.__setattr__(self, "beam_width", width)
        if self.n is not None:
            check_integer("n", self.n, 1, MAX_BEAM_WIDTH)
            if self.n > width:
                raise InvalidParameterError("n", self.n, f"at most beam_width ({width})")
        penalty = check_number("length_penalty", self.length_penalty, -MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY)
        object.__setattr__(self, "length_penalty", penalty)
        early = cast("object", self.early_stopping)
        if early != NEVER and not isinstance(early, bool):
            raise InvalidParameterError("early_stopping", early, "True, False or 'never'")
        if self.temperature != 0:
            raise InvalidParameterError("temperature", self.temperature, "0 in a beam search")
        for name, instead in (("stop", "stop_token_ids"), ("structured_outputs", "generate")):
            if getattr(self, name):
                raise InvalidParameterError(name, getattr(self, name), f"left out in a beam search; use {instead}")
        self.sampling()

    def sampling(self) -> SamplingParams:
        """Returns the parameters that apply to each row of logits, without sampler stages that drop tokens.

        Raises InvalidParameterError.
        """
        shared = {each.name: getattr(self, each.name) for each in fields(self) if each.name not in OWN}
        return SamplingParams(temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, **shared)

    def engine_fields(self) -> dict[str, Any]:
        """Returns the fields that the engine reads."""
        return {
            "beam_width": self.beam_width,
            "n": self.beam_width if self.n is None else self.n,
            "length_penalty": self.length_penalty,
            "early_stopping": self.early_stopping,
        }


class BeamSearch(Completion):
    """A running beam search; `sequences` holds the result."""

    def __init__(self, search: BeamSearchParams, index: int, prompt: ReadPrompt, *arguments: Any, **named: Any) -> None:
        super().__init__(index, prompt, *arguments, **named)
        self._search = search
        self._prompt = prompt
        self._message_format: MessageFormat | None = named["message_format"]
        self.sequences: list[BeamSearchSequence] = []
        """Sequences by score, best first; empty before the search has ended."""

    def engine_fields(self, trace: int | None, streams: bool) -> dict[str, Any]:
        """Returns the parameters that the engine reads; no token is streamed."""
        return {**super().engine_fields(trace, streams=False), "beam_search": self._search.engine_fields()}

    def add(self, step: _native.StepOutput) -> StreamDelta:
        """Adds the output of the last step, which contains all sequences.

        Raises RequestFailedError, LogitsProcessorError, PipelineStageError.
        """
        self.step = step
        self.raise_error(step)
        if step.finish_reason is not None:
            self.first_token_time = self.last_token_time = time.perf_counter()
            self.sequences = [self._sequence(index, beam) for index, beam in enumerate(step.beams)]
            self.finish_reason = step.finish_reason
        return StreamDelta("", [], None)

    def _sequence(self, index: int, beam: _native.Beam) -> BeamSearchSequence:
        text = self._text(beam)
        return BeamSearchSequence(
            index=index,
            text=text,
            token_ids=beam.token_ids,
            logprobs=None,
            cumulative_logprob=beam.cumulative_logprob,
            finish_reason="length" if beam.stop_token is None else "stop",
            stop_reason=beam.stop_token if beam.stop_token in self.own_stop_ids else None,
            seed=self.seed,
            message=self._message(index, text),
            score=beam.score,
            prompt_token_ids=list(self._prompt.token_ids),
        )

    def _message(self, index: int, text: str) -> ParsedMessage | None:
        if self._message_format is None:
            return None
        beginning = message_beginning(self._message_format, self._prompt, self.tokenizer)
        seed = f"{index} {beginning.digest}"
        return self._message_format.parse(text, reasoning_open=beginning.reasoning_open, seed=seed)

    def _text(self, beam: _native.Beam) -> str:
        if not self.tokenizer.available:
            return ""
        detokenizer = self.tokenizer.detokenizer(
            self._prompt.token_ids,
            skip_special_tokens=self._search.skip_special_tokens,
            keep=frozenset() if self._message_format is None else self._message_format.keep,
        )
        hidden = beam.stop_token is not None and not self._search.include_stop_str_in_output
        tokens = beam.token_ids[:-1] if hidden else beam.token_ids
        return "".join(map(detokenizer.feed, tokens)) + detokenizer.flush()


class BeamRequest(Request):
    """A prompt and its running beam search."""

    def __init__(
        self,
        request_id: str,
        prompt: ReadPrompt,
        search: BeamSearchParams,
        params: SamplingParams,
        model: Model,
        *,
        priority: int = 0,
        message_format: MessageFormat | None = None,
        lora: _native.LoraAdapter | None = None,
        lora_request: LoRARequest | None = None,
    ) -> None:
        """Creates the request; `params` is the completed result of `search.sampling()`."""
        super().__init__(
            request_id,
            prompt,
            params,
            0,
            model,
            priority=priority,
            message_format=message_format,
            lora=lora,
            lora_request=lora_request,
            completion=partial(BeamSearch, search),
        )

    def output(self) -> BeamSearchOutput:
        """Returns the sequences; none before the end, or if the search was aborted."""
        found = super().output()
        sequences = [each for search in self.completions if isinstance(search, BeamSearch) for each in search.sequences]
        outputs: list[CompletionOutput] = list(sequences)
        found.metrics = replace(found.metrics, output_tokens=sum(len(each.token_ids) for each in sequences))
        parts = {each.name: getattr(found, each.name) for each in fields(found) if each.name != "outputs"}
        return BeamSearchOutput(**parts, outputs=outputs, sequences=sequences)
