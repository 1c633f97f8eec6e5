"""FastAPI program with its own routes and the mounted OpenAI-compatible server.

    python examples/fastapi_app.py [PORT]
    curl localhost:8000/capitals/France
    curl localhost:8000/stories/fox
    curl localhost:8000/llm/v1/models

Both use one engine, so their requests are batched together. The lifespan loads the model in a thread and closes it when
the program exits. Needs `pip install 'ferrule[server]'`.
"""

import asyncio
import sys
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse

from ferrule import AsyncLLM, SamplingParams
from ferrule.server import Models, create_app

models = Models()


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncGenerator[None, None]:
    """Loads the model before the first request; until then /llm/health reports that it is loading."""
    async with await asyncio.to_thread(AsyncLLM) as llm:
        app.state.llm = llm
        models.set({"tiny": llm})
        yield


app = FastAPI(lifespan=lifespan)
app.mount("/llm", create_app(models))


@app.get("/capitals/{country}")
async def capital(country: str, request: Request) -> dict[str, str]:
    """Returns the capital of a country. A disconnect cancels the task, which ends the request."""
    llm: AsyncLLM = request.app.state.llm
    messages = [{"role": "user", "content": f"What is the capital of {country}?"}]
    text = ""
    async for output in llm.chat(messages, SamplingParams(temperature=0, max_tokens=32)):
        text = output.outputs[0].text
    return {"answer": text}


@app.get("/stories/{hero}")
async def story(hero: str, request: Request) -> StreamingResponse:
    """Streams a story."""
    llm: AsyncLLM = request.app.state.llm

    async def text() -> AsyncIterator[str]:
        prompt = f"Once upon a time, there was a {hero}"
        yield prompt
        async for delta in llm.stream(prompt, SamplingParams(max_tokens=80)):
            yield delta.text

    return StreamingResponse(text(), media_type="text/plain; charset=utf-8")


if __name__ == "__main__":
    uvicorn.run(app, port=int(sys.argv[1]) if len(sys.argv) > 1 else 8000)
