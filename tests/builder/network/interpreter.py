"""Runs an ``INetworkDefinition`` in NumPy, layer by layer, as TensorRT documents each; results are rounded to their dtype."""

import ml_dtypes
import numpy as np

from trt_kvcache.dtypes import numpy_dtype
from trt_kvcache.trt.module import CONSTANT_DTYPES

from .plugin_layer import PluginLayer


def interpret(tensorrt, network, constants, feed, plugins=(), buffers=()):
    """Return the network's outputs by name. ``constants`` are by layer name: TensorRT does not give back bfloat16.

    Plugin layers run their plugins. ``plugins`` are those of full TensorRT; what stands for them in the network is not run. A tensor of
    ``buffers``, arrays by name, is written there as soon as it is computed, and plugins read it there.
    """
    layers = [_typed(tensorrt, network.get_layer(index)) for index in range(network.num_layers)]
    producer = {layer.get_output(0).name: layer for layer in layers}
    plugins = [*plugins, *plugin_layers_of(tensorrt, network)]
    plugin_of = {output.name: plugin for plugin in plugins for output in plugin.outputs}
    values, buffers = dict(feed), dict(buffers)

    def value(tensor):
        if tensor.name not in values and tensor.name in plugin_of:
            plugin = plugin_of[tensor.name]
            arrays = {each.name: value(each) for each in plugin.inputs}
            results = plugin.run([{**arrays, **buffers}[each.name] for each in plugin.inputs])
            values.update({each.name: _rounded(tensorrt, each, result) for each, result in zip(plugin.outputs, results, strict=True)})
        if tensor.name not in values:
            layer = producer[tensor.name]
            kind = layer_kind(tensorrt, layer)
            if kind == "CONSTANT":
                result = constants[layer.name]
            else:
                inputs = [layer.get_input(index) for index in range(layer.num_inputs)]
                result = _LAYERS[kind](layer, [None if each is None else value(each) for each in inputs])
            values[tensor.name] = _rounded(tensorrt, tensor, result)
            if tensor.name in buffers:
                buffers[tensor.name][...] = values[tensor.name]
        return values[tensor.name]

    return {network.get_output(index).name: value(network.get_output(index)) for index in range(network.num_outputs)}


def plugin_layers_of(tensorrt, network):
    layers = [_typed(tensorrt, network.get_layer(index)) for index in range(network.num_layers)]
    return [PluginLayer.of(tensorrt, layer) for layer in layers if layer_kind(tensorrt, layer) == "PLUGIN_V3"]


def attention_layers(tensorrt, network):
    layers = (network.get_layer(index) for index in range(network.num_layers))
    return [_typed(tensorrt, layer).attention for layer in layers if layer_kind(tensorrt, layer) == "ATTENTION_OUTPUT"]


def layer_kind(tensorrt, layer):
    """Return the name of the layer's ``LayerType``: an activation layer hides it behind its own ``type``."""
    return str(tensorrt.module.ILayer.type.fget(layer).name)


def _typed(tensorrt, layer):
    """Give a layer the class of its type, ``IShapeLayer`` of ``SHAPE``: the network hands out the base class."""
    classes = {name.lower(): value for name, value in vars(tensorrt.module).items()}
    layer.__class__ = classes[f"i{layer_kind(tensorrt, layer)}layer".replace("_", "").lower()]
    return layer


def _rounded(tensorrt, tensor, result):
    name = tensorrt.dtype_name(tensor.dtype)
    if name in CONSTANT_DTYPES:
        return result
    rounded = np.asarray(result, np.bool_ if name == "bool" else numpy_dtype(name))
    wanted = tuple(tensor.shape)
    assert len(wanted) == rounded.ndim, (tensor.name, wanted, rounded.shape)
    assert all(size in (-1, got) for size, got in zip(wanted, rounded.shape, strict=True)), (tensor.name, wanted, rounded.shape)
    return rounded


def _wide(array):
    return array.astype(np.float32) if array.dtype.kind in "fV" else array


def _elementwise(layer, inputs):
    left, right = (_wide(each) for each in inputs)
    operations = {
        "SUM": np.add,
        "SUB": np.subtract,
        "PROD": np.multiply,
        "DIV": np.divide,
        "MAX": np.maximum,
        "MIN": np.minimum,
        "FLOOR_DIV": np.floor_divide,
        "EQUAL": np.equal,
        "GREATER": np.greater,
        "AND": np.logical_and,
    }
    return operations[layer.op.name](left, right)


def _unary(layer, inputs):
    operations = {"SQRT": np.sqrt, "NOT": np.logical_not, "EXP": np.exp, "ABS": np.abs, "NEG": np.negative, "ATANH": np.arctanh}
    return operations[layer.op.name](_wide(inputs[0]))


def _activation(layer, inputs):
    x = _wide(inputs[0])
    if layer.type.name == "GELU_TANH":
        return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
    return {"RELU": lambda: np.maximum(x, 0), "SIGMOID": lambda: 1 / (1 + np.exp(-x)), "TANH": lambda: np.tanh(x)}[layer.type.name]()


def _reduce(layer, inputs):
    axes = tuple(axis for axis in range(inputs[0].ndim) if layer.axes >> axis & 1)
    return {"AVG": np.mean, "SUM": np.sum}[layer.op.name](_wide(inputs[0]), axes, keepdims=layer.keep_dims)


def _matmul(layer, inputs):
    sides = [
        _wide(side) if op.name == "NONE" else np.swapaxes(_wide(side), -1, -2)
        for side, op in zip(inputs, (layer.op0, layer.op1), strict=True)
    ]
    return sides[0] @ sides[1]


def _shuffle(layer, inputs):
    x = inputs[0].transpose(tuple(layer.first_transpose)[: inputs[0].ndim])
    sizes = inputs[1] if len(inputs) == 2 else layer.reshape_dims
    if sizes is not None:
        x = x.reshape([x.shape[axis] if size == 0 and layer.zero_is_placeholder else size for axis, size in enumerate(sizes)])
    return x.transpose(tuple(layer.second_transpose)[: x.ndim])


def _gather(layer, inputs):
    data, indices = inputs
    if layer.mode.name == "DEFAULT" and layer.num_elementwise_dims:
        return np.stack([np.take(row, index, axis=layer.axis - 1) for row, index in zip(data, indices, strict=True)])
    if layer.mode.name == "DEFAULT":
        return np.take(data, indices, axis=layer.axis)
    assert layer.mode.name == "ND"
    assert layer.num_elementwise_dims == 1
    return np.stack([row[tuple(index)] for row, index in zip(data, indices, strict=True)])


def _fill(layer, inputs):
    assert layer.operation.name == "LINSPACE"
    shape, first, steps = inputs
    grid = np.indices(tuple(shape))
    return first + np.tensordot(steps, grid, 1)


def _slice(layer, inputs):
    x, *given = inputs
    own = ("start", "shape", "stride")  # not read where they are tensors: TensorRT would warn
    given = [*given, *(None,) * 3][:3]
    starts, sizes, steps = (getattr(layer, name) if value is None else value for name, value in zip(own, given, strict=True))
    place = tuple(slice(start, start + size * step, step) for start, size, step in zip(starts, sizes, steps, strict=True))
    found = x[place]
    if layer.mode.name == "FILL":
        assert len(inputs) == 5
        return np.pad(found, [(0, size - got) for size, got in zip(sizes, found.shape, strict=True)], constant_values=inputs[4].item())
    assert layer.mode.name == "STRICT_BOUNDS"
    assert found.shape == tuple(sizes), (layer.name, found.shape, tuple(sizes))  # TensorRT refuses a part that is not there
    return found


def _rotary(layer, inputs):
    x, cos, sin, positions = (_wide(each) for each in inputs)
    assert not layer.interleaved
    dim = layer.rotary_embedding_dim or x.shape[-1]
    assert cos.shape[-1] == sin.shape[-1] == dim // 2
    c, s = cos[positions][:, None], sin[positions][:, None]
    first, second, rest = np.split(x, [dim // 2, dim], axis=-1)
    return np.concatenate([first * c - second * s, second * c + first * s, rest], -1)


def _update(layer, inputs):
    """A row beyond the cache would be dropped silently: here it is an error."""
    cache, rows, indices = inputs
    after = cache.copy()
    for slot, start in enumerate(indices):
        assert start + rows.shape[2] <= cache.shape[2]
        after[slot, :, start : start + rows.shape[2]] = rows[slot]
    return after


def _attention(layer, inputs):
    attention = layer.attention
    q, k, v = (_wide(each) for each in inputs[:3])
    group = q.shape[1] // k.shape[1]
    k, v = np.repeat(k, group, 1), np.repeat(v, group, 1)
    keys = np.arange(k.shape[2])
    if attention.causal_kind.name == "LOWER_RIGHT":
        assert attention.mask is None
        lengths = inputs[6][:, None, None, None]
        k, v = (np.where(keys[:, None] < lengths, rows, 0) for rows in (k, v))  # rows beyond the lengths are not read
        visible = keys <= lengths - q.shape[2] + np.arange(q.shape[2])[:, None]
    else:
        assert attention.causal_kind.name == "NONE"
        visible = inputs[3]
    scores = q @ np.swapaxes(k, -1, -2)
    return _softmax_of(np.where(visible, scores, -np.inf), -1) @ v


def _softmax(layer, inputs):
    (axis,) = (axis for axis in range(inputs[0].ndim) if layer.axes >> axis & 1)
    return _softmax_of(_wide(inputs[0]), axis)


def _softmax_of(scores, axis):
    weights = np.exp(scores - scores.max(axis, keepdims=True))
    return weights / weights.sum(axis, keepdims=True)


def _select(layer, inputs):
    assert inputs[0].dtype == bool
    return np.where(*inputs)


def _dequantize(layer, inputs):
    codes, scales = (each.astype(np.float32) for each in inputs)
    assert (scales > 0).all(), layer.name
    if scales.ndim == 0:
        return codes * scales
    if scales.ndim == 1:
        assert layer.axis == 0
        return codes * scales[:, None]
    block = tuple(size // count for size, count in zip(codes.shape, scales.shape, strict=True))
    if inputs[0].dtype == ml_dtypes.int4:
        assert (block[0], layer.axis) == (1, 1)
    else:
        assert tuple(layer.block_shape) == block
    return codes * np.repeat(np.repeat(scales, block[0], axis=0), block[1], axis=1)


_LAYERS = {
    "ACTIVATION": _activation,
    "ATTENTION_INPUT": _attention,
    "ATTENTION_OUTPUT": lambda layer, inputs: inputs[0],
    "CAST": lambda layer, inputs: inputs[0],
    "CONCATENATION": lambda layer, inputs: np.concatenate(inputs, axis=layer.axis),
    "DEQUANTIZE": _dequantize,
    "ELEMENTWISE": _elementwise,
    "FILL": _fill,
    "GATHER": _gather,
    "KV_CACHE_UPDATE": _update,
    "MATRIX_MULTIPLY": _matmul,
    "REDUCE": _reduce,
    "ROTARY_EMBEDDING": _rotary,
    "SELECT": _select,
    "SHAPE": lambda layer, inputs: np.array(inputs[0].shape),
    "SHUFFLE": _shuffle,
    "SLICE": _slice,
    "SOFTMAX": _softmax,
    "UNARY": _unary,
}
