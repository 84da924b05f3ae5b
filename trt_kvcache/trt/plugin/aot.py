"""Attention of a decode step as a plugin compiled ahead of time: an engine of full TensorRT carries the kernel as PTX and needs no Python.

Plugins that are compiled ahead of time get no workspace, so a head is not split over thread blocks: this suits many slots or short
caches. The plugin's fields are compiled into the kernel, not stored in the engine. Nothing here was run with full TensorRT yet.
"""

from __future__ import annotations

from collections.abc import Mapping
from inspect import Parameter, Signature
from types import GenericAlias
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trt_kvcache.errors import ConfigError, CudaError, ShapeError
from trt_kvcache.kernels.attention_params import score_factors
from trt_kvcache.kernels.attention_tiles import DECODE_HEAD_DIMS, DECODE_ROWS, ELEMENT_TYPES, decode_block_nbytes, decode_tiles
from trt_kvcache.kernels.compile import nvrtc_version
from trt_kvcache.kernels.ptx import compile_ptx
from trt_kvcache.memory.cuda_driver import driver_version
from trt_kvcache.ops.attention_attributes import ATTRIBUTE_TYPES, AttentionAttributes
from trt_kvcache.trt.module import TensorRT
from trt_kvcache.trt.plugin.plugin_tensors import INPUTS, check_dtypes, check_shapes, input_names
from trt_kvcache.trt.plugin.versions import PLUGIN_NAME, PLUGIN_NAMESPACE, ahead_of_time_module, constant_of

#: Name under which ``tensorrt.plugin`` finds the plugin, and name of the kernel in the PTX.
PLUGIN_ID, KERNEL = f"{PLUGIN_NAMESPACE}::{PLUGIN_NAME}Decode", "attention_decode_aot"

#: The inputs. ``cos_sin`` is always among them; it is not read if ``rotary_dim`` is 0.
INPUT_NAMES = tuple(name for name in INPUTS if name != "new_lengths")

#: Dynamic shared memory that a launch gets by default. More must be requested from the driver, which this interface cannot do.
_SHARED_NBYTES = 48 * 1024
_ROWS, _WARP = DECODE_ROWS[0], 32

#: Tile sizes that depend on shared memory are our own, the others are from this.
_LIKE = "sm_80"


def blocks(fields: AttentionAttributes) -> int:
    """Return the blocks along y of a launch: 8 query heads of a K/V head each. Along z there is one for each slot."""
    return fields.num_kv_heads * -(-fields.group // _ROWS)


def tiles(head_dim: int) -> tuple[int, int, int]:
    """Return the warps of a block, the stages of a warp's ring, and the bytes of shared memory."""
    if head_dim not in DECODE_HEAD_DIMS:
        known = ", ".join(map(str, DECODE_HEAD_DIMS))
        raise ConfigError(f"head_dim: expected one of {known} for {PLUGIN_ID}, got {head_dim}. Larger heads need {PLUGIN_NAME}.")
    like = decode_tiles(head_dim, _LIKE)
    sizes = [
        (warps, stages, decode_block_nbytes(head_dim, _ROWS, {**like, "WARPS": warps, "STAGES": stages, "HEAD_BUFFERS": stages}))
        for warps in (4, 2, 1)
        for stages in (4, 3, 2)
    ]
    return next(one for one in sizes if one[2] <= _SHARED_NBYTES)


def macros(fields: AttentionAttributes, dtype: str) -> dict[str, str]:
    """Return the macros that ``plugins/attention/decode_aot.cuh`` is compiled with."""
    warps, stages, _ = tiles(fields.head_dim)
    sizes = {
        **decode_tiles(fields.head_dim, _LIKE),
        "HEAD_DIM": fields.head_dim,
        "WARPS": warps,
        "STAGES": stages,
        "HEAD_BUFFERS": stages,
        "BLOCKS_PER_SM": 1,
    }
    numbers = {"GROUP_SIZE": fields.group, "NUM_KV_HEADS": fields.num_kv_heads, "ROTARY_DIM": fields.rotary_dim, "WINDOW": fields.window}
    doubles = dict(zip(("FACTOR", "INVERSE_SOFTCAP"), score_factors(fields.score_scale, fields.softcap), strict=True))
    return {"ELEMENT": ELEMENT_TYPES[dtype], **{name: repr(value) for name, value in (sizes | numbers | doubles).items()}}


def decode_ptx(fields: AttentionAttributes, dtype: str, arch: str) -> str:
    """Compile the kernel with NVRTC, for the driver if there is one. Needs no GPU."""
    # PTX, as TensorRT takes no machine code here. All other kernels are cubins, which any driver of the same major number loads.
    compiler, driver = nvrtc_version(), driver_version()
    if driver is not None and driver < tuple(map(int, compiler.split("."))):
        raise CudaError(
            f"NVRTC: expected CUDA {driver[0]}.{driver[1]} or older for PTX, as the NVIDIA driver is, got {compiler}. "
            f"A driver refuses newer PTX: update it, or install nvidia-cuda-nvrtc {driver[0]}.{driver[1]}."
        )
    source = '#include "attention/decode_aot.cuh"\n'
    return str(compile_ptx(source, name=KERNEL, arch=arch, macros=macros(fields, dtype)), "ascii")


def register_decode(tensorrt: TensorRT, *, arch: str) -> Any:
    """Make the plugin known to ``tensorrt.plugin``, as ``trt_kvcache::KVCacheAttentionDecode``."""
    trtp = ahead_of_time_module(tensorrt)

    def describe(*tensors: Any, **fields: Any) -> Any:
        described = dict(zip(INPUT_NAMES, tensors, strict=True))
        return described["q"].like(), described["cache"].aliased()

    def implement(*arguments: Any) -> Any:
        given = dict(zip((*INPUT_NAMES, *ATTRIBUTE_TYPES, "outputs", "tactic"), arguments, strict=True))
        q, cache = given["q"], given["cache"]
        fields = AttentionAttributes(**{name: given[name].item() for name in ATTRIBUTE_TYPES})
        dtype = check_dtypes(fields, {name: tensorrt.dtype_name(given[name].dtype) for name in INPUT_NAMES})
        names = input_names(fields, len(INPUT_NAMES) - (not fields.rotary_dim))
        sizes = check_shapes(fields, {name: [constant_of(size) for size in given[name].shape_expr] for name in names})
        if sizes["s"] != 1:
            raise ShapeError(f"{PLUGIN_ID}: expected q of shape [B, 1, num_heads, head_dim]. More new tokens need {PLUGIN_NAME}.")
        warps, _, shared = tiles(fields.head_dim)
        launch, integers = trtp.KernelLaunchParams(), trtp.SymIntExprs(1)
        launch.grid_x, launch.grid_y, launch.grid_z = 1, blocks(fields), q.shape_expr[0]
        launch.block_x, launch.block_y, launch.block_z = _WARP * warps, 1, 1
        launch.shared_mem = shared
        integers[0] = trtp.SymInt32(cache.shape_expr[3])
        return KERNEL, decode_ptx(fields, dtype, arch), launch, integers

    # TensorRT inspects the signatures: parameter names, and its own classes as annotations.
    tensors = dict.fromkeys(INPUT_NAMES, trtp.TensorDesc)
    # Attributes are arrays of one element: with int and float, releases up to 11.1 fail in their own code with NumPy 2.4 (int(array([8]))).
    integers, floats = NDArray[np.int32], NDArray[np.float64]
    kinds = {name: floats if kind.startswith("FLOAT") else integers for name, kind in ATTRIBUTE_TYPES.items()}
    kernel = (str | bytes, str | bytes, trtp.KernelLaunchParams, trtp.SymIntExprs)
    _sign(describe, tensors | kinds, (trtp.TensorDesc,) * 2)
    _sign(implement, {**tensors, **kinds, "outputs": Parameter.empty, "tactic": int}, kernel)
    trtp.register(PLUGIN_ID)(describe)
    return trtp.aot_impl(PLUGIN_ID)(implement)


def _sign(function: Any, parameters: Mapping[str, Any], returns: tuple[Any, ...]) -> None:
    kind, result = Parameter.POSITIONAL_OR_KEYWORD, GenericAlias(tuple, returns)
    function.__signature__ = Signature(
        [Parameter(name, kind, annotation=what) for name, what in parameters.items()], return_annotation=result
    )
