"""The plugin of full TensorRT in host memory: its enqueue runs the NumPy twin of the kernels, at the addresses that it is handed."""

import ctypes

import numpy as np

from trt_kvcache.dtypes import numpy_dtype
from trt_kvcache.memory.host_memory import HostMemory
from trt_kvcache.trt.plugin import enqueue as step, operation_plugin, plugin as plugin_module


def array_at(address, shape, dtype):
    """Return the array at an address; it does not keep the memory alive."""
    dtype = numpy_dtype(dtype)
    buffer = (ctypes.c_uint8 * (int(np.prod(shape)) * dtype.itemsize)).from_address(address)
    return np.frombuffer(buffer, dtype).reshape(shape)


class PointedMemory(HostMemory):
    """Host memory whose tensors are read at their addresses, whoever owns what is there. As small as a GPU can be."""

    multiprocessor_count = 1

    def array(self, tensor):
        assert tensor.is_contiguous
        return array_at(tensor.ptr, tensor.shape, tensor.dtype)


def run_plugins_on_host(monkeypatch):
    """Let plugins take addresses and streams of the host."""
    memory = PointedMemory()
    for module in (plugin_module, operation_plugin):
        monkeypatch.setattr(module, "current_memory", lambda: memory)
    monkeypatch.setattr(step, "zero", lambda ptr, nbytes, stream: None)  # NumPy needs no workspace
    monkeypatch.setattr(step, "flagged_nbytes", lambda call: 0)
    monkeypatch.setattr(step, "stream_of", lambda handle: memory.create_stream())
    monkeypatch.setattr(step, "_copy", lambda destination, source, nbytes, stream: ctypes.memmove(destination, source, nbytes))
