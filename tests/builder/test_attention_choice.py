"""The choice of a variant of attention: rules, obstacles, doctor's verdict, and the next variant after a failed build."""

from __future__ import annotations

import re
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from tests.helpers.assertions import raises
from tests.helpers.fake_tensorrt import fake_module
from tests.helpers.models import SMALL, with_mixer, write_model
from tests.paths import GOLDEN
from trt_kvcache.builder import build_engine as builder, checked_build
from trt_kvcache.builder.attention_choice import AttentionBuild, AttentionChoice, BuildTarget, choose_attention
from trt_kvcache.builder.build_engine import build_engine
from trt_kvcache.builder.checked_build import build_target, use_device
from trt_kvcache.builder.options import BuildOptions
from trt_kvcache.builder.resolved_options import ResolvedOptions
from trt_kvcache.checkpoint import Checkpoint
from trt_kvcache.engine import doctor_verdict
from trt_kvcache.engine.doctor_verdict import DoctorVerdict, write_verdict
from trt_kvcache.engine_folder.folder import EngineFolder
from trt_kvcache.errors import BuildError, ConfigError
from trt_kvcache.model import ModelConfig, RopeConfig
from trt_kvcache.trt.log import TensorRTLog
from trt_kvcache.trt.module import TensorRT

ODD = ModelConfig.from_dict(SMALL)  # head_dim 24: not in our kernels
MODEL = with_mixer(ODD, head_dim=64)
PARTIAL = RopeConfig(kind="default", theta=1e4, partial_rotary_factor=18 / 64)


def rtx(release: tuple[int, int] | None = (1, 7), **more: Any) -> BuildTarget:
    return BuildTarget(tensorrt="tensorrt_rtx", is_rtx=True, release=release, **more)


def full(major: int, minor: int, **more: Any) -> BuildTarget:
    return BuildTarget(tensorrt=f"tensorrt {major}.{minor}", is_rtx=False, release=(major, minor), **more)


def choose(target: BuildTarget, model: ModelConfig = MODEL, *, named: str = "auto", **changes: Any) -> AttentionChoice:
    sizes: dict[str, Any] = {"dtype": "float16", "kv_dtype": None, "max_sequence_length": 40, **changes}
    return choose_attention(named, AttentionBuild(model=model, target=target, **sizes))


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        (rtx(), ("native", "mask", "plugin")),
        (rtx(None), ("native", "mask", "plugin")),
        (rtx(doctor_passed=True), ("plugin", "native", "mask")),
        (rtx((1, 4)), ("mask", "plugin")),
        (rtx((1, 4), doctor_passed=True), ("plugin", "mask")),
        (full(10, 3), ("plugin",)),  # JetPack 6.1, 6.2
        (full(10, 13), ("plugin",)),
        (full(10, 15), ("plugin", "mask")),
        (full(11, 1), ("plugin", "mask")),
        (full(11, 4), ("plugin", "mask")),
        (full(11, 4, doctor_passed=True), ("plugin", "mask")),
    ],
)
def test_variants_in_the_order_of_auto(target: BuildTarget, expected: tuple[str, ...]) -> None:
    choice = choose(target)
    assert (choice.variant, *choice.others) == expected
    assert choice.is_auto
    assert choice.reason


@pytest.mark.parametrize(
    ("target", "model", "options", "variant"),
    [
        (rtx(doctor_passed=True), ODD, {}, "native"),
        (rtx(doctor_passed=True), MODEL, {"dtype": "float32"}, "native"),
        (rtx(), with_mixer(MODEL, window=39), {}, "mask"),
        (rtx(), with_mixer(MODEL, window=40), {}, "native"),
        (rtx(), with_mixer(MODEL, softcap=2.0), {}, "mask"),
        (full(11, 1), ODD, {}, "mask"),
        (full(11, 4), with_mixer(MODEL, num_heads=34, num_kv_heads=2), {}, "mask"),
        (full(11, 4), MODEL, {"dtype": "float32"}, "mask"),
        (full(11, 4, compute_capabilities=("7.5",)), MODEL, {}, "mask"),
        (full(11, 4, compute_capabilities=("8.7",)), MODEL, {}, "plugin"),
        (full(11, 4), with_mixer(MODEL, rope=PARTIAL), {}, "mask"),
    ],
)
def test_a_variant_with_an_obstacle_is_left_out(target: BuildTarget, model: ModelConfig, options: dict[str, Any], variant: str) -> None:
    assert choose(target, model, **options).variant == variant


@pytest.mark.parametrize("target", [rtx(), rtx(doctor_passed=True), full(10, 3), full(11, 4)])
def test_a_plugin_library_is_for_plugin_attention(target: BuildTarget) -> None:
    assert choose(target, has_plugin_library=True).variant == "plugin"
    assert choose(target, has_plugin_library=True).others == choose(target, named="plugin", has_plugin_library=True).others == ()
    with raises(ConfigError, "attention", expected="a variant that", got="none: plugin: head_dim"):
        choose(target, ODD, has_plugin_library=True)


@pytest.mark.parametrize(
    ("target", "variant"), [(rtx(), "native"), (rtx(doctor_passed=True), "native"), (full(10, 3), "plugin"), (full(11, 1), "mask")]
)
def test_models_without_attention_need_no_segments(target: BuildTarget, variant: str) -> None:
    with Checkpoint.open(GOLDEN / "mamba2") as checkpoint:
        assert choose(target, checkpoint.config).variant == variant


@pytest.mark.parametrize(
    ("target", "model", "parts"),
    [
        (full(10, 3), ODD, ("tensorrt 10.3", "head_dim: expected one of 64, 80, 96, 128, 256, 512", "got 24", "KVCacheUpdate (10.15 has)")),
        (full(10, 13), with_mixer(MODEL, num_heads=34, num_kv_heads=2), ("num_attention_heads: expected at most 16", "10.15")),
        (rtx((1, 3)), MODEL, ("(1.5 has)", "(1.4 has)")),
    ],
)
def test_an_error_says_what_each_variant_lacks(target: BuildTarget, model: ModelConfig, parts: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match=r"^attention: expected .*, got none: ") as raised:
        choose(target, model)
    assert [part for part in parts if part not in str(raised.value)] == []


def test_the_error_of_a_dtype_names_those_that_would_do() -> None:
    with pytest.raises(ConfigError, match=r"got none: .*dtype: expected one of float16, bfloat16 .*, got float32"):
        choose(full(10, 3), dtype="float32")


@pytest.mark.parametrize("target", [rtx(), full(10, 3), full(11, 4)])
def test_k_and_v_in_8_bits_are_for_the_plugin(target: BuildTarget) -> None:
    choice = choose(target, kv_dtype="int8")
    assert (choice.variant, choice.others) == ("plugin", ())
    with pytest.raises(ConfigError, match=r"^head_dim: expected one of 64, .*, got 24\. kv_dtype=int8 chose plugin attention"):
        choose(target, ODD, kv_dtype="int8")
    with pytest.raises(ConfigError, match=r"^head_dim: expected one of 64, .*, got 24\. draft_tree chose plugin attention: no other"):
        choose(target, ODD, takes_trees=True)


@pytest.mark.parametrize("minor", [0, 1, 2])
def test_native_attention_is_refused_where_full_tensorrt_computes_it_wrong(minor: int) -> None:
    with pytest.raises(ConfigError, match=rf"^attention: expected mask or plugin, got native: tensorrt 11\.{minor}: .*FP16.*BF16.*stale"):
        choose(full(11, minor), named="native")
    assert choose(full(11, 3), named="native").variant == "native"
    assert choose(rtx(), named="native").variant == "native"


@pytest.mark.parametrize(
    ("target", "named", "message"),
    [
        (
            full(10, 16),
            "native",
            "attention: expected mask or plugin, got native: tensorrt 10.16 has no causal attention over a cache (11.0",
        ),
        (full(10, 13), "native", "attention: expected plugin, got native: tensorrt 10.13 has no causal attention over a cache (11.0"),
        (full(10, 13), "mask", "attention: expected plugin, got mask: tensorrt 10.13 has no KVCacheUpdate (10.15"),
        (
            full(8, 6),
            "plugin",
            "attention: expected another TensorRT or model, got plugin: tensorrt 8.6 has no plugins with aliased outputs",
        ),
        (rtx((1, 4)), "native", "attention: expected mask or plugin, got native: tensorrt_rtx has no causal attention over a cache (1.5"),
    ],
)
def test_a_variant_that_was_named_needs_its_release(target: BuildTarget, named: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}"):
        choose(target, named=named)


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({"head_dim": 24}, {}, "head_dim: expected one of 64, 80, 96, 128, 256, 512 for plugin attention, got 24"),
        (
            {"num_heads": 34, "num_kv_heads": 2},
            {},
            "num_attention_heads: expected at most 16 for each K/V head for plugin attention, got 17",
        ),
        ({}, {"dtype": "float32"}, "dtype: expected one of float16, bfloat16 for plugin attention, got float32"),
        ({"rope": PARTIAL}, {}, "rotary_dim: expected a multiple of 4 from 0 to 64, got 18"),
        ({"scale": 1e7}, {}, "scale: expected 0, or 1e-06 to 1000000.0, got 10000000.0"),
    ],
)
def test_a_model_that_the_kernels_do_not_run(changes: dict[str, Any], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^attention: expected native or mask, got plugin: {re.escape(message)}"):
        choose(rtx(), with_mixer(MODEL, **changes), named="plugin", **options)
    assert choose(rtx(), with_mixer(MODEL, num_heads=32, num_kv_heads=2), named="plugin").variant == "plugin"


@pytest.mark.parametrize("rope", [None, PARTIAL])
def test_a_layer_that_reads_k_and_v_of_another_one_has_its_rope_in_plugin_layers(rope: RopeConfig | None) -> None:
    layer = MODEL.layers[0]
    reader = replace(layer, mixer=replace(layer.attention, kv_source_layer=0))
    assert choose(rtx(doctor_passed=True), replace(MODEL, layers=(layer, reader))).variant == "plugin"
    model = replace(MODEL, layers=(layer, replace(reader, mixer=replace(reader.attention, rope=rope))))
    assert choose(rtx(doctor_passed=True), model).variant == "native"
    message = "plugin: layers[1].mixer.kv_source_layer = 0, whose RoPE is another, and each plugin layer rotates the keys it reads"
    with raises(ConfigError, "attention", "native or mask", message):
        choose(rtx(), model, named="plugin")


@pytest.mark.parametrize("target", [rtx(), full(10, 16)], ids=["rtx", "full"])
def test_the_widest_heads_are_for_the_plugin(target: BuildTarget) -> None:
    wide = with_mixer(MODEL, head_dim=512)
    choice = choose(target, wide)
    assert (choice.variant, choice.others) == ("plugin", ())
    with raises(ConfigError, "attention", expected="plugin", got="head_dim: expected at most 256 for mask attention, got 512"):
        choose(target, wide, named="mask")
    with raises(ConfigError, "attention", got="head_dim: expected at most 256 for native attention, got 512; mask"):
        choose(rtx(), wide, dtype="float32")


EXPERTS = {"model_type": "qwen3_moe", "head_dim": 64, "moe_intermediate_size": 32, "num_experts": 5, "num_experts_per_tok": 2}


@pytest.mark.parametrize("target", [rtx(), rtx(compute_capabilities=("8.0", "12.0")), full(10, 3), full(11, 4)], ids=str)
def test_experts_are_for_the_plugin(target: BuildTarget) -> None:
    model = ModelConfig.from_dict({**SMALL, **EXPERTS})
    choice = choose(target, model)
    assert (choice.variant, choice.others) == ("plugin", ())
    assert choice.reason.startswith("experts are plugin layers")
    for named in ("native", "mask"):
        with raises(ConfigError, "attention", "plugin", f"{named}: " if target.is_rtx else named):
            choose(target, model, named=named)


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({"moe_intermediate_size": 36}, {}, "intermediate_size: expected a multiple of 8 with experts, got 36"),
        ({"head_dim": 24}, {}, "head_dim: expected one of 64"),
        ({}, {"dtype": "float32"}, "dtype: expected one of float16, bfloat16"),
    ],
)
def test_experts_that_no_plugin_layer_computes(changes: dict[str, Any], options: dict[str, Any], message: str) -> None:
    model = ModelConfig.from_dict({**SMALL, **EXPERTS, **changes})
    with raises(ConfigError, "attention", "a variant that tensorrt_rtx can build for this model", message):
        choose(rtx(), model, **options)


@pytest.mark.parametrize("target", [rtx(), full(11, 4)], ids=str)
def test_attention_sinks_are_for_the_plugin(target: BuildTarget) -> None:
    model = with_mixer(MODEL, sinks=True)
    assert choose(target, model).variant == "plugin"
    with raises(ConfigError, "attention", "plugin", "attention sinks" if target.is_rtx else "mask"):
        choose(target, model, named="mask")
    with raises(ConfigError, "plugin_layers", "one-plan for a model with attention sinks", "segments"):
        ResolvedOptions.of_model(BuildOptions(plugin_layers="segments"), model)
    with raises(ConfigError, "plugin_library", "without attention sinks", "llama"):
        ResolvedOptions.of_model(BuildOptions(plugin_library=Path("library")), model)


def test_kernels_for_packed_weights_are_for_the_plugin() -> None:
    assert choose(rtx(), packed_kernels=True).variant == "plugin"
    with raises(ConfigError, "attention", "a variant", "head_dim: expected one of 64"):
        choose(rtx(), ODD, packed_kernels=True)
    with raises(ConfigError, "packed_kernels", "plugin attention", "mask"):
        ResolvedOptions.of_model(BuildOptions(packed_kernels=True, attention="mask"), MODEL)


def test_experts_need_compute_capability_8() -> None:
    """Where the caller computes attention, but not where the caller computes both."""
    model, turing = ModelConfig.from_dict({**SMALL, **EXPERTS}), rtx(compute_capabilities=("7.5",))
    with raises(ConfigError, "attention", "a variant", "none: plugin: compute_capabilities: expected 8.0 or more for experts, got 7.5"):
        choose(turing, model, operations=frozenset({"attention"}))
    assert choose(turing, model, operations=frozenset({"attention", "experts"})).variant == "plugin"


def test_experts_have_neither_segments_nor_a_plugin_library(tmp_path: Path) -> None:
    model, library = ModelConfig.from_dict({**SMALL, **EXPERTS}), tmp_path / "library"
    with raises(ConfigError, "plugin_layers", "one-plan for a model with experts (qwen3_moe)", "segments"):
        ResolvedOptions.of_model(BuildOptions(plugin_layers="segments"), model)
    with raises(ConfigError, "plugin_library", "a model without experts", "qwen3_moe"):
        ResolvedOptions.of_model(BuildOptions(plugin_library=library), model)


def test_a_small_softcap_is_for_the_mask() -> None:
    with raises(ConfigError, "attention", "mask", "plugin: softcap: expected 0, or 1e-06 to 1000000.0, got 1e-07"):
        choose(rtx(), with_mixer(MODEL, softcap=1e-7), named="plugin")


@pytest.mark.parametrize(("changes", "what"), [({"window": 39}, "window = 39"), ({"softcap": 2.0}, "softcap = 2.0")])
def test_native_attention_has_neither_windows_nor_soft_caps(changes: dict[str, Any], what: str) -> None:
    start = f"attention: expected mask or plugin, got native: layers[0].mixer.{what}, and TensorRT's attention layer has no "
    with pytest.raises(ConfigError, match=f"^{re.escape(start)}"):
        choose(rtx(), with_mixer(MODEL, **changes), named="native")


@pytest.mark.parametrize(
    ("target", "model", "named", "length", "part"),
    [
        (rtx(), MODEL, "auto", 4097, "--attention plugin"),
        (rtx(), MODEL, "native", 4097, "--attention plugin"),
        (rtx(), MODEL, "mask", 4097, "--attention plugin"),
        (rtx(), ODD, "auto", 4097, "--max-sequence-length"),
        (rtx(), MODEL, "auto", 4096, None),
        (rtx(), MODEL, "plugin", 4097, None),
        (full(11, 4), MODEL, "mask", 4097, None),
    ],
)
def test_a_long_cache_in_rtx_has_advice(target: BuildTarget, model: ModelConfig, named: str, length: int, part: str | None) -> None:
    reason = choose(target, model, named=named, max_sequence_length=length).reason
    assert "\n" not in reason
    assert (f"all {length} rows" in reason) is (part is not None)
    if part is not None:
        assert part in reason


class TestTarget:
    """What a build knows of this machine."""

    @pytest.fixture(autouse=True)
    def machine(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        monkeypatch.setattr(checked_build, "gpu_and_driver", lambda device: ("GPU", "580"))
        monkeypatch.setattr(checked_build, "compute_capability", lambda device: "8.9")

    @staticmethod
    def tensorrt(flavour: str) -> TensorRT:
        module = fake_module("11.4.0")
        return TensorRT(module=module, flavour=flavour, version="11.4.0", log=TensorRTLog(module))

    @pytest.mark.parametrize(
        ("passed", "capabilities", "expected"),
        [(None, None, False), (False, None, False), (True, None, True), (True, ("8.9", "12.0"), True), (True, ("12.0",), False)],
    )
    def test_doctor_counts_for_this_gpu(self, passed: bool | None, capabilities: tuple[str, ...] | None, expected: bool) -> None:
        found = self.tensorrt("tensorrt_rtx")
        if passed is not None:
            write_verdict(DoctorVerdict("GPU", "580", str(found), passed, {}, "2026-11-26T10:00:00+00:00"))
        assert build_target(found, BuildOptions(compute_capabilities=capabilities)).doctor_passed is expected

    def test_the_verdict_is_that_of_the_device_that_is_used(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(checked_build, "gpu_and_driver", lambda device: (f"GPU {device}", "580"))
        monkeypatch.setattr(checked_build, "compute_capability", lambda device: ("8.6", "8.9")[device])
        found = self.tensorrt("tensorrt_rtx")
        write_verdict(DoctorVerdict("GPU 1", "580", str(found), True, {}, "2026-11-26T10:00:00+00:00"))
        assert [build_target(found, BuildOptions(device=device)).doctor_passed for device in (0, 1)] == [False, True]
        full_tensorrt = self.tensorrt("tensorrt")
        assert [build_target(full_tensorrt, BuildOptions(device=one)).compute_capabilities for one in (0, 1)] == [("8.6",), ("8.9",)]

    def test_full_tensorrt_builds_for_the_device_that_is_used(self, monkeypatch: pytest.MonkeyPatch) -> None:
        current: list[int] = []
        monkeypatch.setattr(checked_build, "find_gpu", lambda device: None if device < 2 else "there is no GPU 2")
        monkeypatch.setattr(checked_build, "make_current", current.append)
        use_device(self.tensorrt("tensorrt"), 1)
        use_device(self.tensorrt("tensorrt_rtx"), 2)
        assert current == [1]
        with pytest.raises(ConfigError, match=r"^device: expected a GPU that tensorrt 11\.4\.0 can build for, got 2: there is no GPU 2"):
            use_device(self.tensorrt("tensorrt"), 2)
        monkeypatch.setattr(checked_build, "find_gpu", lambda device: "no cuda-python")
        use_device(self.tensorrt("tensorrt"), 0)
        assert current == [1]

    def test_full_tensorrt_builds_for_the_gpu_at_hand(self) -> None:
        assert build_target(self.tensorrt("tensorrt"), BuildOptions()).compute_capabilities == ("8.9",)
        assert build_target(self.tensorrt("tensorrt_rtx"), BuildOptions()).compute_capabilities is None

    def test_a_machine_without_a_gpu_has_no_verdict(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(checked_build, "gpu_and_driver", doctor_verdict.gpu_and_driver)
        monkeypatch.setattr(doctor_verdict, "find_gpu", lambda device: "no GPU")
        target = build_target(self.tensorrt("tensorrt"), BuildOptions())
        assert (target.compute_capabilities, target.doctor_passed) == (None, False)


def test_without_tensorrt_the_flavour_counts() -> None:
    assert ResolvedOptions.of_model(BuildOptions(), MODEL).attention == "native"
    assert ResolvedOptions.of_model(BuildOptions(flavour="tensorrt"), MODEL).attention == "plugin"


class TestCompilerFailures:
    """A builder that stands in for TensorRT's compiler, and fails for some variants."""

    SIZES: ClassVar[dict[str, Any]] = {"max_batch_size": 3, "max_sequence_length": 38, "max_prefill_length": 11, "flavour": "tensorrt_rtx"}

    @pytest.fixture
    def model(self, tmp_path: Path) -> Path:
        return write_model(tmp_path / "model", head_dim=64)

    @pytest.fixture
    def failing(self, monkeypatch: pytest.MonkeyPatch) -> list[str]:
        """Variants that fail; filled by the test."""
        failing: list[str] = []

        def serialize(definition: Any, config: Any, options: ResolvedOptions, tensorrt: TensorRT, messages: Any, progress: Any) -> Any:
            if options.attention in failing:
                messages.add("MyelinCheckException: Expected 3 live inputs, got 4", is_error=True)
                messages.fail(BuildError, "the engine could not be built")
            messages.check(BuildError, "the engine could not be built")
            return np.frombuffer(b"plan", np.uint8)

        monkeypatch.setattr(builder, "serialize", serialize)
        return failing

    @pytest.mark.trt
    def test_auto_builds_the_next_variant_and_says_so(self, model: Path, tmp_path: Path, failing: list[str]) -> None:
        failing.append("native")
        with pytest.warns(UserWarning, match=r"^building mask attention, because native could not be built: .*MyelinCheckException"):
            build_engine(model, tmp_path / "engine", **self.SIZES)
        config = EngineFolder.open(tmp_path / "engine").config
        assert (config.attention_variant, config.attention[0].variant) == ("mask", "mask")
        assert config.attention_reason == "native could not be built"

    @pytest.mark.trt
    def test_the_next_variant_has_its_own_cache(self, model: Path, tmp_path: Path, failing: list[str]) -> None:
        failing += ["native", "mask"]
        with pytest.warns(UserWarning, match="could not be built") as warned:
            build_engine(model, tmp_path / "engine", **self.SIZES)
        assert len(warned) == 2
        config = EngineFolder.open(tmp_path / "engine").config
        assert (config.attention_variant, config.cache.layout.value) == ("plugin", "combined")

    @pytest.mark.trt
    def test_what_the_compiler_was_not_asked_is_no_reason_for_the_next_variant(
        self, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A profile that TensorRT refuses for one variant, it refuses for all."""
        made: list[str] = []

        def refuse(definition: Any, options: ResolvedOptions, tensorrt: TensorRT, messages: Any) -> None:
            made.append(options.attention)
            messages.fail(BuildError, "optimisation profile decode: TensorRT refused it")

        monkeypatch.setattr(builder, "make_config", refuse)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(BuildError, match=r"^optimisation profile decode: .*TensorRT says: [^.]*$"):
                build_engine(model, tmp_path / "engine", **self.SIZES)
        assert made == ["native"]
        assert not (tmp_path / "engine").exists()

    @pytest.mark.trt
    def test_nothing_is_left_where_all_fail(self, model: Path, tmp_path: Path, failing: list[str]) -> None:
        failing += ["native", "mask", "plugin"]
        with pytest.warns(UserWarning, match="could not be built"), pytest.raises(BuildError, match="Myelin"):
            build_engine(model, tmp_path / "engine", **self.SIZES)
        assert not (tmp_path / "engine").exists()

    @pytest.mark.trt
    def test_a_variant_that_was_named_is_not_replaced(self, model: Path, tmp_path: Path, failing: list[str]) -> None:
        failing.append("native")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(BuildError, match=r"MyelinCheckException.* Build with --attention mask or plugin\.$"):
                build_engine(model, tmp_path / "engine", **self.SIZES, attention="native")
        assert not (tmp_path / "engine").exists()
