"""OpenAI's own Python client, talking to `ferrule serve`: a chat, a stream, and an answer held to a schema.

    ferrule serve                                   # in one terminal; or ferrule serve org/repo
    python examples/openai_client.py [URL]          # in another; http://127.0.0.1:8000 unless it is elsewhere

Needs `pip install openai`. Programs that were written for OpenAI's API want two changes: the base URL, and a key, which
any text is as long as the server was started without keys.
"""

import sys

from openai import OpenAI


def main(url: str = "http://127.0.0.1:8000") -> None:
    """Asks three times."""
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

    held = client.chat.completions.create(
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
    print("schema:", " ".join((held.choices[0].message.content or "").split()))


if __name__ == "__main__":
    main(*sys.argv[1:2])
