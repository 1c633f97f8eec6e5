"""The examples for Kubernetes have fields of the resources' schemas, and commands and arguments that exist.

The schemas here have the names and types of all fields of the objects in the examples, from the definitions of the
resources: `ray.io_rayservices.yaml` of KubeRay v1.7.0 and `serving.kserve.io_inferenceservices.yaml` of KServe v0.20.0.
These files have 3 MB. Objects that the examples do not have are not described.
"""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator
from ray.serve.schema import ServeDeploySchema

from ferrule._cli.serve import command
from ferrule.ray import app_from_config

EXAMPLES = Path(__file__).parents[2] / "examples"


def record(types: dict[str, str], required: str = "", **fields: object) -> dict[str, Any]:
    """Returns the schema of an object with these fields only; `types` are names of fields by type."""
    properties = {name: {"type": kind} for kind, names in types.items() for name in names.split()} | fields
    return {
        "type": "object",
        "properties": properties,
        "required": required.split(),
        "additionalProperties": False,
    }


def items(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": schema}


TEXT = {"type": "string"}
TEXTS = {"type": "object", "additionalProperties": TEXT}
AMOUNTS = {
    "type": "object",
    "additionalProperties": {"type": ["string", "integer"], "pattern": r"^\d+(\.\d+)?(m|[kMGTPE]|[KMGTPE]i)?$"},
}
"""Amounts of resources."""
METADATA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 63, "pattern": "^[a-z]([a-z0-9-]*[a-z0-9])?$"}},
    "required": ["name"],
}
"""Metadata, whose names the definitions leave to Kubernetes."""
PORT = record({"string": "hostIP name protocol", "integer": "containerPort hostPort"}, "containerPort")
HTTP_GET = record({"string": "host path scheme", "array": "httpHeaders"}, "port", port={"type": ["string", "integer"]})
PROBE = record(
    {
        "integer": "failureThreshold initialDelaySeconds periodSeconds successThreshold terminationGracePeriodSeconds "
        "timeoutSeconds",
        "object": "exec grpc tcpSocket",
    },
    httpGet=HTTP_GET,
)
CONTAINER = record(
    {
        "array": "env envFrom resizePolicy restartPolicyRules volumeDevices volumeMounts",
        "string": "image imagePullPolicy name restartPolicy terminationMessagePath terminationMessagePolicy workingDir",
        "object": "lifecycle livenessProbe securityContext startupProbe",
        "boolean": "stdin stdinOnce tty",
    },
    "name",
    command=items(TEXT),
    args=items(TEXT),
    ports=items(PORT),
    readinessProbe=PROBE,
    resources=record({"array": "claims"}, limits=AMOUNTS, requests=AMOUNTS),
)
POD_TYPES = {
    "integer": "activeDeadlineSeconds priority terminationGracePeriodSeconds",
    "object": "affinity dnsConfig os resources securityContext",
    "boolean": "automountServiceAccountToken enableServiceLinks hostIPC hostNetwork hostPID hostUsers "
    "setHostnameAsFQDN shareProcessNamespace",
    "string": "dnsPolicy hostname hostnameOverride nodeName preemptionPolicy priorityClassName restartPolicy "
    "runtimeClassName schedulerName serviceAccount serviceAccountName subdomain",
    "array": "hostAliases imagePullSecrets initContainers readinessGates resourceClaims schedulingGates tolerations "
    "topologySpreadConstraints volumes",
}
"""Fields of pods that a predictor has too."""
POD: dict[str, Any] = {"containers": items(CONTAINER), "nodeSelector": TEXTS, "overhead": AMOUNTS}
TEMPLATE = record(
    {"object": "metadata"},
    spec=record(
        POD_TYPES, "containers", **POD, schedulingGroup={"type": "object"}, ephemeralContainers={"type": "array"}
    ),
)
GROUP: dict[str, object] = {"labels": TEXTS, "rayStartParams": TEXTS, "resources": TEXTS, "template": TEMPLATE}
RAY_SERVICE = record(
    {},
    "apiVersion kind metadata spec",
    apiVersion={"const": "ray.io/v1"},
    kind={"const": "RayService"},
    metadata=METADATA,
    spec=record(
        {
            "integer": "deploymentUnhealthySecondThreshold rayClusterDeletionDelaySeconds "
            "serviceUnhealthySecondThreshold",
            "boolean": "excludeHeadPodFromServeSvc suspend",
            "string": "managedBy serveConfigV2",
            "object": "serveService upgradeStrategy",
        },
        "rayClusterConfig",
        rayClusterConfig=record(
            {
                "object": "authOptions autoscalerOptions gcsFaultToleranceOptions historyServerOptions networkPolicy "
                "tlsOptions upgradeStrategy",
                "boolean": "enableInTreeAutoscaling suspend",
                "string": "managedBy rayVersion",
            },
            "headGroupSpec",
            headServiceAnnotations=TEXTS,
            headGroupSpec=record(
                {"boolean": "enableIngress", "object": "headService ingressOptions", "string": "serviceType"},
                "template",
                **GROUP,
            ),
            workerGroupSpecs=items(
                record(
                    {
                        "string": "groupName",
                        "integer": "idleTimeoutSeconds maxReplicas minReplicas numOfHosts priority replicas",
                        "object": "scaleStrategy",
                        "boolean": "suspend",
                    },
                    "groupName maxReplicas minReplicas template",
                    **GROUP,
                )
            ),
        ),
    ),
)
PREDICTOR = record(
    {
        **POD_TYPES,
        "integer": f"{POD_TYPES['integer']} canaryTrafficPercent containerConcurrency maxReplicas minReplicas "
        "scaleTarget timeout",
        "object": f"{POD_TYPES['object']} autoScaling batcher deploymentStrategy huggingface lightgbm logger model "
        "onnx paddle pmml pytorch sklearn tensorflow triton workerSpec xgboost",
        "string": f"{POD_TYPES['string']} name storageContainerName",
        "array": f"{POD_TYPES['array']} storageUris",
    },
    **POD,
    annotations=TEXTS,
    labels=TEXTS,
    scaleMetric={"enum": ["cpu", "memory", "concurrency", "rps"]},
    scaleMetricType={"enum": ["Utilization", "Value", "AverageValue"]},
)
INFERENCE_SERVICE = record(
    {},
    "apiVersion kind metadata spec",
    apiVersion={"const": "serving.kserve.io/v1beta1"},
    kind={"const": "InferenceService"},
    metadata=METADATA,
    spec=record({"object": "canary explainer transformer"}, "predictor", predictor=PREDICTOR),
)


def errors_of(resource: Any, schema: dict[str, Any]) -> list[str]:
    return [f"{error.json_path}: {error.message}" for error in Draft202012Validator(schema).iter_errors(resource)]


SCHEMAS = pytest.mark.parametrize(
    ("name", "schema"), [("kuberay.yaml", RAY_SERVICE), ("kserve.yaml", INFERENCE_SERVICE)]
)


@SCHEMAS
def test_resource_has_fields_of_its_schema(name: str, schema: dict[str, Any]) -> None:
    Draft202012Validator.check_schema(schema)
    assert errors_of(yaml.safe_load((EXAMPLES / name).read_text()), schema) == []


@SCHEMAS
def test_unknown_field_is_an_error_in_each_object(name: str, schema: dict[str, Any]) -> None:
    resource = yaml.safe_load((EXAMPLES / name).read_text())
    for path in paths_of_objects(resource):
        changed = deepcopy(resource)
        place = changed
        for step in path:
            place = place[step]
        place["unknownField"] = {}
        assert errors_of(changed, schema), path


def paths_of_objects(value: object, path: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    """Returns the path of each object in a resource, except its metadata."""
    if isinstance(value, dict):
        pairs: list[tuple[str | int, object]] = [(name, each) for name, each in value.items() if name != "metadata"]
        return [path, *(found for name, each in pairs for found in paths_of_objects(each, (*path, name)))]
    if isinstance(value, list):
        return [found for index, each in enumerate(value) for found in paths_of_objects(each, (*path, index))]
    return []


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
