"""DLPack capsules of device memory, for every dtype.

cuda.core makes the capsule, and with it the deleter, which may be called in any thread and at any time. It does not know
bfloat16 and float8, so tensors are exported as integers of the same size, and the dtype in the capsule is corrected afterwards.
"""

import ctypes
from typing import Any

import numpy as np

from trt_kvcache.dtypes import dlpack_code, itemsize
from trt_kvcache.memory.shapes import span_elements
from trt_kvcache.memory.tensor import DeviceTensor


class DLTensor(ctypes.Structure):
    """``DLTensor`` of dlpack.h: address, device, dtype, shape, strides."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("dtype_code", ctypes.c_uint8),
        ("dtype_bits", ctypes.c_uint8),
        ("dtype_lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _VersionedHeader(ctypes.Structure):
    """The fields before the DLTensor in ``DLManagedTensorVersioned``; in ``DLManagedTensor`` the DLTensor comes first."""

    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
    )


#: Offset of the DLTensor in the struct of a capsule, by the name of the capsule.
_DLTENSOR_OFFSET = {b"dltensor": 0, b"dltensor_versioned": ctypes.sizeof(_VersionedHeader)}


def dltensor_in(capsule: Any) -> DLTensor:
    """Return the DLTensor of a capsule that was not consumed yet. It must not outlive the capsule."""
    name_of = ctypes.pythonapi.PyCapsule_GetName
    name_of.argtypes, name_of.restype = [ctypes.py_object], ctypes.c_char_p
    pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
    pointer_of.argtypes, pointer_of.restype = [ctypes.py_object, ctypes.c_char_p], ctypes.c_void_p
    name = name_of(capsule)
    return DLTensor.from_address(pointer_of(capsule, name) + _DLTENSOR_OFFSET[name])


def device_capsule(tensor: DeviceTensor, owner: object, **kwargs: Any) -> Any:
    """Return a capsule over the bytes of a view in GPU memory. Nothing is copied, and nothing waits."""
    from cuda.core import Buffer
    from cuda.core.utils import StridedMemoryView

    size = itemsize(tensor.dtype)
    nbytes = span_elements(tensor.shape, tensor.strides) * size
    view = StridedMemoryView.from_buffer(
        Buffer.from_handle(tensor.ptr, nbytes, owner=owner), tensor.shape, tensor.strides, dtype=np.dtype(f"int{8 * size}")
    )
    capsule = view.__dlpack__(**kwargs)
    dltensor_in(capsule).dtype_code = dlpack_code(tensor.dtype)
    return capsule
