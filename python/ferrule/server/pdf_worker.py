"""Program that reads a PDF file from stdin and writes its text to stdout as JSON.

It runs in a separate process, so that a hostile file can neither block the server nor exhaust its memory. It imports
nothing of ferrule, because it starts for each file.
"""

from __future__ import annotations

import io
import json
import resource
import sys
from importlib import import_module
from typing import Any

MEMORY = 1 << 30
"""Maximum address space of the process, in bytes."""
CPU_SECONDS = 30
"""Maximum processor time of the process, in seconds."""
MAX_PAGES = 2000
"""Maximum number of pages that are read."""
MAX_CHARACTERS = 2_000_000
"""Maximum number of characters that are returned."""


def extract(data: bytes) -> dict[str, Any]:
    """Returns `text`, the number of `pages`, and whether the text is `truncated`.

    Otherwise returns an `error` of a user's file, or the reason for which the library is `missing`.
    """
    try:
        pypdf: Any = import_module("pypdf")
    except ImportError as error:
        return {"missing": str(error)}
    try:
        reader = pypdf.PdfReader(io.BytesIO(data))
        if reader.is_encrypted and not reader.decrypt(""):
            return {"error": "it is encrypted with a password"}
        texts: list[str] = []
        characters = 0
        for page in reader.pages:
            if len(texts) >= MAX_PAGES or characters >= MAX_CHARACTERS:
                break
            texts.append(page.extract_text().strip())
            characters += len(texts[-1]) + 2
        text = "\n\n".join(texts)
        # Surrogates without their other half cannot be sent as UTF-8.
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        truncated = len(texts) < len(reader.pages) or len(text) > MAX_CHARACTERS
        return {"text": text[:MAX_CHARACTERS].strip(), "pages": len(reader.pages), "truncated": truncated}
    except MemoryError:
        raise
    except Exception as error:
        # The library raises errors of many types for an invalid file.
        return {"error": f"{type(error).__name__}: {str(error)[:200]}"}


def main() -> None:
    """Runs the program."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
    sys.stdout.write(json.dumps(extract(sys.stdin.buffer.read())))


if __name__ == "__main__":
    main()
