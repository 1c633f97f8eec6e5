"""`PrefixRouter`: chooses the replica whose prefix cache has the beginning of a prompt."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

PREFIX = "prefix"
"""Argument of a call that has the key of its conversation."""


def ranking(prefix: str, running: Mapping[str, int], max_imbalance: int) -> list[str]:
    """Returns the replicas, by descending preference for a prefix.

    `running` has the number of requests of each replica. The order depends on the prefix alone (rendezvous hashing), so
    that all ingresses agree on it and a new or lost replica moves only the prefixes that it has, except that replicas
    with more than `max_imbalance` requests above the least busy one come last.
    """
    limit = min(running.values(), default=0) + max_imbalance
    order = sorted(running, key=lambda replica: hashlib.sha256(f"{prefix} {replica}".encode()).digest())
    return sorted(order, key=lambda replica: running[replica] > limit)


class PrefixRouter(RequestRouter):
    """Routes requests with the same prefix to the same replica, and others to the least busy one."""

    def initialize_state(self, **kwargs: Any) -> None:
        """Sets `max_imbalance`: how many requests a replica may have above the least busy one."""
        self._max_imbalance: int = kwargs["max_imbalance"]
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
        prefix = None if pending_request is None else pending_request.kwargs.get(PREFIX)
        if prefix is None:
            return [candidate_replicas]
        replicas = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        running = {name: self._running[name] for name in replicas}
        return [[replicas[name]] for name in ranking(prefix, running, self._max_imbalance)]
