"""Text models of multimodal checkpoints: the family that reads them, and the names of their tensors."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import save_file

from ferrule import LLM, ConfigError, UnsupportedModelError
from ferrule.archs import model_spec
from ferrule.archs.config import Config
from ferrule.archs.spec import HeadProjections, LinearScaling, LmHead, ModelSpec, NoScaling, Tensor
from ferrule.archs.text_model import TEXT_TYPES
from lora_files import base_tensors

GOLDEN = Path(__file__).parents[1] / "golden" / "logits"


def outer_spec(text: dict[str, Any], **outer: Any) -> ModelSpec:
    return model_spec(Config({"text_config": text, **outer}, Path("config.json")))


def golden(case: str, **changes: Any) -> dict[str, Any]:
    return {**json.loads((GOLDEN / case / "config.json").read_text()), **changes}


def heads(spec: ModelSpec) -> tuple[int, int, int]:
    """Query heads, key-value heads and their width."""
    attention = spec.layers[0].attention
    assert isinstance(attention.projections, HeadProjections)
    return attention.heads, attention.projections.kv_heads, attention.projections.key_dim


CHECKPOINTS = [
    ("LlavaForConditionalGeneration", "llava", "llama", "llama"),
    ("Mistral3ForConditionalGeneration", "mistral3", "mistral_swa", "mistral"),
    ("Gemma3ForConditionalGeneration", "gemma3", "gemma3", "gemma3_text"),
    ("Qwen2VLForConditionalGeneration", "qwen2_vl", "qwen2", "qwen2_vl_text"),
    ("Qwen2_5_VLForConditionalGeneration", "qwen2_5_vl", "qwen2", "qwen2_5_vl_text"),
    ("Qwen3VLForConditionalGeneration", "qwen3_vl", "qwen3", "qwen3_vl_text"),
    ("AyaVisionForConditionalGeneration", "aya_vision", "cohere2", "cohere2"),
]


@pytest.mark.parametrize(("name", "model_type", "case", "text_type"), CHECKPOINTS)
def test_text_model_family(name: str, model_type: str, case: str, text_type: str) -> None:
    """The family is found even if the text config names the architecture of the whole model."""
    text = golden(case, architectures=[name], model_type=text_type)
    spec = outer_spec(text, architectures=[name], model_type=model_type, **{TIED: text.get(TIED)})
    alone = model_spec(Config(golden(case), Path("config.json")))
    assert (spec.layers, spec.tensors, spec.architecture) == (alone.layers, alone.tensors, text_type)


@pytest.mark.parametrize("name", ["Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration"])
def test_qwen2_vl_flat_config(name: str) -> None:
    scaling = {"type": "mrope", "mrope_section": [2, 3, 3]}
    spec = model_spec(
        Config(golden("qwen2", architectures=[name], rope_parameters=None, rope_scaling=scaling), Path("config.json"))
    )
    assert (spec.ropes[0].theta, spec.ropes[0].scaling) == (1e6, NoScaling())


def test_qwen_vl_defaults() -> None:
    fields = dict.fromkeys(("rope_parameters", "rms_norm_eps", "max_position_embeddings"))
    spec = outer_spec(golden("qwen3", model_type="qwen3_vl_text", **fields))
    assert (spec.ropes[0].theta, spec.max_position_embeddings) == (5e5, 128_000)
    moe = golden("qwen3_moe", model_type="qwen3_vl_moe_text", norm_topk_prob=None)
    spec = outer_spec(moe)
    assert spec.layers == model_spec(Config(golden("qwen3_moe"), Path("config.json"))).layers
    down = spec.tensors["layers.0.ffn.experts.5.down.weight"]
    assert (down.names, down.transposed) == (("model.layers.0.mlp.experts.down_proj",), True)
    with pytest.raises(UnsupportedModelError, match="norm_topk_prob must be true"):
        outer_spec(moe | {"norm_topk_prob": False})


def test_text_config_default_sizes() -> None:
    """Configurations of LLaVA 1.5, LLaVA 1.6 on Mistral and Gemma 3 4B as published."""
    llava = outer_spec({"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 32_064})
    assert (llava.vocab_size, llava.hidden_size, len(llava.layers), heads(llava)) == (32_064, 4096, 32, (32, 32, 128))
    assert outer_spec({"vocab_size": 32_064}).layers == llava.layers
    mistral = outer_spec({"model_type": "mistral", "intermediate_size": 14_336, "sliding_window": None})
    assert (mistral.vocab_size, heads(mistral)) == (32_000, (32, 8, 128))
    gemma = outer_spec(
        {
            "hidden_size": 2560,
            "intermediate_size": 10_240,
            "model_type": "gemma3_text",
            "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 1024,
        }
    )
    assert (gemma.vocab_size, gemma.max_position_embeddings, heads(gemma)) == (262_208, 131_072, (8, 4, 256))
    assert [rope.scaling for rope in gemma.ropes] == [NoScaling(), LinearScaling(8.0)]
    assert gemma.lm_head == LmHead(tied=True)


def test_text_only_models_have_no_default_sizes() -> None:
    with pytest.raises(ConfigError, match="hidden_size must be an integer from 1 to 268435456, but it is missing"):
        model_spec(Config({"model_type": "llama", "intermediate_size": 8, "num_hidden_layers": 1}, Path("config.json")))


def test_default_family_of_the_text_model() -> None:
    for whole, text in TEXT_TYPES.items():
        spec = outer_spec({"num_hidden_layers": 8, "num_kv_shared_layers": 0}, model_type=whole)
        assert spec.architecture == text


TIED = "tie_word_embeddings"


@pytest.mark.parametrize(
    ("model_type", "outer", "inner", "tied"),
    [
        ("qwen3_vl", True, None, True),
        ("qwen3_vl", True, False, True),
        ("qwen3_vl", False, True, False),
        ("qwen3_vl", None, True, True),
        ("qwen3_vl", None, None, False),
        ("llava", False, True, True),
        ("llava", True, False, True),
        ("llava", False, None, False),
    ],
)
def test_tied_embeddings_in_outer_and_text_config(
    model_type: str, outer: bool | None, inner: bool | None, tied: bool
) -> None:
    spec = outer_spec(golden("qwen3", **{TIED: inner}), model_type=model_type, **{TIED: outer})
    assert spec.lm_head == LmHead(tied=tied)


@pytest.mark.native
def test_stored_head_takes_precedence_over_tied_embeddings(tmp_path: Path) -> None:
    """Mistral 3 has tied embeddings by default; as in transformers, they hold if the file has no lm_head."""
    text = golden("mistral_swa", **{TIED: None})
    stored = outer_spec(text, model_type="mistral3").tensors["lm_head.weight"]
    assert stored == Tensor(("lm_head.weight",), alternative=Tensor(("model.embed_tokens.weight",)))
    assert outer_spec(text, model_type="mistral3", **{TIED: False}).tensors["lm_head.weight"].alternative is None
    assert outer_spec(text, model_type="llava").tensors["lm_head.weight"].alternative is None
    tensors = base_tensors(GOLDEN / "mistral_swa")
    ids, found = list(range(3, 20)), {}
    for name, tied, skipped in (
        ("stored", None, ""),
        ("usual", False, ""),
        ("missing", None, "lm_head.weight"),
        ("tied", True, ""),
    ):
        (folder := tmp_path / name).mkdir()
        whole = {"model_type": "mistral3", "text_config": text, TIED: tied}
        (folder / "config.json").write_text(json.dumps(whole))
        save_file({key: array for key, array in tensors.items() if key != skipped}, folder / "model.safetensors")
        with LLM(folder, quantization="f32") as llm:
            found[name] = llm.logits(ids)
    assert (found["stored"] == found["usual"]).all()
    assert (found["missing"] == found["tied"]).all()
    assert (found["stored"] != found["tied"]).any()


def test_unsupported_text_models() -> None:
    with pytest.raises(
        UnsupportedModelError, match=r"unsupported text_config\.model_type 'mllama_text_model'; supported "
    ):
        outer_spec(golden("llama", model_type="mllama_text_model"))
    with pytest.raises(
        UnsupportedModelError, match="model_type must be the type of a model with causal attention over the prompt"
    ):
        outer_spec(golden("gemma"), model_type="paligemma")
    with pytest.raises(ConfigError, match=r"text_config\.hidden_size must be .*, got 0"):
        outer_spec(golden("llama", hidden_size=0))


LAYOUTS: dict[str, Callable[[str], str]] = {
    "as usual": lambda name: name,
    "without the head around it": lambda name: name.removeprefix("model."),
    "old": lambda name: f"language_model.{name}",
    "new": lambda name: name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name,
    "named after text": lambda name: name.replace("model.", "model.text_model.", 1),
}


def rename(source: Path, target: Path, name_of: Callable[[str], str]) -> None:
    """Copies a safetensors file with renamed tensors, and adds a tensor of the vision model."""
    content = source.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    header: dict[str, Any] = json.loads(content[8:start])
    header.pop("__metadata__", None)
    end = len(content) - start
    renamed = {name_of(name): entry for name, entry in header.items()}
    renamed["vision_tower.weight"] = {"dtype": "F32", "shape": [1], "data_offsets": [end, end + 4]}
    text = json.dumps(renamed).encode()
    text += b" " * (-len(text) % 8)
    target.write_bytes(len(text).to_bytes(8, "little") + text + content[start:] + bytes(4))


@pytest.mark.native
@pytest.mark.parametrize("layout", LAYOUTS)
def test_tensor_names_of_every_layout(layout: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llava", "text_config": golden("llama")}))
    rename(GOLDEN / "llama" / "model.safetensors", tmp_path / "model.safetensors", LAYOUTS[layout])
    ids = list(range(3, 20))
    with LLM(GOLDEN / "llama", quantization="f32") as llm:
        expected = llm.logits(ids)
    with LLM(tmp_path, quantization="f32") as llm:
        assert (llm.logits(ids) == expected).all()
