"""A plugin with tensors that are somebody else's, and what the twin in NumPy makes of them."""

from types import SimpleNamespace

import numpy as np

from tests.kernels.attention import TOLERANCE, inputs, make_workspace
from tests.trt.plugin.stand_in import DataType, tensorrt
from trt_kvcache import DeviceTensor, HostMemory
from trt_kvcache.kernels import attend
from trt_kvcache.ops.borrowed_workspace import workspace_nbytes
from trt_kvcache.ops.int32_packing import packed_shape
from trt_kvcache.trt.plugin import AttentionAttributes, plugin_class
from trt_kvcache.trt.plugin.plugin_tensors import inputs_of

PLUGIN_TYPES = {"float16": DataType.HALF, "bfloat16": DataType.BF16, "float32": DataType.FLOAT, "int32": DataType.INT32}


class Bound:
    """A plugin with its tensors, on the device and on the host. Behind ``out`` there is one slot more, which stays as it is."""

    def __init__(self, case, memory, stream, *, takes_trees=False):
        self.case, self.host = case, inputs(case, 1)
        rotary = case.head_dim if case.rotary_dim is None else case.rotary_dim
        self.fields = AttentionAttributes(
            num_heads=case.kv_heads * case.group, num_kv_heads=case.kv_heads, head_dim=case.head_dim, scale=case.scale or 0.0,
            window=case.window, softcap=case.softcap, rotary_dim=rotary,
            kv_dtype=case.kv_dtype, kv_scales=case.scales if case.kv_dtype else None, takes_trees=takes_trees,
        )  # fmt: skip
        self.host = {name: self.host[name] for name in inputs_of(self.fields) if name in self.host}  # in the order of the plugin
        slots, *rest = self.host["q"].shape
        self.memory, self.stream, self.handle = memory, stream, int(stream.__cuda_stream__()[1])
        self.tensors = {name: memory.to_device(np.ascontiguousarray(array), stream=stream) for name, array in self.host.items()}
        if takes_trees:
            known = self.tensors | {"ancestors": self._table()}
            self.tensors = {name: known[name] for name in inputs_of(self.fields) if name in known}
        self.out = memory.to_device(np.zeros((slots + 1, *rest), self.host["q"].dtype), stream=stream)
        self.workspace = memory.to_device(np.empty(workspace_nbytes(self.fields), np.uint8), stream=stream)
        self.fill()
        self.plugin = plugin_class(tensorrt())(self.fields)

    def _table(self):
        """The input for trees, of one slot more: the tokens of the case come first. Without a tree all bits are set."""
        table = np.full((1 + len(self.case.lengths), 64, 2), -1, np.int32)
        if "ancestors" in self.host:
            words = np.ascontiguousarray(self.host["ancestors"]).view(np.int32).ravel()
            table.reshape(-1)[: len(words)] = words
        return self.memory.to_device(table, stream=self.stream)

    def fill(self):
        """Leave in the workspace, and in ``out``, what another layer might: all bits are ones."""
        for tensor in (self.workspace, self.out):
            ones = DeviceTensor(tensor.allocation, shape=(tensor.nbytes,), dtype="uint8")
            self.memory.upload(ones, np.full(ones.shape, 0xFF, np.uint8), stream=self.stream)
        self.memory.synchronize(self.stream)

    @property
    def descs(self):
        """What TensorRT says of the inputs: codes are int32."""
        known = {name: (tensor.shape, tensor.dtype) for name, tensor in self.tensors.items()}
        if self.case.kv_dtype:
            known["cache"] = packed_shape(known["cache"][0]), "int32"
        return [SimpleNamespace(dims=shape, type=PLUGIN_TYPES[dtype]) for shape, dtype in known.values()]

    @property
    def updated(self):
        """Names of the inputs that are updated in place."""
        return ["cache", "kv_scales"] if self.case.kv_dtype and self.case.scales == "token" else ["cache"]

    def enqueue(self, **changed):
        inputs = [tensor.ptr for tensor in self.tensors.values()]
        outputs = [self.out.ptr, *(changed.get(name, self.tensors[name].ptr) for name in self.updated)]
        self.plugin.enqueue(self.descs, [], inputs, outputs, self.workspace.ptr, self.handle)

    def attend(self):
        """Call the kernels without the plugin."""
        case = self.case
        options = {"scale": case.scale, "window": case.window, "softcap": case.softcap}
        workspace = make_workspace(case, self.memory, self.stream)
        attend(**self.tensors, out=self.out[: len(case.lengths)], workspace=workspace, **options, stream=self.stream)

    def twin(self):
        """Return out, and what is updated in place, as the kernels' twin leaves them."""
        memory, case = HostMemory(), self.case
        stream = memory.create_stream()
        tensors = {name: memory.to_device(np.array(array, order="C"), stream=stream) for name, array in self.host.items()}
        tensors["out"] = out = memory.to_device(np.empty(self.out.shape, self.host["q"].dtype)[1:], stream=stream)
        options = {"scale": case.scale, "window": case.window, "softcap": case.softcap}
        attend(**tensors, workspace=make_workspace(case, memory, stream), **options, stream=stream)
        return out.numpy().astype(np.float64), {name: tensors[name].numpy() for name in self.updated}

    def check(self, dtype):
        self.memory.synchronize(self.stream)
        expected, updated = self.twin()
        *out, behind = self.out.numpy().astype(np.float64)
        assert np.isnan(behind).all()
        error, size = (np.abs(x).max(axis=(1, 3)) for x in (np.array(out) - expected, expected))
        assert (error <= 2 * TOLERANCE[dtype] * size).all()  # both are rounded
        for name, after in updated.items():
            assert self.tensors[name].numpy().tobytes() == after.tobytes()
