"""Engine folders of every family and dtype, built with TensorRT for RTX on the CPU; refusals that leave nothing behind."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.helpers.assertions import raises
from tests.helpers.models import write_model
from tests.paths import GOLDEN, SHIPPED
from tests.sweeps import each_once, some
from trt_kvcache._util import atomic_folder
from trt_kvcache.builder import build_engine as builder, checked_build, definition, serialization
from trt_kvcache.builder.build_engine import BuildReport, build_engine
from trt_kvcache.builder.network import decoder
from trt_kvcache.builder.network.graph import Graph
from trt_kvcache.checkpoint import Checkpoint
from trt_kvcache.engine.attention_variants import AttentionLayerConfig
from trt_kvcache.engine_folder.folder import EngineFolder
from trt_kvcache.engine_folder.inspection import inspect_engine
from trt_kvcache.errors import BuildError, CheckpointError, ConfigError, EngineError
from trt_kvcache.ops import registry
from trt_kvcache.ops.attention_op import AttentionOp
from trt_kvcache.ops.segments import CustomOpNode
from trt_kvcache.trt import module as trt_module
from trt_kvcache.trt.module import TensorRT, load

TOKENIZER = (SHIPPED / "tokenizer.json").read_text(encoding="utf-8")
FAMILIES = {"llama": "llama", "llama, biases, llama3 RoPE": "llama-llama3-bias", "qwen2, tied": "qwen2-tied", "qwen3": "qwen3-sharded"}
#: Families that are built with the attention that is chosen for them: windows and soft caps need a mask.
OTHER_FAMILIES = {
    "bamba": ("bamba", "native"),
    "cohere2": ("cohere2", "mask"),
    "ernie4_5": ("ernie4_5", "native"),
    "exaone4": ("exaone4", "mask"),
    "falcon_h1": ("falcon_h1", "native"),
    "gemma2": ("gemma2", "mask"),
    "glm4": ("glm4", "native"),
    "granitemoehybrid": ("granitemoehybrid-bias", "native"),
    "mamba2": ("mamba2", "native"),
    "nemotron_h": ("nemotron_h", "native"),
    "qwen3_5": ("qwen3_5", "native"),
    "qwen3_next": ("qwen3_next-bias", "native"),
    "gemma3": ("gemma3", "mask"),
    "gemma4": ("gemma4-ple", "mask"),
    "granite": ("granite", "native"),
    "hunyuan_v1_dense": ("hunyuan", "native"),
    "lfm2": ("lfm2", "native"),
    "ministral3": ("ministral3-window", "mask"),
    "mistral": ("mistral", "native"),
    "olmo2": ("olmo2", "native"),
    "olmo3": ("olmo3", "mask"),
    "phi3": ("phi3-long", "native"),
    "smollm3": ("smollm3", "native"),
    "stablelm": ("stablelm", "native"),
    "starcoder2": ("starcoder2", "native"),
}
DTYPES = ("float16", "bfloat16", "float32")
SIZES: dict[str, Any] = {"max_batch_size": 3, "max_sequence_length": 38, "max_prefill_length": 11, "flavour": "tensorrt_rtx"}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Return ``built(family, dtype, attention)``: the folder and the report of a build, made once."""

    @cache
    def build(family: str, dtype: str, attention: str) -> tuple[Path, BuildReport]:
        path = tmp_path_factory.mktemp("engines") / "engine"
        return path, build_engine(GOLDEN / FAMILIES[family], path, **SIZES, dtype=dtype, attention=attention)

    yield build
    build.cache_clear()


COMBINATIONS = [(family, dtype, "native") for family in FAMILIES for dtype in DTYPES] + [
    ("llama", "float32", "mask"),
    ("llama, biases, llama3 RoPE", "float16", "mask"),
    ("qwen2, tied", "bfloat16", "mask"),
    ("qwen3", "float16", "mask"),
]


@pytest.mark.trt
@pytest.mark.parametrize(("family", "dtype", "attention"), some(COMBINATIONS, 8))
def test_every_family_and_dtype_builds(built: Any, family: str, dtype: str, attention: str) -> None:
    path, report = built(family, dtype, attention)
    folder = EngineFolder.open(path)
    config = folder.config
    assert (config.dtype, config.attention_variant, config.max_prefill_length) == (dtype, attention, 11)
    assert (config.tensorrt_flavour, config.tensorrt_version) == ("tensorrt_rtx", load("tensorrt_rtx").version)
    assert len(folder.read_plan()) == report.plan_nbytes > 100_000
    assert report.attention == config.attention
    assert report.warnings == ()
    assert report.seconds > 0
    assert report.weights_nbytes == config.checkpoint.nbytes > 10_000
    assert report.peak_memory_nbytes is None or report.peak_memory_nbytes > report.plan_nbytes
    with Checkpoint.open(GOLDEN / FAMILIES[family]) as checkpoint:
        assert config.model == checkpoint.config
        assert config.checkpoint.fingerprint == checkpoint.fingerprint()
    assert config.checkpoint.path == str(GOLDEN / FAMILIES[family])


@pytest.mark.trt
@pytest.mark.parametrize(("family", "dtype"), each_once(some(OTHER_FAMILIES, 5), DTYPES))
def test_every_other_family_and_dtype_builds(tmp_path: Path, family: str, dtype: str) -> None:
    model, attention = OTHER_FAMILIES[family]
    report = build_engine(GOLDEN / model, tmp_path / "engine", **SIZES, dtype=dtype)
    config = EngineFolder.open(tmp_path / "engine").config
    assert (config.model.family.removesuffix("_text"), config.dtype, config.attention_variant) == (family, dtype, attention)
    if config.model.attention_layers:
        assert report.warnings == ()
    else:  # states do not depend on the tokens before, but an engine has the input that says how many there are
        (warning,) = report.warnings
        assert "kvcache_start_index is unused or used only at compile-time, but is not being removed" in warning
    assert report.plan_nbytes > 100_000


@pytest.mark.trt
@pytest.mark.parametrize(("positions", "length", "prefill"), [(4096, 2048, 512), (300, 300, 300)])
def test_sizes_that_are_not_given_come_from_the_model(tmp_path: Path, positions: int, length: int, prefill: int) -> None:
    build_engine(write_model(tmp_path / "model", max_position_embeddings=positions), tmp_path / "engine", flavour="tensorrt_rtx")
    config = EngineFolder.open(tmp_path / "engine").config
    assert (config.cache.max_batch_size, config.cache.max_sequence_length, config.max_prefill_length) == (1, length, prefill)


@pytest.mark.trt
def test_a_given_length_limits_the_default_prefill(tmp_path: Path) -> None:
    build_engine(write_model(tmp_path / "model"), tmp_path / "engine", max_sequence_length=16, flavour="tensorrt_rtx")
    assert EngineFolder.open(tmp_path / "engine").config.max_prefill_length == 16


@pytest.mark.trt
@pytest.mark.parametrize(("logits", "profiles"), [(1, [(11, 1), (1, 1)]), (5, [(11, 5), (1, 1), (5, 5)])])
def test_profiles_that_tensorrt_was_given(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, logits: int, profiles: list[tuple[int, int]]
) -> None:
    profile, seen = load("tensorrt_rtx").module.IOptimizationProfile, []
    real = profile.set_shape
    monkeypatch.setattr(profile, "set_shape", lambda self, *given: seen.append((self, *given)) or real(self, *given))
    build_engine(write_model(tmp_path / "model"), tmp_path / "engine", **SIZES, max_logits_per_slot=logits)
    cache = ((1, 2, 38, 24), (3, 2, 38, 24), (3, 2, 38, 24))
    common = {"kvcache_start_index": ((1,), (3,), (3,)), "k_cache_0": cache, "v_cache_0": cache}
    shapes = [{name: tuple(given) for by, name, *given in seen if by is each} for each in dict.fromkeys(by for by, *_ in seen)]
    assert shapes == [
        {"input_ids": ((1, 1), (3, width), (3, width)), "last_token_ids": ((1, 1), (3, most), (3, most)), **common}
        for width, most in profiles
    ]


@pytest.mark.trt
@pytest.mark.parametrize("attention", ["native", "plugin"])
def test_an_engine_with_more_logits(tmp_path: Path, attention: str) -> None:
    options = {**SIZES, "attention": attention, "flavour": "tensorrt_rtx", "max_logits_per_slot": 5}
    build_engine(write_model(tmp_path / "model", head_dim=64), tmp_path / "engine", **options)
    engine = inspect_engine(tmp_path / "engine")
    assert [(one.name, one.max_width, one.max_logits) for one in engine.profiles] == [
        ("prefill", 11, 5),
        ("decode", 1, 1),
        ("verify", 5, 5),
    ]
    shapes = {spec.name: spec.shape for spec in engine.tensors}
    assert (shapes["last_token_ids"], shapes["logits"]) == ((-1, -1), (-1, -1, 37))


@pytest.mark.trt
def test_more_logits_store_the_weights_once(tmp_path: Path) -> None:
    """Neither the profile for drafts nor the head over several tokens may keep weights of its own."""
    model = write_model(tmp_path / "model", intermediate_size=80_000, vocab_size=100_000)
    one, more = (build_engine(model, tmp_path / "engine", **SIZES, max_logits_per_slot=logits) for logits in (1, 9))
    assert one.weights_nbytes > 2**25
    assert more.plan_nbytes < one.plan_nbytes + one.weights_nbytes / 4


@pytest.mark.trt
def test_an_engine_of_one_slot_stores_its_weights_once(tmp_path: Path) -> None:
    """Of a profile whose shapes are all fixed TensorRT would store them once more. The compiled kernels differ by some KB."""
    model = write_model(tmp_path / "model", intermediate_size=8192)
    one, two = (build_engine(model, tmp_path / "engine", **{**SIZES, "max_batch_size": slots}) for slots in (1, 2))
    assert one.weights_nbytes > 2**20
    assert one.plan_nbytes < two.plan_nbytes + one.weights_nbytes / 4


@pytest.mark.trt
@pytest.mark.parametrize(
    ("version", "attention", "kind"),
    [("11.3.0", "native", "attention_v2"), ("11.0.0", "mask", "attention_v2"), ("10.16.1", "mask", "attention")],
)
def test_network_for_full_tensorrt(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, version: str, attention: str, kind: str) -> None:
    """TensorRT for RTX under the name of full TensorRT: the same network API, asked for strong types and, if old, without v2."""
    rtx = load("tensorrt_rtx")
    flags, kinds = [], []

    class Builder:
        def __init__(self, logger: Any) -> None:
            self.real = rtx.module.Builder(logger)

        def create_network(self, given: int) -> Any:
            flags.append(given)
            return self.real.create_network(given)

        def __getattr__(self, name: str) -> Any:
            return getattr(self.real, name)

    full = TensorRT(module=SimpleNamespace(**{**vars(rtx.module), "Builder": Builder}), flavour="tensorrt", version=version, log=rtx.log)
    real = Graph.layer

    def recording(graph: Graph, name: str, kind: str, *arguments: Any) -> Any:
        kinds.append(kind)
        return real(graph, name, kind, *arguments)

    monkeypatch.setattr(trt_module, "driver_failure", lambda: None)
    monkeypatch.setattr(Graph, "layer", recording)
    monkeypatch.setattr(checked_build, "load", lambda flavour, *, error: full)
    build_engine(write_model(tmp_path / "model"), tmp_path / "engine", **{**SIZES, "flavour": "tensorrt", "attention": attention})
    assert flags == [1 << int(rtx.module.NetworkDefinitionCreationFlag.STRONGLY_TYPED)]
    assert [each for each in kinds if each.startswith("attention")] == [kind]
    assert EngineFolder.open(tmp_path / "engine").config.tensorrt_flavour == "tensorrt"


@pytest.mark.trt
def test_built_for_named_gpus(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    build_engine(model, tmp_path / "all", **SIZES)
    build_engine(model, tmp_path / "one", **SIZES, compute_capabilities=["12.0"])
    everywhere, one = EngineFolder.open(tmp_path / "all").config, EngineFolder.open(tmp_path / "one").config
    assert everywhere.compute_capabilities is None
    assert one.compute_capabilities == ("12.0",)
    assert one.plan.sha256 != everywhere.plan.sha256


@pytest.mark.trt
def test_progress_names_the_stages_in_order(tmp_path: Path) -> None:
    calls: list[tuple[str, float | None]] = []
    build_engine(write_model(tmp_path / "model"), tmp_path / "engine", **SIZES, progress=lambda stage, done: calls.append((stage, done)))
    assert list(dict.fromkeys(stage for stage, _ in calls)) == ["define network", "build engine", "read checkpoint", "write engine folder"]
    fractions = [done for stage, done in calls if stage == "build engine"]
    assert len(fractions) > 20
    assert fractions == sorted(fractions)  # type: ignore[type-var]
    assert (fractions[0], fractions[-1]) == (0.0, 1.0)


@pytest.mark.trt
@pytest.mark.parametrize("stage", ["define network", "build engine", "read checkpoint", "write engine folder"])
@pytest.mark.parametrize("existing", [False, True])
def test_an_interrupt_leaves_nothing_and_keeps_the_old_engine(tmp_path: Path, stage: str, existing: bool) -> None:
    model, place = write_model(tmp_path / "model"), tmp_path / "place"
    place.mkdir()
    before = {}
    if existing:
        build_engine(model, place / "engine", **SIZES)
        before = {file.name: file.read_bytes() for file in (place / "engine").iterdir()}

    def interrupt(now: str, done: float | None) -> None:
        if now == stage and (done or 0) >= (0.5 if stage == "build engine" else 0):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_engine(model, place / "engine", **{**SIZES, "max_batch_size": 2}, progress=interrupt)
    assert os.listdir(place) == (["engine"] if existing else [])
    if existing:
        assert {file.name: file.read_bytes() for file in (place / "engine").iterdir()} == before
        EngineFolder.open(place / "engine").read_plan().close()


@pytest.mark.trt
def test_a_failure_while_writing_leaves_nothing_and_keeps_the_old_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, place = write_model(tmp_path / "model"), tmp_path / "place"
    (model / "tokenizer.json").write_text(TOKENIZER)
    build_engine(model, place / "engine", **SIZES)
    before = {file.name: file.read_bytes() for file in (place / "engine").iterdir()}
    for breaking in ("copyfile", "rename"):
        with monkeypatch.context() as patch:
            calls = []

            def fail(*arguments: Any, breaking: str = breaking, calls: list[Any] = calls, real: Any = os.rename) -> None:
                calls.append(arguments)
                if breaking == "copyfile" or len(calls) == 2:  # the second rename puts the new folder in place
                    raise OSError(28, "No space left on device")
                real(*arguments)

            patch.setattr(shutil if breaking == "copyfile" else os, breaking, fail)
            patch.setattr(atomic_folder, "_exchange", lambda *folders: False)  # where a system cannot, there are two renames
            with pytest.raises(OSError, match="No space left on device"):
                build_engine(model, place / "engine", **{**SIZES, "max_batch_size": 2})
            assert calls
        assert os.listdir(place) == ["engine"]
        assert {file.name: file.read_bytes() for file in (place / "engine").iterdir()} == before


@pytest.mark.trt
def test_rebuild_replaces_an_engine_folder(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    build_engine(model, tmp_path / "engine", **SIZES, embed_weights=True)
    assert EngineFolder.open(tmp_path / "engine").checkpoint_path.is_dir()
    build_engine(model, tmp_path / "engine", **{**SIZES, "max_batch_size": 2})
    folder = EngineFolder.open(tmp_path / "engine")
    assert folder.config.cache.max_batch_size == 2
    assert not folder.checkpoint_path.exists()
    assert sorted(os.listdir(tmp_path)) == ["engine", "model"]


@pytest.mark.trt
def test_error_of_tensorrt_has_its_text_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, place = write_model(tmp_path / "model", num_attention_heads=2), tmp_path / "place"

    def fused(layer: int, variant: str, **_: Any) -> AttentionLayerConfig:
        return AttentionLayerConfig(layer=layer, variant=variant, decomposable=False)

    monkeypatch.setattr(decoder, "attention_layer_config", fused)
    with pytest.raises(BuildError, match=r"the engine could not be built. TensorRT says: .*not supported by a dedicated kernel") as raised:
        build_engine(model, place / "engine", **SIZES, attention="native")
    assert "cudaError" not in str(raised.value)
    assert not place.exists()


@pytest.mark.trt
def test_error_in_the_network_names_the_layer_and_not_the_missing_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from trt_kvcache.builder.network import rope

    real = rope.rope_table
    monkeypatch.setattr(rope, "rope_table", lambda *arguments: tuple(table[:, 1:] for table in real(*arguments)))
    with pytest.raises(
        BuildError, match=r"layer `model\.layers\.0\.self_attn/q/rotate`: its inputs do not fit\. TensorRT says: "
    ) as raised:
        build_engine(write_model(tmp_path / "model"), tmp_path / "engine", **SIZES)
    assert "cudaError" not in str(raised.value)
    assert os.listdir(tmp_path) == ["model"]


@pytest.mark.trt
def test_profile_that_tensorrt_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = serialization.step_shape
    monkeypatch.setattr(serialization, "step_shape", lambda *given, **sizes: tuple(-size for size in real(*given, **sizes)))
    with pytest.raises(BuildError, match=r"optimisation profile prefill: TensorRT refused it. TensorRT says: "):
        build_engine(write_model(tmp_path / "model"), tmp_path / "engine", **SIZES, attention="native")
    assert os.listdir(tmp_path) == ["model"]


@pytest.mark.trt
def test_weights_too_large_for_float16(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", torch_dtype="float32", scale=1e5)
    with pytest.raises(BuildError, match=r"weight `model\.embed_tokens\.weight`: it holds float32 values that float16 cannot hold"):
        build_engine(model, tmp_path / "engine", **SIZES, dtype="float16")
    assert os.listdir(tmp_path) == ["model"]


@pytest.fixture
def no_tensorrt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make any use of TensorRT fail: what is refused here is refused before."""

    def unreachable(*arguments: Any, **options: Any) -> TensorRT:
        raise AssertionError("TensorRT was reached")

    monkeypatch.setattr(checked_build, "load", unreachable)
    monkeypatch.setattr(builder, "define_decoder", unreachable)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_prefill_length": 39}, r"max_prefill_length: expected at most max_sequence_length=38, got 39"),
        ({"max_batch_size": 0}, r"max_batch_size: expected at least 1, got 0"),
        ({"dtype": "float8_e4m3fn"}, r"dtype: expected one of float16, bfloat16, float32, got 'float8_e4m3fn'"),
        ({"attention": "both"}, r"attention: expected one of auto, native, mask, plugin, got 'both'"),
        ({"compute_capabilities": []}, r"compute_capabilities: expected a sequence"),
    ],
)
def test_options_refused_before_anything(no_tensorrt: None, tmp_path: Path, change: dict[str, Any], message: str) -> None:
    model = write_model(tmp_path / "model")
    with pytest.raises(ConfigError, match=message):
        build_engine(model, tmp_path / "new" / "engine", **{**SIZES, **change})
    assert os.listdir(tmp_path) == ["model"]


def test_without_tensorrt_no_weights_are_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(flavour: str, *, error: type[Exception]) -> TensorRT:
        raise error("TensorRT is not there")

    def unreachable(*arguments: Any, **options: Any) -> Checkpoint:
        raise AssertionError("the checkpoint was opened")

    monkeypatch.setattr(checked_build, "load", missing)
    monkeypatch.setattr(checked_build, "open_checkpoint", unreachable)
    with pytest.raises(BuildError, match="TensorRT is not there"):
        build_engine(write_model(tmp_path / "model"), tmp_path / "engine", **SIZES)


@pytest.mark.trt
def test_native_attention_is_refused_before_a_network_where_it_has_no_window(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(definition, "Graph", None)
    message = "attention: expected mask, got native: layers[0].mixer.window = 7, and TensorRT's attention layer has no window."
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        build_engine(GOLDEN / "gemma2", tmp_path / "engine", **SIZES, attention="native")
    assert not os.listdir(tmp_path)


@pytest.mark.trt
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"head_dim": 20}, r"head_dim: expected a multiple of 8 from 16 to 256, the model has 20\. .* the reference engine runs it"),
        ({"head_dim": 264}, r"head_dim: expected a multiple of 8 from 16 to 256, the model has 264"),
        ({"max_position_embeddings": 37}, r"max_sequence_length: expected at most 37, the positions that the model was made for"),
    ],
)
def test_model_refused_before_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], message: str) -> None:
    def unreachable(*arguments: Any, **options: Any) -> None:
        raise AssertionError("a network was made")

    monkeypatch.setattr(definition, "Graph", unreachable)
    model = write_model(tmp_path / "model", **change)
    with pytest.raises(ConfigError, match=message):
        build_engine(model, tmp_path / "engine", **SIZES)
    assert os.listdir(tmp_path) == ["model"]


def test_place_that_holds_something_else(no_tensorrt: None, tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    notes = tmp_path / "notes"
    notes.mkdir()
    (notes / "thesis.txt").write_text("mine")
    with pytest.raises(
        ConfigError, match=r"engine path .*notes: expected a folder to make or an engine folder to replace, but it holds thesis\.txt"
    ):
        build_engine(model, notes, **SIZES)
    (notes / "engine.plan").write_bytes(b"plan")  # an engine folder with something of the user's in it
    with pytest.raises(ConfigError, match=r"but it holds thesis\.txt\. Choose another path"):
        build_engine(model, notes, **SIZES)
    with pytest.raises(ConfigError, match=r"but it holds config\.json, model\.safetensors"):
        build_engine(model, model, **SIZES)
    with raises(ConfigError, "thesis.txt", expected="folder to make or an engine folder to replace", got="file"):
        build_engine(model, notes / "thesis.txt", **SIZES)
    with pytest.raises(ConfigError, match=r"engine path .*: nothing can be written to .*thesis\.txt"):
        build_engine(model, notes / "thesis.txt" / "engine", **SIZES)
    assert (notes / "thesis.txt").read_text() == "mine"
    assert sorted(os.listdir(tmp_path)) == ["model", "notes"]


def test_model_inside_the_folder_to_replace(no_tensorrt: None, tmp_path: Path) -> None:
    write_model(tmp_path / "engine" / "checkpoint")
    (tmp_path / "engine" / "engine.plan").write_bytes(b"plan")
    with pytest.raises(ConfigError, match=r"the model .*checkpoint is in it and would be replaced"):
        build_engine(tmp_path / "engine" / "checkpoint", tmp_path / "engine", **SIZES)
    assert (tmp_path / "engine" / "checkpoint" / "model.safetensors").is_file()


@pytest.mark.trt
def test_damaged_checkpoint(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    with (model / "model.safetensors").open("r+b") as file:
        file.truncate(1000)
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        build_engine(model, tmp_path / "engine", **SIZES)
    assert os.listdir(tmp_path) == ["model"]


def test_tensorrt_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from trt_kvcache.trt import module as trt_module

    monkeypatch.setattr(trt_module, "_import", lambda flavour: "not installed; pip install 'trt-kvcache[rtx]'.")
    with pytest.raises(BuildError, match=r"TensorRT cannot be used\. .*pip install 'trt-kvcache\[rtx\]'"):
        build_engine(write_model(tmp_path / "model"), tmp_path / "engine", **SIZES)
    assert os.listdir(tmp_path) == ["model"]


@pytest.mark.trt
def test_what_is_copied_beside_the_plan(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    companions = {
        "tokenizer.json": TOKENIZER,
        "tokenizer_config.json": '{"a": 1}',
        "chat_template.jinja": "{{ x }}",
        "chat_template.json": "{}",
        "generation_config.json": "{}",
    }
    for name, text in {**companions, "README.md": "not copied"}.items():
        (model / name).write_text(text)
    build_engine(model, tmp_path / "engine", **SIZES, embed_weights=True)
    engine = tmp_path / "engine"
    assert sorted(os.listdir(engine)) == sorted([*companions, "engine.plan", "config.json", "checkpoint"])
    assert {name: (engine / name).read_text() for name in companions} == companions
    assert (engine / "checkpoint" / "model.safetensors").read_bytes() == (model / "model.safetensors").read_bytes()
    assert not (engine / "checkpoint" / "README.md").exists()
    data = json.loads((engine / "config.json").read_text())
    assert data["checkpoint"]["embedded"] is True
    with pytest.raises(EngineError):
        EngineFolder.open(model)


@pytest.mark.trt
def test_a_damaged_tokenizer_is_named_before_the_build(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    (model / "tokenizer.json").write_text("{")
    with raises(CheckpointError, "tokenizer.json", "tokenizer"):
        build_engine(model, tmp_path / "engine", **SIZES)
    assert not (tmp_path / "engine").exists()


@pytest.mark.trt
@pytest.mark.parametrize("options", [{}, {"kv_dtype": "int8"}, {"max_logits_per_slot": 5, "compute_capabilities": ["8.9"]}], ids=str)
def test_plugin_attention_is_built_into_one_plan(tmp_path, options):
    model = write_model(tmp_path / "model", head_dim=64, num_hidden_layers=2, tie_word_embeddings=True)
    report = build_engine(model, tmp_path / "engine", **SIZES, attention="plugin", **options)
    folder = EngineFolder.open(tmp_path / "engine")
    assert sorted(path.name for path in folder.path.iterdir()) == ["config.json", "engine.plan"]
    assert (folder.config.segments, folder.config.attention_variant, report.warnings) == (None, "plugin", ())
    aliases = {spec.name: spec.alias for spec in folder.config.tensors if spec.alias}
    assert aliases.items() >= {f"present_key_values_{layer}": f"past_key_values_{layer}" for layer in range(2)}.items()
    with folder.read_plan() as plan:
        assert plan.find(b"KVCacheAttention") > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"plugin_layers": "cut"}, "plugin_layers: expected one of one-plan, segments, got 'cut'."),
        (
            {"operations": {"softmax": "attention"}},
            "operations: expected one of attention, embedding, experts, packed_linear, got 'softmax'.",
        ),
        ({"operations": {"attention": "unknown"}}, "operations['attention']: expected one of attention, embedding"),
        (
            {"operations": {"attention": "embedding"}, "attention": "native"},
            "operations: expected none with native attention, got attention.",
        ),
        ({"plugin_library": "nowhere.so"}, "plugin_library: expected the file of a plugin library, got nowhere.so"),
        ({"plugin_library": __file__, "attention": "mask"}, "plugin_library: expected plugin attention with it, got mask."),
        ({"plugin_library": __file__, "plugin_layers": "segments"}, "plugin_library: expected with plugin_layers=one-plan, got segments"),
        (
            {"plugin_library": __file__, "operations": {"attention": "attention"}},
            "plugin_library: expected no operations with it, got attention",
        ),
    ],
)
def test_plugin_layers_and_operations_that_are_refused(tmp_path, options, message):
    with pytest.raises(ConfigError) as caught:
        build_engine(SHIPPED, tmp_path / "engine", **{"attention": "plugin", **options})
    assert str(caught.value).startswith(message)
    assert not (tmp_path / "engine").exists()


@pytest.mark.parametrize("attention", ["auto", "plugin"])
def test_a_plugin_library_needs_plugin_layers(tmp_path, attention):
    with raises(ConfigError, "plugin_library", expected="a model with attention layers", got="mamba2"):
        build_engine(GOLDEN / "mamba2", tmp_path / "engine", attention=attention, plugin_library=__file__)
    assert not (tmp_path / "engine").exists()


@pytest.mark.trt
def test_a_tensorrt_whose_engines_carry_no_library_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(load("tensorrt_rtx").module, "IBuilderConfig", SimpleNamespace())
    model = write_model(tmp_path / "model", head_dim=64)
    with raises(ConfigError, "plugin_library", expected="a TensorRT whose engines carry plugin libraries", got="tensorrt_rtx"):
        build_engine(model, tmp_path / "engine", **SIZES, plugin_library=__file__)
    assert not (tmp_path / "engine").exists()


class WithoutCache(AttentionOp):
    def outputs(self, inputs):
        return super().outputs(inputs)[:1]


@pytest.mark.trt
def test_a_registered_operation_needs_the_outputs_of_ours(tmp_path, monkeypatch):
    monkeypatch.setitem(registry.OPERATIONS, "without_cache", WithoutCache)
    model = write_model(tmp_path / "model", head_dim=64)
    with pytest.raises(ConfigError, match=r"^operations: expected without_cache to have the outputs of attention, \(TensorType.*, got \(T"):
        build_engine(model, tmp_path / "engine", **SIZES, attention="plugin", operations={"attention": "without_cache"})


@pytest.mark.trt
@pytest.mark.parametrize("plugin_layers", ["one-plan", "segments"])
def test_a_registered_operation_is_built_in_place_of_ours(tmp_path, monkeypatch, plugin_layers):
    monkeypatch.setitem(registry.OPERATIONS, "windowed", partial(AttentionOp, window=5))
    model = write_model(tmp_path / "model", head_dim=64)
    options = {"attention": "plugin", "plugin_layers": plugin_layers, "operations": {"attention": "windowed"}}
    build_engine(model, tmp_path / "engine", **SIZES, **options)
    folder = EngineFolder.open(tmp_path / "engine")
    if plugin_layers == "segments":
        operations = [stage.operation for stage in folder.config.segments.stages if isinstance(stage, CustomOpNode)]
        assert operations == ["embedding", "windowed"]
    else:
        with folder.read_plan() as plan:
            assert (plan.find(b"CustomOperation") > 0, plan.find(b"windowed") > 0, plan.find(b"KVCacheAttention")) == (True, True, -1)


@pytest.mark.trt
def test_plugin_attention_is_built_in_segments_by_rtx(tmp_path):
    model = write_model(tmp_path / "model", head_dim=64, num_hidden_layers=2, tie_word_embeddings=True)
    report = build_engine(model, tmp_path / "engine", **SIZES, attention="plugin", plugin_layers="segments")
    folder = EngineFolder.open(tmp_path / "engine")
    assert sorted(path.name for path in folder.path.iterdir()) == ["config.json", "constants.safetensors", "engine.plan"]
    assert [choice.variant for choice in report.attention] == ["plugin"] * 2
    with folder.read_plan() as plan:
        assert len(plan) == report.plan_nbytes == folder.config.segments.spans[-1][1]
    with Checkpoint.open(model) as checkpoint:
        np.testing.assert_array_equal(folder.read_constants()["model.embed_tokens.weight"], checkpoint.tensor("model.embed_tokens.weight"))


@pytest.mark.trt
def test_plugin_attention_of_other_families_is_built_in_segments(tmp_path):
    gemma = {"model_type": "gemma3_text", "head_dim": 64, "num_hidden_layers": 3, "sliding_window": 7, "sliding_window_pattern": 3}
    build_engine(write_model(tmp_path / "model", **gemma), tmp_path / "engine", **SIZES, attention="plugin", plugin_layers="segments")
    folder = EngineFolder.open(tmp_path / "engine")
    assert sorted(folder.read_constants()) == ["model.embed_tokens.weight", "rope.cos_sin", "rope.cos_sin_1"]
    nodes = [stage for stage in folder.config.segments.stages if isinstance(stage, CustomOpNode)][1:]
    assert [(node.attributes.get("window"), node.inputs[-1]) for node in nodes] == [
        (7, "rope.cos_sin"),
        (7, "rope.cos_sin"),
        (None, "rope.cos_sin_1"),
    ]


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({}, {}, "head_dim: expected one of 64, 80, 96, 128, 256, 512 for plugin attention, got 24."),
        ({"head_dim": 64}, {"dtype": "float32"}, "dtype: expected one of float16, bfloat16 for plugin attention, got float32."),
        ({"head_dim": 64}, {"compute_capabilities": ["8.6", "7.5"]}, "compute_capabilities: expected 8.0 or more for plugin "),
    ],
)
@pytest.mark.trt
def test_models_that_the_plugin_does_not_support(tmp_path, changes, options, message):
    with pytest.raises(ConfigError) as raised:
        build_engine(write_model(tmp_path / "model", **changes), tmp_path / "engine", **SIZES, attention="plugin", **options)
    assert str(raised.value).startswith(f"attention: expected native or mask, got plugin: {message}")
    assert not (tmp_path / "engine").exists()
