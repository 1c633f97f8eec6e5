"""A tokenizer of single words for models without one: word `wN` is id N."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing

CLS, SEP, UNKNOWN = 0, 2, 3


def write_word_tokenizer(folder: Path, *, marks: Mapping[str, int] | None = None, ends: bool = True) -> None:
    """Writes tokenizer.json. `ends` puts [CLS] and [SEP] around a text as BERT does, where the second of a pair has the
    other kind; `marks` are further special tokens."""
    special = {"[CLS]": CLS, "[SEP]": SEP, **(marks or {})}
    words = {f"w{number}": number for number in range(320) if number not in {*special.values(), UNKNOWN}}
    tokenizer = Tokenizer(WordLevel(words | {"[UNK]": UNKNOWN} | special, unk_token="[UNK]"))
    tokenizer.add_special_tokens(list(special))
    tokenizer.pre_tokenizer = WhitespaceSplit()  # type: ignore[assignment]  # its stub has no setter
    if ends:
        tokenizer.post_processor = TemplateProcessing(
            single="[CLS] $A [SEP]",
            pair="[CLS] $A [SEP] $B:1 [SEP]:1",
            special_tokens=[("[CLS]", CLS), ("[SEP]", SEP)],
        )
    tokenizer.save(str(folder / "tokenizer.json"))
