"""The short convolution of recurrent layers: depthwise, causal, over the new tokens of each slot and the inputs before them."""

from __future__ import annotations

from typing import Any

from trt_kvcache.errors import LayoutError, ShapeError
from trt_kvcache.kernels.backend import backend_of
from trt_kvcache.kernels.recurrent_checks import check_dense, check_first, check_new_lengths, check_states, check_tokens
from trt_kvcache.kernels.recurrent_params import CausalConv1dParams
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
    ``sum(weight[:, j] * inputs[t - K + 1 + j]) + bias``, then SiLU if that is asked for, then times ``gate_out``. One new token for
    each slot is a decode step; more are a chunk or a whole prompt: in one launch, and with the same result.

    Parameters
    ----------
    x : DeviceTensor ``[B, s, channels]`` float16, bfloat16 or float32
        New tokens. Slots and tokens may be strided: a part of what a projection gives.
    weight : DeviceTensor ``[channels, K]``
        K is 2, 3 or 4. The last column is for the token itself, as in PyTorch's ``Conv1d``. On a GPU it and ``bias`` are read before
        earlier launches on the stream have ended: none of those may still write them.
    past : DeviceTensor ``[B, channels, K]``, of the dtype of ``x`` or float32
        The last K inputs of each slot, oldest first; zeros before the first token. A conv state of the cache.
    present : DeviceTensor like ``past``
        Overwritten with the last K inputs after the new tokens. May be ``past`` itself; otherwise they must not overlap.
    out : DeviceTensor ``[B, s, channels]``
        Contiguous, overwritten; it must not overlap ``x`` or the gates. Zeros behind the new tokens of a slot.
    bias : DeviceTensor ``[channels]``, optional
        Of the convolution.
    silu : bool
        Whether ``x * sigmoid(x)`` follows the bias.
    gate_in, gate_out : DeviceTensor ``[B, s, channels]``, optional
        What the inputs and the outputs are multiplied with. Strided as ``x`` may be.
    new_lengths : DeviceTensor (B,) int32, optional
        New tokens of each slot, at most s. The rest is padding, of any content, and leaves no trace; a slot of none keeps its state bit for
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
    one is not used again. Sums are float32. However tokens are split into calls, outputs and states are equal bit for bit.

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
        backend_of(x.memory).causal_conv1d(params, stream)
