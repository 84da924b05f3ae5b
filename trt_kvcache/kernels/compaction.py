"""Compaction in place of K/V, states and lengths, by one plan. It needs no scratch memory, and addresses do not change."""

from typing import Any

from trt_kvcache.errors import MappingError, PlaceError, RangeError
from trt_kvcache.kernels.backend import backend_of
from trt_kvcache.kernels.compaction_plan import AnyCompactionPlan, CompactionPlan, DeviceCompactionPlan
from trt_kvcache.kernels.layer_infos import KVLayerInfos, check_kind
from trt_kvcache.kernels.lengths import check_lengths
from trt_kvcache.kernels.state_infos import StateInfos, check_states
from trt_kvcache.memory.base import Memory
from trt_kvcache.memory.tensor import DeviceTensor


def _check_plan(moves: AnyCompactionPlan, slots: int, memory: Memory, stream: Any) -> None:
    if not isinstance(moves, CompactionPlan | DeviceCompactionPlan):
        raise MappingError(f"moves: expected a CompactionPlan, got {type(moves).__name__}.")
    if moves.old_batch > slots:
        raise MappingError(f"moves: expected a plan of at most {slots} slots, got one of old_batch={moves.old_batch}.")
    memory.check_stream(stream)
    if isinstance(moves, DeviceCompactionPlan) and moves.mapping.memory is not memory:
        raise PlaceError(f"moves: expected a mapping of {memory.device}, got one of {moves.mapping.memory.device}.")


def compact_kv_cache_batched(layer_infos: KVLayerInfos, moves: AnyCompactionPlan, *, stream: Any) -> None:
    """Move the live tokens of the kept slots of all layers of a head-dim group to their new slots, in place.

    Parameters
    ----------
    layer_infos : KVLayerInfos
        The cache's layers; their heads may differ.
    moves : CompactionPlan, or DeviceCompactionPlan
        Any permutation if the host knows the mapping. A mapping on the device keeps the order; its lengths are read here, so compact
        them after this.
    stream : cuda.core.Stream, or with a device mapping GraphBuilder
        The launches, one for every 96 moves, are ordered on it; the call neither waits nor allocates.

    Raises
    ------
    MappingError, RangeError, ShapeError, PlaceError, ClosedError
        The plan does not fit the layers. Nothing was changed.
    """
    check_kind("layer_infos", layer_infos, saved=False)
    _check_plan(moves, layer_infos.max_batch_size, layer_infos.memory, stream)
    layer_infos.check_open()
    if isinstance(moves, CompactionPlan):
        if moves.max_tokens > layer_infos.shortest_sequence:
            raise RangeError(f"moves: expected lengths up to {layer_infos.shortest_sequence} tokens, got {moves.max_tokens}.")
        if not moves.max_tokens:
            return
        moves = moves.of_rows(layer_infos.tokens_per_row)
    if moves.old_batch:
        backend_of(layer_infos.memory).compact_layers(layer_infos, moves, stream)


def compact_rows(states: StateInfos, moves: AnyCompactionPlan, *, stream: Any) -> None:
    """Move the states of the kept slots of all layers of one kind to their new slots, in place.

    Parameters
    ----------
    states : StateInfos
        The states of all layers of one kind.
    moves : CompactionPlan, or DeviceCompactionPlan
        As for :func:`compact_kv_cache_batched`. Whole rows move, whatever the lengths.
    stream : cuda.core.Stream, or with a device mapping GraphBuilder
        The launches, one for every 96 moves, are ordered on it; the call neither waits nor allocates.

    Raises
    ------
    MappingError, ShapeError, PlaceError, ClosedError
        The plan does not fit the states. Nothing was changed.
    """
    check_states("states", states)
    _check_plan(moves, states.max_batch_size, states.memory, stream)
    states.check_open()
    if moves.old_batch and not moves.is_identity:
        backend_of(states.memory).compact_rows(states, moves, stream)


def compact_length_tensor(lengths: DeviceTensor, moves: AnyCompactionPlan, *, stream: Any) -> None:
    """Move the lengths of the kept slots to their new slots, in place.

    Parameters
    ----------
    lengths : DeviceTensor (n,) int32
        ``n >= old_batch``. Entries from ``new_batch`` on keep what they hold.
    moves : CompactionPlan, or DeviceCompactionPlan
        With a device mapping this comes last: the other parts read the old lengths.
    stream : cuda.core.Stream, or with a device mapping GraphBuilder
        The launches, one for every 96 moves, are ordered on it; the call neither waits nor allocates.

    Raises
    ------
    MappingError, ShapeError, DTypeError, PlaceError, ClosedError
        The plan does not fit the lengths. Nothing was changed.
    """
    check_lengths(lengths)
    _check_plan(moves, len(lengths), lengths.memory, stream)
    if moves.old_batch and not moves.is_identity:
        backend_of(lengths.memory).compact_lengths(lengths, moves, stream)
