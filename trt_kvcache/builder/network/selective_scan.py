"""The scan of Mamba-2 in matrix products: between the tokens of a chunk directly, and from chunk to chunk by states.

With ``l`` the logarithm of the decay of a token, token ``i`` sees token ``j <= i`` of its chunk with the weight
``exp(l[j + 1] + ... + l[i])``, and the state before the chunk with ``exp(l[0] + ... + l[i])``: "state space duality" (Dao and Gu, 2024). A
step of one token is a chunk of one token.
"""

from dataclasses import dataclass
from typing import Any

from trt_kvcache.builder.network.decay_weights import decay_weights, exp, running_sum
from trt_kvcache.builder.network.graph import Graph
from trt_kvcache.builder.network.sizes import Size, combined, padded, part, reshape, size

#: Most tokens of a chunk.
CHUNK_TOKENS = 64


@dataclass(frozen=True, kw_only=True)
class ScanInputs:
    """Inputs of the scan of a layer with H heads in G groups; all float32."""

    x: Any  # [B, s, H, P]: new tokens times their time steps; 0 for padding
    decay: Any  # [B, s, H]: logarithm of the decay of each token; 0 for padding
    b: Any  # [B, s, G, N]: vector that writes a token to the state; finite for padding
    c: Any  # [B, s, G, N]: vector that reads the state; finite for padding
    past: Any  # [B, H, P, N]: state before the new tokens


@dataclass(frozen=True)
class _Chunks:
    """Chunks of the new tokens: ``count`` of ``length``, ``tokens`` in all, for ``width`` new tokens."""

    slots: Size
    width: Size
    count: Size
    length: Size
    tokens: Size


def selective_scan(graph: Graph, name: str, inputs: ScanInputs) -> tuple[Any, Any]:
    """Run the new tokens of each slot through the state-space model: outputs ``[B, s, H, P]`` and the state after them.

    The output of padding is not specified.
    """
    plain, transposed = graph.trt.MatrixOperation.NONE, graph.trt.MatrixOperation.TRANSPOSE
    heads, head_dim = inputs.x.shape[2:]
    groups, state_size = inputs.b.shape[2:]
    per_group = heads // groups
    chunks = _cut(graph, f"{name}/chunks", inputs.x)
    x = _in_chunks(graph, f"{name}/x", inputs.x, chunks, groups)  # [B, n, G, H / G, c, P]
    b, c = (_in_chunks(graph, f"{name}/{what}", one, chunks, groups) for what, one in (("b", inputs.b), ("c", inputs.c)))
    column = graph.shuffle(f"{name}/decay/column", inputs.decay, reshape=(0, 0, heads, 1))
    decay = _in_chunks(graph, f"{name}/decay", column, chunks, groups)  # [B, n, G, H / G, c, 1]
    total = graph.op(f"{name}/total", "reduce", decay, graph.trt.ReduceOperation.SUM, 1 << 4, True)
    since = running_sum(graph, f"{name}/since", decay, chunks.length, exclusive=False)  # from the begin of the chunk to each token

    seen = graph.op(f"{name}/seen", "matrix_multiply", c, plain, b, transposed)
    weights = graph.elementwise(f"{name}/weights", decay_weights(graph, f"{name}/within", since, since, chunks.length, 0), "PROD", seen)
    within = graph.op(f"{name}/from_chunk", "matrix_multiply", weights, plain, x, plain)

    left = exp(graph, f"{name}/left", graph.elementwise(f"{name}/until_end", total, "SUB", since))
    faded = graph.elementwise(f"{name}/faded", x, "PROD", left)
    local = graph.op(f"{name}/local", "matrix_multiply", faded, transposed, b, plain)  # what a chunk adds: [B, n, G, H / G, P, N]
    rows = (chunks.slots, groups, per_group, chunks.count, head_dim * state_size)
    local = reshape(graph, f"{name}/local/rows", local, rows, first_transpose=(0, 2, 3, 1, 4, 5))
    totals = reshape(graph, f"{name}/totals", total, (*rows[:4], 1), first_transpose=(0, 2, 3, 1, 4, 5))
    past = graph.shuffle(f"{name}/past/rows", inputs.past, reshape=(0, groups, per_group, 1, head_dim * state_size))
    states = _states(graph, f"{name}/states", past, local, totals, chunks, rows)  # before each chunk, and after the last one

    before = part(graph, f"{name}/before", states, (0,) * 5, rows)
    shape = (chunks.slots, groups, per_group, chunks.count, head_dim, state_size)
    before = reshape(graph, f"{name}/before/by_chunk", before, shape, second_transpose=(0, 3, 1, 2, 4, 5))
    read = graph.op(f"{name}/read", "matrix_multiply", c, plain, before, transposed)
    from_state = graph.elementwise(f"{name}/from_state", read, "PROD", exp(graph, f"{name}/kept", since))
    y = graph.elementwise(f"{name}/sum", within, "SUM", from_state)
    y = reshape(graph, f"{name}/tokens", y, (chunks.slots, chunks.tokens, heads, head_dim), first_transpose=(0, 1, 4, 2, 3, 5))
    y = part(graph, f"{name}/new", y, (0,) * 4, (chunks.slots, chunks.width, heads, head_dim))
    after = part(graph, f"{name}/after", states, (0, 0, 0, chunks.count, 0), (*rows[:3], 1, rows[4]))
    return y, graph.shuffle(f"{name}/present", after, reshape=(0, heads, head_dim, state_size))


def _cut(graph: Graph, name: str, x: Any) -> _Chunks:
    """Return chunks of equal lengths, as few as possible."""
    slots, width = (size(graph, f"{name}/{what}", x, axis) for axis, what in enumerate(("slots", "width")))
    filled = combined(graph, f"{name}/filled", width, "SUM", CHUNK_TOKENS - 1)
    count = combined(graph, f"{name}/count", filled, "FLOOR_DIV", CHUNK_TOKENS)
    rest = combined(graph, f"{name}/rest", combined(graph, f"{name}/more", width, "SUM", count), "SUB", 1)
    length = combined(graph, f"{name}/length", rest, "FLOOR_DIV", count)
    return _Chunks(slots, width, count, length, combined(graph, f"{name}/tokens", count, "PROD", length))


def _in_chunks(graph: Graph, name: str, x: Any, chunks: _Chunks, groups: int) -> Any:
    """Return ``x`` ``[B, s, heads, n]`` as ``[B, chunks, groups, heads / groups, length, n]``, padded with zeros."""
    heads, elements = x.shape[2:]
    filled = padded(graph, f"{name}/padded", x, (chunks.slots, chunks.tokens, heads, elements))
    shape = (chunks.slots, chunks.count, chunks.length, groups, heads // groups, elements)
    return reshape(graph, f"{name}/in_chunks", filled, shape, second_transpose=(0, 1, 3, 4, 2, 5))


def _states(graph: Graph, name: str, past: Any, local: Any, totals: Any, chunks: _Chunks, rows: tuple[Size, ...]) -> Any:
    """Return the states before each chunk and after the last one, ``[B, G, H / G, n + 1, P N]``."""
    plain = graph.trt.MatrixOperation.NONE
    more = combined(graph, f"{name}/count", chunks.count, "SUM", 1)
    with_zero = padded(graph, f"{name}/with_zero", totals, (*rows[:3], more, 1))
    since = running_sum(graph, f"{name}/since", with_zero, more, exclusive=True)  # from the first token to before each chunk
    ends = part(graph, f"{name}/ends", since, (0, 0, 0, 1, 0), (*rows[:4], 1))
    weights = decay_weights(graph, f"{name}/chunks", since, ends, more, 1, columns=chunks.count)
    carried = graph.op(f"{name}/carried", "matrix_multiply", weights, plain, local, plain)
    kept = graph.elementwise(f"{name}/kept_past", past, "PROD", exp(graph, f"{name}/kept", since))
    return graph.elementwise(f"{name}/sum", carried, "SUM", kept)
