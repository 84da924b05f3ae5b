"""Rotary position embedding (RoPE): a pair of tables for each variant of RoPE, one TensorRT layer for each of q and k."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from trt_kvcache.builder.network.graph import Graph
from trt_kvcache.engine_folder.decoder_segments import RopeKind, cos_sin_names
from trt_kvcache.model import ModelConfig, rope_table


@dataclass(frozen=True)
class RopeTables:
    """Cosines and sines ``[S, rotary_dim / 2]`` float32 of every position; RoPE scaling is included."""

    cos: Any
    sin: Any
    rotary_dim: int  # leading elements of a head that are rotated


def rope_tables(graph: Graph, model: ModelConfig, *, length: int) -> Mapping[RopeKind, RopeTables]:
    """Add the tables of each kind of RoPE to the network as constants, for positions ``0 .. length - 1``."""
    tables = {}
    for index, (rope, head_dim) in enumerate(cos_sin_names(model)):
        name = f"rope_{index}" if index else "rope"
        cos, sin = rope_table(rope, head_dim, length)
        constants = graph.constant(f"{name}/cos", cos), graph.constant(f"{name}/sin", sin)
        tables[rope, head_dim] = RopeTables(*constants, rotary_dim=rope.rotary_dim(head_dim))
    return tables


def split_table(graph: Graph, name: str, table: Any, kind: RopeKind) -> RopeTables:
    """Return the tables of a tensor ``[S, 2, rotary_dim / 2]`` float32: see :func:`cos_sin`."""
    rope, head_dim = kind
    length, _, half = table.shape
    sides = []
    for index, side in enumerate(("cos", "sin")):
        rows = graph.op(f"{name}/{side}", "slice", table, (0, index, 0), (length, 1, half), (1, 1, 1))
        sides.append(graph.shuffle(f"{name}/{side}/rows", rows, reshape=(length, half)))
    cos, sin = sides
    return RopeTables(cos, sin, rotary_dim=rope.rotary_dim(head_dim))


def cos_sin(kind: RopeKind, *, length: int) -> np.ndarray[Any, Any]:
    """Return both tables in one array ``[S, 2, rotary_dim / 2]`` float32, as the attention of this package reads them."""
    return np.stack(rope_table(*kind, length), axis=1)


def apply_rope(graph: Graph, name: str, x: Any, tables: RopeTables | None, position_ids: Any) -> Any:
    """Apply RoPE: rotate the pairs ``(d, d + rotary_dim / 2)`` of each row of ``x`` ``[B, H, s, D]`` by the angle of its position.

    The result is float32, so that the caller rounds once.
    """
    wide = graph.cast(f"{name}/to_float32", x, "float32")
    if tables is None:
        return wide
    interleaved = False
    rotary_dim = 0 if tables.rotary_dim == x.shape[-1] else tables.rotary_dim  # 0 rotates all of D
    layer = graph.layer(f"{name}/rotate", "rotary_embedding", wide, tables.cos, tables.sin, interleaved, rotary_dim)
    layer.set_input(3, position_ids)
    return graph.result(layer)
