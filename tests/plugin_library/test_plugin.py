"""The plugin of the library, called as TensorRT calls it, against the Python plugin: fields, stored bytes, shapes, dtypes, errors."""

import ctypes
import subprocess
from ctypes import c_double, c_float, c_int32, c_int64, c_void_p

import pytest

from tests.bindings.cpp import PluginField, PluginFieldCollection, call, keep
from tests.plugin_library.build import build_library, need_cmake
from tests.plugin_library.creators import BUILD, DATA_TYPES, create, creators_of
from tests.plugin_library.layers import LAYERS
from trt_kvcache.errors import DTypeError, ShapeError
from trt_kvcache.ops.attention_attributes import ATTRIBUTE_TYPES, QUANTIZED_ATTRIBUTE_TYPES, AttentionAttributes
from trt_kvcache.ops.borrowed_workspace import workspace_nbytes
from trt_kvcache.trt.plugin.plugin_tensors import check_dtypes, check_shapes
from trt_kvcache.trt.plugin.versions import (
    PLUGIN_ABIS,
    PLUGIN_NAME,
    PLUGIN_NAMESPACE,
    QUANTIZED_TREE_VERSION,
    TREE_VERSION,
    plugin_version,
)

need_cmake()

#: ``PluginFieldType``, and the C types of the values.
_FIELD_TYPES = {"FLOAT32": (1, c_float), "FLOAT64": (2, c_double), "INT32": (5, c_int32), "INT64": (10, c_int64)}
_FREE = {"B": 2, "s": 3}


@pytest.fixture(scope="module")
def library():
    return build_library()


@pytest.fixture(params=list(LAYERS))
def layer(request):
    return LAYERS[request.param]


@pytest.fixture
def plugin(library, layer):
    made = create(library, layer.attributes, BUILD)
    yield made
    made.destroy()


def typed(layer, free=_FREE):
    """Return shapes and ``DataType`` of inputs and outputs."""
    inputs = {name: (tuple(free.get(size, size) for size in shape), DATA_TYPES[dtype]) for name, (shape, dtype) in layer.inputs.items()}
    return [*inputs.values(), *(inputs[like] for like in layer.outputs.values())]


def test_the_creators_are_those_of_the_python_plugin(library):
    creators = creators_of(library)
    assert [*creators, TREE_VERSION, QUANTIZED_TREE_VERSION] == list(PLUGIN_ABIS), "trees are for the plugin in Python"
    for version, types in (("1", ATTRIBUTE_TYPES), ("2", QUANTIZED_ATTRIBUTE_TYPES)):
        assert creators[version].key == (PLUGIN_NAME.encode(), version.encode(), PLUGIN_NAMESPACE.encode())
        assert creators[version].field_names() == {name: _FIELD_TYPES[kind][0] for name, kind in types.items()}


def test_the_plugin_knows_its_key(plugin, layer):
    assert plugin.key() == (PLUGIN_NAME.encode(), plugin_version(layer.attributes).encode(), PLUGIN_NAMESPACE.encode())


def test_the_stored_fields_are_those_of_the_python_plugin(plugin, layer):
    """Names, types, lengths and bytes, in order: a plan that was built with one plugin can be opened with the other."""
    stored = PluginFieldCollection.from_address(call(plugin.runtime, 8, c_void_p))
    found = [
        (one.name.decode(), one.type, one.length, ctypes.string_at(one.data, {5: 4, 2: 8}[one.type]))
        for one in (stored.fields[index] for index in range(stored.count))
    ]
    arrays = layer.attributes.plugin_field_arrays()
    types = {name: _FIELD_TYPES[QUANTIZED_ATTRIBUTE_TYPES[name]][0] for name in arrays}
    assert found == [(name, types[name], array.size, array.tobytes()) for name, array in arrays.items()]


def test_a_clone_outlives_the_plugin(library, layer):
    plugin = create(library, layer.attributes)
    expected, clone, attached = plugin.serialized(), plugin.clone(), plugin.attach()
    plugin.destroy()
    for copy in (clone, attached):
        assert copy.serialized() == expected
        copy.destroy()


def test_outputs(plugin, layer):
    names = list(layer.inputs)
    assert plugin.num_outputs() == len(layer.outputs)
    assert plugin.aliased_inputs() == [-1 if like == "q" else names.index(like) for like in layer.outputs.values()]
    described = typed(layer, {})
    described = [(tuple(-1 if isinstance(size, str) else size for size in shape), kind) for shape, kind in described]
    shapes, kinds = zip(*described, strict=True)
    count = len(names)
    assert plugin.output_types(kinds[:count]) == list(kinds[count:])
    assert plugin.output_shapes(shapes[:count]) == [*shapes[count:]]


def test_formats(plugin, layer):
    right, count = typed(layer), len(layer.inputs)
    for position, (shape, kind) in enumerate(right):
        assert plugin.supports(position, right, count)
        for other in set(DATA_TYPES.values()) - {kind}:
            wrong = [*right]
            wrong[position] = (shape, other)
            is_q = position == 0 and other in (DATA_TYPES["float16"], DATA_TYPES["bfloat16"])
            assert plugin.supports(position, wrong, count) == is_q


def test_the_workspace_is_that_of_the_python_plugin(plugin, layer):
    tensors, count = typed(layer), len(layer.inputs)
    assert plugin.configure(tensors, count)
    assert plugin.workspace_nbytes(tensors, count) == workspace_nbytes(layer.attributes)


def test_there_is_one_tactic(plugin):
    assert plugin.set_tactic(0)


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("plain", {"k": (2, 3, 3, 64)}),
        ("plain", {"k": (2, 3, 2)}),
        ("plain", {"q": (2, 0, 4, 64), "k": (2, 0, 2, 64), "v": (2, 0, 2, 64)}),
        ("plain", {name: (2, 31, heads, 64) for name, heads in (("q", 4), ("k", 2), ("v", 2))}),
        ("plain", {"cos_sin": (29, 2, 32)}),
        ("plain", {"lengths": (3,)}),
        ("by token", {"kv_scales": (2, 2, 2, 36)}),
        ("by head", {"kv_scales": (2, 3)}),
    ],
)
def test_shapes_that_do_not_fit_are_refused_with_the_text_of_the_python_plugin(library, capfd, name, changed):
    layer = LAYERS[name]
    shapes = {one: changed.get(one, shape) for one, (shape, _) in zip(layer.inputs, typed(layer), strict=False)}
    with pytest.raises(ShapeError) as refused:
        check_shapes(layer.attributes, shapes)
    plugin = create(library, layer.attributes)
    tensors = [(shape, kind) for shape, (_, kind) in zip(shapes.values(), typed(layer), strict=False)]
    assert not plugin.on_shape_change(tensors, len(tensors))
    assert plugin.output_shapes(list(shapes.values())) is None
    said = f"{refused.value}\n"
    assert capfd.readouterr().err == f"KVCacheAttention.onShapeChange: {said}KVCacheAttention.getOutputShapes: {said}"


@pytest.mark.parametrize(("position", "dtype"), [(0, "float32"), (1, "bfloat16"), (3, "int32"), (4, "int64")])
def test_dtypes_that_do_not_fit_are_refused_with_the_text_of_the_python_plugin(library, capfd, position, dtype):
    layer = LAYERS["plain"]
    dtypes = {name: kind for name, (_, kind) in layer.inputs.items()}
    dtypes[list(dtypes)[position]] = dtype
    with pytest.raises(DTypeError) as refused:
        check_dtypes(layer.attributes, dtypes)
    assert create(library, layer.attributes).output_types([DATA_TYPES[kind] for kind in dtypes.values()]) is None
    assert capfd.readouterr().err == f"KVCacheAttention.getOutputDataTypes: {refused.value}\n"


def collection(values):
    """Return plugin fields of any type: a value, or a pair of it and the name of its type."""
    made = []
    for name, value in values:
        number, kind = value if isinstance(value, tuple) else (value, "FLOAT64" if isinstance(value, float) else "INT32")
        code, c_type = _FIELD_TYPES[kind]
        made.append(PluginField(name.encode(), ctypes.addressof(keep(c_type(number))), code, 1))
    return keep(PluginFieldCollection(len(made), keep((PluginField * len(made))(*made))))


_FIELDS = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 64}


_ROUNDED = {"scale": (0.1, "FLOAT32"), "softcap": (30.1, "FLOAT32")}
_SMALLEST = {"scale": (1e-6, "FLOAT32")}  # rounds to less than the limit


@pytest.mark.parametrize(
    "fields", [_FIELDS | {"scale": (0.5, "FLOAT32")}, _FIELDS | _ROUNDED, _FIELDS | _SMALLEST, _FIELDS | {"window": (2**31 - 1, "INT64")}]
)
def test_other_types_are_taken_if_the_value_fits(library, fields):
    plugin = creators_of(library)["1"].create(collection(fields.items()), BUILD)
    given = {name: _FIELD_TYPES[value[1]][1](value[0]).value if isinstance(value, tuple) else value for name, value in fields.items()}
    attributes = AttentionAttributes(**given)
    assert plugin.serialized() == {name: array[0] for name, array in attributes.plugin_field_arrays().items()}


@pytest.mark.parametrize(
    ("version", "changed", "said"),
    [
        ("1", {"heads": 4}, "field 'heads' is unknown."),
        ("1", {"kv_dtype": 1}, "field 'kv_dtype' is unknown."),
        ("1", {"num_heads": 4.0}, "field 'num_heads': expected one value of type INT32 or INT64, got 1 of type 2"),
        ("1", {"scale": 1}, "field 'scale': expected one value of type FLOAT32 or FLOAT64, got 1 of type 5"),
        ("1", {"num_heads": 5}, "num_heads: expected 1 to 16 times num_kv_heads, got 5 over 2 K/V heads."),
        ("1", {"num_heads": 34}, "num_heads: expected 1 to 16 times num_kv_heads, got 34 over 2 K/V heads."),
        ("1", {"num_kv_heads": 0}, "num_heads: expected 1 to 16 times num_kv_heads, got 4 over 0 K/V heads."),
        ("1", {"head_dim": 72}, "head_dim: expected one of 64, 80, 96, 128, 256, 512, got 72."),
        ("1", {"rotary_dim": 6}, "rotary_dim: expected a multiple of 4 from 0 to 64, got 6."),
        ("1", {"rotary_dim": 68}, "rotary_dim: expected a multiple of 4 from 0 to 64, got 68."),
        ("1", {"scale": 1e-7}, "scale: expected 0, or 1e-06 to 1e+06, got 1e-07."),
        ("1", {"softcap": float("nan")}, "softcap: expected 0, or 1e-06 to 1e+06, got nan."),
        ("1", {"window": -1}, "window: expected an integer from 0 to 2147483647, got -1."),
        ("1", {"window": (2**31, "INT64")}, "window: expected an integer from 0 to 2147483647, got 2147483648."),
        ("2", {"kv_dtype": 1}, "fields: expected kv_scales too."),
        ("2", {"kv_dtype": 3, "kv_scales": 1}, "field 'kv_dtype': expected 1 (float8_e4m3fn) or 2 (int8), got 3."),
        ("2", {"kv_dtype": 1, "kv_scales": 0}, "field 'kv_scales': expected 1 (head) or 2 (token), got 0."),
    ],
)
def test_fields_that_do_not_fit_are_refused(library, capfd, version, changed, said):
    assert creators_of(library)[version].create(collection((_FIELDS | changed).items()), BUILD) is None
    assert capfd.readouterr().err.startswith(f"KVCacheAttention.createPlugin: {said}")


def test_a_field_may_be_given_once(library, capfd):
    assert creators_of(library)["1"].create(collection([*_FIELDS.items(), ("head_dim", 64)]), BUILD) is None
    assert capfd.readouterr().err == "KVCacheAttention.createPlugin: field 'head_dim' is given twice.\n"


def test_the_library_exports_two_functions(library):
    listed = subprocess.run(["nm", "-D", "--defined-only", str(library)], capture_output=True, text=True, check=True).stdout
    assert {line.split()[2] for line in listed.splitlines()} == {"getCreators", "setLoggerFinder"}
