"""Nothing that owns memory can be copied or pickled: two owners would disagree about what only one of them can close."""

import copy
import pickle
import re

import pytest

from tests.paths import ROOT
from trt_kvcache import InferenceSession
from trt_kvcache.memory.cuda_memory import CudaMemory
from trt_kvcache.trt.segmented_engine import SegmentedEngine
from trt_kvcache.trt.tensorrt_engine import TensorRTEngine

WAYS = pytest.mark.parametrize("way", [copy.copy, copy.deepcopy, pickle.dumps], ids=["copy", "deepcopy", "pickle"])


@pytest.fixture(scope="module")
def session():
    with InferenceSession.from_model(ROOT / "examples" / "tiny-llama", engine="reference", max_sequence_length=16) as session:
        yield session


def parts(session):
    cache = session.cache
    return {
        "InferenceSession": session,
        "RequestHandle": session.submit([5, 6, 7], max_new_tokens=1),
        "ReferenceEngine": session.engine,
        "KVCacheManager": cache,
        "PromptCache": session.prompt_cache,
        "Lengths": cache.lengths,
        "HostMemory": cache.memory,
        "HostAllocation": cache.lengths.tensor.allocation,
        "TensorRTEngine": object.__new__(TensorRTEngine),
        "SegmentedEngine": object.__new__(SegmentedEngine),
        "CudaMemory": object.__new__(CudaMemory),
    }


@WAYS
def test_what_owns_memory_is_never_copied(session, way):
    for name, owner in parts(session).items():
        with pytest.raises(TypeError, match=rf"^an? {re.escape(name)} owns memory, or shares it, and cannot be copied or pickled\.$"):
            way(owner)


@pytest.mark.parametrize("way", [copy.deepcopy, pickle.dumps], ids=["deepcopy", "pickle"])
def test_a_tensor_is_never_copied_with_its_memory(session, way):
    with pytest.raises(TypeError, match=r"^a DeviceTensor owns memory, or shares it, and cannot be copied or pickled\.$"):
        way(session.cache.kv_cache_lengths)


@WAYS
def test_nothing_was_changed_by_the_attempt(session, way):
    before = session.cache.memory.live_nbytes
    with pytest.raises(TypeError):
        way(session)
    assert session.cache.memory.live_nbytes == before
    assert [event.token for event in session.generate([[5, 6, 7]], max_new_tokens=1, ignore_eos=True)]
