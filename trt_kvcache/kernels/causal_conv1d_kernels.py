"""The short convolution of recurrent layers: depthwise and causal, over the new tokens of each slot and the inputs before them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from trt_kvcache.dtypes import itemsize
from trt_kvcache.errors import LayoutError, ShapeError
from trt_kvcache.kernels.host_arrays import array_of, new_counts
from trt_kvcache.kernels.kernel import Kernel
from trt_kvcache.kernels.launch import address, launch, starts_early, token_rows
from trt_kvcache.kernels.recurrent_checks import check_dense, check_first, check_new_lengths, check_states, check_tokens, has_vectors
from trt_kvcache.kernels.source_variants import variant_name
from trt_kvcache.memory.base import Memory
from trt_kvcache.memory.shapes import ROW_GRANULE
from trt_kvcache.memory.tensor import DeviceTensor

#: Widths of a convolution: the inputs that an output depends on.
KERNEL_WIDTHS = (2, 3, 4)


def causal_conv1d(
    x: DeviceTensor,
    weight: DeviceTensor,
    past: DeviceTensor,
    *,
    present: DeviceTensor,
    out: DeviceTensor,
    bias: DeviceTensor | None = None,
    silu: bool = False,
    gate_in: DeviceTensor | None = None,
    gate_out: DeviceTensor | None = None,
    new_lengths: DeviceTensor | None = None,
    stream: Any,
) -> None:
    """Convolve the new tokens of each slot with a short kernel for each channel, and move the state on.

    The input of a token is ``x``, or ``x * gate_in`` rounded to its dtype. Its output is
    ``sum(weight[:, j] * inputs[t - K + 1 + j]) + bias``, then SiLU with ``silu``, then times ``gate_out``. One new token for
    each slot is a decode step; more are a chunk or a whole prompt: in one launch, and with the same result.

    Parameters
    ----------
    x : DeviceTensor ``[B, s, channels]`` float16, bfloat16 or float32
        New tokens. Slots and tokens may be strided, as in a slice of a projection.
    weight : DeviceTensor ``[channels, K]``
        K is 2, 3 or 4. The last column is for the token itself, as in PyTorch's ``Conv1d``. On a GPU it and ``bias`` are read before
        earlier launches on the stream have ended: none of those may still write them.
    past : DeviceTensor ``[B, channels, K]``, of the dtype of ``x`` or float32
        The last K inputs of each slot, oldest first; zeros before the first token. A conv state of the cache.
    present : DeviceTensor like ``past``
        Overwritten with the last K inputs after the new tokens. May be ``past`` itself; otherwise they must not overlap.
    out : DeviceTensor ``[B, s, channels]``
        Contiguous, overwritten; it must not overlap ``x`` or the gates. Zeros after the new tokens of a slot.
    bias : DeviceTensor ``[channels]``, optional
        Bias of the convolution.
    silu : bool
        True for ``x * sigmoid(x)`` after the bias.
    gate_in, gate_out : DeviceTensor ``[B, s, channels]``, optional
        Factors of the inputs and of the outputs. Strided as ``x`` may be.
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
    ``causal_conv1d_update`` and ``causal_conv1d_fn`` of Mamba-2 (Dao and Gu, 2024; Bamba, Granite 4, Nemotron-H) and Qwen3-Next; with
    both gates the short convolution of LFM2, ``C * conv(B * x)``. The state has K columns as in Hugging Face transformers; the oldest
    one is not used again. Sums are float32. Outputs and states do not depend on how tokens are split into calls, bit for bit.

    Examples
    --------
    The sum of a token and the one before it, in host memory:

    >>> import numpy as np
    >>> from trt_kvcache import HostMemory
    >>> from trt_kvcache.kernels import causal_conv1d
    >>> memory = HostMemory()
    >>> stream = memory.create_stream()
    >>> def tensor(values):
    ...     return memory.to_device(np.array(values, np.float32), stream=stream)
    >>> x, out = tensor([[[1], [2], [3]]]), tensor([[[0], [0], [0]]])
    >>> weight, state = tensor([[1, 1]]), tensor([[[0, 10]]])
    >>> causal_conv1d(x, weight, state, present=state, out=out, stream=stream)
    >>> out.numpy().ravel().tolist(), state.numpy().ravel().tolist()
    ([11.0, 3.0, 5.0], [2.0, 3.0])
    """
    check_first("x", x, "[B, s, channels]")
    slots, _, channels = x.shape
    check_tokens("x", x, x, x.shape)
    if not isinstance(weight, DeviceTensor) or weight.ndim != 2 or weight.shape[1] not in KERNEL_WIDTHS:
        raise ShapeError(f"weight: expected a tensor [{channels}, K] with K one of {KERNEL_WIDTHS}, got {weight!r}.")
    check_dense("weight", weight, x, x.dtype, (channels, weight.shape[1]))
    check_states(past, present, x, (slots, *weight.shape))
    check_dense("out", out, x, x.dtype, x.shape)
    if bias is not None:
        check_dense("bias", bias, x, x.dtype, (channels,))
    for name, gate in (("gate_in", gate_in), ("gate_out", gate_out)):
        if gate is not None:
            check_tokens(name, gate, x, x.shape)
    for name, given in (("x", x), ("gate_in", gate_in), ("gate_out", gate_out)):
        if given is not None and given.ptr == out.ptr and slots:
            raise LayoutError(f"out: expected a tensor of its own, got {name} itself.")
    check_new_lengths(new_lengths, x)
    x.memory.check_stream(stream)
    params = CausalConv1dParams(
        x=x, weight=weight, bias=bias, past=past, present=present, out=out,
        silu=bool(silu), gate_in=gate_in, gate_out=gate_out, new_lengths=new_lengths,
    )  # fmt: skip
    if slots:
        causal_conv1d_kernel(params, stream)


@dataclass(frozen=True, kw_only=True)
class CausalConv1dParams:
    """The arguments of :func:`~trt_kvcache.kernels.causal_conv1d`, which describes them."""

    x: DeviceTensor
    weight: DeviceTensor
    bias: DeviceTensor | None
    past: DeviceTensor
    present: DeviceTensor
    out: DeviceTensor
    silu: bool
    gate_in: DeviceTensor | None
    gate_out: DeviceTensor | None
    new_lengths: DeviceTensor | None

    @property
    def memory(self) -> Memory:
        """Memory of all tensors."""
        return self.x.memory


# --- NumPy, in float32 ---


def _causal_conv1d_on_host(params: CausalConv1dParams, stream: Any) -> None:
    x, past, present, out = (array_of(tensor) for tensor in (params.x, params.past, params.present, params.out))
    weight = array_of(params.weight).astype(np.float32)
    bias = None if params.bias is None else array_of(params.bias).astype(np.float32)
    gate_in, gate_out = (None if gate is None else array_of(gate) for gate in (params.gate_in, params.gate_out))
    width = weight.shape[1]
    for slot, count in enumerate(new_counts(params.new_lengths, x)):
        out[slot, count:] = 0
        if not count:
            present[slot] = past[slot]
            continue
        new = x[slot, :count].astype(np.float32)
        if gate_in is not None:
            new = (new * gate_in[slot, :count].astype(np.float32)).astype(x.dtype).astype(np.float32)
        inputs = np.concatenate([past[slot].T.astype(np.float32), new])
        sums = inputs[width:] * weight[:, -1]
        if bias is not None:
            sums += bias
        for column in range(width - 1):
            sums += inputs[column + 1 : column + 1 + count] * weight[:, column]
        if params.silu:
            sums /= 1 + np.exp(-sums)
        if gate_out is not None:
            sums *= gate_out[slot, :count].astype(np.float32)
        out[slot, :count] = sums
        present[slot] = inputs[count:].T


# --- CUDA: launches of plugins/recurrent/causal_conv1d.cu ---


#: Threads of a block at most, resident blocks of a multiprocessor, and tokens that are loaded together. The source has the same numbers.
CONV_THREADS, BLOCKS_PER_SM, TOKENS_IN_FLIGHT = 128, 4, 4

#: Tokens of a tile at most. Each tile loads the inputs before it once more.
_MAX_TILE_TOKENS = 64

_WARP = 32


class CausalConv1dPlan(NamedTuple):
    """The kernel of a call, and its launch."""

    #: The kernel.
    name: str
    #: Threads of a block.
    threads: int
    #: Blocks for the channels of a token.
    blocks: int
    #: Tokens of a block.
    tile_tokens: int


def causal_conv1d_plan(params: CausalConv1dParams, multiprocessors: int) -> CausalConv1dPlan:
    """Return the kernel and launch of a call: by shapes, strides, dtypes and the number of multiprocessors alone."""
    x, kernel_width = params.x, params.weight.shape[1]
    slots, width, channels = x.shape
    of_thread, name = ROW_GRANULE // itemsize(x.dtype), "causal_conv1d"
    activations = [tensor for tensor in (x, params.gate_in, params.gate_out) if tensor is not None]
    if channels % of_thread or not all(map(has_vectors, activations)):
        of_thread, name = 1, "causal_conv1d_any"
    elif width == 1:
        of_thread, name = of_thread if kernel_width == 3 else of_thread // 2, "causal_conv1d_update"
    needed = channels // of_thread
    # The block size that leaves the fewest threads without channels.
    threads = min(range(CONV_THREADS, CONV_THREADS // 2, -_WARP), key=lambda size: -(-needed // size) * size)
    blocks = -(-needed // threads)
    resident_tiles = max(multiprocessors * (BLOCKS_PER_SM * CONV_THREADS // threads) // (blocks * slots), 1)
    return CausalConv1dPlan(name, threads, blocks, _tile_tokens(width, resident_tiles))


def _tile_tokens(width: int, resident_tiles: int) -> int:
    """Return the tokens of a tile for which the last wave of blocks is about as large as the first."""
    waves = -(-width // (resident_tiles * _MAX_TILE_TOKENS))
    tokens = -(-width // (resident_tiles * waves))
    return -(-tokens // TOKENS_IN_FLIGHT) * TOKENS_IN_FLIGHT


def _causal_conv1d_on_device(params: CausalConv1dParams, stream: Any) -> None:
    x, weight = params.x, params.weight
    slots, width, channels = x.shape
    memory: Any = x.memory
    plan = causal_conv1d_plan(params, memory.multiprocessor_count)
    arguments = (
        *(*token_rows(x), *token_rows(params.gate_in), *token_rows(params.gate_out)),
        *(weight.ptr, address(params.bias), params.past.ptr, params.present.ptr, address(params.new_lengths)),
        *(width, channels, weight.shape[1], int(params.silu), plan.tile_tokens, params.out.ptr),
    )
    launch(
        memory,
        variant_name("recurrent_causal_conv1d", x.dtype, params.past.dtype),
        plan.name,
        (plan.blocks, -(-width // plan.tile_tokens), slots),
        arguments,
        stream,
        threads=plan.threads,
        programmatic_dependent_launch=starts_early(memory),
    )


#: Convolve the new tokens of each slot, and write its conv state: :class:`CausalConv1dParams`, stream.
causal_conv1d_kernel = Kernel(_causal_conv1d_on_host, _causal_conv1d_on_device)
