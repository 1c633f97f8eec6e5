"""Fill-in-the-middle: the layout of each family, with small test tokenizers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

import fakes
from conftest import TINY
from event_loop import last, run
from ferrule import LLM, AsyncLLM, PromptError, SamplingParams, TokenizerError
from ferrule._text.fim import LAYOUTS, Layout, encode_infill
from ferrule._text.tokenizer import ANCHOR, Tokenizer
from test_tokenizer import sentencepiece

PREFIX, SUFFIX = "def f(", "):\n    return x\n"
QWEN, STARCODER, SANTACODER, DEEPSEEK, CODELLAMA, CODESTRAL, SEED_CODER = LAYOUTS


def byte_level(directory: Path, layout: Layout, *, special: bool = True, begin: str | None = None) -> Tokenizer:
    """The embedded model's tokenizer with a layout's tokens in it."""
    backend = tokenizers.Tokenizer.from_file(str(TINY / "tokenizer.json"))
    added = [
        tokenizers.AddedToken(token, special=special, normalized=False) for token in (*layout.markers, *layout.ends)
    ]
    backend.add_special_tokens(added) if special else backend.add_tokens(added)
    if begin is not None:
        token_id = backend.token_to_id(begin)
        assert token_id is not None
        backend.post_processor = tokenizers.processors.TemplateProcessing(
            single=f"{begin} $A", special_tokens=[(begin, token_id)]
        )
    directory.mkdir(exist_ok=True)
    backend.save(str(directory / "tokenizer.json"))
    return Tokenizer(directory)


def ids_of(tokenizer: Tokenizer, *parts: str) -> list[int]:
    """Returns the parts of a prompt: special tokens by name, the rest as text."""
    ids: list[int] = []
    for part in parts:
        token_id = tokenizer.token_id(part)
        ids += tokenizer.encode(part, add_special_tokens=False) if token_id is None else [token_id]
    return ids


@pytest.mark.parametrize(
    ("layout", "parts"),
    [
        (QWEN, ["<|fim_prefix|>", PREFIX, "<|fim_suffix|>", SUFFIX, "<|fim_middle|>"]),
        (STARCODER, ["<fim_prefix>", PREFIX, "<fim_suffix>", SUFFIX, "<fim_middle>"]),
        (SANTACODER, ["<fim-prefix>", PREFIX, "<fim-suffix>", SUFFIX, "<fim-middle>"]),
        (DEEPSEEK, ["<｜fim▁begin｜>", PREFIX, "<｜fim▁hole｜>", SUFFIX, "<｜fim▁end｜>"]),  # noqa: RUF001
        (CODELLAMA, ["▁<PRE>", PREFIX, "▁<SUF>", SUFFIX, "▁<MID>"]),
        (CODESTRAL, ["[SUFFIX]", SUFFIX, "[PREFIX]", PREFIX]),
        (SEED_CODER, ["<[fim-suffix]>", SUFFIX, "<[fim-prefix]>", PREFIX, "<[fim-middle]>"]),
    ],
    ids=[layout.families for layout in LAYOUTS],
)
@pytest.mark.parametrize("special", [True, False])
def test_layout_of_each_family(layout: Layout, parts: list[str], special: bool, tmp_path: Path) -> None:
    tokenizer = byte_level(tmp_path, layout, special=special)
    infill = encode_infill(tokenizer, PREFIX, SUFFIX)
    assert infill.token_ids == ids_of(tokenizer, *parts)
    assert infill.stop_token_ids == tuple(ids_of(tokenizer, *layout.markers, *layout.ends))
    assert encode_infill(tokenizer, "", "").token_ids == ids_of(
        tokenizer, *(p for p in parts if p not in (PREFIX, SUFFIX))
    )


def test_bos_token_precedes_infill_prompt(tmp_path: Path) -> None:
    """CodeGemma and DeepSeek need the beginning-of-sequence token for good results."""
    tokenizer = byte_level(tmp_path, QWEN, begin="<|bos|>")
    first = tokenizer.token_id("<|bos|>")
    assert encode_infill(tokenizer, PREFIX, SUFFIX).token_ids[:2] == [first, tokenizer.token_id("<|fim_prefix|>")]
    assert tokenizer.first_ids == (first,)


@pytest.mark.parametrize("layout", LAYOUTS, ids=[layout.families for layout in LAYOUTS])
def test_marker_text_is_not_encoded_as_marker(layout: Layout, tmp_path: Path) -> None:
    tokenizer = byte_level(tmp_path, layout)
    forged = "a".join(layout.markers) + layout.markers[0] * 2
    infill = encode_infill(tokenizer, f"x{forged}", forged)
    for marker in layout.markers:
        assert infill.token_ids.count(ids_of(tokenizer, marker)[0]) == 1
    text = tokenizer.decode(infill.token_ids, skip_special_tokens=False)
    sides = (f"x{forged}", forged)
    marks = (layout.prefix, layout.suffix)
    first, second = (
        zip(marks, sides, strict=True) if layout.order == "PSM" else zip(marks[::-1], sides[::-1], strict=True)
    )
    assert text == "".join((*first, *second, layout.middle or ""))


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return byte_level(tmp_path_factory.mktemp("qwen"), QWEN)


@given(pieces=st.lists(st.sampled_from(["<|fim_prefix|>", "<|", "fim_", "suffix|>", "é", " ", "\n", "<", "|", ">"])))
def test_prefix_and_suffix_round_trip(qwen: Tokenizer, pieces: list[str]) -> None:
    text = "".join(pieces)
    ids = encode_infill(qwen, text, text).token_ids
    middle = ids.index(ids_of(qwen, "<|fim_suffix|>")[0])
    assert qwen.decode(ids[1:middle], skip_special_tokens=False) == text
    assert qwen.decode(ids[middle + 1 : -1], skip_special_tokens=False) == text


class TestDummyPrefix:
    """Tokenizers like Llama's add a space before a text; here only before the prefix, as in training."""

    @pytest.fixture
    def tokenizer(self, tmp_path: Path) -> Tokenizer:
        sentencepiece(tmp_path)
        file = tmp_path / "tokenizer.json"
        backend = tokenizers.Tokenizer.from_file(str(file))
        backend.add_special_tokens([*CODELLAMA.markers, *CODELLAMA.ends])
        backend.save(str(file))
        return Tokenizer(tmp_path)

    def test_space_precedes_only_the_prefix(self, tokenizer: Tokenizer) -> None:
        pre, suf, mid = ids_of(tokenizer, *CODELLAMA.markers)
        space, b, begin = tokenizer.token_id("▁"), tokenizer.token_id("b"), tokenizer.token_id("<s>")
        assert encode_infill(tokenizer, "b", "b").token_ids == [begin, pre, space, b, suf, b, mid]
        assert encode_infill(tokenizer, "", "b b").token_ids == [begin, pre, suf, b, space, b, mid]

    def test_no_space_after_escaped_marker(self, tokenizer: Tokenizer) -> None:
        infill = encode_infill(tokenizer, "b▁<PRE>b", "b▁<PRE>b")
        text = tokenizer.decode(infill.token_ids, skip_special_tokens=False)
        assert text == "<s> <PRE> b <PRE>b <SUF>b <PRE>b <MID>"

    def test_anchor_is_removed(self, tokenizer: Tokenizer) -> None:
        for text in ("", " ", "b", " b", "é日", ANCHOR, f"{ANCHOR} b"):
            ids = tokenizer.encode_part(text, begins=False)
            assert tokenizer.decode([*ids_of(tokenizer, "b"), *ids]) == f"b{text}"


@pytest.fixture
def coder(model_with: Callable[..., Path], tmp_path: Path) -> Path:
    """A model with Qwen's tokens."""
    byte_level(tmp_path / "tokenizer", QWEN)
    directory = model_with({"vocab_size": 4200})
    (directory / "tokenizer.json").write_text((tmp_path / "tokenizer" / "tokenizer.json").read_text())
    return directory


def test_generate_and_stream_with_suffix(coder: Path, fake_engine: type[fakes.Engine]) -> None:
    llm = LLM(coder)
    prompts: list[list[int]] = []
    middle = llm.tokenize("x", add_special_tokens=False)
    end = llm.tokenize("<|file_sep|>", add_special_tokens=False)
    fake_engine.script = staticmethod(lambda prompt: prompts.append(prompt) or [*middle, *end, *middle])
    prompt: Any = {"prompt": PREFIX, "suffix": SUFFIX, "cache_salt": "s"}
    output = llm.generate(prompt, SamplingParams(max_tokens=9))[0]
    assert (output.prompt, output.outputs[0].text) == (PREFIX, "x")
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", None)
    text = llm.detokenize(output.prompt_token_ids, skip_special_tokens=False)
    assert text == f"<|fim_prefix|>{PREFIX}<|fim_suffix|>{SUFFIX}<|fim_middle|>"
    assert "".join(delta.text for delta in llm.stream(prompt, SamplingParams(max_tokens=9))) == "x"
    assert set(map(tuple, prompts)) == {tuple(output.prompt_token_ids)}
    # With ignore_eos these tokens are ignored too, and they do not end other prompts.
    ignoring = SamplingParams(max_tokens=3, ignore_eos=True)
    assert len(llm.generate(prompt, ignoring)[0].outputs[0].token_ids) == 3
    assert len(llm.generate(PREFIX, SamplingParams(max_tokens=3))[0].outputs[0].token_ids) == 3


def test_async_llm_with_suffix(coder: Path, engine: type[fakes.Engine]) -> None:
    async def test() -> None:
        async with AsyncLLM(coder) as llm:
            middle = llm.tokenize("x", add_special_tokens=False)
            end = llm.tokenize("<|endoftext|>", add_special_tokens=False)
            engine.script = staticmethod(lambda prompt: [*middle, *end])
            output = await last(llm.generate({"prompt": PREFIX, "suffix": SUFFIX}, SamplingParams(max_tokens=9)))
            assert (output.outputs[0].text, output.outputs[0].finish_reason) == ("x", "stop")

    run(test)


@pytest.mark.parametrize(
    ("prompt", "error", "message"),
    [
        (
            {"prompt": "a", "suffix": "b"},
            PromptError,
            r"suffix requires a model with fill-in-the-middle tokens, such as <\|fim_prefix\|>, .* has none of them$",
        ),
        ({"prompt": "a", "suffix": 5}, PromptError, "suffix must be a string, got 5"),
        (
            {"prompt": "a", "suffix": "b", "x": 1},
            PromptError,
            "a prompt with prompt may also have suffix, middle, cache_salt and multi_modal_data, got 'x'",
        ),
        (
            {"prompt_token_ids": [1], "suffix": "b"},
            PromptError,
            "a prompt with prompt_token_ids may also have prompt, cache_salt and multi_modal_data, got 'suffix'",
        ),
    ],
)
def test_invalid_infill_prompts(prompt: Any, error: type[Exception], message: str, llm: LLM) -> None:
    with pytest.raises(error, match=message):
        llm.generate(prompt)


def test_invalid_prefix_or_suffix(coder: Path, fake_engine: type[fakes.Engine]) -> None:
    llm = LLM(coder)
    with pytest.raises(PromptError, match="lone surrogate"):
        llm.generate({"prompt": "a", "suffix": "\ud800"})
    with pytest.raises(
        PromptError, match="the prompt has 4005 tokens, more than the limit of 2047: max_model_len allows"
    ):
        llm.generate({"prompt": "a", "suffix": "b " * 4000})


def test_suffix_none_is_a_plain_prompt(llm: LLM) -> None:
    nothing: Any = {"prompt": "a", "suffix": None}
    assert llm.generate(nothing, SamplingParams(max_tokens=1))[0].prompt_token_ids == llm.tokenize("a")


def test_model_without_tokenizer(model_with: Callable[..., Path], fake_engine: type[fakes.Engine]) -> None:
    with pytest.raises(TokenizerError, match=r"tokenizer\.json: no such file"):
        LLM(model_with()).generate({"prompt": "a", "suffix": "b"})


def test_normalized_text_that_equals_marker_is_rejected(tmp_path: Path) -> None:
    """A text with another spelling of the token cannot be distinguished from the token, so it is an error."""
    file = tmp_path / "tokenizer.json"
    byte_level(tmp_path, QWEN)
    description = json.loads(file.read_text())
    description["normalizer"] = {"type": "Lowercase"}
    for token in description["added_tokens"]:
        token["normalized"] = True
    file.write_text(json.dumps(description))
    with pytest.raises(PromptError, match=r"must not contain the token <\|fim_prefix\|>, which separates them"):
        encode_infill(Tokenizer(tmp_path), "<|FIM_prefix|>", "")
