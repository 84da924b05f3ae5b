"""Quantized values of K and V that TensorRT has in words: names, shapes and ranges of a plan, and what is passed on to it."""

import pytest

from trt_kvcache.engine.protocol import TensorSpec
from trt_kvcache.trt.int32_packed_view import Int32PackedView
from trt_kvcache.trt.tensors import ProfileRanges

CODES = TensorSpec.input("past", (-1, 2, 3, 7, 80), "int8")
WORDS = TensorSpec.input("past", (-1, 2, 3, 7, 20), "int32")
LENGTHS = TensorSpec.input("lengths", (-1,), "int32")
PRESENT = TensorSpec.output("present", (-1, 2, 3, 7, 20), "int32")


class Plan:
    """A plan that writes down what it is told."""

    def __init__(self):
        self.tensors = {spec.name: spec for spec in (WORDS, LENGTHS, PRESENT)}
        self.ranges = [ProfileRanges({"past": ((1, 2, 3, 7, 20), (4, 2, 3, 7, 20)), "lengths": ((1,), (4,))})]
        self.told = []

    def set_tensor_address(self, *what):
        self.told.append(what)

    def set_input_shape(self, *what):
        self.told.append(what)

    def tensor_shape(self, context, name):
        return {"past": (2, 2, 3, 7, 20), "lengths": (2,), "present": (-1, 2, 3, 7, 20)}[name]


@pytest.fixture
def plan():
    return Plan()


def test_what_is_codes_is_shown_as_codes(plan):
    present = TensorSpec.output("present", (-1, 2, 3, 7, 80), "int8", alias="past")
    shown = Int32PackedView(plan, [CODES, LENGTHS, present])
    assert list(shown.tensors.values()) == [CODES, LENGTHS, present]
    assert shown.ranges == [ProfileRanges({"past": ((1, 2, 3, 7, 80), (4, 2, 3, 7, 80)), "lengths": ((1,), (4,))})]
    assert [shown.tensor_shape(0, name) for name in shown.tensors] == [(2, 2, 3, 7, 80), (2,), (-1, 2, 3, 7, 80)]


def test_shapes_are_passed_on_in_words(plan):
    shown = Int32PackedView(plan, [CODES, LENGTHS])
    shown.set_input_shape(1, "past", (4, 2, 3, 7, 80))
    shown.set_input_shape(1, "lengths", (4,))
    shown.set_tensor_address(1, "past", 0x1000)
    assert plan.told == [(1, "past", (4, 2, 3, 7, 20)), (1, "lengths", (4,)), (1, "past", 0x1000)]


@pytest.mark.parametrize("recorded", [[], [WORDS, LENGTHS, PRESENT]])
def test_other_plans_are_shown_as_they_are(plan, recorded):
    shown = Int32PackedView(plan, recorded)
    assert (shown.tensors, shown.ranges) == (plan.tensors, plan.ranges)
    shown.set_input_shape(0, "past", (4, 2, 3, 7, 20))
    assert plan.told == [(0, "past", (4, 2, 3, 7, 20))]
