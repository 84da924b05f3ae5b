from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.models import write_model
from tests.helpers.quantized_models import CASES, write_quantized
from trt_kvcache import build_engine, estimate_build
from trt_kvcache.cli import build as build_module
from trt_kvcache.cli.flag_names import flags_of, in_flags, naming_flags
from trt_kvcache.cli.option_groups import flat_parameters
from trt_kvcache.engine_folder.folder import EngineFolder
from trt_kvcache.errors import BuildError, ConfigError

from .conftest import CONFIG, GOLDEN, SHIPPED, Run
from .test_inspect import rows


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the builder is asked for; it refuses everything."""
    seen: dict[str, Any] = {}

    def refuse(model: Path, target: Path, **options: Any) -> None:
        seen.update(options, model=model, target=target)
        raise BuildError("the engine could not be built. TensorRT says: no")

    monkeypatch.setattr(build_module, "build_in_child", refuse)
    return seen


def test_what_is_not_given_is_left_to_the_builder(run: Run, asked: dict[str, Any], tmp_path: Path):
    done = run("build", SHIPPED, "-o", tmp_path / "engine")
    assert (done.code, done.out, done.err) == (1, "", "error: the engine could not be built. TensorRT says: no\n")
    assert callable(asked.pop("progress"))
    assert callable(asked.pop("on_interrupt"))
    assert asked == {
        "model": SHIPPED,
        "target": tmp_path / "engine",
        "max_batch_size": 1,
        "kv_dtype": None,
        "kv_scales": None,
        "max_sequence_length": None,
        "max_prefill_length": None,
        "max_logits_per_slot": 1,
        "dtype": None,
        "attention": "auto",
        "plugin_layers": "one-plan",
        "plugin_library": None,
        "v_outputs": None,
        "packed_kernels": False,
        "operations": None,
        "flavour": "auto",
        "device": 0,
        "embed_weights": False,
        "compute_capabilities": None,
        "builder_optimization_level": None,
        "timing_cache": None,
        "quantize": None,
        "adapter": None,
        "adapters_rank": None,
        "adapters_modules": None,
        "draft_head": None,
        "max_embeddings": 0,
        "draft_tree": None,
    }


def test_options_reach_the_builder(run: Run, asked: dict[str, Any], tmp_path: Path):
    sizes = ["--max-batch-size", 3, "--max-sequence-length", 99, "--max-prefill-length", 17]
    kinds = ["--dtype", "float32", "--attention", "mask", "--flavour", "tensorrt_rtx", "--embed-weights"]
    run("build", SHIPPED, "--output", tmp_path, *sizes, *kinds, "--compute-capability", "8.6", "--compute-capability", "12.0")
    assert (asked["max_batch_size"], asked["max_sequence_length"], asked["max_prefill_length"]) == (3, 99, 17)
    assert (asked["dtype"], asked["attention"], asked["flavour"], asked["embed_weights"]) == ("float32", "mask", "tensorrt_rtx", True)
    assert asked["compute_capabilities"] == ["8.6", "12.0"]
    run("build", SHIPPED, "-o", tmp_path, "--builder-optimization-level", 0, "--timing-cache", tmp_path / "timings", "--device", 1)
    assert (asked["builder_optimization_level"], asked["timing_cache"], asked["device"]) == (0, tmp_path / "timings", 1)
    run("build", SHIPPED, "-o", tmp_path, "--plugin-library", tmp_path / "plugins.so")
    assert asked["plugin_library"] == tmp_path / "plugins.so"
    run("build", SHIPPED, "-o", tmp_path / "engine", "--packed-kernels")
    assert asked["packed_kernels"] is True
    for flag, expected in (("--v-outputs", True), ("--no-v-outputs", False)):
        run("build", SHIPPED, "-o", tmp_path, flag)
        assert asked["v_outputs"] is expected
    run("build", SHIPPED, "-o", tmp_path, "--adapters-rank", 24, "--adapters-module", "q_proj", "--adapters-module", "v_proj")
    assert (asked["adapters_rank"], asked["adapters_modules"]) == (24, ["q_proj", "v_proj"])
    for given in ("mtp", str(SHIPPED)):
        run("build", SHIPPED, "-o", tmp_path, "--draft-head", given)
        assert asked["draft_head"] == given
    run("build", SHIPPED, "-o", tmp_path, "--max-embeddings", 4096)
    assert asked["max_embeddings"] == 4096
    run("build", SHIPPED, "-o", tmp_path, "--draft-tree", 32)
    assert asked["draft_tree"] == 32
    for given, expected in (("all", "all"), ("17", 17)):
        run("build", SHIPPED, "-o", tmp_path, "--max-logits-per-slot", given)
        assert asked["max_logits_per_slot"] == expected


@pytest.mark.parametrize("given", ["0", "-1", "every", "1.5"])
def test_a_number_of_logits_that_is_none(run: Run, asked: dict[str, Any], tmp_path: Path, given: str):
    done = run("build", SHIPPED, "-o", tmp_path, "--max-logits-per-slot", given)
    assert (done.code, done.out, asked) == (2, "", {})
    assert f"expected a number of tokens from 1, or all, got '{given}'." in done.complaint


@pytest.mark.parametrize(
    ("target", "complaint"),
    [
        ("file", "expected a folder to make or an engine folder to replace, got a file."),
        ("file/engine", "nothing can be written to"),
        ("full", "but it holds notes.txt. Choose another path."),
    ],
)
def test_a_target_that_cannot_be_created(run: Run, tmp_path: Path, target: str, complaint: str):
    (tmp_path / "file").touch()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").touch()
    done = run("build", SHIPPED, "-o", tmp_path / target)
    assert (done.code, done.out) == (1, "")
    assert complaint in done.err
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["file", "full", "notes.txt"]


def test_the_model_folder_is_refused_as_the_target(run: Run, model: Path):
    before = sorted(model.iterdir())
    done = run("build", model, "-o", model)
    assert done.code == 1
    assert sorted(model.iterdir()) == before


def test_the_error_says_that_kv_dtype_chose_plugin_attention(run: Run, tmp_path: Path):
    done = run("build", SHIPPED, "-o", tmp_path / "engine", "--kv-dtype", "fp8", "--dry-run")
    assert done.code == 1
    assert done.err == (
        "error: head_dim: expected one of 64, 80, 96, 128, 256, 512 for plugin attention, got 16. "
        "--kv-dtype=fp8 chose plugin attention: no other variant supports 8-bit K and V.\n"
    )
    assert "chose" not in run("build", SHIPPED, "-o", tmp_path / "engine", "--attention", "plugin", "--dry-run").err


def test_sizes_below_one_are_wrong_usage(run: Run, tmp_path: Path):
    for option in ("--max-batch-size", "--max-sequence-length", "--max-prefill-length"):
        assert run("build", SHIPPED, "-o", tmp_path / "engine", option, 0).code == 2


@pytest.mark.trt
class TestWithTensorRT:
    def test_attention_that_computes_the_model_is_chosen(self, run: Run, tmp_path: Path):
        sizes = ("--max-sequence-length", 32, "--max-prefill-length", 8, "--flavour", "tensorrt_rtx")
        done = run("build", GOLDEN / "gemma3", "-o", tmp_path / "engine", *sizes)
        assert (done.code, done.err) == (0, "")
        assert EngineFolder.open(tmp_path / "engine").config.attention_variant == "mask"
        shown = run("inspect", tmp_path / "engine")
        assert shown.code == 0
        assert "mask" in shown.out

    def test_an_engine_folder_is_made_and_runs(self, run: Run, tmp_path: Path):
        target = tmp_path / "[red]new folder[/]" / "engine"
        done = run("build", SHIPPED, "-o", target, "--max-batch-size", 2)
        assert (done.code, done.err) == (0, "")
        assert done.out.startswith(f"{target}: ")
        assert " by tensorrt_rtx 1." in done.out
        assert "\n2 slots of 512 tokens, float16; for all GPUs that tensorrt_rtx supports\n" in done.out
        assert "\nattention: native, because doctor has not passed on this machine" in done.out
        assert done.out.endswith(f"\nnext: trt-kvcache generate '{target}' --prompt \"...\"\n")
        generated = run("generate", target, "--engine", "reference", "-p", "The rabbit-hole went straight", "--max-new-tokens", 9)
        assert generated.out.startswith("The rabbit-hole went straight on like a tunnel")

    def test_a_rounded_plan_that_is_larger_is_explained(self, run: Run, tmp_path: Path):
        sizes = ("--max-sequence-length", 32, "--max-prefill-length", 8, "--compute-capability", "8.6")
        done = run("build", SHIPPED, "-o", tmp_path / "engine", *sizes, "--quantize", "int4")
        assert "; for GPUs of compute capability 8.6\n" in done.out
        assert "without --quantize the plan would take about 4." in done.err
        assert "kernels for rounded weights take more than rounding saves of a model this small" in done.err

    def test_json_is_one_document(self, run: Run, tmp_path: Path):
        done = run("build", SHIPPED, "-o", tmp_path / "engine", "--max-sequence-length", 32, "--json")
        report = json.loads(done.out)
        assert (report["path"], report["tensorrt"][:14]) == (str(tmp_path / "engine"), "tensorrt_rtx 1")
        assert report["plan_nbytes"] == (tmp_path / "engine" / "engine.plan").stat().st_size
        assert [layer["variant"] for layer in report["attention"]] == ["native"] * CONFIG.num_layers

    def test_verbose_shows_what_tensorrt_says(self, run: Run, tmp_path: Path):
        arguments = ("build", SHIPPED, "-o", tmp_path / "engine", "--max-sequence-length", 32)
        few = run(*arguments, "-v").err.splitlines()
        assert len(few) >= 1
        assert all(line.startswith("trt_kvcache.") for line in few)
        assert any(line.startswith("trt_kvcache.tensorrt: ") for line in few)
        assert len(run(*arguments, "-vv").err.splitlines()) > 10 * len(few)

    def test_a_level_of_optimisation(self, run: Run, tmp_path: Path):
        assert run("build", SHIPPED, "-o", tmp_path / "engine", "--builder-optimization-level", 0).code == 0

    def test_what_was_built_is_what_inspect_and_memory_show(self, run: Run, built_engine: Path):
        shown = run("inspect", built_engine).out
        assert "cache: 2 slots of 64 tokens, float16, separate" in shown
        assert rows(shown, "Optimisation profiles") == [["0", "prefill", "1-2", "1-64"], ["1", "decode", "1-2", "1"]]
        assert rows(shown, "Sizes")[0][1] == str((built_engine / "engine.plan").stat().st_size)
        assert "2 slots of 64 tokens, float16, separate" in run("memory", built_engine).out

    def test_decomposable_attention_is_reported_with_the_reason(self, run: Run, tmp_path: Path):
        done = run("build", GOLDEN / "llama", "-o", tmp_path / "engine", "--dtype", "float32")
        assert done.code == 0
        layers = len(rows(run("inspect", tmp_path / "engine").out, "Attention"))
        assert layers >= 1
        assert "is decomposable; `trt-kvcache inspect " in done.out
        for row in rows(run("inspect", tmp_path / "engine").out, "Attention"):
            assert row[2].startswith("yes: ")
            assert "float32" in row[2]

    def test_an_engine_folder_is_replaced(self, run: Run, built_engine: Path):
        assert run("build", SHIPPED, "-o", built_engine, "--max-sequence-length", 32).code == 0
        assert "1 slot of 32 tokens" in run("memory", built_engine).out
        assert [path.name for path in built_engine.parent.iterdir()] == [built_engine.name]

    @pytest.mark.parametrize(
        ("arguments", "complaint"),
        [
            (["--compute-capability", "9.9"], "9.9"),
            (["--max-sequence-length", 1024], "512"),
            (["--timing-cache", "timings"], "--timing-cache: expected with full TensorRT only"),
            (["--max-sequence-length", 8, "--max-prefill-length", 9], "--max-prefill-length"),
            (["--max-batch-size", 10**12], "max_batch_size"),
        ],
        ids=str,
    )
    def test_what_cannot_be_built(self, run: Run, tmp_path: Path, arguments: list[object], complaint: str):
        done = run("build", SHIPPED, "-o", tmp_path / "engine", *arguments)
        assert (done.code, done.out, done.err.count("\n")) == (1, "", 1)
        assert complaint in done.err
        assert list(tmp_path.iterdir()) == []


def test_a_dry_run_prints_sizes_and_builds_nothing(run: Run, tmp_path: Path):
    done = run("build", SHIPPED, "-o", tmp_path / "engine", "--dry-run")
    assert done.code == 0
    assert "plan: weights and kernels" in done.out
    assert done.err == ""
    assert not (tmp_path / "engine").exists()


def test_a_dry_run_refuses_what_the_build_would(run: Run, tmp_path: Path):
    done = run("build", SHIPPED, "-o", tmp_path / "engine", "--dry-run", "--max-sequence-length", 513)
    assert done.code == 1
    assert "--max-sequence-length: expected at most 512" in done.err


REFUSED_BUILDS = [
    (
        None,
        {"quantize": "int4", "compute_capabilities": ["7.5"]},
        "compute_capabilities: expected 8.0 or more for weights in int4, got 7.5. Leave it out, or round them to int8.",
    ),
    (
        "fp8",
        {"compute_capabilities": ["8.6"]},
        "compute_capabilities: expected 8.9 or more for weights in float8_e4m3fn, got 8.6. Leave it out, or take a checkpoint of the model",
    ),
    (None, {"kv_dtype": "fp8", "kv_scales": "head"}, "kv_scales: expected token, as the checkpoint has no static scales"),
    (None, {"kv_dtype": "fp8", "attention": "mask"}, "kv_dtype: expected plugin attention"),
    (None, {"timing_cache": "nowhere/timings"}, "timing_cache: expected a file in a folder that exists"),
    pytest.param(None, {"compute_capabilities": ["9.0"]}, "compute_capabilities: expected some of 7.5, 8.0", marks=pytest.mark.trt),
]


@pytest.mark.filterwarnings("ignore:.*activations are not quantized")
@pytest.mark.parametrize(("kind", "options", "complaint"), REFUSED_BUILDS, ids=lambda value: str(value)[:40])
def test_a_dry_run_says_what_the_build_would(run: Run, tmp_path: Path, kind: str | None, options: dict[str, Any], complaint: str) -> None:
    model = write_model(tmp_path / "model", head_dim=64)
    if kind == "fp8":
        quantize, config = CASES["modelopt-fp8"]
        write_quantized(tmp_path / "quantized", str(model), quantize, config)
        model = tmp_path / "quantized"
    with pytest.raises(ConfigError) as caught:
        build_engine(model, tmp_path / "engine", flavour="tensorrt_rtx", **options)
    if "timing_cache" not in options:
        with pytest.raises(ConfigError) as estimated:
            estimate_build(model, flavour="tensorrt_rtx", **options)
        assert str(estimated.value) == str(caught.value)
    flags = []
    for name, value in options.items():
        flags += ["--compute-capability", *value] if name == "compute_capabilities" else [f"--{name.replace('_', '-')}", value]
    done = run("build", model, "-o", tmp_path / "engine", "--dry-run", "--flavour", "tensorrt_rtx", *flags)
    assert (done.code, done.out) == (1, "")
    with naming_flags(flags_of(flat_parameters(build_module.build))):
        assert in_flags(str(caught.value)) in done.err
    assert str(caught.value).startswith(complaint)


def test_a_dry_run_needs_no_weights(run: Run, tmp_path: Path):
    (tmp_path / "model").mkdir()
    shutil.copy(SHIPPED / "config.json", tmp_path / "model")
    dry_run = ("build", tmp_path / "model", "-o", tmp_path / "engine", "--dry-run")
    done = run(*dry_run, "--quantize", "int8")
    assert done.code == 0
    assert "no weights found, which a build needs; only config.json was checked" in done.err
    done = run(*dry_run, "--quantize", "int4", "--compute-capability", "7.5")
    assert "expected 8.0 or more for weights in int4" in done.err
