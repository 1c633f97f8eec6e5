"""Encoders, embedding models and cross-encoders: hidden states, pooled embeddings and classification logits."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from checkpoint import Edit, JsonObject, edit_json, edit_tensors, fill, save, write_json
from numpy.typing import NDArray
from reference import SPECIAL, VOCABULARY, load
from safetensors.torch import load_file, save_file
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    Gemma3TextConfig,
    Gemma3TextModel,
    ModernBertConfig,
    ModernBertForSequenceClassification,
    ModernBertModel,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForSequenceClassification,
    Qwen3Model,
    XLMRobertaConfig,
    XLMRobertaForSequenceClassification,
    XLMRobertaModel,
)

LENGTHS = (5, 37, 70)
"""Tokens of each text: below, above and far above a local window of 16, and not multiples of a block size."""
BEGIN, END = 0, 2
"""Special tokens at the start and end of each text."""

Pooling = Literal["mean", "cls", "lasttoken"]
SENTENCE_TRANSFORMERS = "sentence_transformers.models."


@dataclass(frozen=True)
class Projection:
    """A Dense module: activation(W x + b) of the pooled vector."""

    width: int
    activation: Literal["linear.Identity", "activation.Tanh"]
    bias: bool


@dataclass(frozen=True)
class Encoder:
    """A case; `pooling` and `normalize` are written as files of sentence-transformers, except for classifiers."""

    model_class: type[PreTrainedModel]
    config: PreTrainedConfig
    pooling: Pooling | None = None
    normalize: bool = True
    projections: tuple[Projection, ...] = ()
    edit: Edit | None = None
    stored_positions: bool = False
    """Whether the file stores `position_ids`, as files of the first versions of transformers do."""


def old_modernbert(config: JsonObject) -> None:
    """Converts the fields to those of answerdotai/ModernBERT-base."""
    rope = config.pop("rope_parameters")
    config["global_rope_theta"] = rope["full_attention"]["rope_theta"]
    config["local_rope_theta"] = rope["sliding_attention"]["rope_theta"]
    del config["layer_types"]
    config["global_attn_every_n_layers"] = 3
    config["torch_dtype"] = config.pop("dtype")
    config["transformers_version"] = "4.48.0"


def named_for_generation(config: JsonObject) -> None:
    """Names the causal LM class although the tensors are the base model's, as in Qwen3-Embedding."""
    config["architectures"] = ["Qwen3ForCausalLM"]


def bert(**changes: Any) -> BertConfig:
    """BERT (Devlin et al. 2018): absolute positions, two types of tokens."""
    return BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        max_position_embeddings=96,
        **changes,
    )


def modernbert(**changes: Any) -> ModernBertConfig:
    """ModernBERT (Warner et al. 2024): every third layer has full attention, the others a window."""
    return ModernBertConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        num_hidden_layers=5,
        num_attention_heads=4,
        intermediate_size=80,
        max_position_embeddings=128,
        local_attention=16,
        pad_token_id=1,
        bos_token_id=BEGIN,
        cls_token_id=BEGIN,
        eos_token_id=END,
        sep_token_id=END,
        **changes,
    )


def xlm_roberta(**changes: Any) -> XLMRobertaConfig:
    """XLM-RoBERTa (Conneau et al. 2019): the first position is the padding's id plus 1."""
    return XLMRobertaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        max_position_embeddings=max(LENGTHS) + 2,
        type_vocab_size=1,
        layer_norm_eps=1e-5,
        **changes,
    )


def gemma3() -> Gemma3TextConfig:
    """EmbeddingGemma (Vera et al. 2025): a decoder with bidirectional attention and symmetric windows."""
    return Gemma3TextConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=16,
        intermediate_size=128,
        max_position_embeddings=128,
        sliding_window=16,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
        query_pre_attn_scalar=16,
        use_bidirectional_attention=True,
    )


def qwen3(**changes: Any) -> Qwen3Config:
    """Qwen3-Embedding (Zhang et al. 2025): a causal model that pools the last token."""
    return Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=128,
        max_position_embeddings=256,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        tie_word_embeddings=True,
        eos_token_id=END,
        **changes,
    )


CASES: dict[str, Encoder] = {
    "bert": Encoder(BertModel, bert(), "mean", stored_positions=True),
    "bert_classifier": Encoder(BertForSequenceClassification, bert(num_labels=1)),
    "modernbert": Encoder(ModernBertModel, modernbert(), "cls", edit=old_modernbert),
    "modernbert_classifier": Encoder(ModernBertForSequenceClassification, modernbert(num_labels=1)),
    "modernbert_classifier_mean": Encoder(
        ModernBertForSequenceClassification,
        modernbert(num_labels=3, classifier_pooling="mean", attention_bias=True, mlp_bias=True, norm_bias=True),
    ),
    "xlm_roberta": Encoder(XLMRobertaModel, xlm_roberta(), "mean", normalize=False),
    "xlm_roberta_classifier": Encoder(XLMRobertaForSequenceClassification, xlm_roberta(num_labels=1)),
    "gemma3": Encoder(
        Gemma3TextModel,
        gemma3(),
        "mean",
        projections=(Projection(96, "activation.Tanh", bias=True), Projection(48, "linear.Identity", bias=False)),
    ),
    "qwen3_classifier": Encoder(Qwen3ForSequenceClassification, qwen3(num_labels=3)),
    "qwen3": Encoder(Qwen3Model, qwen3(), "lasttoken", edit=named_for_generation),
}


def make(name: str, seed: int, out: Path) -> None:
    """Writes one case."""
    case = CASES[name]
    save(case.model_class._from_config(case.config), seed, out)
    if case.edit is not None:
        edit_json(out / "config.json", case.edit)
    if case.stored_positions:
        positions = torch.arange(case.config.max_position_embeddings)[None]
        edit_tensors(out, lambda tensors: tensors | {"embeddings.position_ids": positions})
    if case.pooling is not None:
        write_sentence_transformers(out, case, case.config.hidden_size)
        write_projections(out, case, seed)
    model = load(case.model_class, out, torch.float64)
    np.savez(out / "golden.npz", **reference(model, case, out, np.random.default_rng(seed)))


def write_sentence_transformers(out: Path, case: Encoder, width: int) -> None:
    """Writes `modules.json` and the files that it names, which define how hidden states become one embedding."""
    modules = [
        {"idx": 0, "name": "0", "path": "", "type": SENTENCE_TRANSFORMERS + "Transformer"},
        {"idx": 1, "name": "1", "path": "1_Pooling", "type": SENTENCE_TRANSFORMERS + "Pooling"},
    ]
    kinds = ["Dense"] * len(case.projections) + ["Normalize"] * case.normalize
    for index, kind in enumerate(kinds, start=2):
        name = SENTENCE_TRANSFORMERS + kind
        modules.append({"idx": index, "name": str(index), "path": f"{index}_{kind}", "type": name})
    write_json(out / "modules.json", modules)
    modes = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken")
    chosen = {"mean": "mean_tokens", "cls": "cls_token", "lasttoken": "lasttoken", None: None}[case.pooling]
    settings = {f"pooling_mode_{mode}": mode == chosen for mode in modes}
    write_json(
        out / "1_Pooling" / "config.json", {"word_embedding_dimension": width, "include_prompt": True, **settings}
    )
    write_json(out / "sentence_bert_config.json", {"do_lower_case": False, "max_seq_length": max(LENGTHS)})


def write_projections(out: Path, case: Encoder, seed: int) -> None:
    """Writes the Dense modules, each in a separate folder."""
    width = case.config.hidden_size
    for index, projection in enumerate(case.projections, start=2):
        linear = torch.nn.Linear(width, projection.width, bias=projection.bias)
        fill(linear.parameters(), seed + index)
        settings = {
            "in_features": width,
            "out_features": projection.width,
            "bias": projection.bias,
            "activation_function": f"torch.nn.modules.{projection.activation}",
        }
        folder = out / f"{index}_Dense"
        write_json(folder / "config.json", settings)
        tensors = {f"linear.{name}": value.detach() for name, value in linear.named_parameters()}
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        width = projection.width


def project(out: Path, case: Encoder, row: torch.Tensor) -> torch.Tensor:
    """Applies the written Dense modules to a pooled row."""
    for index, projection in enumerate(case.projections, start=2):
        tensors = load_file(out / f"{index}_Dense" / "model.safetensors")
        row = tensors["linear.weight"].to(row.dtype) @ row
        if projection.bias:
            row = row + tensors["linear.bias"].to(row.dtype)
        if projection.activation == "activation.Tanh":
            row = row.tanh()
    return row


@torch.inference_mode()
def reference(model: PreTrainedModel, case: Encoder, out: Path, random: np.random.Generator) -> dict[str, NDArray[Any]]:
    """Results of the model for each text alone, so that no padding is involved.

    `input_ids_I [n]`, `token_type_ids_I [n]` for BERT, `last_hidden_state_I [n, hidden]`; `mean`, `cls` and
    `lasttoken [3, hidden]`, each of length 1; `embedding [3, width]` as the files of sentence-transformers say;
    `pooler_output [3, hidden]` where the model has one; `logits [3, labels]` of a classifier.
    """
    golden: dict[str, NDArray[Any]] = {}
    rows: dict[str, list[torch.Tensor]] = {}
    for text, length in enumerate(LENGTHS):
        ids = random.integers(SPECIAL, VOCABULARY, length)
        ids[0], ids[-1] = BEGIN, END
        inputs = {"input_ids": torch.from_numpy(ids)[None]}
        golden[f"input_ids_{text}"] = ids
        if isinstance(case.config, BertConfig) and case.config.type_vocab_size > 1:
            second = np.arange(length) >= length // 3
            golden[f"token_type_ids_{text}"] = second.astype(np.int64)
            inputs["token_type_ids"] = torch.from_numpy(golden[f"token_type_ids_{text}"])[None]
        outputs = model.base_model(**inputs)
        hidden = outputs.last_hidden_state[0]
        golden[f"last_hidden_state_{text}"] = hidden.to(torch.float32).numpy()
        pooled = {"mean": hidden.mean(0), "cls": hidden[0], "lasttoken": hidden[-1]}
        for pooling, row in pooled.items():
            rows.setdefault(pooling, []).append(row / row.norm())
        if case.pooling is not None:
            row = project(out, case, pooled[case.pooling])
            rows.setdefault("embedding", []).append(row / row.norm() if case.normalize else row)
        if getattr(outputs, "pooler_output", None) is not None:
            rows.setdefault("pooler_output", []).append(outputs.pooler_output[0])
        if getattr(case.config, "num_labels", 0) and case.pooling is None:
            rows.setdefault("logits", []).append(model(**inputs).logits[0])
    return golden | {name: torch.stack(values).to(torch.float32).numpy() for name, values in rows.items()}
