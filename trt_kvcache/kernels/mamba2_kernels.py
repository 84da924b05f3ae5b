"""The selective state space of Mamba-2 layers, over the new tokens of each slot and the state before them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from trt_kvcache.dtypes import itemsize
from trt_kvcache.errors import RangeError, ShapeError
from trt_kvcache.kernels.host_arrays import array_of, new_counts
from trt_kvcache.kernels.kernel import Kernel
from trt_kvcache.kernels.launch import address, launch, starts_early, token_rows
from trt_kvcache.kernels.recurrent_checks import check_dense, check_first, check_new_lengths, check_states, check_tokens, check_vectors
from trt_kvcache.kernels.recurrent_chunks import BLOCK_TOKENS, CHUNK_STAGES, MIN_CHUNK_TOKENS, block_pairs, chunk_tokens
from trt_kvcache.kernels.source_variants import variant_name
from trt_kvcache.memory.base import Memory
from trt_kvcache.memory.tensor import DeviceTensor

#: The largest state size.
MAX_STATE_SIZE = 256

#: Head dims and state sizes are multiples of it.
SIZE_GRANULE = 8


def mamba2_scan(
    x: DeviceTensor,
    dt: DeviceTensor,
    b: DeviceTensor,
    c: DeviceTensor,
    past: DeviceTensor,
    *,
    a: DeviceTensor,
    present: DeviceTensor,
    out: DeviceTensor,
    d: DeviceTensor | None = None,
    dt_bias: DeviceTensor | None = None,
    dt_limits: tuple[float, float] = (0.0, math.inf),
    new_lengths: DeviceTensor | None = None,
    stream: Any,
) -> None:
    """Run the new tokens of each slot through the state space, and move the state on.

    For each token and head, ``step = clip(softplus(dt + dt_bias), *dt_limits)``,
    ``state = exp(step * a) * state + step * outer(x, b)`` and ``out = state @ c + d * x``. One new token for each slot is a decode step;
    more are a chunk or a whole prompt.

    Parameters
    ----------
    x : DeviceTensor ``[B, s, heads, head_dim]`` float16, bfloat16 or float32
        New tokens, after the convolution. Slots and tokens may be strided, at multiples of 16 bytes; head_dim is a multiple of 8.
    dt : DeviceTensor ``[B, s, heads]``
        Time steps, before bias and softplus. Slots and tokens may be strided.
    b, c : DeviceTensor ``[B, s, groups, state_size]``
        Strided as ``x`` may be. Each group serves ``heads / groups`` heads that follow each other. state_size is a multiple of 8, up to
        256.
    past : DeviceTensor ``[B, heads, head_dim, state_size]``, of the dtype of ``x`` or float32
        The state before the new tokens; zeros before the first one. A recurrent state of the cache.
    a : DeviceTensor ``[heads]`` float32
        Negative: ``-exp(A_log)`` of a checkpoint. On a GPU it, ``d`` and ``dt_bias`` are read before earlier launches on the stream have
        ended: none of those may still write them.
    present : DeviceTensor like ``past``
        Overwritten with the state after the new tokens. May be ``past`` itself; otherwise they must not overlap.
    out : DeviceTensor ``[B, s, heads, head_dim]``
        Contiguous, overwritten; it must not overlap the inputs. Zeros after the new tokens of a slot.
    d : DeviceTensor ``[heads]`` float32, optional
        Weight of the skip connection.
    dt_bias : DeviceTensor ``[heads]`` float32, optional
        Added to ``dt``.
    dt_limits : tuple of float
        Smallest and largest time step.
    new_lengths : DeviceTensor (B,) int32, optional
        New tokens of each slot, at most s. The rest is padding and has no effect. A slot without new tokens keeps its state bit for
        bit. By default all s are new.
    stream : cuda.core.Stream or GraphBuilder
        The launch is ordered on it. The call neither waits nor allocates, and can be captured in a graph.

    Raises
    ------
    ShapeError, DTypeError, LayoutError, PlaceError, RangeError, ClosedError
        An argument does not fit. Nothing was changed.

    Notes
    -----
    "Transformers are SSMs" (Dao and Gu, 2024): ``selective_state_update`` and ``mamba_chunk_scan_combined`` of Mamba-2, Bamba, Granite 4
    and Nemotron-H. Time steps, states and sums are float32 within a call; the state is rounded to its dtype at the end of one. The limits
    hold for a single token too, so that results do not depend on how tokens are split into calls. From 17 new tokens on, a GPU computes
    activations of 16 bits with tensor cores, for state sizes of 64 and 128: the matrix of a chunk, and the state that its outputs see, are
    then rounded to the dtype of ``x``, in which float16 ends at 65504.

    Examples
    --------
    A state of 8 by 8, after one token of ones with a time step of log(2), in host memory:

    >>> import numpy as np
    >>> from trt_kvcache import HostMemory
    >>> from trt_kvcache.kernels import mamba2_scan
    >>> memory = HostMemory()
    >>> stream = memory.create_stream()
    >>> def ones(*shape):
    ...     return memory.to_device(np.ones(shape, np.float32), stream=stream)
    >>> x, b, c, state, out = ones(1, 1, 1, 8), ones(1, 1, 1, 8), ones(1, 1, 1, 8), ones(1, 1, 8, 8), ones(1, 1, 1, 8)
    >>> dt, a = (memory.to_device(np.full(shape, value, np.float32), stream=stream) for shape, value in (((1, 1, 1), 0), (1, -1)))
    >>> mamba2_scan(x, dt, b, c, state, a=a, present=state, out=out, stream=stream)
    >>> bool(np.allclose(state.numpy(), 0.5 + np.log(2))), bool(np.allclose(out.numpy(), 4 + 8 * np.log(2)))
    (True, True)
    """
    check_first("x", x, "[B, s, heads, head_dim]")
    slots, width, heads, head_dim = x.shape
    check_tokens("x", x, x, x.shape)
    check_tokens("dt", dt, x, (slots, width, heads))
    if not isinstance(b, DeviceTensor) or b.ndim != x.ndim or not b.shape[2] or heads % b.shape[2]:
        raise ShapeError(f"b: expected a tensor [{slots}, {width}, groups, state_size] with groups a divisor of {heads}, got {b!r}.")
    state_size = b.shape[3]
    if head_dim % SIZE_GRANULE:
        raise ShapeError(f"x: expected a head_dim that is a multiple of {SIZE_GRANULE}, got {x!r}.")
    if state_size % SIZE_GRANULE or not 0 < state_size <= MAX_STATE_SIZE:
        raise ShapeError(f"b: expected a state_size that is a multiple of {SIZE_GRANULE}, up to {MAX_STATE_SIZE}, got {b!r}.")
    for name, tensor, shape in (("x", x, x.shape), ("b", b, b.shape), ("c", c, b.shape)):
        check_tokens(name, tensor, x, shape)
        check_vectors(name, tensor)
    check_states(past, present, x, (slots, heads, head_dim, state_size))
    check_dense("a", a, x, "float32", (heads,))
    for name, parameter in (("d", d), ("dt_bias", dt_bias)):
        if parameter is not None:
            check_dense(name, parameter, x, "float32", (heads,))
    check_dense("out", out, x, x.dtype, x.shape)
    low, high = map(float, dt_limits)
    if not 0 <= low <= high:
        raise RangeError(f"dt_limits: expected 0 <= smallest <= largest, got {low} and {high}.")
    check_new_lengths(new_lengths, x)
    x.memory.check_stream(stream)
    params = Mamba2Params(
        x=x, dt=dt, b=b, c=c, past=past, a=a, present=present, out=out, d=d, dt_bias=dt_bias, dt_limits=(low, high), new_lengths=new_lengths
    )
    if slots:
        mamba2_scan_kernel(params, stream)


@dataclass(frozen=True, kw_only=True)
class Mamba2Params:
    """The arguments of :func:`~trt_kvcache.kernels.mamba2_scan`, which describes them."""

    x: DeviceTensor
    dt: DeviceTensor
    b: DeviceTensor
    c: DeviceTensor
    past: DeviceTensor
    a: DeviceTensor
    present: DeviceTensor
    out: DeviceTensor
    d: DeviceTensor | None
    dt_bias: DeviceTensor | None
    dt_limits: tuple[float, float]
    new_lengths: DeviceTensor | None

    @property
    def memory(self) -> Memory:
        """Memory of all tensors."""
        return self.x.memory


# --- NumPy, in float32, token by token ---


def _mamba2_scan_on_host(params: Mamba2Params, stream: Any) -> None:
    x, dt, past, present, out = (array_of(tensor) for tensor in (params.x, params.dt, params.past, params.present, params.out))
    heads = x.shape[2]
    group = np.arange(heads) * params.b.shape[2] // heads  # group of each head
    a = array_of(params.a)
    bias = 0 if params.dt_bias is None else array_of(params.dt_bias)
    for slot, count in enumerate(new_counts(params.new_lengths, x)):
        out[slot, count:] = 0
        if not count:
            present[slot] = past[slot]
            continue
        inputs = x[slot, :count].astype(np.float32)
        b, c = (array_of(tensor)[slot, :count].astype(np.float32)[:, group] for tensor in (params.b, params.c))
        steps = np.clip(np.logaddexp(0, dt[slot, :count].astype(np.float32) + bias), *map(np.float32, params.dt_limits))
        decays, scaled = np.exp(steps * a), inputs * steps[..., None]
        outputs = np.empty_like(inputs)
        state = past[slot].astype(np.float32)
        for token in range(count):
            state = state * decays[token, :, None, None] + scaled[token, :, :, None] * b[token, :, None]
            outputs[token] = (state @ c[token, :, :, None])[..., 0]
        out[slot, :count] = outputs if params.d is None else outputs + array_of(params.d)[:, None] * inputs
        present[slot] = state


# --- CUDA: launches of plugins/recurrent/mamba2.cu ---


#: Threads of a block; rows of a state in which a thread has a share, and elements of that share; tokens of a tile. The source has the same.
MAMBA_THREADS, MAMBA_ROWS, MAMBA_LANE_ELEMENTS, MAMBA_TILE_TOKENS = 128, 2, 16, 16

#: In chunks: rows of a state in a block, 16 for each warp, and the supported state sizes. The source has the same numbers.
CHUNK_ROWS, CHUNK_STATE_SIZES = 64, (64, 128)

_WARP, _WARP_ROWS = 32, 16


class Mamba2Plan(NamedTuple):
    """The kernel of a call, and its launch."""

    #: The kernel.
    name: str
    #: Rows of a state in a block.
    rows: int
    #: Threads of a block.
    threads: int
    #: Bytes of dynamic shared memory of a block.
    shared_nbytes: int


def mamba2_plan(params: Mamba2Params, arch: str) -> Mamba2Plan:
    """Return the kernel and launch of a call on an architecture such as ``"sm_90"``. They depend on shapes and dtypes alone."""
    width, state_size, size = params.x.shape[1], params.b.shape[3], itemsize(params.x.dtype)
    if width >= MIN_CHUNK_TOKENS and state_size in CHUNK_STATE_SIZES and size == itemsize("float16"):
        tokens = chunk_tokens(arch)
        threads = _WARP * (CHUNK_ROWS // _WARP_ROWS + tokens // BLOCK_TOKENS)
        return Mamba2Plan(f"mamba2_chunks_{state_size}", CHUNK_ROWS, threads, _chunk_nbytes(tokens, state_size))
    rows = MAMBA_ROWS * MAMBA_THREADS // _lanes(state_size)
    if width == 1:
        return Mamba2Plan("mamba2_update", rows, MAMBA_THREADS, 0)
    return Mamba2Plan("mamba2_scan", rows, MAMBA_THREADS, _scan_nbytes(state_size, rows, size))


def _mamba2_scan_on_device(params: Mamba2Params, stream: Any) -> None:
    x = params.x
    slots, width, heads, head_dim = x.shape
    groups, state_size = params.b.shape[2:]
    memory: Any = x.memory
    plan = mamba2_plan(params, memory.arch)
    arguments = (
        *(*token_rows(x), *token_rows(params.dt), *token_rows(params.b), *token_rows(params.c)),
        *(params.a.ptr, address(params.d), address(params.dt_bias), *map(float, params.dt_limits)),
        *(params.past.ptr, params.present.ptr, address(params.new_lengths)),
        *(width, heads, head_dim, groups, state_size, _lanes(state_size), params.out.ptr),
    )
    launch(
        memory,
        variant_name("recurrent_mamba2", x.dtype, params.past.dtype),
        plan.name,
        (-(-head_dim // plan.rows), heads, slots),
        arguments,
        stream,
        threads=plan.threads,
        shared_nbytes=plan.shared_nbytes,
        programmatic_dependent_launch=starts_early(memory),
    )


def _lanes(state_size: int) -> int:
    """Return the lanes that share a row of a state: a power of 2."""
    lanes = 1
    while lanes * MAMBA_LANE_ELEMENTS < state_size:
        lanes *= 2
    return lanes


def _scan_nbytes(state_size: int, rows: int, size: int) -> int:
    """Return the bytes of shared memory of a scan: ``ScanTiles`` of the source lays it out."""
    two_stages = 2 * MAMBA_TILE_TOKENS * ((2 * state_size + rows) * size + 2 * itemsize("float32"))
    return two_stages + MAMBA_TILE_TOKENS * rows * itemsize("float32")


def _chunk_nbytes(tokens: int, state_size: int) -> int:
    """Return the bytes of shared memory of a scan in chunks: ``MambaMemory`` of the source lays it out."""
    half, single = itemsize("float16"), itemsize("float32")
    stage = tokens * (2 * state_size + CHUNK_ROWS) * half
    matrices = block_pairs(tokens) * BLOCK_TOKENS**2 * half + (2 * tokens + 4) * single
    return CHUNK_STAGES * stage + 2 * matrices + tokens // BLOCK_TOKENS * 2 * tokens * single


#: Run the new tokens of each slot through the state space of Mamba-2: :class:`Mamba2Params`, stream.
mamba2_scan_kernel = Kernel(_mamba2_scan_on_host, _mamba2_scan_on_device)
