"""Kernels of the cache, of attention, of decoder layers and of sampling: each in NumPy, and in CUDA C++ under ``plugins/``.

A family of kernels is one file, ``*_kernels.py``: the functions that users import from here, which check all their arguments before the
first byte changes; the NumPy twins; the launches; and both as a pair, a :class:`~trt_kvcache.kernels.kernel.Kernel`, which the engines of
this package call without a second check. Wrong arguments and closed objects raise the errors of :mod:`trt_kvcache.errors`. A family for
engines alone has no functions for users, and checks nothing.

All work is stream-ordered. After the first launch of a kernel, which may compile it, no function waits or allocates. The parameters of a
kernel are arguments of its launch, or arrays that were made once (:class:`KVLayerInfos`, :class:`StateInfos`).
"""

from trt_kvcache.kernels.attention_kernels import attend, split_qkv
from trt_kvcache.kernels.attention_workspace import AttentionWorkspace
from trt_kvcache.kernels.causal_conv1d_kernels import causal_conv1d
from trt_kvcache.kernels.compaction_moves import MAX_MOVES
from trt_kvcache.kernels.compaction_plan import AnyCompactionPlan, CompactionPlan, DeviceCompactionPlan
from trt_kvcache.kernels.decoder_layer_kernels import activated_mul, add_rms_norm, gelu_tanh_mul, qk_rms_norm, silu_mul
from trt_kvcache.kernels.delta_rule_kernels import gated_delta_rule
from trt_kvcache.kernels.gated_norm_kernels import gated_rms_norm
from trt_kvcache.kernels.kv_kernels import (
    compact_kv_cache_batched,
    instantiate_kv_cache_batched,
    instantiate_kv_cache_layer_from_tensor,
    save_kv_cache_batched,
    save_kv_cache_layer_into_tensor,
)
from trt_kvcache.kernels.launch import MAX_SAVED_TENSORS
from trt_kvcache.kernels.layer_infos import KVLayerInfo, KVLayerInfos
from trt_kvcache.kernels.length_kernels import MAX_STORED_VALUES, compact_length_tensor, increment_length_tensor, store_length_values
from trt_kvcache.kernels.linear_kernels import linear, linear_gelu_tanh_mul, linear_silu_mul
from trt_kvcache.kernels.mamba2_kernels import mamba2_scan
from trt_kvcache.kernels.sampling_kernels import choose_tokens, token_logprobs
from trt_kvcache.kernels.sampling_rows import SamplingRows
from trt_kvcache.kernels.sampling_workspace import SamplingWorkspace
from trt_kvcache.kernels.state_infos import StateInfo, StateInfos
from trt_kvcache.kernels.state_row_kernels import compact_rows, copy_rows, instantiate_rows, save_rows, zero_rows
from trt_kvcache.kernels.token_path_kernels import keep_kv_cache_paths_batched

__all__ = [
    "AnyCompactionPlan",
    "AttentionWorkspace",
    "CompactionPlan",
    "DeviceCompactionPlan",
    "KVLayerInfo",
    "KVLayerInfos",
    "MAX_SAVED_TENSORS",
    "MAX_MOVES",
    "MAX_STORED_VALUES",
    "SamplingRows",
    "SamplingWorkspace",
    "StateInfo",
    "StateInfos",
    "activated_mul",
    "add_rms_norm",
    "attend",
    "causal_conv1d",
    "choose_tokens",
    "compact_kv_cache_batched",
    "compact_length_tensor",
    "compact_rows",
    "copy_rows",
    "gated_delta_rule",
    "gated_rms_norm",
    "gelu_tanh_mul",
    "increment_length_tensor",
    "instantiate_kv_cache_batched",
    "instantiate_kv_cache_layer_from_tensor",
    "instantiate_rows",
    "keep_kv_cache_paths_batched",
    "linear",
    "linear_gelu_tanh_mul",
    "linear_silu_mul",
    "mamba2_scan",
    "qk_rms_norm",
    "save_kv_cache_batched",
    "save_kv_cache_layer_into_tensor",
    "save_rows",
    "silu_mul",
    "split_qkv",
    "store_length_values",
    "token_logprobs",
    "zero_rows",
]
