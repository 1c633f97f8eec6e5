"""Form of the weights in a GGUF file: what llama.cpp's converters change and config.json has no fields for.

`ferrule quantize` packs the weights in this form, and stores it beside the fields of config.json.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

from ferrule.archs.config import Config
from ferrule.archs.spec import (
    Attention,
    DeltaNet,
    Dense,
    Gated,
    HeadNorm,
    HeadProjections,
    Layer,
    Mixer,
    ModelSpec,
    NgramEmbedding,
    Norm,
    Xielu,
)

INTERLEAVED, ALTERNATING = "interleaved", "alternating"
XIELU = "xielu."
"""Prefix of the keys with the parameters of xIELU."""


@dataclass(frozen=True)
class GgufForm:
    """Differences between the weights of a GGUF file and those of a Hugging Face checkpoint."""

    interleaved: bool | None
    """Whether adjacent elements are rotated together; None if the order of the rows is unchanged."""
    alternating: bool
    """Whether value head h of delta nets reads key head `h % key_heads`."""
    xielu: Config
    """Holds the parameters of xIELU under `xielu.alpha_p` and so on: a number, or a list with one for each layer."""

    @classmethod
    def read(cls, config: Config) -> GgufForm:
        """Reads what `to_json` returned. Raises ConfigError."""
        return cls(
            interleaved=config.flag(INTERLEAVED, default=False) if INTERLEAVED in config else None,
            alternating=config.flag(ALTERNATING, default=False),
            xielu=config,
        )

    def to_json(self) -> Mapping[str, Any]:
        """Returns the form as a JSON object."""
        xielu = {key: value for key, value in self.xielu.values.items() if key.startswith(XIELU)}
        return {INTERLEAVED: self.interleaved, ALTERNATING: self.alternating, **xielu}

    def applied(self, spec: ModelSpec) -> ModelSpec:
        """Returns the spec of a checkpoint's weights, changed to the spec of weights in this form.

        Raises ConfigError for missing or invalid parameters of xIELU.
        """
        if self.interleaved is not None:
            spec = replace(spec, ropes=[replace(rope, interleaved=self.interleaved) for rope in spec.ropes])
        return replace(
            spec,
            final_norm=_plain(spec.final_norm),
            streams=spec.streams and replace(spec.streams, ends=_stream_mix(spec.streams.ends)),
            layers=[self._layer(layer, index) for index, layer in enumerate(spec.layers)],
            prefixes=[],
        )

    def _layer(self, layer: Layer, index: int) -> Layer:
        blocks = (
            replace(
                block,
                mixer=self._mixer(block.mixer, index),
                norm=_plain(block.norm),
                post_norm=_plain(block.post_norm),
                sum_norm=_plain(block.sum_norm),
                joint_norm=_plain(block.joint_norm),
            )
            for block in layer.blocks
        )
        spans = (replace(span, mix=_stream_mix(span.mix)) for span in layer.spans)
        return replace(layer, blocks=tuple(blocks), spans=tuple(spans))

    def _mixer(self, mixer: Mixer, layer: int) -> Mixer:
        match mixer:
            case Attention():
                return _attention(mixer)
            case DeltaNet():
                return replace(mixer, alternating=self.alternating)
            case NgramEmbedding():
                return replace(mixer, norm=_plain(mixer.norm))
            case Dense(xielu=Xielu()):
                alphas = (self._parameter("alpha_p", layer), self._parameter("alpha_n", layer))
                beta, eps = self._parameter("beta", layer), self._parameter("eps", layer)
                return replace(mixer, xielu=Xielu(beta=beta, eps=eps, alphas=alphas))
            case _:
                return mixer

    def _parameter(self, name: str, layer: int) -> float:
        key = f"{XIELU}{name}"
        value: object = self.xielu.values.get(key)
        if isinstance(value, list):
            numbers = cast("list[object]", value)
            if layer >= len(numbers):
                raise self.xielu.error(key, f"a number, or a list with one for layer {layer}")
            value = numbers[layer]
        return self.xielu.with_values(**{key: value}).number(key, low=-math.inf)


def _attention(attention: Attention) -> Attention:
    projections, indexer = attention.projections, attention.indexer
    if isinstance(projections, HeadProjections) and isinstance(projections.qk_norm, HeadNorm):
        qk_norm = replace(projections.qk_norm, norm=_plain(projections.qk_norm.norm))
        projections = replace(projections, qk_norm=qk_norm)
    if indexer is not None:
        indexer = replace(indexer, q_norm=_plain(indexer.q_norm), k_norm=_plain(indexer.k_norm))
    return replace(attention, projections=projections, indexer=indexer)


def _stream_mix(mix: Any) -> Any:
    """Returns how streams are mixed, or joined at the end, with norms without weight offset."""
    return replace(mix, norm=_plain(mix.norm)) if isinstance(mix, Gated) else mix


def _plain(norm: Norm | None) -> Any:
    """Returns a norm without weight offset, because converters add the offset to the weights."""
    return None if norm is None else replace(norm, weight_offset=0.0)
