"""FlashInfer's attention over K and V in pages, for the benchmarks of attention. Needs torch, and FlashInfer where it is called."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch.nn.functional import pad

PAGE = 16
_WORKSPACE_NBYTES = 256 * 2**20


def paged_calls(
    q: torch.Tensor,
    both: Sequence[tuple[torch.Tensor, torch.Tensor]],
    *,
    tensor_cores: bool = True,
    backend: str = "fa2",
    layout: str = "NHD",
    k_scale: float | None = None,
) -> list[Callable[[], torch.Tensor]]:
    """Return calls of FlashInfer's wrappers for pages, one for each K and V, after they have planned the shape.

    ``q`` is ``[B, s, heads, D]``, each K and V ``[B, kv_heads, S, D]`` of any dtype that FlashInfer knows, its last s tokens the new ones,
    which are there already: nothing is appended. They are copied into pages of :data:`PAGE` tokens, heads last (``NHD``) or first
    (``HND``). A call returns ``[B * s, heads, D]``. One new token goes through the wrapper for decode, planned for CUDA graphs in
    which lengths change; more go through that for prefill, planned for these lengths. ``backend`` is of the latter.
    """
    flashinfer = importlib.import_module("flashinfer")
    (batch, width, heads, dim), (kv_heads, tokens) = q.shape, both[0][0].shape[1:3]
    count, numbers = -(-tokens // PAGE), partial(torch.arange, dtype=torch.int32, device=q.device)
    first, pages = numbers(0, batch * count + 1, count), numbers(batch * count)  # those of a slot follow each other
    last = torch.full_like(first[1:], (tokens - 1) % PAGE + 1)
    workspace = torch.zeros(_WORKSPACE_NBYTES, dtype=torch.uint8, device=q.device)
    dtypes = {"q_data_type": q.dtype, "kv_data_type": both[0][0].dtype}
    if width == 1:
        buffers = {"paged_kv_indptr_buffer": first, "paged_kv_indices_buffer": pages, "paged_kv_last_page_len_buffer": last}
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            workspace, layout, use_cuda_graph=True, use_tensor_cores=tensor_cores, **buffers
        )
        wrapper.plan(first, pages, last, heads, kv_heads, dim, PAGE, **dtypes)
    else:
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, layout, backend=backend)
        rows = numbers(0, batch * width + 1, width)
        wrapper.plan(rows, first, pages, last, heads, kv_heads, dim, PAGE, causal=True, **dtypes)
    rows_of_q = q.reshape(batch * width, heads, dim)
    scales = {} if k_scale is None else {"k_scale": k_scale}
    run = partial(wrapper.run, out=torch.empty_like(rows_of_q), **scales)
    return [partial(run, rows_of_q, (in_pages(k, layout), in_pages(v, layout))) for k, v in both]


def in_pages(rows: torch.Tensor, layout: str) -> torch.Tensor:
    """Return ``[B, kv_heads, S, D]`` as contiguous pages: ``[pages, PAGE, kv_heads, D]``, or ``[pages, kv_heads, PAGE, D]`` for ``HND``."""
    plain = rows.view(torch.uint8) if rows.dtype.itemsize == 1 else rows  # torch pads no codes
    _, kv_heads, tokens, dim = rows.shape
    paged = pad(plain, (0, 0, 0, -tokens % PAGE)).unflatten(2, (-1, PAGE))
    order = (0, 2, 3, 1, 4) if layout == "NHD" else (0, 2, 1, 3, 4)
    shape = (-1, PAGE, kv_heads, dim) if layout == "NHD" else (-1, kv_heads, PAGE, dim)
    return paged.permute(*order).reshape(shape).contiguous().view(rows.dtype)
