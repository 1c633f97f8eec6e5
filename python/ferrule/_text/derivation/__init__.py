"""Derives the parsers of tool calls and reasoning from a chat template.

The template renders conversations with marked words (`probes`); what stands before, between and after the words is the
format of its messages (`calls`, `reasoning`). A derived format is used only if it reads the rendered messages back, and
only if no parser in `families` is made for the template.
"""

from ferrule._text.derivation.derive import DerivedFormat, derive_format

__all__ = ["DerivedFormat", "derive_format"]
