"""Defaults of transformers' configuration classes: `python defaults.py tests/golden/defaults.json`; needs no torch.

The file has a line for each text model that a multimodal checkpoint may wrap, with the fields that affect inference.
"""

# pyright: basic, reportMissingImports=false

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from transformers.models.auto.configuration_auto import CONFIG_MAPPING

TYPES = """
apertus bailing_hybrid bamba bitnet cohere2 deepseek_v3 deepseek_v4 exaone_moe falcon_h1 falcon_mamba gemma
gemma2 gemma3_text gemma3n_text gemma4_text glm_moe_dsa granite granite_swa granitemoe_swa granitemoehybrid
hy_v3 jamba kimi_linear lfm2 lfm2_moe lfm3 llama llama4_text mamba mamba2 mimo_v2_flash minimax
minimax_m3_vl_text ministral3 mistral mistral4 mixtral nemotron_h olmo_hybrid phi3 phimoe qwen2
qwen2_5_vl_text qwen2_moe qwen2_vl_text qwen3 qwen3_5_moe_text qwen3_5_text qwen3_moe qwen3_next
qwen3_vl_moe_text qwen3_vl_text qwen4_exp_text recurrent_gemma rwkv smollm3 zamba2
"""
"""Model types with default sizes in archs/text_model.py."""
LAYERS = 8
"""Layers of a model, if its class does not fix them: more than the period of any family."""
LISTED = ("nemotron_h", "zamba2")
"""Families whose number of layers follows from a list."""
NO_EFFECT = """
_name_or_path architectures attention_dropout bos_token_id chunk_size_feed_forward dtype eos_token_id id2label
initializer_range is_encoder_decoder label2id output_attentions output_hidden_states output_router_logits
pad_token_id pretraining_tp problem_type return_dict router_aux_loss_coef tokenizer_class transformers_version
use_cache
"""


def defaults(model_type: str) -> dict[str, Any]:
    """Returns the fields of a default configuration."""
    layers = {} if model_type in LISTED else {"num_hidden_layers": LAYERS}
    # Short models cannot share the keys and values of 15 layers.
    layers |= {"num_kv_shared_layers": 2} if model_type == "gemma3n_text" else {}
    written = json.loads(CONFIG_MAPPING[model_type](**layers).to_json_string(use_diff=False))
    ignored = NO_EFFECT.split()
    if model_type == "qwen3_vl_moe_text":
        ignored.append("tie_word_embeddings")  # that of the whole model counts
    return {field: value for field, value in written.items() if field not in ignored}


def main() -> None:
    """Writes the file that the command line names."""
    lines = [json.dumps(defaults(model_type), sort_keys=True) for model_type in TYPES.split()]
    Path(sys.argv[1]).write_text("[\n" + ",\n".join(lines) + "\n]\n")


if __name__ == "__main__":
    main()
