"""`build_app`: the HTTP server as an application of Ray Serve (https://docs.ray.io/en/latest/serve/index.html).

It has two deployments: `Ingress` (`ingress.py`) receives the requests, and each `ServerReplica` (`replica.py`) has the
application of the server and an engine.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, cast

from ferrule._loading import EMBEDDED
from ferrule._params.foreign_engine_args import FOREIGN
from ferrule._params.options import MAX_THREADS, AsyncEngineArgs
from ferrule._validation import check_integer, check_number
from ferrule.errors import InvalidParameterError, MissingDependencyError
from ferrule.ray.paths import absolute, with_absolute_paths

if TYPE_CHECKING:
    from ferrule.server import ServerSettings

MAX_REPLICAS = 1 << 16
MAX_REQUESTS = 1 << 20
UNSHARED = ("lora_dir", "files_dir", "responses_db")
"""Settings of state that changes with requests, which replicas do not share."""
ROUTER = "ferrule.ray.prefix_router.PrefixRouter"
SHUTDOWN_GRACE = 5
"""Seconds to send the last responses after the requests have ended."""
ATTEMPTS = 3
"""Number of attempts to start a replica."""


def build_app(
    model: str | os.PathLike[str] | None = None,
    *,
    num_replicas: int | None = None,
    autoscaling_config: Mapping[str, Any] | None = None,
    num_cpus: float = 1,
    max_ongoing_requests: int = 256,
    max_imbalance: int = 16,
    num_ingress_replicas: int = 1,
    served_model_names: Sequence[str] = (),
    settings: ServerSettings | Mapping[str, Any] | None = None,
    **engine_kwargs: Any,
) -> Any:
    """Returns an application of Ray Serve that serves a model with the APIs of `ferrule serve`.

        from ray import serve
        from ferrule.ray import build_app

        serve.run(build_app("org/repo", num_replicas=4, num_cpus=8))

    Each of `num_replicas` replicas (default 1) has an engine with `num_cpus` threads, which serves at most
    `max_ongoing_requests` at once. `autoscaling_config` has fields of Ray's AutoscalingConfig and replaces
    `num_replicas`.

    Requests of a conversation go to the same replica, whose prefix cache has their beginning. They go to another one if
    it has over `max_imbalance` requests more than the least busy one. All requests pass one of `num_ingress_replicas`
    ingresses, which need little processor time. `max_queued_requests`, an argument of the engine, also limits the
    requests that wait in an ingress for a replica; further ones get status 503.

    `served_model_names` are the names of the model in requests (default: `model`). `settings` are ServerSettings, or a
    mapping of their fields, without those of stored files, responses and adapters that are loaded over HTTP.
    `engine_kwargs` are further fields of AsyncEngineArgs. Every host needs the model under the same path or from the
    Hugging Face hub.

    Raises InvalidParameterError for an invalid value, and MissingDependencyError if Ray Serve is not installed. Errors
    of loading are those of the deployment.
    """
    try:
        from ray import serve
        from ray.serve.config import AutoscalingConfig

        from ferrule.ray.ingress import Ingress
        from ferrule.ray.replica import ServerReplica
    except ImportError as error:
        message = "ferrule.ray.build_app requires Ray Serve and the server: pip install 'ferrule[ray,server]'"
        raise MissingDependencyError(message) from error

    count = check_integer("num_replicas", 1 if num_replicas is None else num_replicas, 1, MAX_REPLICAS)
    check_number("num_cpus", num_cpus, 0, MAX_THREADS, above_low=True)
    check_integer("max_ongoing_requests", max_ongoing_requests, 1, MAX_REQUESTS)
    check_integer("max_imbalance", max_imbalance, 0, MAX_REQUESTS)
    check_integer("num_ingress_replicas", num_ingress_replicas, 1, MAX_REPLICAS)
    scaling: dict[str, Any] = {"num_replicas": count}
    if autoscaling_config is not None:
        if num_replicas is not None:
            raise InvalidParameterError("num_replicas", num_replicas, "unset with autoscaling_config")
        _check_fields("autoscaling_config", autoscaling_config, AutoscalingConfig.model_fields, "AutoscalingConfig")
        try:
            scaling = {"autoscaling_config": AutoscalingConfig(**autoscaling_config)}
        except ValueError as error:
            requirement = f"fields of Ray's AutoscalingConfig ({error})"
            raise InvalidParameterError("autoscaling_config", dict(autoscaling_config), requirement) from error
    server = _settings(settings)
    name = _model_name(model)
    names = _names(served_model_names) or (EMBEDDED if name is None else name,)
    engine = _engine_args(name, engine_kwargs)
    serve_api: Any = serve
    replicas = serve_api.deployment(
        ServerReplica,
        **scaling,
        ray_actor_options={"num_cpus": num_cpus},
        max_ongoing_requests=max_ongoing_requests,
        max_queued_requests=engine.max_queued_requests,
        graceful_shutdown_timeout_s=server.drain_timeout + SHUTDOWN_GRACE,
        max_constructor_retry_count=ATTEMPTS,
        request_router_config={
            "request_router_class": ROUTER,
            "request_router_kwargs": {"max_imbalance": max_imbalance},
        },
    )
    ingress = serve_api.deployment(
        serve_api.ingress()(Ingress),
        num_replicas=num_ingress_replicas,
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=MAX_REQUESTS,
        graceful_shutdown_timeout_s=server.drain_timeout + SHUTDOWN_GRACE,
    )
    return ingress.bind(replicas.bind(absolute(name), names, server, with_absolute_paths(engine_kwargs)), server)


def app_from_config(args: dict[str, Any]) -> Any:
    """Returns the application of `build_app` with arguments from a configuration of Ray Serve.

        applications:
          - name: ferrule
            import_path: ferrule.ray:app_from_config
            args: {model: org/repo, num_replicas: 4, num_cpus: 8}

    The API keys of the environment variable FERRULE_API_KEYS are added to those of `settings`.

    Raises as `build_app`.
    """
    from ferrule.server.settings import environment_api_keys

    given = dict(args)
    settings = _settings(given.pop("settings", None))
    settings = replace(settings, api_keys=(*settings.api_keys, *environment_api_keys()))
    return build_app(given.pop("model", None), settings=settings, **given)


def _settings(given: object) -> ServerSettings:
    """Returns the settings of each server.

    Raises InvalidParameterError.
    """
    from ferrule.server import ServerSettings

    if not isinstance(given, ServerSettings):
        given = {} if given is None else given
        known = {each.name for each in fields(ServerSettings)}
        given = ServerSettings(**_check_fields("settings", given, known, "ServerSettings"))
    for name in UNSHARED:
        if (value := getattr(given, name)) is not None:
            raise InvalidParameterError(f"settings.{name}", value, "left out; replicas do not share its state")
    return given


def _check_fields(field: str, given: object, known: Collection[str], kind: str) -> Mapping[str, Any]:
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


def _names(given: object) -> tuple[str, ...]:
    """Returns the names of a model in requests.

    Raises InvalidParameterError.
    """
    names = cast("Sequence[object]", given)
    if isinstance(given, str) or not isinstance(given, Sequence) or not all(isinstance(name, str) for name in names):
        raise InvalidParameterError("served_model_names", cast("object", given), "a list of strings")
    return tuple(cast("Sequence[str]", names))


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
