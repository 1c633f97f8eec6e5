"""`ferrule pull`: downloads a model."""

from __future__ import annotations

import sys
from typing import Any

import click

from ferrule._api.info import size_text
from ferrule._cli.help import Command
from ferrule._loading.packed_cache import weight_bytes
from ferrule._loading.resolve import EMBEDDED, find_model, is_repository


@click.command(
    "pull",
    cls=Command,
    examples=[
        ("All required files of a repository:", "ferrule pull Qwen/Qwen3-0.6B"),
        ("One of its GGUF files:", "ferrule pull Qwen/Qwen3-0.6B-GGUF:Q8_0"),
        ("Use it without network access:", "HF_HUB_OFFLINE=1 ferrule chat Qwen/Qwen3-0.6B"),
    ],
)
@click.argument("name", metavar="ORG/REPO[:QUANT]")
@click.option("--revision", help="Branch, tag or commit (default: main).")
@click.option("-q", "--quiet", is_flag=True, help="Do not show progress on stderr.")
def command(name: str, **options: Any) -> None:
    """Download a model from the Hugging Face hub and print its path.

    Existing files are not downloaded again. The cache is shared with other programs: HF_HOME sets its directory,
    HF_TOKEN grants access to private models, HF_ENDPOINT sets a mirror, HF_HUB_OFFLINE disables the network.
    """
    if name == EMBEDDED:
        raise click.UsageError(f"{name!r} ships with ferrule; there is nothing to download")
    if not is_repository(name):
        raise click.UsageError(f"name must be org/repo, org/repo:quantization or an existing path, got {name!r}")
    if options["quiet"] or not sys.stderr.isatty():
        from huggingface_hub.utils import disable_progress_bars

        disable_progress_bars()
    try:
        path = find_model(name, options["revision"])
    except KeyboardInterrupt:
        print("\ninterrupted; the same command downloads the remaining files", file=sys.stderr)
        raise
    print(path)
    if not options["quiet"]:
        print(f"{name}: weights of {size_text(weight_bytes(path))}", file=sys.stderr)
