"""Offsets for tensors between stages: what is live at the same time never overlaps."""

import itertools

import pytest

from trt_kvcache.engine.protocol import TensorSpec
from trt_kvcache.ops.segments import CustomOpNode, Segment
from trt_kvcache.trt.memory_plan import assign_offsets

NAMES = "abcdef"
NBYTES = dict(zip(NAMES, (300, 200, 512, 100, 256, 1), strict=True))


def op(*, reads, writes):
    return CustomOpNode(operation="x", attributes={}, inputs=tuple(reads), outputs=tuple(writes))


CHAIN = [op(reads=a, writes=b) for a, b in itertools.pairwise(NAMES)]


def overlap(offsets, one, other):
    return offsets[one] < offsets[other] + NBYTES[other] and offsets[other] < offsets[one] + NBYTES[one]


def test_tensors_of_one_stage_do_not_overlap():
    offsets, _ = assign_offsets(CHAIN, NBYTES)
    assert not any(overlap(offsets, one, other) for one, other in itertools.pairwise(NAMES))


def test_offsets_are_aligned():
    offsets, nbytes = assign_offsets([op(reads="a", writes="b")], {"a": 300, "b": 200})
    assert (offsets, nbytes) == ({"a": 0, "b": 512}, 712)


def test_bytes_are_shared_by_tensors_that_are_never_live_together():
    _, nbytes = assign_offsets(CHAIN, NBYTES)
    assert nbytes == 512 + 200  # the stage with the largest tensors


def test_a_tensor_stays_live_until_its_last_reader():
    """``a`` is read again by the last stage, so nothing may take its bytes."""
    stages = [*CHAIN, op(reads="af", writes="")]
    offsets, _ = assign_offsets(stages, NBYTES)
    assert not any(overlap(offsets, "a", other) for other in NAMES[1:])


def test_segments_keep_their_tensors_live():
    tensors = tuple(TensorSpec.input(name, (-1,), "float16") for name in NAMES)
    offsets, _ = assign_offsets([Segment(tensors=tensors)], NBYTES)
    assert not any(overlap(offsets, one, other) for one, other in itertools.combinations(NAMES, 2))


def test_tensors_without_a_size_are_left_out():
    offsets, nbytes = assign_offsets(CHAIN, {"b": 10})
    assert (offsets, nbytes) == ({"b": 0}, 10)


@pytest.mark.parametrize("stages", [[], CHAIN])
def test_nothing_to_place(stages):
    assert assign_offsets(stages, {}) == ({}, 0)
