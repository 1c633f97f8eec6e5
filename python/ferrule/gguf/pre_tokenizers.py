# ruff: noqa: RUF001 -- the patterns name characters of many scripts
"""How texts are split before bytes are merged, by the names that `tokenizer.ggml.pre` gives: each model's own regexes.

Patterns are those of the models' tokenizer.json where they are known, else llama.cpp's. What no pattern of a list
matches is a piece too, and the next pattern splits pieces further.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ferrule.archs.config import Config

if TYPE_CHECKING:
    from tokenizers.pre_tokenizers import PreTokenizer

KEY = "tokenizer.ggml.pre"

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_REST}"
QWEN2 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_REST}"
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_CASED_REST = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*"
    rf"|\p{{N}}|{_CASED_REST}"
)
GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+{_CONTRACTIONS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*{_CONTRACTIONS}?"
    rf"|\p{{N}}{{1,3}}|{_CASED_REST}"
)
_DEEPSEEK_WORDS = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEEPSEEK_LETTERS = (
    "\\s?[A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-ώ"
    "ᾀ-ᾴᾶ-ᾼιῂ-ῄῆ-ῌῐ-ΐῖ-Ίῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤΩℨK-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ"
    "𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃]+"
)
_DEEPSEEK_MARKS = r"\s?[!-/:-~！-／：-～‘-‟　-。]+"
_EAST_ASIAN = r"[一-龥ࠀ-一가-퟿]+"
_HAN_KANA = r"[一-龥぀-ゟ゠-ヿ]+"
_BLOOM = r" ?[^(\s|[.,!?…。，、।۔،])]+"


@dataclass(frozen=True)
class PreTokenization:
    """What stands behind a name."""

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    """Whether a piece that is a token is that token, whatever the merges make of it."""
    add_bos: bool = False
    """Whether texts begin with a token of their own where the file does not say."""


_GPT2 = PreTokenization((GPT2,))
_LLAMA3 = PreTokenization((LLAMA3,), ignore_merges=True, add_bos=True)
_DIGITS = PreTokenization((r"\p{N}", GPT2))
_QWEN2 = PreTokenization((QWEN2,))
_GPT4O = PreTokenization((GPT4O,))
_DEEPSEEK3 = PreTokenization((r"\p{N}{1,3}", _HAN_KANA, _DEEPSEEK_WORDS))

PRE_TOKENIZERS: Mapping[str, PreTokenization] = {
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "midm-2.0", "lfm2"), _LLAMA3),
    **dict.fromkeys(("dbrx", "smaug-bpe"), PreTokenization((LLAMA3,))),
    "chatglm-bpe": PreTokenization((LLAMA3,)),
    "glm4": PreTokenization((LLAMA3,), ignore_merges=True),
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "exaone4", "mellum", "modern-bert"), _GPT2),
    **dict.fromkeys(("gigachat", "a.x-4.0", "roberta-bpe", "granite-docling"), _GPT2),
    **dict.fromkeys(("starcoder", "refact", "command-r", "smollm", "codeshell", "exaone", "minerva-7b"), _DIGITS),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2", "hunyuan", "megrez", "grok-2", "solar-open"), _QWEN2),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "minimax-m2"), _GPT4O),
    "tekken": PreTokenization((TEKKEN,), ignore_merges=True, add_bos=True),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm"), _DEEPSEEK3),
    "deepseek-llm": PreTokenization(
        (r"[\r\n]", _DEEPSEEK_LETTERS, _DEEPSEEK_MARKS, r"\s+$", _EAST_ASIAN, r"\p{N}+"),
    ),
    "deepseek-coder": PreTokenization((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _EAST_ASIAN, r"\p{N}")),
    "falcon": PreTokenization((r"[\p{P}\$\+<=>\^~\|`]+", GPT2, r"[0-9][0-9][0-9]")),
    **dict.fromkeys(("bloom", "poro-chat", "gpt3-finnish"), PreTokenization((_BLOOM,))),
    "viking": PreTokenization((_BLOOM, r"\p{N}")),
    "seed-coder": PreTokenization((QWEN2.replace(r"\p{N}]+[\r\n]*", r"\p{N}\r\n]+"),)),
    "exaone-moe": PreTokenization(
        (
            rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
            r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",
        )
    ),
    "youtu": PreTokenization(
        (
            r"[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|[一-龥぀-ゟ゠-ヿ]+",
            GPT4O.replace(r"\p{N}{1,3}", r"\p{N}"),
        ),
        ignore_merges=True,
    ),
    "jais-2": PreTokenization(
        (
            LLAMA3.removesuffix(r"\s+(?!\S)|\s+")
            + "|".join(rf"\s{{{count}}}(?!\S)" for count in (512, 256, 128, 64, 32, 16, 8, 4))
            + r"|\s{1,2}(?!\S)|\s{1}",
        )
    ),
    "default": PreTokenization((r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
}
"""As llama.cpp's converter names them; `default` is what it took before it had names."""


def pre_tokenization(metadata: Config) -> PreTokenization:
    """The one that a file names, or `default`.

    Raises UnsupportedModelError for a name that is not known.
    """
    name = metadata.text(KEY, default="default")
    if name not in PRE_TOKENIZERS:
        nearest = difflib.get_close_matches(name, PRE_TOKENIZERS, n=1, cutoff=0)
        names = [*nearest, *(each for each in sorted(PRE_TOKENIZERS) if each not in nearest)]
        raise metadata.unsupported(KEY, f"one of {', '.join(names)} (nearest first)")
    return PRE_TOKENIZERS[name]


def splitter(patterns: tuple[str, ...]) -> PreTokenizer:
    """Splits texts by each pattern in turn, and spells out the pieces' bytes in GPT-2's alphabet."""
    from tokenizers import Regex, pre_tokenizers

    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    return pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
