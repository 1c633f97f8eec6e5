"""AsyncLLM on a fake engine: outputs, errors, request ids and the queue."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import AsyncGenerator, Callable
from itertools import pairwise
from typing import Any

import pytest

import fakes
from event_loop import LONG, all_free, fake_of, last, run, sampled, until
from ferrule import (
    LLM,
    AsyncLLM,
    ChatTemplateError,
    CompletionOutput,
    EngineError,
    InvalidParameterError,
    PromptError,
    QueueFullError,
    RequestOutput,
    SamplingParams,
)
from ferrule._engine.request import Completion


def test_outputs_are_cumulative_and_equal_llm(engine: type[fakes.Engine]) -> None:
    with LLM() as plain:
        expected = plain.generate("The capital", sampled(9, logprobs=2, entropy=True))[0]

    async def test() -> None:
        async with AsyncLLM() as llm:
            outputs = [output async for output in llm.generate("The capital", sampled(9, logprobs=2, entropy=True))]
            assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
            for before, after in pairwise(outputs):
                count = len(before.outputs[0].token_ids)
                assert 0 < count < len(after.outputs[0].token_ids)
                assert after.outputs[0].token_ids[:count] == before.outputs[0].token_ids
            assert outputs[-1].outputs == expected.outputs
            assert outputs[-1].prompt_token_ids == expected.prompt_token_ids
            deltas = [delta async for delta in llm.stream("The capital", sampled(9, logprobs=2, entropy=True))]
            assert "".join(delta.text for delta in deltas) == expected.outputs[0].text
            assert [token for delta in deltas for token in delta.token_ids] == expected.outputs[0].token_ids
            assert [row for delta in deltas for row in delta.logprobs or []] == expected.outputs[0].logprobs
            assert [one for delta in deltas for one in delta.entropies or []] == expected.outputs[0].entropies
            assert [delta.output is None for delta in deltas] == [True] * (len(deltas) - 1) + [False]
            assert [delta.finish_reason for delta in deltas] == [None] * (len(deltas) - 1) + ["length"]
            await all_free(llm)

    run(test)


def test_n_completions_are_forks_of_one_prompt(engine: type[fakes.Engine]) -> None:
    engine.step_seconds = 0.001
    with LLM() as plain:
        expected = plain.generate("x", sampled(12, n=4))[0]

    async def test() -> None:
        async with AsyncLLM() as llm:
            output = await last(llm.generate("x", sampled(12, n=4)))
            assert output.outputs == expected.outputs
            assert len(fake_of(llm).forks) == 3
            assert len({origin for _, origin in fake_of(llm).forks}) == 1
            with pytest.raises(InvalidParameterError, match="n must be 1: a stream has one completion, got 2"):
                await anext(llm.stream("x", sampled(2, n=2)))
            await all_free(llm)

    run(test)


def test_concatenated_step_deltas_equal_outputs(engine: type[fakes.Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    copies: list[int] = []
    copied = Completion.output

    def counted(self: Completion) -> CompletionOutput:
        copies.append(self.index)
        return copied(self)

    monkeypatch.setattr(Completion, "output", counted)

    async def test() -> None:
        async with AsyncLLM() as llm:
            engine.script = staticmethod(lambda _: llm.tokenize("Paris is big. So is Rome."))  # type: ignore[assignment]
            params = sampled(30, n=3, logprobs=1, prompt_logprobs=0, entropy=True, stop=["Rome"])
            steps = [step async for step in llm.stream_steps("x y", params)]
            assert sorted(copies) == [0, 1, 2], "what has come is copied in the end alone"
            assert [step.output.finished for step in steps] == [False] * (len(steps) - 1) + [True]
            assert all(step.output.outputs == [] for step in steps[:-1])
            whole = steps[-1].output
            assert steps[0].output.prompt_logprobs == whole.prompt_logprobs
            counts = [step.output.metrics.output_tokens for step in steps]
            assert counts == sorted(counts)
            for completion in whole.outputs:
                deltas = [delta for step in steps for delta in step.deltas if delta.index == completion.index]
                assert len(deltas) > 3
                assert "".join(delta.text for delta in deltas) == completion.text == "Paris is big. So is "
                assert [token for delta in deltas for token in delta.token_ids] == completion.token_ids
                assert [row for delta in deltas for row in delta.logprobs or []] == completion.logprobs
                assert [one for delta in deltas for one in delta.entropies or []] == completion.entropies
                ends = [(delta.finish_reason, delta.stop_reason) for delta in deltas]
                assert ends == [(None, None)] * (len(deltas) - 1) + [("stop", "Rome")]
            await all_free(llm)

    engine.step_seconds = 0.001
    run(test)


def test_best_of_yields_one_step_at_the_end(engine: type[fakes.Engine]) -> None:
    async def test() -> None:
        async with AsyncLLM() as llm:
            params = sampled(9, n=2, best_of=4)
            expected = await last(llm.generate("x", params))
            (step,) = [step async for step in llm.stream_steps("x", params)]
            assert step.output.outputs == expected.outputs
            assert [(delta.index, delta.text) for delta in step.deltas] == [
                (completion.index, completion.text) for completion in expected.outputs
            ]

    run(test)


def test_stop_strings_abort_request_in_engine(engine: type[fakes.Engine]) -> None:
    async def test() -> None:
        async with AsyncLLM() as llm:
            tokens = llm.tokenize("Paris is big.")
            engine.script = staticmethod(lambda _: [*tokens, *tokens * 200])  # type: ignore[assignment]
            params = SamplingParams(stop="is b", n=3)
            output = await last(llm.generate("x", params))
            assert [(c.text, c.finish_reason, c.stop_reason) for c in output.outputs] == [
                ("Paris ", "stop", "is b")
            ] * 3
            await all_free(llm)

    run(test)


def test_chat_equals_llm(engine: type[fakes.Engine]) -> None:
    messages: Any = [{"role": "user", "content": "Hi"}]
    with LLM() as plain:
        expected = plain.chat(messages, sampled(5))[0]

    async def test() -> None:
        async with AsyncLLM() as llm:
            output = await last(llm.chat(messages, sampled(5), "mine", priority=3))
            assert output.request_id == "mine"
            assert (output.prompt_token_ids, output.outputs) == (expected.prompt_token_ids, expected.outputs)
            with pytest.raises(ChatTemplateError):
                await last(llm.chat(messages, chat_template="{{ raise_exception('no') }}"))
            await all_free(llm)

    run(test)


BAD: list[tuple[Callable[[AsyncLLM], AsyncGenerator[Any, None]], type[Exception], str]] = [
    (lambda llm: llm.generate(""), PromptError, "the prompt has no tokens"),
    (
        lambda llm: llm.generate(None),  # type: ignore[arg-type]
        PromptError,
        r"a prompt must be a string or \{.prompt_token_ids.: \[\.\.\.\]\}, got None",
    ),
    (
        lambda llm: llm.generate({"prompt_token_ids": [-1]}),
        PromptError,
        r"prompt_token_ids\[0\] must be from 0 to 4095 \(the vocabulary\), got -1",
    ),
    (lambda llm: llm.generate({"prompt_token_ids": [1] * 9000}), PromptError, "has 9000 tokens"),
    (lambda llm: llm.generate("x", 5), InvalidParameterError, "sampling_params must be a SamplingParams, got 5"),  # type: ignore[arg-type]
    (lambda llm: llm.stream("x", request_id=5), InvalidParameterError, "request_id must be a string, got 5"),  # type: ignore[arg-type]
    (
        lambda llm: llm.stream("x", priority=2**31),
        InvalidParameterError,
        "priority must be an integer from -2147483648 to 2147483647, got 2147483648",
    ),
    (
        lambda llm: llm.generate("x", SamplingParams(stop_token_ids=[4096])),
        InvalidParameterError,
        "stop_token_ids must be token ids from 0 to 4095, the vocabulary, got 4096",
    ),
    (lambda llm: llm.chat(5), ChatTemplateError, "messages must be a list of messages, got 5"),  # type: ignore[arg-type]
]


@pytest.mark.parametrize(("call", "error", "message"), BAD)
def test_invalid_request_raises_and_leaves_no_state(
    call: Callable[[AsyncLLM], AsyncGenerator[Any, None]],
    error: type[Exception],
    message: str,
    engine: type[fakes.Engine],
) -> None:
    async def test() -> None:
        async with AsyncLLM() as llm:
            with pytest.raises(error, match=message):
                await anext(call(llm))
            await all_free(llm)
            assert fake_of(llm).steps == 0

    run(test)


def test_engine_rejection_reaches_only_its_caller(engine: type[fakes.Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    add = fakes.Engine.add_request

    def add_or_refuse(self: fakes.Engine, prompt: list[int], params: str, fork_of: int | None, *more: Any) -> int:
        if prompt == [9] and fork_of is not None:
            raise PromptError("no room")
        return add(self, prompt, params, fork_of, *more)

    monkeypatch.setattr(engine, "add_request", add_or_refuse)

    async def test() -> None:
        async with AsyncLLM() as llm:
            beside = asyncio.create_task(last(llm.generate("x", sampled(30))))
            with pytest.raises(PromptError, match="no room"):
                await last(llm.generate({"prompt_token_ids": [9]}, sampled(5, n=3)))
            assert len((await beside).outputs[0].token_ids) == 30
            await all_free(llm)

    run(test)


def test_non_finite_logits_fail_only_their_request(engine: type[fakes.Engine]) -> None:
    engine.bad_prompt = [9]

    async def test() -> None:
        async with AsyncLLM() as llm:
            for _ in range(2):  # together with another request, and alone
                beside = asyncio.create_task(last(llm.generate("x", sampled(30))))
                with pytest.raises(EngineError, match="logits are not finite"):
                    await last(llm.generate({"prompt_token_ids": [9]}, sampled(5, n=2)))
                await beside
                await all_free(llm)
                await llm.check_health()

    run(test)


def test_unread_stream_starts_no_request(engine: type[fakes.Engine]) -> None:
    async def test() -> None:
        async with AsyncLLM() as llm:
            stream, outputs = llm.stream("x"), llm.generate("x")
            await asyncio.sleep(0.01)
            assert not fake_of(llm).running
            await stream.aclose()
            await outputs.aclose()

    run(test)


def test_slow_reader_gets_latest_output(engine: type[fakes.Engine]) -> None:
    with LLM() as plain:
        expected = plain.generate("x", sampled(300))[0].outputs

    async def test() -> None:
        async with AsyncLLM() as llm:
            outputs, deltas = llm.generate("x", sampled(300)), llm.stream("x", sampled(300))
            first, start = await asyncio.gather(anext(outputs), anext(deltas))
            await until(lambda: not fake_of(llm).running)
            await asyncio.sleep(0.01)
            assert not llm._registry.all(), "a request that nobody reads counts as running"
            rest = [output async for output in outputs]
            assert len(rest) == (0 if first.finished else 1)
            assert [first, *rest][-1].outputs == expected
            ends = [delta async for delta in deltas]
            assert len(ends) == (0 if start.output else 1)
            assert [token for delta in [start, *ends] for token in delta.token_ids] == expected[0].token_ids

    run(test)


def test_request_ids_are_unique_while_running(engine: type[fakes.Engine]) -> None:
    engine.step_seconds = 0.001

    async def test() -> None:
        async with AsyncLLM() as llm:
            first = llm.generate("x", LONG, "0")
            assert (await anext(first)).request_id == "0"
            with pytest.raises(
                InvalidParameterError, match="request_id must be an id that no running request has, got '0'"
            ):
                await last(llm.generate("x", request_id="0"))
            assert (await last(llm.generate("x", sampled(2)))).request_id == "1"
            await first.aclose()
            assert (await last(llm.generate("x", sampled(2), "0"))).request_id == "0"

    run(test)


def test_full_queue_raises_without_waiting_for_step(engine: type[fakes.Engine]) -> None:
    """The error arrives during a step that does not end before."""
    gate = engine.gate = threading.Event()

    async def test() -> None:
        async with AsyncLLM(max_queued_requests=3, max_num_seqs=1) as llm:
            tasks = [asyncio.create_task(last(llm.generate("x", sampled(1))))]
            await until(lambda: fake_of(llm).stepping)
            tasks += [asyncio.create_task(last(llm.generate("x", sampled(1)))) for _ in range(3)]
            await asyncio.sleep(0)
            with pytest.raises(
                QueueFullError, match=r"the request queue is full \(3 waiting; the limit is max_queued_requests 3\)"
            ):
                await last(llm.generate("x", sampled(1)))
            assert fake_of(llm).stepping
            assert llm.metrics().requests_refused == 1
            gate.set()
            assert all([(await task).finished for task in tasks])
            await all_free(llm)

    run(test)


def test_free_slots_count_towards_queue_capacity(engine: type[fakes.Engine]) -> None:
    """A call that takes the lock waits for one step at most."""
    engine.step_seconds = 0.01

    async def test() -> None:
        async with AsyncLLM(max_queued_requests=3, max_num_seqs=2) as llm:
            assert len((await last(llm.generate("x", sampled(3, n=5)))).outputs) == 5
            beside = asyncio.create_task(last(llm.generate("x", LONG)))
            await until(lambda: llm.metrics().running == 1)
            with pytest.raises(QueueFullError, match=r"the request queue is full \(0 waiting;"):
                await last(llm.generate("x", sampled(3, n=5)))
            assert len((await last(llm.generate("x", sampled(3, n=4)))).outputs) == 4
            message = r"n must be at most 5 \(max_queued_requests 3 \+ max_num_seqs 2\), got 6"
            with pytest.raises(InvalidParameterError, match=message):
                await last(llm.generate("x", sampled(3, n=6)))
            assert llm.metrics().requests_refused == 1
            beside.cancel()
            await all_free(llm)

    run(test)


def test_running_requests_do_not_count_as_waiting(engine: type[fakes.Engine]) -> None:
    engine.step_seconds = 0.01

    async def test() -> None:
        async with AsyncLLM(max_queued_requests=2) as llm:
            tasks: list[asyncio.Task[RequestOutput]] = []
            for _ in range(10):
                tasks.append(asyncio.create_task(last(llm.generate("x", sampled(1500)))))
                await until(lambda: fake_of(llm)._waiting() == 0 and len(fake_of(llm).running) == len(tasks))
            engine.step_seconds = 0
            assert all([(await task).finished for task in tasks])
        async with AsyncLLM() as llm:
            assert fake_of(llm).options["max_queued_requests"] == 1024

    run(test)


def test_long_texts_are_tokenized_outside_event_loop(engine: type[fakes.Engine]) -> None:
    text = "The capital of France is Paris. " * 3000

    async def test() -> None:
        async with AsyncLLM() as llm:
            where: list[bool] = []
            encode = llm._tokenizer.encode

            def noting(*arguments: Any, **more: Any) -> list[int]:
                where.append(threading.current_thread() is threading.main_thread())
                return encode(*arguments, **more)

            llm._tokenizer.encode = noting  # type: ignore[method-assign]
            for call in (llm.generate(text), llm.chat([{"role": "user", "content": text}])):
                with pytest.raises(PromptError, match="max_model_len"):
                    await last(call)
            await last(llm.generate("x", sampled(1)))
            assert where == [False, False, True]

    run(test)


def test_prompt_logprobs_equal_llm(engine: type[fakes.Engine]) -> None:
    engine.prefill_chunk = 7
    params = sampled(3, prompt_logprobs=2, n=2)
    with LLM() as plain:
        expected = plain.generate({"prompt_token_ids": list(range(50, 80))}, params)[0]

    async def test() -> None:
        async with AsyncLLM() as llm:
            prompt: Any = {"prompt_token_ids": list(range(50, 80))}
            outputs = [output async for output in llm.generate(prompt, params)]
            assert all(output.outputs[0].token_ids for output in outputs)
            assert outputs[-1].prompt_logprobs == expected.prompt_logprobs
            assert len(outputs[-1].prompt_logprobs or []) == 30
            deltas = [d async for d in llm.stream(prompt, sampled(3, prompt_logprobs=0))]
            assert all(delta.token_ids for delta in deltas)
            assert deltas[-1].output is not None
            assert len(deltas[-1].output.prompt_logprobs or []) == 30

    run(test)


def test_thousand_requests_with_disconnects(engine: type[fakes.Engine]) -> None:
    """No request is left running, and each response is a prefix of the output that the request gets alone."""
    engine.max_num_seqs = 64
    generator = random.Random(9)
    with LLM() as plain:
        alone = [plain.generate(f"prompt {i}", sampled(12, seed=i))[0].outputs[0].token_ids for i in range(100)]

    async def test() -> None:
        async with AsyncLLM() as llm:
            finished = 0

            async def client(number: int) -> None:
                nonlocal finished
                kind, tokens = number % 100, list[int]()
                if generator.random() < 0.3:
                    stop = generator.randrange(12)
                    async for delta in llm.stream(f"prompt {kind}", sampled(12, seed=kind)):
                        tokens += delta.token_ids
                        if len(tokens) >= stop:
                            break
                    assert tokens == alone[kind][: len(tokens)]
                else:
                    output = await last(llm.generate(f"prompt {kind}", sampled(12, seed=kind)))
                    assert output.outputs[0].token_ids == alone[kind]
                    finished += 1

            await asyncio.gather(*(client(number) for number in range(1000)))
            assert finished > 600
            await all_free(llm)
            metrics = llm.metrics()
            assert sum(metrics.requests_finished.values()) == 1000
            assert metrics.requests_finished["length"] >= finished
            assert (metrics.running, metrics.waiting) == (0, 0)

    run(test, debug=False)
