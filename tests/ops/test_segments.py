"""Stages of an engine: which may replace which, and which tensors lie between them."""

from dataclasses import replace

import pytest

from trt_kvcache.engine.protocol import TensorSpec
from trt_kvcache.ops import registry
from trt_kvcache.ops.embedding_op import EmbeddingOp
from trt_kvcache.ops.registry import register_operation
from trt_kvcache.ops.segments import CustomOpNode, Segment, can_replace, intermediate_tensors

EMBED = CustomOpNode(operation="embedding", attributes={}, inputs=("table", "ids"), outputs=("hidden",))
HEAD = Segment(tensors=(TensorSpec.input("hidden", (-1, -1, 8), "float16"), TensorSpec.output("logits", (-1, 5), "float32")))
EXTERNAL = (
    TensorSpec.input("table", (5, 8), "float16"),
    TensorSpec.input("ids", (-1, -1), "int32"),
    TensorSpec.output("logits", (-1, 5), "float32"),
)


@pytest.fixture
def registered(monkeypatch):
    monkeypatch.setattr(registry, "OPERATIONS", dict(registry.OPERATIONS))
    register_operation("other", EmbeddingOp)


def test_intermediate_tensors_are_those_that_nobody_binds():
    assert intermediate_tensors([EMBED, HEAD], EXTERNAL) == {"hidden": TensorSpec.output("hidden", (-1, -1, 8), "float16")}


def test_outputs_of_segments_are_intermediate_too():
    first = Segment(tensors=(TensorSpec.input("ids", (-1, -1), "int32"), TensorSpec.output("hidden", (-1, -1, 8), "float16")))
    assert list(intermediate_tensors([first, HEAD], EXTERNAL)) == ["hidden"]


def test_a_tensor_that_no_stage_writes():
    with pytest.raises(KeyError, match="nowhere"):
        intermediate_tensors([replace(EMBED, inputs=("table", "nowhere"))], EXTERNAL)


@pytest.mark.parametrize("stage", [EMBED, HEAD])
def test_a_stage_replaces_itself(stage):
    assert can_replace(stage, replace(stage))


def test_a_registered_operation_replaces_one_with_the_same_tensors(registered):
    other = replace(EMBED, operation="other", attributes={"count": 3})
    assert can_replace(other, EMBED)
    assert not can_replace(replace(other, inputs=("ids", "table")), EMBED)
    assert not can_replace(replace(other, outputs=("x",)), EMBED)
    assert not can_replace(other, HEAD)


def test_an_operation_that_is_not_registered_replaces_nothing():
    assert not can_replace(replace(EMBED, operation="other"), EMBED)


def test_other_attributes_of_an_operation_of_this_package_replace_nothing():
    assert not can_replace(replace(EMBED, attributes={"count": 3}), EMBED)
    assert not can_replace(EMBED, HEAD)
