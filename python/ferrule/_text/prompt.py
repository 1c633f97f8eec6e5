"""Reads prompts, which are text or token ids, with images or without, and checks them against the model's limits."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, NotRequired, TypeAlias, TypedDict, cast

from ferrule._text.fim import encode_infill
from ferrule._text.tokenizer import Tokenizer, TokenLimit
from ferrule._validation import shown
from ferrule._vision.model import PreparedImage, VisionModel
from ferrule._vision.prompt import Features, expand, placed
from ferrule.errors import PromptError

MAX_SALT_LENGTH = 256
"""Maximum number of characters of a cache salt."""
IMAGES = "multi_modal_data"
"""Field of a prompt with images."""


class MultiModalData(TypedDict):
    """Images of a prompt, for models that read them."""

    image: Any
    """One image or a list of them, in the order of their placeholders: PIL images, arrays uint8 `[height, width, 3]`,
    encoded bytes, paths of local files, or data URLs."""


class TokensPrompt(TypedDict):
    """A prompt as token ids."""

    prompt_token_ids: Sequence[int]
    prompt: NotRequired[str]
    """Text of the token ids, which the output repeats."""
    cache_salt: NotRequired[str]
    """Salt of 1 to 256 characters. Prompts share cached prefixes only with prompts that have the same salt."""
    multi_modal_data: NotRequired[MultiModalData]
    """Images. The token ids have all tokens of each image."""


class TextPrompt(TypedDict):
    """A prompt as text."""

    prompt: str
    suffix: NotRequired[str]
    """Text after the completion, for models with fill-in-the-middle tokens."""
    middle: NotRequired[str]
    """Beginning of the text before the suffix, which the completion continues."""
    cache_salt: NotRequired[str]
    """Salt of the prefix cache, as in TokensPrompt."""
    multi_modal_data: NotRequired[MultiModalData]
    """Images. The text has one placeholder of the model, such as `<image>`, for each."""


Prompt: TypeAlias = str | TokensPrompt | TextPrompt


@dataclass(frozen=True)
class ReadPrompt:
    """A prompt as token ids, with its text if that was given; with a suffix, the text before the middle."""

    text: str | None
    token_ids: list[int]
    cache_salt: str | None = None
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the output of this prompt, besides the model's EOS tokens."""
    features: Sequence[Features] = ()
    """Features of images, at their places."""


@dataclass(frozen=True)
class PromptParts:
    """Fields of a prompt with checked types; the token ids are not checked yet."""

    text: str | None = None
    token_ids: object = None
    suffix: str | None = None
    middle: str = ""
    cache_salt: str | None = None
    images: tuple[object, ...] = ()


def read_prompt(
    given: object, tokenizer: Tokenizer, *, vocab_size: int, limit: TokenLimit, vision: VisionModel | None = None
) -> ReadPrompt:
    """Reads a prompt in either form. `vision` reads its images; without it, images are refused.

    Raises PromptError, ImageError, TokenizerError, EngineError.
    """
    parts = prompt_parts(given)
    stop_token_ids: tuple[int, ...] = ()
    images = _prepared(parts.images, vision, limit)
    if parts.text is None or parts.token_ids is not None:
        ids = parts.token_ids
    elif parts.suffix is None:
        text = parts.text if vision is None else expand(parts.text, images, vision.processor)
        ids = tokenizer.encode(text, limit=limit)
    else:
        infill = encode_infill(tokenizer, parts.text, parts.suffix, parts.middle, limit)
        ids, stop_token_ids = infill.token_ids, tuple(each for each in infill.stop_token_ids if each < vocab_size)
    token_ids = check_token_ids(ids, vocab_size)
    if len(token_ids) > limit.tokens:
        raise limit.exceeded(len(token_ids))
    features = () if vision is None else _features(token_ids, images, vision)
    return ReadPrompt(parts.text, token_ids, parts.cache_salt, stop_token_ids, features)


def _prepared(images: Sequence[object], vision: VisionModel | None, limit: TokenLimit) -> list[PreparedImage]:
    if not images:
        return []
    if vision is None:
        raise PromptError(f"{IMAGES} must be absent, because the model reads text only", field=IMAGES)
    return vision.prepare(((image, f"{IMAGES}.image[{index}]") for index, image in enumerate(images)), limit.tokens)


def _features(token_ids: Sequence[int], images: Sequence[PreparedImage], vision: VisionModel) -> Sequence[Features]:
    token = vision.processor.image_token_id
    features = placed(images, token_ids, token)
    if features is None:
        wanted = sum(image.tokens for image in images)
        raise PromptError(
            f"prompt_token_ids must have the token {token} {wanted} times, once for each token of the images, got "
            f"{token_ids.count(token)}",
            field="prompt_token_ids",
        )
    return features


def prompt_parts(given: object) -> PromptParts:
    """Splits a prompt in either form into its fields.

    Raises PromptError.
    """
    if isinstance(given, str):
        return PromptParts(text=given)
    if not isinstance(given, Mapping) or not (
        {"prompt", "prompt_token_ids"} & set(cast("Mapping[object, object]", given))
    ):
        found = shown(cast("object", given))
        raise PromptError(f'a prompt must be a string or {{"prompt_token_ids": [...]}}, got {found}')
    keys = dict(cast("Mapping[str, object]", given))
    salt = _checked_salt(keys.pop("cache_salt")) if "cache_salt" in keys else None
    images = _checked_images(keys.pop(IMAGES)) if keys.get(IMAGES) is not None else ()
    keys.pop(IMAGES, None)
    content = "prompt_token_ids" if "prompt_token_ids" in keys else "prompt"
    value = keys.pop(content)
    text = keys.pop("prompt", None) if content == "prompt_token_ids" else value
    suffix = keys.pop("suffix", None) if content == "prompt" else None
    middle = keys.pop("middle", "") if suffix is not None else ""
    if keys:
        found = shown(next(iter(keys)))
        others = "suffix, middle" if content == "prompt" else "prompt"
        raise PromptError(
            f"a prompt with {content} may also have {others}, cache_salt and {IMAGES}, got {found}",
            field=next(iter(keys)),
        )
    if text is not None and not isinstance(text, str):
        raise PromptError(f"prompt must be a string, got {shown(text)}", field="prompt")
    if content == "prompt_token_ids":
        return PromptParts(text=text, token_ids=value, cache_salt=salt, images=images)
    if text is None:
        raise PromptError("prompt must be a string, got None", field="prompt")
    if suffix is not None and not isinstance(suffix, str):
        raise PromptError(f"suffix must be a string, got {shown(suffix)}", field="suffix")
    if suffix is not None:
        _check_unicode("suffix", suffix)
    if not isinstance(middle, str):
        raise PromptError(f"middle must be a string, got {shown(middle)}", field="middle")
    _check_unicode("middle", middle)
    if suffix is not None and images:
        raise PromptError(f"{IMAGES} must be absent with suffix", field=IMAGES)
    return PromptParts(text=text, suffix=suffix, middle=middle, cache_salt=salt, images=images)


def _checked_images(given: object) -> tuple[object, ...]:
    if not isinstance(given, Mapping) or set(cast("Mapping[object, object]", given)) != {"image"}:
        found = shown(cast("object", given))
        raise PromptError(f'{IMAGES} must be {{"image": image or list of images}}, got {found}', field=IMAGES)
    images = cast("Mapping[str, object]", given)["image"]
    return tuple(cast("Sequence[object]", images)) if isinstance(images, (list, tuple)) else (images,)


def _checked_salt(salt: object) -> str:
    if not isinstance(salt, str) or not 1 <= len(salt) <= MAX_SALT_LENGTH:
        raise PromptError(
            f"cache_salt must be a string of 1 to {MAX_SALT_LENGTH} characters, got {shown(salt)}", field="cache_salt"
        )
    _check_unicode("cache_salt", salt)
    return salt


def _check_unicode(field: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise PromptError(
            f"{field} must be valid Unicode, got {shown(text)} with a lone surrogate", field=field
        ) from None


def check_token_ids(token_ids: object, vocab_size: int, *, may_be_empty: bool = False) -> list[int]:
    """Returns token ids after checking that all are in the vocabulary and, unless `may_be_empty`, at least one exists.

    Raises PromptError.
    """
    try:
        # Bytes, sets and mappings may iterate over integers too, but are mistakes of the caller.
        if isinstance(token_ids, (bytes, bytearray, Set, Mapping)):
            raise TypeError
        ids = [operator.index(token) for token in cast("Iterable[int]", token_ids)]
    except TypeError:
        found = shown(cast("object", token_ids))
        raise PromptError(
            f"prompt_token_ids must be a list of integers, got {found}", field="prompt_token_ids"
        ) from None
    if not ids:
        if may_be_empty:
            return ids
        raise PromptError("the prompt has no tokens")
    if min(ids) < 0 or max(ids) >= vocab_size:
        position = next(i for i, token in enumerate(ids) if not 0 <= token < vocab_size)
        raise PromptError(
            f"prompt_token_ids[{position}] must be from 0 to {vocab_size - 1} (the vocabulary), "
            f"got {shown(ids[position])}",
            field=f"prompt_token_ids[{position}]",
        )
    return ids


def prompt_limit(max_model_len: int, limited_by: str) -> TokenLimit:
    """Returns the limit of a prompt, after which at least one token of output has room."""
    return TokenLimit(
        max_model_len - 1,
        f"the prompt has {{found}} tokens, more than the limit of {max_model_len - 1}: {limited_by} allows "
        f"{max_model_len} tokens including at least one of output",
        output=1,
    )
