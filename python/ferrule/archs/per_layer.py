"""Per-layer embeddings: vectors of each token for each layer, in one table that stays in its file (Gemma 3n and 4)."""

from __future__ import annotations

from ferrule.archs.config import Config
from ferrule.archs.spec import Activation, Block, Part, PerLayerEmbedding, RmsNorm, Table, Tensor

_BLOCK = "model.layers.{layer}"

PER_LAYER_MODULES = {
    "tables.0": "model.embed_tokens_per_layer",
    "per_layer.gate": f"{_BLOCK}.per_layer_input_gate",
    "per_layer.output": f"{_BLOCK}.per_layer_projection",
    "per_layer.projection_norm": "model.per_layer_projection_norm",
    "per_layer_post_norm": f"{_BLOCK}.post_per_layer_input_norm",
}
"""Module names in Gemma's checkpoints, except for the projection, which is stored for all layers together."""


def per_layer_table(config: Config) -> Table:
    """Returns the table with the vectors of all layers."""
    width = config.integer("hidden_size_per_layer_input")
    return Table(config.integer("vocab_size_per_layer_input"), config.layers * width)


def per_layer_block(config: Config, index: int, norm: RmsNorm, activation: Activation) -> Block:
    """Returns the block of a layer."""
    width = config.integer("hidden_size_per_layer_input")
    embedding = PerLayerEmbedding(
        width=width,
        activation=activation,
        table=0,
        first_column=index * width,
        table_scale=width**0.5,
        projection_scale=config.integer("hidden_size") ** -0.5,
        norm=norm,
        sum_scale=2**-0.5,
    )
    return Block("per_layer", embedding, post_norm=norm)


def per_layer_projections(config: Config) -> dict[str, Tensor]:
    """Returns the tensors of the layers' projections: rows of one matrix."""
    width = config.integer("hidden_size_per_layer_input")
    return {
        f"layers.{index}.per_layer.projection.weight": Tensor(
            ("model.per_layer_model_projection.weight",), part=Part(index * width, width, config.layers * width)
        )
        for index in range(config.layers)
    }
