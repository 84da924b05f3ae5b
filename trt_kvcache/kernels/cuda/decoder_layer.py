"""What a decoder layer does between its matrix products, on the device: ``plugins/decoder_layer.cu``."""

from typing import Any

from trt_kvcache.kernels.cuda.arguments import address
from trt_kvcache.kernels.cuda.launch import THREADS_PER_BLOCK, launch, starts_early
from trt_kvcache.memory.tensor import DeviceTensor

_SOURCE = "decoder_layer"

_WARP, _MAX_THREADS = 32, 1024

#: Warps of a block of ``qk_rms_norm``, each of which has a unit.
_WARPS = 4

#: Words that a thread keeps in registers: ``kHeldWords`` of the source.
_HELD_WORDS = 4


def add_rms_norm(
    hidden: DeviceTensor,
    change: DeviceTensor,
    weight: DeviceTensor | None,
    out: DeviceTensor | None,
    eps: float,
    weight_offset: float,
    change_weight: DeviceTensor | None,
    change_factor: float,
    stream: Any,
) -> None:
    rows, columns = hidden.shape
    words = columns // 2
    threads = min(_MAX_THREADS, -(-words // (_WARP * _HELD_WORDS)) * _WARP)
    arguments: tuple[Any, ...] = (hidden.ptr, change.ptr, address(weight), address(out), words, float(eps), float(weight_offset))
    is_plain = out is not None and change_weight is None and change_factor == 1
    if not is_plain:
        arguments += (address(change_weight), float(change_factor))
    early = starts_early(hidden.memory)
    launch(
        hidden.memory,
        _SOURCE,
        f"add_{'' if is_plain else 'changed_'}rms_norm_{hidden.dtype}",
        (rows, 1, 1),
        arguments,
        stream,
        threads=threads,
        programmatic_dependent_launch=early,
    )


def qk_rms_norm(
    qkv: DeviceTensor,
    q_weight: DeviceTensor,
    k_weight: DeviceTensor,
    num_heads: int,
    num_kv_heads: int,
    eps: float,
    weight_offset: float,
    stream: Any,
) -> None:
    (rows, _, head_dim), row_words = qkv.shape, qkv.strides[0] // 2
    units = [heads * head_dim // len(weight) for heads, weight in ((num_heads, q_weight), (num_kv_heads, k_weight))]
    words = [len(weight) // 2 for weight in (q_weight, k_weight)]
    launch(
        qkv.memory,
        _SOURCE,
        f"qk_rms_norm_{qkv.dtype}",
        (-(-sum(units) // _WARPS), rows, 1),
        (qkv.ptr, q_weight.ptr, k_weight.ptr, row_words, *units, *words, float(eps), float(weight_offset)),
        stream,
        threads=_WARPS * _WARP,
        programmatic_dependent_launch=starts_early(qkv.memory),
    )


def gated_mul(activation: str, gate_up: DeviceTensor, out: DeviceTensor, stream: Any) -> None:
    rows, columns = out.shape
    words = columns // 2
    grid = (-(-words // THREADS_PER_BLOCK), rows, 1)
    early = starts_early(out.memory)
    launch(
        out.memory,
        _SOURCE,
        f"{activation}_mul_{out.dtype}",
        grid,
        (gate_up.ptr, out.ptr, words),
        stream,
        programmatic_dependent_launch=early,
    )
