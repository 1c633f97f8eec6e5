"""Spellings of config.json, and errors for invalid values."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from faults import isolated
from ferrule import ConfigError, ModelFileError, ModelNotFoundError, UnsupportedModelError
from ferrule._loading import read_model_files
from ferrule.archs import REGISTRY, model_spec
from ferrule.archs.config import MAX_SIZE, Config
from ferrule.archs.spec import (
    DynamicScaling,
    HeadProjections,
    LinearScaling,
    Llama3Scaling,
    ModelSpec,
    NoScaling,
    Scaling,
    YarnScaling,
)

GOLDEN = Path(__file__).parent / "golden" / "logits"

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "vocab_size": 320,
}


def spec_of(**changes: Any) -> ModelSpec:
    """The spec of a small Llama with other values; None leaves a field out."""
    values = {key: value for key, value in (LLAMA | changes).items() if value is not None}
    return model_spec(Config(values, Path("model/config.json")))


FAULTS: list[tuple[str, dict[str, Any], str]] = [
    ("heads 0", {"num_attention_heads": 0}, "num_attention_heads must be an integer from 1"),
    (
        "kv heads",
        {"num_key_value_heads": 3},
        "num_key_value_heads must be a divisor of num_attention_heads (4), got 3",
    ),
    ("more kv heads", {"num_key_value_heads": 8}, "num_key_value_heads must be a divisor"),
    ("negative width", {"hidden_size": -64}, "hidden_size must be an integer from 1"),
    ("negative layers", {"num_hidden_layers": -1}, "num_hidden_layers must be an integer from 1 to 4096, got -1"),
    (
        "1e9 layers",
        {"num_hidden_layers": 10**9},
        "num_hidden_layers must be an integer from 1 to 4096, got 1000000000",
    ),
    (
        "huge vocabulary",
        {"vocab_size": 2**63},
        "vocab_size must be an integer from 1 to 268435456, got 9223372036854775808",
    ),
    (
        "heads that do not divide",
        {"hidden_size": 65},
        "hidden_size must be a multiple of num_attention_heads (4)",
    ),
    ("odd head", {"head_dim": 15}, "such that an even number of elements is rotated (not 15), got 15"),
    ("text for a number", {"hidden_size": "64"}, "hidden_size must be an integer from 1 to 268435456, got '64'"),
    (
        "boolean for a number",
        {"num_hidden_layers": True},
        "num_hidden_layers must be an integer from 1 to 4096, got True",
    ),
    ("missing", {"intermediate_size": None}, "intermediate_size must be an integer from 1"),
    ("eps", {"rms_norm_eps": 0}, "rms_norm_eps must be a finite number above 0, got 0"),
    ("activation", {"hidden_act": "mish"}, "hidden_act must be one of silu,"),
    ("tie", {"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false, got 'yes'"),
    (
        "experts",
        {"architectures": ["MixtralForCausalLM"], "num_local_experts": 1 << 28},
        "num_local_experts must be an integer from 1 to 65536, got 268435456",
    ),
    (
        "experts of a list",
        {
            "architectures": ["HunYuanMoEV1ForCausalLM"],
            "num_experts": [8, 1 << 28, 8],
        },
        "num_experts must be a list of integers from 1 to 65536, got [8, 268435456, 8]",
    ),
    (
        "experts of all layers",
        {"architectures": ["MixtralForCausalLM"], "num_local_experts": 1 << 16},
        "in separate tensors (not 196608), got 3",
    ),
    (
        "heads of all layers",
        {
            "architectures": ["StableLmForCausalLM"],
            "qk_layernorm": True,
            "hidden_size": 1 << 14,
            "num_hidden_layers": 4096,
            "num_attention_heads": 1024,
        },
        "in separate tensors (not 4194304), got 4096",
    ),
    ("unknown", {"architectures": ["LlamaForCasualLM"]}, "supported (nearest first): LlamaForCausalLM, "),
    ("not a list", {"architectures": "LlamaForCausalLM"}, "architectures must be a list"),
    ("nothing", {"architectures": None, "model_type": None}, "model_type must be a string, but it is missing"),
    (
        "factor 0",
        {"rope_scaling": {"type": "linear", "factor": 0}},
        "rope_scaling.factor must be a finite number above 0, got 0",
    ),
    ("part of a head", {"partial_rotary_factor": 0.5}, "partial_rotary_factor must be 1"),
    (
        "factor NaN",
        {"rope_scaling": {"type": "linear", "factor": math.nan}},
        "rope_scaling.factor must be a finite number above 0, got nan",
    ),
    (
        "factor missing",
        {"rope_scaling": {"rope_type": "dynamic"}},
        "rope_scaling.factor must be a finite number from 1, but it is missing",
    ),
    (
        "factor below 1",
        {"rope_scaling": {"rope_type": "dynamic", "factor": 0.5}},
        "rope_scaling.factor must be a finite number from 1, got 0.5",
    ),
    (
        "infinite",
        {"rope_parameters": {"rope_type": "yarn", "factor": math.inf}},
        "rope_parameters.factor must be a finite number above 0, got inf",
    ),
    (
        "mscale",
        {"rope_scaling": {"rope_type": "yarn", "factor": math.e, "mscale": 1, "mscale_all_dim": -10}},
        "rope_scaling.mscale_all_dim must be a finite number above 0, got -10",
    ),
    (
        "infinite mscale",
        {"rope_scaling": {"rope_type": "yarn", "factor": 1e300, "mscale": 1.7e308, "mscale_all_dim": 1}},
        "rope_scaling.mscale must be such that the attention factor is finite and above 0 (not inf), got 1.7e+308",
    ),
    (
        "number of 401 digits",
        {"rope_scaling": {"rope_type": "longrope", "short_factor": [10**400] * 8, "long_factor": [1] * 8}},
        "rope_scaling.short_factor must be a list of finite numbers above 0",
    ),
    ("theta", {"rope_theta": -1}, "rope_theta must be a finite number above 1, got -1"),
    (
        "type",
        {"rope_scaling": {"type": "ntk", "factor": 2}},
        "rope_scaling.type must be one of default, mrope, linear, dynamic, yarn, llama3, longrope",
    ),
    ("no object", {"rope_scaling": 3}, "rope_scaling must be an object, got 3"),
    (
        "llama3 factors",
        {"rope_scaling": {"rope_type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 1}},
        "rope_scaling.high_freq_factor must be above low_freq_factor (4), got 1",
    ),
]


@pytest.mark.parametrize(("name", "changes", "message"), FAULTS, ids=[name for name, _, _ in FAULTS])
def test_invalid_values(name: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        spec_of(**changes)
    assert "model/config.json: " in str(caught.value)
    assert message in str(caught.value)


WARM_UP = "from pathlib import Path; from ferrule._loading import read_model_files"
READ = "read_model_files(Path(arguments[0]))"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "not valid JSON"),
        ("[1]", "content must be an object"),
        ("[" * 100_000, "not valid JSON"),
        ('{"a": ' * 100_000, "not valid JSON"),
        ("{}", "model_type must be a string, but it is missing"),
        (
            json.dumps(LLAMA | {"num_hidden_layers": 10**9}),
            "num_hidden_layers must be an integer from 1 to 4096, got 1000000000",
        ),
        (
            json.dumps(LLAMA | {"architectures": ["MixtralForCausalLM"], "num_local_experts": 1 << 28}),
            "num_local_experts must be an integer from 1 to 65536, got 268435456",
        ),
        (
            json.dumps(
                LLAMA
                | {"architectures": ["MixtralForCausalLM"], "num_local_experts": 1 << 16, "num_hidden_layers": 4096}
            ),
            "separate tensors (not 268435456)",
        ),
        (
            json.dumps(
                LLAMA
                | {
                    "architectures": ["Qwen3MoeForCausalLM"],
                    "num_hidden_layers": 4096,
                    "num_experts": 16,
                    "moe_intermediate_size": 8,
                    "mlp_only_layers": [4096] * 200_000,
                    "vocab_size": 0,
                }
            ),
            "vocab_size must be an integer from 1 to 268435456, got 0",
        ),
        (json.dumps(LLAMA | {"architectures": ["NoSuchModel"]}), "unsupported architecture 'NoSuchModel'"),
        (
            json.dumps(LLAMA | {"rope_scaling": {"type": "linear", "factor": math.nan}}),
            "rope_scaling.factor must be a finite number above 0, got nan",
        ),
        ("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n", "git lfs pull"),
    ],
    ids=[
        *("empty", "list", "deep list", "deep object", "nothing", "layers", "experts", "experts of all layers"),
        *("dense layers", "unknown", "nan", "lfs"),
    ],
)
def test_hostile_config_files(content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(content)
    outcome = isolated.run(READ, str(tmp_path), warm_up=WARM_UP)
    error = (
        "ModelFileError" if "lfs" in message else "UnsupportedModelError" if "unsupported" in message else "ConfigError"
    )
    fragments = [str(tmp_path / "config.json"), message]
    isolated.assert_refused(outcome, error, fragments, file_bytes=len(content))


def test_oversized_file_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "config.json").open("wb") as file:
        file.truncate(1 << 32)
    with pytest.raises(ModelFileError, match="4294967296 bytes; the limit is 16777216"):
        read_model_files(tmp_path)


def test_pipe_is_rejected(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(ModelFileError, match="not a regular file"):
        read_model_files(tmp_path)


def test_directory_without_config(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"config.json is missing"):
        read_model_files(tmp_path)


def test_unknown_architecture_error_lists_nearest_first() -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        spec_of(architectures=["Qwen3ForCausalML"])
    names = str(caught.value).split("(nearest first): ")[1]
    assert names.startswith("Qwen3ForCausalLM, ")
    assert all(f"{architecture.name}{architecture.endings[0]}" in names for architecture in REGISTRY)


def test_custom_code_of_checkpoint_is_not_run(model_with: Callable[..., Path], tmp_path: Path) -> None:
    """auto_map is ignored, whether or not the class is known."""
    model_with({"auto_map": {"AutoModelForCausalLM": "modeling_evil.Evil"}})
    (tmp_path / "modeling_evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    assert isolated.run(READ, str(tmp_path), warm_up=WARM_UP).error is None
    model_with({"architectures": ["Evil"], "auto_map": {"AutoModelForCausalLM": "modeling_evil.Evil"}})
    isolated.assert_refused(isolated.run(READ, str(tmp_path), warm_up=WARM_UP), "UnsupportedModelError", ["Evil"])
    assert not (tmp_path / "ran").exists()


def test_architecture_is_derived_from_model_type() -> None:
    assert spec_of(architectures=None).architecture == "llama"


CONFIGS: dict[str, dict[str, Any]] = {
    path.name: json.loads((path / "config.json").read_text()) for path in sorted(GOLDEN.iterdir())
}
ONE_ROTATION = [case for case, config in CONFIGS.items() if "rope_theta" in config.get("rope_parameters", ())]


@pytest.mark.parametrize("case", ONE_ROTATION)
def test_old_config_spellings_give_same_spec(case: str) -> None:
    """Each golden config of one rotation once more as transformers 4 wrote it."""
    file, new = GOLDEN / case / "config.json", CONFIGS[case]
    old = dict(new)
    parameters: dict[str, Any] = dict(old.pop("rope_parameters"))
    old["rope_theta"] = parameters.pop("rope_theta")
    kind = parameters.pop("rope_type")
    for spelling in ("type", "rope_type"):
        old["rope_scaling"] = None if kind == "default" else {spelling: kind, **parameters}
        if new.get("head_dim") == new["hidden_size"] // new["num_attention_heads"]:
            old.pop("head_dim", None)
        old.pop("layer_types", None)
        old["torch_dtype"] = old.pop("dtype", "bfloat16")
        assert model_spec(Config(old, file)) == model_spec(Config(new, file))


def test_key_value_heads_default_to_heads() -> None:
    projections = spec_of(num_key_value_heads=None).layers[0].attention.projections
    assert isinstance(projections, HeadProjections)
    assert projections.kv_heads == 4


SCALINGS: list[tuple[dict[str, Any], Scaling, int]] = [
    ({}, NoScaling(), 256),
    ({"rope_type": "default"}, NoScaling(), 256),
    ({"type": "linear", "factor": 4}, LinearScaling(4.0), 256),
    ({"type": "dynamic", "factor": 2.0}, DynamicScaling(2.0, 256), 512),
    (
        {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256},
        YarnScaling(4.0, 256, 32.0, 1.0, 0.1 * math.log(4) + 1, truncate=True),
        1024,
    ),
    (
        {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            "attention_factor": 1.5,
            "beta_fast": 16,
            "truncate": False,
        },
        YarnScaling(4.0, 64, 16.0, 1.0, 1.5, truncate=False),
        256,
    ),
    (  # DeepSeek's: equal mscales cancel out; the factor is the ratio of lengths
        {"type": "yarn", "mscale": 0.7, "mscale_all_dim": 0.7, "original_max_position_embeddings": 64},
        YarnScaling(4.0, 64, 32.0, 1.0, 1.0, truncate=True),
        256,
    ),
    (
        {"type": "yarn", "factor": 4.0, "mscale": 2.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 64},
        YarnScaling(4.0, 64, 32.0, 1.0, (0.2 * math.log(4) + 1) / (0.1 * math.log(4) + 1), truncate=True),
        256,
    ),
    (
        {
            "rope_type": "llama3",
            "factor": 8,
            "low_freq_factor": 1,
            "high_freq_factor": 4,
            "original_max_position_embeddings": 64,
        },
        Llama3Scaling(8.0, 1.0, 4.0, 64),
        256,
    ),
    (
        {"rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4},
        Llama3Scaling(8.0, 1.0, 4.0, 256),
        256,
    ),
]


@pytest.mark.parametrize(("scaling", "expected", "context"), SCALINGS)
def test_rope_scaling_types(scaling: dict[str, Any], expected: Scaling, context: int) -> None:
    spec = spec_of(rope_scaling=scaling)
    assert spec.ropes[0].scaling == expected
    assert spec.ropes[0].theta == 500000.0
    assert spec.max_position_embeddings == context


def test_top_level_original_length_overrides_rope_scaling() -> None:
    scaling = {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}
    spec = spec_of(rope_scaling=scaling, original_max_position_embeddings=32)
    assert isinstance(spec.ropes[0].scaling, YarnScaling)
    assert spec.ropes[0].scaling.original_max_position_embeddings == 32


def test_nested_rope_parameters_have_separate_original_lengths() -> None:
    """As transformers has it: there the one beside the sizes is not looked at."""
    yarn = {"rope_type": "yarn", "factor": 2.0}
    nested = {"full_attention": {**yarn, "original_max_position_embeddings": 64}}
    scaling = spec_of(rope_parameters=nested, original_max_position_embeddings=32).ropes[0].scaling
    assert isinstance(scaling, YarnScaling)
    assert scaling.original_max_position_embeddings == 64
    scaling = spec_of(rope_parameters={"full_attention": yarn}, original_max_position_embeddings=32).ropes[0].scaling
    assert isinstance(scaling, YarnScaling)
    assert scaling.original_max_position_embeddings == 256


def test_yarn_factor_of_latent_attention_defaults_to_length_ratio() -> None:
    """DeepSeek leaves it out where it is the ratio of the lengths."""
    config = Config.read(GOLDEN.parent / "variants" / "deepseek_v3_yarn" / "config.json")
    scaling = {"rope_type": "yarn", "mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 64}
    config = config.without("rope_scaling", "rope_parameters", "original_max_position_embeddings")
    lengths = config.with_values(max_position_embeddings=256, rope_theta=10_000.0)
    without, given = (
        model_spec(lengths.with_values(rope_scaling=each)) for each in (scaling, {**scaling, "factor": 4.0})
    )
    assert without == given
    plain = model_spec(lengths)
    assert without.layers[0].attention.scale > plain.layers[0].attention.scale


def qwen(**changes: Any) -> ModelSpec:
    return spec_of(architectures=["Qwen2ForCausalLM"], model_type="qwen2", **changes)


def windows(spec: ModelSpec) -> list[int | None]:
    return [layer.attention.window for layer in spec.layers]


@pytest.mark.parametrize("kind", ["dynamic", "yarn"])
def test_huge_rope_factor_is_limited_to_max_context(kind: str) -> None:
    spec = spec_of(rope_scaling={"rope_type": kind, "factor": 1e308})
    assert spec.max_position_embeddings == MAX_SIZE


def test_qwen_sliding_windows() -> None:
    assert windows(qwen(sliding_window=16)) == [None] * 3
    assert windows(qwen(sliding_window=16, use_sliding_window=True, max_window_layers=1)) == [None, 16, 16]
    types = ["sliding_attention", "full_attention", "full_attention"]
    assert windows(qwen(sliding_window=16, use_sliding_window=True, layer_types=types)) == [16, None, None]
    with pytest.raises(ConfigError, match=r"layer_types must be a list of 3"):
        qwen(layer_types=["full_attention"])
    with pytest.raises(ConfigError, match="sliding_window"):
        qwen(layer_types=types)


def test_mistral_sliding_windows() -> None:
    def mistral(**changes: Any) -> ModelSpec:
        config = Config(LLAMA | {"architectures": ["MistralForCausalLM"]} | changes, Path("config.json"))
        return model_spec(config)

    assert windows(mistral()) == [4096] * 3
    assert windows(mistral(sliding_window=16)) == [16] * 3
    assert windows(mistral(sliding_window=None)) == [None] * 3


def test_rope_parameters_for_each_layer_type() -> None:
    both = {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    spec = qwen(sliding_window=16, use_sliding_window=True, layer_types=types, rope_parameters=both)
    thetas = [spec.ropes[layer.attention.rope or 0].theta for layer in spec.layers]
    assert thetas == [1e4, 1e6, 1e4]
    del both["sliding_attention"]
    with pytest.raises(ConfigError, match=r"rope_parameters\.sliding_attention must be an object"):
        qwen(sliding_window=16, use_sliding_window=True, layer_types=types, rope_parameters=both)


@pytest.mark.parametrize("case", CONFIGS)
def test_roles_cover_all_checkpoint_tensors(case: str) -> None:
    import safetensors

    spec = read_model_files(GOLDEN / case).spec
    with safetensors.safe_open(GOLDEN / case / "model.safetensors", "numpy") as file:
        assert {name for tensor in spec.tensors.values() for name in tensor.names} == set(file.keys())


def test_spec_serializes_to_json() -> None:
    spec = json.loads(spec_of(rope_scaling={"type": "linear", "factor": 2}).to_json())
    assert spec["ropes"] == [
        {"theta": 500000.0, "rotary_dim": 16, "interleaved": False, "scaling": {"factor": 2.0, "type": "linear"}}
    ]
    dense = {"intermediate_size": 160, "activation": "silu", "gated": True, "bias": False, "clamp": None}
    dense |= {"xielu": None, "inner_norm": None, "gate_scale": 1.0, "gate_cutoff": None}
    assert spec["layers"][0]["blocks"][1]["mixer"] == {**dense, "type": "dense"}
    place = {"names": ["model.layers.2.self_attn.o_proj.weight"], "transposed": False, "part": None, "stack": None}
    read = {**place, "exponential": None, "alternative": None}
    assert spec["tensors"]["layers.2.attention.output.weight"] == read


def test_spec_json_is_kept_until_the_spec_changes() -> None:
    files = read_model_files(GOLDEN / "llama")
    assert files.spec_json is files.spec_json
    extended = replace(files, spec=replace(files.spec, max_position_embeddings=99))
    assert json.loads(extended.spec_json)["max_position_embeddings"] == 99


def test_text_config_of_vision_language_model() -> None:
    nested = {"architectures": ["LlamaForCausalLM"], "text_config": LLAMA}
    assert model_spec(Config(nested, Path("config.json"))) == spec_of()
