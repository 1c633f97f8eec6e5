"""Reasoning in the field `encrypted_content`, in which clients carry it from one request to the next.

OpenAI encrypts it, since it hides reasoning. This server does not: the field holds the text in base64, behind a prefix
that tells it from the contents of other servers.
"""

from __future__ import annotations

import base64

_PREFIX = "ferrule:"


def wrap_reasoning(text: str) -> str:
    """Returns the contents of the field."""
    return _PREFIX + base64.b64encode(text.encode(errors="surrogatepass")).decode()


def unwrap_reasoning(contents: str) -> str:
    """Returns the reasoning.

    Raises ValueError for contents of another server.
    """
    if not contents.startswith(_PREFIX):
        raise ValueError("the contents are not from this server")
    return base64.b64decode(contents.removeprefix(_PREFIX), validate=True).decode()
