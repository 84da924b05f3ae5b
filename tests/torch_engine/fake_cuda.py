"""A stand-in for the graphs of ``torch.cuda``: work that is captured does not run, and runs when its graph is replayed."""

from __future__ import annotations

from contextlib import contextmanager

import torch

from trt_kvcache.torch_engine.device import HostDevice
from trt_kvcache.torch_engine.step_graphs import StepGraphs


class FakeGraph:
    """A graph of ``FakeCuda``, which takes memory of the device and of its pool while it lives."""

    def __init__(self, cuda):
        self._cuda = cuda
        self._pool = None
        self.captured = []

    def pool(self):
        return self._pool

    def replay(self):
        self._cuda.replays += 1
        for work in self.captured:
            work()

    def open(self, pool):
        self._pool = object() if pool is None else pool
        if self._pool not in self._cuda.pools:
            self._cuda.pools[self._pool] = 0
        self._cuda.pools[self._pool] = max(self._cuda.pools[self._pool], self._cuda.pool_nbytes)
        self._cuda.live[id(self)] = (self._pool, self._cuda.graph_nbytes)

    def __del__(self):
        self._cuda.live.pop(id(self), None)


class FakeCuda:
    """A stand-in for ``torch.cuda`` under ``StepGraphs``. ``graph_nbytes`` and ``pool_nbytes``: GPU memory that the next capture takes."""

    def __init__(self, monkeypatch):
        self.graph_nbytes, self.pool_nbytes = 10, 0
        self.pools, self.live = {}, {}
        self.replays = self.captures = self.waits = 0
        self.fails = None
        self._capturing = None
        for name, stand_in in {
            "CUDAGraph": lambda: FakeGraph(self),
            "graph": self._graph,
            "current_stream": lambda: None,
            "empty_cache": lambda: None,
            "synchronize": self._synchronize,
            "mem_get_info": lambda device: (10**9 - self.nbytes, 10**9),
            "memory_reserved": lambda device: self._pools_nbytes,
        }.items():
            monkeypatch.setattr(torch.cuda, name, stand_in)

    @property
    def nbytes(self):
        """Memory that graphs and their pools take now."""
        return self._pools_nbytes + sum(nbytes for _, nbytes in self.live.values())

    @property
    def _pools_nbytes(self):
        used = {id(pool) for pool, _ in self.live.values()}
        return sum(nbytes for pool, nbytes in self.pools.items() if id(pool) in used)

    def _synchronize(self, device=None):
        self.waits += 1

    @contextmanager
    def _graph(self, graph, *, pool, stream, capture_error_mode):
        assert capture_error_mode == "thread_local"
        self.captures += 1
        graph.open(pool)
        self._capturing = graph
        try:
            yield
        finally:
            self._capturing = None

    def work(self, call):
        """Return work that runs, or is captured instead."""

        def run():
            if self._capturing is None:
                call()
                return
            if self.fails is not None:
                raise self.fails
            self._capturing.captured.append(call)

        return run


class FakeCudaDevice(HostDevice):
    """Torch's CPU, with graphs: put in place of :func:`~trt_kvcache.torch_engine.engine.torch_device`."""

    def __init__(self, cuda, max_nbytes=10**8):
        self._cuda = cuda
        self.graphs = StepGraphs(self.torch_device, max_nbytes)

    def run(self, key, stream, work):
        self.graphs.run(key, self._cuda.work(work))

    def close(self):
        self.graphs.close()
