"""Stages of an engine: what connects them, and which may replace which."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from trt_kvcache.engine.protocol import TensorSpec
from trt_kvcache.ops.embedding_op import EmbeddingOp
from trt_kvcache.ops.registry import register_operation, unregister_operation
from trt_kvcache.ops.segments import CustomOpNode, Segment, can_replace, intermediate_tensors

TABLE = TensorSpec.input("table", (7, 5), "float16")
IDS = TensorSpec.input("ids", (-1, -1), "int32")
LOGITS = TensorSpec.output("logits", (-1, 7), "float32")
NODE = CustomOpNode(operation="embedding", attributes={}, inputs=("table", "ids"), outputs=("hidden",))
SEGMENT = Segment(tensors=(TensorSpec.input("hidden", (-1, -1, 5), "float16"), TensorSpec.output("next", (-1, 5), "float16")))
HEAD = Segment(tensors=(TensorSpec.input("next", (-1, 5), "float16"), LOGITS))


@pytest.fixture
def mine() -> Iterator[CustomOpNode]:
    """A node of a registered operation with the tensors of the embedding."""
    register_operation("mine", EmbeddingOp)
    yield replace(NODE, operation="mine")
    unregister_operation("mine")


def test_a_node_creates_its_operation() -> None:
    assert isinstance(NODE.create_op(), EmbeddingOp)


def test_a_node_of_an_unknown_operation_cannot() -> None:
    with pytest.raises(KeyError):
        replace(NODE, operation="nowhere").create_op()


def test_what_a_stage_writes_and_a_later_one_reads_is_intermediate() -> None:
    found = intermediate_tensors([NODE, SEGMENT, HEAD], [TABLE, IDS, LOGITS])
    assert found == {
        "hidden": TensorSpec.output("hidden", (-1, -1, 5), "float16"),
        "next": TensorSpec.output("next", (-1, 5), "float16"),
    }


def test_a_tensor_that_nothing_writes_is_refused() -> None:
    with pytest.raises(KeyError, match="ids"):
        intermediate_tensors([NODE], [TABLE])


def test_a_stage_can_replace_an_equal_one() -> None:
    assert can_replace(NODE, replace(NODE))
    assert can_replace(SEGMENT, Segment(tensors=SEGMENT.tensors))


def test_a_registered_operation_can_replace_one_with_the_same_tensors(mine: CustomOpNode) -> None:
    assert can_replace(replace(mine, attributes={"factor": 2}), NODE)


def test_an_operation_of_this_package_replaces_only_its_equal(mine: CustomOpNode) -> None:
    assert not can_replace(NODE, mine)
    assert not can_replace(replace(NODE, attributes={"factor": 2}), NODE)


def test_an_operation_with_other_tensors_replaces_nothing(mine: CustomOpNode) -> None:
    assert not can_replace(replace(mine, outputs=("other",)), NODE)
    assert not can_replace(replace(mine, inputs=("ids", "table")), NODE)


def test_a_segment_and_an_operation_do_not_replace_each_other(mine: CustomOpNode) -> None:
    assert not can_replace(SEGMENT, NODE)
    assert not can_replace(mine, SEGMENT)
