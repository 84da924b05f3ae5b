"""``PrefixRouter``: Ray Serve's choice of a replica, by the beginnings of prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from trt_kvcache.server.prefix_routing import PrefixRouting


class PrefixRouter(RequestRouter):  # type: ignore[misc]
    """Sends a prompt to the replica that has its beginning, unless that has more to do than it saves."""

    def initialize_state(self, **options: int) -> None:
        """Take the keyword arguments of the configuration."""
        self._routing = PrefixRouting[ReplicaID](**options)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the replicas in the order in which they are to be tried; those that are full are passed over by Ray."""
        if pending_request is None:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True  # all of them are tried, so Ray may wait before it asks again
        running = {replica.replica_id: replica for replica in candidate_replicas}
        return [[running[name]] for name in self._routing.order(_prompt(pending_request), running)]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """Record which replica has taken a request."""
        self._routing.begin(pending_request.metadata.internal_request_id, _prompt(pending_request), replica_id)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Record that a replica has answered a request."""
        self._routing.end(internal_request_id)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Forget a replica that has died."""
        super().on_replica_actor_died(replica_id)
        self._routing.forget(replica_id)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Take the list of the replicas that run now, and forget the others."""
        gone = self.curr_replicas.keys() - {replica.replica_id for replica in replicas}
        super().update_replicas(replicas)
        for replica_id in gone:
            self._routing.forget(replica_id)


def _prompt(request: PendingRequest) -> Sequence[int]:
    """Return the token ids of a request to an engine; those of other calls are none."""
    given = request.args[0] if request.args else None
    tokens = given.get("token_ids") if isinstance(given, dict) else None
    return tokens if isinstance(tokens, list) else ()
