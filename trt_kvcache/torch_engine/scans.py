"""Chunked recurrences over tokens by torch matmuls, equivalent to the kernels of recurrent layers.

Everything is float32. Shapes: A slots, s new tokens per slot, T tokens of a chunk.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

#: Limit of a chunk's tokens: the work within a chunk is quadratic.
CHUNK = 64

#: Epsilon of the squared norms of q and k of the delta rule.
_NORM_EPSILON = 1e-6


def mamba2_scan(
    x: torch.Tensor, log_decays: torch.Tensor, b: torch.Tensor, c: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``out`` like ``x`` and the last state of ``state = exp(log_decay) * state + outer(x, b)``, ``out = state @ c``.

    The chunked algorithm of "Transformers are SSMs" (Dao and Gu, 2024).
    """
    # x [A, s, heads, head_dim], times the time steps; log_decays [A, s, heads], at most 0: zeros in both have no effect.
    # b, c [A, s, groups, state_size], a group serves heads / groups consecutive heads; state [A, heads, head_dim, state_size].
    slots, width, heads, head_dim = x.shape
    groups = b.shape[2]
    sizes = (groups, heads // groups)
    x = x.view(slots, width, *sizes, head_dim).permute(0, 2, 3, 1, 4)  # [A, groups, heads of a group, s, head_dim]
    log_decays = log_decays.view(slots, width, *sizes).permute(0, 2, 3, 1)
    b, c = b.transpose(1, 2), c.transpose(1, 2)
    state = state.reshape(slots, groups, sizes[1] * head_dim, -1)
    outs = []
    for chunk in _chunks(width):
        new, keys, queries = x[:, :, :, chunk], b[:, :, chunk], c[:, :, chunk]
        within, before, after = chunk_decays(log_decays[..., chunk])
        seen = (queries @ state.mT).unflatten(3, (-1, head_dim)).transpose(2, 3)
        scores = (queries @ keys.mT).unsqueeze(2) * within
        outs.append(torch.addcmul(scores @ new, seen, before))
        left = (new * after).transpose(2, 3).flatten(3)  # [A, groups, T, heads of a group * head_dim]
        kept = state * before[:, :, :, -1].repeat_interleave(head_dim, dim=2)
        state = torch.baddbmm(kept.flatten(0, 1), left.flatten(0, 1).mT, keys.flatten(0, 1)).view_as(state)
    out = outs[0] if len(outs) == 1 else torch.cat(outs, dim=3)
    return out.permute(0, 3, 1, 2, 4).flatten(2, 3), state.view(slots, heads, head_dim, -1)


def gated_delta_rule(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, log_decays: torch.Tensor, strengths: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``out`` like ``v`` and the last state of the gated delta rule: see ``GatedDeltaNetConfig`` for its formulas.

    The chunked algorithm of "Gated Delta Networks" (Yang, Kautz and Hatamizadeh, 2024).
    """
    heads = v.shape[2]
    # q, k [A, s, key_heads, key_dim], a key head serves heads / key_heads consecutive heads; v [A, s, heads, value_dim].
    # log_decays (at most 0), strengths (0 to 1) [A, s, heads]: zeros in both have no effect. state [A, heads, key_dim, value_dim].
    q, k = (_unit(rows).repeat_interleave(heads // rows.shape[2], dim=2).transpose(1, 2) for rows in (q, k))
    q, v = q * q.shape[3] ** -0.5, v.transpose(1, 2)
    log_decays, strengths = log_decays.transpose(1, 2), strengths.transpose(1, 2).unsqueeze(-1)
    outs = []
    for chunk in _chunks(v.shape[2]):
        queries, keys, strength = q[:, :, chunk], k[:, :, chunk], strengths[:, :, chunk]
        within, before, after = chunk_decays(log_decays[..., chunk])
        change = strength * (v[:, :, chunk] - before * (keys @ state))
        if keys.shape[2] > 1:
            system = strength * (keys @ keys.mT) * within  # below the diagonal, which is an implicit 1
            change = torch.linalg.solve_triangular(system, change, upper=False, unitriangular=True)
        outs.append(before * (queries @ state) + ((queries @ keys.mT) * within) @ change)
        state = before[:, :, -1:] * state + (keys * after).mT @ change
    out = outs[0] if len(outs) == 1 else torch.cat(outs, dim=2)
    return out.transpose(1, 2), state


def _unit(rows: torch.Tensor) -> torch.Tensor:
    """Return rows divided by their L2 norms."""
    return rows * (rows.square().sum(dim=-1, keepdim=True) + _NORM_EPSILON).rsqrt()


def chunk_decays(log_decays: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the decay of token j at token i ``[..., T, T]`` (0 for later ones), and twice ``[..., T, 1]``.

    The latter: of the state before the chunk at each token, and of each token at the end of the chunk.
    """
    total = log_decays.double().cumsum(dim=-1)  # float64: the next line subtracts large sums
    apart = (total.unsqueeze(-1) - total.unsqueeze(-2)).float()
    is_later = torch.ones(apart.shape[-2:], dtype=torch.bool, device=apart.device).triu_(1)
    within = apart.masked_fill_(is_later, -torch.inf).exp_()
    return within, total.float().exp_().unsqueeze(-1), within[..., -1, :].unsqueeze(-1)


def _chunks(width: int) -> Iterator[slice]:
    """Yield slices of up to ``CHUNK`` of the ``width`` tokens."""
    return (slice(first, min(first + CHUNK, width)) for first in range(0, width, CHUNK))
