"""Pre-tokenizer patterns by their names in `tokenizer.ggml.pre`.

The patterns are taken from the models' tokenizer.json if it is known, else from llama.cpp. Text between matches is a
piece too. Each further pattern of a list splits the pieces of the previous pattern.
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
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}{{1,3}}|{_REST}"
QWEN2 = rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}|{_REST}"
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
_HAN = r"&&[^\p{Han}]"
"""Intersection that excludes Chinese characters from a character class."""
KIMI_K2 = (
    rf"\p{{Han}}+|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}{_HAN}]*[{_LOWER}{_HAN}]+{_CONTRACTIONS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}{_HAN}]+[{_LOWER}{_HAN}]*{_CONTRACTIONS}?"
    rf"|\p{{N}}{{1,3}}|{_REST}"
)
_THREE_DIGITS = r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))"
"""Groups of three digits from the right, as in 1,234,567."""
_DEEPSEEK_WORDS = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEEPSEEK_LETTERS = (
    "41-5A 61-7A B5 C0-D6 D8-F6 F8-1BA 1BC-1BF 1C4-293 295-2AF 370-373 376-377 37B-37D 37F 386 388-38A 38C "
    "38E-3A1 3A3-3F5 3F7-481 48A-52F 531-556 10A0-10C5 13A0-13F5 13F8-13FD 1C90-1CBA 1CBD-1CBF 1D00-1D2B "
    "1D6B-1D77 1D79-1D9A 1E00-1F15 1F18-1F1D 1F20-1F45 1F48-1F4D 1F50-1F57 1F59 1F5B 1F5D 1F5F-1F7D 1F80-1FB4 "
    "1FB6-1FBC 1FBE 1FC2-1FC4 1FC6-1FCC 1FD0-1FD3 1FD6-1FDB 1FE0-1FEC 1FF2-1FF4 1FF6-1FFC 2102 2107 210A-2113 "
    "2115 2119-211D 2124 2126 2128 212A-212D 212F-2134 2139 213C-213F 2145-2149 214E 2183-2184 2C00-2C7B "
    "2C7E-2CE4 2CEB-2CEE 2CF2-2CF3 A640-A66D A680-A69B A722-A76F A771-A787 A78B-A78E AB70-ABBF FB00-FB06 "
    "FB13-FB17 FF21-FF3A FF41-FF5A 10400-1044F 104B0-104D3 104D8-104FB 10C80-10CB2 10CC0-10CF2 118A0-118DF "
    "1E900-1E943"
)
"""Code points of cased letters that DeepSeek-LLM's tokenizer.json lists."""
_CHINESE, _KANA, _HANGUL = r"\x{4E00}-\x{9FA5}", r"\x{3040}-\x{309F}\x{30A0}-\x{30FF}", r"\x{AC00}-\x{D7FF}"
_EAST_ASIAN = rf"[{_CHINESE}\x{{800}}-\x{{4E00}}{_HANGUL}]+"
_CHINESE_KANA = rf"[{_CHINESE}{_KANA}]+"
_DEEPSEEK_MARKS = r"\s?[!-/:-~\x{FF01}-\x{FF0F}\x{FF1A}-\x{FF5E}\x{2018}-\x{201F}\x{3000}-\x{3002}]+"
_YOUTU_BLOCKS = (
    r"[\x{AC00}-\x{D7A3}\x{3131}-\x{318E}]+"
    r"|[\x{FF01}\x{2026}\x{201C}\x{201D}\x{2018}\x{2019}\x{2014}\x{FF1A}\x{FF1B}\x{FF0C}\x{3001}-\x{303F}\x{FE30}-\x{FE4F}]+"
    rf"|[\x{{3105}}-\x{{312F}}]+|{_CHINESE_KANA}"
)
_ASIAN = (
    r"[\x{4E00}-\x{9FFF}\x{3400}-\x{4DBF}\x{F900}-\x{FAFF}\x{3040}-\x{309F}\x{30A0}-\x{30FF}\x{FF65}-\x{FF9F}"
    r"\x{2F00}-\x{2FDF}\x{E40}-\x{E7F}\x{E80}-\x{EFF}\x{1780}-\x{17FF}\x{1000}-\x{109F}\x{AA60}-\x{AA7F}"
    r"\x{A9E0}-\x{A9FF}\x{AC00}-\x{D7AF}\x{1100}-\x{11FF}]+"
)
"""Scripts without spaces between words, and Hangul."""
_BLOOM = r" ?[^(\s|.,!?\x{2026}\x{3002}\x{FF0C}\x{3001}\x{964}\x{6D4}\x{60C})]+"


def code_points(ranges: str) -> str:
    """Returns a regex class of hexadecimal code point ranges: `41-5A B5`."""
    ends = (part.partition("-") for part in ranges.split())
    return "[" + "".join(f"\\x{{{low}}}-\\x{{{high or low}}}" for low, _, high in ends) + "]"


@dataclass(frozen=True)
class PreTokenization:
    """Pre-tokenization that belongs to a name."""

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    """Whether a piece that is a token is not split further by merges."""
    add_bos: bool = False
    """Whether texts begin with the BOS token by default."""
    require_bos: bool = False
    """Whether texts always begin with the BOS token. The metadata is ignored, since it is wrong in files of these
    models."""
    byte_level: bool = True
    """Whether tokens are spelled in GPT-2's byte-level alphabet; otherwise they are plain text."""
    escape_spaces: bool = False
    """Whether tokens spell a space as `▁`."""
    punctuation_runs: bool = False
    """Whether runs of punctuation are pieces, which the patterns do not join with other text. Punctuation is what
    `tokenizers` regards as such: ASCII symbols and Unicode 8's categories P, so it is not a pattern."""
    remove_spaces: bool = False
    """Whether white space separates pieces and is dropped."""


_GPT2 = PreTokenization((GPT2,))
_LLAMA3 = PreTokenization((LLAMA3,), ignore_merges=True, add_bos=True)
_DIGITS = PreTokenization((r"\p{N}", GPT2))
_QWEN2 = PreTokenization((QWEN2,))
_GPT4O = PreTokenization((GPT4O,))
_DEEPSEEK3 = PreTokenization((r"\p{N}{1,3}", _CHINESE_KANA, _DEEPSEEK_WORDS))
_LINES = r"[^\n]+|\n+"
_GEMMA4 = PreTokenization((_LINES,), add_bos=True, require_bos=True, byte_level=False, escape_spaces=True)
_TINY_AYA = PreTokenization((_THREE_DIGITS, GPT4O))
_BAILING = PreTokenization(
    (r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",)
)

PRE_TOKENIZERS: Mapping[str, PreTokenization] = {
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "midm-2.0", "lfm2"), _LLAMA3),
    **dict.fromkeys(("falcon-h1", "jina-v5-nano"), _LLAMA3),
    **dict.fromkeys(("dbrx", "smaug-bpe"), PreTokenization((LLAMA3,))),
    "chatglm-bpe": PreTokenization((LLAMA3,)),
    **dict.fromkeys(("glm4", "glm5"), PreTokenization((LLAMA3,), ignore_merges=True)),
    "minicpm5": PreTokenization((r"\p{N}{1,3}", LLAMA3.replace("{1,3}", "+")), ignore_merges=True),
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "exaone4", "mellum", "modern-bert"), _GPT2),
    **dict.fromkeys(("gigachat", "a.x-4.0", "roberta-bpe", "granite-docling", "jina-es", "jina-de"), _GPT2),
    **dict.fromkeys(("jina-v1-en", "jina-v2-code", "jina-v2-es", "jina-v2-de"), _GPT2),
    **dict.fromkeys(("starcoder", "refact", "command-r", "smollm", "codeshell", "exaone", "minerva-7b"), _DIGITS),
    "mellum2": _DIGITS,
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2", "hunyuan", "megrez", "grok-2", "solar-open"), _QWEN2),
    **dict.fromkeys(("kormo", "f2llmv2"), _QWEN2),
    "qwen35": PreTokenization(
        (
            rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
            r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        )
    ),
    "ufakzeka": PreTokenization((QWEN2.removeprefix(f"{_CONTRACTIONS}|"),)),
    "laguna": PreTokenization((_LINES, QWEN2)),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "minimax-m2", "talkie"), _GPT4O),
    "granite-embed-multi-97m": PreTokenization((GPT4O,), ignore_merges=True),
    **dict.fromkeys(("tiny_aya", "cohere2moe"), _TINY_AYA),
    "kimi-k2": PreTokenization((KIMI_K2,)),
    "tekken": PreTokenization((TEKKEN,), ignore_merges=True, add_bos=True),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"), _DEEPSEEK3),
    "spark2_5": PreTokenization(
        (r"\p{N}{1,3}", _CHINESE_KANA, _DEEPSEEK_WORDS.replace(r"[\r\n]*|\s*[\r\n]+", r"|[\r\n]"), r"\p{N}")
    ),
    "afmoe": PreTokenization((_THREE_DIGITS, _ASIAN, _DEEPSEEK_WORDS)),
    "deepseek-llm": PreTokenization(
        (r"[\r\n]", rf"\s?{code_points(_DEEPSEEK_LETTERS)}+", _DEEPSEEK_MARKS, r"\s+$", _EAST_ASIAN, r"\p{N}+"),
    ),
    "deepseek-coder": PreTokenization((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _EAST_ASIAN, r"\p{N}")),
    "falcon": PreTokenization((GPT2, r"[0-9][0-9][0-9]"), punctuation_runs=True),
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
            _YOUTU_BLOCKS,
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
    **dict.fromkeys(("bailingmoe", "bailingmoe2", "llada-moe"), _BAILING),
    "chameleon": PreTokenization(
        (
            "<sentinel:[0-9]+>",
            "IMGIMG[A-I]{1,4}Z",
            r"[\t\n]|    |  ",
            r"\p{N}",
            r"[\p{P}!-/:-@\[-`{-~]",
            GPT2,
        ),
        add_bos=True,
    ),
    "superbpe": PreTokenization((r"\p{N}+", r"(?=(\d{3})+(?!\d))")),
    **dict.fromkeys(("gemma4", "granite-embed-multi-311m"), _GEMMA4),
    "sarvam-moe": PreTokenization((_LINES,), byte_level=False, escape_spaces=True),
    "whitespace": PreTokenization((), byte_level=False, remove_spaces=True),
    "default": PreTokenization((r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
}
"""Pre-tokenizations by llama.cpp's names; `default` applies to files without a name."""


def pre_tokenization(metadata: Config) -> PreTokenization:
    """Returns the pre-tokenization that a file names, else the one of its tokenizer model, else `default`.

    Raises UnsupportedModelError for an unknown name.
    """
    model = metadata.text("tokenizer.ggml.model")
    name = metadata.text(KEY, default=model if model in PRE_TOKENIZERS else "default")
    if name not in PRE_TOKENIZERS:
        nearest = difflib.get_close_matches(name, PRE_TOKENIZERS, n=1, cutoff=0)
        names = [*nearest, *(each for each in sorted(PRE_TOKENIZERS) if each not in nearest)]
        raise metadata.unsupported(KEY, f"one of {', '.join(names)} (nearest first)")
    return PRE_TOKENIZERS[name]


def splitter(rules: PreTokenization) -> PreTokenizer:
    """Returns a pre-tokenizer that splits by each pattern in turn, and spells pieces like the tokens."""
    from tokenizers import Regex, pre_tokenizers

    steps: list[PreTokenizer] = [pre_tokenizers.Punctuation("contiguous")] if rules.punctuation_runs else []
    steps += [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in rules.patterns]
    if rules.remove_spaces:
        steps.append(pre_tokenizers.WhitespaceSplit())
    if rules.byte_level:
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    return pre_tokenizers.Sequence(steps)
