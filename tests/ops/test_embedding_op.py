"""``EmbeddingOp``: rows of a table by token id."""

from __future__ import annotations

import numpy as np
import pytest

from trt_kvcache.errors import DTypeError, ShapeError
from trt_kvcache.ops.custom_op import TensorType, run_on_host
from trt_kvcache.ops.embedding_op import EmbeddingOp

TABLE = TensorType((7, 5), "float16")


def table(dtype: str = "float16") -> np.ndarray:
    return np.random.default_rng(0).normal(size=(7, 5)).astype(dtype)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_each_id_gives_its_row(dtype: str) -> None:
    (rows,) = run_on_host(EmbeddingOp(), table(dtype), np.array([[0, 6, 3], [3, 3, 1]], np.int32))
    assert rows.dtype == dtype
    np.testing.assert_array_equal(rows, table(dtype)[[[0, 6, 3], [3, 3, 1]]])


@pytest.mark.parametrize("token", [-1, 7, 2**31 - 1])
def test_ids_outside_the_table_give_zeros(token: int) -> None:
    (rows,) = run_on_host(EmbeddingOp(), table(), np.array([[token, 2]], np.int32))
    assert (rows[0, 0] == 0).all()
    np.testing.assert_array_equal(rows[0, 1], table()[2])


def test_outputs_with_sizes_that_are_not_known_yet() -> None:
    assert EmbeddingOp().outputs([TABLE, TensorType((-1, -1), "int32")]) == (TensorType((-1, -1, 5), "float16"),)


def test_there_is_no_workspace() -> None:
    assert EmbeddingOp().workspace_nbytes([TABLE, TensorType((2, 3), "int32")]) == 0


@pytest.mark.parametrize(
    ("ids", "error", "message"),
    [
        (
            TensorType((3,), "int32"),
            ShapeError,
            r"expected a table \[vocab, hidden\] and ids \[B, s\], got \(7, 5\) and \(3,\)\.",
        ),
        (TensorType((2, 3), "int64"), DTypeError, r"expected int32 ids, got int64\."),
    ],
    ids=["shape", "dtype"],
)
def test_inputs_that_do_not_fit_are_refused(ids: TensorType, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^embedding: {message}$"):
        EmbeddingOp().outputs([TABLE, ids])
