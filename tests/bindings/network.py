"""TensorRT's network, played by Python: it takes layers through the real bindings, and infers shapes and types as TensorRT documents them.

Only what the networks of this package have. A layer that is used in another way than they use it fails with an assertion.
"""

from collections.abc import Callable, Mapping, Sequence
from ctypes import POINTER, c_bool, c_char_p, c_int32, c_int64, c_uint32, c_void_p
from dataclasses import dataclass, field
from typing import Any

from .cpp import CppObject, Dims, Permutation, Place, Weights, call, function, object_at
from .plugin_calls import Plugin

Shape = tuple[int, ...]
Places = Mapping[str, Mapping[str, Place]]

#: ``DataType``, by the numbers of the headers.
FLOAT, HALF, INT8, INT32, BOOL, FP8, BF16, INT64 = 0, 1, 2, 3, 4, 6, 7, 8
_COMPARISONS, _ND, _TRANSPOSE = (11, 12), 2, 1  # ElementWiseOperation, GatherMode, MatrixOperation


class Tensor(CppObject):
    """``ITensor``. Shape and type are inferred when they are read, as in TensorRT."""

    def __init__(self, places: Places, name: str, infer: Callable[[], tuple[Shape, int]]) -> None:
        self.name, self._infer = name, infer
        self._inferred: tuple[Shape, int] | None = None
        self.made_from: Values | None = None  # of the layer, for what is computed with sizes
        super().__init__(places["ITensor"])

    @property
    def shape(self) -> Shape:
        return self._read()[0]

    @property
    def type(self) -> int:
        return self._read()[1]

    def _read(self) -> tuple[Shape, int]:
        if self._inferred is None:  # a layer is complete when its output is read first
            self._inferred = self._infer()
        return self._inferred

    @function(None, c_char_p)
    def setName(self, name: bytes) -> None:
        self.name = name.decode()

    @function(c_void_p)
    def getName(self) -> bytes:
        return self.name.encode()

    @function(Dims)
    def getDimensions(self) -> Shape:
        return self.shape

    @function(c_int32)
    def getType(self) -> int:
        return self.type


@dataclass(eq=False)
class Values:
    """What a layer was given."""

    kind: str
    inputs: list[Tensor]
    settings: dict[str, Any] = field(default_factory=dict)


class Layer(CppObject):
    """``ILayer`` with the settings of the classes that are derived from it."""

    def __init__(self, places: Places, values: Values, infer: Callable[[Values], Sequence[tuple[Shape, int]]], outputs: int = 1) -> None:
        self.values, self.name = values, ""
        kinds = {"attention": ["IAttention"], "attention_v2": ["IAttention"], "shuffle": ["ILayer", "IShuffleLayer"]}
        kinds |= {"gather": ["ILayer", "IGatherLayer"], "gather_v2": ["ILayer", "IGatherLayer"]}
        kinds |= {"softmax": ["ILayer", "ISoftMaxLayer"], "slice": ["ILayer", "ISliceLayer"]}
        kinds |= {"concatenation": ["ILayer", "IConcatenationLayer"], "dequantize": ["ILayer", "IDequantizeLayer"]}
        own: dict[str, Place] = {}
        for interface in kinds.get(values.kind, ["ILayer"]):
            own |= places[interface]
        self.outputs = [Tensor(places, "", lambda index=index: infer(values)[index]) for index in range(outputs)]  # type: ignore[misc]
        for output in self.outputs:
            output.made_from = values
        super().__init__(own)

    def __str__(self) -> str:
        return f"layer {self.name} ({self.values.kind})"

    @function(None, c_char_p)
    def setName(self, name: bytes) -> None:
        self.name = name.decode()

    @function(c_void_p)
    def getName(self) -> bytes:
        return self.name.encode()

    @function(c_void_p, c_int32)
    def getOutput(self, index: int) -> Tensor:
        return self.outputs[index]

    @function(c_bool, c_int32, c_void_p)
    def setInput(self, index: int, tensor: int) -> bool:
        self.values.settings[f"input {index}"] = object_at(tensor)
        return True

    def _set(self, name: str, value: Any) -> bool:
        self.values.settings[name] = value
        return True

    @function(None, POINTER(Dims))
    def setReshapeDimensions(self, dims: Any) -> None:
        self._set("reshape", dims.contents.shape)

    @function(None, POINTER(Permutation))
    def setFirstTranspose(self, permutation: Any) -> None:
        self._set("first", tuple(permutation.contents.order))

    @function(None, POINTER(Permutation))
    def setSecondTranspose(self, permutation: Any) -> None:
        self._set("second", tuple(permutation.contents.order))

    @function(None, c_bool)
    def setZeroIsPlaceholder(self, value: bool) -> None:
        self._set("zero is a size", not value)

    @function(None, c_int32)
    def setAxis(self, axis: int) -> None:
        self._set("axis", axis)

    @function(None, c_int32)
    def setGatherAxis(self, axis: int) -> None:
        self._set("axis", axis)

    @function(None, c_int32)
    def setMode(self, mode: int) -> None:
        self._set("mode", mode)

    @function(c_bool, POINTER(Dims))
    def setBlockShape(self, block: Any) -> bool:
        return self._set("block", block.contents.shape)

    @function(None, c_uint32)
    def setAxes(self, axes: int) -> None:
        self._set("axes", axes)

    @function(None, c_int32)
    def setNbElementWiseDims(self, count: int) -> None:
        self._set("elementwise dims", count)

    @function(c_bool, c_void_p)
    def setMask(self, tensor: int) -> bool:
        return self._set("mask", object_at(tensor))

    @function(c_bool, c_void_p)
    def setKeyValueLengths(self, tensor: int) -> bool:
        return self._set("key lengths", object_at(tensor))

    @function(c_bool, c_bool)
    def setDecomposable(self, value: bool) -> bool:
        return self._set("decomposable", value)


def _same(given: Values) -> list[tuple[Shape, int]]:
    return [(given.inputs[0].shape, given.inputs[0].type)]


def _broadcast(left: int, right: int) -> int:
    if left == right or right == 1 or (right == -1 and left != 1):
        return left
    assert left in (1, -1), f"sizes {left} and {right} do not fit"
    return right


def sizes_in(tensor: Tensor) -> Shape:
    """Return the elements of a tensor of sizes, as far as they are known when a network is made; -1 for the others."""
    given = tensor.made_from
    assert given is not None, "an input is no tensor of sizes"
    if given.kind == "constant":
        return tuple(given.settings["elements"])
    if given.kind == "shape":
        return given.inputs[0].shape
    if given.kind == "slice":
        (start,), (count,) = given.settings["start"], given.settings["size"]
        return sizes_in(given.inputs[0])[start : start + count]
    if given.kind == "concatenation":
        return tuple(size for one in given.inputs for size in sizes_in(one))
    assert given.kind == "elementwise", f"sizes from a layer of kind {given.kind}"
    return (-1,)  # depends on the width, or it would be a number


def _concatenation(given: Values) -> list[tuple[Shape, int]]:
    axis, shapes = given.settings.get("axis", 0), [one.shape for one in given.inputs]
    sizes = [shape[axis] for shape in shapes]
    whole = -1 if min(sizes) < 0 else sum(sizes)
    assert len({(*shape[:axis], *shape[axis + 1 :]) for shape in shapes}) == 1, f"{shapes} cannot be joined"
    assert len({one.type for one in given.inputs}) == 1
    return [((*shapes[0][:axis], whole, *shapes[0][axis + 1 :]), given.inputs[0].type)]


def _slice(given: Values) -> list[tuple[Shape, int]]:
    shape = sizes_in(given.settings["input 2"]) if "input 2" in given.settings else given.settings["size"]
    assert len(shape) == len(given.inputs[0].shape)
    return [(shape, given.inputs[0].type)]


def _elementwise(given: Values) -> list[tuple[Shape, int]]:
    left, right = given.inputs
    assert left.type == right.type, f"types {left.type} and {right.type} differ"
    shape = tuple(_broadcast(a, b) for a, b in zip(left.shape, right.shape, strict=True))
    return [(shape, BOOL if given.settings["operation"] in _COMPARISONS else left.type)]


def _select(given: Values) -> list[tuple[Shape, int]]:
    condition, left, right = given.inputs
    assert condition.type == BOOL
    assert left.type == right.type, f"types {left.type} and {right.type} differ"
    shapes = zip(condition.shape, left.shape, right.shape, strict=True)
    return [(tuple(_broadcast(_broadcast(a, b), c) for a, b, c in shapes), left.type)]


def _softmax(given: Values) -> list[tuple[Shape, int]]:
    assert given.settings["axes"] == 1 << len(given.inputs[0].shape) - 1  # the last one
    return _same(given)


def _shuffle(given: Values) -> list[tuple[Shape, int]]:
    shape, kind = given.inputs[0].shape, given.inputs[0].type
    if "first" in given.settings:
        shape = tuple(shape[axis] for axis in given.settings["first"][: len(shape)])
    if "reshape" in given.settings:
        sizes = [shape[axis] if size == 0 else size for axis, size in enumerate(given.settings["reshape"])]
        if given.settings["reshape"].count(-1) == 1 and min(shape) > 0:
            known = [size for size in sizes if size != -1]
            sizes[given.settings["reshape"].index(-1)] = _product(shape) // _product(known)
        shape = tuple(sizes)
    if "input 1" in given.settings:
        shape = sizes_in(given.settings["input 1"])
        assert given.settings.get("zero is a size") or 0 not in shape
    if "second" in given.settings:
        shape = tuple(shape[axis] for axis in given.settings["second"][: len(shape)])
    return [(shape, kind)]


def _product(sizes: Sequence[int]) -> int:
    result = 1
    for size in sizes:
        result *= size
    return result


def _gather(given: Values) -> list[tuple[Shape, int]]:
    data, indices = given.inputs
    if given.settings["mode"] == _ND:
        assert given.settings["elementwise dims"] == 1
        assert indices.shape[1:] == (1,)
        return [((data.shape[0], *data.shape[2:]), data.type)]
    axis, shared = given.settings["axis"], given.settings.get("elementwise dims", 0)
    return [((*data.shape[:axis], *indices.shape[shared:], *data.shape[axis + 1 :]), data.type)]


def _matrix_multiply(given: Values) -> list[tuple[Shape, int]]:
    left, right = given.inputs
    assert left.type == right.type
    (*batch, rows, inner), (*other_batch, other_inner, columns) = left.shape, right.shape
    if given.settings["transposed"][0] == _TRANSPOSE:
        rows, inner = inner, rows
    if given.settings["transposed"][1] == _TRANSPOSE:
        other_inner, columns = columns, other_inner
    assert inner == other_inner, f"{left.shape} and {right.shape} cannot be multiplied"
    return [((*map(_broadcast, batch, other_batch), rows, columns), left.type)]


def _reduce(given: Values) -> list[tuple[Shape, int]]:
    axes, shape = given.settings["axes"], given.inputs[0].shape
    kept = (1 if axes >> axis & 1 else size for axis, size in enumerate(shape) if given.settings["keep"] or not axes >> axis & 1)
    return [(tuple(kept), given.inputs[0].type)]


def _dequantize(given: Values) -> list[tuple[Shape, int]]:
    codes, scales = given.inputs
    if "block" in given.settings:
        blocks = tuple(size // length for size, length in zip(codes.shape, given.settings["block"], strict=True))
        assert blocks == scales.shape, f"codes {codes.shape} and scales {scales.shape} do not fit"
    elif len(scales.shape) == 1:
        assert scales.shape == (codes.shape[given.settings["axis"]],)
    elif scales.shape:
        assert codes.shape[given.settings["axis"]] % scales.shape[1] == 0
        assert codes.shape[0] == scales.shape[0]
    return [(codes.shape, given.settings["type"])]


def _fill(given: Values) -> list[tuple[Shape, int]]:
    (rank,) = given.settings["input 0"].shape
    return [((-1,) * rank, given.settings["type"])]


def _attention(given: Values) -> list[tuple[Shape, int]]:
    query, key, value = given.inputs
    assert query.type == key.type == value.type
    assert key.shape == value.shape
    return [(query.shape, query.type)]


class Network(CppObject):
    """``INetworkDefinition``."""

    def __init__(self, places: Places) -> None:
        self._places = places
        self.inputs: list[Tensor] = []
        self.outputs: list[Tensor] = []
        self.layers: list[Layer] = []
        self.plugins: list[tuple[Layer, Plugin]] = []
        super().__init__(places["INetworkDefinition"])

    def tensors(self) -> dict[str, tuple[Shape, int]]:
        """Shape and type of inputs and outputs, by name."""
        return {one.name: (one.shape, one.type) for one in (*self.inputs, *self.outputs)}

    @function(None, c_char_p)
    def setName(self, name: bytes) -> None:
        self.name = name.decode()

    @function(c_void_p, c_char_p, c_int32, POINTER(Dims))
    def addInput(self, name: bytes, kind: int, dims: Any) -> Tensor:
        shape = dims.contents.shape
        self.inputs.append(Tensor(self._places, name.decode(), lambda: (shape, kind)))
        return self.inputs[-1]

    @function(None, c_void_p)
    def markOutput(self, tensor: int) -> None:
        self.outputs.append(object_at(tensor))

    def _add(self, kind: str, infer: Callable[[Values], Any], inputs: Sequence[int], outputs: int = 1, **settings: Any) -> Layer:
        values = Values(kind, [object_at(one) for one in inputs], settings)
        self.layers.append(Layer(self._places, values, infer, outputs))
        return self.layers[-1]

    @function(c_void_p, POINTER(Dims), Weights)
    def addConstant(self, dims: Any, weights: Any) -> Layer:
        shape = dims.contents.shape
        assert weights.count == _product(shape)
        assert weights.values
        kind = weights.type
        elements = (c_int64 * weights.count).from_address(weights.values)[:] if kind == INT64 else ()
        return self._add("constant", lambda given: [(shape, kind)], (), elements=elements)

    @function(c_void_p, c_void_p)
    def addShuffle(self, tensor: int) -> Layer:
        return self._add("shuffle", _shuffle, (tensor,))

    @function(c_void_p, c_void_p, c_void_p, c_int32)
    def addGather(self, data: int, indices: int, axis: int) -> Layer:
        return self._add("gather", _gather, (data, indices), mode=0, axis=axis)

    @function(c_void_p, c_void_p, c_void_p, c_int32)
    def addGatherV2(self, data: int, indices: int, mode: int) -> Layer:
        return self._add("gather_v2", _gather, (data, indices), mode=mode, axis=0)

    @function(c_void_p, c_void_p, c_void_p, c_int32)
    def addElementWise(self, left: int, right: int, operation: int) -> Layer:
        return self._add("elementwise", _elementwise, (left, right), operation=operation)

    @function(c_void_p, c_void_p, c_int32, c_void_p, c_int32)
    def addMatrixMultiply(self, left: int, left_operation: int, right: int, right_operation: int) -> Layer:
        return self._add("matrix_multiply", _matrix_multiply, (left, right), transposed=(left_operation, right_operation))

    @function(c_void_p, c_void_p, c_int32, c_uint32, c_bool)
    def addReduce(self, tensor: int, operation: int, axes: int, keep_dimensions: bool) -> Layer:
        return self._add("reduce", _reduce, (tensor,), operation=operation, axes=axes, keep=keep_dimensions)

    @function(c_void_p, c_void_p, c_int32)
    def addUnary(self, tensor: int, operation: int) -> Layer:
        return self._add("unary", _same, (tensor,), operation=operation)

    @function(c_void_p, c_void_p, c_int32)
    def addCast(self, tensor: int, kind: int) -> Layer:
        return self._add("cast", lambda given: [(given.inputs[0].shape, kind)], (tensor,))

    @function(c_void_p, c_void_p, c_void_p, c_int32)
    def addDequantize(self, codes: int, scales: int, kind: int) -> Layer:
        return self._add("dequantize", _dequantize, (codes, scales), type=kind)

    @function(c_void_p, c_void_p, c_int32)
    def addActivation(self, tensor: int, kind: int) -> Layer:
        return self._add("activation", _same, (tensor,), activation=kind)

    @function(c_void_p, c_void_p, c_void_p, c_void_p)
    def addSelect(self, condition: int, left: int, right: int) -> Layer:
        return self._add("select", _select, (condition, left, right))

    @function(c_void_p, c_void_p)
    def addSoftMax(self, tensor: int) -> Layer:
        return self._add("softmax", _softmax, (tensor,))

    @function(c_void_p, c_void_p)
    def addShape(self, tensor: int) -> Layer:
        return self._add("shape", lambda given: [((len(given.inputs[0].shape),), INT64)], (tensor,))

    @function(c_void_p, POINTER(Dims), c_int32, c_int32)
    def addFillV2(self, dims: Any, operation: int, kind: int) -> Layer:
        return self._add("fill", _fill, (), operation=operation, type=kind)

    @function(c_void_p, c_void_p, POINTER(Dims), POINTER(Dims), POINTER(Dims))
    def addSlice(self, tensor: int, start: Any, size: Any, stride: Any) -> Layer:
        return self._add("slice", _slice, (tensor,), start=start.contents.shape, size=size.contents.shape)

    @function(c_void_p, POINTER(c_void_p), c_int32)
    def addConcatenation(self, tensors: Any, count: int) -> Layer:
        return self._add("concatenation", _concatenation, [tensors[index] for index in range(count)])

    @function(c_void_p, c_void_p, c_void_p, c_void_p, c_bool, c_int32)
    def addRotaryEmbedding(self, tensor: int, cos: int, sin: int, interleaved: bool, rotary_dim: int) -> Layer:
        return self._add("rotary_embedding", _same, (tensor, cos, sin), interleaved=interleaved, rotary_dim=rotary_dim)

    @function(c_void_p, c_void_p, c_void_p, c_void_p, c_int32)
    def addKVCacheUpdate(self, cache: int, rows: int, indices: int, mode: int) -> Layer:
        return self._add("kv_cache_update", _same, (cache, rows, indices), mode=mode)

    @function(c_void_p, c_void_p, c_void_p, c_void_p, c_int32, c_bool)
    def addAttention(self, query: int, key: int, value: int, normalization: int, causal: bool) -> Layer:
        return self._add("attention", _attention, (query, key, value), causal=causal)

    @function(c_void_p, c_void_p, c_void_p, c_void_p, c_int32, c_int32)
    def addAttentionV2(self, query: int, key: int, value: int, normalization: int, causal: int) -> Layer:
        return self._add("attention_v2", _attention, (query, key, value), causal=causal)

    @function(c_void_p, POINTER(c_void_p), c_int32, POINTER(c_void_p), c_int32, c_void_p)
    def addPluginV3(self, inputs: Any, count: int, shape_inputs: Any, shape_count: int, plugin: int) -> Layer:
        assert shape_count == 0
        own = Plugin(call(plugin, 5, c_void_p))  # TensorRT keeps a clone, so that the caller may drop the plugin

        def infer(given: Values) -> list[tuple[Shape, int]]:
            shapes, kinds = own.output_shapes([one.shape for one in given.inputs]), own.output_types([one.type for one in given.inputs])
            assert shapes is not None
            assert kinds is not None
            return [*zip(shapes, kinds, strict=True)]

        layer = self._add("plugin_v3", infer, [inputs[index] for index in range(count)], own.num_outputs())
        self.plugins.append((layer, own))
        return layer

    def destroyed(self) -> None:
        """Destroy the plugins of the layers."""
        for _, plugin in self.plugins:
            plugin.destroy()
        self.plugins.clear()
