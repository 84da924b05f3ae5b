"""A session on ``SegmentedEngine``: segments by the interpreter of networks, operations by their NumPy twins, in host memory."""

from contextlib import contextmanager

import numpy as np
import pytest

from tests.helpers.assertions import assert_close
from tests.helpers.engine_files import cuts_of, make_engine_folder, segment_plans
from tests.helpers.fake_tensorrt import FakeSegment, FakeTensorRT, install
from tests.sweeps import some
from trt_kvcache import InferenceSession, SamplingParams
from trt_kvcache.cache.edge_llm import make_cache
from trt_kvcache.ops.segments import Segment
from trt_kvcache.trt.segmented_engine import SegmentedEngine

from .conftest import GOLDEN, SIZES
from .interpreted import PROMPTS, AddressedMemory, interpreter_of
from .test_segments import Segments

pytestmark = pytest.mark.trt

#: Largest difference in float16, of the largest logit or log-probability. Seen, with sums in any order: 0.0043.
TOLERANCE = 0.015


@contextmanager
def open_sessions(rtx, tmp_path, monkeypatch, model, *, logits=1, max_embeddings=0):
    """Yield a session over the segments of a golden model, and one over its reference engine."""
    segments = Segments(rtx, tmp_path, model, "float16", logits=logits, max_embeddings=max_embeddings)
    sizes = {"max_logits_per_slot": logits, "max_embeddings": max_embeddings}
    folder = make_engine_folder(GOLDEN / model, tmp_path / "engine", segmented=True, **sizes)
    config = folder.config
    fake = FakeTensorRT(config.tensors, config.profiles)
    install(fake, monkeypatch, tmp_path / "caches")
    steps = [step for step in config.segments.stages if isinstance(step, Segment)]
    for plan, step, definition in zip(segment_plans(cuts_of(config.segments.stages)), steps, segments.definitions, strict=True):
        fake.segments[plan] = FakeSegment(fake, step.tensors[0].name, step.tensors)
        fake.segments[plan].run = interpreter_of(segments.tensorrt, definition, segments.arrays)
    memory = AddressedMemory()
    with folder.read_plan() as plan:  # SegmentedEngine.open wants a GPU
        engine = SegmentedEngine(fake.loaded, plan, memory=memory, config=config, constants=folder.read_constants(), cuda_graphs=False)
    options = {**SIZES, **sizes, "attention": "plugin", "dtype": "float16"}
    with (
        InferenceSession(engine, make_cache(config.cache, memory=memory), names=config.names, model=config.model) as ours,
        InferenceSession.from_model(GOLDEN / model, engine="reference", **options) as reference,
    ):
        yield ours, reference


@pytest.mark.parametrize(
    "model",
    some(["qwen2-tied", "llama-linear", "gemma2", "ministral3-window", "hunyuan", "cohere2", "lfm2", "bamba", "qwen3_next", "mamba2"], 5),
)
def test_a_session_over_segments_gives_the_same_logits(rtx, tmp_path, monkeypatch, model):
    sampling = [SamplingParams(max_new_tokens=count, ignore_eos=True) for count in (6, 9, 3)]
    with open_sessions(rtx, tmp_path, monkeypatch, model) as (ours, reference):
        assert_close(ours.prefill(PROMPTS), reference.prefill(PROMPTS), TOLERANCE)
        for tokens in ([3, 4, 5], [6, 7, 8]):
            assert_close(ours.decode(tokens), reference.decode(tokens), TOLERANCE)
        both = [[event.token for event in session.generate(PROMPTS, sampling)] for session in (ours, reference)]
        assert len(both[0]) == 18
        assert both[0] == both[1]


def test_a_session_over_segments_has_every_logit(rtx, tmp_path, monkeypatch):
    with open_sessions(rtx, tmp_path, monkeypatch, "qwen2-tied", logits=7) as (ours, reference):
        for one, other in zip(ours.score(PROMPTS), reference.score(PROMPTS), strict=True):
            assert_close(one.logprobs[1:], other.logprobs[1:], TOLERANCE)
        for rows, counts in (([[3, 4, 5, 6], [7], [8, 9]], [2, 1, 1]), ([[1], [2], [3]], [1, 1, 1]), ([[1, 2], [], [5, 6]], [2, 0, 1])):
            if not len(ours.cache.host_kv_cache_lengths):
                assert_close(ours.prefill(PROMPTS), reference.prefill(PROMPTS), TOLERANCE)
            found, expected = (session.verify(rows) for session in (ours, reference))
            given = ~np.isnan(expected)
            np.testing.assert_array_equal(~np.isnan(found), given)
            assert_close(found[given], expected[given], TOLERANCE)
            for session in (ours, reference):
                session.accept(counts)


@pytest.mark.parametrize("model", ["llama-linear", "gemma2"])
def test_rows_come_in_within_the_first_segment(rtx, tmp_path, monkeypatch, model):
    """Of a model without an embedding multiplier, and of one with it, which does not scale rows."""
    with open_sessions(rtx, tmp_path, monkeypatch, model, max_embeddings=4) as (ours, reference):
        rows = np.random.default_rng(0).normal(size=(3, reference.model.hidden_size))
        found = []
        for session in (ours, reference):
            first, second, third = session.add_embeddings(rows)
            prompts = [[5, first, second, 30, 11, 2, 7, 40, 1, 12, 13, third, 15], [8], [third, 22, 4]]
            found.append(np.stack([session.prefill(prompts), session.decode([3, 4, 5]), session.append([[1], [first], [second]])]))
        assert_close(*found, TOLERANCE)
