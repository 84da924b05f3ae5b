"""Exceptions of the plugin: raised to TensorRT, and kept for the error that follows."""

import pytest

from tests.trt.plugin.stand_in import DataType, tensorrt
from tests.trt.plugin.test_plugin_tensors import FIELDS
from trt_kvcache.errors import DTypeError, EngineError
from trt_kvcache.trt.plugin import plugin_class
from trt_kvcache.trt.plugin.reported import reporter


def test_an_exception_of_the_plugin_becomes_message_and_cause():
    full = tensorrt()
    with full.log.collect() as messages:
        with pytest.raises(DTypeError) as raised:
            plugin_class(full)(FIELDS).get_output_data_types([DataType.INT32] * 6)
        assert messages.errors == [f"KVCacheAttention.get_output_data_types: DTypeError: {raised.value}"]
        with pytest.raises(EngineError, match=r"^the step failed\. TensorRT says: KVCacheAttention\.get_output_data_types: ") as error:
            messages.fail(EngineError, "the step failed")
    assert error.value.__cause__ is raised.value


def test_a_call_that_succeeds_reports_nothing():
    full = tensorrt()
    with full.log.collect() as messages:
        assert reporter(full)(lambda self, one, two: (self, one, two))(1, 2, 3) == (1, 2, 3)
    assert (messages.errors, messages.cause) == ([], None)


def test_every_method_that_tensorrt_calls_is_reported():
    methods = {name: method for name, method in vars(plugin_class(tensorrt())).items() if callable(method) and not name.startswith("_")}
    assert len(methods) == 13
    assert {name for name, method in methods.items() if not hasattr(method, "__wrapped__")} == set()
