"""Check D: a lone KVCacheUpdate layer of TensorRT writes the rows it should, in place, and no others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from trt_kvcache.builder.network import Graph
from trt_kvcache.builder.network.kv_update import update_cache
from trt_kvcache.doctor.cases import CaseLog, CheckFailure
from trt_kvcache.doctor.compare import Array, check_equal
from trt_kvcache.doctor.settings import Settings
from trt_kvcache.doctor.single_layer import Runner, ShapeRange, SingleLayer, opened
from trt_kvcache.dtypes import numpy_dtype

_SLOTS, _HEADS, _TOKENS, _HEAD_DIM, _MAX_WIDTH = 3, 2, 128, 64, 8
_CACHE, _PRESENT = "k_cache", "present_k_cache"


class Write(NamedTuple):
    """One step: the first row of each slot, and the number of new rows."""

    name: str
    starts: tuple[int, int, int]
    width: int


#: A full slot that is idle has its start at S: its row must be dropped, as all rows from S on.
WRITES = (
    Write("first, middle and last row", (0, 17, _TOKENS - 1), 1),
    Write("a full slot", (_TOKENS, 5, _TOKENS), 1),
    Write("padded rows beyond S", (0, _TOKENS - 3, 40), _MAX_WIDTH),
)


class CacheUpdate(SingleLayer):
    """A KVCacheUpdate layer."""

    dtype = "float16"

    def define(self, graph: Graph) -> None:
        """See :meth:`SingleLayer.define`."""
        rows = graph.input("rows", self.dtype, (-1, _HEADS, -1, _HEAD_DIM))
        start = graph.input("start", "int32", (-1,))
        update_cache(graph, cache=(_CACHE, _PRESENT), shape=(_HEADS, _TOKENS, _HEAD_DIM), rows=rows, start_index=start)

    def shapes(self) -> Mapping[str, ShapeRange]:
        """See :meth:`SingleLayer.shapes`."""
        cache, widest = (_SLOTS, _HEADS, _TOKENS, _HEAD_DIM), (_SLOTS, _HEADS, _MAX_WIDTH, _HEAD_DIM)
        return {
            _CACHE: ((1, *cache[1:]), cache, cache),
            "rows": ((1, _HEADS, 1, _HEAD_DIM), widest, widest),
            "start": ((1,), (_SLOTS,), (_SLOTS,)),
        }

    def compute(self, tensors: Mapping[str, Array]) -> None:
        """See :meth:`SingleLayer.compute`."""
        write_rows(tensors[_PRESENT], tensors["rows"], tensors["start"].tolist())


def write_rows(cache: Array, rows: Array, starts: Sequence[int]) -> None:
    """Write rows ``[B, H, s, D]`` into a cache ``[B, H, S, D]``; rows from S on are dropped."""
    for slot, start in enumerate(starts):
        count = max(min(rows.shape[2], cache.shape[2] - start), 0)
        cache[slot, :, start : start + count] = rows[slot, :, :count]


def check(settings: Settings, log: CaseLog) -> None:
    """Check the alias, then each write, of the layer that native and mask share."""
    log.run("alias of the output", lambda: _alias(settings), variant="mask")
    for write in WRITES:
        log.run(write.name, lambda w=write: _written(settings, w), variant="mask")  # type: ignore[misc]


def _alias(settings: Settings) -> dict[str, Any]:
    with opened(settings, CacheUpdate(), "mask") as runner:
        if not runner.tensors:
            return {"built": True}
        alias = runner.tensors[_PRESENT].alias
        if alias != _CACHE:
            raise CheckFailure(f"output `{_PRESENT}`: expected it to share memory with `{_CACHE}`, got {alias or 'no input'}")
        return {"alias": alias}


def _written(settings: Settings, write: Write) -> dict[str, Any]:
    with opened(settings, CacheUpdate(), "mask") as runner:
        run_write(runner, write)
    return {}


def run_write(runner: Runner, write: Write) -> None:
    """Run one step over a part of an allocation, and compare all of its bytes."""
    memory = runner.memory
    stream, random, dtype = memory.create_stream(), np.random.default_rng(6), numpy_dtype(CacheUpdate.dtype)
    before = random.standard_normal((_SLOTS + 2, _HEADS, _TOKENS, _HEAD_DIM)).astype(dtype)  # a slot on each side
    rows = random.standard_normal((_SLOTS, _HEADS, write.width, _HEAD_DIM)).astype(dtype)
    allocation = memory.to_device(before, stream=stream)
    cache = allocation[1 : _SLOTS + 1]
    starts = memory.to_device(np.array(write.starts, np.int32), stream=stream)
    new_rows = memory.to_device(rows, stream=stream)
    memory.synchronize(stream)
    runner.run({_CACHE: cache, "rows": new_rows, "start": starts, _PRESENT: cache})
    expected = before.copy()
    write_rows(expected[1:-1], rows, write.starts)
    check_equal("the allocation around the cache", allocation.numpy(), expected)
