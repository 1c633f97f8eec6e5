"""Streams deltas through AsyncLLM."""

import asyncio

from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM


async def stream(engine, prompt, request_id):
    params = SamplingParams(max_tokens=8, temperature=0, output_kind=RequestOutputKind.DELTA)
    async for output in engine.generate(request_id=request_id, prompt=prompt, sampling_params=params):
        for completion in output.outputs:
            print(completion.text, end="", flush=True)
        if output.finished:
            print()


async def main():
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model="org/model", enforce_eager=True))
    try:
        for number, prompt in enumerate(["The capital of France is", "The capital of Italy is"]):
            await stream(engine, prompt, f"request-{number}")
    finally:
        engine.shutdown()


asyncio.run(main())
