"""Tokenizer of a model: encoding, decoding, special tokens and chat templates."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ferrule._cancellation import raise_if_cancelled
from ferrule._loading.gguf import is_gguf, read_gguf_tokenizer
from ferrule._text.detokenizer import ByteDetokenizer, Detokenizer, WindowDetokenizer, pieces_for
from ferrule._validation import shown
from ferrule.archs.config import Config, read_json_object
from ferrule.archs.files import read_file
from ferrule.errors import ConfigError, ModelNotFoundError, PromptError, PromptTooLongError, TokenizerError

if TYPE_CHECKING:
    import tokenizers

MAX_TOKENIZER_BYTES = 256 << 20
"""Maximum size of tokenizer.json in bytes; files of the largest vocabularies have 35 MB."""
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")

LLAMA_CLASSES = ("LlamaTokenizer", "LlamaTokenizerFast")

LONG_TEXT = 1 << 16
"""Number of characters above which a text is encoded without offsets, which takes three quarters of the time. For
shorter texts, the threads that the library uses for this take longer. It is also the number of characters of the pieces
in which a text is counted."""
CUT_TOKENS = 2
"""Tokens that a cut between two pieces may add to their count."""
COUNT_TOLERANCE = 1.25
"""Ratio to a limit up to which the count of pieces does not show that the whole text exceeds it."""

SPACE = "▁"
"""SentencePiece's character for a space; many of its tokenizers add it before a text."""
ANCHOR = "☺"
"""Prefix that prevents the added space, a character that is in no merge. CodeLlama's code does the same."""


@dataclass(frozen=True)
class TokenLimit:
    """Maximum number of tokens of a text."""

    tokens: int
    message: str
    """Text of the error, with `{found}` where the number of tokens is."""
    output: int = 0
    """Number of tokens of output for which the context has room after a text of so many tokens."""

    def exceeded(self, count: int, *, at_least: bool = False) -> PromptTooLongError:
        """Returns the error of a text of `count` tokens, or of `at_least` as many."""
        message = self.message.format(found=f"at least {count}" if at_least else count)
        return PromptTooLongError(message, count, self.tokens + self.output)


class Tokenizer:
    """Tokenizer of a model directory or a GGUF file.

    A directory has tokenizer.json, tokenizer_config.json and chat_template.jinja. Without tokenizer.json encoding and
    decoding raise TokenizerError.
    """

    def __init__(self, path: Path) -> None:
        self._gives_types = True
        if is_gguf(path):
            self._file, read = path, read_gguf_tokenizer(path)
            self.special_tokens, self.chat_templates, self._backend = (
                read.special_tokens,
                read.chat_templates,
                read.backend,
            )
        else:
            self._file = path / "tokenizer.json"
            config = _read_optional(path / "tokenizer_config.json")
            self.special_tokens: dict[str, str] = _read_special_tokens(path, config)
            """Special tokens by role: `bos_token` and so on."""
            self.chat_templates: dict[str, str] = _read_chat_templates(path, config)
            """Chat templates by name; the one used without a name is `default`."""
            inputs = config.texts("model_input_names")
            self._gives_types = not inputs or "token_type_ids" in inputs
            self._backend = _load(self._file)
            if self._backend is not None:
                _follow_llama_flags(self._backend, config, self.special_tokens)
        self._special_ids: frozenset[int] = frozenset()
        self._pieces = None
        self._bytes: dict[int, bytes] = {}
        """Cache of the bytes of tokens, by id."""
        if self._backend is not None:
            added = self._backend.get_added_tokens_decoder()
            self._special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
            decoder = self._backend.decoder
            self._pieces = pieces_for(None if decoder is None else decoder.__getstate__().decode())
            if self._pieces is not None and not self._pieces.spells_added_tokens:
                self._bytes = {token_id: token.content.encode() for token_id, token in added.items()}

    @property
    def available(self) -> bool:
        """Whether the model has a tokenizer."""
        return self._backend is not None

    def encode(self, text: str, *, add_special_tokens: bool = True, limit: TokenLimit | None = None) -> list[int]:
        """Encodes a text, with the special tokens that the tokenizer's post-processor adds.

        A long text that surely exceeds `limit` is refused before it is encoded as a whole. The caller checks the length
        of the result.

        Raises TokenizerError without a tokenizer, PromptError for text that is not valid Unicode or too long.
        """
        self._check_long_text(text, limit)
        if isinstance(cast("object", text), str) and len(text) > LONG_TEXT:
            return self._encode(text, add_special_tokens=add_special_tokens, offsets=False).ids
        return self._encode(text, add_special_tokens=add_special_tokens).ids

    def encode_text(
        self, text: str, second: str | None = None, *, most: int | None = None, limit: TokenLimit | None = None
    ) -> tuple[list[int], list[int]]:
        """Encodes a text or a pair with all special tokens; returns ids and token types.

        `most` is the number of ids, with special tokens, to which the texts are truncated, the longer of two first. Of
        a long text only the beginning that is kept is encoded; without `most`, `limit` applies as in `encode`.

        Raises TokenizerError without a tokenizer, PromptError for text that is not valid Unicode or too long, and if
        `most` leaves no room for text.
        """
        texts = [text] if second is None else [text, second]
        if most is None:
            for each in texts:
                self._check_long_text(each, limit)
        else:
            texts = [self._beginning(each, most) for each in texts]
        parts = [self._encode(each, add_special_tokens=False) for each in texts]
        backend = self._require("text cannot be tokenized; give token ids")
        added = backend.num_special_tokens_to_add(second is not None)
        if most is not None and sum(map(len, parts)) + added > most:
            if most < added + len(parts):
                raise PromptError(
                    f"truncate_prompt_tokens must be at least {added + len(parts)}, {added} special tokens and one of "
                    f"each text, got {most}",
                    field="truncate_prompt_tokens",
                )
            for part, length in zip(parts, _lengths([*map(len, parts)], most - added), strict=True):
                part.truncate(length)
        with _errors_of(self._file):
            whole = backend.post_process(parts[0], None if second is None else parts[1])
        return whole.ids, whole.type_ids if self._gives_types else []

    def encode_part(self, text: str, *, begins: bool, limit: TokenLimit | None = None) -> list[int]:
        """Encodes a part of a text without special tokens; the added space is kept only if it `begins` the text.

        Raises the errors of `encode`.
        """
        if begins or not self._spaces_first:
            return self.encode(text, add_special_tokens=False, limit=limit)
        anchor = self.encode(ANCHOR, add_special_tokens=False)
        return self.encode(ANCHOR + text, add_special_tokens=False, limit=limit)[len(anchor) :]

    @cached_property
    def first_ids(self) -> tuple[int, ...]:
        """Special tokens that `encode` adds before a text, such as the BOS token.

        Raises TokenizerError without a tokenizer.
        """
        bare, whole = self.encode("a", add_special_tokens=False), self.encode("a")
        starts = (start for start in range(len(whole)) if whole[start : start + len(bare)] == bare)
        return tuple(whole[: next(starts, 0)])

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Decodes ids to the same text as streaming; ids without a token become empty text."""
        detokenizer = self.detokenizer(skip_special_tokens=skip_special_tokens)
        return "".join([*map(detokenizer.feed, token_ids), detokenizer.flush()])

    def token_text(self, token_id: int) -> str:
        """Returns the text of one token; U+FFFD if it is part of a character, empty without a tokenizer."""
        if self._backend is None:
            return ""
        if self._pieces is not None:
            return self._token_bytes(token_id).decode(errors="replace")
        return self._backend.decode([token_id], skip_special_tokens=False)

    def text_bytes(self, token_id: int) -> bytes | None:
        """Returns the bytes of one token, which may be part of a character; None if they depend on adjacent tokens."""
        return None if self._pieces is None else self._token_bytes(token_id)

    def ids_containing(self, text: str) -> tuple[int, ...]:
        """Returns the ids of all tokens whose text contains `text`, in ascending order."""
        return tuple(token_id for token_id, token in self._texts if text in token)

    @cached_property
    def _texts(self) -> list[tuple[int, str]]:
        """Returns the id and text of every token, in ascending order of the ids."""
        return [(token_id, self.token_text(token_id)) for token_id in sorted(self.vocabulary().values())]

    def token_bytes(self, vocab_size: int) -> tuple[list[bytes], set[int]]:
        """Returns the bytes of each id below `vocab_size` (empty for an id without a token), and the special ids.

        Raises TokenizerError without a tokenizer, or if the text of tokens depends on adjacent tokens.
        """
        backend = self._require("the bytes of its tokens are unknown")
        pieces = self._pieces
        if pieces is None:
            raise TokenizerError(
                f"{self._file}: the text of a token depends on adjacent tokens, so the bytes of tokens are undefined"
            )
        tokens = [b""] * vocab_size
        for token, token_id in backend.get_vocab(with_added_tokens=True).items():
            if token_id < vocab_size:
                known = self._bytes.get(token_id)
                tokens[token_id] = pieces.read(token) if known is None else known
        return tokens, {token_id for token_id in self._special_ids if token_id < vocab_size}

    def vocabulary(self) -> dict[str, int]:
        """Returns the id of every token by its spelling in the vocabulary; empty without a tokenizer."""
        return {} if self._backend is None else self._backend.get_vocab(with_added_tokens=True)

    def token_id(self, token: str) -> int | None:
        """Returns the id of a token by its spelling in the vocabulary."""
        return None if self._backend is None else self._backend.token_to_id(token)

    def detokenizer(
        self, prompt: Sequence[int] = (), *, skip_special_tokens: bool = True, keep: Set[str] = frozenset()
    ) -> Detokenizer:
        """Returns a streaming detokenizer for tokens after `prompt`; special tokens in `keep` are never skipped.

        Raises TokenizerError without a tokenizer.
        """
        backend = self._require("token ids cannot be decoded")
        skipped = self._special_ids - {backend.token_to_id(token) for token in keep} if skip_special_tokens else ()
        if self._pieces is None:

            def decode(ids: list[int]) -> str:
                return backend.decode([each for each in ids if each not in skipped], skip_special_tokens=False)

            return WindowDetokenizer(decode, prompt)

        def lookup(token_id: int) -> bytes:
            return b"" if token_id in skipped else self._token_bytes(token_id)

        return ByteDetokenizer(lookup, prompt, strip_first_space=self._pieces.strip_first_space)

    @cached_property
    def _spaces_first(self) -> bool:
        ids = self.encode("a", add_special_tokens=False)
        token = None if self._backend is None or not ids else self._backend.id_to_token(ids[0])
        return token is not None and token.startswith(SPACE)

    def _check_long_text(self, text: str, limit: TokenLimit | None) -> None:
        """Raises PromptError for a long text that surely has more tokens than `limit`."""
        if limit is None or not isinstance(cast("object", text), str) or len(text) <= LONG_TEXT:
            return
        for _, count in self._counts(text):
            if count > limit.tokens * COUNT_TOLERANCE:
                raise limit.exceeded(count, at_least=True)

    def _beginning(self, text: str, tokens: int) -> str:
        """Returns the beginning of a long text that surely has `tokens` tokens, or all of it."""
        if isinstance(cast("object", text), str) and len(text) > LONG_TEXT:
            for end, count in self._counts(text):
                if count > tokens * COUNT_TOLERANCE:
                    return text[:end]
        return text

    def _counts(self, text: str) -> Iterator[tuple[int, int]]:
        """Yields the end of each piece of a text, and the number of tokens that the text up to there has at least."""
        _check_unicode(text)
        count = 0
        for begin in range(0, len(text), LONG_TEXT):
            raise_if_cancelled()
            piece = text[begin : begin + LONG_TEXT]
            count += len(self._encode(piece, add_special_tokens=False, offsets=False).ids) - CUT_TOKENS
            yield begin + len(piece), count

    def _encode(self, text: str, *, add_special_tokens: bool, offsets: bool = True) -> tokenizers.Encoding:
        if not isinstance(cast("object", text), str):
            raise PromptError(f"the text must be a string, got {shown(text)}")
        backend = self._require("text cannot be tokenized; give token ids")
        _check_unicode(text)
        with _errors_of(self._file):
            if not offsets:
                return backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]
            return backend.encode(text, add_special_tokens=add_special_tokens)

    def _token_bytes(self, token_id: int) -> bytes:
        known = self._bytes.get(token_id)
        if known is None:
            assert self._backend is not None and self._pieces is not None  # noqa: S101, PT018  # checked by the callers
            token = self._backend.id_to_token(token_id)
            known = self._bytes[token_id] = b"" if token is None else self._pieces.read(token)
        return known

    def _require(self, consequence: str) -> tokenizers.Tokenizer:
        if self._backend is None:
            missing = "no such file" if self._file.suffix == ".json" else "has no tokenizer"
            raise TokenizerError(f"{self._file}: {missing}, so {consequence}")
        return self._backend


def _check_unicode(text: str) -> None:
    """Raises PromptError for a lone surrogate."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        found = f"a lone surrogate, U+{ord(text[error.start]):04X}, at character {error.start}"
        raise PromptError(f"the text must be valid Unicode, got {found}") from None


@contextmanager
def _errors_of(file: Path) -> Generator[None]:
    """Adds the file name to the library's errors and panics; it panics if a pattern is too expensive."""
    try:
        yield
    except Exception as error:
        raise TokenizerError(f"{file}: {error}") from error
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise TokenizerError(f"{file}: {error}") from None


def _load(file: Path) -> tokenizers.Tokenizer | None:
    import tokenizers

    from ferrule import _native

    try:
        content = read_file(file, MAX_TOKENIZER_BYTES)
    except ModelNotFoundError:
        return None
    with _errors_of(file):
        _native.check_tokenizer_json(content)
        backend = tokenizers.Tokenizer.from_buffer(content)
    # Some files contain truncation settings from training, which would truncate prompts silently.
    backend.no_truncation()
    backend.no_padding()
    return backend


def _lengths(lengths: list[int], room: int) -> list[int]:
    """Returns the lengths of one or two texts after truncation to `room`, the longer one first."""
    if len(lengths) == 1:
        return [room]
    first, second = lengths
    if min(first, second) <= room // 2:
        return [min(first, room - second), second] if first > second else [first, min(second, room - first)]
    return [room - room // 2, room // 2]


def _follow_llama_flags(backend: tokenizers.Tokenizer, config: Config, special_tokens: Mapping[str, str]) -> None:
    """Adds BOS and EOS by `add_bos_token` and `add_eos_token`, in place of tokenizer.json's post-processor.

    transformers does this for its Llama tokenizer class, which other models use too. DeepSeek's distilled Qwen models
    get their BOS token only this way.
    """
    if config.values.get("tokenizer_class") not in LLAMA_CLASSES or "add_bos_token" not in config:
        return
    from tokenizers.processors import TemplateProcessing

    def added(flag: str, role: str) -> list[str]:
        token = special_tokens.get(role)
        known = token is not None and backend.token_to_id(token) is not None
        return [token] if token is not None and known and config.flag(flag, default=False) else []

    first, last = added("add_bos_token", "bos_token"), added("add_eos_token", "eos_token")
    backend.post_processor = TemplateProcessing(
        single=[*first, "$A", *last],
        special_tokens=[(token, cast("int", backend.token_to_id(token))) for token in dict.fromkeys(first + last)],
    )


def _read_special_tokens(directory: Path, config: Config) -> dict[str, str]:
    legacy = _read_optional(directory / "special_tokens_map.json")
    tokens = {role: _token_text(config, role) or _token_text(legacy, role) for role in SPECIAL_TOKENS}
    return {role: token for role, token in tokens.items() if token is not None}


def _read_optional(file: Path) -> Config:
    return Config.read(file) if file.exists() else Config({}, file)


def _token_text(config: Config, role: str) -> str | None:
    """Reads a special token: a string, or an object with `content`."""
    value: object = config.values.get(role)
    if isinstance(value, dict):
        return config.inner(role).text("content")
    return None if value is None else config.text(role)


def _read_text(file: Path) -> str:
    try:
        return read_file(file).decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file}: {error}") from error


def _read_chat_templates(directory: Path, config: Config) -> dict[str, str]:
    """Reads chat_template.jinja and further named templates, else chat_template.json or tokenizer_config.json."""
    files = {path.stem: path for path in sorted((directory / "additional_chat_templates").glob("*.jinja"))}
    if (directory / "chat_template.jinja").exists():
        files["default"] = directory / "chat_template.jinja"
    if files:
        return {name: _read_text(file) for name, file in files.items()}
    try:
        holder = Config(read_json_object(directory / "chat_template.json"), directory / "chat_template.json")
    except ModelNotFoundError:
        holder = config
    template: object = holder.values.get("chat_template")
    if template is None:
        return {}
    if isinstance(template, list):
        named = cast("list[Mapping[str, Any]]", template)
        try:
            return {str(entry["name"]): str(entry["template"]) for entry in named}
        except (TypeError, KeyError):
            raise holder.error("chat_template", "a string, or a list of objects with name and template") from None
    return {"default": holder.text("chat_template")}
