"""Sessions over networks with states: ``TensorRTEngine`` with the interpreter of networks in its contexts, in host memory."""

from contextlib import contextmanager

import numpy as np
import pytest

from tests.helpers.engine_files import PLAN, make_engine_folder
from tests.helpers.fake_tensorrt import FakeTensorRT, install
from tests.helpers.models import HYBRID_TOLERANCES, attentions_of, model_of
from tests.reference.rig import MODELS, golden
from tests.sweeps import each_once, one_of_each_family, some
from trt_kvcache import InferenceSession, SamplingParams
from trt_kvcache.cache.edge_llm import make_cache
from trt_kvcache.trt import graph_engine
from trt_kvcache.trt.tensorrt_engine import TensorRTEngine

from .conftest import GOLDEN, MAX_SEQUENCE_LENGTH, SIZES
from .interpreted import PROMPTS, AddressedMemory, CapturingMemory, interpreter_of, serve
from .test_network_values import GOLDEN_TOLERANCE, Network, assert_near

pytestmark = pytest.mark.trt

#: Golden models with states, with the attention that is chosen for them: ``test_network_values`` has the other one.
STATEFUL = [
    (model, found[0]) for model in MODELS if model_of(model).recurrent_layers and (found := attentions_of(model, MAX_SEQUENCE_LENGTH))
]


@contextmanager
def open_sessions(define, tmp_path, monkeypatch, model, attention, dtype, *, capturing=False):
    """Yield a session over the network of a golden model, one over its reference engine, and the stand-in of TensorRT."""
    defined = define(model, dtype=dtype, attention=attention)
    config = make_engine_folder(GOLDEN / model, tmp_path / "engine", attention_variant=attention, dtype=dtype).config
    fake = FakeTensorRT(config.tensors, config.profiles, plan=PLAN)
    install(fake, monkeypatch, tmp_path / "caches")
    fake.run = interpreter_of(defined.tensorrt, defined.definition, defined.constants)
    memory = CapturingMemory(fake) if capturing else AddressedMemory()
    engine = TensorRTEngine(fake.loaded, PLAN, memory=memory, names=config.names, config=config, plan_sha256="")
    with (
        InferenceSession(engine, make_cache(config.cache, memory=memory), names=config.names) as ours,
        InferenceSession.from_model(GOLDEN / model, engine="reference", attention=attention, dtype=dtype, **SIZES) as reference,
    ):
        yield ours, reference, fake


@pytest.mark.parametrize(("model", "attention", "dtype"), each_once(some(one_of_each_family(STATEFUL), 5), ["float32", "float16"]))
def test_a_session_gives_the_logits_of_hugging_face_and_of_the_reference_engine(define, tmp_path, monkeypatch, model, attention, dtype):
    """Ragged prompts, one of them in chunks, and decode steps; then the next turns of two of them."""
    ids, expected = golden(model)
    ids = ids.tolist()
    lengths = sorted(expected)
    with open_sessions(define, tmp_path, monkeypatch, model, attention, dtype) as (ours, reference, _):
        prompts = [ids[: lengths[0]], PROMPTS[1], PROMPTS[0]]
        steps = [session.prefill(prompts) for session in (ours, reference)]
        for tokens in zip(*(ids[lengths[0] : lengths[-1]], *(range(4, 70),) * 2), strict=False):
            assert_near(steps[0], steps[1], HYBRID_TOLERANCES[dtype])
            held = len(ours.tokens(0))
            if held in expected:
                assert_near(steps[0][0], expected[held], GOLDEN_TOLERANCE[dtype])
            steps = [session.decode(list(tokens)) for session in (ours, reference)]
            if held == lengths[0] + 3:
                turns = [[], [7, 8, 9], [3]]
                for one, other in zip(*(session.append(turns)[1:] for session in (ours, reference)), strict=True):
                    assert_near(one, other, HYBRID_TOLERANCES[dtype])
        assert_near(steps[0][0], expected[lengths[-1]], GOLDEN_TOLERANCE[dtype])


@pytest.mark.parametrize("model", some(one_of_each_family(dict(STATEFUL)), 3))
def test_a_decode_step_binds_nothing(define, tmp_path, monkeypatch, model):
    """Steps take turns with two contexts of the profile, one for either buffer of states."""
    sampling = [SamplingParams(max_new_tokens=count, ignore_eos=True) for count in (6, 9, 3)]
    with open_sessions(define, tmp_path, monkeypatch, model, attentions_of(model, MAX_SEQUENCE_LENGTH)[0], "float32") as both:
        ours, reference, fake = both
        tokens = [[event.token for event in session.generate(PROMPTS, sampling)] for session in (ours, reference)]
        assert len(tokens[0]) == 18
        assert tokens[0] == tokens[1]
        for session in (ours, reference):
            session.prefill(PROMPTS)
        for token in range(3, 6):
            fake.calls.clear()
            ours.decode([token, token, token])
        assert [call[0] for call in fake.calls] == ["execute_async_v3"]
    assert len(fake.contexts) == 2 * len(fake.profiles)
    states = [{name: at for name, at in context.addresses.items() if "state" in name} for context in (fake.contexts[1], fake.contexts[3])]
    for name, address in states[0].items():
        other = name.removeprefix("present_") if name.startswith("present_") else f"present_{name}"
        assert states[1][other] == address != states[1][name]


@pytest.mark.parametrize("model", [pytest.param("granitemoehybrid-bias", marks=pytest.mark.slow), "qwen3_next"])
def test_steps_that_are_replayed_compute_the_same(define, tmp_path, monkeypatch, model):
    """Each graph has a context for either order of the two buffers of states; prefills and other batches run in between."""
    monkeypatch.setattr(graph_engine, "RUNS_OF_A_PREFILL", 1)
    attention = attentions_of(model, MAX_SEQUENCE_LENGTH)[0]
    with open_sessions(define, tmp_path, monkeypatch, model, attention, "float32", capturing=True) as (ours, reference, _):
        assert serve(ours) == serve(reference)
        replayed = ours.cache.memory.replayed
        assert replayed[0] > 2 < replayed[1]


@pytest.mark.parametrize(("model", "attention", "dtype"), each_once(one_of_each_family(STATEFUL), ["float32", "float16"]))
def test_padding_leaves_no_trace(define, model, attention, dtype):
    """Not in a bit of states, nor of logits; and a slot without new tokens keeps its states."""
    defined = define(model, dtype=dtype, attention=attention)
    random = np.random.default_rng(5)
    ids = random.integers(0, model_of(model).vocab_size, (3, 7)).astype(np.int32)
    new = [4, 7, 0]
    other = ids.copy()
    other[0, 4:], other[2] = ids[1, :3], ids[1]
    found = []
    for tokens in (ids, other):
        network = Network(defined)
        network.step(ids[:, :3], [0, 0, 0], [2, 2, 2])
        before = [state.copy() for state in network.states()]
        logits = network.step(tokens, [3, 3, 3], [3, 6, 0], new=new)
        for state, old in zip(network.states(), before, strict=True):
            assert state[2].tobytes() == old[2].tobytes()
            assert (state[:2] != old[:2]).any()
        found.append((logits[:2], [state.tobytes() for state in network.states()]))
    np.testing.assert_array_equal(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]
