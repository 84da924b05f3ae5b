"""``run_on_host``: a custom operation over NumPy arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from trt_kvcache.errors import ShapeError
from trt_kvcache.memory.tensor import DeviceTensor
from trt_kvcache.ops.custom_op import TensorType, run_on_host


class AddInPlace:
    """Add the second input to the first one in place, and return their product; both go through a workspace of two bytes."""

    name = "add_in_place"
    attributes: Mapping[str, int | float] = {}

    def outputs(self, inputs: Sequence[TensorType]) -> tuple[TensorType, ...]:
        if inputs[0].shape != inputs[1].shape:
            raise ShapeError("add_in_place: expected equal shapes.")
        return TensorType(inputs[0].shape, inputs[0].dtype, alias=0), TensorType(inputs[0].shape, "float32")

    def workspace_nbytes(self, inputs: Sequence[TensorType]) -> int:
        return 2

    def enqueue(self, inputs: Sequence[DeviceTensor], outputs: Sequence[DeviceTensor], workspace: DeviceTensor, stream: Any) -> None:
        memory: Any = workspace.memory
        assert (workspace.nbytes, memory.array(workspace).tolist()) == (2, [0, 0])
        assert outputs[0].ptr == inputs[0].ptr
        x, y = (memory.array(tensor) for tensor in inputs)
        memory.array(outputs[1])[...] = x * y
        x += y


def run(x: Any, y: Any) -> tuple[Any, ...]:
    return run_on_host(AddInPlace(), np.array(x, np.float32), np.array(y, np.float32))


def test_outputs_are_new_arrays() -> None:
    total, product = run([1, 2, 3], [4, 5, 6])
    assert (total.tolist(), product.tolist()) == ([5, 7, 9], [4, 10, 18])


def test_inputs_are_not_changed_by_an_operation_in_place() -> None:
    x = np.array([1, 2, 3], np.float32)
    run_on_host(AddInPlace(), x, x)
    assert x.tolist() == [1, 2, 3]


def test_inputs_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ShapeError, match="expected equal shapes"):
        run([1, 2], [1, 2, 3])
