"""The kernels of :class:`~trt_kvcache.kernels.backend.Backend` on the device: launches of ``plugins/*.cu``.

A launch neither allocates nor waits. The first one of a kernel loads its machine code, which may do both: run an operation
once before capturing it.
"""

from trt_kvcache.kernels.cuda.attention import attend
from trt_kvcache.kernels.cuda.causal_conv1d import causal_conv1d
from trt_kvcache.kernels.cuda.decoder_layer import add_rms_norm, gated_mul, qk_rms_norm
from trt_kvcache.kernels.cuda.delta_rule import gated_delta_rule
from trt_kvcache.kernels.cuda.embedding import embed
from trt_kvcache.kernels.cuda.gated_norm import gated_rms_norm
from trt_kvcache.kernels.cuda.kv import compact_layers, copy_layer, instantiate_layers, save_layers
from trt_kvcache.kernels.cuda.lengths import compact_lengths, increment_scalar, increment_tensor, store_values
from trt_kvcache.kernels.cuda.linear import linear, linear_gated_mul
from trt_kvcache.kernels.cuda.mamba2 import mamba2_scan
from trt_kvcache.kernels.cuda.sampling import choose_tokens, count_tokens, set_bias, set_row, token_logprobs
from trt_kvcache.kernels.cuda.states import compact_rows, copy_rows, instantiate_rows, save_rows, zero_rows

__all__ = [
    "add_rms_norm",
    "attend",
    "causal_conv1d",
    "choose_tokens",
    "count_tokens",
    "set_bias",
    "set_row",
    "token_logprobs",
    "compact_layers",
    "compact_lengths",
    "compact_rows",
    "copy_layer",
    "copy_rows",
    "embed",
    "gated_delta_rule",
    "gated_mul",
    "gated_rms_norm",
    "increment_scalar",
    "increment_tensor",
    "instantiate_layers",
    "instantiate_rows",
    "mamba2_scan",
    "linear",
    "linear_gated_mul",
    "qk_rms_norm",
    "save_layers",
    "save_rows",
    "store_values",
    "zero_rows",
]
