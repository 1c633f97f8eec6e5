"""`build_app`: the HTTP server as an application of Ray Serve (https://docs.ray.io/en/latest/serve/index.html).

`Ingress` (`ingress.py`) receives the requests. Each model has a deployment, whose replicas, each a `ServerReplica`
(`replica.py`), have the application of the server and an engine.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, cast

from ferrule._validation import check_integer
from ferrule.errors import InvalidParameterError, MissingDependencyError

if TYPE_CHECKING:
    from ferrule.ray.deployments import ModelOptions
    from ferrule.server import ServerSettings

UNSHARED = ("lora_dir", "files_dir", "responses_db")
"""Settings of state that changes with requests, which replicas do not share."""
APPLICATION_ARGUMENTS = ("models", "num_ingress_replicas", "served_model_names", "settings")
"""Arguments of `build_app` that are not those of a model."""
SCALING_ARGUMENTS = ("num_replicas", "autoscaling_config")
"""Arguments of which a model has at most one."""


def build_app(
    model: str | os.PathLike[str] | None = None,
    *,
    models: Mapping[str, Any] | None = None,
    num_replicas: int | None = None,
    autoscaling_config: Mapping[str, Any] | None = None,
    num_cpus: float = 1,
    max_ongoing_requests: int = 256,
    max_imbalance: int = 16,
    max_loaded_adapters: int | None = None,
    replicas_per_adapter: int = 2,
    num_ingress_replicas: int = 1,
    served_model_names: Sequence[str] = (),
    settings: ServerSettings | Mapping[str, Any] | None = None,
    **engine_kwargs: Any,
) -> Any:
    """Returns an application of Ray Serve that serves models with the APIs of `ferrule serve`.

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

    The adapters of `lora_modules`, an argument of the engine, are loaded when a request first needs them. Requests for
    an adapter go to `replicas_per_adapter` of the replicas, so that the others need not load it, unless these have over
    `max_imbalance` requests more. A replica keeps at most `max_loaded_adapters` (default: as many as fit into memory):
    it unloads the least recently used ones that no request uses.

    `served_model_names` are the names of the model in requests (default: `model`). `settings` are ServerSettings, or a
    mapping of their fields, without those of stored files, responses and adapters that are loaded over HTTP.
    `engine_kwargs` are further fields of AsyncEngineArgs. Every host needs the model under the same path or from the
    Hugging Face hub.

    `models` replaces `model` and has several models by name in requests, each with its own replicas. A value is the
    name or path of a model, or a mapping of `model` and of the other arguments that differ for it. Names with equal
    values share their replicas. The first model serves requests that name none.

        models = {"small": "org/small", "large": {"model": "org/large", "num_replicas": 4, "num_cpus": 16}}
        serve.run(build_app(models=models, num_cpus=8))

    Raises InvalidParameterError for an invalid value, and MissingDependencyError if Ray Serve is not installed. Errors
    of loading are those of the deployment.
    """
    try:
        from ray import serve

        from ferrule.ray.deployments import MAX_REPLICAS, MAX_REQUESTS, SHUTDOWN_GRACE, ModelOptions
        from ferrule.ray.ingress import Ingress
    except ImportError as error:
        message = "ferrule.ray.build_app requires Ray Serve and the server: pip install 'ferrule[ray,server]'"
        raise MissingDependencyError(message) from error

    check_integer("num_ingress_replicas", num_ingress_replicas, 1, MAX_REPLICAS)
    server = _settings(settings)
    shared: dict[str, Any] = {
        "num_replicas": num_replicas,
        "autoscaling_config": autoscaling_config,
        "num_cpus": num_cpus,
        "max_ongoing_requests": max_ongoing_requests,
        "max_imbalance": max_imbalance,
        "max_loaded_adapters": max_loaded_adapters,
        "replicas_per_adapter": replicas_per_adapter,
        **engine_kwargs,
    }
    options = ModelOptions.of(model=model, **shared)
    own_names = _names(served_model_names)
    served = [(own_names or (options.default_name,), options)]
    if models is not None:
        for field, value in (("model", model), ("served_model_names", own_names)):
            if value not in (None, ()):
                raise InvalidParameterError(field, value, "unset with models")
        served = _several(models, shared)
    names = [name for names, _ in served for name in names]
    listed = tuple(dict.fromkeys([*names, *(adapter for _, options in served for adapter in options.adapters)]))
    replicas = [options.bind(names, listed, server) for names, options in served]
    serve_api: Any = serve
    ingress = serve_api.deployment(
        serve_api.ingress()(Ingress),
        num_replicas=num_ingress_replicas,
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=MAX_REQUESTS,
        graceful_shutdown_timeout_s=server.drain_timeout + SHUTDOWN_GRACE,
    )
    return ingress.bind(replicas, server)


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


def _several(models: object, shared: Mapping[str, Any]) -> list[tuple[tuple[str, ...], ModelOptions]]:
    """Returns the options of each model with its names; `shared` are the options of all that a model may replace.

    Raises InvalidParameterError.
    """
    given_models = cast("Mapping[object, object]", models)
    if not isinstance(models, Mapping) or not given_models:
        raise InvalidParameterError("models", given_models, "a mapping of names to models, with at least one")
    served: list[tuple[tuple[str, ...], ModelOptions]] = []
    for name, given in given_models.items():
        if not isinstance(name, str) or not name:
            raise InvalidParameterError("models", name, "a mapping whose keys are names of models")
        options = _options(f"models.{name}", given, shared)
        same = [index for index, (_, known) in enumerate(served) if known == options]
        if same:
            served[same[0]] = ((*served[same[0]][0], name), options)
        else:
            served.append(((name,), options))
    return served


def _options(field: str, given: object, shared: Mapping[str, Any]) -> ModelOptions:
    """Returns the options of one of several models.

    Raises InvalidParameterError.
    """
    from ferrule.ray.deployments import ModelOptions

    own: dict[str, Any] = dict(cast("Mapping[str, Any]", given)) if isinstance(given, Mapping) else {"model": given}
    for name in own:
        if not isinstance(cast("object", name), str):
            raise InvalidParameterError(field, name, "a mapping whose keys are arguments")
        if name in APPLICATION_ARGUMENTS:
            raise InvalidParameterError(field, name, f"a mapping without {name}, which applies to all models")
    unset: dict[str, Any] = dict.fromkeys(SCALING_ARGUMENTS) if any(name in own for name in SCALING_ARGUMENTS) else {}
    try:
        return ModelOptions.of(**{**shared, **unset, **own})
    except InvalidParameterError as error:
        raise InvalidParameterError(f"{field}.{error.field}", error.value, error.requirement) from error


def _settings(given: object) -> ServerSettings:
    """Returns the settings of each server.

    Raises InvalidParameterError.
    """
    from ferrule.ray.deployments import check_fields
    from ferrule.server import ServerSettings

    if not isinstance(given, ServerSettings):
        given = {} if given is None else given
        known = {each.name for each in fields(ServerSettings)}
        given = ServerSettings(**check_fields("settings", given, known, "ServerSettings"))
    for name in UNSHARED:
        if (value := getattr(given, name)) is not None:
            raise InvalidParameterError(f"settings.{name}", value, "left out; replicas do not share its state")
    return given


def _names(given: object) -> tuple[str, ...]:
    """Returns the names of a model in requests.

    Raises InvalidParameterError.
    """
    names = cast("Sequence[object]", given)
    if isinstance(given, str) or not isinstance(given, Sequence) or not all(isinstance(name, str) for name in names):
        raise InvalidParameterError("served_model_names", cast("object", given), "a list of strings")
    return tuple(cast("Sequence[str]", names))
