"""Tokenizer and chat templates of a GGUF file, built in memory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ferrule._loading.gguf.bpe import byte_pair_encoding
from ferrule._loading.gguf.file import GgufFile
from ferrule._loading.gguf.pre_tokenizers import pre_tokenization
from ferrule._loading.gguf.sentencepiece import sentencepiece
from ferrule._loading.gguf.special import mark_control_tokens, special_ids
from ferrule._loading.gguf.strip import left_stripped, right_stripped
from ferrule._loading.gguf.unigram import unigram
from ferrule._loading.gguf.vocabulary import TokenType, Vocabulary, read_vocabulary
from ferrule._loading.gguf.wordpiece import wordpiece
from ferrule._validation import shown
from ferrule.archs.config import Config
from ferrule.errors import FerruleError, TokenizerError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

MODEL = "tokenizer.ggml.model"
NO_MODELS = ("none", "no_vocab")
"""Values of `tokenizer.ggml.model` in files without a tokenizer."""
BPE_MODELS = ("gpt2", "gemma4", "whitespace")
MODELS = (*BPE_MODELS, "llama", "t5", "bert")
TEMPLATE = "tokenizer.chat_template"


@dataclass(frozen=True)
class GgufTokenizer:
    """Tokenizer, special tokens and chat templates of a file."""

    backend: Tokenizer | None
    special_tokens: dict[str, str]
    """Special tokens by role: `bos_token` and so on."""
    chat_templates: dict[str, str]
    """Chat templates by name; the one used without a name is `default`."""


def read_gguf_tokenizer(path: Path) -> GgufTokenizer:
    """Builds the tokenizer of a file.

    Raises ModelFileError, TokenizerError for a malformed vocabulary, ConfigError for another invalid key,
    UnsupportedModelError for an unsupported tokenizer model.
    """
    metadata = GgufFile(path).metadata
    templates = _chat_templates(metadata)
    if metadata.text(MODEL, default="none") in NO_MODELS:
        return GgufTokenizer(None, {}, templates)
    vocabulary = mark_control_tokens(read_vocabulary(metadata))
    ids = special_ids(vocabulary)
    try:
        backend = _backend(vocabulary, ids)
    except FerruleError:
        raise
    except BaseException as error:  # the library raises plain Exception, and PanicException on panics
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise TokenizerError(f"{path}: the tokenizer cannot be built: {error}") from error
    special = {name: _text(backend, vocabulary, token_id) for name, token_id in ids.items()}
    return GgufTokenizer(backend, special, templates)


def _backend(vocabulary: Vocabulary, ids: dict[str, int]) -> Tokenizer:
    metadata = vocabulary.metadata
    unknown_id = ids.get("unk_token")
    unknown = None if unknown_id is None else vocabulary.tokens[unknown_id]
    match metadata.text(MODEL):
        case model if model in BPE_MODELS:
            backend, begins, ends = byte_pair_encoding(vocabulary, unknown), pre_tokenization(metadata).add_bos, False
        case "llama":
            backend, begins, ends = sentencepiece(vocabulary, unknown), True, False
        case "t5":
            backend, begins, ends = unigram(vocabulary, unknown_id), False, True
        case "bert":
            backend, begins, ends = wordpiece(vocabulary, unknown), True, True
        case _:
            raise metadata.unsupported(MODEL, f"one of {', '.join(MODELS)}")
    _add_tokens(backend, vocabulary)
    _add_post_processor(backend, vocabulary, ids, begins=begins, ends=ends)
    return backend


def _add_tokens(backend: Tokenizer, vocabulary: Vocabulary) -> None:
    """Adds the tokens that are matched in the text before it is split."""
    from tokenizers import AddedToken

    kinds = (TokenType.CONTROL, TokenType.USER_DEFINED, TokenType.UNKNOWN)
    kind_of = {vocabulary.tokens[token_id]: vocabulary.types[token_id] for token_id in vocabulary.of_type(*kinds)}
    left, right = left_stripped(vocabulary), right_stripped(vocabulary, frozenset(kind_of))
    added = [
        AddedToken(
            token,
            special=kind != TokenType.USER_DEFINED,
            normalized=False,
            lstrip=token in left,
            rstrip=token in right,
        )
        for token, kind in kind_of.items()
    ]
    backend.add_tokens(added)  # pyright: ignore[reportUnknownMemberType]


def _add_post_processor(
    backend: Tokenizer, vocabulary: Vocabulary, ids: dict[str, int], *, begins: bool, ends: bool
) -> None:
    """Adds the special tokens at the beginning and the end of every text."""
    from tokenizers.processors import TemplateProcessing

    metadata = vocabulary.metadata
    if bert := metadata.text(MODEL) == "bert":
        first, last = ids.get("cls_token", ids.get("bos_token")), ids.get("sep_token", ids.get("eos_token"))
    else:
        first, last = ids.get("bos_token"), ids.get("eos_token")
    required = metadata.text(MODEL) in BPE_MODELS and pre_tokenization(metadata).require_bos
    if not (required or metadata.flag("tokenizer.ggml.add_bos_token", default=begins)):
        first = None
    if not metadata.flag(f"tokenizer.ggml.add_{'sep' if bert else 'eos'}_token", default=ends):
        last = None
    if first is None and last is None:
        return
    before = [] if first is None else [_text(backend, vocabulary, first)]
    after = [] if last is None else [_text(backend, vocabulary, last)]
    second = [*([] if bert else before), "$B", *after]
    backend.post_processor = TemplateProcessing(
        single=[*before, "$A", *after],
        pair=[*before, "$A", *after, *(f"{part}:1" for part in second)],
        special_tokens=[(_text(backend, vocabulary, each), each) for each in {first, last} if each is not None],
    )


def _text(backend: Tokenizer, vocabulary: Vocabulary, token_id: int) -> str:
    """Returns the tokenizer's text of a token."""
    text = backend.id_to_token(token_id)
    return vocabulary.tokens[token_id] if text is None else text


def _chat_templates(metadata: Config) -> dict[str, str]:
    templates: dict[str, str] = {}
    if TEMPLATE in metadata:
        templates["default"] = metadata.text(TEMPLATE)
    names: object = metadata.values.get(f"{TEMPLATE}s")
    listed = cast("list[Any]", names) if isinstance(names, list) else []
    for name in listed:
        if not isinstance(name, str):
            raise TokenizerError(f"{metadata.file}: {TEMPLATE}s must be a list of strings, got {shown(name)}")
    prefix = f"{TEMPLATE}."
    for key in metadata.values:
        if key.startswith(prefix):
            templates[key.removeprefix(prefix)] = metadata.text(key)
    return templates
