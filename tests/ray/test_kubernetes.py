"""The examples for Kubernetes have fields of the resources' schemas, and commands and arguments that exist.

The schemas of Kubernetes, KubeRay and KServe are written here and have only the fields that the examples use.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator
from ray.serve.schema import ServeDeploySchema

from ferrule._cli.serve import command
from ferrule.ray import app_from_config

EXAMPLES = Path(__file__).parents[2] / "examples"


def record(required: str, **fields: object) -> dict[str, Any]:
    """Returns the schema of an object with these fields only."""
    return {"type": "object", "properties": fields, "required": required.split(), "additionalProperties": False}


def items(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "minItems": 1, "items": schema}


TEXT = {"type": "string"}
COUNT = {"type": "integer", "minimum": 0}
AMOUNTS = record("cpu memory", cpu=TEXT, memory={"type": "string", "pattern": r"^\d+[KMGT]i$"})
PORT = record("containerPort", containerPort=COUNT, name=TEXT, protocol={"enum": ["TCP"]})
PROBE = record(
    "httpGet",
    httpGet=record("path port", path=TEXT, port=COUNT),
    periodSeconds=COUNT,
    failureThreshold=COUNT,
)
CONTAINER = record(
    "name image resources",
    name=TEXT,
    image=TEXT,
    command=items(TEXT),
    args=items(TEXT),
    ports=items(PORT),
    readinessProbe=PROBE,
    resources=record("limits requests", limits=AMOUNTS, requests=AMOUNTS),
)
"""Fields of a Container of Kubernetes (core/v1)."""
POD = record("spec", spec=record("containers", containers=items(CONTAINER)))
OPTIONS = {"type": "object", "additionalProperties": TEXT}
"""Options of `ray start`, which are text."""
GROUP: dict[str, object] = {"rayStartParams": OPTIONS, "template": POD}
RAY_SERVICE = record(
    "apiVersion kind metadata spec",
    apiVersion={"const": "ray.io/v1"},
    kind={"const": "RayService"},
    metadata=record("name", name=TEXT),
    spec=record(
        "serveConfigV2 rayClusterConfig",
        serveConfigV2=TEXT,
        rayClusterConfig=record(
            "rayVersion headGroupSpec workerGroupSpecs",
            rayVersion=TEXT,
            enableInTreeAutoscaling={"type": "boolean"},
            headGroupSpec=record("rayStartParams template", **GROUP),
            workerGroupSpecs=items(
                record(
                    "groupName replicas minReplicas maxReplicas rayStartParams template",
                    groupName=TEXT,
                    **dict.fromkeys(("replicas", "minReplicas", "maxReplicas"), COUNT),
                    **GROUP,
                )
            ),
        ),
    ),
)
"""Fields of a RayService (https://ray-project.github.io/kuberay/reference/api)."""
INFERENCE_SERVICE = record(
    "apiVersion kind metadata spec",
    apiVersion={"const": "serving.kserve.io/v1beta1"},
    kind={"const": "InferenceService"},
    metadata=record("name", name=TEXT),
    spec=record(
        "predictor",
        predictor=record(
            "containers",
            **dict.fromkeys(("minReplicas", "maxReplicas", "scaleTarget", "timeout"), COUNT),
            scaleMetric={"enum": ["cpu", "memory", "concurrency", "rps"]},
            containers=items(CONTAINER),
        ),
    ),
)
"""Fields of an InferenceService (https://kserve.github.io/website/docs/reference/crd-api)."""


@pytest.mark.parametrize(("name", "schema"), [("kuberay.yaml", RAY_SERVICE), ("kserve.yaml", INFERENCE_SERVICE)])
def test_resource_has_fields_of_its_schema(name: str, schema: dict[str, Any]) -> None:
    Draft202012Validator.check_schema(schema)
    errors = list(Draft202012Validator(schema).iter_errors(yaml.safe_load((EXAMPLES / name).read_text())))
    assert [f"{error.json_path}: {error.message}" for error in errors] == []


def test_serve_configuration_builds_the_application() -> None:
    service = yaml.safe_load((EXAMPLES / "kuberay.yaml").read_text())["spec"]
    config = ServeDeploySchema.model_validate(yaml.safe_load(service["serveConfigV2"]))
    assert set(yaml.safe_load(service["serveConfigV2"])) <= set(ServeDeploySchema.model_fields)
    (application,) = config.applications
    assert application.import_path == f"ferrule.ray:{app_from_config.__name__}"
    app_from_config(application.args)
    (worker,) = service["rayClusterConfig"]["workerGroupSpecs"]
    (container,) = worker["template"]["spec"]["containers"]
    assert container["resources"]["limits"]["cpu"] == str(application.args["num_cpus"])
    assert worker["maxReplicas"] == application.args["autoscaling_config"]["max_replicas"]


def test_command_of_the_predictor_exists() -> None:
    predictor = yaml.safe_load((EXAMPLES / "kserve.yaml").read_text())["spec"]["predictor"]
    (container,) = predictor["containers"]
    program, name, *arguments = [*container["command"], *container["args"]]
    assert (program, name) == ("ferrule", command.name)
    context = command.make_context(name, arguments)
    assert context.params["port"] == container["ports"][0]["containerPort"]
    assert context.params["port"] == container["readinessProbe"]["httpGet"]["port"]
