"""``InferenceSession.open`` and ``from_model``: which engine runs, with what, and what is refused."""

from __future__ import annotations

import json
import shutil
import warnings
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.checkpoint.tokenizer_folders import EOS, byte_level_folder
from tests.helpers import eagle3
from tests.helpers.adapters import Q_PROJ, SHAPES, write_adapter
from tests.helpers.assertions import raises
from tests.helpers.engine_files import make_engine_folder
from tests.helpers.models import write_model
from tests.paths import GOLDEN
from trt_kvcache import InferenceSession, SamplingParams
from trt_kvcache.builder.build_engine import build_engine
from trt_kvcache.builder.options import BuildOptions
from trt_kvcache.builder.resolved_options import ResolvedOptions
from trt_kvcache.cache.layout import KVLayout
from trt_kvcache.checkpoint import Checkpoint
from trt_kvcache.checkpoint.adapters.adapter_set import AdapterSet
from trt_kvcache.engine_folder.folder import EngineFolder
from trt_kvcache.errors import BindingError, BuildError, CapacityError, CheckpointError, ConfigError, CudaError, EngineError, KVCacheError
from trt_kvcache.memory.host_memory import HostMemory
from trt_kvcache.reference import ReferenceEngine
from trt_kvcache.session import model_location, open_model as opening
from trt_kvcache.session.open_model import EngineFallbackWarning
from trt_kvcache.session.session_options import SessionOptions
from trt_kvcache.session.session_source import SessionSource

NO_GPU = "there is no GPU here"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model of one layer, 64 positions, 37 tokens, end token 2, stored in float16."""
    return write_model(tmp_path_factory.mktemp("models") / "model")


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory):
    """Its engine folder: B = 3, S = 38, prefill up to 11."""
    return make_engine_folder(model, tmp_path_factory.mktemp("engines") / "engine").path


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(opening, "find_gpu", lambda device: NO_GPU)
    monkeypatch.setattr(opening, "why_no_torch", lambda: "torch is not installed")


@pytest.fixture
def memories(monkeypatch):
    """Every host memory that is made, to see what is left in it."""
    made: list[HostMemory] = []

    class Counted(HostMemory):
        def __init__(self):
            super().__init__()
            made.append(self)

    monkeypatch.setattr(opening, "HostMemory", Counted)
    return made


class FakeGPU:
    """``CudaMemory`` and ``TensorRTEngine`` over host memory and the reference engine."""

    def __init__(self, monkeypatch, model):
        self.memory = HostMemory()
        self.failure: KVCacheError | None = None
        self.opened: list[tuple[Path, str]] = []
        self.adapters: list[AdapterSet | None] = []
        self.model = model
        monkeypatch.setattr(opening, "find_gpu", lambda device: None)
        monkeypatch.setattr(opening, "load_tensorrt", lambda flavour: None)
        monkeypatch.setattr(opening, "CudaMemory", lambda device, **_: self.memory)
        monkeypatch.setattr(opening, "TensorRTEngine", self)
        monkeypatch.setattr(opening, "why_no_torch", lambda: "torch is not installed")

    def open(
        self, folder: EngineFolder, *, memory: HostMemory, flavour: str, cuda_graphs: bool = True, adapters: AdapterSet | None = None
    ) -> ReferenceEngine:
        assert memory is self.memory
        self.adapters.append(adapters)
        self.opened.append((folder.path, flavour))
        if self.failure is not None:
            raise self.failure
        with folder.open_checkpoint() as checkpoint:
            config = folder.config
            return ReferenceEngine(
                checkpoint,
                kv=config.cache,
                max_prefill_length=config.max_prefill_length,
                max_logits_per_slot=config.max_logits_per_slot,
                attention=config.attention_variant,
                memory=memory,
            )


@pytest.fixture
def gpu(monkeypatch, model):
    return FakeGPU(monkeypatch, model)


class TestEngineFolder:
    def test_the_reference_engine_has_the_sizes_of_the_folder(self, folder):
        with InferenceSession.open(folder, engine="reference") as session:
            kv = session.cache.kv_config
            assert (kv.max_batch_size, kv.max_sequence_length, kv.dtype) == (3, 38, "float16")
            assert [profile.max_width for profile in session.engine.profiles] == [11, 1]
            assert isinstance(session.engine, ReferenceEngine)
            assert (session.vocab_size, session.tokenizer) == (37, None)
            assert np.isfinite(session.prefill([list(range(30)), [1]])).all()

    def test_the_reference_engine_has_at_least_the_rows_of_the_folder(self, model, tmp_path):
        path = make_engine_folder(model, tmp_path / "rows", max_embeddings=3).path
        for given, expected in ((0, 3), (2, 3), (4, 4)):
            with InferenceSession.open(path, engine="reference", max_embeddings=given) as session:
                assert len(session.add_embeddings(np.eye(4, session.model.hidden_size)[:expected])) == expected
                with raises(CapacityError, "embeddings", expected=str(expected)):
                    session.add_embeddings(np.ones((1, session.model.hidden_size)))

    def test_an_engine_folder_gives_the_logits_of_its_model(self, folder, model):
        with (
            InferenceSession.open(str(folder), engine="reference") as one,
            InferenceSession.from_model(
                model, engine="reference", max_batch_size=3, max_sequence_length=38, max_prefill_length=11
            ) as other,
        ):
            prompts = [[1, 2, 3], [4]]
            np.testing.assert_array_equal(one.prefill(prompts), other.prefill(prompts))

    def test_auto_falls_back_to_the_reference_engine_with_one_warning(self, folder, no_gpu):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            InferenceSession.open(folder).close()
        assert [(str(one.message), one.category, one.filename) for one in caught] == [
            (f"running the NumPy reference engine: {NO_GPU}; torch is not installed", EngineFallbackWarning, __file__)
        ]

    def test_auto_falls_back_if_tensorrt_refuses_the_engine(self, folder, gpu):
        gpu.failure = EngineError("not for this GPU")
        with pytest.warns(
            EngineFallbackWarning, match=r"^running the NumPy reference engine: not for this GPU; torch is not installed$"
        ) as caught:
            InferenceSession.open(folder).close()
        assert [one.filename for one in caught] == [__file__]

    def test_engine_tensorrt_raises_instead_of_falling_back(self, folder, gpu):
        gpu.failure = EngineError("not for this GPU")
        with pytest.raises(EngineError, match=r"^not for this GPU$"):
            InferenceSession.open(folder, engine="tensorrt")

    @pytest.mark.parametrize("engine", ["auto", "tensorrt"])
    def test_tensorrt_runs_if_there_is_a_gpu(self, folder, gpu, engine):
        with InferenceSession.open(folder, engine=engine, flavour="tensorrt_rtx") as session:
            assert session.cache.memory is gpu.memory
        assert gpu.opened == [(folder, "tensorrt_rtx")]
        assert gpu.memory.live_nbytes == 0

    def test_the_flavour_that_built_the_engine_is_loaded(self, folder, gpu, monkeypatch):
        asked = []

        def load(flavour):
            asked.append(flavour)
            raise EngineError("TensorRT cannot be used.")

        monkeypatch.setattr(opening, "load_tensorrt", load)
        with pytest.warns(EngineFallbackWarning, match="TensorRT cannot be used"):
            InferenceSession.open(folder).close()
        assert asked == ["tensorrt_rtx"]

    def test_masked_attention_reads_dead_rows(self, model, tmp_path):
        path = make_engine_folder(model, tmp_path / "engine", attention_variant="mask").path
        with InferenceSession.open(path, engine="reference") as session:
            session.prefill([[1, 2]])
            session.cache.memory.array(session.cache.get_separate_kv_cache(0)[1])[:, :, 5:] = np.nan
            assert np.isnan(session.decode([3])).all()

    def test_progress_of_the_check_and_of_the_weights(self, folder):
        told: list[tuple[str, float | None]] = []
        InferenceSession.open(folder, engine="reference", progress=lambda stage, done: told.append((stage, done))).close()
        assert {stage for stage, _ in told} == {"check checkpoint", "load weights"}
        assert [done for stage, done in told if stage == "load weights"][-1] == 1

    def test_a_changed_or_missing_checkpoint_is_refused(self, model, tmp_path, memories):
        copy = tmp_path / "model"
        shutil.copytree(model, copy)
        path = make_engine_folder(copy, tmp_path / "engine").path
        weights = bytearray((copy / "model.safetensors").read_bytes())
        weights[-1] ^= 1
        (copy / "model.safetensors").write_bytes(weights)
        with pytest.raises(CheckpointError, match="this checkpoint was changed since engine"):
            InferenceSession.open(path, engine="reference")
        shutil.rmtree(copy)
        with pytest.raises(CheckpointError, match="the checkpoint of this engine is gone"):
            InferenceSession.open(path, engine="reference")
        assert sum(memory.live_nbytes for memory in memories) == 0

    def test_what_is_no_engine_folder_is_refused(self, model, tmp_path):
        with pytest.raises(EngineError, match=r"expected an engine folder, but it has no engine\.plan"):
            InferenceSession.open(model, engine="reference")
        with pytest.raises(EngineError, match="expected an engine folder, got nothing there"):
            InferenceSession.open(tmp_path / "none", engine="reference")


class TestModel:
    def test_default_sizes_come_from_the_model(self, model):
        with InferenceSession.from_model(model, engine="reference") as session:
            kv = session.cache.kv_config
            assert (kv.max_batch_size, kv.max_sequence_length, kv.dtype) == (1, 64, "float16")
            assert session.engine.profiles[0].max_width == 64

    def test_default_sizes_are_limited_for_long_models(self, tmp_path):
        path = write_model(tmp_path / "long", max_position_embeddings=9000)
        with InferenceSession.from_model(path, engine="reference") as session:
            assert session.max_sequence_length == 2048
            assert session.engine.profiles[0].max_width == 512
        with InferenceSession.from_model(path, engine="reference", max_sequence_length=8000) as session:
            assert session.max_sequence_length == 8000

    def test_given_sizes_are_used(self, model):
        with InferenceSession.from_model(
            model, engine="reference", max_batch_size=4, max_sequence_length=31, max_prefill_length=7, dtype="bfloat16"
        ) as session:
            kv = session.cache.kv_config
            assert (kv.max_batch_size, kv.max_sequence_length, kv.dtype) == (4, 31, "bfloat16")
            assert session.engine.profiles[0].max_width == 7
            assert np.isfinite(session.prefill([[1] * 31, [2]])).all()

    def test_masked_attention_reads_dead_rows(self, model):
        with InferenceSession.from_model(model, engine="reference", attention="mask") as session:
            session.prefill([[1, 2]])
            session.cache.memory.array(session.cache.get_separate_kv_cache(0)[1])[:, :, 5:] = np.nan
            assert np.isnan(session.decode([3])).all()

    def test_auto_falls_back_to_the_reference_engine_with_one_warning(self, model, no_gpu):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            InferenceSession.from_model(model).close()
        assert [(str(one.message), one.category, one.filename) for one in caught] == [
            (f"running the NumPy reference engine: {NO_GPU}; torch is not installed", EngineFallbackWarning, __file__)
        ]

    def test_the_reference_engine_asks_for_no_gpu_and_does_not_warn(self, model, monkeypatch):
        monkeypatch.setattr(opening, "find_gpu", None)
        InferenceSession.from_model(model, engine="reference").close()

    def test_without_a_gpu_nothing_is_built(self, model, monkeypatch):
        def refuse(device, **_):
            raise CudaError(NO_GPU)

        monkeypatch.setattr(opening, "CudaMemory", refuse)
        monkeypatch.setattr(opening, "build_engine", None)
        with pytest.raises(CudaError, match=NO_GPU):
            InferenceSession.from_model(model, engine="tensorrt")

    @pytest.mark.parametrize("engine", ["auto", "tensorrt"])
    def test_a_built_engine_is_kept_as_long_as_the_session(self, model, gpu, monkeypatch, engine):
        asked = {}

        def build(path, target, *, progress, **options):
            asked.update(path=path, options=BuildOptions.of(options))
            return type("Report", (), {"path": make_engine_folder(path, target).path})

        monkeypatch.setattr(opening, "build_engine", build)
        session = InferenceSession.from_model(model, engine=engine, max_batch_size=3, max_sequence_length=38, max_prefill_length=11)
        assert asked == {
            "path": model,
            "options": BuildOptions(max_batch_size=3, max_sequence_length=38, max_prefill_length=11, flavour="auto"),
        }
        ((place, _),) = gpu.opened
        assert place.is_dir()
        assert np.isfinite(session.prefill([[1, 2]])).all()
        session.close()
        assert not place.parent.exists()

    @pytest.mark.parametrize(
        ("given", "asked_for"),
        [
            ({}, ("auto", "one-plan", 0)),
            ({"attention": "auto"}, ("auto", "one-plan", 0)),
            ({"attention": "mask"}, ("mask", "one-plan", 0)),
            ({"attention": "plugin", "plugin_layers": "segments"}, ("plugin", "segments", 0)),
            ({"device": 1}, ("auto", "one-plan", 1)),
        ],
    )
    @pytest.mark.usefixtures("gpu")
    def test_the_options_of_the_build_of_an_engine(self, model, monkeypatch, given, asked_for):
        asked = {}

        def build(path, target, *, progress, **options):
            asked.update(vars(BuildOptions.of(options)))
            raise BuildError("enough seen")

        monkeypatch.setattr(opening, "build_engine", build)
        with pytest.raises(BuildError, match="enough seen"):
            InferenceSession.from_model(model, engine="tensorrt", **given)
        assert tuple(asked[name] for name in ("attention", "plugin_layers", "device")) == asked_for

    @pytest.mark.parametrize("engine", ["auto", "tensorrt"])
    def test_an_engine_that_is_built_for_adapters_has_their_ranks(self, model, gpu, monkeypatch, tmp_path, engine):
        """And inputs for the linear layers alone that they change."""
        folders = {"a": write_adapter(tmp_path / "a", {Q_PROJ: SHAPES[Q_PROJ]}), "b": write_adapter(tmp_path / "b", rank=2, seed=1)}
        model, asked = write_model(tmp_path / "model", num_hidden_layers=2), {}

        def build(path, target, *, progress, **options):
            asked.update(vars(BuildOptions.of(options)))
            return SimpleNamespace(path=make_engine_folder(path, target).path)

        monkeypatch.setattr(opening, "build_engine", build)
        sizes = {"max_batch_size": 3, "max_sequence_length": 38, "max_prefill_length": 11}
        InferenceSession.from_model(model, engine=engine, **sizes, adapters=folders).close()
        assert (asked["adapters_rank"], set(asked["adapters_modules"])) == (5, {"q_proj", "down_proj"})
        assert gpu.adapters[0].names == ("a", "b")
        path = make_engine_folder(model, tmp_path / "engine").path
        for given in (folders, None):
            InferenceSession.open(path, engine=engine, adapters=given).close()
        assert [one and one.names for one in gpu.adapters[1:]] == [("a", "b"), None]

    def test_a_table_in_host_memory_leaves_tensorrt_out(self, gpu, monkeypatch):
        asked = []
        monkeypatch.setattr(opening, "build_engine", lambda *_, **__: asked.append("build"))
        options = {"max_sequence_length": 16, "per_layer_table": "host"}
        InferenceSession.from_model(GOLDEN / "gemma4-ple", **options).close()
        assert (asked, gpu.opened) == ([], [])
        with raises(ConfigError, "per_layer_table", expected="device with engine='tensorrt'", got="host"):
            InferenceSession.from_model(GOLDEN / "gemma4-ple", engine="tensorrt", **options)

    @pytest.mark.parametrize("engine", ["auto", "tensorrt"])
    def test_an_engine_is_built_with_room_for_rows(self, model, gpu, monkeypatch, tmp_path, engine):
        """With too little room in an engine folder, ``auto`` runs another engine."""
        asked = {}

        def build(path, target, *, progress, **options):
            asked.update(vars(BuildOptions.of(options)))
            return SimpleNamespace(path=make_engine_folder(path, target, max_embeddings=options["max_embeddings"]).path)

        monkeypatch.setattr(opening, "build_engine", build)
        sizes = {"max_batch_size": 3, "max_sequence_length": 38, "max_prefill_length": 11}
        InferenceSession.from_model(model, engine=engine, **sizes, max_embeddings=7).close()
        assert asked["max_embeddings"] == 7
        path = make_engine_folder(model, tmp_path / "engine", max_embeddings=5).path
        for given in (0, 4, 5):
            InferenceSession.open(path, engine=engine, max_embeddings=given).close()
        if engine == "tensorrt":
            with raises(EngineError, "max_embeddings", expected="at most 5", got="6", says="Build it with max_embeddings."):
                InferenceSession.open(path, engine=engine, max_embeddings=6)
        else:
            with pytest.warns(EngineFallbackWarning, match="max_embeddings: expected at most 5"):
                session = InferenceSession.open(path, engine=engine, max_embeddings=6)
            with session:
                assert len(session.add_embeddings(np.eye(6, session.model.hidden_size))) == 6
        assert len(gpu.opened) == 4

    @pytest.mark.parametrize(
        ("given", "logits"),
        [({}, 17), ({"max_prefill_length": 11}, 11), ({"max_logits_per_slot": 5}, 5), ({"max_logits_per_slot": "all"}, "all")],
    )
    @pytest.mark.usefixtures("gpu")
    def test_an_engine_that_is_built_for_drafts_can_verify_them(self, model, monkeypatch, given, logits):
        asked = {}

        def build(path, target, *, progress, **options):
            asked.update(vars(BuildOptions.of(options)))
            raise BuildError("enough seen")

        monkeypatch.setattr(opening, "build_engine", build)
        with pytest.raises(BuildError, match="enough seen"):
            InferenceSession.from_model(model, engine="tensorrt", draft="ngram", **given)
        assert asked["max_logits_per_slot"] == logits

    @pytest.mark.parametrize(("given", "tree"), [({}, 12), ({"max_prefill_length": 11}, 11)])
    @pytest.mark.usefixtures("gpu")
    def test_an_engine_that_is_built_for_trees_takes_them(self, model, monkeypatch, given, tree):
        """The draft model's too, of which auto builds none."""
        asked = []

        def build(path, target, *, progress, **options):
            asked.append(BuildOptions.of(options).draft_tree)
            raise BuildError("enough seen")

        monkeypatch.setattr(opening, "build_engine", build)
        options = {"draft": str(model), "draft_tree": 12, **given}
        with pytest.raises(BuildError, match="enough seen"):
            InferenceSession.from_model(model, engine="tensorrt", **options)
        with pytest.raises(BuildError, match="enough seen"):
            opening.open_model(model, SessionOptions(engine="tensorrt", **given), draft_tree=12)
        assert asked == [tree, tree]
        with InferenceSession.from_model(model, **options) as session:
            assert isinstance(session.engine, ReferenceEngine)
        assert asked == [tree, tree]

    def test_an_engine_folder_for_fewer_tokens_of_a_tree_is_refused(self, model, folder, gpu, tmp_path):
        options = {"draft": str(model), "draft_tree": 10}
        nine = {"attention_variant": "plugin", "max_logits_per_slot": 9, "draft_tree": 9}
        trees = make_engine_folder(model, tmp_path / "trees", **nine).path
        for path, got in ((folder, "one of chains only"), (trees, "one of trees of 9")):
            with raises(
                ConfigError, "draft_tree", expected="an engine for trees of 10 tokens", got=got, says="Build it with draft_tree=10."
            ):
                InferenceSession.open(path, engine="tensorrt", **options)
            with pytest.raises(ConfigError, match=f"expected an engine for trees of 10 tokens, got {got}"):
                opening.open_engine_folder(path, SessionOptions(engine="tensorrt"), draft_tree=10)
            with InferenceSession.open(path, **options) as session:
                assert session.engine.memory is not gpu.memory
        assert gpu.opened == []
        options["draft_tree"] = 9
        with InferenceSession.open(trees, **options) as session:
            assert session.engine.memory is gpu.memory
        with InferenceSession.open(trees, engine="tensorrt", draft=str(trees), draft_tree=9) as session:
            assert len(list(session.generate([[5, 6]], max_new_tokens=12, ignore_eos=True))) == 12
            assert session.statistics.accepted_tokens > 0
        assert [path for path, _ in gpu.opened] == [trees] * 3

    def test_an_engine_folder_without_the_logits_of_several_tokens_refuses_drafts(self, folder, gpu, monkeypatch):
        with pytest.raises(ConfigError) as error:
            InferenceSession.open(folder, engine="tensorrt", draft="ngram")
        assert str(error.value).startswith(
            "draft: expected an engine with the logits of 2 new tokens per slot or more, got one with those of 1."
        )
        assert "trt-kvcache build --max-logits-per-slot" in str(error.value)
        assert not gpu.opened[-1][1].memory.live_nbytes if hasattr(gpu.opened[-1][1], "memory") else True

    @pytest.mark.parametrize("given", [{}, {"max_batch_size": 3, "max_sequence_length": 38, "max_prefill_length": 11}])
    def test_a_build_has_the_sizes_of_a_session_in_numpy(self, model, given):
        asked = BuildOptions.of(SessionOptions(**given).build_keywords)
        with InferenceSession.from_model(model, engine="numpy", **given) as session, Checkpoint.open(model) as checkpoint:
            options, cache = ResolvedOptions.of_model(asked, checkpoint.config), session.cache_config
            assert (options.max_batch_size, options.max_sequence_length) == (cache.max_batch_size, cache.max_sequence_length)
            assert options.max_prefill_length == session.engine.profiles[0].max_width
            assert options.dtype == cache.dtype

    def test_auto_is_native_attention_in_numpy(self, model):
        with InferenceSession.from_model(model, engine="numpy", attention="auto") as session:
            assert session.cache_config.kv.layout is KVLayout.SEPARATE

    @pytest.mark.parametrize("stage", ["build", "open"])
    def test_a_build_that_fails_leaves_no_folder(self, model, gpu, monkeypatch, stage):
        places = []

        def build(path, target, **options):
            places.append(target)
            if stage == "build":
                raise BuildError("no")
            return type("Report", (), {"path": make_engine_folder(path, target).path})

        monkeypatch.setattr(opening, "build_engine", build)
        gpu.failure = EngineError("no")
        with pytest.raises(BuildError if stage == "build" else EngineError, match=r"^no$"):
            InferenceSession.from_model(model, engine="tensorrt")
        assert not places[0].parent.exists()
        with pytest.warns(EngineFallbackWarning, match=r"^running the NumPy reference engine: no; torch is not installed$"):
            InferenceSession.from_model(model, engine="auto").close()
        assert not places[1].parent.exists()

    def test_progress_of_the_weights(self, model):
        told: list[tuple[str, float | None]] = []
        InferenceSession.from_model(model, engine="reference", progress=lambda stage, done: told.append((stage, done))).close()
        assert {stage for stage, _ in told} == {"load weights"}
        assert told[-1][1] == 1

    @pytest.mark.parametrize(
        ("options", "kind", "text"),
        [
            ({"engine": "onnx"}, ConfigError, "engine: expected one of auto, numpy, tensorrt, torch, got 'onnx'."),
            ({"engine": None}, ConfigError, "engine: expected one of auto, numpy, tensorrt, torch, got None."),
            ({"attention": "flash"}, ConfigError, "attention: expected one of auto, native, mask, plugin, got 'flash'."),
            (
                {"max_sequence_length": 65},
                ConfigError,
                "max_sequence_length: expected at most 64, the positions that the model was made for (max_position_embeddings), got 65.",
            ),
            ({"max_sequence_length": 0}, ConfigError, "max_sequence_length: expected at least 1, got 0."),
            ({"max_sequence_length": "64"}, ConfigError, "max_sequence_length: expected an integer, got '64'."),
            ({"max_batch_size": 0}, ConfigError, "max_batch_size: expected at least 1, got 0."),
            ({"max_prefill_length": 65}, ConfigError, "max_prefill_length: expected an integer from 1 to 64, got 65."),
            (
                {"max_sequence_length": 20, "max_prefill_length": 21},
                ConfigError,
                "max_prefill_length: expected an integer from 1 to 20, got 21.",
            ),
            ({"dtype": "int8"}, ConfigError, "dtype: expected one of float16, bfloat16, float32, got 'int8'."),
            ({"flavour": "x"}, ConfigError, "flavour: expected one of auto, tensorrt, tensorrt_rtx, got 'x'."),
            ({"dtype": "float64"}, ConfigError, "dtype: expected one of float16, bfloat16, float32, got 'float64'."),
        ],
    )
    def test_options_that_are_refused(self, model, memories, options, kind, text):
        with pytest.raises(kind) as error:
            InferenceSession.from_model(model, **{"engine": "reference", **options})
        assert str(error.value) == text
        assert sum(memory.live_nbytes for memory in memories) == 0

    def test_the_engine_option_is_checked_before_the_folder(self, tmp_path):
        for call in (InferenceSession.open, InferenceSession.from_model):
            with raises(ConfigError, "engine", expected="auto, numpy, tensorrt, torch", got="'fast'"):
                call(tmp_path / "none", engine="fast")

    def test_a_session_that_cannot_be_made_leaves_nothing(self, model, memories, monkeypatch):
        def refuse(self):
            raise BindingError("no")

        monkeypatch.setattr(opening.SessionParts, "arguments", refuse)
        closed, close = [], ReferenceEngine.close
        monkeypatch.setattr(ReferenceEngine, "close", lambda engine: (closed.append(engine), close(engine)))
        with pytest.raises(BindingError, match=r"^no$"):
            InferenceSession.from_model(model, engine="reference")
        assert len(closed) == 1
        assert [memory.live_nbytes for memory in memories] == [0]

    def test_a_cache_that_does_not_fit_closes_the_engine(self, model, monkeypatch):
        def refuse(config, *, memory):
            raise MemoryError

        closed = []
        monkeypatch.setattr(opening, "make_cache", refuse)
        monkeypatch.setattr(ReferenceEngine, "close", lambda engine: closed.append(engine))
        with pytest.raises(MemoryError):
            InferenceSession.from_model(model, engine="reference")
        assert len(closed) == 1


class TestCompanions:
    """What stands beside the weights: tokenizer, end tokens, sampling defaults."""

    @pytest.fixture
    def copy(self, model, tmp_path):
        return Path(shutil.copytree(model, tmp_path / "copy"))

    def opened(self, path):
        return InferenceSession.from_model(path, engine="reference")

    def ends(self, path):
        """Return the tokens that end a request."""
        with self.opened(path) as session:
            return session._eos_token_ids

    def write(self, path, name, **values):
        (path / name).write_text(json.dumps(values))

    def test_end_tokens_of_the_model(self, copy):
        assert self.ends(copy) == (2,)

    def test_end_tokens_of_the_generation_config_come_first(self, copy):
        self.write(copy, "generation_config.json", eos_token_id=[5, 6])
        assert self.ends(copy) == (5, 6)

    def test_the_end_token_of_the_tokenizer_comes_last(self, tmp_path):
        path = write_model(tmp_path / "model", vocab_size=300, eos_token_id=None)
        byte_level_folder(path, eos_token=EOS)
        with self.opened(path) as session:
            assert session.tokenizer is not None
            assert session._eos_token_ids == session.tokenizer.eos_token_ids != ()

    def test_sampling_defaults_apply_only_with_do_sample(self, copy):
        self.write(copy, "generation_config.json", temperature=0.6, top_k=20, top_p=0.9)
        with self.opened(copy) as session:
            assert session.defaults == SamplingParams()
        self.write(copy, "generation_config.json", do_sample=True, temperature=0.6, top_k=20, top_p=0.9, min_p=0.1)
        with self.opened(copy) as session:
            assert session.defaults == SamplingParams(temperature=0.6, top_k=20, top_p=0.9, min_p=0.1)

    @pytest.mark.parametrize("do_sample", [False, True])
    def test_the_repetition_penalty_is_a_default_without_a_warning(self, copy, do_sample):
        self.write(copy, "generation_config.json", do_sample=do_sample, repetition_penalty=1.05)
        with self.opened(copy) as session:
            assert session.defaults.repetition_penalty == 1.05

    @pytest.mark.parametrize("with_text", [True, False])
    def test_stop_strings_are_a_default_of_models_with_a_tokenizer(self, copy, with_text):
        self.write(copy, "generation_config.json", stop_strings=["END"])
        if with_text:
            byte_level_folder(copy)
        with self.opened(copy) as session:
            assert session.defaults.stop == (("END",) if with_text else ())

    def test_one_warning_names_generation_options_that_are_not_supported(self, copy):
        self.write(copy, "generation_config.json", min_length=2, no_repeat_ngram_size=3)
        text = r"generation_config\.json: ignored, as it is not supported: no_repeat_ngram_size, min_length\. Other"
        with pytest.warns(UserWarning, match=text) as caught:
            InferenceSession.from_model(copy, engine="reference").close()
        assert [one.filename for one in caught] == [__file__]

    def test_the_warning_comes_before_the_cache_is_allocated(self, copy, monkeypatch):
        self.write(copy, "generation_config.json", min_length=2)
        monkeypatch.setattr(opening, "make_cache", lambda *_, **__: pytest.fail("the cache was allocated"))
        with pytest.raises(UserWarning, match="min_length"):
            self.opened(copy)

    def test_prompts_and_answers_can_be_text(self, tmp_path):
        path = write_model(tmp_path / "model", vocab_size=300)
        byte_level_folder(path)
        with self.opened(path) as session:
            events = list(session.generate("the sea", max_new_tokens=5))
            assert "".join(event.text for event in events) == session.tokenizer.decode([event.token for event in events])

    @pytest.mark.parametrize("name", ["tokenizer.json", "generation_config.json"])
    def test_a_damaged_file_is_named_and_nothing_is_left(self, copy, memories, name):
        (copy / name).write_text("{")
        with pytest.raises(CheckpointError, match=name):
            self.opened(copy)
        assert [memory.live_nbytes for memory in memories] == [0]


def refuses(error, message, call, *args, **options):
    with pytest.raises(error, match=message):
        call(*args, **options)


SIZES = {"max_batch_size": 3, "max_sequence_length": 38, "max_prefill_length": 11}  # of the engine folder
of_model = partial(InferenceSession.from_model, engine="reference")


@pytest.mark.trt
def test_an_engine_in_segments_is_opened_by_the_segmented_engine(gpu, monkeypatch, tmp_path):
    def refuse(folder, *, memory, flavour, cuda_graphs):
        raise EngineError(f"{len(folder.config.segments.stages)} steps, {cuda_graphs}")

    monkeypatch.setattr(opening, "SegmentedEngine", SimpleNamespace(open=refuse))
    model = write_model(tmp_path / "model", head_dim=64)
    path = build_engine(model, tmp_path / "engine", **SIZES, attention="plugin", plugin_layers="segments").path
    refuses(EngineError, r"^\d steps, False$", InferenceSession.open, path, engine="tensorrt", cuda_graphs=False)
    refuses(EngineError, r"^\d steps, True$", SessionSource(path, engine="tensorrt"))
    monkeypatch.setattr(opening, "build_engine", lambda *_, **options: SimpleNamespace(path=path))
    refuses(
        EngineError,
        r"^\d steps, False$",
        InferenceSession.from_model,
        model,
        **SIZES,
        engine="tensorrt",
        attention="plugin",
        cuda_graphs=False,
    )
    adapters = {"a": write_adapter(tmp_path / "a", {Q_PROJ: (64 * 4, 40)})}
    with raises(ConfigError, "adapters", expected="segments", got="a"):
        InferenceSession.open(path, engine="tensorrt", adapters=adapters)
    assert gpu.opened == []
    with InferenceSession.open(path, engine="reference") as one, of_model(model, **SIZES, attention="plugin") as other:
        assert one.cache.kv_config == other.cache.kv_config
        np.testing.assert_array_equal(one.prefill([[3, 4, 5], [6]]), other.prefill([[3, 4, 5], [6]]))


@pytest.mark.parametrize("kind", ["model", "eagle3"])
def test_a_draft_of_the_hub_is_looked_up_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Each look-up asks the Hub over the network."""
    model = eagle3.write_model(tmp_path / "model")
    draft = model if kind == "model" else eagle3.write_head(tmp_path / "head", model)
    asked: list[str] = []

    def download(hub_id: str, *_: Any) -> Path:
        asked.append(hub_id)
        return draft

    monkeypatch.setattr(model_location, "_download", download)
    with InferenceSession.from_model(model, engine="numpy", draft="maker/small"):
        assert asked == ["maker/small"]
