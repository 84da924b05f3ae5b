"""Positions and key lengths of a step, computed in the network from ``kvcache_start_index`` and the shape of ``input_ids``."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from trt_kvcache.builder.network.graph import Graph


@dataclass(frozen=True)
class StepLengths:
    """Lengths of a step of B slots by s new tokens per slot, padding included; all int32."""

    start_index: Any  # [B]: tokens in the cache before the step
    position_ids: Any  # [B, s]: start + arange(s), or + the depth of each token in a tree
    key_lengths: Any  # [B]: start + s, keys in the cache after the step, padding included


def step_lengths(graph: Graph, *, tokens: Any, start_index: Any, depths: Any = None) -> StepLengths:
    """Add the lengths of a step; of ``tokens`` ``[B, s, ...]`` only the shape is read. ``depths``: the input of an engine for trees."""
    shape = graph.op("lengths/shape", "shape", tokens)
    if len(tokens.shape) > 2:
        shape = graph.op("lengths/slots_and_width", "slice", shape, (0,), (2,), (1,))
    layer = graph.layer("lengths/arange", "fill", (1,), graph.trt.FillOperation.LINSPACE, graph.tensorrt.data_type("int32"))
    layer.set_input(0, shape)
    layer.set_input(1, graph.scalar("lengths/first", 0, "int32", 0))
    layer.set_input(2, graph.constant("lengths/steps", np.array([0, 1], np.int32)))  # per dimension of [B, s]
    places = graph.result(layer)
    if depths is not None:
        places = _depths_of_step(graph, depths, places, shape)
    column = graph.shuffle("lengths/start_column", start_index, reshape=(-1, 1))
    position_ids = graph.elementwise("lengths/position_ids", places, "SUM", column)

    width = graph.cast("lengths/width_int32", graph.op("lengths/width", "slice", shape, (1,), (1,), (1,)), "int32")
    key_lengths = graph.elementwise("lengths/key_lengths", start_index, "SUM", width)
    return StepLengths(start_index=start_index, position_ids=position_ids, key_lengths=key_lengths)


def _depths_of_step(graph: Graph, depths: Any, places: Any, shape: Any) -> Any:
    """Return the depths ``[B, s]`` of tokens in trees, and the places of tokens in chains, whose depth is -1."""
    layer = graph.layer("trees/slots", "fill", (1,), graph.trt.FillOperation.LINSPACE, graph.tensorrt.data_type("int32"))
    layer.set_input(0, shape)
    layer.set_input(1, graph.scalar("trees/first", 0, "int32", 0))
    layer.set_input(2, graph.constant("trees/steps", np.array([1, 0], np.int32)))
    width = graph.cast("trees/width_int32", graph.op("trees/width", "slice", shape, (1,), (1,), (1,)), "int32")
    columns = graph.shuffle("trees/width_column", width, reshape=(1, 1))
    first = graph.elementwise("trees/first_of_slot", graph.result(layer), "PROD", columns)
    index = graph.elementwise("trees/token", first, "SUM", places)
    # a step of more tokens than the table has is of chains
    last = graph.scalar("trees/last_token", depths.shape[0] * depths.shape[1] - 1, "int32", 2)
    index = graph.elementwise("trees/token_in_table", index, "MIN", last)
    table = graph.shuffle("trees/table", depths, reshape=(-1,))
    found = graph.op("trees/depths", "gather", table, index, 0)
    in_tree = graph.elementwise("trees/is_tree", found, "GREATER", graph.scalar("trees/chain", -1, "int32", 2))
    return graph.op("trees/places", "select", in_tree, found, places)
