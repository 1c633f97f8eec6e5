"""The embedded Llama in plain NumPy: the reference that weight formats are measured against.

f32 throughout, over whole windows. Weight formats are applied before the weights are passed in; an activation format
is a function that the forward pass applies to the input of each matrix.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.floating[Any]]
Weights = dict[str, Floats]
Activation = Callable[[Floats], Floats]

EMBEDDING = "model.embed_tokens.weight"
ROLES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class Config:
    """Sizes of a Llama, as config.json states them."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    rope_theta: float
    norm_eps: float


def read_config(directory: Path) -> Config:
    """The sizes in `directory`/config.json."""
    raw = json.loads((directory / "config.json").read_text())
    return Config(
        layers=raw["num_hidden_layers"],
        heads=raw["num_attention_heads"],
        kv_heads=raw["num_key_value_heads"],
        head_dim=raw["head_dim"],
        rope_theta=raw["rope_parameters"]["rope_theta"],
        norm_eps=raw["rms_norm_eps"],
    )


def read_weights(directory: Path) -> Weights:
    """Every tensor of a bf16 safetensors file as f32 (exact)."""
    data = (directory / "model.safetensors").read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    weights: Weights = {}
    for name, entry in json.loads(data[8:start]).items():
        if name == "__metadata__":
            continue
        begin, end = entry["data_offsets"]
        halves = np.frombuffer(data[start + begin : start + end], np.uint16)
        weights[name] = (halves.astype(np.uint32) << 16).view(np.float32).reshape(entry["shape"])
    return weights


def is_matrix(name: str) -> bool:
    """Whether a tensor is multiplied by activations, so that a format applies to it."""
    return name == EMBEDDING or name.removesuffix(".weight").endswith(ROLES)


def _rms_norm(x: Floats, gain: Floats, eps: float) -> Floats:
    mean_square: Floats = np.mean(x * x, axis=-1, keepdims=True)
    return x / np.sqrt(mean_square + np.float32(eps)) * gain


def _rope(x: Floats, cos: Floats, sin: Floats) -> Floats:
    """Rotates halves; x is [windows, heads, tokens, head_dim]."""
    first, second = np.split(x, 2, axis=-1)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def _attention(q: Floats, k: Floats, v: Floats) -> Floats:
    """Causal attention; q is [windows, heads, tokens, head_dim], k and v have only the KV heads."""
    windows, heads, tokens, head_dim = q.shape
    kv_heads = k.shape[1]
    grouped = q.reshape(windows, kv_heads, heads // kv_heads * tokens, head_dim)
    scores = (grouped @ k.transpose(0, 1, 3, 2)) * np.float32(head_dim**-0.5)
    scores = scores.reshape(windows, heads, tokens, tokens)
    scores += np.triu(np.full((tokens, tokens), -1e30, np.float32), 1)
    scores -= scores.max(axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    scores /= scores.sum(axis=-1, keepdims=True)
    out = scores.reshape(windows, kv_heads, -1, tokens) @ v
    return out.reshape(windows, heads, tokens, head_dim)


def logits(config: Config, weights: Weights, ids: NDArray[np.int64], first: int, activation: Activation) -> Floats:
    """Logits of positions `first`.. of windows `ids` [windows, tokens], as [windows * (tokens - first), vocab].

    `activation` is applied to the input of every matrix, rows [.., inputs].
    """
    windows, tokens = ids.shape
    halves = np.arange(config.head_dim // 2, dtype=np.float64)
    inverse = np.power(config.rope_theta, halves * (-2 / config.head_dim))
    angles = np.arange(tokens, dtype=np.float64)[:, None] * inverse[None, :]
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)

    def heads(x: Floats, count: int) -> Floats:
        return x.reshape(windows, tokens, count, config.head_dim).transpose(0, 2, 1, 3)

    x = weights[EMBEDDING][ids.reshape(-1)]
    for layer in range(config.layers):
        at = f"model.layers.{layer}."

        def matrix(role: str, at: str = at) -> Floats:
            return weights[f"{at}{role}.weight"].T

        h = activation(_rms_norm(x, weights[at + "input_layernorm.weight"], config.norm_eps))
        q = _rope(heads(h @ matrix("self_attn.q_proj"), config.heads), cos, sin)
        k = _rope(heads(h @ matrix("self_attn.k_proj"), config.kv_heads), cos, sin)
        v = heads(h @ matrix("self_attn.v_proj"), config.kv_heads)
        attended = _attention(q, k, v).transpose(0, 2, 1, 3).reshape(windows * tokens, -1)
        x = x + activation(attended) @ matrix("self_attn.o_proj")
        h = activation(_rms_norm(x, weights[at + "post_attention_layernorm.weight"], config.norm_eps))
        gate = h @ matrix("mlp.gate_proj")
        gate /= 1 + np.exp(-gate)
        x = x + activation(gate * (h @ matrix("mlp.up_proj"))) @ matrix("mlp.down_proj")
    x = x.reshape(windows, tokens, -1)[:, first:].reshape(windows * (tokens - first), -1)
    return activation(_rms_norm(x, weights["model.norm.weight"], config.norm_eps)) @ weights[EMBEDDING].T
