"""The CUDA kernels against those in NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from simt.standin import StandIn, need_cuda_memory, needs_standin

from trt_kvcache import HostMemory
from trt_kvcache.kernels import cuda, increment_length_tensor, store_length_values

need_cuda_memory()

COUNTS = [*range(1, 41), 256, 257, 700]


class TestAgainstNumPy:
    @pytest.fixture(params=COUNTS)
    def pair(self, request, memory, stream):
        """A function that runs the same on both memories, with random lengths and arguments, and compares."""
        n = request.param
        random = np.random.default_rng(n)
        lengths, arguments = random.integers(0, 2**30, (2, n), np.int32)
        host = HostMemory()

        def run(operation: Any) -> None:
            results = []
            for place, on in ((host, host.create_stream()), (memory, stream)):
                padded = place.to_device(np.concatenate([[-1, -2], lengths, [-3, -4]]).astype(np.int32), stream=on)
                operation(padded[2 : 2 + n], place.to_device(arguments, stream=on), [int(value) for value in arguments], on)
                results.append(padded.numpy().tolist())
            assert results[1] == results[0]
            assert results[0][:2] + results[0][-2:] == [-1, -2, -3, -4]

        return run

    def test_increment_by_a_number(self, pair):
        pair(lambda lengths, _tensor, values, stream: increment_length_tensor(lengths, values[0], stream=stream))

    def test_increment_by_a_tensor(self, pair):
        pair(lambda lengths, tensor, _values, stream: increment_length_tensor(lengths, tensor, stream=stream))

    @pytest.mark.parametrize("accumulate", [False, True])
    def test_store(self, pair, accumulate):
        pair(lambda lengths, _tensor, values, stream: store_length_values(lengths, values, accumulate=accumulate, stream=stream))


@needs_standin
@pytest.mark.parametrize(("n", "launches"), [(1, 1), (16, 1), (17, 2), (40, 3)])
def test_launches_of_a_store(memory, stream, n, launches):
    lengths = memory.to_device(np.zeros(n, np.int32), stream=stream)
    store_length_values(lengths, [0] * n, accumulate=False, stream=stream)
    standin = StandIn()
    store_length_values(lengths, [1] * n, accumulate=False, stream=stream)
    assert standin.take_calls() == ["cuLaunchKernelEx"] * launches


def test_every_argument_is_a_python_int(memory, stream, monkeypatch):
    """cuda.core passes those as 64 bits, which the kernels read; a NumPy int32 would be 32."""
    arguments: list[Any] = []
    monkeypatch.setattr(cuda, "_launch", lambda _name, _lengths, _stream, _threads, *rest: arguments.extend(rest))
    lengths = memory.to_device(np.zeros(20, np.int32), stream=stream)
    store_length_values(lengths, list(np.ones(20, np.int32)), accumulate=np.True_, stream=stream)
    increment_length_tensor(lengths, np.int32(3), stream=stream)
    increment_length_tensor(lengths, lengths, stream=stream)
    assert len(arguments) == 2 * 19 + 3 + 3
    assert {type(argument) for argument in arguments} == {int}
