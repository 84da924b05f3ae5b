"""Rotary position embedding (RoPE): tables once per network, one TensorRT layer for each of q and k."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from trt_kvcache.builder.network.graph import Graph
from trt_kvcache.model import AttentionConfig, rope_table


@dataclass(frozen=True)
class RopeTables:
    """Cosines and sines of every position; RoPE scaling (linear, llama3) is included.

    Parameters
    ----------
    cos, sin : ITensor [S, D / 2] float32
        Constants of the network.
    """

    cos: Any
    sin: Any


def rope_tables(graph: Graph, mixer: AttentionConfig, *, length: int) -> RopeTables:
    """Add the tables of RoPE to the network as constants.

    Parameters
    ----------
    graph : Graph
        The network under construction.
    mixer : AttentionConfig
        Attention with RoPE, which gives the frequencies.
    length : int
        Positions, S.

    Returns
    -------
    RopeTables
        For positions ``0 .. length - 1``.
    """
    assert mixer.rope is not None
    cos, sin = rope_table(mixer.rope, mixer.head_dim, length)
    return RopeTables(graph.constant("rope/cos", cos), graph.constant("rope/sin", sin))


def cos_sin(mixer: AttentionConfig, *, length: int) -> np.ndarray[Any, Any]:
    """Return both tables in one array, as the attention of this package reads them.

    Parameters
    ----------
    mixer : AttentionConfig
        Attention with RoPE.
    length : int
        Positions, S.

    Returns
    -------
    ndarray [S, 2, D / 2] float32
        Cosines (``[:, 0]``) and sines (``[:, 1]``) of the angles of each position, on the host.
    """
    assert mixer.rope is not None
    return np.stack(rope_table(mixer.rope, mixer.head_dim, length), axis=1)


def apply_rope(graph: Graph, name: str, x: Any, tables: RopeTables, position_ids: Any) -> Any:
    """Apply RoPE: rotate the pairs ``(d, d + D / 2)`` of each row by the angle of its position.

    Parameters
    ----------
    graph : Graph
        The network under construction.
    name : str
        Prefix of the layers' names.
    x : ITensor [B, H, s, D]
        q or k.
    tables : RopeTables
        Cosines and sines of RoPE.
    position_ids : ITensor [B, s] int32
        Position of each token.

    Returns
    -------
    ITensor [B, H, s, D] float32
        Not rounded to the model's dtype, so that the caller rounds once.

    Notes
    -----
    ``INetworkDefinition.add_rotary_embedding``.
    """
    wide = graph.cast(f"{name}/to_float32", x, "float32")
    interleaved, rotary_dim = False, 0  # rotary_dim 0 rotates all of D
    layer = graph.layer(f"{name}/rotate", "rotary_embedding", wide, tables.cos, tables.sin, interleaved, rotary_dim)
    layer.set_input(3, position_ids)
    return graph.result(layer)
