"""Engine folders of every family and dtype, built with TensorRT for RTX on the CPU; refusals that leave nothing behind."""

import os
from types import SimpleNamespace

import numpy as np
import pytest

from tests.helpers.small_model import write_model
from tests.paths import GOLDEN, SHIPPED
from trt_kvcache.builder import build_engine as builder
from trt_kvcache.builder.build_engine import build_engine
from trt_kvcache.builder.network import rope
from trt_kvcache.builder.network.graph import Graph
from trt_kvcache.checkpoint import Checkpoint
from trt_kvcache.engine_folder.folder import EngineFolder
from trt_kvcache.errors import BuildError, ConfigError
from trt_kvcache.trt.module import TensorRT, load

TOKENIZER = (SHIPPED / "tokenizer.json").read_text(encoding="utf-8")
FAMILIES = ("llama", "llama-llama3-bias", "qwen2-tied", "qwen3-sharded")
SIZES = {"max_batch_size": 3, "max_sequence_length": 38, "max_prefill_length": 11, "flavour": "tensorrt_rtx"}


@pytest.fixture
def model(tmp_path):
    return write_model(tmp_path / "model")


def contents(folder):
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.mark.trt
@pytest.mark.parametrize(
    ("family", "dtype", "attention"),
    [(family, dtype, "native") for family in FAMILIES for dtype in ("float16", "bfloat16", "float32")] + [("llama", "float16", "mask")],
)
def test_every_family_and_dtype_builds(tmp_path, family, dtype, attention):
    report = build_engine(GOLDEN / family, tmp_path / "engine", **SIZES, dtype=dtype, attention=attention)
    folder = EngineFolder.open(tmp_path / "engine")
    config = folder.config
    assert (config.dtype, config.attention_variant, config.max_prefill_length) == (dtype, attention, 11)
    assert (config.tensorrt_flavour, config.tensorrt_version) == ("tensorrt_rtx", load("tensorrt_rtx").version)
    assert len(folder.read_plan()) == report.plan_nbytes > 100_000
    with Checkpoint.open(GOLDEN / family) as checkpoint:
        assert (config.model, config.checkpoint.fingerprint) == (checkpoint.config, checkpoint.fingerprint())


@pytest.mark.trt
def test_plugin_attention_is_built_in_segments_by_rtx(tmp_path):
    model = write_model(tmp_path / "model", head_dim=64, num_hidden_layers=2, tie_word_embeddings=True)
    report = build_engine(model, tmp_path / "engine", **SIZES, attention="plugin")
    folder = EngineFolder.open(tmp_path / "engine")
    assert sorted(path.name for path in folder.path.iterdir()) == ["config.json", "constants.safetensors", "engine.plan"]
    assert [choice.variant for choice in report.attention] == ["plugin"] * 2
    with folder.read_plan() as plan:
        assert len(plan) == report.plan_nbytes == folder.config.segments.spans[-1][1]
    with Checkpoint.open(model) as checkpoint:
        np.testing.assert_array_equal(folder.read_constants()["model.embed_tokens.weight"], checkpoint.tensor("model.embed_tokens.weight"))


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({}, {}, "head_dim: expected one of 64, 80, 96, 128, 256 for plugin attention, got 24."),
        ({"head_dim": 64}, {"dtype": "float32"}, "dtype: expected one of float16, bfloat16 for plugin attention, got float32."),
        ({"head_dim": 64}, {"compute_capabilities": ["8.6", "7.5"]}, "compute_capabilities: expected 8.0 or more for plugin "),
    ],
)
@pytest.mark.trt
def test_models_that_our_kernels_do_not_serve(tmp_path, changes, options, message):
    with pytest.raises(ConfigError) as raised:
        build_engine(write_model(tmp_path / "model", **changes), tmp_path / "engine", **SIZES, attention="plugin", **options)
    assert str(raised.value).startswith(message)
    assert not (tmp_path / "engine").exists()


@pytest.mark.trt
def test_profiles_that_tensorrt_was_given(monkeypatch, model, tmp_path):
    profile, seen = load("tensorrt_rtx").module.IOptimizationProfile, []
    real = profile.set_shape
    monkeypatch.setattr(profile, "set_shape", lambda self, *given: seen.append((self, *given)) or real(self, *given))
    build_engine(model, tmp_path / "engine", **SIZES)
    cache = ((1, 2, 38, 24), (3, 2, 38, 24), (3, 2, 38, 24))
    common = {"kvcache_start_index": ((1,), (3,), (3,)), "last_token_ids": ((1, 1), (3, 1), (3, 1)), "k_cache_0": cache, "v_cache_0": cache}
    shapes = [{name: tuple(given) for by, name, *given in seen if by is each} for each in dict.fromkeys(by for by, *_ in seen)]
    assert shapes == [{"input_ids": ((1, 1), (3, width), (3, width)), **common} for width in (11, 1)]


@pytest.mark.trt
@pytest.mark.parametrize(
    ("version", "attention", "kind"),
    [("11.0.0", "native", "attention_v2"), ("11.0.0", "mask", "attention_v2"), ("10.16.1", "mask", "attention")],
)
def test_network_for_full_tensorrt(monkeypatch, model, tmp_path, version, attention, kind):
    rtx = load("tensorrt_rtx")
    flags, kinds, layer = [], [], Graph.layer

    class Builder:
        def __init__(self, logger):
            self.real = rtx.module.Builder(logger)

        def create_network(self, given):
            flags.append(given)
            return self.real.create_network(given)

        def __getattr__(self, name):
            return getattr(self.real, name)

    full = TensorRT(module=SimpleNamespace(**{**vars(rtx.module), "Builder": Builder}), flavour="tensorrt", version=version, log=rtx.log)
    monkeypatch.setattr(Graph, "layer", lambda graph, name, kind, *rest: kinds.append(kind) or layer(graph, name, kind, *rest))
    monkeypatch.setattr(builder, "load", lambda flavour, *, error: full)
    build_engine(model, tmp_path / "engine", **{**SIZES, "flavour": "tensorrt", "attention": attention})
    assert flags == [1 << int(rtx.module.NetworkDefinitionCreationFlag.STRONGLY_TYPED)]
    assert [each for each in kinds if each.startswith("attention")] == [kind]
    assert EngineFolder.open(tmp_path / "engine").config.tensorrt_flavour == "tensorrt"


STAGES = ["define network", "build engine", "read checkpoint", "write engine folder"]


@pytest.mark.trt
@pytest.mark.parametrize("stage", STAGES)
def test_interruption_leaves_nothing_and_harms_nothing(model, tmp_path, stage):
    engine, seen = tmp_path / "place" / "engine", []
    build_engine(model, engine, **SIZES)
    before = contents(engine)

    def interrupt(now, done):
        seen.append(now)
        if now == stage and (done or 0) >= (0.5 if stage == "build engine" else 0):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_engine(model, engine, **{**SIZES, "max_batch_size": 2}, progress=interrupt)
    assert list(dict.fromkeys(seen)) == STAGES[: STAGES.index(stage) + 1]
    assert os.listdir(engine.parent) == ["engine"]
    assert contents(engine) == before


@pytest.mark.trt
def test_failure_while_writing_harms_nothing(model, tmp_path, monkeypatch):
    place, calls, real = tmp_path / "place", [], os.rename
    build_engine(model, place / "engine", **SIZES)
    before = contents(place / "engine")

    def fail(*arguments, **options):
        calls.append(arguments)
        if len(calls) == 2:  # the one that puts the new folder in place
            raise OSError(28, "No space left on device")
        return real(*arguments, **options)

    monkeypatch.setattr(os, "rename", fail)
    with pytest.raises(OSError, match="No space left on device"):
        build_engine(model, place / "engine", **{**SIZES, "max_batch_size": 2})
    assert os.listdir(place) == ["engine"]
    assert contents(place / "engine") == before


@pytest.mark.trt
def test_what_is_copied_beside_the_plan_and_replaced_by_a_rebuild(model, tmp_path):
    companions = {"tokenizer.json": TOKENIZER, "chat_template.jinja": "{{ x }}", "generation_config.json": "{}"}
    for name, text in companions.items():
        (model / name).write_text(text)
    engine = tmp_path / "engine"
    build_engine(model, engine, **SIZES, embed_weights=True)
    assert sorted(os.listdir(engine)) == sorted([*companions, "engine.plan", "config.json", "checkpoint"])
    assert {name: (engine / name).read_text() for name in companions} == companions
    assert (engine / "checkpoint" / "model.safetensors").read_bytes() == (model / "model.safetensors").read_bytes()
    build_engine(model, engine, **{**SIZES, "max_batch_size": 2}, compute_capabilities=["12.0"])
    folder = EngineFolder.open(engine)
    assert (folder.config.cache.max_batch_size, folder.config.compute_capabilities) == (2, ("12.0",))
    assert not folder.checkpoint_path.exists()
    assert sorted(os.listdir(tmp_path)) == ["engine", "model"]


@pytest.mark.trt
def test_a_layer_that_tensorrt_refuses_is_named(model, tmp_path, monkeypatch):
    real = rope.rope_table
    monkeypatch.setattr(rope, "rope_table", lambda *arguments: tuple(table[:, 1:] for table in real(*arguments)))
    with pytest.raises(BuildError, match=r"layer `model\.layers\.0\.self_attn/q/rotate`: its inputs do not fit\. TensorRT says: "):
        build_engine(model, tmp_path / "new" / "engine", **SIZES)
    assert os.listdir(tmp_path) == ["model"]


def test_place_that_holds_something_else(monkeypatch, model, tmp_path):
    monkeypatch.setattr(builder, "load", lambda *_, **__: pytest.fail("TensorRT was reached"))
    notes = tmp_path / "notes"
    notes.mkdir()
    (notes / "thesis.txt").write_text("mine")
    inside = write_model(tmp_path / "engine" / "checkpoint")
    for folder in (tmp_path / "engine", mixed := tmp_path / "mixed"):
        folder.mkdir(exist_ok=True)
        (folder / "engine.plan").write_bytes(b"plan")
    (mixed / "mine.txt").touch()
    for source, place, message in (
        (model, notes, r"engine path .*notes: expected a folder to make or an engine folder to replace, but it holds thesis\.txt"),
        (model, mixed, r"but it holds mine\.txt\. Choose another path"),
        (model, notes / "thesis.txt", r"thesis\.txt: expected a folder to make or an engine folder to replace, got a file"),
        (model, notes / "thesis.txt" / "engine", r"engine path .*: nothing can be written to .*thesis\.txt"),
        (inside, tmp_path / "engine", r"the model .*checkpoint is in it and would be replaced"),
    ):
        with pytest.raises(ConfigError, match=message):
            build_engine(source, place, **SIZES)
    assert (notes / "thesis.txt").read_text() == "mine"
    assert (inside / "model.safetensors").is_file()
