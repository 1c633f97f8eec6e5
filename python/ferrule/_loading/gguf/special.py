"""Special tokens of a GGUF file: beginning and end of texts, and tokens that end the output."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import cast

from ferrule._loading.gguf.vocabulary import TOKENS, TokenType, Vocabulary
from ferrule.archs.config import Config

KEYS: Mapping[str, str] = {
    "bos_token": "tokenizer.ggml.bos_token_id",
    "eos_token": "tokenizer.ggml.eos_token_id",
    "unk_token": "tokenizer.ggml.unknown_token_id",
    "sep_token": "tokenizer.ggml.seperator_token_id",  # the specification has this spelling
    "pad_token": "tokenizer.ggml.padding_token_id",
    "cls_token": "tokenizer.ggml.cls_token_id",
    "mask_token": "tokenizer.ggml.mask_token_id",
}
"""Metadata keys by their names in tokenizer_config.json."""
DEFAULTS: Mapping[str, Mapping[str, int]] = {
    "llama": {"bos_token": 1, "eos_token": 2, "unk_token": 0},
    "t5": {"eos_token": 1, "unk_token": 2, "pad_token": 0},
    "bert": {"bos_token": 101, "sep_token": 102, "unk_token": 100, "pad_token": 0, "mask_token": 103},
}
"""Default ids by `tokenizer.ggml.model`, for files without a key. A default applies if its token is not normal text."""

END_KEYS = (KEYS["eos_token"], "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")
"""Keys of tokens that end the output: the end of a text, of a turn, of a message."""
ENDS = (
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<end_of_turn>", "<|endoftext|>", "<|eom_id|>"),
    *("<EOT>", "_<EOT>", "[EOT]", "<|end_of_text|>", "<end_of_utterance>", "<\uff5cend▁of▁sentence\uff5c>"),
    *("<|flush|>", "<|calls|>", "[EOS]", "[e~[", "<turn|>", "<|tool_response>"),
)
"""Tokens that end a turn even without a key, since most files have a key for the end of a text only."""

ANSWER_ENDS = frozenset({"<|return|>", "<|flush|>"})
"""Tokens that end an answer in OpenAI's harmony format and in Solar's, where `<|end|>` ends only a message of it."""


def mark_control_tokens(vocabulary: Vocabulary) -> Vocabulary:
    """Returns the vocabulary with the tokens in ENDS marked as control tokens, which some files mark as normal."""
    types = list(vocabulary.types)
    for token in ENDS:
        token_id = vocabulary.ids.get(token)
        if token_id is not None and types[token_id] in (TokenType.NORMAL, TokenType.UNDEFINED):
            types[token_id] = TokenType.CONTROL
    return replace(vocabulary, types=types)


def special_ids(vocabulary: Vocabulary) -> dict[str, int]:
    """Returns the ids of the special tokens by their names in KEYS.

    Raises ConfigError for an id that is not in the vocabulary.
    """
    metadata, size = vocabulary.metadata, len(vocabulary.tokens)
    found = {name: metadata.token_ids(key, size) for name, key in KEYS.items()}
    ids = {name: given[0] for name, given in found.items() if given}
    defaults = DEFAULTS.get(metadata.text("tokenizer.ggml.model"), {})
    for name, token_id in defaults.items():
        if name not in ids and token_id < size and vocabulary.types[token_id] in _NO_TEXT:
            ids[name] = token_id
    return ids


def end_tokens(metadata: Config, vocab_size: int) -> tuple[int, ...]:
    """Returns the tokens that end the output.

    Raises ConfigError for an id that is not in the vocabulary.
    """
    ends = [token_id for key in END_KEYS for token_id in metadata.token_ids(key, vocab_size)]
    tokens: object = metadata.values.get(TOKENS)
    named = cast("list[object]", tokens)[:vocab_size] if isinstance(tokens, list) else []
    found = {token: named.index(token) for token in _ENDS.intersection(map(str, named)) if token in named}
    if not ANSWER_ENDS.isdisjoint(found):
        found.pop("<|end|>", None)
    return tuple(dict.fromkeys([*ends, *sorted(found.values())]))


_NO_TEXT = (TokenType.CONTROL, TokenType.UNKNOWN)
_ENDS = frozenset(ENDS)
