"""``StepBuffers``: what an enqueue finds on the device, what is uploaded again and what is not."""

import pytest

from tests.helpers.fakes import Journal, RecordingMemory
from trt_kvcache.engine.step_buffers import StepBuffers
from trt_kvcache.errors import CapacityError

# All different: B=3, s=4, vocab=5.
OPTIONS = {"max_batch_size": 3, "max_width": 4, "vocab_size": 5, "index_dtypes": ("int32", "int32"), "logits_dtype": "float32"}


@pytest.fixture
def buffers(memory):
    buffers = StepBuffers(memory, **OPTIONS)
    yield buffers
    buffers.close()


def read(buffers, count, width):
    """What the enqueue finds: new tokens, and the place of the last one of each slot."""
    ids = buffers.input_ids[: count * width].reshape(count, width).numpy().tolist()
    return ids, buffers.last_token_ids[:count].numpy().ravel().tolist()


def test_rows_are_padded_on_the_right_and_the_last_tokens_follow_them(buffers, stream):
    buffers.write_rows([[1, 2, 3, 4]] * 3, 4, stream=stream)
    buffers.write_rows([[5, 6, 7], [], [8]], 3, stream=stream)
    assert read(buffers, 3, 3) == ([[5, 6, 7], [0, 0, 0], [8, 0, 0]], [2, 0, 0])
    for rows in ([[1, 2], [3]], [[1, 2], [3]], [[4], [5, 6]], [[1]], [[1], [2]], [[1], [2], [3, 4]]):
        buffers.write_rows(rows, 2, stream=stream)
        assert read(buffers, len(rows), 2)[1] == [len(row) - 1 for row in rows]
        buffers.write_one_token_each(range(7, 7 + len(rows)), stream=stream)
        assert read(buffers, len(rows), 1) == ([[7], [8], [9]][: len(rows)], [0] * len(rows))


@pytest.mark.parametrize("index", range(9))
def test_an_allocation_that_fails_gives_back_the_ones_before(index):
    memory = RecordingMemory(Journal())
    memory.journal.fail_at(index, CapacityError("full"), after=False)
    with pytest.raises(CapacityError):
        StepBuffers(memory, **OPTIONS)
    assert (memory.journal.failed, memory.live_nbytes) == (True, 0)
