"""Records of files and stages in ``config.json``."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import numpy as np
import pytest

from trt_kvcache.engine.protocol import TensorSpec
from trt_kvcache.engine_folder.records import PLAN_ALIGNMENT, FileRecord, SegmentsRecord, tensor_from_dict, with_padding
from trt_kvcache.ops.segments import CustomOpNode, Segment

CONSTANTS = FileRecord(nbytes=9, sha256="abc")
NODE = CustomOpNode(operation="embedding", attributes={"count": 2, "factor": 0.5}, inputs=("table", "ids"), outputs=("hidden",))
FIRST = Segment(tensors=(TensorSpec.input("hidden", (-1, -1, 8), "float16"), TensorSpec.output("next", (-1, 8), "float16", alias="hidden")))
SECOND = Segment(tensors=(TensorSpec.input("next", (-1, 8), "float16"), TensorSpec.output("logits", (-1, 5), "float32")))


def record(*plans: int) -> SegmentsRecord:
    return SegmentsRecord(stages=(NODE, FIRST, SECOND), plans=plans, constants=CONSTANTS)


def test_a_file_record_has_size_and_hash() -> None:
    assert FileRecord.of([b"two ", b"buffers"]) == FileRecord(nbytes=11, sha256=hashlib.sha256(b"two buffers").hexdigest())


def test_a_file_record_counts_the_bytes_of_arrays() -> None:
    assert FileRecord.of([np.zeros((3, 5), np.float32)]).nbytes == 60


def test_plans_start_at_multiples_of_a_page() -> None:
    assert record(10, PLAN_ALIGNMENT + 1, 3).spans == ((0, 10), (4096, 8193), (12288, 12291))


def test_a_plan_that_ends_at_a_page_is_followed_at_once() -> None:
    assert record(PLAN_ALIGNMENT, 3).spans == ((0, 4096), (4096, 4099))


def test_padding_puts_each_plan_at_its_span() -> None:
    plans = [b"first", b"x" * PLAN_ALIGNMENT, b"last"]
    content = b"".join(with_padding(plans))
    assert [content[start:end] for start, end in record(*map(len, plans)).spans] == plans


def test_plans_are_not_copied() -> None:
    plan = bytearray(b"first")
    assert any(chunk is plan for chunk in with_padding([plan]))


def test_a_record_is_read_back_from_json() -> None:
    data = json.loads(json.dumps(record(10, 20).to_dict()))
    assert SegmentsRecord.from_dict(data) == record(10, 20)


def test_the_stored_form_of_an_operation() -> None:
    assert record(10, 20).to_dict()["steps"][0] == {
        "operation": "embedding",
        "attributes": {"count": 2, "factor": 0.5},
        "inputs": ("table", "ids"),
        "outputs": ("hidden",),
    }


def test_the_stored_form_of_a_segment() -> None:
    stored = record(10, 20).to_dict()["steps"][1]
    assert stored["plan_nbytes"] == 10
    assert stored["tensors"][1] == {"name": "next", "shape": [-1, 8], "dtype": "float16", "mode": "output", "alias": "hidden"}


@pytest.mark.parametrize("spec", FIRST.tensors)
def test_a_tensor_is_read_back(spec: TensorSpec) -> None:
    stored: dict[str, Any] = {**vars(spec), "shape": list(spec.shape), "mode": spec.mode.value}
    assert tensor_from_dict(stored) == spec


@pytest.mark.parametrize("change", [{"mode": "both"}, {"shape": None}, {"color": 1}], ids=["mode", "shape", "unknown field"])
def test_a_damaged_tensor_is_refused(change: dict[str, Any]) -> None:
    stored: dict[str, Any] = {"name": "x", "shape": [1], "dtype": "int8", "mode": "input", "alias": None}
    with pytest.raises((KeyError, TypeError, ValueError)):
        tensor_from_dict(stored | change)
