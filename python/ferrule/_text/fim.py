"""Fill-in-the-middle prompts, which have text before and after the part that the model writes.

Code models are trained on documents in three parts, with a marker before each part and the middle part last. The
markers depend on the model family, which is recognized by the tokens in the tokenizer.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from ferrule._text.tokenizer import Tokenizer, TokenLimit
from ferrule.errors import PromptError


@dataclass(frozen=True)
class Layout:
    """Markers and order of the three parts in a model family."""

    families: str
    prefix: str
    suffix: str
    middle: str | None
    """Marker of the middle; None if the family has none."""
    order: Literal["PSM", "SPM"]
    """Order of prefix, suffix and middle."""
    ends: tuple[str, ...] = ()
    """Tokens that end the middle, besides the model's EOS tokens; the tokenizer may lack some of them."""

    @property
    def markers(self) -> tuple[str, ...]:
        """All markers of the family."""
        return tuple(marker for marker in (self.prefix, self.suffix, self.middle) if marker is not None)


_FILES = ("<|endoftext|>", "<|fim_pad|>", "<|file_sep|>", "<|repo_name|>", "<|file_separator|>")
_OLD_FILES = ("<|endoftext|>", "<fim_pad>", "<file_sep>", "<repo_name>", "<filename>", "<reponame>", "<gh_stars>")

# ruff: noqa: RUF001  # DeepSeek's bars are full-width
LAYOUTS = (
    Layout("Qwen, CodeGemma, Granite 3.3", "<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "PSM", _FILES),
    Layout("StarCoder, CodeQwen, Granite Code", "<fim_prefix>", "<fim_suffix>", "<fim_middle>", "PSM", _OLD_FILES),
    Layout("SantaCoder", "<fim-prefix>", "<fim-suffix>", "<fim-middle>", "PSM", ("<|endoftext|>", "<fim-pad>")),
    Layout("DeepSeek", "<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>", "PSM"),
    Layout("CodeLlama", "▁<PRE>", "▁<SUF>", "▁<MID>", "PSM", ("▁<EOT>",)),
    Layout("Codestral", "[PREFIX]", "[SUFFIX]", None, "SPM"),
    Layout("Seed-Coder", "<[fim-prefix]>", "<[fim-suffix]>", "<[fim-middle]>", "SPM"),
)


@dataclass(frozen=True)
class Infill:
    """Token ids of an infill prompt."""

    token_ids: list[int]
    stop_token_ids: tuple[int, ...]
    """Tokens that end the middle, markers included."""


def encode_infill(
    tokenizer: Tokenizer, prefix: str, suffix: str, middle: str = "", limit: TokenLimit | None = None
) -> Infill:
    """Encodes prefix, suffix and the beginning of the middle with the markers and the order of the model's family.

    Markers are inserted as ids; a marker in the text itself is encoded as plain text. `limit` applies to each part as
    in `Tokenizer.encode`.

    Raises PromptError for a model without fill-in-the-middle markers, TokenizerError without a tokenizer.
    """
    first_ids = tokenizer.first_ids
    layout = _find(tokenizer)
    ids = {marker: tokenizer.token_id(marker) for marker in (*layout.markers, *layout.ends)}
    known = {marker: token_id for marker, token_id in ids.items() if token_id is not None}
    # If the tokenizer adds a space before a text, CodeLlama and Codestral expect it before the prefix only.
    before = [known[layout.prefix], *_encode(tokenizer, layout, prefix, limit, begins=True)]
    after = [known[layout.suffix], *_encode(tokenizer, layout, suffix, limit, begins=False)]
    sides = before + after if layout.order == "PSM" else after + before
    between = [] if layout.middle is None else [known[layout.middle]]
    begun = _encode(tokenizer, layout, middle, limit, begins=False)
    return Infill([*first_ids, *sides, *between, *begun], tuple(known.values()))


def _find(tokenizer: Tokenizer) -> Layout:
    for layout in LAYOUTS:
        if all(tokenizer.token_id(marker) is not None for marker in layout.markers):
            return layout
    known = ", ".join(layout.prefix for layout in LAYOUTS)
    raise PromptError(
        f"suffix requires a model with fill-in-the-middle tokens, such as {known}; this tokenizer has none of them",
        field="suffix",
    )


def _encode(tokenizer: Tokenizer, layout: Layout, text: str, limit: TokenLimit | None, *, begins: bool) -> list[int]:
    """Encodes one side without the layout's markers.

    Raises PromptError.
    """
    # A tokenizer matches special tokens in any text, so the text is split within markers that occur in it.
    spelled = "|".join(re.escape(marker[0]) + f"(?={re.escape(marker[1:])})" for marker in layout.markers)
    cuts = [0, *(match.end() for match in re.finditer(spelled, text)), len(text)]
    token_ids: list[int] = []
    for start, end in pairwise(cuts):
        first = begins and start == 0
        token_ids += tokenizer.encode_part(text[start:end], begins=first, limit=limit) if end > start else []
    for marker in layout.markers:
        if tokenizer.token_id(marker) in token_ids:
            raise PromptError(
                f"prompt and suffix must not contain the token {marker}, which separates them", field="suffix"
            )
    return token_ids
