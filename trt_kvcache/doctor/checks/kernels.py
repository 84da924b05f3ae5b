"""Check B: the kernels of this package compile, load, and compute what their NumPy twins compute."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from trt_kvcache.cache.config import KVCacheConfig
from trt_kvcache.cache.edge_llm import KVCacheManager
from trt_kvcache.cache.kv_layer_config import KVLayerConfig
from trt_kvcache.cache.layout import KVLayout
from trt_kvcache.cache.lengths import Lengths
from trt_kvcache.doctor.cases import CaseLog, CheckFailure, NotHere
from trt_kvcache.doctor.compare import TOLERANCES, Array, check_close, check_equal
from trt_kvcache.doctor.settings import Settings
from trt_kvcache.dtypes import numpy_dtype
from trt_kvcache.generation.device_sampler import DeviceSampler
from trt_kvcache.generation.sampling import SamplingParams
from trt_kvcache.kernels import AttentionWorkspace, attend
from trt_kvcache.kernels.compile import CUBIN_DIR_VARIABLE, compile_cubin
from trt_kvcache.memory.base import Memory
from trt_kvcache.memory.host_memory import HostMemory
from trt_kvcache.memory.tensor import DeviceTensor
from trt_kvcache.session.open_model import why_no_torch

VOCABULARY = 32_003


class AttentionShape(NamedTuple):
    """One launch of attention over slots that hold ``past`` tokens."""

    dtype: str
    head_dim: int
    kv_heads: int
    group: int  # query heads for each K/V head
    width: int  # new tokens of each slot
    past: tuple[int, ...]
    cache_dtype: str | None = None  # quantized K and V

    @property
    def name(self) -> str:
        """Name of the case."""
        stored = f", K and V {self.cache_dtype}" if self.cache_dtype else ""
        return f"attention {self.dtype}{stored}, head dim {self.head_dim}, {self.group} query heads a K/V head, {self.width} new"


#: Decode, a few new tokens, and prefill; each slot has another length, one of them is empty.
SHAPES = (
    AttentionShape("float16", 128, 2, 2, 1, (0, 17, 300)),
    AttentionShape("float16", 64, 3, 3, 5, (12, 0, 250)),
    AttentionShape("bfloat16", 80, 1, 4, 70, (100, 3, 0)),
    AttentionShape("float16", 128, 2, 2, 1, (64, 0, 200), "float8_e4m3fn"),
)
_TOKENS = 320


def check(settings: Settings, log: CaseLog) -> None:
    """Run each kernel in both memories, and compare."""
    memory = settings.memory()
    log.run("compile and load", lambda: _compile(memory))
    log.run("lengths", lambda: _same(lengths, memory))
    log.run("compaction of a cache", lambda: _same(compaction, memory))
    for shape in SHAPES:
        log.run(shape.name, lambda s=shape: _attention_agrees(s, memory))  # type: ignore[misc]
    log.run("sampler", lambda: _same(sampled_tokens, memory))
    log.run("views in torch", lambda: _views_in_torch(memory))


def _compile(memory: Memory) -> dict[str, Any]:
    """Compile one source with NVRTC, without the cache of compiled kernels."""
    if memory.is_host:
        raise NotHere("dry run: NumPy computes in the place of the kernels")
    if os.environ.get(CUBIN_DIR_VARIABLE):
        raise NotHere(f"{CUBIN_DIR_VARIABLE} has kernels that were compiled ahead of time")
    started = time.perf_counter()
    nbytes = len(compile_cubin("lengths", memory.arch))  # type: ignore[attr-defined]
    return {"seconds": round(time.perf_counter() - started, 2), "nbytes": nbytes}


def _same(compute: Callable[[Memory], Sequence[Array]], memory: Memory) -> dict[str, Any]:
    """Compare the arrays of a function in the memory with those of host memory, byte by byte."""
    for index, (got, expected) in enumerate(zip(compute(memory), compute(HostMemory()), strict=True)):
        check_equal(f"result {index}", got, expected)
    return {}


def lengths(memory: Memory) -> Sequence[Array]:
    """Reset, commit and compact lengths."""
    stream = memory.create_stream()
    tracked = Lengths(5, 1000, memory=memory)
    tracked.reset([3, 0, 700, 41, 9], stream=stream)
    tracked.commit([1, 2, 3, 0, 5], stream=stream)
    tracked.compact([0, -1, 1, -1, 2], 5, 3, stream=stream)
    tracked.commit(1, stream=stream)
    memory.synchronize(stream)
    return [tracked.tensor.numpy()]


def compaction(memory: Memory) -> Sequence[Array]:
    """Compact a cache of random rows."""
    stream, random = memory.create_stream(), np.random.default_rng(0)
    layers = [KVLayerConfig(num_kv_heads=2, head_dim=64), KVLayerConfig(num_kv_heads=3, head_dim=16)]
    config = KVCacheConfig(layers=layers, max_batch_size=4, max_sequence_length=96, dtype="float16", layout=KVLayout.COMBINED)
    with KVCacheManager(config, memory=memory) as cache:
        views = [cache.get_combined_kv_cache(index) for index in range(len(layers))]
        for view in views:
            memory.upload(view, random.standard_normal(view.shape).astype(np.float16), stream=stream)
        cache.reset_for_new_sequences([90, 5, 40, 17], stream=stream)
        cache.compact_batch([-1, 0, 1, -1], 4, 2, stream=stream)
        memory.synchronize(stream)
        found = [view.numpy() for view in views]
        live = cache.host_kv_cache_lengths[:2]
        return [rows[slot, :, :, : live[slot]].copy() for rows in found for slot in range(2)]


def _attention_agrees(shape: AttentionShape, memory: Memory) -> dict[str, Any]:
    if shape.dtype == "bfloat16" and not memory.is_host and memory.arch == "sm_75":  # type: ignore[attr-defined]
        raise NotHere("compute capability 7.5 has no bfloat16")
    (got, got_rows), (expected, expected_rows) = attention(shape, memory), attention(shape, HostMemory())
    tolerance = TOLERANCES[shape.dtype] / 4  # one operation, not a model
    error = check_close("attended values", got, expected, tolerance)
    check_close("rows of K and V", got_rows, expected_rows, tolerance)
    return {"relative_error": float(f"{error:.2g}")}


def attention(shape: AttentionShape, memory: Memory) -> tuple[Array, Array]:
    """Return the attended values of a shape, and the live rows of the cache; rows that are not live are NaN before."""
    stream, random = memory.create_stream(), np.random.default_rng(1)
    heads, slots, dtype = shape.kv_heads * shape.group, len(shape.past), numpy_dtype(shape.dtype)

    def tensor(array: Array) -> DeviceTensor:
        return memory.to_device(array, stream=stream)

    def rows(*sizes: int) -> Array:
        return random.standard_normal(sizes).astype(dtype)

    stored = dtype if shape.cache_dtype is None else np.dtype(ml_dtypes.float8_e4m3fn)
    cached = np.full((slots, 2, shape.kv_heads, _TOKENS, shape.head_dim), np.nan, np.float32).astype(stored)
    scales = np.full((slots, 2, shape.kv_heads, _TOKENS), np.nan, np.float32)
    for slot, past in enumerate(shape.past):
        cached[slot, :, :, :past] = random.standard_normal((2, shape.kv_heads, past, shape.head_dim)).astype(stored)
        scales[slot, :, :, :past] = random.uniform(0.5, 2, (2, shape.kv_heads, past))
    q = rows(slots, shape.width, heads, shape.head_dim)
    k, v = (rows(slots, shape.width, shape.kv_heads, shape.head_dim) for _ in range(2))
    angles = np.arange(_TOKENS)[:, None] / 10 ** (4 * np.arange(shape.head_dim // 2) / (shape.head_dim // 2))
    cache, out, starts = tensor(cached), tensor(np.zeros_like(q)), tensor(np.array(shape.past, np.int32))
    workspace = AttentionWorkspace(memory, num_heads=heads, num_kv_heads=shape.kv_heads, head_dim=shape.head_dim, stream=stream)
    attend(
        tensor(q),
        tensor(k),
        tensor(v),
        cache,
        starts,
        out=out,
        workspace=workspace,
        cos_sin=tensor(np.stack([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)),
        kv_scales=None if shape.cache_dtype is None else tensor(scales),
        stream=stream,
    )
    memory.synchronize(stream)
    found = cache.numpy()
    live = [found[slot, :, :, : past + shape.width].astype(np.float32).reshape(-1) for slot, past in enumerate(shape.past)]
    workspace.close()
    return out.numpy(), np.concatenate(live)


def sampled_tokens(memory: Memory) -> Sequence[Array]:
    """Choose tokens of random logits in three ways: greedy, by top-k and top-p, and with penalties."""
    stream, random = memory.create_stream(), np.random.default_rng(2)
    sampler = DeviceSampler(memory, max_batch_size=3, vocab_size=VOCABULARY, stream=stream)
    params = (
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.8, top_k=50, top_p=0.9),
        SamplingParams(temperature=1.2, repetition_penalty=1.3, presence_penalty=0.5),
    )
    for slot, one in enumerate(params):
        sampler.set_slot(slot, one, seed=7 + slot, counter=0, prompt=[5, 6, 7], stream=stream)
    tokens = memory.to_device(np.zeros(3, np.int32), stream=stream)
    chosen = []
    for _ in range(5):
        logits = memory.to_device(3 * random.standard_normal((3, VOCABULARY), np.float32), stream=stream)
        sampler.sample(logits, tokens, stream=stream)
        memory.synchronize(stream)
        chosen.append(tokens.numpy().copy())
    sampler.close()
    return chosen


def _views_in_torch(memory: Memory) -> dict[str, Any]:
    """Write views of a cache through DLPack in torch: no copy, every dtype, strided views too."""
    reason = why_no_torch()
    if reason is not None:
        raise NotHere(reason)
    import torch

    if not memory.is_host:
        from trt_kvcache.torch_engine.device import gpu_failure

        reason = gpu_failure(memory.dlpack_device[1])
        if reason is not None:
            raise NotHere(f"torch: {reason}")
    shown = {}
    for dtype in ("float16", "bfloat16", "float32", "float8_e4m3fn", "int8"):
        layers = [KVLayerConfig(num_kv_heads=2, head_dim=16)]
        config = KVCacheConfig(layers=layers, max_batch_size=3, max_sequence_length=5, dtype=dtype, layout=KVLayout.COMBINED)
        with KVCacheManager(config, memory=memory) as cache:
            _, values = cache.get_separate_kv_cache(0)
            tensor = torch.from_dlpack(values)
            if (tensor.data_ptr(), tuple(tensor.shape), tensor.stride()) != (values.ptr, values.shape, values.strides):
                raise CheckFailure(f"{dtype}: expected address, shape and strides of the cache, got others in torch")
            tensor[1] = 2
            if not memory.is_host:
                torch.cuda.synchronize()
            read = values.numpy().astype(np.float32)
            check_equal(
                f"{dtype}: rows written by torch", read, np.broadcast_to(np.array([0, 2, 0], np.float32)[:, None, None, None], read.shape)
            )
            shown[dtype] = str(tensor.dtype)
    return shown
