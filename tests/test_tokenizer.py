"""Tokenization and detokenization, and directories without a tokenizer."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import example, given
from hypothesis import strategies as st

import fakes
from conftest import TINY
from ferrule import LLM, ConfigError, PromptError, SamplingParams, TokenizerError
from ferrule._text.tokenizer import Tokenizer

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
BYTE_LEVEL = Tokenizer(TINY)
REFERENCE = tokenizers.Tokenizer.from_file(str(TINY / "tokenizer.json"))
texts = st.text(st.characters(exclude_categories=["Cs"])) | st.text("日本語👨‍👩‍👧🙂éßabc \n\0", min_size=1)
ids = st.lists(st.integers(0, 4095), max_size=40)


def sentencepiece(directory: Path, decoder: dict[str, Any] | None = None) -> Tokenizer:
    """Builds a tokenizer like Llama 2's, with pieces and a token for each byte."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁a", "b", "é", "日"]
    steps = [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0},
    ]
    added = [{"id": index, "content": pieces[index], "special": True} for index in range(3)]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    description = {
        "version": "1.0",
        "truncation": {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0},
        "padding": None,
        "added_tokens": [token | flags for token in added],
        "normalizer": None,
        "pre_tokenizer": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
        },
        "decoder": decoder or {"type": "Sequence", "decoders": steps},
        "model": {
            "type": "BPE",
            "unk_token": "<unk>",
            "byte_fallback": True,
            "fuse_unk": True,
            "vocab": {piece: index for index, piece in enumerate(pieces)},
            "merges": [],
        },
    }
    directory.mkdir(exist_ok=True)
    (directory / "tokenizer.json").write_text(json.dumps(description))
    return Tokenizer(directory)


def stream(
    tokenizer: Tokenizer, token_ids: Sequence[int], prompt: Sequence[int] = (), *, skip: bool = True
) -> list[str]:
    """Returns the deltas of a stream, and its flush as the last one."""
    detokenizer = tokenizer.detokenizer(prompt, skip_special_tokens=skip)
    return [*map(detokenizer.feed, token_ids), detokenizer.flush()]


@given(token_ids=ids, skip=st.booleans())
def test_concatenated_deltas_of_random_ids_equal_decode(token_ids: list[int], skip: bool) -> None:
    whole = REFERENCE.decode(token_ids, skip_special_tokens=skip)
    assert "".join(stream(BYTE_LEVEL, token_ids, skip=skip)) == whole
    assert BYTE_LEVEL.decode(token_ids, skip_special_tokens=skip) == whole


@given(text=texts)
@example(text="👨‍👩‍👧" * 3)
def test_text_round_trips_without_partial_characters(text: str) -> None:
    token_ids = BYTE_LEVEL.encode(text)
    deltas = stream(BYTE_LEVEL, token_ids)
    assert "".join(deltas) == text
    assert BYTE_LEVEL.decode(token_ids) == text
    assert REPLACEMENT in text or all(REPLACEMENT not in delta for delta in deltas)


@given(text=texts, cut=st.integers(0, 100))
def test_prompt_ending_within_a_character(text: str, cut: int) -> None:
    token_ids = BYTE_LEVEL.encode(text)
    cut %= len(token_ids) + 1
    prompt, rest = token_ids[:cut], token_ids[cut:]
    known = BYTE_LEVEL.decode(prompt).rstrip(REPLACEMENT)
    assert known + "".join(stream(BYTE_LEVEL, rest, prompt)) == text or REPLACEMENT in text


def test_incomplete_final_character_becomes_one_replacement_character() -> None:
    token_ids = BYTE_LEVEL.encode("a🙂")
    assert stream(BYTE_LEVEL, token_ids[:-1])[-1] == REPLACEMENT
    assert "".join(stream(BYTE_LEVEL, token_ids[:-1])) == REFERENCE.decode(token_ids[:-1])


@pytest.fixture(scope="module")
def pieces(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return sentencepiece(tmp_path_factory.mktemp("sentencepiece"))


@pytest.fixture(scope="module")
def metaspace(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    decoder = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False}
    return sentencepiece(tmp_path_factory.mktemp("metaspace"), decoder)


class TestSentencePiece:
    """Tests byte fallback, where the tokenizers library drops a whole run of bytes because of one invalid byte."""

    @given(text=texts)
    def test_text_round_trips(self, pieces: Tokenizer, text: str) -> None:
        token_ids = pieces.encode(text)
        assert token_ids[0] == 1
        deltas = stream(pieces, token_ids)
        # The Strip decoder of tokenizers cannot distinguish the first space of a text from the added one.
        assert "".join(deltas) in {text, text.removeprefix(" ")}
        assert REPLACEMENT in text or all(REPLACEMENT not in delta for delta in deltas)

    @given(token_ids=st.lists(st.sampled_from([1, 2, 259, 260, 261, 262, 263, 0x41 + 3]), max_size=20))
    def test_decode_equals_tokenizers(self, pieces: Tokenizer, token_ids: list[int]) -> None:
        backend = pieces._backend
        assert backend is not None
        assert pieces.decode(token_ids) == backend.decode(token_ids)

    def test_only_invalid_bytes_become_replacement_characters(self, pieces: Tokenizer) -> None:
        run = [byte + 3 for byte in "🙂".encode()]
        assert pieces.decode([*run, 0xFF + 3, 261]) == f"🙂{REPLACEMENT}b"

    def test_continuation_keeps_leading_space(self, pieces: Tokenizer) -> None:
        assert "".join(stream(pieces, [260])) == "a"
        assert "".join(stream(pieces, [260], prompt=[261])) == " a"

    def test_truncation_settings_of_tokenizer_are_ignored(self, pieces: Tokenizer) -> None:
        assert len(pieces.encode("b" * 100)) == 102


class TestOtherDecoders:
    """Tests decoders whose tokens are decoded in a sliding window."""

    @given(token_ids=st.lists(st.integers(259, 263), max_size=60))
    def test_concatenated_deltas_equal_decode(self, metaspace: Tokenizer, token_ids: list[int]) -> None:
        backend = metaspace._backend
        assert backend is not None
        assert "".join(stream(metaspace, token_ids)) == backend.decode(token_ids)


@pytest.mark.parametrize("text", ["a\0b", "\0", "\x7f\x1b[0m", "\ufeffx", "\r\n"])
def test_control_characters_round_trip(text: str, llm: LLM) -> None:
    assert llm.detokenize(llm.tokenize(text)) == text


def test_lone_surrogates_are_rejected(llm: LLM) -> None:
    for call in (llm.tokenize, llm.generate):
        with pytest.raises(PromptError, match=r"U\+D800, at character 2"):
            call("ab\ud800c")
    with pytest.raises(PromptError, match="lone surrogate"):
        llm.chat([{"role": "user", "content": "\udfff"}])


@pytest.mark.parametrize("token_ids", [[4096], [-1], [5, 2**63], [2**70]])
def test_token_ids_outside_the_vocabulary(token_ids: list[int], llm: LLM) -> None:
    index = len(token_ids) - 1
    message = rf"^prompt_token_ids\[{index}\] must be from 0 to 4095 \(the vocabulary\), got {token_ids[index]}$"
    with pytest.raises(PromptError, match=message):
        llm.detokenize(token_ids)


def test_padding_ids_decode_to_empty_text(model_with: Callable[..., Path], fake_engine: type[fakes.Engine]) -> None:
    """Many models have a vocabulary that is padded beyond the tokenizer's."""
    directory = model_with({"vocab_size": 4100})
    llm = LLM(directory, tokenizer=TINY)
    assert llm.detokenize([459, 4099, 377]) == llm.detokenize([459, 377])
    fake_engine.script = staticmethod(lambda prompt: [459, 4099, 377])
    assert llm.generate("x")[0].outputs[0].text == "The capital"


def test_directory_without_tokenizer(model_with: Callable[..., Path], fake_engine: type[fakes.Engine]) -> None:
    llm = LLM(model_with())
    output = llm.generate({"prompt_token_ids": [5, 6]}, SamplingParams(max_tokens=3, logprobs=1))[0]
    assert len(output.outputs[0].token_ids) == 3
    assert output.outputs[0].text == ""
    for call in (
        lambda: llm.generate("text"),
        lambda: llm.tokenize("text"),
        lambda: llm.detokenize([5]),
        lambda: llm.generate({"prompt_token_ids": [5]}, SamplingParams(stop="x")),
    ):
        with pytest.raises(TokenizerError, match=r"tokenizer\.json: no such file"):
            call()
    assert llm.info()["tokenizer"] is False


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"model": 3}', "\xff"])
def test_malformed_tokenizer(content: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(TokenizerError, match=str(tmp_path / "tokenizer.json")):
        Tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("config", "ends"),
    [
        ({"tokenizer_class": "LlamaTokenizerFast", "add_bos_token": True}, ([1], [])),
        ({"tokenizer_class": "LlamaTokenizerFast", "add_bos_token": False}, ([], [])),
        ({"tokenizer_class": "LlamaTokenizer", "add_bos_token": True, "add_eos_token": True}, ([1], [2])),
        ({"tokenizer_class": "PreTrainedTokenizerFast", "add_bos_token": True}, ([], [])),
        ({"tokenizer_class": "LlamaTokenizerFast"}, ([], [])),
    ],
)
def test_llama_add_bos_and_add_eos_flags(
    config: dict[str, Any], ends: tuple[list[int], list[int]], tmp_path: Path
) -> None:
    """As in transformers' Llama class, for example for DeepSeek-R1-Distill-Qwen; its tokenizer.json omits BOS."""
    shutil.copy(TINY / "tokenizer.json", tmp_path)
    special = {"bos_token": "<|bos|>", "eos_token": "<|eos|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(special | config))
    tokenizer = Tokenizer(tmp_path)
    plain = tokenizer.encode("Hello", add_special_tokens=False)
    assert tokenizer.encode("Hello") == [*ends[0], *plain, *ends[1]]


def test_special_token_config_spellings(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": {"content": "<s>"}, "eos_token": "</s>"}))
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"eos_token": "no", "pad_token": "<pad>"}))
    assert Tokenizer(tmp_path).special_tokens == {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": 3}))
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json: bos_token must be a string, got 3"):
        Tokenizer(tmp_path)


def test_chat_template_locations(tmp_path: Path) -> None:
    config = tmp_path / "tokenizer_config.json"
    assert Tokenizer(tmp_path).chat_templates == {}
    config.write_text(
        json.dumps({"chat_template": [{"name": "default", "template": "A"}, {"name": "rag", "template": "B"}]})
    )
    assert Tokenizer(tmp_path).chat_templates == {"default": "A", "rag": "B"}
    config.write_text(json.dumps({"chat_template": "C"}))
    assert Tokenizer(tmp_path).chat_templates == {"default": "C"}
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "D"}))
    assert Tokenizer(tmp_path).chat_templates == {"default": "D"}
    (tmp_path / "chat_template.jinja").write_text("E")
    assert Tokenizer(tmp_path).chat_templates == {"default": "E"}
    others = tmp_path / "additional_chat_templates"
    others.mkdir()
    (others / "tool_use.jinja").write_text("F")
    assert Tokenizer(tmp_path).chat_templates == {"default": "E", "tool_use": "F"}
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match=r"chat_template\.jinja"):
        Tokenizer(tmp_path)


@pytest.mark.parametrize("tokens", [200, 2000])
def test_detokenization_cost_is_constant_per_token(tokens: int) -> None:
    """Counts the bytes read instead of the time; at most one character is held back."""
    looked_at = 0

    def decode(token_ids: list[int]) -> str:
        nonlocal looked_at
        looked_at += len(token_ids)
        return "x" * len(token_ids)

    from ferrule._text.detokenizer import WindowDetokenizer

    detokenizer = WindowDetokenizer(decode, [])
    for token in range(tokens):
        detokenizer.feed(token)
    assert looked_at <= 4 * tokens
