"""Check G: an enqueue that is captured from outside."""

from types import SimpleNamespace

import pytest

from tests.helpers.assertions import raises
from trt_kvcache import KVCacheConfig, KVCacheManager, KVLayerConfig, KVLayout
from trt_kvcache.doctor.cases import CheckFailure
from trt_kvcache.doctor.checks import graphs
from trt_kvcache.errors import EngineError


class Engine:
    """Writes zeros into every row of the cache; ``captured`` does so while the stream is captured."""

    def __init__(self, view, captured):
        self.view, self.captured = view, captured

    def enqueue(self, stream):
        memory = self.view.memory
        if memory.is_capturing(stream) and self.captured is not None:
            self.captured(stream)
        else:
            memory.zero(self.view, stream=stream)


def refuse(stream):
    raise EngineError("the step failed. TensorRT says: this TRT engine is not stream capturable")


@pytest.fixture
def session_of(memory):
    if memory.is_host:
        pytest.skip("host memory has no graphs")
    stream = memory.create_stream()
    layers = [KVLayerConfig(num_kv_heads=2, head_dim=16)]
    config = KVCacheConfig(layers=layers, max_batch_size=3, max_sequence_length=8, dtype="float16", layout=KVLayout.COMBINED)
    with KVCacheManager(config, memory=memory) as cache:
        cache.reset_for_new_sequences([3, 5], stream=stream)
        memory.synchronize(stream)

        def session_of(captured):
            engine = Engine(cache.get_combined_kv_cache(0), captured)
            nothing = lambda arguments: None  # noqa: E731
            return SimpleNamespace(cache=cache, engine=engine, cache_config=SimpleNamespace(kv=config), prefill=nothing, decode=nothing)

        yield session_of


def test_replay_that_writes_the_same_rows_passes(session_of):
    assert graphs._captured_from_outside(session_of(None)) == {"capturable": True, "nodes": 1}


def test_replay_that_writes_nothing_fails(session_of):
    with raises(CheckFailure, "after a replay", "equal bytes"):
        graphs._captured_from_outside(session_of(lambda stream: None))


def test_refusal_is_told_and_the_stream_can_be_used_afterwards(session_of, memory):
    session = session_of(refuse)
    found = graphs._captured_from_outside(session)
    assert found == {"capturable": False, "refusal": "the step failed. TensorRT says: this TRT engine is not stream capturable"}
    stream = memory.create_stream()
    session.engine.enqueue(stream)
    memory.synchronize(stream)
