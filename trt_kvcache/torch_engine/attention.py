"""Attention by operations of torch: RoPE, the rows of K and V of the new tokens, and attention over the bound cache.

Shapes: A slots, s new tokens per slot, Hq query heads, H K/V heads, S rows of cache per slot, D head_dim.
"""

from __future__ import annotations

from itertools import groupby

import torch
import torch.nn.functional as F  # noqa: N812

from trt_kvcache.torch_engine.step import TorchStep

Angles = tuple[torch.Tensor, torch.Tensor]


class LiveRowsAttention:
    """Attention on a CPU: reads the live rows only, slots of equal length together.

    Parameters
    ----------
    step : TorchStep
        What is bound, in host memory.
    rope : pair of torch.Tensor float32 ``[S, D]``
        See :func:`rope_factors`.
    """

    def __init__(self, step: TorchStep, rope: Angles) -> None:
        self._sides = step.sides
        self._angles = angles_at(rope, step.start, step.input_ids.shape[1])
        self._runs = []
        first_slot = 0
        for start, slots in groupby(step.start.tolist()):
            count = len(list(slots))
            self._runs.append((slice(first_slot, first_slot + count), start))
            first_slot += count

    def __call__(self, layer: int, qkv: torch.Tensor) -> torch.Tensor:
        """Write k and v of the new tokens into the cache and return the attention of q over it."""
        sides = self._sides[layer]
        q, *new = rotated_heads(qkv, sides[0].shape[1], self._angles)
        mixed = []
        for slots, start in self._runs:
            end = min(start + q.shape[1], sides[0].shape[2])
            for side, rows in zip(sides, new, strict=True):
                side[slots, :, start:end] = rows[slots, : end - start].transpose(1, 2)
            mixed.append(_attend(q[slots], sides[0][slots, :, :end], sides[1][slots, :, :end], start))
        return mixed[0] if len(mixed) == 1 else torch.cat(mixed)


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, start: int) -> torch.Tensor:
    """Return causal attention of q ``[n, s, Hq, D]``, whose first token is at ``start``, over all rows of k and v ``[n, H, rows, D]``."""
    width = q.shape[1]
    if width == 1:  # it sees all rows, so the query heads of a K/V head can be the rows of one matrix
        grouped = q.reshape(len(q), k.shape[1], -1, q.shape[3])
        return F.scaled_dot_product_attention(grouped, k, v).reshape(q.shape)
    mask = torch.ones(width, k.shape[2], dtype=torch.bool).tril_(start) if start else None
    mixed = F.scaled_dot_product_attention(q.transpose(1, 2), k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True)
    return mixed.transpose(1, 2)


class MaskedAttention:
    """Attention by operations of torch over all rows under a mask, with lengths on the device: what no kernel of ours computes.

    Parameters
    ----------
    step : TorchStep
        What is bound.
    rope : pair of torch.Tensor float32 ``[S, D]``
        See :func:`rope_factors`.
    """

    def __init__(self, step: TorchStep, rope: Angles) -> None:
        self._sides = step.sides
        width, rows = step.input_ids.shape[1], step.sides[0][0].shape[2]
        self._angles = angles_at(rope, step.start, width)
        row = torch.arange(rows, device=step.start.device)
        token = (row - step.start[:, None])[:, None, :, None]  # [A, 1, S, 1]: which new token a row belongs to
        self._is_new = (token >= 0) & (token < width)
        self._is_dead = token >= width
        self._token = token.clamp(0, width - 1)
        self._is_seen = (token <= torch.arange(width, device=row.device)).transpose(2, 3)  # [A, 1, s, S]

    def __call__(self, layer: int, qkv: torch.Tensor) -> torch.Tensor:
        """Write k and v of the new tokens into the cache and return the attention of q over it."""
        sides = self._sides[layer]
        q, *new = rotated_heads(qkv, sides[0].shape[1], self._angles)
        live = []
        for side, rows in zip(sides, new, strict=True):
            spread = rows.transpose(1, 2).gather(2, self._token.expand(side.shape))
            side.copy_(torch.where(self._is_new, spread, side))
            live.append(side.masked_fill(self._is_dead, 0))
        k, v = live
        mixed = F.scaled_dot_product_attention(q.transpose(1, 2), k, v, attn_mask=self._is_seen, enable_gqa=True)
        return mixed.transpose(1, 2)


def rope_factors(cos: torch.Tensor, sin: torch.Tensor) -> Angles:
    """Return what a row ``x`` and its halves exchanged are multiplied with by RoPE, ``[S, D]``, from cosine and sine ``[S, D // 2]``."""
    return torch.cat((cos, cos), dim=1), torch.cat((-sin, sin), dim=1)


def angles_at(rope: Angles, start: torch.Tensor, width: int) -> Angles:
    """Return the factors ``[A, s, 1, D]`` of the new tokens. A position past S - 1 gets those of the last one: its row is not stored."""
    positions = (start[:, None] + torch.arange(width, device=start.device)).clamp_(max=len(rope[0]) - 1)
    cos, sin = (factors[positions].unsqueeze(2) for factors in rope)
    return cos, sin


def rotated_heads(qkv: torch.Tensor, kv_heads: int, angles: Angles) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return q and k after RoPE, computed in float32, and v."""
    cos, sin = angles
    qk = qkv[:, :, :-kv_heads].float()
    rotated = (qk * cos).addcmul_(qk.roll(qk.shape[3] // 2, dims=3), sin).to(qkv.dtype)
    return rotated[:, :, :-kv_heads], rotated[:, :, -kv_heads:], qkv[:, :, -kv_heads:]
