"""`ferrule serve`: models behind OpenAI's API."""

from __future__ import annotations

import sys
from typing import Any

import click

from ferrule.cli.model import loading, model_options, prefix_cache_option, speculative_options


@click.command("serve")
@click.argument("model", required=False)
@click.option("--host", default="127.0.0.1", show_default=True, help="The address to listen at.")
@click.option("--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="0 takes a free one.")
@model_options
@prefix_cache_option
@speculative_options
def command(model: str | None, host: str, port: int, **options: Any) -> None:
    """Serve MODEL, or the small model that ships with ferrule, behind OpenAI's API, with a chat page."""
    from ferrule.async_llm import AsyncLLM
    from ferrule.server import serve

    keywords = loading(options)

    def load() -> dict[str, AsyncLLM]:
        return {model or "tiny": AsyncLLM(model, **keywords)}

    serve(load, host=host, port=port, on_listening=lambda url: print(f"listening at {url}", file=sys.stderr))
