"""Recipes and bit allocation: formats by matrix, and the bytes and errors that they promise."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from conftest import TINY
from ferrule import (
    LLM,
    ConfigError,
    InvalidParameterError,
    ModelWriteError,
    Recipe,
    _native,
    allocate_bits,
    model_info,
    quantize,
)
from ferrule._cli import main
from ferrule._loading import WEIGHTS, read_model_files
from ferrule._params.options import EngineOptions
from gguf_convert import stored_tensors

pytestmark = pytest.mark.native

GOLDEN = Path(__file__).parent / "golden" / "logits"
PROMPT = list(range(7, 40))
FORMATS = "trellis2, int2, trellis3, int3, trellis4, int4, trellis5, int5, int6, int8"
"""Names in errors."""


def matrices(path: Path) -> set[str]:
    """Returns the names of the buffers that hold codes."""
    names = _native.PackedFile(str(path / WEIGHTS)).tensors
    return {name for name in names if ".int" in name and not name.endswith(".steps")}


def logits(model: Path) -> np.ndarray:
    with LLM(model, threads=1) as llm:
        return llm.logits(PROMPT)


def test_recipe_sets_the_format_of_each_matrix(tmp_path: Path) -> None:
    formats = {"model.layers.*.down_proj": "int8", "model.layers.1.*.down_proj.weight": "int4", "*.k_proj": "int8"}
    Recipe(formats).save(tmp_path / "recipe.toml")
    packed = quantize(TINY, tmp_path / "packed", recipe=tmp_path / "recipe.toml")
    found, usual = matrices(packed), matrices(quantize(TINY, tmp_path / "usual", format="int4"))
    down = {name for name in found if ".down." in name}
    layers = len(down)
    assert layers > 2
    assert down == {f"layers.{i}.ffn.down.0.{'int4' if i == 1 else 'int8'}" for i in range(layers)}
    # Rows of one matrix in three formats.
    assert {"layers.0.attention.q+k+v.0.int4", "layers.0.attention.q+k+v.1.int8"} <= found
    assert "layers.0.attention.q+k+v.2.int6" in found
    other = {name for name in found if ".down." not in name and "q+k+v" not in name}
    assert other == {name for name in usual if ".down." not in name and "q+k+v" not in name}
    assert model_info(packed)["quantization"] == "int4"
    assert np.isfinite(logits(packed)).all()
    with pytest.raises(InvalidParameterError, match="quantization must be auto or int4, the format in which"):
        LLM(packed, quantization="int8")


def test_recipe_with_one_format_equals_that_format(tmp_path: Path) -> None:
    packed = quantize(GOLDEN / "mixtral", tmp_path / "packed", recipe=Recipe({"*": "int8"}), threads=1)
    usual = quantize(GOLDEN / "mixtral", tmp_path / "usual", format="int8", threads=1)
    assert matrices(packed) == matrices(usual)
    assert np.array_equal(logits(packed), logits(usual))


def test_recipe_for_all_matrices_replaces_the_formats_of_its_base(tmp_path: Path) -> None:
    recipe = Recipe({"*": "int4", "*v_proj": "int6"}, base="int8")
    packed = quantize(GOLDEN / "mixtral", tmp_path / "packed", recipe=recipe, threads=1)
    assert matrices(packed) == {"embedding.0.int4", "lm_head.0.int4"} | {
        f"layers.{layer}.{name}"
        for layer in range(3)
        for name in (
            "attention.q+k+v.0.int4",
            "attention.q+k+v.1.int6",
            "attention.output.0.int4",
            *(f"ffn.experts.{expert}.{part}.0.int4" for expert in range(6) for part in ("gate+up", "down")),
        )
    }


def test_rows_of_a_tensor_have_several_formats(tmp_path: Path) -> None:
    rows = model_info()["vocab_size"]
    formats = {"model.embed_tokens": "int4", "*.embed_tokens.weight[0:32]": "int8", f"*embed_tokens[48:{rows}]": "int3"}
    packed = quantize(TINY, tmp_path / "packed", recipe=Recipe({"*": "int8", **formats}))
    embedding = {name for name in matrices(packed) if name.startswith("embedding.")}
    assert embedding == {f"embedding.{band}.{format_}" for band, format_ in enumerate(("int8", "int4", "int3"))}
    exact, found = logits(TINY), logits(packed)
    errors = [np.mean((exact - found)[:, part] ** 2) for part in (slice(32), slice(32, 48), slice(48, None))]
    assert errors[0] < 0.5 * errors[1] < 0.5 * errors[2]
    with pytest.raises(
        ConfigError, match=rf"rows of .*\[0:{rows + 16}\].* must be a range \[first:end\] of the {rows}"
    ):
        quantize(TINY, tmp_path / "out", recipe=Recipe({f"*.embed_tokens[0:{rows + 16}]": "int3"}))


def test_likely_tokens_get_more_bits() -> None:
    """Tests that the rows of an embedding and of an lm_head have formats by the probabilities of their tokens."""
    allocation = allocate_bits(None, 4.25)
    bands = [m for m in allocation.matrices if m.tensor.startswith("model.embed_tokens[")]
    assert len(bands) > 1
    bounds = [tuple(map(int, m.tensor[len("model.embed_tokens[") : -1].split(":"))) for m in bands]
    assert [first for first, _ in bounds] == [0, *(end for _, end in bounds[:-1])]
    assert bounds[-1][1] == model_info()["vocab_size"]
    bits = [8 * m.bytes / m.weights for m in bands]
    assert bits[0] > sum(m.bytes for m in bands) * 8 / sum(m.weights for m in bands)


def test_calibration_uses_the_formats_of_a_recipe(tmp_path: Path) -> None:
    recipe = Recipe({"*.up_proj": "int6"})
    sequences = [list(range(3, 67)), list(range(70, 134))]
    case = GOLDEN / "llama"
    plain = quantize(case, tmp_path / "plain", recipe=recipe)
    calibrated = quantize(case, tmp_path / "calibrated", recipe=recipe, calibrate=sequences)
    assert matrices(plain) == matrices(calibrated)
    assert any(name.endswith("gate+up.1.int6") for name in matrices(calibrated))
    assert not np.array_equal(logits(plain), logits(calibrated))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('base = "bf16"', "base must be one of int8, int4, got 'bf16'"),
        ("base = 4", "base must be one of int8, int4, got 4"),
        ("[formats]", "base is missing; it must be one of int8, int4"),
        ('base = "int4"\nformat = {}', "unknown key 'format'; a recipe has base and [formats]"),
        ('base = "int4"\nformats = 1', "formats must be a table of tensor names, got 1"),
        ('base = "int4"\n[formats]\n"a.b" = 4', 'format of "a.b" must be a string, got 4'),
        (
            'base = "int4"\n[formats]\n"*" = "int7"',
            f'format of "*" must be one of {FORMATS}, got "int7"',
        ),
        (
            'base = "int4"\n[formats]\n"*" = "bf16"',
            f'format of "*" must be one of {FORMATS}, got "bf16"',
        ),
        ('base = "int4"\n[formats]\n"*" = "int8"\n"x.*" = "int8"', '"x.*" must match a quantized matrix of the model'),
        ('base = "int4"\n[formats]\n"*norm*" = "int8"', '"*norm*" must match a quantized matrix of the model'),
        ("base = ", "recipe is not valid TOML (Invalid value (at end of document))"),
        ("a.b = \xff", "recipe is not valid TOML"),
        pytest.param("a = " + 5000 * "1", "recipe is not valid TOML (Exceeds the limit", id="digits"),
    ],
)
def test_faulty_recipes_name_file_key_and_value(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "r.toml"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError) as error:
        quantize(TINY, tmp_path / "out", recipe=path)
    assert str(error.value).startswith(f"{path}: {message}")
    assert not (tmp_path / "out").exists()


def test_any_name_can_be_saved_and_read(tmp_path: Path) -> None:
    characters = "".join(map(chr, range(0x250))) + "\u2028\uffff\U0001f98a"
    recipe = Recipe({characters: "int4", "*": "int8"}, "int8", str(tmp_path / "r.toml"))
    recipe.save(recipe.name)
    assert Recipe.read(recipe.name) == recipe


def test_recipe_files_that_cannot_be_read_or_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.toml: cannot be read: No such file"):
        quantize(TINY, tmp_path / "out", recipe=tmp_path / "none.toml")
    with pytest.raises(ModelWriteError, match="cannot be written"):
        Recipe({}).save(tmp_path)
    with pytest.raises(ModelWriteError, match="a lone surrogate in a name"):
        Recipe({"\ud800": "int4"}).save(tmp_path / "recipe.toml")
    with pytest.raises(InvalidParameterError, match="format must be None with recipe"):
        quantize(TINY, tmp_path / "out", recipe=Recipe({}), format="int8")


def test_tensors_whose_rows_cannot_differ_are_named(tmp_path: Path) -> None:
    config = json.loads((GOLDEN / "llama" / "config.json").read_text()) | {"head_dim": 8, "num_key_value_heads": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    spec, options = read_model_files(tmp_path).spec.to_json(), EngineOptions(quantization="int4").to_json()
    arguments = (spec, None, options, str(tmp_path / "out"), {}, None, None)
    message = r'r: "model\.layers\.0\.self_attn\.k_proj" must have the format of ".*v_proj" \(int6\), got int4: both'
    with pytest.raises(ConfigError, match=message):
        _native.pack(*arguments, ("r", [("*.k_proj", "int4")]))
    _native.pack(*arguments, ("r", [("*.k_proj", "int6"), ("*.q_proj", "int6")]))


@pytest.mark.parametrize(
    ("case", "budgets"), [("gpt2", (4.5, 5.5, 7)), ("mixtral", (5, 6.5, 8)), ("deepseek_v3", (5.5, 7, 9))]
)
def test_allocation_fits_the_budget(case: str, budgets: tuple[float, ...], tmp_path: Path) -> None:
    """Tests fused tensors, experts, and tensors from which several matrices are made. The matrices are so narrow that
    the padding of their rows takes most of the bits."""
    allocations = [allocate_bits(GOLDEN / case, bits) for bits in budgets]
    assert all(allocation.bits <= bits for allocation, bits in zip(allocations, budgets, strict=True))
    losses = [sum(matrix.loss for matrix in allocation.matrices) for allocation in allocations]
    assert losses[0] > losses[1] > losses[2]
    allocation = allocations[-1]
    packed = quantize(GOLDEN / case, tmp_path / "packed", recipe=allocation.recipe())
    assert model_info(packed)["weight_bytes"] <= allocation.bytes


def test_calibration_changes_errors_and_formats(tmp_path: Path) -> None:
    sequences = [list(range(first, first + 64)) for first in (3, 70, 150, 200)]
    case = GOLDEN / "llama"
    plain, calibrated = allocate_bits(case, 6), allocate_bits(case, 6, calibrate=sequences)
    assert all(allocation.bits <= 6 for allocation in (plain, calibrated))
    others = {matrix.tensor: matrix for matrix in calibrated.matrices}
    pairs = [(matrix, others[matrix.tensor]) for matrix in plain.matrices if matrix.tensor in others]
    same = [(a, b) for a, b in pairs if a.format == b.format]
    assert 1 < len(same) < len(plain.matrices)
    # The inputs of an embedding are tokens.
    assert all(b.tensor.startswith("model.embed_tokens") for a, b in same if a.error == b.error)
    # The inputs of a layer are correlated, and GPTQ keeps most errors out of their directions.
    assert sum(b.error for _, b in same) < 0.9 * sum(a.error for a, _ in same)
    packed = quantize(case, tmp_path / "packed", recipe=calibrated.recipe(), calibrate=sequences)
    assert model_info(packed)["weight_bytes"] <= calibrated.bytes
    assert allocate_bits(case, 6, calibrate=sequences, threads=1) == calibrated
    with pytest.raises(InvalidParameterError, match=r"calibrate\[0\]\[1\] must be an integer from 0 to \d+, got -1"):
        allocate_bits(case, 6, calibrate=[[1, -1]])


def test_matrices_that_predictions_depend_on_get_more_bits(tmp_path: Path) -> None:
    """Tests that the allocation finds a planted matrix, which has the same relative errors as others of its kind."""
    case = tmp_path / "planted"
    shutil.copytree(GOLDEN / "llama", case)
    weights = dict(stored_tensors(case / "model.safetensors"))
    down = "model.layers.{}.mlp.down_proj.weight"
    weights[down.format(0)] *= 8
    weights[down.format(1)] *= 0.01
    save_file(weights, case / "model.safetensors")
    for sequences in (None, [list(range(first, first + 64)) for first in (3, 70, 150)]):
        bytes_ = {m.tensor: m.bytes for m in allocate_bits(case, 6, calibrate=sequences).matrices}
        assert bytes_[down.format(0).removesuffix(".weight")] > bytes_[down.format(1).removesuffix(".weight")]


BITS = r"bits must be a number from 2\.\d\d to 8\.\d\d for this model and these formats,"
"""Beginning of the error for bits that no formats have."""


def test_allocation_chooses_from_the_given_formats() -> None:
    case, formats = GOLDEN / "llama", ["int4", "int3", "int8"]
    allocation = allocate_bits(case, 6, formats=formats)
    assert allocation.bits <= 6
    assert {matrix.format for matrix in allocation.matrices} == {"int3", "int4", "int8"}
    assert sum(m.loss for m in allocate_bits(case, 6).matrices) < sum(m.loss for m in allocation.matrices)
    expected = f"formats must be some of {FORMATS}, got"
    for wrong, shown in ([], "''"), (["int4", "q4_0"], "'q4_0'"):
        with pytest.raises(InvalidParameterError, match=f"{expected} {shown}"):
            allocate_bits(case, 6, formats=wrong)
    for names in (4, [4]):
        with pytest.raises(InvalidParameterError, match="formats must be a sequence of names, got"):
            allocate_bits(case, 6, formats=names)  # pyright: ignore[reportArgumentType]
    with pytest.raises(
        InvalidParameterError, match=r"bits must be a number from 8\.\d\d to 8\.\d\d for this model and"
    ):
        allocate_bits(None, 4, formats=["int8"])


def test_bits_out_of_range_are_refused_before_anything_is_measured() -> None:
    calls: list[int] = []
    with pytest.raises(InvalidParameterError, match=f"{BITS} got 2"):
        allocate_bits(None, 2, calibrate=[list(range(64))], progress=lambda done, _: calls.append(done))
    assert not calls


def test_allocation_of_embedded_model(tmp_path: Path) -> None:
    int4 = model_info(quantization="int4")["weight_bytes"]
    allocation = allocate_bits(None, 8 * int4 / model_info()["parameters"])
    packed = quantize(None, tmp_path / "packed", recipe=allocation.recipe())
    assert 0.99 * int4 < model_info(packed)["weight_bytes"] == allocation.bytes <= int4
    assert {matrix.format for matrix in allocation.matrices} >= {"trellis4", "int6"}
    errors = {
        "trellis2": (5e-2, 2e-1),
        "int2": (5e-2, 2e-1),
        "trellis3": (1e-2, 5e-2),
        "int3": (1e-2, 5e-2),
        "trellis4": (1e-3, 2e-2),
        "int4": (1e-3, 2e-2),
        "trellis5": (5e-4, 5e-3),
        "int5": (5e-4, 5e-3),
        "int6": (5e-5, 1e-3),
        "int8": (1e-6, 1e-4),
    }
    for matrix in allocation.matrices:
        least, most = errors[matrix.format]
        assert least < matrix.error < most, matrix
    with pytest.raises(InvalidParameterError, match=rf"{BITS} got 2.0$"):
        allocate_bits(None, 2)
    with pytest.raises(InvalidParameterError, match=rf"{BITS} got 9.0$"):
        allocate_bits(None, 9)
    with pytest.raises(InvalidParameterError, match="bits must be a number > 0 and <= 32, got nan"):
        allocate_bits(None, float("nan"))
    with pytest.raises(InvalidParameterError, match="model must be an unpacked model"):
        allocate_bits(packed, 6)


def test_quantize_command_saves_and_applies_recipes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, recipe, model = tmp_path / "out", tmp_path / "recipe.toml", str(GOLDEN / "mixtral")
    arguments = ["quantize", model, "--bits", "6", "--report", "--save-recipe", str(recipe), "-o", str(out)]
    assert main(arguments) == 0
    printed = capsys.readouterr()
    assert " bits per weight, " in printed.err
    lines = printed.out.splitlines()
    assert lines[0].split() == ["tensor", "format", "bits", "bytes", "error", "loss"]
    assert len(lines) == 2 + len(Recipe.read(recipe).formats)
    assert lines[-1].startswith("all matrices")
    again = tmp_path / "again"
    assert main(["quantize", model, "--recipe", str(recipe), "-o", str(again)]) == 0
    assert (out / WEIGHTS).read_bytes() == (again / WEIGHTS).read_bytes()
    few = ["--formats", "int8, int4", "--save-recipe", str(tmp_path / "few.toml"), "-o", str(tmp_path / "few")]
    assert main(["quantize", model, "--bits", "6", *few]) == 0
    assert set(Recipe.read(tmp_path / "few.toml").formats.values()) <= {"int4", "int8"}
    capsys.readouterr()
    # The output is checked before anything is measured or written.
    arguments = ["quantize", model, "--bits", "2", "--save-recipe", str(tmp_path / "new.toml"), "-o", str(out)]
    assert main(arguments) == 2
    assert "output must be empty, unless overwrite is true" in capsys.readouterr().err
    assert not (tmp_path / "new.toml").exists()
    for wrong, message in [
        (["--bits", "6", "--recipe", str(recipe)], "--bits cannot be used with --recipe"),
        (["--bits", "6", "--format", "int8"], "--format cannot be used with --bits"),
        (["--report"], "--report needs --bits"),
        (["--formats", "int4,int8"], "--formats needs --bits"),
        (["--recipe", str(recipe), "--save-recipe", "x"], "--save-recipe needs --bits"),
        (["--bits", "2"], "bits must be a number from "),
        (["--bits", "6", "--formats", "int4,q4_0"], "formats must be some of "),
    ]:
        assert main(["quantize", model, "-o", str(tmp_path / "wrong"), *wrong]) == 2
        assert message in capsys.readouterr().err
