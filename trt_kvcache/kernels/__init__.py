"""Kernels that the cache runs between enqueues (seed 004): each in NumPy, and in CUDA C++ under ``plugins/``.

The functions here check their arguments and choose by the place of the tensor. They are ordered on ``stream`` and neither
wait nor allocate.
"""

from trt_kvcache.kernels.lengths import MAX_STORED_VALUES, increment_length_tensor, store_length_values

__all__ = ["MAX_STORED_VALUES", "increment_length_tensor", "store_length_values"]
