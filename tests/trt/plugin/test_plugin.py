"""The plugin and its creator through the classes and the registry of TensorRT for RTX, which has all but the layer."""

import gc

import pytest

from tests.ops.test_attention_shapes import FIELDS, NAMES, SHAPES
from tests.trt.plugin.stand_in import Size, tensorrt
from trt_kvcache.errors import ConfigError, DTypeError, EngineError, KVCacheError, ShapeError
from trt_kvcache.ops.attention_attributes import ATTRIBUTE_TYPES
from trt_kvcache.ops.attention_shapes import workspace_nbytes
from trt_kvcache.trt.module import load
from trt_kvcache.trt.plugin import AttentionAttributes, plugin_class, register

DTYPES = dict.fromkeys(NAMES, "HALF") | {"lengths": "INT32", "cos_sin": "FLOAT", "new_lengths": "INT32"}


def test_output_shapes():
    """With stand-ins for symbolic sizes: there are none outside a network."""
    plugin = plugin_class(tensorrt())(FIELDS)
    known = {name: tuple(map(Size, shape)) for name, shape in SHAPES.items()}
    assert plugin.get_output_shapes(list(known.values()), [], None) == [known["q"], known["cache"]]
    unknown = known | {"q": (Size(None), Size(None), Size(6), Size(80))}
    assert plugin.get_output_shapes(list(unknown.values()), [], None)[0] == unknown["q"]
    with pytest.raises(ShapeError, match=r"^k: expected \[3, 4, 2, 80\], got \[3, 4, 6, 80\]\.$"):
        plugin.get_output_shapes(list((known | {"k": known["q"]}).values()), [], None)


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

    def test_core(self, rtx, plugin):
        for kind in rtx.module.PluginCapabilityType.__members__.values():
            assert plugin.get_capability_interface(kind) is plugin
        assert (plugin.plugin_name, plugin.plugin_version, plugin.plugin_namespace) == ("KVCacheAttention", "1", "trt_kvcache")
        assert plugin.num_outputs == 2
        for copy in (plugin.clone(), plugin.attach_to_context(None)):
            assert copy is not plugin
            assert copy.attributes == FIELDS
        assert plugin.set_tactic(0) is None

    def test_aliases(self, plugin):
        assert [plugin.get_aliased_input(output) for output in (0, 1)] == [-1, NAMES.index("cache")]

    def test_output_types(self, rtx, plugin):
        kinds = rtx.module.DataType
        types = [getattr(kinds, name) for name in DTYPES.values()]
        assert plugin.get_output_data_types(types) == [kinds.HALF, kinds.HALF]
        with pytest.raises(DTypeError, match=r"^lengths: expected int32, got int64\.$"):
            plugin.get_output_data_types([*types[:4], kinds.INT64, *types[5:]])

    @pytest.mark.parametrize("q", ["HALF", "BF16"])
    def test_formats(self, plugin, dynamic, q):
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

    @pytest.mark.parametrize(
        ("k", "least", "said"),
        [
            (((3, 4, 2, 64), "HALF"), None, "expected [3, 4, 2, 80], got [3, 4, 2, 64]."),
            (((3, 4, 2, 80), "HALF"), (2, 4, 2, 80), "expected [3, 4, 2, 80], got [2, 4, 2, 80]."),
            (((3, 4, 2, 80), "BF16"), None, "expected float16, got bfloat16."),
        ],
    )
    def test_configure(self, plugin, dynamic, k, least, said):
        right = {name: dynamic(shape, DTYPES[name]) for name, shape in SHAPES.items()}
        plugin.configure_plugin(list(right.values()), [])
        with pytest.raises(KVCacheError) as caught:
            plugin.configure_plugin(list((right | {"k": dynamic(*k, least=least)}).values()), [])
        assert str(caught.value) == f"k: {said}"

    @pytest.mark.parametrize(("least", "width"), [(1, 1), (2, 4)])
    def test_workspace(self, plugin, dynamic, least, width):
        q = dynamic((5, 4, 6, 80), "HALF", least=(2, least, 6, 80))
        assert plugin.get_workspace_size([q], []) == workspace_nbytes(FIELDS, width)

    def test_shape_change(self, plugin, desc):
        right = {name: desc(shape, DTYPES[name]) for name, shape in SHAPES.items()}
        plugin.on_shape_change(list(right.values()), [])
        with pytest.raises(ShapeError, match=r"^lengths: expected \[3\], got \[2\]\.$"):
            plugin.on_shape_change(list((right | {"lengths": desc((2,), "INT32")}).values()), [])

    def test_round_trip_through_the_registry(self, rtx):
        trt = rtx.module
        register(rtx)
        creator = trt.get_plugin_registry().get_creator("KVCacheAttention", "1", "trt_kvcache")
        assert creator is register(rtx)
        assert {field.name: field.type.name for field in creator.field_names} == ATTRIBUTE_TYPES
        fields = AttentionAttributes(num_heads=14, num_kv_heads=7, head_dim=96, scale=0.1, window=2**31 - 1, softcap=30.5, rotary_dim=92)
        plugin = plugin_class(rtx)(fields)
        serialized = plugin.get_fields_to_serialize()
        gc.collect()
        made = creator.create_plugin("again", serialized, trt.TensorRTPhase.RUNTIME)
        assert isinstance(made, plugin_class(rtx))
        assert made.attributes == fields
        wrong = trt.PluginFieldCollection([field for field in serialized if field.name != "head_dim"])
        with pytest.raises(ConfigError, match=r"^fields: expected head_dim too"):
            creator.create_plugin("again", wrong, trt.TensorRTPhase.BUILD)

    def test_a_name_that_is_taken(self, rtx):
        register(rtx)
        with pytest.raises(
            EngineError, match=r"^KVCacheAttention 1: tensorrt_rtx .* has a creator of this name and version that is not ours\.$"
        ):
            register.__wrapped__(rtx)
