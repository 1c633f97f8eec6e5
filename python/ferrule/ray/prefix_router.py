"""`PrefixRouter`: chooses a replica that has the adapter of a request and the beginning of its prompt in its cache."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

PREFIX = "prefix"
"""Argument of a call that has the key of its conversation."""
ADAPTER = "adapter"
"""Argument of a call that has the name of its adapter."""


def ranking(
    prefix: str | None,
    running: Mapping[str, int],
    max_imbalance: int,
    *,
    adapter: str | None = None,
    replicas_per_adapter: int = 1,
) -> list[str]:
    """Returns the replicas, by descending preference for a prefix and an adapter.

    `running` has the number of requests of each replica. The order depends on the prefix alone (rendezvous hashing), so
    that all ingresses agree on it and a new or lost replica moves only the prefixes that it has; without a prefix, the
    least busy replica comes first. An adapter has an order of replicas too, whose first `replicas_per_adapter` come
    before all others, so that the others need not load it. Replicas with more than `max_imbalance` requests above the
    least busy one come last.
    """
    order = sorted(running, key=running.__getitem__) if prefix is None else _rendezvous(prefix, running)
    if adapter is not None:
        places = {replica: place for place, replica in enumerate(_rendezvous(f"adapter {adapter}", running))}
        order.sort(key=lambda replica: max(places[replica], replicas_per_adapter - 1))
    limit = min(running.values(), default=0) + max_imbalance
    return sorted(order, key=lambda replica: running[replica] > limit)


def _rendezvous(key: str, replicas: Iterable[str]) -> list[str]:
    return sorted(replicas, key=lambda replica: hashlib.sha256(f"{key} {replica}".encode()).digest())


class PrefixRouter(RequestRouter):
    """Routes requests with the same prefix or adapter to the same replicas, and others to the least busy one."""

    def initialize_state(self, **kwargs: Any) -> None:
        """Sets the limits of `ranking`: `max_imbalance` and `replicas_per_adapter`."""
        self._limits: Mapping[str, int] = kwargs
        self._running: Counter[str] = Counter()

    def on_send_request(self, replica_id: ReplicaID) -> None:
        """Counts a request."""
        super().on_send_request(replica_id)
        self._running[replica_id.unique_id] += 1

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Counts the end of a request, for whatever reason it ended."""
        super().on_request_completed(replica_id, internal_request_id)
        if self._running[replica_id.unique_id] > 0:  # it is 0 for a replica that was removed
            self._running[replica_id.unique_id] -= 1

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Sets the replicas and forgets the requests of others."""
        super().update_replicas(replicas)
        self._running = Counter({(name := each.replica_id.unique_id): self._running[name] for each in replicas})

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Returns groups of replicas; Serve takes the first one that has room for the request."""
        given: Mapping[str, Any] = {} if pending_request is None else pending_request.kwargs
        prefix, adapter = given.get(PREFIX), given.get(ADAPTER)
        if prefix is None and adapter is None:
            return [candidate_replicas]
        replicas = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        running = {name: self._running[name] for name in replicas}
        return [[replicas[name]] for name in ranking(prefix, running, adapter=adapter, **self._limits)]
