"""Continuing saved sequences: snapshots are read and checked before a session changes anything."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace

from trt_kvcache.cache.cache import Cache
from trt_kvcache.errors import CapacityError, ShapeError, SnapshotError
from trt_kvcache.generation.sampling import SamplingParams
from trt_kvcache.sequences.model_identity import ModelIdentity
from trt_kvcache.sequences.snapshot import Snapshot
from trt_kvcache.session.model_location import expanded

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


def read_snapshots(paths: Paths, cache: Cache, model: ModelIdentity, adapters: Mapping[str, str]) -> list[Snapshot]:
    """Read snapshots for the first slots of a cache, which they were checked to fit. ``adapters``: names by hash."""
    each = [paths] if isinstance(paths, str | os.PathLike) else paths
    if not isinstance(each, Sequence) or not all(isinstance(path, str | os.PathLike) for path in each):
        raise ShapeError(f"snapshots: expected a path or a sequence of paths, got {paths!r}.")
    if not 1 <= len(each) <= cache.max_batch_size:
        raise ShapeError(f"snapshots: expected 1 to max_batch_size={cache.max_batch_size} files, got {len(each)}.")
    limit = cache.lengths.max_sequence_length
    snapshots = []
    for path in each:
        snapshot = Snapshot.read(expanded(path))
        adapter = snapshot.model.adapter
        snapshot.check_fits(cache, replace(model, adapter=adapter))
        if adapter is not None and adapter not in adapters:
            known = ", ".join(f"{name} ({one[:12]}...)" for one, name in adapters.items()) or "none"
            raise SnapshotError(
                f"{os.fspath(path)}: adapter: expected one of the session, {known}, got {adapter[:12]}.... "
                "Open the session with that adapter (adapters=)."
            )
        held = len(snapshot.tokens)
        if held > limit:
            raise CapacityError(f"{os.fspath(path)}: it holds {held} tokens, max_sequence_length is {limit}. Nothing was changed.")
        snapshots.append(snapshot)
    return snapshots


def next_tokens(snapshot: Snapshot) -> tuple[int, list[int]]:
    """Return the number of tokens of a snapshot to keep, and the tokens to run after them for the logits to continue from."""
    if snapshot.pending:
        return len(snapshot.tokens), list(snapshot.pending)
    if not snapshot.tokens or snapshot.slot_format.has_states:
        raise ShapeError("snapshot: expected at least one pending token to continue from, got none. Save it after a token was generated.")
    return len(snapshot.tokens) - 1, [snapshot.tokens[-1]]


def resumed_params(params: SamplingParams, snapshot: Snapshot) -> SamplingParams:
    """Return ``params`` that continue the random numbers of a snapshot, unless they have a seed of their own."""
    if snapshot.sampler is None or params.seed is not None:
        return params
    return replace(params, seed=snapshot.sampler.seed, counter=snapshot.sampler.counter)
