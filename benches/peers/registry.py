"""The peers by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType


@dataclass(frozen=True)
class Peer:
    """A library with its build or runtime configuration."""

    adapter: str
    """Module in adapters/."""
    environment: str
    """Folder of its venv, which `install` creates."""
    variables: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """Environment variables of its process."""


PEERS = {
    "ferrule": Peer("ferrule_llm", "ferrule"),
    "ferrule-avx2": Peer("ferrule_llm", "ferrule", {"FERRULE_ISA": "avx2"}),
    "llama.cpp-avx512": Peer("llamacpp", "llama.cpp-avx512"),
    "llama.cpp-avx2": Peer("llamacpp", "llama.cpp-avx2"),
    "ik_llama.cpp": Peer("ik_llamacpp", "ik_llama.cpp"),
    "transformers": Peer("hf", "transformers"),
    "onnxruntime-genai": Peer("onnx_genai", "onnxruntime-genai"),
    "ctranslate2": Peer("ctranslate2_generator", "ctranslate2"),
    "openvino": Peer("openvino_pipeline", "openvino"),
}


@dataclass(frozen=True)
class Contender:
    """A peer with a weight format and a KV cache format."""

    peer: str
    format: str
    kv: str | None

    @classmethod
    def parse(cls, text: str) -> Contender:
        """Reads `peer:format` or `peer:format/kv`; raises ValueError."""
        peer, _, formats = text.partition(":")
        if peer not in PEERS:
            raise ValueError(f"peer is {peer!r}; it must be one of {', '.join(PEERS)}")
        weights, _, kv = formats.partition("/")
        if not weights:
            raise ValueError(f"{text!r} names no format; write {peer}:FORMAT or {peer}:FORMAT/KV")
        return cls(peer, weights, kv or None)

    def __str__(self) -> str:
        return f"{self.peer}:{self.format}" + (f"/{self.kv}" if self.kv else "")
