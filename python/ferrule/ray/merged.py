"""Responses of several replicas that become one: metrics and lists of models."""

from __future__ import annotations

import json
from collections.abc import Sequence

from prometheus_client import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from ferrule.ray.replica import ReplicaResponse


def merged_metrics(responses: Sequence[ReplicaResponse]) -> bytes:
    """Returns the metrics of replicas in Prometheus' text format; each sample has the label `replica`."""
    families: dict[str, Metric] = {}
    for response in responses:
        for family in text_string_to_metric_families(response.body.decode()):
            merged = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            for sample in family.samples:
                merged.samples.append(sample._replace(labels={**sample.labels, "replica": response.replica}))
    return generate_latest(_Families(list(families.values())))


def merged_lists(responses: Sequence[ReplicaResponse], field: str) -> bytes:
    """Returns the first of several JSON objects, whose list `field` has the items of all."""
    objects = [json.loads(response.body) for response in responses]
    return json.dumps({**objects[0], field: [item for each in objects for item in each[field]]}).encode()


class _Families(Collector):
    """Metrics that were collected before."""

    def __init__(self, families: Sequence[Metric]) -> None:
        self._families = families

    def collect(self) -> Sequence[Metric]:
        """Returns the metrics."""
        return self._families
