"""Draft heads in TensorRT networks: built into one folder with their model, and run by the interpreter of networks in a session."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.helpers import eagle3, mtp
from tests.helpers.assertions import assert_close
from tests.helpers.fake_tensorrt import FakeTensorRT, install
from tests.helpers.sessions import always_drafting, by_prompt, hidden_rows
from tests.session import test_eagle3_drafter as of_eagle3, test_mtp_drafter as of_mtp
from tests.session.test_mtp_drafter import PROMPTS, params
from tests.trt.plugin.on_host import run_plugins_on_host
from trt_kvcache import Checkpoint, InferenceSession, build_engine
from trt_kvcache.builder import build_engine as building
from trt_kvcache.builder.network.graph import Graph
from trt_kvcache.engine.step_rows import ReducedLayers
from trt_kvcache.engine_folder.folder import DRAFT_HEAD_FOLDER, EngineFolder
from trt_kvcache.engine_folder.inspection import inspect_engine
from trt_kvcache.errors import ConfigError
from trt_kvcache.session import open_model as opening
from trt_kvcache.trt import tensorrt_engine
from trt_kvcache.trt.tensorrt_engine import TensorRTEngine

from .interpreted import AddressedMemory, CapturingMemory, interpreter_of

pytestmark = pytest.mark.trt

SIZES: dict[str, Any] = {"max_batch_size": 3, "max_sequence_length": 48, "max_prefill_length": 7, "dtype": "float32"}


class Built:
    """Engine folders without compiled kernels: their networks are interpreted when a session runs their engines."""

    def __init__(self, rtx: Any, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self.rtx, self.monkeypatch, self.folder = rtx, monkeypatch, folder
        self.definitions: dict[bytes, Any] = {}
        self.memory: Any = AddressedMemory()
        original = Graph.constant

        def constant(graph: Graph, name: str, array: np.ndarray[Any, Any]) -> Any:
            return original(graph, name, vars(graph).setdefault("constants", {}).setdefault(name, array))

        def serialize(definition: Any, *_: Any) -> bytes:
            plan = f"plan {len(self.definitions)} of {definition.network.name}".encode()
            self.definitions[plan] = definition
            return plan

        monkeypatch.setattr(Graph, "constant", constant)
        monkeypatch.setattr(building, "serialize", serialize)
        run_plugins_on_host(monkeypatch)
        monkeypatch.setattr(tensorrt_engine, "register", lambda tensorrt: None)
        monkeypatch.setattr(opening, "find_gpu", lambda device: None)
        monkeypatch.setattr(opening, "load_tensorrt", lambda flavour: None)
        monkeypatch.setattr(opening, "CudaMemory", lambda device, **_: self.memory)
        monkeypatch.setattr(opening, "TensorRTEngine", SimpleNamespace(open=self.open))

    def build(self, model: Path, **options: Any) -> Path:
        return build_engine(model, self.folder / "engine", **{**SIZES, "flavour": "tensorrt_rtx", **options}).path

    def open(self, folder: EngineFolder, *, memory: Any, cuda_graphs: bool, **_: Any) -> TensorRTEngine:
        config, plan = folder.config, folder.plan_path.read_bytes()
        definition = self.definitions[plan]
        fake = FakeTensorRT(definition.tensors, config.profiles, plan=plan)
        install(fake, self.monkeypatch, self.folder / "caches")
        fake.run = interpreter_of(self.rtx, definition, definition.graph.constants)
        if isinstance(memory, CapturingMemory):
            memory.watch(fake)
        return TensorRTEngine(fake.loaded, plan, memory=memory, names=config.names, config=config, plan_sha256="", cuda_graphs=cuda_graphs)


@pytest.fixture
def built(rtx: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Built:
    return Built(rtx, monkeypatch, tmp_path)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return eagle3.write_model(tmp_path_factory.mktemp("models") / "llama")


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {
            **{"embedding": True, "norm_before_residual": True, "num_key_value_heads": 3},
            **{"hidden_size": 24, "target_hidden_size": 32, "eagle_aux_hidden_state_layer_ids": [7, 0, 3]},
        },
    ],
    ids=["narrow vocabulary", "width and layers of its own"],
)
def test_logits_of_an_eagle3_head(built: Built, llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: Any) -> None:
    """In drafts of several tokens, from hidden states of the model and of the head."""
    head = eagle3.write_head(tmp_path / "head", llama, seed=3, **changes)
    engine = built.build(llama, draft_head=head, max_batch_size=1)
    config = EngineFolder.open(engine).config
    layers = tuple(changes.get("eagle_aux_hidden_state_layer_ids", (2, 3, 4)))
    assert config.hidden_layers == ReducedLayers(layers, changes.get("hidden_size", 32))
    with InferenceSession.open(engine, engine="tensorrt", draft=str(head)) as session:
        of_eagle3.check_logits(session, head, llama, monkeypatch)


@pytest.mark.parametrize(
    "changes",
    [
        {
            **{"tie_word_embeddings": False, "num_key_value_heads": 2, "num_attention_heads": 6},
            **{"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]},
        },
        pytest.param({}, marks=pytest.mark.slow),
        pytest.param({"family": "qwen3_next"}, marks=pytest.mark.slow),
    ],
    ids=["two layers", "tied", "qwen3_next"],
)
def test_logits_of_an_mtp_head(built: Built, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: Any) -> None:
    """From the states after the final norm, of a model with recurrent states."""
    model = mtp.write_mtp_model(tmp_path / "model", seed=3, **changes)
    engine = built.build(model, draft_head="mtp", max_batch_size=1)
    with InferenceSession.open(engine, engine="tensorrt", draft="mtp") as session:
        head = of_mtp.CheckedHead(session, model, monkeypatch)
        [*session.generate(PROMPTS[1:2], params()[0], draft=head.watched)]
        head.check()


@pytest.mark.parametrize(("attention", "dtype"), [("native", "float32"), pytest.param("mask", "bfloat16", marks=pytest.mark.slow)])
@pytest.mark.parametrize("draft", ["eagle3", "mtp"])
def test_hidden_states_of_a_session(built: Built, llama: Path, tmp_path: Path, draft: str, attention: str, dtype: str) -> None:
    """Those of the NumPy engine: after chunks, decode steps, and next turns of slots of different lengths."""
    model = mtp.write_mtp_model(tmp_path / "model") if draft == "mtp" else llama
    head = "mtp" if draft == "mtp" else str(eagle3.write_head(tmp_path / "head", llama))
    options = {**SIZES, "dtype": dtype, "attention": attention}
    engine, found = built.build(model, draft_head=head, **options), []
    for session in (
        InferenceSession.open(engine, engine="tensorrt", draft=head),
        InferenceSession.from_model(model, engine="numpy", draft=head, **options),
    ):
        with session:
            session.prefill(PROMPTS[:3])
            session.decode([3, 4, 5])
            session.append([[7, 8], [], [1, 2, 3]])
            session.verify([[1, 2, 3], [4, 5], [6]])
            session.accept([2, 1, 0])
            found.append([hidden_rows(session, slot, len(session.tokens(slot))) for slot in range(3)])
    assert [len(rows) for rows in found[0]] == [14, 3, 9]
    for ours, expected in zip(*found, strict=True):
        assert_close(ours, expected, 2e-5 if dtype == "float32" else 0.1)


RINGS = {"eagle3": (eagle3.write_ring_model, eagle3.write_ring_head), "mtp": (mtp.write_ring_model, None)}


@pytest.fixture(params=RINGS)
def ring(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, str]:
    """A model, and the draft head that is right: ``draft=``."""
    write_model, write_head = RINGS[request.param]
    model = write_model(tmp_path / "model")
    return model, "mtp" if write_head is None else str(write_head(tmp_path / "head", model))


@pytest.mark.parametrize("dtype", ["float32", pytest.param("float16", marks=pytest.mark.slow)])
def test_a_head_that_is_right_is_accepted(built: Built, ring: tuple[Path, str], dtype: str) -> None:
    """And the tokens are those without drafts: of more prompts than slots, greedy and sampled, in steps that are replayed."""
    (model, draft), prompts = ring, mtp.ring_prompts(4)
    engine = built.build(model, draft_head=draft, dtype=dtype)
    for memory, options in ((AddressedMemory(), {}), (CapturingMemory(), {"temperature": 0.7})):
        built.memory, asked = memory, params(15, **options)[:4]
        with (
            InferenceSession.from_model(model, engine="numpy", **{**SIZES, "dtype": dtype}) as plain,
            InferenceSession.open(engine, engine="tensorrt", draft=draft) as session,
        ):
            always_drafting(session)
            expected = by_prompt(plain.generate(prompts, asked))
            assert by_prompt(session.generate(prompts, asked)) == expected
            assert session.statistics.draft_tokens > 20
            assert session.statistics.acceptance_rate > (0.4 if options else 0.95)
            before = session.statistics.draft_tokens
            assert by_prompt(session.generate(prompts[:1], asked[0], draft="off"))[0][0] == expected[0][0]
            assert session.statistics.draft_tokens == before
    assert sum(memory.replayed.values()) > 10
    assert memory.live_nbytes == 0


def test_trees(built: Built, tmp_path: Path) -> None:
    """Of a head with an engine for as large trees as that of its model."""
    model = eagle3.write_ring_model(tmp_path / "model", head_dim=64)
    head, prompts = str(eagle3.write_ring_head(tmp_path / "head", model, head_dim=64)), mtp.ring_prompts(3)
    options = {"dtype": "float16", "attention": "plugin", "max_prefill_length": 12}
    engine = built.build(model, draft_head=head, draft_tree=9, **options)
    with (
        InferenceSession.from_model(model, engine="numpy", **{**SIZES, **options}) as plain,
        InferenceSession.open(engine, engine="tensorrt", draft=head, draft_tree=9) as session,
    ):
        always_drafting(session)
        assert by_prompt(session.generate(prompts, params(9)[:3])) == by_prompt(plain.generate(prompts, params(9)[:3]))
        assert session.statistics.draft_tokens > 2 * session.statistics.accepted_tokens > 30
    with pytest.raises(ConfigError, match="draft_tree"):
        InferenceSession.open(built.build(model, draft_head=head, **options), engine="tensorrt", draft=head, draft_tree=9)


def test_an_engine_of_the_head_is_a_draft_too(built: Built, ring: tuple[Path, str]) -> None:
    """The engine folder needs nothing else: neither the model nor the head."""
    (model, draft), prompts = ring, mtp.ring_prompts(2)
    engine = built.build(model, draft_head=draft)
    with InferenceSession.open(engine, engine="tensorrt", draft=draft) as session:
        expected = by_prompt(session.generate(prompts, params()[:2]))
    with pytest.raises(ConfigError, match="expected the engine folder of a model, got that of a draft head"):
        InferenceSession.open(engine / DRAFT_HEAD_FOLDER, engine="tensorrt")
    with pytest.raises(ConfigError, match=r"expected the folder of an EAGLE-3 head, got .*draft_head, an engine of one"):
        InferenceSession.open(engine, engine="numpy", draft=str(engine / DRAFT_HEAD_FOLDER))
    moved = engine.rename(engine.parent / "moved")
    for place in {str(model), draft} - {"mtp"}:
        shutil.rmtree(place)
    with InferenceSession.open(moved, engine="tensorrt", draft=str(moved / "draft_head")) as session:
        assert by_prompt(session.generate(prompts, params()[:2])) == expected
        assert session.statistics.acceptance_rate > 0.95


def test_without_a_draft_no_hidden_states_are_kept(built: Built, ring: tuple[Path, str]) -> None:
    model, draft = ring
    engine, nbytes = built.build(model, draft_head=draft), []
    for given in (draft, None):
        built.memory = AddressedMemory()
        with InferenceSession.open(engine, engine="tensorrt", draft=given) as session:
            session.prefill([[1, 2, 3]])
            assert (session._runner.hidden_states is None) == (given is None)
            nbytes.append(built.memory.live_nbytes)
    width = EngineFolder.open(engine).config.model.hidden_size
    assert nbytes[0] - nbytes[1] > 3 * 48 * width * 4


def test_from_model_builds_the_engine_of_the_head(built: Built, ring: tuple[Path, str]) -> None:
    (model, draft), prompts = ring, mtp.ring_prompts(2)
    with InferenceSession.from_model(model, engine="tensorrt", flavour="tensorrt_rtx", **SIZES, draft=draft) as session:
        assert isinstance(session.engine, TensorRTEngine)
        [*session.generate(prompts, params()[:2])]
        assert session.statistics.acceptance_rate > 0.95
    assert len(built.definitions) == 2


def test_an_engine_that_was_built_without_the_head_refuses_it(built: Built, ring: tuple[Path, str], tmp_path: Path) -> None:
    model, draft = ring
    engine = built.build(model, max_logits_per_slot=7)
    with pytest.raises(ConfigError) as error:
        InferenceSession.open(engine, engine="tensorrt", draft=draft)
    assert str(error.value) == f"draft: expected an engine that was built with draft_head for {draft}, got {engine} without. Build it so."
    assert built.memory.live_nbytes == 0
    engine = built.build(model, draft_head=draft)
    other = "mtp" if draft != "mtp" else str(eagle3.write_ring_head(tmp_path / "other", model, permuted=True, max_position_embeddings=64))
    for wrong in {other, *([str(eagle3.write_ring_head(tmp_path / "same", model, permuted=True))] if draft != "mtp" else ())}:
        with pytest.raises(ConfigError, match=f"expected the draft head for which {engine} was built .*, got {wrong}, another one"):
            InferenceSession.open(engine, engine="tensorrt", draft=wrong)
        assert built.memory.live_nbytes == 0


@pytest.mark.parametrize("attention", ["plugin", pytest.param("native", marks=pytest.mark.slow)])
@pytest.mark.parametrize("draft", ["eagle3", pytest.param("mtp", marks=pytest.mark.slow)])
def test_tensorrt_builds_the_engines(tmp_path: Path, draft: str, attention: str) -> None:
    """With copies of both checkpoints, from which other engines run after the originals are gone."""
    sizes: dict[str, Any] = {"num_hidden_layers": 2, "head_dim": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
    if draft == "mtp":
        model, head = mtp.write_ring_model(tmp_path / "model", head_dim=64), "mtp"
    else:
        model = eagle3.write_model(tmp_path / "model", **sizes)
        layers = {"eagle_aux_hidden_state_layer_ids": [2, 0, 1], "head_dim": 64}
        head = str(eagle3.write_head(tmp_path / "head", model, num_attention_heads=2, num_key_value_heads=1, **layers))
    kind = {"flavour": "tensorrt_rtx", "compute_capabilities": "8.6", "dtype": "float16", "attention": attention, "embed_weights": True}
    report = build_engine(model, tmp_path / "engine", draft_head=head, **{**SIZES, **kind})
    found = inspect_engine(report.path)
    assert found.draft_head is not None
    assert [len(one.hidden_tensors) for one in (found, found.draft_head)] == [1, 2]
    assert {layer.variant for layer in (*found.attention, *found.draft_head.attention)} == {attention}
    shutil.rmtree(model)
    if draft != "mtp":
        shutil.move(head, tmp_path / "elsewhere")
        head = str(tmp_path / "elsewhere")
        with Checkpoint.open_eagle3_head(report.path / DRAFT_HEAD_FOLDER / "checkpoint") as copy:
            assert copy.fingerprint() == found.draft_head.checkpoint.fingerprint
    with InferenceSession.open(report.path, engine="numpy", draft=head) as session:
        [*session.generate(PROMPTS[:1], params()[0])]
        assert session.statistics.draft_tokens > 0
