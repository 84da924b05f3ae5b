"""``StepBuffers``: what an enqueue finds on the device, what is uploaded again and what is not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.helpers.recording import Journal, RecordingMemory
from trt_kvcache.engine.step_buffers import StepBuffers
from trt_kvcache.errors import CapacityError

# All different: B=3, s=4, vocab=5.
OPTIONS: dict[str, Any] = {
    "max_batch_size": 3,
    "max_width": 4,
    "vocab_size": 5,
    "index_dtypes": ("int32", "int32"),
    "logits_dtype": "float32",
}


@pytest.fixture
def buffers(memory):
    buffers = StepBuffers(memory, **OPTIONS)
    yield buffers
    buffers.close()


def ids(buffers, count, width):
    return buffers.input_ids[: count * width].reshape(count, width).numpy().tolist()


def last(buffers, count):
    return buffers.last_token_ids[:count].numpy().ravel().tolist()


def test_one_token_each(buffers, stream):
    buffers.write_one_token_each([7, 9], stream=stream)
    assert ids(buffers, 2, 1) == [[7], [9]]
    assert last(buffers, 2) == [0, 0]


def test_rows_are_padded_on_the_right(buffers, stream):
    buffers.write_rows([[1, 2, 3, 4]] * 3, 4, stream=stream)
    buffers.write_rows([[5, 6, 7], [], [8]], 3, stream=stream)
    assert ids(buffers, 3, 3) == [[5, 6, 7], [0, 0, 0], [8, 0, 0]]
    assert last(buffers, 3) == [2, 0, 0]


def test_the_last_tokens_follow_the_rows(buffers, stream):
    for rows in ([[1, 2], [3]], [[1, 2], [3]], [[4], [5, 6]], [[1]], [[1], [2]], [[1], [2], [3, 4]]):
        buffers.write_rows(rows, 2, stream=stream)
        assert last(buffers, len(rows)) == [len(row) - 1 for row in rows]
        buffers.write_one_token_each([9] * len(rows), stream=stream)
        assert last(buffers, len(rows)) == [0] * len(rows)


def test_all_tokens_of_rows_that_are_on_the_device(memory, stream):
    """The upload of the enqueue before may still read its page of pinned memory."""
    buffers = StepBuffers(memory, **OPTIONS, max_logits_per_slot=4)
    buffers.write_rows([[1, 2, 3], [4]], 3, stream=stream)
    found = memory.to_device(np.zeros(2, np.int32), stream=stream)
    memory.copy_rows(found, buffers.last_token_ids.reshape(12), [(0, 0, 2)], stream=stream)
    buffers.want_every_logit(2, 3, stream=stream)
    buffers.want_every_logit(2, 3, stream=stream)
    assert found.numpy().tolist() == [2, 0]
    assert buffers.last_token_ids.numpy().ravel()[:6].tolist() == [0, 1, 2] * 2
    buffers.write_rows([[1, 2, 3], [4]], 3, stream=stream)
    assert buffers.last_token_ids.numpy().ravel()[:2].tolist() == [2, 0]
    buffers.close()


def test_all_tokens_of_each_row(memory, stream):
    buffers = StepBuffers(memory, **OPTIONS, max_logits_per_slot=3)
    chosen = buffers.last_token_ids.reshape(9)
    for width, expected in ((3, [0, 1, 2, 0, 1, 2]), (2, [0, 1, 0, 1])):
        buffers.write_rows([[5, 6][:width], [7]], width, stream=stream, every_logit=True)
        assert chosen[: 2 * width].numpy().tolist() == expected
        buffers.write_rows([[5, 6], [7]], 3, stream=stream)
        assert chosen[:2].numpy().tolist() == [1, 0]
    buffers.close()


def test_logits_of_several_tokens_of_each_slot(memory, stream):
    buffers = StepBuffers(memory, **OPTIONS, max_logits_per_slot=3)
    assert buffers.logits.shape == (9, 5)
    values = np.arange(45, dtype=np.float32).reshape(9, 5)
    memory.upload(buffers.logits, values, stream=stream)
    np.testing.assert_array_equal(buffers.read_logits(6, stream=stream), values[:6])
    buffers.close()


def test_the_start_index(buffers, stream):
    buffers.write_start_index([5, 6], stream=stream)
    assert buffers.start_index.numpy().tolist() == [5, 6, 0]


@pytest.mark.parametrize("dtypes", [("int64", "int32"), ("int32", "int64")])
def test_either_index_dtype(memory, stream, dtypes):
    buffers = StepBuffers(memory, **{**OPTIONS, "index_dtypes": dtypes})
    buffers.write_rows([[1, 2], [3]], 2, stream=stream)
    assert (buffers.input_ids.dtype, buffers.last_token_ids.dtype) == dtypes
    assert ids(buffers, 2, 2) == [[1, 2], [3, 0]]
    assert last(buffers, 2) == [1, 0]
    buffers.close()


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_logits_come_back_in_the_dtype_of_the_engine(memory, stream, dtype):
    buffers = StepBuffers(memory, **{**OPTIONS, "logits_dtype": dtype})
    values = np.arange(15).reshape(3, 5).astype(buffers.logits.numpy().dtype)
    memory.upload(buffers.logits, values, stream=stream)
    found = buffers.read_logits(2, stream=stream)
    assert found.dtype == values.dtype
    np.testing.assert_array_equal(found, values[:2])
    buffers.close()


def test_addresses_never_change(buffers, stream):
    tensors = (buffers.input_ids, buffers.last_token_ids, buffers.start_index, buffers.logits)
    before = [tensor.ptr for tensor in tensors]
    assert all(address % 256 == 0 for address in before)
    for count in (1, 3, 2):
        buffers.write_rows([[1, 2]] * count, 2, stream=stream)
        buffers.write_one_token_each([1] * count, stream=stream)
        buffers.read_logits(count, stream=stream)
    assert [tensor.ptr for tensor in tensors] == before


def test_memory_is_given_back(memory):
    before = memory.live_nbytes
    buffers = StepBuffers(memory, **OPTIONS)
    # ids [3, 4], last [3, 1] and start [3] int32, logits [3, 5] float32
    assert memory.live_nbytes - before == 4 * (12 + 3 + 3 + 15)
    buffers.close()
    buffers.close()
    assert memory.live_nbytes == before


@pytest.mark.parametrize("index", range(9))
def test_an_allocation_that_fails_gives_back_the_ones_before(index):
    memory = RecordingMemory(Journal())
    memory.journal.fail_at(index, CapacityError("full"), after=False)
    with pytest.raises(CapacityError):
        StepBuffers(memory, **OPTIONS)
    assert memory.journal.failed
    assert memory.live_nbytes == 0


class TestCalls:
    @pytest.fixture
    def memory(self):
        return RecordingMemory(Journal())

    def test_a_decode_step_uploads_the_tokens_and_nothing_else(self, buffers, memory):
        stream = memory.create_stream()
        buffers.write_one_token_each([1, 2], stream=stream)
        memory.journal.take()
        buffers.write_one_token_each([3, 4], stream=stream)
        assert memory.journal.take() == [("upload", (2, 1), stream)]

    def test_reading_logits_is_the_one_wait(self, buffers, memory):
        stream = memory.create_stream()
        buffers.read_logits(2, stream=stream)
        memory.journal.take()
        buffers.read_logits(2, stream=stream)
        assert memory.journal.take() == [("download", (2, 5), stream), ("synchronize", stream)]

    @pytest.mark.parametrize("after", [False, True])
    def test_last_tokens_whose_upload_failed_are_uploaded_again(self, buffers, memory, after):
        stream = memory.create_stream()
        buffers.write_one_token_each([1, 2], stream=stream)
        memory.journal.fail_at(1, KeyboardInterrupt(), after=after)
        with pytest.raises(KeyboardInterrupt):
            buffers.write_rows([[1, 2], [3]], 2, stream=stream)
        buffers.write_rows([[1, 2], [3]], 2, stream=stream)
        assert last(buffers, 2) == [1, 0]
        buffers.write_one_token_each([1, 2], stream=stream)
        assert last(buffers, 2) == [0, 0]
