"""``PrefixRouter``: chooses a replica of Ray Serve by the prefixes of prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from trt_kvcache.server.prefix_routing import PrefixRouting


class PrefixRouter(RequestRouter):  # type: ignore[misc]
    """Routes prompts by ``PrefixRouting``. Each deployment handle has its own router, which knows only the prompts that it has sent."""

    def initialize_state(self, **options: int) -> None:
        """Take ``request_router_kwargs``: the arguments of ``PrefixRouting``."""
        self._routing = PrefixRouting[ReplicaID](**options)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the replicas in the order of preference. Ray skips full ones."""
        if pending_request is None:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True  # all replicas are tried, so Ray may wait before the next call
        running = {replica.replica_id: replica for replica in candidate_replicas}
        return [[running[name]] for name in self._routing.order(_prompt(pending_request), running)]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """Record the replica of a request."""
        self._routing.begin(pending_request.metadata.internal_request_id, _prompt(pending_request), replica_id)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Record the end of a request."""
        self._routing.end(internal_request_id)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Drop a replica that has died."""
        super().on_replica_actor_died(replica_id)
        self._routing.forget(replica_id)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Set the running replicas, and drop all others."""
        gone = self.curr_replicas.keys() - {replica.replica_id for replica in replicas}
        super().update_replicas(replicas)
        for replica_id in gone:
            self._routing.forget(replica_id)


def _prompt(request: PendingRequest) -> Sequence[int]:
    """Return the token ids of a request to ``generate``, after a number for its adapter if it has one; other calls have none."""
    given = request.args[0] if request.args else None
    if not isinstance(given, dict) or not isinstance(given.get("token_ids"), list):
        return ()
    adapter, tokens = given.get("adapter"), given["token_ids"]
    return tokens if adapter is None else [hash(adapter), *tokens]  # a prefix of one adapter is not cached for another
