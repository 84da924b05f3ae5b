"""The plugin and its creator through the classes and the registry of TensorRT for RTX, which has all but the layer."""

import pytest

from tests.helpers.assertions import raises
from tests.trt.plugin.stand_in import Size, tensorrt
from tests.trt.plugin.test_plugin_tensors import FIELDS, NAMES, QUANTIZED, QUANTIZED_SHAPES, SHAPES
from trt_kvcache.errors import DTypeError, KVCacheError, ShapeError
from trt_kvcache.ops.borrowed_workspace import workspace_nbytes
from trt_kvcache.trt.module import load
from trt_kvcache.trt.plugin import plugin_class

DTYPES = dict.fromkeys(NAMES, "HALF") | {"lengths": "INT32", "cos_sin": "FLOAT", "new_lengths": "INT32"}

#: Over quantized K and V.
QUANTIZED_DTYPES = dict.fromkeys(QUANTIZED_SHAPES["head"], "HALF") | {
    "cache": "INT32", "lengths": "INT32", "kv_scales": "FLOAT", "cos_sin": "FLOAT", "new_lengths": "INT32"
}  # fmt: skip

KNOWN = {name: tuple(map(Size, shape)) for name, shape in SHAPES.items()}


def output_shapes(**changes):
    """Infer the outputs with stand-ins for symbolic sizes: there are none outside a network."""
    return plugin_class(tensorrt())(FIELDS).get_output_shapes(list((KNOWN | changes).values()), [], None)


def test_outputs_have_the_shapes_of_q_and_of_the_cache():
    assert output_shapes() == [KNOWN["q"], KNOWN["cache"]]


def test_outputs_have_the_symbolic_sizes_of_their_inputs():
    q = (Size(None), Size(None), Size(6), Size(80))
    assert output_shapes(q=q)[0] == q


def test_constant_sizes_that_do_not_fit_are_refused():
    with raises(ShapeError, "k", expected="[3, 4, 2, 80]", got="[3, 4, 6, 80]"):
        output_shapes(k=KNOWN["q"])


@pytest.mark.parametrize("scales", ["head", "token"])
def test_outputs_over_quantized_k_and_v_have_the_shapes_of_their_inputs(scales):
    known = {name: tuple(map(Size, shape)) for name, shape in QUANTIZED_SHAPES[scales].items()}
    found = plugin_class(tensorrt())(QUANTIZED[scales]).get_output_shapes(list(known.values()), [], None)
    assert found == [known["q"], known["cache"], known["kv_scales"]][: 2 if scales == "head" else 3]


@pytest.mark.trt
class TestWithTensorRT:
    @pytest.fixture
    def rtx(self):
        return load("tensorrt_rtx")

    @pytest.fixture
    def plugin(self, rtx):
        return plugin_class(rtx)(FIELDS)

    @pytest.fixture
    def desc(self, rtx):
        def make(shape, dtype, form="LINEAR"):
            one, trt = rtx.module.PluginTensorDesc(), rtx.module
            one.dims, one.type, one.format = trt.Dims(shape), getattr(trt.DataType, dtype), getattr(trt.TensorFormat, form)
            return one

        return make

    @pytest.fixture
    def dynamic(self, rtx, desc):
        def make(shape, *form, least=None):
            one = rtx.module.DynamicPluginTensorDesc()
            one.desc, one.max, one.min = desc(shape, *form), rtx.module.Dims(shape), rtx.module.Dims(least or shape)
            return one

        return make

    def test_one_object_has_every_capability(self, rtx, plugin):
        for kind in rtx.module.PluginCapabilityType.__members__.values():
            assert plugin.get_capability_interface(kind) is plugin

    def test_name_version_and_namespace(self, plugin):
        assert (plugin.plugin_name, plugin.plugin_version, plugin.plugin_namespace) == ("KVCacheAttention", "1", "trt_kvcache")

    def test_there_are_two_outputs(self, plugin):
        assert plugin.num_outputs == 2

    @pytest.mark.parametrize(
        "copies", [lambda plugin: plugin.clone(), lambda plugin: plugin.attach_to_context(None)], ids=["clone", "attach"]
    )
    def test_a_copy_has_the_same_attributes(self, plugin, copies):
        copy = copies(plugin)
        assert copy is not plugin
        assert copy.attributes == FIELDS

    def test_there_is_one_tactic(self, plugin):
        assert plugin.set_tactic(0) is None

    def test_the_second_output_shares_memory_with_the_cache(self, plugin):
        assert [plugin.get_aliased_input(output) for output in (0, 1)] == [-1, NAMES.index("cache")]

    def test_outputs_have_the_dtype_of_q(self, rtx, plugin):
        kinds = rtx.module.DataType
        types = [getattr(kinds, name) for name in DTYPES.values()]
        assert plugin.get_output_data_types(types) == [kinds.HALF, kinds.HALF]

    @pytest.mark.parametrize(("scales", "aliased"), [("head", [-1, 3]), ("token", [-1, 3, 5])])
    def test_outputs_over_quantized_k_and_v(self, rtx, scales, aliased):
        plugin, kinds = plugin_class(rtx)(QUANTIZED[scales]), rtx.module.DataType
        assert (plugin.plugin_version, plugin.num_outputs) == ("2", len(aliased))
        assert [plugin.get_aliased_input(output) for output in range(len(aliased))] == aliased
        types = [getattr(kinds, name) for name in QUANTIZED_DTYPES.values()]
        assert plugin.get_output_data_types(types) == [kinds.HALF, kinds.INT32, kinds.FLOAT][: len(aliased)]
        with raises(DTypeError, "cache", expected="int32", got="float8_e4m3fn"):
            plugin.get_output_data_types([*types[:3], kinds.FP8, *types[4:]])

    def test_dtypes_that_do_not_fit_are_refused(self, rtx, plugin):
        kinds = rtx.module.DataType
        types = [getattr(kinds, name) for name in DTYPES.values()]
        with raises(DTypeError, "lengths", "int32", "int64"):
            plugin.get_output_data_types([*types[:4], kinds.INT64, *types[5:]])

    @pytest.mark.parametrize("q", ["HALF", "BF16"])
    def test_linear_tensors_of_these_dtypes_only_are_supported(self, plugin, dynamic, q):
        dtypes = [q if dtype == "HALF" else dtype for dtype in DTYPES.values()] + [q, q]
        shapes = [*SHAPES.values(), SHAPES["q"], SHAPES["cache"]]
        right = [dynamic(shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
        for position, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True)):
            assert plugin.supports_format_combination(position, right, len(NAMES))
            wrong = [dynamic(shape, other) for other in ("FLOAT", "INT64", "INT32", "HALF", "BF16") if other != dtype]
            for one in [*wrong, dynamic(shape, dtype, "HWC8")]:
                changed = [*right[:position], one, *right[position + 1 :]]
                swapped = position == 0 and one.desc.type.name in ("HALF", "BF16") and one.desc.format.name == "LINEAR"
                assert plugin.supports_format_combination(position, changed, len(NAMES)) is swapped

    @pytest.mark.parametrize("scales", ["head", "token"])
    def test_words_of_codes_and_float32_scales_only_are_supported(self, rtx, dynamic, scales):
        plugin, inputs = plugin_class(rtx)(QUANTIZED[scales]), QUANTIZED_SHAPES[scales]
        likes = ("q", "cache", "kv_scales")[: plugin.num_outputs]
        tensors = [
            *zip(inputs.values(), QUANTIZED_DTYPES.values(), strict=True),
            *((inputs[like], QUANTIZED_DTYPES[like]) for like in likes),
        ]
        right = [dynamic(*one) for one in tensors]
        for position, (shape, dtype) in enumerate(tensors):
            assert plugin.supports_format_combination(position, right, len(inputs))
            for one in ("FP8", "INT8", "UINT8", "INT64", "HWC8"):
                wrong = dynamic(shape, dtype, one) if one == "HWC8" else dynamic(shape, one)
                changed = [*right[:position], wrong, *right[position + 1 :]]
                assert not plugin.supports_format_combination(position, changed, len(inputs))
        plugin.configure_plugin(right[: len(inputs)], right[len(inputs) :])
        assert plugin.get_workspace_size(right[: len(inputs)], right[len(inputs) :]) == workspace_nbytes(FIELDS)

    @pytest.mark.parametrize(
        ("k", "least", "said"),
        [
            (((3, 4, 2, 64), "HALF"), None, "expected [3, 4, 2, 80], got [3, 4, 2, 64]."),
            (((3, 4, 2, 80), "HALF"), (2, 4, 2, 80), "expected [3, 4, 2, 80], got [2, 4, 2, 80]."),
            (((3, 4, 2, 80), "BF16"), None, "expected float16, got bfloat16."),
        ],
    )
    def test_a_configuration_that_does_not_fit_is_refused(self, plugin, dynamic, k, least, said):
        right = {name: dynamic(shape, DTYPES[name]) for name, shape in SHAPES.items()}
        plugin.configure_plugin(list(right.values()), [])
        with pytest.raises(KVCacheError) as caught:
            plugin.configure_plugin(list((right | {"k": dynamic(*k, least=least)}).values()), [])
        assert str(caught.value) == f"k: {said}"

    @pytest.mark.parametrize("least", [1, 2], ids=["decode and prefill", "prefill only"])
    def test_the_workspace_is_that_of_the_kernels(self, plugin, dynamic, least):
        q = dynamic((5, 4, 6, 80), "HALF", least=(2, least, 6, 80))
        assert plugin.get_workspace_size([q], []) == workspace_nbytes(FIELDS)

    def test_shapes_are_checked_again_when_they_change(self, plugin, desc):
        right = {name: desc(shape, DTYPES[name]) for name, shape in SHAPES.items()}
        plugin.on_shape_change(list(right.values()), [])
        with raises(ShapeError, "lengths", "[3]", "[2]"):
            plugin.on_shape_change(list((right | {"lengths": desc((2,), "INT32")}).values()), [])
