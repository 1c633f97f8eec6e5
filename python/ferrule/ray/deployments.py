"""`ModelOptions`: the checked options of a model in an application of Ray Serve, and its deployment."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Self, cast

from ray import serve
from ray.serve.config import AutoscalingConfig

from ferrule._loading import EMBEDDED
from ferrule._params.foreign_engine_args import FOREIGN
from ferrule._params.lora import check_adapter_name, check_adapter_path
from ferrule._params.options import MAX_THREADS, AsyncEngineArgs
from ferrule._validation import check_integer, check_number
from ferrule.errors import InvalidParameterError
from ferrule.ray.ingress import ModelReplicas
from ferrule.ray.paths import absolute, with_absolute_paths
from ferrule.ray.replica import ServerReplica
from ferrule.server.settings import ServerSettings

MAX_REPLICAS = 1 << 16
MAX_REQUESTS = 1 << 20
MAX_NAME = 100
"""Maximum number of characters of the name of a deployment."""
ROUTER = "ferrule.ray.prefix_router.PrefixRouter"
SHUTDOWN_GRACE = 5
"""Seconds to send the last responses after the requests have ended."""
ATTEMPTS = 3
"""Number of attempts to start a replica."""


@dataclass(frozen=True)
class ModelOptions:
    """Options of a model: its replicas, and the arguments of their engines."""

    model: str | None
    scaling: Mapping[str, Any]
    """`num_replicas` or `autoscaling_config` of the deployment."""
    num_cpus: float
    max_ongoing_requests: int
    max_imbalance: int
    max_queued_requests: int | None
    max_loaded_adapters: int | None
    replicas_per_adapter: int
    engine: Mapping[str, Any]
    """Arguments of AsyncLLM."""

    @classmethod
    def of(
        cls,
        *,
        model: object = None,
        num_replicas: int | None,
        autoscaling_config: Mapping[str, Any] | None,
        num_cpus: float,
        max_ongoing_requests: int,
        max_imbalance: int,
        max_loaded_adapters: int | None,
        replicas_per_adapter: int,
        **engine: Any,
    ) -> Self:
        """Checks the arguments of `build_app` for a model.

        Raises InvalidParameterError.
        """
        name = _model_name(model)
        _check_adapters(engine.get("lora_modules"))
        if max_loaded_adapters is not None:
            check_integer("max_loaded_adapters", max_loaded_adapters, 1, MAX_REQUESTS)
        return cls(
            model=name,
            scaling=_scaling(num_replicas, autoscaling_config),
            num_cpus=check_number("num_cpus", num_cpus, 0, MAX_THREADS, above_low=True),
            max_ongoing_requests=check_integer("max_ongoing_requests", max_ongoing_requests, 1, MAX_REQUESTS),
            max_imbalance=check_integer("max_imbalance", max_imbalance, 0, MAX_REQUESTS),
            max_queued_requests=_engine_args(name, engine).max_queued_requests,
            max_loaded_adapters=max_loaded_adapters,
            replicas_per_adapter=check_integer("replicas_per_adapter", replicas_per_adapter, 1, MAX_REPLICAS),
            engine=engine,
        )

    @property
    def adapters(self) -> Sequence[str]:
        """Names of the adapters in requests."""
        return tuple(self.engine.get("lora_modules") or ())

    @property
    def default_name(self) -> str:
        """Default of the name of the model in requests."""
        return EMBEDDED if self.model is None else self.model

    def bind(self, names: Sequence[str], listed: Sequence[str], settings: ServerSettings) -> ModelReplicas:
        """Returns the deployment of the model, which has `names` in requests.

        `listed` are the names of all models of the application.
        """
        deployment = cast("Any", serve).deployment(
            ServerReplica,
            name=re.sub(r"[^\w.-]", "_", names[0], flags=re.ASCII)[-MAX_NAME:],  # it is part of file names
            **self.scaling,
            ray_actor_options={"num_cpus": self.num_cpus},
            max_ongoing_requests=self.max_ongoing_requests,
            max_queued_requests=self.max_queued_requests,
            graceful_shutdown_timeout_s=settings.drain_timeout + SHUTDOWN_GRACE,
            max_constructor_retry_count=ATTEMPTS,
            request_router_config={
                "request_router_class": ROUTER,
                "request_router_kwargs": {
                    "max_imbalance": self.max_imbalance,
                    "replicas_per_adapter": self.replicas_per_adapter,
                },
            },
        )
        options = with_absolute_paths(self.engine)
        arguments = (absolute(self.model), names, listed, settings, options)
        bound = deployment.bind(*arguments, max_loaded_adapters=self.max_loaded_adapters)
        return ModelReplicas(names, self.adapters, bound)


def check_fields(field: str, given: object, known: Collection[str], kind: str) -> Mapping[str, Any]:
    """Returns a mapping whose keys are `known`. Errors have types instead of values, which may be secrets.

    Raises InvalidParameterError.
    """
    if not isinstance(given, Mapping):
        raise InvalidParameterError(field, _type(given), f"a mapping of fields of {kind}")
    found = cast("Mapping[str, Any]", given)
    for name, value in found.items():
        if name not in known:
            raise InvalidParameterError(f"{field}.{name}", _type(value), f"left out; {kind} has no such field")
    return found


def _type(value: object) -> type[object]:
    return type(value)


def _model_name(model: object) -> str | None:
    """Returns a model's name or path as text.

    Raises InvalidParameterError.
    """
    if model is None or isinstance(model, str):
        return model
    if not isinstance(model, os.PathLike):
        raise InvalidParameterError("model", model, "the name or the path of a model")
    return os.fspath(cast("os.PathLike[str]", model))


def _check_adapters(given: object) -> None:
    """Checks names and paths of adapters, which replicas load when a request first needs them.

    Raises InvalidParameterError.
    """
    if given is None:
        return
    if not isinstance(given, Mapping):
        raise InvalidParameterError("lora_modules", given, "a mapping from adapter names to paths")
    for name, path in cast("Mapping[object, object]", given).items():
        check_adapter_name("lora_modules", name)
        check_adapter_path(f"lora_modules[{name!r}]", path)


def _scaling(num_replicas: int | None, autoscaling_config: object) -> dict[str, Any]:
    """Returns the number of replicas, or how it changes, as an option of a deployment.

    Raises InvalidParameterError.
    """
    count = check_integer("num_replicas", 1 if num_replicas is None else num_replicas, 1, MAX_REPLICAS)
    if autoscaling_config is None:
        return {"num_replicas": count}
    if num_replicas is not None:
        raise InvalidParameterError("num_replicas", num_replicas, "unset with autoscaling_config")
    kind = AutoscalingConfig.__name__
    given = check_fields("autoscaling_config", autoscaling_config, AutoscalingConfig.model_fields, kind)
    try:
        return {"autoscaling_config": AutoscalingConfig(**given)}
    except ValueError as error:
        requirement = f"fields of Ray's AutoscalingConfig ({error})"
        raise InvalidParameterError("autoscaling_config", dict(given), requirement) from error


def _engine_args(model: str | None, given: Mapping[str, Any]) -> AsyncEngineArgs:
    """Returns the arguments of the engines, which are checked before a replica starts.

    Raises InvalidParameterError for an invalid value or an unknown name.
    """
    known = {each.name for each in fields(AsyncEngineArgs)} | FOREIGN.keys()
    for name, value in given.items():
        if name not in known:
            requirement = "left out; neither build_app nor AsyncEngineArgs has such an argument"
            raise InvalidParameterError(name, _type(value), requirement)  # the value may be a secret
    return AsyncEngineArgs(model=model, **given)
