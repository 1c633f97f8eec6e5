"""Prompts with images: features and log-probabilities of transformers, and bits that depend on nothing else."""

from __future__ import annotations

import asyncio
import base64
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from conftest import TINY
from ferrule import LLM, AsyncLLM, CompletionOutput, ImageError, PromptError, SamplingParams
from ferrule._cli import main
from ferrule._text.prompt import TextPrompt, TokensPrompt
from ferrule._vision.images import read_image
from ferrule._vision.model import PreparedImage
from ferrule._vision.processors import ProcessedImage
from ferrule._vision.processors.idefics3 import Idefics3Processor

pytestmark = pytest.mark.native

GOLDEN = Path(__file__).parents[1] / "golden" / "vision"
CASES = ("smolvlm", "idefics3")
GREEDY = SamplingParams(temperature=0, max_tokens=12, logprobs=20, ignore_eos=True)
THREE = SamplingParams(n=3, temperature=0, max_tokens=12, logprobs=20, ignore_eos=True)


def load(case: str, **options: Any) -> LLM:
    options.setdefault("quantization", "f32")
    return LLM(GOLDEN / case, **options)


def images(case: str) -> list[Image.Image]:
    return [read_image(GOLDEN / case / f"image{index}.png", "image") for index in (0, 1)]


def prompt(case: str, *pictures: object) -> TextPrompt:
    """The prompt of a case, with its own images unless others are given."""
    text = str(np.load(GOLDEN / case / "golden.npz")["prompt"])
    return {"prompt": text, "multi_modal_data": {"image": list(pictures) or images(case)}}


def patches_of(pixels: NDArray[np.float32], processor: Idefics3Processor) -> NDArray[np.float32]:
    """Patches [tiles, patches, values], block by block, of pixels [tiles, 3, side, side]."""
    patch, block = processor.patch, processor.block
    blocks = processor.tile // patch // block
    parts = pixels.reshape(len(pixels), 3, blocks, block, patch, blocks, block, patch)
    return np.ascontiguousarray(parts.transpose(0, 2, 5, 3, 6, 1, 4, 7).reshape(len(pixels), -1, 3 * patch**2))


def golden_image(llm: LLM, pixels: NDArray[np.float32]) -> PreparedImage:
    """All tiles of a case, as transformers processed them, as one image."""
    vision = llm._vision
    assert vision is not None
    processor = vision.processor
    assert isinstance(processor, Idefics3Processor)
    patches = patches_of(pixels, processor)
    processed = processor.process(Image.new("RGB", (8, 8)))
    return PreparedImage(ProcessedImage("", patches, processed.positions, len(patches) * processor.tile_tokens), vision)


def bits(output: CompletionOutput) -> list[tuple[int, list[tuple[int, str]]]]:
    """Tokens and log-probabilities for bitwise comparison."""
    assert output.logprobs is not None
    rows = [[(token, entry.logprob.hex()) for token, entry in row.items()] for row in output.logprobs]
    return list(zip(output.token_ids, rows, strict=True))


@pytest.mark.parametrize("case", CASES)
def test_features_logprobs_and_greedy_tokens_are_those_of_transformers(case: str) -> None:
    golden = np.load(GOLDEN / case / "golden.npz")
    with load(case) as llm:
        image = golden_image(llm, golden["pixel_values"][0])
        features = np.frombuffer(image.features(), np.float32).reshape(golden["image_features"].shape)
        assert np.abs(features - golden["image_features"]).max() < 1e-4
        token_ids = [int(token) for token in golden["input_ids"]]
        params = SamplingParams(temperature=0, max_tokens=12, prompt_logprobs=20, ignore_eos=True)
        given: TokensPrompt = {"prompt_token_ids": token_ids, "multi_modal_data": {"image": [image]}}
        output = llm.generate(given, params)[0]
        assert list(output.outputs[0].token_ids) == golden["greedy"].tolist()
        assert output.prompt_logprobs is not None
        compared = 0
        for row, logits in zip(golden["rows"], golden["logits"], strict=True):
            if row + 1 < len(token_ids):
                expected = logits - np.log(np.exp(logits.astype(np.float64)).sum())
                found = output.prompt_logprobs[row + 1]
                assert found is not None
                assert all(abs(entry.logprob - expected[token]) < 1e-4 for token, entry in found.items())
                compared += 1
        assert compared > 10


@pytest.mark.parametrize("case", CASES)
def test_pixels_of_this_package_give_the_same_tokens(case: str) -> None:
    golden = np.load(GOLDEN / case / "golden.npz")
    with load(case) as llm:
        output = llm.generate(prompt(case), GREEDY)[0]
    assert list(output.prompt_token_ids) == golden["input_ids"].tolist()
    assert list(output.outputs[0].token_ids) == golden["greedy"].tolist()


@pytest.mark.parametrize("formats", [("f32", "auto"), ("int8", "f16"), ("int4", "int8")])
def test_bits_do_not_depend_on_chunks_threads_neighbours_or_the_cache(formats: tuple[str, str]) -> None:
    case = "idefics3"
    first, second = images(case)
    prompts: list[Any] = [prompt(case), prompt(case, second, first), {"prompt": "Words without an image."}]
    options: dict[str, Any] = {"quantization": formats[0], "kv_cache_dtype": formats[1]}
    with load(case, threads=1, enable_prefix_caching=False, **options) as llm:
        alone = [bits(llm.generate(each, GREEDY)[0].outputs[0]) for each in prompts]
    assert alone[0] != alone[1]
    for tokens, threads in ((1, 2), (16, 1), (512, 2)):
        with load(case, threads=threads, max_num_batched_tokens=tokens, **options) as llm:
            together = llm.generate(prompts, GREEDY)
            assert [bits(output.outputs[0]) for output in together] == alone
            # The second run finds the prompts in the prefix cache, but not those with the images in another order.
            again = llm.generate(prompts[0], THREE)[0]
            assert again.num_cached_tokens
            assert [bits(each) for each in again.outputs] == [alone[0]] * 3
            # The tokens before the second image are the same, also those of the first image.
            other = llm.generate(prompt(case, first, first), GREEDY)[0]
            assert 0 < (other.num_cached_tokens or 0) < again.num_cached_tokens


def test_preemption_and_speculation_keep_the_bits() -> None:
    case = "smolvlm"
    params = SamplingParams(temperature=0, max_tokens=60, logprobs=20, ignore_eos=True)
    with load(case) as llm:
        expected = bits(llm.generate(prompt(case), params)[0].outputs[0])
    with load(case, speculative_config={"method": "ngram", "num_speculative_tokens": 3}) as llm:
        assert bits(llm.generate(prompt(case), params)[0].outputs[0]) == expected
    with load(case, kv_cache_memory=200_000, enable_prefix_caching=False) as llm:
        outputs = llm.generate([prompt(case)] * 6, params)
        assert llm.metrics().preemptions > 0
        assert all(bits(output.outputs[0]) == expected for output in outputs)


def test_a_restart_finds_images_in_the_cache_on_disk(tmp_path: Path) -> None:
    case = "smolvlm"
    results: list[tuple[Any, int | None]] = []
    for _ in range(2):
        with load(case, prefix_cache_dir=tmp_path) as llm:
            output = llm.generate(prompt(case), GREEDY)[0]
            results.append((bits(output.outputs[0]), output.num_cached_tokens))
    assert results[0][0] == results[1][0]
    assert not results[0][1]
    assert results[1][1]


def test_streams_have_the_tokens_of_generate() -> None:
    case = "smolvlm"
    with load(case) as llm:
        expected = bits(llm.generate(prompt(case), GREEDY)[0].outputs[0])

    async def run() -> list[CompletionOutput]:
        async with AsyncLLM(GOLDEN / case, quantization="f32") as engine:
            return [output.outputs[0] async for output in engine.generate(prompt(case), GREEDY)]

    assert bits(asyncio.run(run())[-1]) == expected


def test_prompts_that_do_not_fit_their_images_are_refused() -> None:
    case = "smolvlm"
    first, second = images(case)
    with load(case) as llm:
        for pictures, found in (((first,), "2 placeholders for 1 images"), ((first, second, first), "for 3 images")):
            with pytest.raises(PromptError, match=found):
                llm.generate(prompt(case, *pictures), GREEDY)
        with pytest.raises(PromptError, match=r"token 263 4 times.*got 1"):
            llm.generate({"prompt_token_ids": [1, 263, 9], "multi_modal_data": {"image": first}}, GREEDY)
        with pytest.raises(ImageError, match=r"multi_modal_data.image\[1\]"):
            llm.generate(prompt(case, first, "https://example.com/a.png"), GREEDY)
        many: list[Any] = [first] * 33
        with pytest.raises(ImageError, match=r"image\[32\] must be absent: a prompt can have 32 images"):
            llm.generate({"prompt": "<image>" * 33, "multi_modal_data": {"image": many}}, GREEDY)
        with pytest.raises(PromptError, match="image or list of images"):
            llm.generate({"prompt": "?", "multi_modal_data": cast("Any", {"video": first})}, GREEDY)
        with load(case) as another, pytest.raises(ImageError, match="prepared by this model"):
            another.generate(
                llm.chat_prompt([question("?", {"type": "image", "image": first})], chat_template=TEMPLATE)
            )
        with pytest.raises(ImageError, match="path"):
            llm.chat(
                [question("?", {"type": "image", "path": str(GOLDEN / case / "image0.png")})], chat_template=TEMPLATE
            )
        with pytest.raises(PromptError, match="placeholders"):
            llm.generate("An <image> in words.", GREEDY)


def test_images_that_do_not_fit_the_context_are_refused_before_they_are_read() -> None:
    first, second = images("smolvlm")
    with load("smolvlm", max_model_len=8) as llm:
        for given in ([first, second, "not an image"], [first, second, first]):
            with pytest.raises(ImageError, match=r"image\[1\] .* the images have 8 tokens, and a prompt can have 7"):
                llm.generate({"prompt": "<image>" * 3, "multi_modal_data": {"image": given}}, GREEDY)


def test_a_model_of_text_refuses_images() -> None:
    with LLM(TINY) as llm, pytest.raises(PromptError, match="reads text only"):
        llm.generate({"prompt": "What is this?", "multi_modal_data": {"image": images("smolvlm")}}, GREEDY)


TEMPLATE = (
    "{% for message in messages %}{{ message['role'] | capitalize }}:"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}<end_of_utterance>\n{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"
)
"""Chat template in the manner of SmolVLM."""


def question(text: str, *parts: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": [*parts, {"type": "text", "text": text}]}


def url_of(file: Path) -> str:
    return "data:image/png;base64," + base64.b64encode(file.read_bytes()).decode()


def test_chat_reads_images_in_the_forms_of_openai_vllm_and_transformers() -> None:
    case = "smolvlm"
    file = GOLDEN / case / "image1.png"
    forms: list[dict[str, Any]] = [
        {"type": "image_url", "image_url": {"url": url_of(file)}},
        {"type": "image_pil", "image_pil": images(case)[1]},
        {"type": "image", "path": file},
        {"type": "image", "image": np.asarray(images(case)[1])},
    ]
    with load(case) as llm:
        text = "User:<image>What is this?<end_of_utterance>\nAssistant:"
        expected = llm.generate({"prompt": text, "multi_modal_data": {"image": images(case)[1]}}, GREEDY)[0]
        for part in forms:
            output = llm.chat([question("What is this?", part)], GREEDY, chat_template=TEMPLATE)[0]
            assert output.prompt_token_ids == expected.prompt_token_ids
            assert bits(output.outputs[0]) == bits(expected.outputs[0])
            assert output.prompt is not None
            assert output.prompt.count("<image>") == 4
        # The second turn finds the first one, with its image, in the cache.
        turns = [question("What is this?", forms[0]), {"role": "assistant", "content": "A shape."}, question("Round?")]
        cached = llm.chat(turns, GREEDY, chat_template=TEMPLATE)[0].num_cached_tokens
        assert cached is not None
        assert cached >= 32
        with pytest.raises(ImageError, match=r"messages\[0\].content\[0\].image_url.url"):
            llm.chat([question("?", {"type": "image_url", "image_url": {"url": "http://a.b"}})], chat_template=TEMPLATE)


def test_loglikelihoods_depend_on_images_and_saved_states_refuse_them() -> None:
    case = "smolvlm"
    with load(case) as llm:
        outputs = llm.generate(prompt(case), GREEDY)[0].outputs[0]
        assert outputs.logprobs is not None
        expected = outputs.logprobs[0][outputs.token_ids[0]].logprob
        found = llm.loglikelihood(prompt(case), [[outputs.token_ids[0]]])[0]
        assert found.logprob == pytest.approx(expected, abs=1e-6)
        with pytest.raises(PromptError, match="saved state holds text only"):
            llm.save_state(prompt(case))


def test_features_of_an_image_are_computed_once() -> None:
    with load("smolvlm") as llm:
        for _ in range(3):
            llm.generate(prompt("smolvlm"), GREEDY)
        vision = llm._vision
        assert vision is not None
        assert json.loads(cast("Any", vision)._tower.metrics())["computed_tokens"] == 2 * 16


FORK = """
import os, sys
from ferrule import LLM, SamplingParams
from pathlib import Path
case = Path(sys.argv[1])
llm = LLM(case, quantization="f32", threads=2)
greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
asked = [{"prompt": "<image>?", "multi_modal_data": {"image": case / f"image{index}.png"}} for index in (0, 1)]
first = llm.generate(asked[0], greedy)[0].outputs[0].token_ids
llm._vision._lock.acquire()
child = os.fork()
if child == 0:
    print(list(llm.generate(asked[1], greedy)[0].outputs[0].token_ids), flush=True)
    os._exit(0)
llm._vision._lock.release()
_, status = os.waitpid(child, 0)
print(list(llm.generate(asked[1], greedy)[0].outputs[0].token_ids), flush=True)
os._exit(os.waitstatus_to_exitcode(status))
"""


def test_a_forked_child_reads_images() -> None:
    command = [sys.executable, "-c", FORK, str(GOLDEN / "smolvlm")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    in_child, in_parent = done.stdout.splitlines()
    assert in_child == in_parent


def test_run_answers_about_images(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tmp_path / "model"
    shutil.copytree(GOLDEN / "smolvlm", model)
    (model / "chat_template.jinja").write_text(TEMPLATE)
    files = [model / "image0.png", model / "image1.png"]
    with LLM(model) as llm:
        parts = [{"type": "image", "path": file} for file in files]
        params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
        expected = llm.chat([question("Which is round?", *parts)], params)[0].outputs[0].text
    command = ["run", str(model), "Which is round?", "--temperature", "0", "-n", "6", "--ignore-eos", "--quiet"]
    chosen = [argument for file in files for argument in ("--image", str(file))]
    assert main([*command, *chosen]) == 0
    assert capsys.readouterr().out.rstrip("\n") == expected.rstrip("\n")
    for wrong, message in (
        ([*command, "--image", str(model / "none.png")], "none.png"),
        ([*command, "--image", str(model / "config.json")], "config.json must be a PNG"),
        ([*command, *chosen, "--raw"], "--image requires a model with a chat template"),
        (["run", "Once", *chosen], "--image requires a model with a chat template"),
    ):
        assert main(wrong) != 0
        assert message in capsys.readouterr().err
