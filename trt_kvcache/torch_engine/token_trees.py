"""``TokenTrees``: trees that the new tokens of each slot form, as tensors of torch.

Shapes: A slots, s new tokens per slot.
"""

from __future__ import annotations

import torch


class TokenTrees:
    """Trees of ``ancestors`` int64 ``[A, s]``, as ``trt_kvcache/kernels/token_tree.py`` defines them."""

    def __init__(self, ancestors: torch.Tensor) -> None:
        tokens = torch.arange(ancestors.shape[1], device=ancestors.device)
        bits = (ancestors[:, :, None] >> tokens) & 1 != 0
        # bool [A, s, s]: element [a, t, j] is true if token j is token t or an ancestor of it
        self._paths = bits.tril(-1) | (tokens[:, None] == tokens)
        #: Number of ancestors of each token, ``[A, s]``.
        self.depths = self._paths.sum(dim=2) - 1

    def seen(self, keys: torch.Tensor, window: int | None, slots: slice = slice(None)) -> torch.Tensor:
        """Return the mask ``[A, 1, s, n]`` of the keys that the new tokens of slots attend to.

        ``keys`` ``[n]`` or ``[A, n]``: indices of new tokens; those before the step are below 0.
        """
        paths, depths = self._paths[slots], self.depths[slots, :, None]
        width = paths.shape[1]
        keys = keys.expand(*paths.shape[:2], -1) if keys.ndim == 1 else keys[:, None].expand(-1, width, -1)
        is_new, index = keys >= 0, keys.clamp(0, width - 1)
        seen = ~is_new | (paths.gather(2, index) & (keys < width))
        if window is not None:
            depth_of_key = (paths.cumsum(dim=2) - 1).gather(2, index).where(is_new, keys)
            seen &= depths - depth_of_key < window
        return seen[:, None]
