"""Factors of q and k by position: the angles of RoPE, and query scaling."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from trt_kvcache.model import AttentionConfig, QueryScaling, RopeConfig, rope_table

#: Factors of the leading elements of a head ``x``, and of the same elements with their halves exchanged.
Angles = tuple[torch.Tensor, torch.Tensor]

#: Cache key of a RoPE table, without its length.
RopeKey = tuple[RopeConfig, int]


def rope_key(mixer: AttentionConfig) -> RopeKey | None:
    """Return the cache key of a layer's RoPE table; None without RoPE."""
    return None if mixer.rope is None else (mixer.rope, mixer.head_dim)


def rope_tables(mixers: Sequence[AttentionConfig], length: int) -> dict[RopeKey, tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]]:
    """Return cosine and sine ``[length, rotary_dim // 2]`` of each RoPE of a model."""
    return {key: rope_table(*key, length) for key in map(rope_key, mixers) if key is not None}


class PositionFactors:
    """The factors of all S positions on the device. Equal layers share them."""

    def __init__(self, mixers: Sequence[AttentionConfig], length: int, device: torch.device) -> None:
        self._length = length
        ropes = rope_tables(mixers, length)
        self._angles = [rope_factors(*(torch.from_numpy(part).to(device) for part in table)) for table in ropes.values()]
        self._rope_of = [None if key is None else list(ropes).index(key) for key in map(rope_key, mixers)]
        scalings = list(dict.fromkeys(mixer.query_scaling for mixer in mixers if mixer.query_scaling is not None))
        self._queries = [query_factors(scaling, length).to(device) for scaling in scalings]
        self._query_of = [None if mixer.query_scaling is None else scalings.index(mixer.query_scaling) for mixer in mixers]

    @property
    def scale_queries(self) -> bool:
        """True if any layer scales its queries."""
        return bool(self._queries)

    @property
    def has_angles(self) -> bool:
        """True if any layer has RoPE."""
        return bool(self._angles)

    def angles(self, positions: torch.Tensor) -> list[Angles | None]:
        """Return the angles ``[A, s, 1, rotary_dim]`` of the new tokens at ``positions [A, s]``, by layer; None for layers without RoPE.

        A position past S - 1 gets the angles of the last one: its row is not stored.
        """
        positions = positions.clamp(max=self._length - 1)
        found = [(_rows(cos, positions), _rows(sin, positions)) for cos, sin in self._angles]
        return [None if index is None else found[index] for index in self._rope_of]

    def queries(self, positions: torch.Tensor) -> list[torch.Tensor | None]:
        """Return the factors ``[A, s, 1, 1]`` of queries at ``positions [A, s]``, by layer; None for layers that do not scale them."""
        positions = positions.clamp(max=self._length - 1)
        found = [_rows(factors, positions) for factors in self._queries]
        return [None if index is None else found[index] for index in self._query_of]


def rope_factors(cos: torch.Tensor, sin: torch.Tensor) -> Angles:
    """Return RoPE's factors of a row ``x`` and of its exchanged halves, from cosine and sine ``[S, rotary_dim // 2]``."""
    return torch.cat((cos, cos), dim=1), torch.cat((-sin, sin), dim=1)


def query_factors(scaling: QueryScaling, length: int) -> torch.Tensor:
    """Return the factors ``[S, 1]`` of queries, float32."""
    factors = 1 + scaling.beta * np.log1p(np.arange(length) // scaling.period)
    return torch.from_numpy(factors.astype(np.float32)[:, None])


def _rows(table: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Return the rows ``[A, s, 1, n]`` of a table ``[S, n]``."""
    return table[positions].unsqueeze(2)
