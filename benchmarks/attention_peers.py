"""The attention of others, as far as it is installed, for ``attention.py``."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from attention_flashinfer import paged_calls
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

Call = Callable[[], object]

_FLEX = {(8, 1, 8192, 4, 128, 8), (1, 8192, 0, 4, 128, 8)}  # torch compiles it anew for each shape
_HOPPER = 9  # compute capability of the only GPUs that FlashInfer has a second backend for


def _installed() -> list[str]:
    flash = ["flash_attn.cute" if find_spec("flash_attn.cute") else "flash_attn"] if find_spec("flash_attn") else []
    return flash + (["flashinfer"] if find_spec("flashinfer") else [])


def peer_versions() -> dict[str, str]:
    """Return the versions of those that are no part of torch, by name."""
    versions = {}
    for name in _installed():
        try:
            versions[name] = getattr(importlib.import_module(name), "__version__", "unknown")
        except (ImportError, OSError, RuntimeError) as error:
            versions[name] = str(error)
    return versions


def peers(problem: Any, shape: tuple[int, int, int, int, int, int]) -> Iterator[tuple[str, Callable[[], list[Call]]]]:
    """Yield names of others, and what makes their calls: one for each cache, over K and V as each wants them."""
    _, width, past, group, _, _ = shape
    causal, q = width > 1, problem.q
    both = [(c[:, 0], c[:, 1]) for c in problem.caches] if past else [(problem.k.transpose(1, 2), problem.v.transpose(1, 2))]

    def over(call: Callable[..., object], *, heads_first: bool = False) -> list[Call]:
        def copy(x: torch.Tensor) -> torch.Tensor:
            return (x if heads_first else x.transpose(1, 2)).contiguous()

        rows = q.transpose(1, 2).contiguous() if heads_first else q
        return [partial(call, rows, copy(k), copy(v)) for k, v in both]

    def sdpa(backend: Any) -> list[Call]:
        def call(*tensors: Any) -> object:
            with sdpa_kernel(backend):
                return scaled_dot_product_attention(*tensors, is_causal=causal, enable_gqa=group > 1)

        return over(call, heads_first=True)

    def lower_right() -> list[Call]:
        """Torch's flash attention with the causal mask that ends at the last key, which it offers in no other way with grouped heads."""

        def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> object:
            return torch.ops.aten._flash_attention_forward(q, k, v, None, None, width, k.shape[1], 0.0, True, False)

        return over(call)

    def flex() -> list[Call]:
        module = importlib.import_module("torch.nn.attention.flex_attention")
        mask = module.create_block_mask(lambda b, h, i, j: i >= j, None, None, width, width) if causal else None
        return over(partial(torch.compile(module.flex_attention), block_mask=mask, enable_gqa=group > 1), heads_first=True)

    def flash_attention(name: str) -> list[Call]:
        module = importlib.import_module(name)
        decode = getattr(module, "flash_attn_with_kvcache", module.flash_attn_func)
        return over(partial(module.flash_attn_func if causal else decode, causal=causal))

    def flash_infer(backend: str = "fa2") -> list[Call]:
        if past:
            return list(paged_calls(q, both, tensor_cores=group > 1, backend=backend))
        module = importlib.import_module("flashinfer")
        return over(lambda q, k, v: module.single_prefill_with_kv_cache(q[0], k[0], v[0], causal=causal))

    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
        if not (causal and past):  # their causal mask starts at the first key
            yield backend.name, partial(sdpa, backend)
    if causal and past:
        yield SDPBackend.FLASH_ATTENTION.name, lower_right
    if shape in _FLEX:
        yield "flex_attention", flex
    for name in _installed():
        yield name, flash_infer if name == "flashinfer" else partial(flash_attention, name)
    if causal and past and "flashinfer" in _installed() and torch.cuda.get_device_capability(q.device)[0] == _HOPPER:
        yield "flashinfer_fa3", partial(flash_infer, "fa3")
