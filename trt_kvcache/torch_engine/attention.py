"""Attention by operations of torch: RoPE, the rows of K and V of the new tokens, and attention over the bound cache.

Shapes: A slots, s new tokens per slot, Hq query heads, H K/V heads, S rows of cache per slot, D head_dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch
import torch.nn.functional as F  # noqa: N812

from trt_kvcache.model import AttentionConfig
from trt_kvcache.torch_engine.operations import TorchAttention
from trt_kvcache.torch_engine.positions import Angles, PositionFactors
from trt_kvcache.torch_engine.step import TorchStep


class LiveRowsAttention:
    """Attention on a CPU over the live rows, of these only the sliding window; slots of equal length are batched."""

    def __init__(self, step: TorchStep, mixers: Sequence[AttentionConfig], positions: PositionFactors) -> None:
        self._kv, self._mixers, self._tensors = step.kv, mixers, step.tensors
        self._angles, self._trees = positions.angles(step.positions), step.trees
        self._runs = []
        first_slot = 0
        for start, slots in groupby(step.start.tolist()):
            count = len(list(slots))
            self._runs.append((slice(first_slot, first_slot + count), start))
            first_slot += count

    def __call__(self, layer: int, qkv: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
        """Write k and v of the new tokens into the cache and return the attention of q over it."""
        mixer, capacity = self._mixers[layer], self._tensors.caches[layer][0].shape[-2]
        q, *new = rotated_heads(qkv, mixer, self._angles[layer])
        mixed = []
        for slots, start in self._runs:
            end = min(start + q.shape[1], capacity)
            if mixer.stores_kv:
                self.write(layer, slots, start, end, [rows[slots] for rows in new])
            first = 0 if mixer.window is None else min(max(start + 1 - mixer.window, 0), end - 1)
            k, v = self.read(layer, slots, first, end, q.dtype)
            seen = None if self._trees is None else self._trees.seen(torch.arange(first - start, end - start), mixer.window, slots)
            mixed.append(_attend(mixer, q[slots], k, v, start - first, sinks, seen))
        return mixed[0] if len(mixed) == 1 else torch.cat(mixed)

    def write(self, layer: int, slots: slice, start: int, end: int, new: list[torch.Tensor]) -> None:
        """Write the new rows ``[n, s, H, D]`` of K and of V to tokens ``start`` to ``end`` of slots."""
        for side, rows in zip(self._kv[layer], new, strict=True):
            side[slots, :, start:end] = rows[:, : end - start].transpose(1, 2)

    def read(self, layer: int, slots: slice, first: int, end: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Return K and V ``[n, H, end - first, D]`` of slots, whose dtype is ``dtype``."""
        k, v = (side[slots, :, first:end] for side in self._kv[layer])
        return k, v


def _attend(
    mixer: AttentionConfig,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    start: int,
    sinks: torch.Tensor | None,
    seen: torch.Tensor | None,
) -> torch.Tensor:
    """Return causal attention of q ``[n, s, Hq, D]``, whose first token has the row ``start`` of k and v ``[n, H, rows, D]``.

    Rows before the window of all tokens must have been left out. ``seen`` ``[n, 1, s, rows]``: of trees, the rows that a token sees.
    """
    if seen is not None:
        return dot_product_attention(mixer, q.transpose(1, 2), k, v, seen, sinks).transpose(1, 2)
    width = q.shape[1]
    if width == 1 and sinks is None:  # one token sees all rows, so the query heads of a K/V head can be the rows of one matrix
        return dot_product_attention(mixer, q.reshape(len(q), k.shape[1], -1, q.shape[3]), k, v).reshape(q.shape)
    mask = None
    if start or mixer.softcap is not None or sinks is not None or (mixer.window or width) < width:
        mask = torch.ones(width, k.shape[2], dtype=torch.bool).tril_(start)
        if mixer.window is not None:
            mask.triu_(start + 1 - mixer.window)
    return dot_product_attention(mixer, q.transpose(1, 2), k, v, mask, sinks, is_causal=mask is None).transpose(1, 2)


class MaskedAttention:
    """Attention by operations of torch over all rows under a mask, with lengths on the device: for layers without a kernel."""

    def __init__(self, step: TorchStep, mixers: Sequence[AttentionConfig], positions: PositionFactors) -> None:
        self._kv, self._mixers = step.kv, mixers
        width, rows = step.input_ids.shape[1], step.kv[0][0].shape[2] if step.kv else 0
        self._angles = positions.angles(step.positions)
        row = torch.arange(rows, device=step.start.device)
        tokens = row - step.start[:, None]
        token = tokens[:, None, :, None]  # [A, 1, S, 1]: the new token of a row
        self._is_new = (token >= 0) & (token < width)
        self._is_dead = token >= width
        self._token = token.clamp(0, width - 1)
        windows = {mixer.window for mixer in mixers}
        trees = step.trees
        if trees is None:
            # [A, 1, s, S]: distance of a row before a new token
            distance = (torch.arange(width, device=row.device) - token).transpose(2, 3)
            self._is_seen = {window: distance >= 0 if window is None else (distance >= 0) & (distance < window) for window in windows}
        else:
            self._is_seen = {window: trees.seen(tokens, window) for window in windows}

    def __call__(self, layer: int, qkv: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
        """Write k and v of the new tokens into the cache and return the attention of q over it."""
        mixer, sides = self._mixers[layer], self._kv[layer]
        q, *new = rotated_heads(qkv, mixer, self._angles[layer])
        for side, rows in zip(sides, new, strict=True) if mixer.stores_kv else ():
            spread = rows.transpose(1, 2).gather(2, self._token.expand(side.shape))
            side.copy_(torch.where(self._is_new, spread, side))
        k, v = (side.masked_fill(self._is_dead, 0) for side in sides)
        return dot_product_attention(mixer, q.transpose(1, 2), k, v, self._is_seen[mixer.window], sinks).transpose(1, 2)


class RotationBeforeNorms:
    """RoPE of layers that apply it before the norms of q and k."""

    def __init__(self, step: TorchStep, mixers: Sequence[AttentionConfig], positions: PositionFactors) -> None:
        self._mixers = mixers
        self._angles = positions.angles(step.positions) if positions.has_angles else []

    def __call__(self, layer: int, qkv: torch.Tensor) -> torch.Tensor:
        """Return q, k and v with q and k rotated."""
        return torch.cat(rotated_heads(qkv, self._mixers[layer], self._angles[layer]), dim=2)


class ScaledQueries:
    """Attention with queries scaled by position."""

    def __init__(self, attention: TorchAttention, step: TorchStep, mixers: Sequence[AttentionConfig], positions: PositionFactors) -> None:
        self._attention, self._mixers = attention, mixers
        self._factors = positions.queries(step.positions)

    def __call__(self, layer: int, qkv: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
        """Scale q in place, then attend."""
        factors = self._factors[layer]
        if factors is not None:
            qkv[:, :, : self._mixers[layer].num_heads].mul_(factors)
        return self._attention(layer, qkv, sinks)


def dot_product_attention(
    mixer: AttentionConfig,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    *,
    is_causal: bool = False,
) -> torch.Tensor:
    """Return the attention of q ``[n, Hq, s, D]`` over k and v ``[n, H, rows, D]``. ``mask``: rows that a token sees; all by default.

    ``sinks`` ``[Hq]``: other logits, without values. ``is_causal`` (without mask, softcap and sinks): token t sees the rows up to t.
    """
    if mixer.softcap is None and sinks is None:
        grouped = q.shape[1] != k.shape[1]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=is_causal, scale=mixer.scale, enable_gqa=grouped)
    heads = q.float().unflatten(1, (k.shape[1], -1))  # no operation of torch caps scores or has sinks
    scores = heads @ k.float().unsqueeze(2).mT * mixer.score_scale
    if mixer.softcap is not None:
        scores = scores.div_(mixer.softcap).tanh_().mul_(mixer.softcap)
    if mask is not None:
        scores = scores.masked_fill_(~mask.unsqueeze(-3), -torch.inf)
    if sinks is not None:
        of_heads = sinks.view(k.shape[1], -1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat((scores, of_heads), dim=-1)
    weights = scores.softmax(dim=-1)[..., : k.shape[2]]
    return (weights @ v.float().unsqueeze(2)).flatten(1, 2).to(q.dtype)


def rotated_heads(qkv: torch.Tensor, mixer: AttentionConfig, angles: Angles | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return q and k after RoPE, computed in float32, and v; k and v have no heads in a layer that reads those of another one.

    Elements without angles are unchanged.
    """
    heads, kv_heads = mixer.num_heads, mixer.num_kv_heads if mixer.stores_kv else 0
    qk, v = qkv[:, :, : heads + kv_heads], qkv[:, :, heads + kv_heads :]
    if angles is not None:
        cos, sin = angles
        dim, is_whole = cos.shape[3], cos.shape[3] == qk.shape[3]
        turned = (qk if is_whole else qk[..., :dim]).float()
        rotated = (turned * cos).addcmul_(turned.roll(dim // 2, dims=3), sin).to(qkv.dtype)
        qk = rotated if is_whole else torch.cat((rotated, qk[..., dim:]), dim=3)
    return qk[:, :, :heads], qk[:, :, heads:], v
