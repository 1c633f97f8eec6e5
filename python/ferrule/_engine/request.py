"""A running request: converts tokens from the engine to text and outputs."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import time
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from ferrule._engine.driver import Work
from ferrule._engine.energy import energy_log
from ferrule._params.declaration import Integer, Number, parameters
from ferrule._params.logits_processors import Logits, LogitsProcessors, allocate_logits
from ferrule._params.lora import LoRARequest
from ferrule._params.sampling import STANDARD, RequestOutputKind, SamplingParams
from ferrule._text.parsers import MessageDelta, MessageFormat
from ferrule._text.prompt import ReadPrompt, prompt_limit
from ferrule._text.restrictions import bad_words_ids, breaker_ids
from ferrule._text.stop import StopStrings
from ferrule._text.tokenizer import Tokenizer, TokenLimit
from ferrule.errors import InvalidParameterError, PipelineStageError, RequestFailedError
from ferrule.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput, StreamDelta, TokenLogprobs

if TYPE_CHECKING:
    from ferrule import _native


NOT_OF_STAGES = frozenset({"n", "best_of", "seed", "min_tokens", "logprobs", "prompt_logprobs", *STANDARD})
"""Numeric fields of SamplingParams that are passed to the engine in another form, or not at all."""
ENGINE_NUMBERS = tuple(
    name
    for name, each in parameters(SamplingParams).items()
    if isinstance(each.bounds, (Integer, Number)) and name not in NOT_OF_STAGES
)
"""Numeric fields of SamplingParams that are passed to the engine unchanged."""
PROMPT_END = 32
"""Number of tokens at the end of a prompt that are checked for the beginning of reasoning."""


def check_vocabulary(params: SamplingParams, vocab_size: int) -> None:
    """Checks that all token ids of the parameters are in the vocabulary.

    Raises InvalidParameterError.
    """
    fields: list[tuple[str, Iterable[int]]] = [
        ("stop_token_ids", params.stop_token_ids or ()),
        ("logit_bias", params.logit_bias or ()),
        ("allowed_token_ids", params.allowed_token_ids or ()),
        *((f"bad_words_ids[{index}]", ids) for index, ids in enumerate(params.bad_words_ids or ())),
    ]
    if isinstance(params.prediction, tuple):
        fields.append(("prediction", params.prediction))
    for field, ids in fields:
        for token in ids:
            if token >= vocab_size:
                raise InvalidParameterError(field, token, f"token ids from 0 to {vocab_size - 1}, the vocabulary")


PREDICTED_CHARACTERS = 16
"""Number of characters of a prediction to tokenize for each token of the context; tokens are shorter on average."""


@dataclass(frozen=True)
class Restrictions:
    """Restrictions that are given as text, converted to tokens; the same for every completion of a request."""

    bad_words: list[list[int]]
    """Token sequences that must not be generated."""
    breakers: list[int]
    """Tokens that end a DRY repeat."""
    prediction: Sequence[int]
    """Predicted tokens."""


@dataclass(frozen=True)
class Model:
    """Facts about the model that requests need."""

    tokenizer: Tokenizer
    vocab_size: int
    max_model_len: int
    """Maximum number of tokens of a request, prompt and output together."""
    limited_by: str
    """Name of the setting that determines the maximum, for messages."""
    eos_token_ids: tuple[int, ...]
    """End-of-sequence tokens."""

    @property
    def prompt_limit(self) -> TokenLimit:
        """Limit of a prompt, after which at least one token of output has room."""
        return prompt_limit(self.max_model_len, self.limited_by)

    @cached_property
    def logits(self) -> Logits:
        """Array that logits processors change, shared by all requests: float32 `[vocab]`."""
        return allocate_logits(self.vocab_size)


def read_prediction(prediction: object, model: Model) -> list[int]:
    """Returns the tokens of a prediction, truncated to the length of the context.

    Raises TokenizerError.
    """
    if prediction is None:
        return []
    if isinstance(prediction, str):
        prediction = prediction[: model.max_model_len * PREDICTED_CHARACTERS]
    ids = model.tokenizer.encode(prediction, add_special_tokens=False) if isinstance(prediction, str) else prediction
    # A tokenizer may have tokens that the model's vocabulary lacks.
    known = itertools.takewhile(lambda token: token < model.vocab_size, cast("Sequence[int]", ids))
    return list(itertools.islice(known, model.max_model_len))


class MessageBeginning(NamedTuple):
    """Facts about a prompt that the parser of its messages needs."""

    reasoning_open: bool
    """Whether the output begins within reasoning."""
    digest: str
    """Digest of the prompt, which makes tool call ids differ between turns of a conversation with a fixed seed."""


def message_beginning(message_format: MessageFormat, prompt: ReadPrompt, tokenizer: Tokenizer) -> MessageBeginning:
    """Returns the facts about a prompt with which the parsing of its messages begins."""
    end = tokenizer.decode(prompt.token_ids[-PROMPT_END:], skip_special_tokens=False)
    digest = hashlib.blake2b(array("Q", prompt.token_ids)).hexdigest()
    return MessageBeginning(message_format.reasoning_open(end), digest)


@dataclass(frozen=True)
class Reports:
    """Optional reports of the engine about a request."""

    prompt_progress: bool = False
    """Whether each step that computes a part of the prompt has an output."""
    processed_logprobs: bool = False
    """Whether log-probabilities of generated tokens are those after all sampler stages, of the tokens that remain."""


USUAL_REPORTS = Reports()


class Completion:
    """A running completion. Its `params` are completed: the model's defaults are filled in."""

    def __init__(
        self,
        index: int,
        prompt: ReadPrompt,
        params: SamplingParams,
        seed: int,
        model: Model,
        *,
        priority: int,
        prompt_logprobs_from: int,
        message_format: MessageFormat | None,
        restrictions: Restrictions,
        reports: Reports,
    ) -> None:
        self.index = index
        self.seed = (seed + index) % 2**64
        self.text = ""
        self.message = None if message_format is None else MessageDelta()
        """Message so far; None without a message format."""
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] | None = None if params.logprobs is None else []
        self.cumulative_logprob = 0.0
        self.entropies: list[float] | None = [] if params.entropy else None
        self.processors: LogitsProcessors | None = None
        if params.logits_processors:
            self.processors = LogitsProcessors(params.logits_processors, prompt.token_ids, model.logits)
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.first_token_time: float | None = None
        self.last_token_time: float | None = None
        self.submitted = math.inf
        """Time at which the engine got the request, of `time.perf_counter`; infinite before the first token."""
        self.step: _native.StepOutput | None = None
        """Last step, for the timings that the engine reports."""
        # All completions have the same prompt, so the first one reports its log-probabilities.
        self._prompt_logprobs = params.prompt_logprobs if index == 0 else None
        self._prompt_logprobs_from = prompt_logprobs_from
        nothing: list[TokenLogprobs | None] = [None] * prompt_logprobs_from
        self.prompt_logprobs = None if self._prompt_logprobs is None else nothing
        self._priority = priority
        self._cache_salt = prompt.cache_salt
        self._params = params
        self._restrictions = restrictions
        self._reports = reports
        self.tokenizer = model.tokenizer
        rest = model.max_model_len - len(prompt.token_ids)
        self._max_tokens = rest if params.max_tokens is None else min(params.max_tokens, rest)
        self.own_stop_ids = set(params.stop_token_ids or ())
        ends = () if params.ignore_eos else (*model.eos_token_ids, *prompt.stop_token_ids)
        self._all_stop_ids = self.own_stop_ids.union(ends)
        self._stop = StopStrings(params.stop or (), include=params.include_stop_str_in_output)
        self._detokenizer = None
        if (params.detokenize and model.tokenizer.available) or params.stop or message_format is not None:
            self._detokenizer = model.tokenizer.detokenizer(
                prompt.token_ids,
                skip_special_tokens=params.skip_special_tokens,
                keep=frozenset() if message_format is None else message_format.keep,
            )
            if params.structured_outputs is not None:
                # The prompt may end within a character, whose rest is not part of structured output.
                self._detokenizer.flush()
        self._parser = None
        if message_format is not None:
            beginning = message_beginning(message_format, prompt, model.tokenizer)
            self._parser = message_format.parser(
                reasoning_open=beginning.reasoning_open, seed=f"{self.seed} {beginning.digest}"
            )

    def engine_fields(self, trace: int | None, streams: bool) -> dict[str, Any]:
        """Returns the parameters that the engine reads. Stop strings are handled in this class."""
        params = self._params
        return {
            "temperature": params.temperature,
            "top_k": params.top_k,
            "top_p": params.top_p,
            "min_p": params.min_p,
            "repetition_penalty": params.repetition_penalty,
            **{name: getattr(params, name) for name in ENGINE_NUMBERS},
            "dry_sequence_breaker_ids": self._restrictions.breakers,
            "bad_words": self._restrictions.bad_words,
            "allowed_token_ids": params.allowed_token_ids,
            "logit_bias": {str(token): bias for token, bias in (params.logit_bias or {}).items()},
            "seed": self.seed,
            "max_tokens": self._max_tokens,
            "min_tokens": min(params.min_tokens, self._max_tokens),
            "stop_token_ids": sorted(self._all_stop_ids),
            "logprobs": 0 if params.logprobs is None and params.ranks else params.logprobs,
            "entropy": params.entropy,
            "prompt_logprobs": self._prompt_logprobs,
            "prompt_logprobs_from": self._prompt_logprobs_from,
            "priority": self._priority,
            "cache_salt": self._cache_salt,
            "trace": trace,
            "streams": streams and params.output_kind is not RequestOutputKind.FINAL_ONLY,
            "prediction": list(self._restrictions.prediction),
            **asdict(self._reports),
        }

    def receive(self, step: _native.StepOutput) -> None:
        """Notes the time of a step's output, and adds its log-probabilities of the prompt; `add` handles the rest.

        AsyncLLM calls it outside the event loop, since it may take long.
        """
        if step.last_token_seconds is not None:
            # The output that arrived with the least delay has the most exact time.
            self.submitted = min(self.submitted, time.perf_counter() - step.last_token_seconds)
        if self.prompt_logprobs is not None:
            self.prompt_logprobs.extend(map(self._by_token, step.prompt_logprobs))

    def add(self, step: _native.StepOutput) -> StreamDelta:
        """Adds the output of a step and sets `finish_reason` if the completion has ended.

        Raises RequestFailedError if the engine failed on this request, LogitsProcessorError if a processor did,
        PipelineStageError if a pipeline stage is lost.
        """
        self.step = step
        self.raise_error(step)
        start, text = len(self.token_ids), ""
        for position, token in enumerate(step.token_ids):
            self._count(token, step.logprobs[position] if step.logprobs else None)
            if self.entropies is not None:
                self.entropies.append(step.entropies[position])
            last = position == len(step.token_ids) - 1
            if not (last and step.stop_token is not None and not self._params.include_stop_str_in_output):
                text += self._read(token)
            if self._stop.matched is not None:
                break
        if self._stop.matched is None and step.finish_reason is not None:
            self.finish_reason = step.finish_reason
            self.stop_reason = step.stop_token if step.stop_token in self.own_stop_ids else None
            text += self._flush()
        if self._stop.matched is not None:
            self.finish_reason, self.stop_reason = "stop", self._stop.matched
        self.text += text
        logprobs = None if self.logprobs is None else self.logprobs[start:]
        entropies = None if self.entropies is None else self.entropies[start:]
        return self._delta(text, self.token_ids[start:], logprobs, entropies)

    def raise_error(self, step: _native.StepOutput) -> None:
        """Raises the error of a failed step."""
        if step.finish_reason == "error" and self.processors is not None and self.processors.error is not None:
            raise self.processors.error
        if step.lost_stage is not None:
            raise PipelineStageError(step.error or "a pipeline stage is lost", step.lost_stage)
        if step.finish_reason == "error":
            raise RequestFailedError(step.error or "the engine failed on this request")

    def abort(self) -> StreamDelta:
        """Ends the completion; the delta has the text that was held back."""
        text = self._flush()
        self.text += text
        self.finish_reason = "abort"
        nothing: list[Any] = []
        return self._delta(
            text, [], None if self.logprobs is None else nothing, None if self.entropies is None else nothing
        )

    @property
    def mean_logprob(self) -> float:
        """Mean log-probability of the tokens; requires log-probabilities."""
        return self.cumulative_logprob / max(len(self.token_ids), 1)

    def output(self) -> CompletionOutput:
        """Returns the state so far."""
        return CompletionOutput(
            index=self.index,
            text=self.text,
            token_ids=list(self.token_ids),
            logprobs=None if self.logprobs is None else list(self.logprobs),
            cumulative_logprob=None if self.logprobs is None else self.cumulative_logprob,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            seed=self.seed,
            message=None if self.message is None else self.message.message(),
            entropies=None if self.entropies is None else list(self.entropies),
        )

    def _delta(
        self, text: str, token_ids: list[int], logprobs: list[TokenLogprobs] | None, entropies: list[float] | None
    ) -> StreamDelta:
        return StreamDelta(
            text,
            token_ids,
            logprobs,
            message=self._parse(text),
            entropies=entropies,
            index=self.index,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )

    def _parse(self, text: str) -> MessageDelta | None:
        if self._parser is None or self.message is None:
            return None
        delta = self._parser.feed(text)
        if self.finish_reason is not None:
            delta += self._parser.finish()
        self.message += delta
        return delta

    def _count(self, token: int, logprobs: _native.TokenLogprobs | None) -> None:
        self.last_token_time = time.perf_counter()
        self.first_token_time = self.first_token_time or self.last_token_time
        self.token_ids.append(token)
        if logprobs is not None:
            self.cumulative_logprob += logprobs.sampled[1]
            if self.logprobs is not None:
                self.logprobs.append(self._by_token(logprobs))

    def _by_token(self, logprobs: _native.TokenLogprobs) -> TokenLogprobs:
        texts = self.tokenizer.token_text
        return {t: Logprob(logprob, rank, texts(t)) for t, logprob, rank in [logprobs.sampled, *logprobs.top]}

    def _read(self, token: int) -> str:
        if self._detokenizer is None:
            return ""
        text = self._detokenizer.feed(token)
        return text if len(self.token_ids) <= self._params.min_tokens else self._stop.feed(text)

    def _flush(self) -> str:
        if self._detokenizer is None:
            return ""
        return self._stop.feed(self._detokenizer.flush()) + self._stop.flush()


class Request:
    """A prompt and its running completions.

    Requests with lower `priority` are scheduled earlier. Requested log-probabilities of the prompt begin at the
    position `prompt_logprobs_from`. `reports` changes what the engine reports. `lora` is the adapter, `grammar` the
    structure of the outputs. `completion` creates the completions.
    """

    def __init__(
        self,
        request_id: str,
        prompt: ReadPrompt,
        params: SamplingParams,
        seed: int,
        model: Model,
        *,
        priority: int = 0,
        prompt_logprobs_from: int = 1,
        reports: Reports = USUAL_REPORTS,
        message_format: MessageFormat | None = None,
        lora: _native.LoraAdapter | None = None,
        lora_request: LoRARequest | None = None,
        grammar: _native.Grammar | None = None,
        completion: Callable[..., Completion] = Completion,
    ) -> None:
        self.request_id = request_id
        self.prompt = prompt
        self._lora = lora
        self.lora_request = lora_request
        self._grammar = grammar
        self.reports = reports
        self._n = params.n
        self.ranks = params.ranks
        """Whether more completions are computed than are returned."""
        restrictions = Restrictions(
            bad_words_ids(params, model.tokenizer),
            breaker_ids(params, model.tokenizer),
            read_prediction(params.prediction, model),
        )
        self.completions = [
            completion(
                index,
                prompt,
                params,
                seed,
                model,
                priority=priority,
                prompt_logprobs_from=prompt_logprobs_from,
                message_format=message_format,
                restrictions=restrictions,
                reports=reports,
            )
            for index in range(params.best_of or params.n)
        ]
        self.arrival = time.perf_counter()

    @property
    def finished(self) -> bool:
        """Whether all completions have ended."""
        return all(completion.finish_reason is not None for completion in self.completions)

    def work(self, trace: int | None = None, *, streams: bool = True) -> list[Work]:
        """Returns the work for the engine; completions after the first are forks of the first.

        `trace` is the number of candidates to report for each token. `streams` says whether a reader may wait for
        each token; with `output_kind=FINAL_ONLY` none does.
        """
        return [
            Work(
                self.prompt.token_ids,
                json.dumps(completion.engine_fields(trace, streams)),
                completion.index or None,
                self._lora,
                completion.processors,
                self._grammar,
                self.prompt.features,
            )
            for completion in self.completions
        ]

    def returned(self) -> Sequence[Completion]:
        """Returns the completions of the output in order; with `best_of` the best ones, once all have ended."""
        if not self.ranks:
            return self.completions
        return sorted(self.completions, key=lambda completion: -completion.mean_logprob)[: self._n]

    def progress(self) -> RequestOutput:
        """Returns the state so far in constant time, without outputs and with lists that are not copied."""
        first = self.completions[0]
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt.text,
            prompt_token_ids=self.prompt.token_ids,
            outputs=[],
            finished=self.finished,
            metrics=_metrics(self.arrival, len(self.prompt.token_ids), self.completions),
            prompt_logprobs=first.prompt_logprobs,
            num_cached_tokens=None if first.step is None else first.step.cached_tokens,
            lora_request=self.lora_request,
        )

    def output(self) -> RequestOutput:
        """Returns the state so far."""
        so_far = self.progress()
        return replace(
            so_far,
            prompt_token_ids=list(so_far.prompt_token_ids),
            outputs=[
                replace(completion.output(), index=index, lora_request=self.lora_request)
                for index, completion in enumerate(self.returned())
            ],
            prompt_logprobs=None if so_far.prompt_logprobs is None else list(so_far.prompt_logprobs),
        )


def _metrics(arrival: float, prompt_tokens: int, completions: Sequence[Completion]) -> RequestMetrics:
    spans = [
        (c.first_token_time, c.last_token_time, len(c.token_ids) - 1)
        for c in completions
        if c.first_token_time is not None and c.last_token_time is not None
    ]
    first = min((first for first, _, _ in spans), default=None)
    last = max((last for _, last, _ in spans), default=None)
    gaps = sum(count for _, _, count in spans)
    waited = sum(last - first for first, last, _ in spans)
    elapsed = None if first is None or last is None else last - first
    steps = [c.step for c in completions if c.step is not None]
    queued = min((step.queued_seconds for step in steps if step.queued_seconds is not None), default=None)
    answered = min((step.first_token_seconds for step in steps if step.first_token_seconds is not None), default=None)
    ended = max((step.last_token_seconds for step in steps if step.last_token_seconds is not None), default=None)
    prefill_end = answered
    if prefill_end is None:
        prefill_end = min((s.last_prefill_seconds for s in steps if s.last_prefill_seconds is not None), default=None)
    prefill_joules = decode_joules = None
    if (log := energy_log()) is not None and queued is not None and answered is not None and ended is not None:
        begin = min(completion.submitted for completion in completions)
        prefill_joules, decode_joules = log.phases(begin + queued, begin + answered, begin + ended)
    return RequestMetrics(
        prompt_tokens=prompt_tokens,
        output_tokens=sum(len(c.token_ids) for c in completions),
        time_to_first_token=None if first is None else first - arrival,
        inter_token_latency=waited / gaps if gaps else None,
        tokens_per_second=gaps / elapsed if elapsed else None,
        total_time=(time.perf_counter() if last is None else last) - arrival,
        queue_time=queued,
        prefill_time=None if queued is None or prefill_end is None else prefill_end - queued,
        decode_time=None if answered is None or ended is None else ended - answered,
        preemptions=sum(step.preemptions for step in steps),
        drafted_tokens=sum(step.drafted_tokens for step in steps),
        accepted_tokens=sum(step.accepted_tokens for step in steps),
        prefill_joules=prefill_joules,
        decode_joules=decode_joules,
        processed_tokens=steps[0].processed_tokens if steps else 0,
    )
