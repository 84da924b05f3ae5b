"""The gated delta rule of linear attention layers, over the new tokens of each slot and the state before them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from trt_kvcache.dtypes import itemsize
from trt_kvcache.errors import ShapeError
from trt_kvcache.kernels.host_arrays import Array, array_of, new_counts
from trt_kvcache.kernels.kernel import Kernel
from trt_kvcache.kernels.launch import address, launch, starts_early, token_rows
from trt_kvcache.kernels.recurrent_checks import check_dense, check_first, check_new_lengths, check_states, check_tokens, check_vectors
from trt_kvcache.kernels.recurrent_chunks import BLOCK_TOKENS, CHUNK_STAGES, MIN_CHUNK_TOKENS, block_pairs, chunk_tokens
from trt_kvcache.kernels.source_variants import variant_name
from trt_kvcache.memory.base import Memory
from trt_kvcache.memory.shapes import ROW_GRANULE
from trt_kvcache.memory.tensor import DeviceTensor

#: The largest size of a key.
MAX_KEY_DIM = 128

#: Sizes of keys and values are multiples of it.
SIZE_GRANULE = 8


def gated_delta_rule(
    q: DeviceTensor,
    k: DeviceTensor,
    v: DeviceTensor,
    a: DeviceTensor,
    b: DeviceTensor,
    past: DeviceTensor,
    *,
    decay: DeviceTensor,
    present: DeviceTensor,
    out: DeviceTensor,
    dt_bias: DeviceTensor | None = None,
    new_lengths: DeviceTensor | None = None,
    stream: Any,
) -> None:
    """Run the new tokens of each slot through the gated delta rule, and move the state on.

    For each token and head, with q and k divided by their L2 norms,
    ``state = exp(decay * softplus(a + dt_bias)) * state``, then ``state += outer(k, sigmoid(b) * (v - k @ state))``, and
    ``out = q @ state / sqrt(key_dim)``. One new token for each slot is a decode step; more are a chunk or a whole prompt.

    Parameters
    ----------
    q, k : DeviceTensor ``[B, s, key_heads, key_dim]`` float16, bfloat16 or float32
        New tokens, after the convolution. Slots and tokens may be strided, at multiples of 16 bytes; key_dim is a multiple of 8, up to 128.
    v : DeviceTensor ``[B, s, heads, value_dim]``
        Strided as ``q`` may be; value_dim is a multiple of 8. Each key head serves ``heads / key_heads`` consecutive heads.
    a, b : DeviceTensor ``[B, s, heads]``
        Inputs of the decay and of the strength of the update. Slots and tokens may be strided.
    past : DeviceTensor ``[B, heads, key_dim, value_dim]``, of the dtype of ``q`` or float32
        The state before the new tokens; zeros before the first one. A recurrent state of the cache.
    decay : DeviceTensor ``[heads]`` float32
        Negative: ``-exp(A_log)`` of a checkpoint.
    present : DeviceTensor like ``past``
        Overwritten with the state after the new tokens. May be ``past`` itself; otherwise they must not overlap.
    out : DeviceTensor ``[B, s, heads, value_dim]``
        Contiguous, overwritten; it must not overlap the inputs. Zeros after the new tokens of a slot.
    dt_bias : DeviceTensor ``[heads]`` float32, optional
        Added to ``a``.
    new_lengths : DeviceTensor (B,) int32, optional
        New tokens of each slot, at most s. The rest is padding and has no effect. A slot without new tokens keeps its state bit for
        bit. By default all s are new.
    stream : cuda.core.Stream or GraphBuilder
        The launch is ordered on it. The call neither waits nor allocates, and can be captured in a graph.

    Raises
    ------
    ShapeError, DTypeError, LayoutError, PlaceError, ClosedError
        An argument does not fit. Nothing was changed.

    Notes
    -----
    "Gated Delta Networks" (Yang, Kautz and Hatamizadeh, 2024): ``recurrent_gated_delta_rule`` and ``chunk_gated_delta_rule`` of Qwen3-Next
    and Qwen3.5 with ``use_qk_l2norm_in_kernel``, which adds 1e-6 to the squared norms. Everything is float32 within a call; the state is
    rounded to its dtype at the end of one.

    Examples
    --------
    The first token stores its value under its key, and is read with its query, in host memory:

    >>> import numpy as np
    >>> from trt_kvcache import HostMemory
    >>> from trt_kvcache.kernels import gated_delta_rule
    >>> memory = HostMemory()
    >>> stream = memory.create_stream()
    >>> def full(value, *shape):
    ...     return memory.to_device(np.full(shape, value, np.float32), stream=stream)
    >>> q, k, v = full(1, 1, 1, 1, 8), full(1, 1, 1, 1, 8), full(3, 1, 1, 1, 8)
    >>> a, b, decay, state, out = full(0, 1, 1, 1), full(50, 1, 1, 1), full(-1, 1), full(0, 1, 1, 8, 8), full(0, 1, 1, 1, 8)
    >>> gated_delta_rule(q, k, v, a, b, state, decay=decay, present=state, out=out, stream=stream)
    >>> bool(np.allclose(out.numpy(), 3 / np.sqrt(8)))
    True
    """
    check_first("q", q, "[B, s, key_heads, key_dim]")
    slots, width, key_heads, key_dim = q.shape
    if key_dim % SIZE_GRANULE or key_dim > MAX_KEY_DIM:
        raise ShapeError(f"q: expected a key_dim that is a multiple of {SIZE_GRANULE}, up to {MAX_KEY_DIM}, got {q!r}.")
    if not isinstance(v, DeviceTensor) or v.ndim != q.ndim or 0 in v.shape[2:] or v.shape[2] % key_heads or v.shape[3] % SIZE_GRANULE:
        raise ShapeError(
            f"v: expected a tensor [{slots}, {width}, heads, value_dim] with heads a multiple of {key_heads} "
            f"and value_dim one of {SIZE_GRANULE}, got {v!r}."
        )
    heads, value_dim = v.shape[2:]
    for name, tensor, shape in (("q", q, q.shape), ("k", k, q.shape), ("v", v, (slots, width, heads, value_dim))):
        check_tokens(name, tensor, q, shape)
        check_vectors(name, tensor)
    for name, tensor in (("a", a), ("b", b)):
        check_tokens(name, tensor, q, (slots, width, heads))
    check_states(past, present, q, (slots, heads, key_dim, value_dim))
    check_dense("decay", decay, q, "float32", (heads,))
    if dt_bias is not None:
        check_dense("dt_bias", dt_bias, q, "float32", (heads,))
    check_dense("out", out, q, q.dtype, v.shape)
    check_new_lengths(new_lengths, q)
    q.memory.check_stream(stream)
    params = DeltaRuleParams(
        q=q, k=k, v=v, a=a, b=b, past=past, decay=decay, present=present, out=out, dt_bias=dt_bias, new_lengths=new_lengths
    )
    if slots:
        gated_delta_rule_kernel(params, stream)


@dataclass(frozen=True, kw_only=True)
class DeltaRuleParams:
    """The arguments of :func:`~trt_kvcache.kernels.gated_delta_rule`, which describes them."""

    q: DeviceTensor
    k: DeviceTensor
    v: DeviceTensor
    a: DeviceTensor
    b: DeviceTensor
    past: DeviceTensor
    decay: DeviceTensor
    present: DeviceTensor
    out: DeviceTensor
    dt_bias: DeviceTensor | None
    new_lengths: DeviceTensor | None

    @property
    def memory(self) -> Memory:
        """Memory of all tensors."""
        return self.q.memory


# --- NumPy, in float32, token by token ---


#: Added to the squared norms of q and k.
_NORM_EPSILON = np.float32(1e-6)


def _normed(rows: Array) -> Array:
    """Divide rows by their L2 norms, in float32."""
    wide: Array = rows.astype(np.float32)
    normed: Array = wide / np.sqrt((wide * wide).sum(axis=-1, keepdims=True) + _NORM_EPSILON)
    return normed


def _gated_delta_rule_on_host(params: DeltaRuleParams, stream: Any) -> None:
    q, k, v, a, b = (array_of(tensor) for tensor in (params.q, params.k, params.v, params.a, params.b))
    past, present, out = (array_of(tensor) for tensor in (params.past, params.present, params.out))
    heads, key_dim = v.shape[2], q.shape[3]
    key_head = np.arange(heads) * q.shape[2] // heads  # key head of each head
    bias = 0 if params.dt_bias is None else array_of(params.dt_bias)
    for slot, count in enumerate(new_counts(params.new_lengths, q)):
        out[slot, count:] = 0
        if not count:
            present[slot] = past[slot]
            continue
        queries, keys = (_normed(rows[slot, :count])[:, key_head] for rows in (q, k))
        values = v[slot, :count].astype(np.float32)
        decays = np.exp(array_of(params.decay) * np.logaddexp(0, a[slot, :count].astype(np.float32) + bias))
        betas = 1 / (1 + np.exp(-b[slot, :count].astype(np.float32)))
        outputs = np.empty_like(values)
        state = past[slot].astype(np.float32)
        for token in range(count):
            state *= decays[token, :, None, None]
            change = betas[token, :, None] * (values[token] - (keys[token, :, None] @ state)[:, 0])
            state += keys[token, :, :, None] * change[:, None]
            outputs[token] = (queries[token, :, None] @ state)[:, 0]
        out[slot, :count] = outputs / np.sqrt(np.float32(key_dim))
        present[slot] = state


# --- CUDA: launches of plugins/recurrent/delta_rule.cu ---


#: Threads of a block in a decode step, and its columns of a state. The source has the same numbers.
DELTA_UPDATE_THREADS, DELTA_UPDATE_COLUMNS = 256, 128

#: Threads of a block in a scan, lanes of a row, and tokens of a tile. The source has the same numbers.
DELTA_THREADS, DELTA_SCAN_LANES, DELTA_TILE_TOKENS = 128, 2, 16

#: In chunks: compiled key sizes (smaller ones are padded with zeros), and warps of a block, each with 16 columns of a state.
CHUNK_KEY_DIMS, STATE_WARPS = (64, 128), (2, 4)

#: Warps of a block that compute the matrices of chunks. The source has the same number.
MATRIX_WARPS = 4

_WARP, _WARP_COLUMNS, _STEP_FLOATS = 32, 16, 5


class DeltaRulePlan(NamedTuple):
    """The kernel of a call, and its launch."""

    #: The kernel.
    name: str
    #: Columns of a state in a block.
    columns: int
    #: Threads of a block.
    threads: int
    #: Bytes of dynamic shared memory of a block.
    shared_nbytes: int


def delta_rule_plan(params: DeltaRuleParams, arch: str, multiprocessors: int) -> DeltaRulePlan:
    """Return the kernel and launch of a call on an architecture such as ``"sm_90"``. They depend on shapes and dtypes alone."""
    width, key_dim = params.q.shape[1], params.q.shape[3]
    size = itemsize(params.q.dtype)
    if width == 1:
        return DeltaRulePlan("delta_rule_update", DELTA_UPDATE_COLUMNS, DELTA_UPDATE_THREADS, 0)
    if width >= MIN_CHUNK_TOKENS and size == itemsize("float16"):
        return _chunk_plan(params, arch, multiprocessors)
    columns = DELTA_THREADS // _WARP * DELTA_SCAN_LANES * ROW_GRANULE // itemsize(params.past.dtype)
    return DeltaRulePlan("delta_rule_scan", columns, DELTA_THREADS, _scan_nbytes(key_dim, columns, size))


def _gated_delta_rule_on_device(params: DeltaRuleParams, stream: Any) -> None:
    q, v = params.q, params.v
    slots, width, key_heads, key_dim = q.shape
    heads, value_dim = v.shape[2:]
    memory: Any = q.memory
    plan = delta_rule_plan(params, memory.arch, memory.multiprocessor_count)
    arguments = (
        *(*token_rows(q), *token_rows(params.k), *token_rows(v), *token_rows(params.a), *token_rows(params.b)),
        *(params.decay.ptr, address(params.dt_bias), params.past.ptr, params.present.ptr, address(params.new_lengths)),
        *(width, heads, key_heads, key_dim, value_dim, params.out.ptr),
    )
    launch(
        memory,
        variant_name("recurrent_delta_rule", q.dtype, params.past.dtype),
        plan.name,
        (-(-value_dim // plan.columns), heads, slots),
        arguments,
        stream,
        threads=plan.threads,
        shared_nbytes=plan.shared_nbytes,
        programmatic_dependent_launch=starts_early(memory),
    )


def _chunk_plan(params: DeltaRuleParams, arch: str, multiprocessors: int) -> DeltaRulePlan:
    """Return the launch of chunks. A multiprocessor holds one block, so few warps in many blocks, unless that takes more waves."""
    slots, _, heads, value_dim = params.v.shape
    key_dim = next(one for one in CHUNK_KEY_DIMS if one >= params.q.shape[3])
    waves = {warps: -(-slots * heads * -(-value_dim // (_WARP_COLUMNS * warps)) // multiprocessors) for warps in STATE_WARPS}
    warps = min(STATE_WARPS, key=waves.__getitem__)
    threads = _WARP * (warps + MATRIX_WARPS)
    return DeltaRulePlan(
        f"delta_rule_chunks_{key_dim}_{warps}", _WARP_COLUMNS * warps, threads, _chunk_nbytes(chunk_tokens(arch), key_dim, warps)
    )


def _scan_nbytes(key_dim: int, columns: int, size: int) -> int:
    """Return the bytes of shared memory of a scan: ``ScanTiles`` of the source lays it out."""
    tile = (2 * key_dim + columns) * size + 2 * itemsize("float32")  # bytes of a token, with its gates
    return DELTA_TILE_TOKENS * (2 * tile + _STEP_FLOATS * itemsize("float32"))


def _chunk_nbytes(tokens: int, key_dim: int, warps: int) -> int:
    """Return the bytes of shared memory of a scan in chunks: ``DeltaMemory`` of the source lays it out."""
    half, single = itemsize("float16"), itemsize("float32")
    stage = tokens * (2 * key_dim + _WARP_COLUMNS * warps) * half
    matrices = 3 * block_pairs(tokens) * BLOCK_TOKENS**2 * half + (4 * tokens + 4) * single
    scratch = (2 * tokens + BLOCK_TOKENS**2) * single
    return CHUNK_STAGES * stage + 2 * matrices + MATRIX_WARPS * scratch


#: Run the new tokens of each slot through the gated delta rule: :class:`DeltaRuleParams`, stream.
gated_delta_rule_kernel = Kernel(_gated_delta_rule_on_host, _gated_delta_rule_on_device)
