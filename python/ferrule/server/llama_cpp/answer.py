"""Responses of POST /completion and /infill, whole and as a stream."""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any, Literal, cast

from ferrule.outputs import Logprob, RequestOutput, StreamDelta, TokenLogprobs
from ferrule.server.generation import Generation, all_of, complete, stream_steps
from ferrule.server.llama_cpp.protocol import (
    CompletionPart,
    CompletionResult,
    NativeFields,
    NativeLogprob,
    NativeProb,
    NativeTokenLogprob,
    NativeTokenProb,
)
from ferrule.server.llama_cpp.requests import limit_of, settings
from ferrule.server.merging import merged
from ferrule.server.schema.timings import ProgressReporter, prompt_progress, timings
from ferrule.server.streaming import event


@dataclass
class ResponseWriter:
    """Writes the response of the generations of a request, one for each prompt."""

    request: NativeFields
    generations: Sequence[Generation]
    _texts: dict[int, str] = field(default_factory=dict[int, str])
    """Output of each prompt so far."""

    async def full(self) -> Any:
        """Returns the response as JSON, a list for several prompts; a failure of one prompt ends all.

        Raises as `complete`.
        """
        outputs = await all_of([complete(generation) for generation in self.generations])
        results = [self._whole(index, output) for index, output in enumerate(outputs)]
        return results[0] if len(results) == 1 else results

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yields the events of the stream."""
        progress = [ProgressReporter(asked=each.reports.prompt_progress) for each in self.generations]
        async with aclosing(merged([stream_steps(each) for each in self.generations])) as all_steps:
            async for index, step in all_steps:
                for state in progress[index].new(step.output):
                    part = CompletionPart(**self._part(index, StreamDelta("", [], None), state))
                    part.prompt_progress = prompt_progress(state)
                    part.timings = timings(state) if self.request.timings_per_token else None
                    yield event(part)
                for new in step.deltas:
                    self._texts[index] = self._texts.get(index, "") + new.text
                    for each in _single_tokens(new) if self.request.n_probs else (new,):
                        if each.text or each.token_ids:
                            part = CompletionPart(**self._part(index, each, step.output))
                            part.timings = timings(step.output) if self.request.timings_per_token else None
                            yield event(part)
                    if new.finish_reason is not None:
                        yield event(self._result(index, StreamDelta("", [], []), new, step.output))

    def _whole(self, index: int, output: RequestOutput) -> dict[str, Any]:
        completion = output.outputs[0]
        self._texts[index] = completion.text
        new = StreamDelta(
            completion.text,
            completion.token_ids,
            completion.logprobs,
            finish_reason=completion.finish_reason,
            stop_reason=completion.stop_reason,
        )
        result = self._result(index, new, new, output)
        if not self.request.return_tokens:
            result.tokens = []
        return _chosen(result.model_dump(mode="json"), self.request.response_fields or ())

    def _part(self, index: int, new: StreamDelta, output: RequestOutput) -> dict[str, Any]:
        silent = limit_of(self.request) == 0
        probabilities = None if new.logprobs is None else [self._token(index, each) for each in new.logprobs]
        return {
            "index": index,
            "content": "" if silent else new.text,
            "tokens": [] if silent else new.token_ids,
            "tokens_predicted": 0 if silent else output.metrics.output_tokens,
            "tokens_evaluated": output.metrics.prompt_tokens,
            "completion_probabilities": [] if silent and probabilities else probabilities or None,
        }

    def _result(self, index: int, shown: StreamDelta, last: StreamDelta, output: RequestOutput) -> CompletionResult:
        generation = self.generations[index]
        word = last.stop_reason if isinstance(last.stop_reason, str) else ""
        kind: Literal["eos", "limit", "word"] = "word" if word else "eos"
        return CompletionResult(
            **self._part(index, shown, output),
            model=generation.served.name,
            generation_settings={**settings(generation.params, generation.served), "stream": self.request.stream},
            prompt=generation.served.llm.detokenize(output.prompt_token_ids, skip_special_tokens=False),
            has_new_line="\n" in self._texts[index],
            truncated=last.finish_reason == "length" and _fills_context(generation, output),
            stop_type="limit" if last.finish_reason == "length" else kind,
            stopping_word=word,
            tokens_cached=output.num_cached_tokens or 0,
            timings=timings(output),
        )

    def _token(self, index: int, found: TokenLogprobs) -> NativeTokenLogprob | NativeTokenProb:
        (sampled, chosen) = next(iter(found.items()))
        ranked = sorted(found.items(), key=lambda item: item[1].rank)[: self.request.n_probs or 0]
        if self.request.post_sampling_probs:
            probs = [NativeProb(**self._name(index, *each), prob=math.exp(each[1].logprob)) for each in ranked]
            return NativeTokenProb(**self._name(index, sampled, chosen), prob=math.exp(chosen.logprob), top_probs=probs)
        logprobs = [NativeLogprob(**self._name(index, *each), logprob=each[1].logprob) for each in ranked]
        return NativeTokenLogprob(**self._name(index, sampled, chosen), logprob=chosen.logprob, top_logprobs=logprobs)

    def _name(self, index: int, token: int, found: Logprob) -> dict[str, Any]:
        served = self.generations[index].served
        return {"id": token, "token": found.decoded_token, "bytes": served.token_bytes(token) or []}


def _single_tokens(new: StreamDelta) -> Iterator[StreamDelta]:
    """Yields the tokens of a delta one by one; the last one has the text."""
    logprobs = new.logprobs or ()
    for index, token in enumerate(new.token_ids[:-1]):
        yield StreamDelta("", [token], list(logprobs[index : index + 1]))
    yield replace(new, token_ids=new.token_ids[-1:], logprobs=list(logprobs[-1:]))


def _fills_context(generation: Generation, output: RequestOutput) -> bool:
    """Returns whether prompt and output have all tokens of the context."""
    tokens = output.metrics.prompt_tokens + output.metrics.output_tokens
    return tokens >= generation.served.info["max_model_len"]


def _chosen(result: dict[str, Any], paths: Sequence[str]) -> dict[str, Any]:
    """Returns the fields at the given paths, by path; all without paths. Paths that do not exist are left out."""
    if not paths:
        return result
    found: dict[str, Any] = {}
    for path in paths:
        value: Any = result
        for part in path.split("/"):
            value = cast("dict[str, Any]", value).get(part) if isinstance(value, dict) else None
        if value is not None:
            found[path] = value
    return found
