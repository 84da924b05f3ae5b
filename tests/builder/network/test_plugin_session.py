"""Sessions over networks with plugin layers, by the interpreter of networks and the NumPy twin of the plugin's kernels, in host memory.

K and V are in 16 bits, and quantized in each way; layers are equal, and differ in everything, or have experts.
"""

from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.helpers.assertions import assert_close, raises
from tests.helpers.engine_files import PLAN, make_config
from tests.helpers.fake_tensorrt import FakeTensorRT, install
from tests.helpers.mixed_layers import RandomCheckpoint, mixed_model
from tests.helpers.models import SMALL
from tests.trt.plugin.on_host import run_plugins_on_host
from trt_kvcache import HostMemory, InferenceSession, KVCacheManager, ModelIdentity
from trt_kvcache.checkpoint.weights_summary import WeightsSummary
from trt_kvcache.engine.quantized_kv import QuantizedKV
from trt_kvcache.engine_folder.config import EngineFolderConfig
from trt_kvcache.engine_folder.consistency import check_consistency
from trt_kvcache.engine_folder.v_outputs import v_output_nbytes, v_outputs
from trt_kvcache.errors import BindingError, EngineError
from trt_kvcache.model import ModelConfig
from trt_kvcache.reference import ReferenceEngine
from trt_kvcache.sequences.prompt_cache import PromptCache
from trt_kvcache.trt import graph_engine, tensorrt_engine
from trt_kvcache.trt.tensorrt_engine import TensorRTEngine

from . import conftest, interpreted
from .interpreted import AddressedMemory, CapturingMemory, interpreter_of, serve
from .interpreter import interpret
from .plugin_networks import define_with_plugin_layers

pytestmark = pytest.mark.trt

EQUAL, MIXED = "equal layers", "layers of different sizes"
MODELS = {
    EQUAL: ModelConfig.from_dict({**SMALL, "head_dim": 64, "num_hidden_layers": 2}),
    MIXED: mixed_model(64, 128, 256, 80),  # heads, windows, softcap, scale, RoPE of a part and none, per-layer inputs
}

#: Layers with experts, and the schemes of their weights: in 16 bits, and packed.
EXPERTS = {"experts": None, "experts in int8": "int8", "experts in int4": "int4:32"}
_EXPERT_SIZES = {"head_dim": 64, "hidden_size": 64, "moe_intermediate_size": 32, "num_experts": 5, "num_experts_per_tok": 2}
WITH_EXPERTS = ModelConfig.from_dict({**SMALL, "model_type": "qwen3_moe", "num_hidden_layers": 2, **_EXPERT_SIZES})

#: Static scales of K and V that hold every row of either model, with room.
_HEADS = [tuple(0.02 + 0.01 * head for head in range(count)) for count in (2, 2, 3, 1)]
_STATIC = {"head": [(scales, scales) for scales in _HEADS], "tensor": [(0.03, 0.02)] * 4}

#: How K and V may be stored.
FORMS: dict[str, tuple[str, str] | None] = {
    "16 bits": None,
    "fp8 by token": ("fp8", "token"),
    "int8 by token": ("int8", "token"),
    "fp8 by head": ("fp8", "head"),
    "int8 by tensor": ("int8", "tensor"),
}

#: Longer than an enqueue takes, of one token, and between.
PROMPTS = [[5, 9, 3, 30, 11, 2, 7, 36, 1, 12, 13, 14, 15], [8], [21, 22, 4]]

#: Of logits of a model with experts. Seen: 0.01
EXPERTS_TOLERANCE = 0.03

#: Of logits, relative to the largest. An element of K or V that is rounded the other way is off by 1/14 of itself in fp8. Seen: 0.0083,
#: 0.127 and 0.053.
TOLERANCE = {None: 0.02, "fp8": 0.16, "int8": 0.07}


class Opened(RandomCheckpoint):
    """What a build reads of a checkpoint, too."""

    adapter = None

    @property
    def weights(self):
        return WeightsSummary(format="float32", is_quantized=False, nbytes=self.nbytes, step_nbytes=self.nbytes)

    def fingerprint(self):
        return "0" * 64

    def release(self, name):
        pass


def quantized_of(model, form):
    if FORMS[form] is None:
        return None
    dtype, scales = FORMS[form]
    return QuantizedKV(dtype, scales, _STATIC[scales][: len(model.kv_layers)] if scales in _STATIC else ())


@dataclass
class Made:
    """A model with plugin attention on a stand-in of TensorRT."""

    checkpoint: Any
    config: EngineFolderConfig
    fake: FakeTensorRT


@pytest.fixture
def make(rtx, monkeypatch, tmp_path):
    """Return ``make(model, form, logits=1, flavour="tensorrt_rtx", has_v_outputs=False, draft_tree=None)``."""

    def make_model(model, form, logits=1, flavour="tensorrt_rtx", has_v_outputs=False, draft_tree=None):
        checkpoint = Opened(MODELS.get(model, WITH_EXPERTS), EXPERTS.get(model))
        options = {"flavour": flavour, "v_outputs": has_v_outputs, "draft_tree": draft_tree}
        monkeypatch.setattr(conftest, "Checkpoint", SimpleNamespace(open=lambda folder: nullcontext(checkpoint)))
        run_plugins_on_host(monkeypatch)
        quantized = quantized_of(checkpoint.config, form)
        network = define_with_plugin_layers(rtx, model, quantized=quantized, logits=logits, **options)
        built_by = {"attention_variant": "plugin", "tensorrt_flavour": flavour, "draft_tree": draft_tree}
        built_by["v_outputs"] = v_outputs(checkpoint.config, "float16") if has_v_outputs else ()
        config = make_config(checkpoint, quantized=quantized, max_logits_per_slot=logits, **built_by)
        check_consistency(config)
        fake = FakeTensorRT(network.definition.tensors, config.profiles, plan=PLAN)
        install(fake, monkeypatch, tmp_path / "caches", flavour)
        monkeypatch.setattr(tensorrt_engine, "register", lambda tensorrt: fake.calls.append(("register",)))
        fake.alias_of = lambda name: None  # TensorRT does not report what a plugin aliases
        fake.run = interpreter_of(rtx, network.definition, network.constants, network.plugins if flavour == "tensorrt" else ())
        return Made(checkpoint, config, fake)

    return make_model


def open_engine(made, config=None, *, capturing=False):
    memory = CapturingMemory(made.fake) if capturing else AddressedMemory()
    config = config or made.config
    return TensorRTEngine(made.fake.loaded, PLAN, memory=memory, names=config.names, config=config, plan_sha256="")


def session_over(engine, config, prompt_cache=0):
    cache = KVCacheManager(config.cache, memory=engine.memory)
    poison(cache)
    identity = ModelIdentity(fingerprint="the same")
    return InferenceSession(engine, cache, prompt_cache=PromptCache(cache, max_bytes=prompt_cache), identity=lambda: identity)


def poison(cache):
    """Fill all of a cache with what must not be read."""
    views = [view for group in cache.kv_head_dim_groups for view in group.layer_infos.views]
    views += [] if cache.kv_scale_rows is None else cache.kv_scale_rows.views
    for view in views:
        cache.memory.array(view)[...] = np.nan if view.dtype != "int8" else 127


@contextmanager
def open_sessions(made, *, capturing=False, **options):
    """Yield a session over TensorRT, and one over the reference engine."""
    config = made.config
    reference = ReferenceEngine(
        made.checkpoint, kv=config.cache, dtype=config.dtype, max_prefill_length=config.max_prefill_length,
        max_logits_per_slot=config.max_logits_per_slot, attention="plugin", memory=HostMemory(),
    )  # fmt: skip
    with (
        session_over(open_engine(made, capturing=capturing), config, **options) as ours,
        session_over(reference, config, **options) as other,
    ):
        yield ours, other


def tolerance_of(form):
    return TOLERANCE[FORMS[form] and FORMS[form][0]]


def stored(cache, slot, count):
    """The first rows of a slot as they are stored, and their scales by token."""
    saved = cache.capture_kv_cache(slot, count, stream=cache.memory.create_stream())
    return [tensor.numpy()[:, :, :count].tobytes() for tensor in saved]


cases = pytest.mark.parametrize(("model", "form"), [(model, form) for model in MODELS for form in FORMS])
forms = pytest.mark.parametrize("form", FORMS)


@cases
def test_ragged_prompts_in_chunks_decode_steps_and_next_turns(make, model, form):
    with open_sessions(make(model, form)) as both:
        for call in (
            lambda session: session.prefill(PROMPTS),
            lambda session: session.decode([3, 4, 5]),
            lambda session: session.append([[], [7, 8, 9], [3, 1]])[1],
            lambda session: session.decode([6, 7, 8]),
        ):
            found, expected = map(call, both)
            assert_close(found, expected, tolerance_of(form))


@cases
def test_drafts(make, model, form):
    """Two to eight new tokens for each slot, of which some are kept."""
    with open_sessions(make(model, form, logits=8)) as both:
        rows = [[3, 4, 5, 6, 7, 8, 9, 10], [7, 2], [8, 9, 1, 2, 3]]
        for session in both:
            session.prefill(PROMPTS)
        for row, found, expected in zip(rows, *(session.verify(rows) for session in both), strict=True):
            assert_close(found[: len(row)], expected[: len(row)], tolerance_of(form))
        for session in both:
            session.accept([4, 1, 2])
        assert_close(*(session.decode([3, 4, 5]) for session in both), tolerance_of(form))


@pytest.mark.parametrize("model", EXPERTS)
def test_experts_in_prompts_decode_steps_and_drafts(make, model):
    """In steps of up to 33 tokens, which a plugin layer launches in parts."""
    with open_sessions(make(model, "16 bits", logits=8)) as both:
        for call in (
            lambda session: session.prefill(PROMPTS),
            lambda session: session.decode([3, 4, 5]),
            lambda session: session.append([[], [7, 8, 9], [3, 1]])[1],
        ):
            found, expected = map(call, both)
            assert_close(found, expected, EXPERTS_TOLERANCE)
        rows = [[3, 4, 5, 6, 7, 8, 9, 10], [7, 2], [8, 9, 1, 2, 3]]
        for row, found, expected in zip(rows, *(session.verify(rows) for session in both), strict=True):
            assert_close(found[: len(row)], expected[: len(row)], EXPERTS_TOLERANCE)


def test_steps_with_experts_are_replayed_and_survive_compaction_and_snapshots(make, tmp_path):
    made, found = make("experts in int8", "16 bits"), []
    for capturing in (False, True):
        with open_sessions(made, capturing=capturing) as (ours, _):
            tokens = serve(ours, PROMPTS)
            ours.prefill(PROMPTS)
            ours.save_snapshot(tmp_path / f"first {capturing}", 0)
            ours.cache.compact_batch([1, -1, 0], 3, 2, stream=ours.cache.memory.create_stream())
            tokens += [ours.prefill([PROMPTS[2], PROMPTS[0]]).tobytes(), ours.decode([3, 4]).tobytes()]
            tokens += [one.token for one in ours.resume(tmp_path / f"first {capturing}", max_new_tokens=3, temperature=0.0)]
            found.append(tokens)
            replayed = ours.cache.memory.replayed if capturing else {}
    assert found[0] == found[1]
    assert sum(replayed.values()) > 2


@pytest.mark.parametrize("form", [pytest.param("16 bits", marks=pytest.mark.slow), "int8 by token"])
def test_steps_that_are_replayed_compute_the_same(make, monkeypatch, form):
    """Bit for bit as eager ones, with prefills, verifications and other batches in between, and after a step that failed."""
    monkeypatch.setattr(graph_engine, "RUNS_OF_A_PREFILL", 1)
    found = []
    for capturing in (False, True):
        made = make(EQUAL, form, logits=8)
        with open_sessions(made, capturing=capturing) as (ours, _):
            tokens = serve(ours, PROMPTS)
            made.fake.errors["execute_async_v3"] = "LOST"
            ours.engine.use_profile(0)
            with pytest.raises(EngineError, match="LOST"):
                ours.prefill([[1, 2, 3], [4]])
            made.fake.errors.clear()
            for _ in range(4):
                ours.prefill(PROMPTS)
                tokens += [logits.tobytes() for logits in ours.verify([[3, 4], [7, 2], [8, 9]])]
                ours.accept([1, 0, 1])
                tokens.append(ours.decode([3, 4, 5]).tobytes())
            found.append(tokens)
            replayed = ours.cache.memory.replayed if capturing else None
    assert found[0] == found[1]
    assert min(replayed[profile] for profile in range(3)) > 2


@forms
def test_what_is_kept_for_later_comes_back(make, tmp_path, form):
    """By the prompt cache, by compaction and by a snapshot, which another engine resumes."""
    with open_sessions(make(MIXED, form), prompt_cache=1 << 20) as (ours, reference):
        ours.prefill([PROMPTS[0], PROMPTS[2]])
        first, second = stored(ours.cache, 0, 12), stored(ours.cache, 1, 2)  # the last token is computed again
        ours.save_snapshot(tmp_path / "second", 1)
        ours.cache.compact_batch([-1, 0], 2, 1, stream=ours.cache.memory.create_stream())
        assert stored(ours.cache, 0, 2) == second
        poison(ours.cache)
        prompts = [PROMPTS[0], PROMPTS[1]]
        found = ours.prefill(prompts)
        assert ours.statistics.reused_tokens == 12
        assert_close(found, reference.prefill(prompts), tolerance_of(form))
        assert stored(ours.cache, 0, 12) == first
        for session in (ours, reference):
            list(session.resume(tmp_path / "second", max_new_tokens=1, temperature=0.0))
            assert stored(session.cache, 0, 2) == second


@pytest.mark.parametrize("form", ["16 bits", "int8 by token", "fp8 by head"])
def test_a_decode_step_binds_nothing(make, form):
    made = make(EQUAL, form)
    with open_sessions(made) as (ours, _):
        assert made.fake.calls[0] == ("register",)
        ours.prefill(PROMPTS)
        for token in range(3, 6):
            made.fake.calls.clear()
            ours.decode([token, token, token])
        assert [call[0] for call in made.fake.calls] == ["execute_async_v3"]


@pytest.mark.parametrize("form", ["int8 by token", "fp8 by head"])
def test_the_engine_takes_codes_and_its_plan_words(make, form):
    made = make(EQUAL, form)
    with open_sessions(made) as (ours, _):
        engine = ours.engine
        assert dict(engine.tensors) == {spec.name: spec for spec in made.config.tensors}
        ours.prefill(PROMPTS)
        ours.decode([3, 4, 5])
        shapes = made.fake.contexts[1].shapes
        assert (shapes["past_key_values_1"], shapes["kv_scales_1"][:2]) == ((3, 2, 2, 38, 16), (3, 2) if "token" in form else (2, 2))
        with raises(BindingError, "`past_key_values_0`", expected="(1, 2, 2, 38, 64) to (3, 2, 2, 38, 64)"):
            engine.set_input_shape("past_key_values_0", (3, 2, 2, 38, 16))


@pytest.mark.parametrize(("form", "other"), [("int8 by token", "fp8 by token"), ("fp8 by head", "16 bits"), ("16 bits", "int8 by token")])
def test_a_cache_of_another_dtype_is_refused(make, form, other):
    """TensorRT would not know."""
    wrong, right = make(EQUAL, other).config, make(EQUAL, form)
    engine = open_engine(right)
    with pytest.raises(BindingError, match=r"^`past_key_values_0` expects .*: dtype differs \(engine "):
        session_over(engine, wrong)
    engine.close()


@pytest.mark.parametrize(("form", "other"), [("int8 by token", "fp8 by head"), ("int8 by token", "16 bits"), ("16 bits", "int8 by token")])
def test_a_plan_of_another_form_is_refused(make, form, other):
    config, made = make(EQUAL, other).config, make(EQUAL, form)
    with pytest.raises(EngineError, match=r"^the engine('s tensors are| is) not "):
        open_engine(made, config)


@pytest.mark.parametrize(
    ("model", "form"),
    [(EQUAL, "16 bits"), pytest.param(MIXED, "16 bits", marks=pytest.mark.slow), (MIXED, "int8 by token"), (EQUAL, "fp8 by head")],
)
def test_v_outputs_are_the_rows_that_the_reference_appends(make, monkeypatch, model, form):
    """As projected, in 16 bits: RoPE and quantization are for later."""
    found = {}
    monkeypatch.setattr(interpreted, "interpret", lambda *network: found.update(interpret(*network)) or found)
    made, exact = make(model, form, flavour="tensorrt", has_v_outputs=True), make(model, "16 bits").config
    prompts = [[5, 9, 3, 30, 11], [8], [21, 22, 4]]
    reference = ReferenceEngine(
        made.checkpoint, kv=exact.cache, dtype="float16", max_prefill_length=11, attention="plugin", memory=HostMemory()
    )
    with session_over(open_engine(made), made.config) as ours, session_over(reference, exact) as other:
        for session in (ours, other):
            session.prefill(prompts)
        for layer, view in enumerate(other.cache.kv_layers.combined):
            rows = other.cache.memory.array(view)[:, 1].transpose(0, 2, 1, 3)
            for slot, prompt in enumerate(prompts):
                assert_close(found[f"v_{layer}"][slot, : len(prompt)], rows[slot, : len(prompt)], tolerance_of(form))


@pytest.mark.parametrize("form", ["16 bits", pytest.param("int8 by token", marks=pytest.mark.slow)])
def test_v_outputs_change_nothing(make, form):
    """Bit for bit, in eager steps and replayed ones."""
    found = []
    for has_v_outputs, capturing in ((False, False), (True, False), (True, True)):
        made = make(MIXED, form, logits=8, flavour="tensorrt", has_v_outputs=has_v_outputs)
        with open_sessions(made, capturing=capturing) as (ours, _):
            tokens = [ours.prefill(PROMPTS).tobytes()]
            for _ in range(4):
                tokens += [logits.tobytes() for logits in ours.verify([[3, 4], [7, 2], [8, 9]])]
                ours.accept([1, 0, 1])
                tokens.append(ours.decode([3, 4, 5]).tobytes())
            replayed = sum(ours.cache.memory.replayed.values()) if capturing else None
        found.append(tokens)
    assert found[0] == found[1] == found[2]
    assert replayed >= 2


def test_v_outputs_have_memory_of_the_engine(make):
    made = make(MIXED, "16 bits", flavour="tensorrt", has_v_outputs=True)
    without = make(MIXED, "16 bits", flavour="tensorrt")
    sizes = []
    for one in (made, without):
        engine = open_engine(one)
        assert dict(engine.tensors) == {spec.name: spec for spec in one.config.tensors}
        sizes.append(engine.memory.live_nbytes)
        engine.close()
        assert engine.memory.live_nbytes == 0
    nbytes = v_output_nbytes(made.config.v_outputs, made.config.profiles)
    mixers = made.config.model.kv_layers
    assert nbytes == tuple(-(-3 * 11 * mixer.num_kv_heads * mixer.head_dim * 2 // 256) * 256 for mixer in mixers)
    assert sizes[0] - sizes[1] == sum(nbytes)
