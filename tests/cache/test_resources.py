"""``Resources``: what a cache allocated, released together."""

import pytest

from tests.helpers.caches import FailingMemory
from trt_kvcache import HostMemory
from trt_kvcache.cache.resources import Resources
from trt_kvcache.errors import CapacityError


class Part:
    """Writes down when it is closed."""

    def __init__(self, name, closed):
        self.name, self.closed = name, closed

    def close(self):
        self.closed.append(self.name)


def test_parts_are_closed_once_the_last_one_first():
    closed = []
    resources = Resources(HostMemory())
    first = Part("first", closed)
    assert resources.add(first) is first
    resources.add(Part("second", closed))
    for _ in range(2):
        resources.close()
        assert closed == ["second", "first"]


def test_allocations_are_released(memory, stream):
    resources = Resources(memory)
    allocation = resources.allocate(300, stream=stream)
    assert (allocation.nbytes, memory.live_nbytes) == (300, 300)
    resources.close()
    assert (allocation.closed, memory.live_nbytes) == (True, 0)


def test_what_was_allocated_before_a_failure_is_released():
    memory = FailingMemory()
    memory.left, memory.failures = 1, 1
    resources, stream = Resources(memory), memory.create_stream()
    resources.allocate(300, stream=stream)
    with pytest.raises(CapacityError):
        resources.allocate(300, stream=stream)
    resources.close()
    assert memory.live_nbytes == 0
