"""Arguments of `build_app` and `app_from_config`, without a cluster."""

from __future__ import annotations

import re
import sys
from typing import Any

import pytest
import ray

from ferrule import InvalidParameterError, MissingDependencyError
from ferrule.ray import app_from_config, build_app, serving


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_replicas": 0}, "num_replicas must be an integer from 1 to 65536, got 0"),
        ({"num_replicas": 2, "autoscaling_config": {}}, "num_replicas must be unset with autoscaling_config, got 2"),
        ({"autoscaling_config": {"min_replicas": -1}}, "autoscaling_config must be fields of Ray's AutoscalingConfig"),
        ({"num_cpus": 0}, "num_cpus must be a number > 0"),
        ({"max_ongoing_requests": 0}, "max_ongoing_requests must be an integer from 1 to"),
        ({"max_imbalance": -1}, "max_imbalance must be an integer from 0 to"),
        ({"max_loaded_adapters": 0}, "max_loaded_adapters must be an integer from 1 to"),
        ({"replicas_per_adapter": 0}, "replicas_per_adapter must be an integer from 1 to"),
        ({"lora_modules": ["a"]}, "lora_modules must be a mapping from adapter names to paths"),
        ({"lora_modules": {"": "a"}}, "lora_modules must be a string of 1 to 256 characters, got ''"),
        ({"lora_modules": {"a": 3}}, "lora_modules['a'] must be a string or a path, got 3"),
        ({"num_ingress_replicas": 0}, "num_ingress_replicas must be an integer from 1 to"),
        ({"autoscaling_config": {"replicas": 1}}, "autoscaling_config.replicas is not supported, got <class 'int'>"),
        ({"autoscaling_config": 3}, "autoscaling_config must be a mapping of fields of AutoscalingConfig"),
        ({"served_model_names": "tiny"}, "served_model_names must be a list of strings, got 'tiny'"),
        ({"model": 3}, "model must be the name or the path of a model, got 3"),
        ({"num_replica": 2}, "num_replica is not supported, got <class 'int'>; neither build_app nor AsyncEngineArgs"),
        ({"settings": []}, "settings must be a mapping of fields of ServerSettings, got <class 'list'>"),
        (
            {"settings": {"warmth": 1}},
            "settings.warmth is not supported, got <class 'int'>; ServerSettings has no such",
        ),
        ({"settings": {"files_dir": "x"}}, "settings.files_dir is not supported, got 'x'; replicas do not share"),
        ({"settings": {"max_body_bytes": 0}}, "max_body_bytes must be an integer from 1 to"),
        ({"max_model_len": 0}, "max_model_len must be an integer from 1 to"),
        ({"models": {}}, "models must be a mapping of names to models, with at least one, got {}"),
        ({"models": ["a"]}, "models must be a mapping of names to models, with at least one, got"),
        ({"models": {"": "a"}}, "models must be a mapping whose keys are names of models, got ''"),
        ({"models": {"a": 3}}, "models.a.model must be the name or the path of a model, got 3"),
        ({"models": {"a": {1: 2}}}, "models.a must be a mapping whose keys are arguments, got 1"),
        ({"models": {"a": {"num_cpus": 0}}}, "models.a.num_cpus must be a number > 0"),
        ({"models": {"a": {"max_model_len": 0}}}, "models.a.max_model_len must be an integer from 1 to"),
        (
            {"models": {"a": {"settings": {}}}},
            "models.a must be a mapping without settings, which applies to",
        ),
        ({"models": {"a": None}, "num_cpus": 0}, "num_cpus must be a number > 0"),
        ({"models": {"a": None}, "model": "b"}, "model must be unset with models, got 'b'"),
        ({"models": {"a": None}, "served_model_names": ["b"]}, "served_model_names must be unset with models, got"),
    ],
)
def test_invalid_argument_is_rejected(options: dict[str, Any], message: str) -> None:
    for build in (lambda: build_app(**options), lambda: app_from_config(options)):
        with pytest.raises(InvalidParameterError, match=re.escape(message)):
            build()


def test_error_of_a_misspelt_setting_hides_its_value() -> None:
    with pytest.raises(InvalidParameterError) as error:
        app_from_config({"settings": {"api_key": "secret"}})
    assert "secret" not in str(error.value)


def test_keys_of_the_environment_are_added(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FERRULE_API_KEYS", "b,c")
    monkeypatch.setattr(serving, "build_app", lambda *_, settings: settings.api_keys)
    assert app_from_config({"settings": {"api_keys": ["a"]}}) == ("a", "b", "c")


def test_missing_serve_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(ray, "serve")
    monkeypatch.setitem(sys.modules, "ray.serve", None)
    message = "ferrule.ray.build_app requires Ray Serve and the server: pip install 'ferrule[ray,server]'"
    with pytest.raises(MissingDependencyError, match=re.escape(message)):
        build_app()


def deployments(application: Any) -> list[Any]:
    """Returns the models of an application with their deployments."""
    models, _settings = application._bound_deployment.init_args
    return models


def test_models_have_their_own_replicas() -> None:
    models = {
        "org/small": None,
        "large": {
            "model": "org/large",
            "num_replicas": 3,
            "num_cpus": 2,
            "lora_modules": {"adapter": "org/adapter"},
            "max_loaded_adapters": 5,
        },
        "other": {"model": None},
        "elastic": {"model": "org/large", "autoscaling_config": {"min_replicas": 1, "max_replicas": 4}},
    }
    small, large, elastic = deployments(build_app(models=models, num_replicas=2, max_model_len=64))
    assert [list(each.names) for each in (small, large, elastic)] == [["org/small", "other"], ["large"], ["elastic"]]
    assert [list(each.adapters) for each in (small, large, elastic)] == [[], ["adapter"], []]
    found = [each.handle._bound_deployment for each in (small, large, elastic)]
    assert [each.name for each in found] == ["org_small", "large", "elastic"]
    assert [each.ray_actor_options["num_cpus"] for each in found] == [1, 2, 1]
    assert [each.num_replicas for each in found[:2]] == [2, 3]
    assert found[2]._deployment_config.autoscaling_config.max_replicas == 4
    assert [each.init_kwargs for each in found] == [{"max_loaded_adapters": limit} for limit in (None, 5, None)]
    listed = ("org/small", "other", "large", "elastic", "adapter")
    assert [each.init_args[:3] for each in found] == [
        (None, ("org/small", "other"), listed),
        ("org/large", ("large",), listed),
        ("org/large", ("elastic",), listed),
    ]
    assert [each.init_args[4] for each in found] == [
        {"max_model_len": 64, "tokenizer": None},
        {"max_model_len": 64, "tokenizer": None, "lora_modules": {"adapter": "org/adapter"}},
        {"max_model_len": 64, "tokenizer": None},
    ]
