"""``PluginLayer``: a plugin layer of a network, which computes with the NumPy twin of the plugin's kernels."""

from types import SimpleNamespace

import numpy as np

from trt_kvcache.dtypes import numpy_dtype

#: Bytes that addresses of TensorRT are a multiple of.
ALIGNMENT = 256


class PluginLayer:
    """A plugin layer: its tensors in the network, and the plugin. ``run_plugins_on_host`` lets it run."""

    def __init__(self, tensorrt, name, inputs, plugin):
        self.tensorrt, self.name, self.inputs, self.plugin = tensorrt, name, inputs, plugin
        self.aliases = [plugin.get_aliased_input(output) for output in range(plugin.num_outputs)]
        self.outputs = []

    @classmethod
    def of(cls, tensorrt, layer):
        """Return an ``IPluginV3Layer`` of a network, whose plugin is the object that its creator made."""
        made = cls(tensorrt, layer.name, [layer.get_input(index) for index in range(layer.num_inputs)], layer.plugin)
        made.outputs = [layer.get_output(index) for index in range(layer.num_outputs)]
        return made

    @property
    def described(self):
        return [(self.tensorrt.dtype_name(one.dtype), tuple(one.shape)) for one in self.inputs]

    def _unwritten(self, arrays):
        """Return what the first output is before it is written: attended tokens are like q, others as the operation says."""
        if self.plugin.plugin_name == "KVCacheAttention":
            return np.full_like(arrays[0], np.nan)
        output, *_ = self.plugin._op.outputs(self.plugin._types([array.shape for array in arrays]))
        return np.full(output.shape, np.nan, numpy_dtype(output.dtype))

    def run(self, arrays):
        arrays = [np.array(array, order="C") for array in arrays]
        types = [one.dtype for one in self.inputs]
        assert [array.dtype for array in arrays] == [numpy_dtype(self.tensorrt.dtype_name(one)) for one in types]
        descs = [SimpleNamespace(dims=array.shape, type=one) for array, one in zip(arrays, types, strict=True)]
        results = [self._unwritten(arrays), *(arrays[alias] for alias in self.aliases[1:])]
        self.plugin.on_shape_change(descs, [])
        sizes = [SimpleNamespace(max=array.shape) for array in arrays]
        workspace = np.full(self.plugin.get_workspace_size(sizes, []) + ALIGNMENT, 0xFF, np.uint8)
        aligned = -(-workspace.ctypes.data // ALIGNMENT) * ALIGNMENT
        addresses = [[one.ctypes.data for one in side] for side in (arrays, results)]
        self.plugin.enqueue(descs, [], *addresses, aligned, 0)
        return results
