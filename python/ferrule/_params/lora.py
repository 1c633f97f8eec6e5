"""`LoRARequest`: the low-rank adapter of a request."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TypeAlias, cast

from ferrule._params.compatibility import Ignored, Refused, Rules, compatible
from ferrule.errors import InvalidParameterError

MAX_NAME_LENGTH = 256
"""Maximum number of characters of an adapter's name."""

FOREIGN: Rules = {
    "long_lora_max_len": Ignored(None, "the adapter has the context of the model"),
    "base_model_name": Ignored(None, "adapter_config.json names the base model"),
    "tensorizer_config_dict": Refused(None, "adapters load from PEFT's safetensors files"),
    "load_inplace": Refused(False, "unload the adapter and load it again"),
}
"""Fields of vLLM's LoRARequest that ferrule does not have."""


@compatible(FOREIGN)
@dataclass(frozen=True)
class LoRARequest:
    """An adapter for a request, by name and path. As in vLLM, it is loaded when it is first used.

    Raises InvalidParameterError for an invalid value.
    """

    lora_name: str
    """Name of the adapter."""
    lora_int_id: int = 0
    """Number that identifies the adapter in vLLM; ferrule identifies adapters by name and ignores it."""
    lora_path: str | os.PathLike[str] = ""
    """Directory or `org/repo` of the adapter; required unless an adapter with this name is loaded."""

    def __post_init__(self) -> None:
        check_adapter_name("lora_name", self.lora_name)
        if not isinstance(cast("object", self.lora_int_id), int):
            raise InvalidParameterError("lora_int_id", self.lora_int_id, "an integer (pass the path as lora_path)")
        check_adapter_path("lora_path", self.lora_path)

    @property
    def name(self) -> str:
        """Name of the adapter (vLLM's name)."""
        return self.lora_name

    @property
    def path(self) -> str:
        """Path of the adapter (vLLM's name)."""
        return os.fspath(self.lora_path)

    @property
    def adapter_id(self) -> int:
        """Number of the adapter (vLLM's name)."""
        return self.lora_int_id


LoRA: TypeAlias = str | LoRARequest
"""An adapter for a request: the name of a loaded one, or a LoRARequest."""


def check_adapter_name(field: str, name: object) -> str:
    """Returns an adapter's name.

    Raises InvalidParameterError.
    """
    if not isinstance(name, str) or not 1 <= len(name) <= MAX_NAME_LENGTH:
        raise InvalidParameterError(field, name, f"a string of 1 to {MAX_NAME_LENGTH} characters")
    return name


def check_adapter_path(field: str, path: object) -> str:
    """Returns an adapter's path as text.

    Raises InvalidParameterError.
    """
    given = os.fspath(cast("os.PathLike[str]", path)) if isinstance(path, os.PathLike) else path
    if not isinstance(given, str):
        raise InvalidParameterError(field, cast("object", path), "a string or a path")
    return given
