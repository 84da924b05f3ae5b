"""Trees of draft tokens: positions of new tokens, and distances to keys, in NumPy; ``plugins/attention/token_tree.cuh`` has the same."""

from __future__ import annotations

import numpy as np

from trt_kvcache.kernels.host_arrays import Array

#: New tokens of a slot that may be a tree, at most: the bits of a mask.
MAX_TREE_TOKENS = 64


def paths(ancestors: Array, count: int) -> Array:
    """Return a bool matrix of the first tokens of a slot: element [t, j] is true if token j is token t or an ancestor of it.

    ``ancestors``: int64 masks. Bits of later tokens are ignored, and the bit of the token itself counts as set.
    """
    bits: Array = (ancestors[:count, None] >> np.arange(count)) & 1 != 0
    return np.tril(bits, -1) | np.eye(count, dtype=bool)


def positions_and_distances(past: int, count: int, ancestors: Array | None) -> tuple[Array, Array]:
    """Return the positions of new tokens of a slot, and their distances ``[count, past + count]`` to all keys.

    A distance is negative if the token does not attend to the key. Without ``ancestors`` each token attends to all before it.
    """
    if ancestors is None:
        positions = np.arange(past, past + count)
        return positions, positions[:, None] - np.arange(past + count)
    seen = paths(ancestors, count)
    depths = seen.sum(axis=1) - 1
    to_new = np.where(seen, depths[:, None] + 1 - seen.cumsum(axis=1), -1)
    positions = past + depths
    return positions, np.concatenate((positions[:, None] - np.arange(past), to_new), axis=1)
