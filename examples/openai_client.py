"""OpenAI's Python client with `ferrule serve`: chat, streaming and a JSON schema.

    ferrule serve                                   # in one terminal; or ferrule serve org/repo
    python examples/openai_client.py [URL]          # in another; default http://127.0.0.1:8000

Needs `pip install openai`. Programs written for OpenAI's API need two changes: the base URL, and an API key, which can
be any text if the server has no keys.
"""

import sys

from openai import OpenAI


def main(url: str = "http://127.0.0.1:8000") -> None:
    """Sends three requests."""
    client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    model = client.models.list().data[0].id
    print("model:", model)

    answer = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": "What is the capital of Japan?"}], temperature=0
    )
    print("chat:", answer.choices[0].message.content)

    print("stream: ", end="")
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "What is a KV cache?"}],
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in stream:
        if chunk.choices:
            print(chunk.choices[0].delta.content or "", end="", flush=True)
        elif chunk.usage is not None:  # the last chunk
            print(f" ({chunk.usage.completion_tokens} tokens)")

    structured = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "What colour is the sky?"}],
        temperature=0,
        response_format={
            "type": "json_schema",
            "json_schema": {
                "name": "colour",
                "schema": {
                    "type": "object",
                    "properties": {"colour": {"enum": ["blue", "green"]}},
                    "required": ["colour"],
                    "additionalProperties": False,
                },
            },
        },
    )
    print("schema:", " ".join((structured.choices[0].message.content or "").split()))


if __name__ == "__main__":
    main(*sys.argv[1:2])
