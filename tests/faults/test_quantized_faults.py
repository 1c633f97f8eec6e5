"""Loading quantized checkpoints with inconsistent tensors raises a typed error in time and does not end the process.

The tests of the reader (rust/formats/tests/quantized_faults.rs) cover the tensors of each method.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from faults.isolated import assert_refused, folder_bytes, run
from quantized_files import read, stored, write

GOLDEN = Path(__file__).parents[1] / "golden" / "quantized"
PROJECTION = "model.layers.1.mlp.down_proj"

WARM_UP = """
    from ferrule import LLM
    LLM(arguments[1], threads=1)
"""
LOAD = "LLM(arguments[0], threads=1)"


def configure(folder: Path, **changes: Any) -> None:
    """Changes the quantization config; None removes a field."""
    config = json.loads((folder / "config.json").read_text())
    changed = config["quantization_config"] | changes
    config["quantization_config"] = {key: value for key, value in changed.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))


def change(folder: Path, part: str, values: np.ndarray[Any, Any] | None) -> None:
    """Replaces or removes a tensor of a projection."""
    tensors = read(folder)
    del tensors[f"{PROJECTION}.{part}"]
    if values is not None:
        tensors[f"{PROJECTION}.{part}"] = stored(values)
    write(folder, tensors)


def unknown_method(folder: Path) -> None:
    configure(folder, quant_method="exl3")


def five_bits(folder: Path) -> None:
    configure(folder, bits=5)


def other_bits(folder: Path) -> None:
    configure(folder, bits=8)


def other_groups(folder: Path) -> None:
    configure(folder, group_size=64)


def wrong_method(folder: Path) -> None:
    configure(folder, quant_method="awq", version="gemm")


def nothing_said(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))


def no_zero_points(folder: Path) -> None:
    change(folder, "qzeros", None)


def zero_points_of_another_shape(folder: Path) -> None:
    change(folder, "qzeros", np.zeros((8, 15), np.int32))


def group_out_of_range(folder: Path) -> None:
    change(folder, "g_idx", np.array([*range(8)] * 31 + [8] * 8, np.int32))


def group_below_zero(folder: Path) -> None:
    change(folder, "g_idx", np.full(256, -1, np.int32))


def scale_not_a_number(folder: Path) -> None:
    scales = np.ones((8, 128), np.float16)
    scales[7, 127] = np.nan
    change(folder, "scales", scales)


def fewer_inputs(folder: Path) -> None:
    change(folder, "qweight", np.zeros((16, 128), np.int32))


def huge_and_empty(folder: Path) -> None:
    change(folder, "qweight", np.zeros((1 << 60, 0), np.int32))


def infinite_scale_of_a_block(folder: Path) -> None:
    change(folder, "weight_scale_inv", np.array([[1, 2, 3, 4], [5, 6, np.inf, 8]], np.float32))


def scale_of_a_block_missing(folder: Path) -> None:
    change(folder, "weight_scale_inv", None)


def other_blocks(folder: Path) -> None:
    configure(folder, weight_block_size=[32, 32])


def short_table(folder: Path) -> None:
    change(folder, "weight.quant_map", np.zeros(15, np.float32))


def state_of_another_shape(folder: Path) -> None:
    state = json.dumps({"blocksize": 64, "shape": [128, 1 << 60]}).encode()
    change(folder, "weight.quant_state.bitsandbytes__nf4", np.frombuffer(state, np.uint8))


def fp4_for_nf4(folder: Path) -> None:
    configure(folder, bnb_4bit_quant_type="fp4")


def shape_of_other_inputs(folder: Path) -> None:
    change(folder, "weight_shape", np.array([128, 264]))


def zero_points_missing(folder: Path) -> None:
    groups = {"group_0": {"weights": {"num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": False}}}
    configure(folder, config_groups=groups)


def no_such_kind(folder: Path) -> None:
    configure(folder, config_groups={})


FAULTS: list[tuple[str, Callable[[Path], None], str, list[str]]] = [
    ("gptq_asym_actorder", unknown_method, "UnsupportedModelError", ["'exl3'", "gptq, awq, compressed-tensors, fp8"]),
    ("gptq_asym_actorder", five_bits, "UnsupportedModelError", ["bits must be 2 or 3 or 4 or 8, got 5"]),
    ("gptq_asym_actorder", other_bits, "ModelFileError", ["scales", "must be [2, 128]"]),
    ("gptq_asym_actorder", other_groups, "ModelFileError", ["scales", "must be [2, 128]"]),
    ("gptq_asym_actorder", wrong_method, "ModelFileError", ["scales", "must be"]),
    ("gptq_asym_actorder", nothing_said, "ModelFileError", ["has no tensor", "_proj.weight", "nearest name"]),
    ("gptq_asym_actorder", no_zero_points, "ModelFileError", [f'"{PROJECTION}.qzeros"', "GPTQ weight"]),
    ("gptq_asym_actorder", zero_points_of_another_shape, "ModelFileError", ["must be [8, 16], got [8, 15]"]),
    ("gptq_asym_actorder", group_out_of_range, "ModelFileError", ["element 248", "g_idx", "must be a group", "got 8"]),
    ("gptq_asym_actorder", group_below_zero, "ModelFileError", ["element 0", "g_idx", "must be a group", "got -1"]),
    (
        "gptq_asym_actorder",
        scale_not_a_number,
        "ModelFileError",
        ["element 1023", f'"{PROJECTION}.scales" must be finite, got NaN'],
    ),
    ("gptq_asym_actorder", fewer_inputs, "ModelFileError", [f'"{PROJECTION}.scales"', "must be [4, 128]"]),
    ("gptq_asym_actorder", huge_and_empty, "ModelFileError", [f'"{PROJECTION}.qweight"', "without a remainder"]),
    (
        "fp8_block",
        infinite_scale_of_a_block,
        "ModelFileError",
        ["element 6", "weight_scale_inv", "must be finite, got inf"],
    ),
    ("fp8_block", scale_of_a_block_missing, "ModelFileError", [f'"{PROJECTION}.weight_scale_inv"', "FP8 weight"]),
    ("fp8_block", other_blocks, "ModelFileError", ["weight_scale_inv", "must be"]),
    ("bnb_nf4", short_table, "ModelFileError", ["quant_map", "must be [16], got [15]"]),
    ("bnb_nf4", state_of_another_shape, "ModelFileError", [f'"{PROJECTION}.weight"', "[128, 1152921504606846976]"]),
    ("bnb_nf4", fp4_for_nf4, "ModelFileError", ["quant_state.bitsandbytes__fp4", "bitsandbytes weight"]),
    ("ct_int4_g32", shape_of_other_inputs, "ModelFileError", ["weight_packed", "[128, 264 * 4 / 32]"]),
    ("ct_int4_g32", zero_points_missing, "ModelFileError", ["_proj.weight_zero_point", "compressed-tensors weight"]),
    ("ct_int8_channel", no_such_kind, "ModelFileError", ["has dtype I8", "describes no weights"]),
]


@pytest.mark.native
@pytest.mark.parametrize(
    ("case", "break_model", "error", "fragments"),
    [pytest.param(*fault, id=fault[1].__name__) for fault in FAULTS],
)
def test_inconsistent_quantized_tensors_are_a_typed_error(
    case: str, break_model: Callable[[Path], None], error: str, fragments: list[str], tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(GOLDEN / case, folder)
    break_model(folder)
    outcome = run(LOAD, str(folder), str(GOLDEN / case), warm_up=WARM_UP)
    assert_refused(outcome, error, ["model", *fragments], file_bytes=folder_bytes(folder))
