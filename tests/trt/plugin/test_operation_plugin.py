"""``CustomOperation``: fields and creator through the registry of TensorRT for RTX, and enqueue at addresses of another owner."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.helpers.assertions import raises
from tests.simt.standin import need_cuda_memory
from tests.trt.plugin.stand_in import DataType, Size, tensorrt
from trt_kvcache.errors import ConfigError, EngineError, ShapeError
from trt_kvcache.ops import registry
from trt_kvcache.ops.attention_op import AttentionOp
from trt_kvcache.ops.custom_op import TensorType, run_on_host
from trt_kvcache.ops.embedding_op import EmbeddingOp
from trt_kvcache.trt.module import TensorRT, load
from trt_kvcache.trt.plugin.operation_fields import OPERATION_FIELD_TYPES, OperationFields
from trt_kvcache.trt.plugin.operation_plugin import as_plugin_input, operation_plugin_class, register_operations

TABLE, IDS = TensorType((7, 16), "float16"), TensorType((-1, -1), "int32")
EMBEDDING = OperationFields("embedding", {}, (TABLE, IDS))

HEADS = [TensorType((-1, -1, count, 64), "float16") for count in (4, 2, 2)]
CACHE = TensorType((-1, 2, 2, 12, 64), "int8")
QUANTIZED = (*HEADS, CACHE, TensorType((-1,), "int32"), TensorType((-1, 2, 2, 12), "float32"), TensorType((12, 2, 32), "float32"))
ATTENTION = OperationFields("attention", {"num_heads": 4, "num_kv_heads": 2, "head_dim": 64, "scale": 0.1}, QUANTIZED)


@pytest.fixture(scope="module")
def rtx() -> TensorRT:
    return load("tensorrt_rtx")


@pytest.mark.trt
class TestRegistry:
    def test_the_creator_is_found_and_registered_once(self, rtx: TensorRT) -> None:
        creator = register_operations(rtx)
        assert rtx.module.get_plugin_registry().get_creator("CustomOperation", "1", "trt_kvcache") is creator
        assert register_operations(rtx) is creator
        assert {field.name: field.type.name for field in creator.field_names} == OPERATION_FIELD_TYPES

    @pytest.mark.parametrize("fields", [EMBEDDING, ATTENTION])
    def test_a_serialised_plugin_is_created_again(self, rtx: TensorRT, fields: OperationFields) -> None:
        plugin = operation_plugin_class(rtx)(fields)
        assert type(plugin.get_fields_to_serialize()) is rtx.module.PluginFieldCollection_
        made = register_operations(rtx).create_plugin("again", plugin._stored_fields, rtx.module.TensorRTPhase.RUNTIME)
        assert made.fields == fields
        assert made.num_outputs == (1 if fields is EMBEDDING else 3)

    def test_an_operation_that_this_process_has_not_registered_is_named(self, rtx: TensorRT, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(registry.OPERATIONS, "mine", EmbeddingOp)
        plugin = operation_plugin_class(rtx)(OperationFields("mine", {}, (TABLE, IDS)))
        plugin.get_fields_to_serialize()
        monkeypatch.delitem(registry.OPERATIONS, "mine")
        with raises(EngineError, "operation 'mine'", "registered one, so one of attention, embedding"):
            register_operations(rtx).create_plugin("again", plugin._stored_fields, rtx.module.TensorRTPhase.RUNTIME)

    def test_a_missing_field_is_refused(self, rtx: TensorRT) -> None:
        plugin = operation_plugin_class(rtx)(EMBEDDING)
        plugin.get_fields_to_serialize()
        fields = [field for field in plugin._stored_fields if field.name != "inputs"]
        with raises(ConfigError, "fields", "operation, attributes, inputs", "operation, attributes"):
            register_operations(rtx).create_plugin("again", fields, rtx.module.TensorRTPhase.RUNTIME)


def plugin_of(fields: OperationFields) -> Any:
    return operation_plugin_class(tensorrt())(fields)


def test_outputs_and_aliases_are_those_of_the_operation() -> None:
    plugin = plugin_of(ATTENTION)
    assert plugin.get_output_data_types([]) == [DataType.HALF, DataType.INT32, DataType.FLOAT]
    assert [plugin.get_aliased_input(output) for output in range(3)] == [-1, 3, 5]
    batch, width = Size(None), Size(None)
    shapes = [[batch, width, Size(4), Size(64)], *([batch, width, Size(2), Size(64)],) * 2, [batch, *map(Size, (2, 2, 12, 16))], [batch]]
    inputs = [*shapes, [batch, *map(Size, (2, 2, 12))], list(map(Size, (12, 2, 32)))]
    out, cache, scales = plugin.get_output_shapes(inputs, [], SimpleNamespace(constant=Size))
    assert (out[0], out[1], [size.value for size in out[2:]]) == (batch, width, [4, 64])
    assert (cache, scales) == (tuple(inputs[3]), tuple(inputs[5]))
    assert as_plugin_input(CACHE) == TensorType((-1, 2, 2, 12, 16), "int32")


def test_inputs_that_the_operation_refuses_are_refused_before_an_enqueue() -> None:
    plugin = plugin_of(EMBEDDING)
    wrong = [SimpleNamespace(dims=dims) for dims in ((7, 16), (2, 3, 1))]
    with raises(ShapeError, "embedding", "table [vocab, hidden] and ids [B, s]"):
        plugin.on_shape_change(wrong, [])
    wrong[1] = SimpleNamespace(min=(1, 1), max=(2, 3, 1), dims=())
    wrong[0] = SimpleNamespace(min=(7, 16), max=(7, 16), dims=())
    with pytest.raises(ShapeError, match=r"^embedding: "):
        plugin.configure_plugin(wrong, [])


class TestEnqueue:
    """In GPU memory, or that of the emulated device."""

    @pytest.fixture(autouse=True)
    def _gpu(self) -> None:
        need_cuda_memory()

    @pytest.mark.parametrize(("copied", "sinks"), [(False, 0), (True, 0), (False, 1)])
    def test_the_result_is_that_of_numpy(self, memory: Any, stream: Any, copied: bool, sinks: int) -> None:
        """Attention in its own memory, where TensorRT has copied the cache, and with sinks."""
        random = np.random.default_rng(0)
        heads = [random.normal(size=(3, 2, count, 64)).astype(np.float16) for count in (4, 2, 2)]
        cache = random.normal(size=(3, 2, 2, 12, 64)).astype(np.float16)
        host = [*heads, cache, np.array([5, 0, 9], np.int32), random.normal(size=(12, 2, 32)).astype(np.float32)]
        inputs = (*HEADS, TensorType((-1, 2, 2, 12, 64), "float16"), TensorType((-1,), "int32"), TensorType((12, 2, 32), "float32"))
        if sinks:
            host.append(np.array([1, -2, 3, 0.5], np.float32))
            inputs = (*inputs, TensorType((4,), "float32"))
        attributes = {**ATTENTION.attributes, **({"sinks": 1} if sinks else {})}
        fields = OperationFields("attention", attributes, inputs)
        plugin = plugin_of(fields)
        tensors = [memory.to_device(array, stream=stream) for array in host]
        out = memory.to_device(np.full_like(heads[0], np.nan), stream=stream)
        present = memory.to_device(np.full_like(cache, 77), stream=stream) if copied else tensors[3]
        maxima = [SimpleNamespace(max=array.shape) for array in host]
        workspace = memory.to_device(np.full(plugin.get_workspace_size(maxima, []), 0xFF, np.uint8), stream=stream)
        descs = [SimpleNamespace(dims=array.shape) for array in host]
        handle = int(stream.__cuda_stream__()[1])
        plugin.on_shape_change(descs, [])
        plugin.enqueue(descs, [], [one.ptr for one in tensors], [out.ptr, present.ptr], workspace.ptr, handle)
        memory.synchronize(stream)
        expected_out, expected_cache = run_on_host(AttentionOp(**attributes), *host)
        np.testing.assert_allclose(out.numpy().astype(np.float32), expected_out.astype(np.float32), atol=4e-3)
        assert present.numpy().tobytes() == expected_cache.tobytes()
        assert (tensors[3].numpy().tobytes() == cache.tobytes()) is copied
