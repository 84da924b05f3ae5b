"""Sessions over networks with inputs for adapters, by the interpreter of networks: the logits of the reference engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers.adapters import linear_shapes, write_adapter, write_two_adapters
from tests.helpers.assertions import assert_close, raises
from tests.helpers.engine_files import PLAN, make_config
from tests.helpers.fake_tensorrt import FakeTensorRT, install
from tests.helpers.models import attentions_of, model_of
from tests.paths import GOLDEN
from tests.sweeps import some
from tests.trt.plugin.on_host import array_at
from trt_kvcache import InferenceSession, build_engine
from trt_kvcache.builder.definition import define_decoder
from trt_kvcache.builder.serialization import make_config as make_builder_config
from trt_kvcache.cache.edge_llm import make_cache
from trt_kvcache.checkpoint.adapters.adapter_set import AdapterSet
from trt_kvcache.engine.adapter_inputs import RANK_ADAPTERS, SLOT_ADAPTERS, AdapterInputs
from trt_kvcache.engine_folder.config import EngineFolderConfig
from trt_kvcache.engine_folder.consistency import check_consistency
from trt_kvcache.engine_folder.folder import EngineFolder
from trt_kvcache.errors import ConfigError, EngineError
from trt_kvcache.memory.shapes import dense_nbytes
from trt_kvcache.reference import ReferenceEngine
from trt_kvcache.trt import graph_engine
from trt_kvcache.trt.tensorrt_engine import TensorRTEngine

from .conftest import MAX_SEQUENCE_LENGTH, SIZES, declared, recording
from .interpreted import AddressedMemory, CapturingMemory, interpreter_of
from .resolved import resolved

pytestmark = pytest.mark.trt

#: Of one token, and longer than an enqueue takes, in a slot that is not the first one.
PROMPTS = [[8], [21, 22, 4], [5, 9, 3, 30, 11, 2, 7, 36, 1, 12, 13, 14, 15]]
NAMES = ("sql", None, "poems")

#: Of the largest logit. Seen: 1e-6 and 0.016.
TOLERANCE = {"float32": 2e-5, "float16": 0.05, "bfloat16": 0.1}

#: Fused tensors, values that are keys, RoPE in adjacent pairs, two mixers in a layer, states of each kind, and plain ones.
FAMILIES = (
    "phi3-long",
    "falcon_h1",
    "gemma4",
    "gemma4-ple",
    "ernie4_5",
    "qwen3_next",
    "lfm2",
    "bamba",
    "llama-linear",
    "cohere2",
    "qwen2-tied",
)


@dataclass
class Made:
    """A network with inputs for adapters on a stand-in of TensorRT."""

    model: str
    config: EngineFolderConfig
    fake: FakeTensorRT

    def open(self, folders: Any, *, capturing: bool = False) -> InferenceSession:
        """Open a session with the adapters of these folders; without any if there is none."""
        config = self.config
        memory = CapturingMemory(self.fake) if capturing else AddressedMemory()
        adapters = AdapterSet.open(config.model, folders) if folders else None
        engine = TensorRTEngine(self.fake.loaded, PLAN, memory=memory, names=config.names, config=config, plan_sha256="", adapters=adapters)
        return InferenceSession(engine, make_cache(config.cache, memory=memory), names=config.names)

    @contextmanager
    def open_both(self, folders: Any) -> Iterator[tuple[InferenceSession, InferenceSession]]:
        """Yield a session over TensorRT, and one over the reference engine."""
        options: dict[str, Any] = {**SIZES, "attention": self.config.attention_variant, "dtype": self.config.dtype}
        with (
            self.open(folders) as ours,
            InferenceSession.from_model(GOLDEN / self.model, engine="numpy", **options, adapters=folders) as other,
        ):
            assert isinstance(other.engine, ReferenceEngine)
            yield ours, other


@pytest.fixture(scope="module")
def folders_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Path]]:
    """Return the function that writes the adapters of a golden model, once."""
    return cache(lambda name: write_two_adapters(tmp_path_factory.mktemp(name), model_of(name)))


@pytest.fixture
def make(rtx: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Made]:
    """Return ``make(model, dtype="float32", rank=13, modules=None)``."""

    def make_model(model: str, dtype: str = "float32", rank: int = 13, modules: Any = None) -> Made:
        attention = attentions_of(model, MAX_SEQUENCE_LENGTH)[0]
        asked = {"dtype": dtype, "attention": attention, "adapters_rank": rank, "adapters_modules": modules}
        with recording(rtx, model) as (checkpoint, constants, messages):
            options = resolved(checkpoint.config, **SIZES, **asked)
            definition = define_decoder(checkpoint, options, options.cache_for(checkpoint.config), rtx, messages)
            make_builder_config(definition, options, rtx, messages)  # the profiles take the shapes
            config = make_config(checkpoint, attention_variant=attention, dtype=dtype, adapters=options.adapter_inputs)
        check_consistency(config)
        specs = {spec.name: (spec.mode, spec.dtype, spec.shape) for spec in definition.tensors}
        assert declared(rtx, definition.network) == specs
        fake = FakeTensorRT(definition.tensors, config.profiles, plan=PLAN)
        install(fake, monkeypatch, tmp_path / "caches")
        fake.run = interpreter_of(rtx, definition, constants)
        return Made(model, config, fake)

    return make_model


def logits_of(session: InferenceSession, adapter: Any = NAMES) -> np.ndarray[Any, Any]:
    """Return the logits ``[steps, 3, vocab]`` of a prefill in chunks, of decode steps and of next turns."""
    found = [session.prefill(PROMPTS, adapter=adapter)] + [session.decode([token, token + 1, 9]) for token in (3, 4)]
    found += [session.append([[7, 8, 9], [3], [1, 2]]), session.decode([6, 7, 8])]
    return np.stack(found)


@pytest.mark.parametrize("model", some(FAMILIES, 5))
def test_each_slot_has_its_adapter(make: Any, folders_of: Any, model: str) -> None:
    with make(model).open_both(folders_of(model)) as (ours, reference):
        assert ours.adapters == ("sql", "poems")
        for names in (NAMES, ("poems", "poems", "sql"), None):
            assert_close(logits_of(ours, names), logits_of(reference, names), TOLERANCE["float32"])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_in_16_bits(make: Any, folders_of: Any, dtype: str) -> None:
    with make("qwen3-sharded", dtype).open_both(folders_of("qwen3-sharded")) as (ours, reference):
        assert_close(logits_of(ours), logits_of(reference), TOLERANCE[dtype])


@pytest.mark.parametrize("model", ["llama", pytest.param("falcon_h1", marks=pytest.mark.slow)])
def test_a_slot_without_an_adapter_is_that_of_the_base_model(make: Any, folders_of: Any, model: str) -> None:
    """Bit for bit: next to others, and in a session without adapters, whose inputs are zeros."""
    made = make(model)
    with made.open(None) as plain, made.open(folders_of(model)) as ours, made.open_both(None) as (_, reference):
        assert plain.adapters == ()
        base = logits_of(plain, None)
        np.testing.assert_array_equal(logits_of(ours, ("sql", None, "poems"))[:, 1], base[:, 1])
        np.testing.assert_array_equal(logits_of(ours, None), base)
        assert_close(base, logits_of(reference, None), TOLERANCE["float32"])


def test_infinite_ranks_of_another_adapter(make: Any, tmp_path: Path) -> None:
    """In 16 bits ``A x`` of one adapter may overflow; a slot with another one, or none, does not see it."""
    model = model_of("llama")
    shapes = linear_shapes(model)
    folders = {name: write_adapter(tmp_path / name, shapes, rank=2, seed=len(name), lora_alpha=0.3) for name in ("big", "small")}
    made = make("llama", "float16")
    with made.open({"small": folders["small"]}) as alone:
        expected = logits_of(alone, (None, None, "small"))
    with made.open(folders) as ours, np.errstate(all="ignore"):
        arrays_of(made)["lora_a_q_0"][0, :2] = 6e4
        found = logits_of(ours, ("big", None, "small"))
    np.testing.assert_array_equal(found[:, 1:], expected[:, 1:])
    assert not np.isfinite(found[0, 0]).all()


def arrays_of(made: Made) -> dict[str, np.ndarray[Any, Any]]:
    """Return the inputs for adapters by name, as they are bound in the session that was opened last."""
    context = made.fake.contexts[-1]
    return {spec.name: array_at(context.addresses[spec.name], spec.shape, spec.dtype) for spec in made.config.adapter_tensors}


def test_the_bound_tensors(make: Any, folders_of: Any) -> None:
    """Both adapters in the ranks of their own, in every context and in one place; zeros where an adapter changes nothing."""
    made, folders = make("llama"), folders_of("llama")
    with made.open(folders) as ours:
        ours.prefill(PROMPTS, adapter=NAMES)
        found = {name: array.copy() for name, array in arrays_of(made).items()}
        assert not found.keys() & ours.engine.tensors.keys()
        contexts = made.fake.contexts
        assert all(context.addresses[name] == contexts[0].addresses[name] for context in contexts for name in found)
    assert found[RANK_ADAPTERS].tolist() == [1] * 3 + [2] * 5 + [-1] * 8
    assert found[SLOT_ADAPTERS].tolist()[0] == 2, "the last enqueue was of the last slot alone"
    updates = AdapterSet.open(made.config.model, folders).layer_updates(made.config.model, 0)
    for role in ("q", "k"):
        a, b = (found[f"lora_{side}_{role}_0"][0] for side in "ab")
        update = updates[f"{role}.weight"]
        count = len(update.owners)
        assert count == {"q": 8, "k": 3}[role]
        np.testing.assert_array_equal(a[:count], update.a)
        np.testing.assert_array_equal(b[:, :count], update.b)
        assert not a[count:].any()
        assert not b[:, count:].any()


def test_steps_that_are_replayed_serve_any_mix(make: Any, folders_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_engine, "RUNS_OF_A_PREFILL", 1)
    made = make("llama")
    orders = [NAMES, None, ("poems", "sql", "sql"), (None, None, "sql")] * 3
    with made.open(folders_of("llama")) as eager:
        expected = [logits_of(eager, names) for names in orders]
    with made.open(folders_of("llama"), capturing=True) as captured:
        found = [logits_of(captured, names) for names in orders]
        assert sum(captured.cache.memory.replayed.values()) > 4
    np.testing.assert_array_equal(found, expected)


def test_adapters_that_the_engine_has_no_inputs_for(make: Any, folders_of: Any, tmp_path: Path) -> None:
    folders, model = folders_of("llama"), model_of("llama")
    with raises(ConfigError, "adapters", ("8 in all", "adapters_rank"), ("3 + 5 + 1", "sql, poems, more")):
        more = write_adapter(tmp_path / "more", linear_shapes(model), rank=1)
        make("llama", rank=8).open({**folders, "more": more})
    made = make("llama", modules=("q_proj", "down_proj"))
    assert made.config.adapters.modules == ("q_proj", "down_proj")
    with raises(ConfigError, "adapters['sql']", ("q_proj, down_proj", "adapters_modules"), "model.layers.0.mlp.gate_proj"):
        made.open(folders)
    some_of = {name: shape for name, shape in linear_shapes(model).items() if name.endswith(("q_proj", "down_proj"))}
    with made.open_both({"own": write_adapter(tmp_path / "own", some_of)}) as (ours, reference):
        names = ("own", None, "own")
        assert_close(logits_of(ours, names), logits_of(reference, names), TOLERANCE["float32"])
    assert made.fake.contexts
    assert made.open(None).close() is None


def test_the_updates_are_kept_until_the_session_is_closed(make: Any, folders_of: Any) -> None:
    made = make("llama")
    sizes = []
    for folders in (None, folders_of("llama")):
        with made.open(folders) as session:
            sizes.append(session.cache.memory.live_nbytes)
        assert session.cache.memory.live_nbytes == 0
    largest = max(dense_nbytes(spec.shape, spec.dtype) for spec in made.config.adapter_tensors)
    assert sizes[1] - sizes[0] >= made.config.adapters.nbytes(made.config.model, "float32") - largest > 0


def test_a_failed_open_releases_everything(make: Any, folders_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made, memories = make("llama"), []
    original = AddressedMemory.__init__
    monkeypatch.setattr(AddressedMemory, "__init__", lambda self: memories.append(self) or original(self))
    made.fake.refuse.add("set_tensor_address")
    with pytest.raises(EngineError, match="the address of `slot_adapters` was refused"):
        made.open(folders_of("llama"))
    assert [memory.live_nbytes for memory in memories] == [0]


def test_a_plan_without_the_inputs_is_refused(make: Any, folders_of: Any) -> None:
    made = make("llama")
    made.fake.specs = {name: spec for name, spec in made.fake.specs.items() if not name.startswith("lora_b")}
    with pytest.raises(EngineError, match="`lora_b_down_0`"):
        made.open(folders_of("llama"))


@pytest.mark.parametrize("model", ["phi3-long", "bamba", pytest.param("gemma4", marks=pytest.mark.slow), "qwen3_next"])
def test_an_engine_is_built_and_records_its_inputs(tmp_path: Path, model: str) -> None:
    sizes: dict[str, Any] = {"max_batch_size": 2, "max_sequence_length": 24, "flavour": "tensorrt_rtx", "compute_capabilities": "8.6"}
    report = build_engine(GOLDEN / model, tmp_path / "engine", **sizes, adapters_rank=11)
    config = EngineFolder.open(report.path).config
    assert config.adapters == AdapterInputs.of(config.model, rank=16)
