"""Fill-in-the-middle: prompts with text on both sides of what the model is to write.

Code models are trained on documents cut in three, with a marker before each part and the middle part last. Every
family has markers of its own; which one a model is of, its tokenizer says.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from ferrule._text.tokenizer import Tokenizer
from ferrule.errors import PromptError


@dataclass(frozen=True)
class Layout:
    """How a family writes the three parts."""

    families: str
    prefix: str
    suffix: str
    middle: str | None
    """None where the last part has no marker of its own."""
    order: Literal["PSM", "SPM"]
    """Whether the prefix or the suffix comes first."""
    ends: tuple[str, ...] = ()
    """What ends the middle, beside the model's own end-of-sequence tokens; the tokenizer may lack some."""

    @property
    def markers(self) -> tuple[str, ...]:
        """Without what a family does not have."""
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
    """A prompt that asks for the middle."""

    token_ids: list[int]
    stop_token_ids: tuple[int, ...]
    """What ends the middle; a marker does too."""


def encode_infill(tokenizer: Tokenizer, prefix: str, suffix: str) -> Infill:
    """The ids of both sides, each behind its marker, as the model's family orders them.

    The markers are put in as ids: one that the text spells is text.

    Raises PromptError for a model without such markers, TokenizerError without a tokenizer.
    """
    first_ids = tokenizer.first_ids
    layout = _find(tokenizer)
    ids = {marker: tokenizer.token_id(marker) for marker in (*layout.markers, *layout.ends)}
    known = {marker: token_id for marker, token_id in ids.items() if token_id is not None}
    # Where a tokenizer puts a space before text, CodeLlama and Codestral were trained with one before the prefix alone.
    before = [known[layout.prefix], *_encode(tokenizer, layout, prefix, begins=True)]
    after = [known[layout.suffix], *_encode(tokenizer, layout, suffix, begins=False)]
    sides = before + after if layout.order == "PSM" else after + before
    middle = [] if layout.middle is None else [known[layout.middle]]
    return Infill([*first_ids, *sides, *middle], tuple(known.values()))


def _find(tokenizer: Tokenizer) -> Layout:
    for layout in LAYOUTS:
        if all(tokenizer.token_id(marker) is not None for marker in layout.markers):
            return layout
    known = ", ".join(layout.prefix for layout in LAYOUTS)
    raise PromptError(
        "a prompt has a suffix, which needs a model with fill-in-the-middle tokens; the tokenizer of this one has none "
        f"of {known}"
    )


def _encode(tokenizer: Tokenizer, layout: Layout, text: str, *, begins: bool) -> list[int]:
    """The ids of a side, among them none of the layout's markers.

    Raises PromptError.
    """
    # A tokenizer finds its special tokens in any text. Cut in two, a marker is not found.
    spelled = "|".join(re.escape(marker[0]) + f"(?={re.escape(marker[1:])})" for marker in layout.markers)
    cuts = [0, *(match.end() for match in re.finditer(spelled, text)), len(text)]
    token_ids: list[int] = []
    for start, end in pairwise(cuts):
        first = begins and start == 0
        token_ids += tokenizer.encode_part(text[start:end], begins=first) if end > start else []
    for marker in layout.markers:
        if tokenizer.token_id(marker) in token_ids:
            raise PromptError(
                f"the text on one side of the middle spells the token {marker}, and cannot be told from it"
            )
    return token_ids
