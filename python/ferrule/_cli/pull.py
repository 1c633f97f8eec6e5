"""`ferrule pull`: downloads a model of the catalogue or of the hub."""

from __future__ import annotations

import sys
from typing import Any

import click

from ferrule._api.info import size_text
from ferrule._cli.help import Command
from ferrule._cli.model import check_model, complete_model, download
from ferrule._loading.packed_cache import weight_bytes
from ferrule._loading.resolve import EMBEDDED, find_model, is_remote


@click.command(
    "pull",
    cls=Command,
    examples=[
        ("A model of the catalogue:", "ferrule pull qwen3:0.6b"),
        ("All required files of a repository:", "ferrule pull Qwen/Qwen3-0.6B"),
        ("One of its GGUF files:", "ferrule pull Qwen/Qwen3-0.6B-GGUF:Q8_0"),
        ("Use it without network access:", "HF_HUB_OFFLINE=1 ferrule chat Qwen/Qwen3-0.6B"),
    ],
)
@click.argument("name", metavar="MODEL", shell_complete=complete_model)
@click.option("--revision", help="Branch, tag or commit (default: main).")
@click.option("-q", "--quiet", is_flag=True, help="Do not show progress on stderr.")
def command(name: str, **options: Any) -> None:
    """Download MODEL and print its path: a name of `ferrule search`, or ORG/REPO[:QUANT] of the Hugging Face hub.

    Existing files are not downloaded again. The cache is shared with other programs: HF_HOME sets its directory,
    HF_TOKEN grants access to private models, HF_ENDPOINT sets a mirror, HF_HUB_OFFLINE disables the network.
    """
    if name == EMBEDDED:
        raise click.UsageError(f"{name!r} ships with ferrule; there is nothing to download")
    if not is_remote(name):
        check_model(name)
        raise click.UsageError(f"{name!r} is a local path; there is nothing to download")
    if options["quiet"] or not sys.stderr.isatty():
        from huggingface_hub.utils import disable_progress_bars

        disable_progress_bars()
    try:
        download(name, options["revision"], quiet=options["quiet"])
        path = find_model(name, options["revision"])
    except KeyboardInterrupt:
        print("\ninterrupted; the same command downloads the remaining files", file=sys.stderr)
        raise
    print(path)
    if not options["quiet"]:
        print(f"{name}: weights of {size_text(weight_bytes(path))}", file=sys.stderr)
