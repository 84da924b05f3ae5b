"""Formats of packed weights that benchmarks compare, and the format of each matrix of a model. It needs no torch."""

from __future__ import annotations

import re
from typing import NamedTuple

from trt_kvcache.kernels.super_block_layout import HIGH_BITS


class Scheme(NamedTuple):
    """A format of packed weights."""

    kind: str
    group: int | None  # inputs of a scale; None: all
    scales: str
    has_zero_points: bool = False
    rows: int = 1  # outputs of a scale
    has_order: bool = False  # act-order


#: As ``--quantize`` makes them of a bfloat16 model, as llama.cpp stores blocks, as GPTQ and AWQ store groups, FP8 of compressed-tensors
#: and of DeepSeek, and NVFP4.
SCHEMES = {
    "int4": Scheme("int4", 32, "bfloat16"),
    "int4:128": Scheme("int4", 128, "bfloat16"),
    "int8": Scheme("int8", None, "bfloat16"),
    "q4_0": Scheme("int4", 32, "float16"),
    "q8_0": Scheme("int8", 32, "float16"),
    "gptq": Scheme("int4", 128, "float16", True),
    "gptq:act-order": Scheme("int4", 128, "float16", True, has_order=True),
    "fp8": Scheme("e4m3", None, "bfloat16"),
    "fp8:128": Scheme("e4m3", 128, "float32", rows=128),
    "nvfp4": Scheme("e2m1", 16, "float8_e4m3fn"),
}

#: The types of GGUF in super-blocks, and a file of two of them.
SUPER_BLOCKS, Q4_K_M = tuple(HIGH_BITS), "q4_k_m"
ALL_SCHEMES = (*SCHEMES, *SUPER_BLOCKS, Q4_K_M)

#: Matrices of layers of which Q4_K_M has some in Q6_K, by their names in transformers and in GGUF.
_MORE_BITS = ("v_proj", "down_proj", "attn_v", "ffn_down")


def scheme_of(scheme: str, name: str, num_layers: int) -> str:
    """Return the scheme of a matrix. Q4_K_M has the head in Q6_K, and v and down in the first and last layers and each third between."""
    if scheme != Q4_K_M:
        return scheme
    layer, eighth = re.search(r"\.(\d+)\.", name), num_layers // 8
    if layer is None:
        return "q6_k" if name in ("lm_head.weight", "output.weight") else "q4_k"
    index = int(layer[1])
    has_more = index < eighth or index >= 7 * num_layers // 8 or (index - eighth) % 3 == 2
    return "q6_k" if has_more and any(part in name for part in _MORE_BITS) else "q4_k"
