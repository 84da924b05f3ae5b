"""The network scripts in ``engines/``, run by the real ``polygraphy convert`` where TensorRT for RTX is."""

from __future__ import annotations

import gc
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.assertions import raises
from tests.paths import ROOT
from trt_kvcache.checkpoint import Checkpoint
from trt_kvcache.errors import BuildError, CheckpointError, ConfigError
from trt_kvcache.polygraphy import network_script
from trt_kvcache.polygraphy.network_script import NetworkScript
from trt_kvcache.trt.module import load

ENGINES = ROOT / "engines"
SHIPPED = ROOT / "examples" / "tiny-llama"
MODEL = ROOT / "tests" / "golden" / "llama"
SIZES: dict[str, Any] = {"max_batch_size": 3, "max_sequence_length": 24, "max_prefill_length": 8}


def _convert(script: Path, plan: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [Path(sys.executable).with_name("polygraphy"), "convert", script, "--model-type", "trt-network-script"]
    command += ["--trt-config-script", f"{script}:load_config", "-o", plan]
    variables = {**os.environ, "POLYGRAPHY_USE_TENSORRT_RTX": "1", "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run([*map(str, command)], env=variables, capture_output=True, text=True, timeout=300, check=False)


def _has_weight(plan: Path, model: Path, name: str) -> bool:
    """Tell whether a plan holds a weight, byte by byte."""
    with Checkpoint.open(model) as checkpoint:
        return checkpoint.tensor(name).tobytes() in plan.read_bytes()


@pytest.mark.trt
def test_polygraphy_converts_the_shipped_model(tmp_path: Path) -> None:
    done = _convert(ENGINES / "tiny_llama.py", tmp_path / "out.plan")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 profile(s)" in done.stdout
    assert "TF32" not in done.stdout
    assert _has_weight(tmp_path / "out.plan", SHIPPED, "model.embed_tokens.weight")


@pytest.mark.trt
def test_attention_that_computes_the_model_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network_script.polygraphy_config, "USE_TENSORRT_RTX", True)
    script = NetworkScript(MODEL.parent / "gemma3", **SIZES)
    _, network = script.load_network()
    assert script.options.attention == "mask"
    assert script.load_config(None, network).num_optimization_profiles == 2


@pytest.mark.trt
def test_polygraphy_converts_any_checkpoint(tmp_path: Path) -> None:
    sizes = {f"TRT_KVCACHE_{name.upper()}": str(value) for name, value in SIZES.items()}
    done = _convert(ENGINES / "from_checkpoint.py", tmp_path / "out.plan", TRT_KVCACHE_MODEL=str(MODEL), **sizes)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 profile(s)" in done.stdout
    assert _has_weight(tmp_path / "out.plan", MODEL, "model.embed_tokens.weight")


@pytest.mark.trt
def test_the_commands_of_the_readme_run(tmp_path: Path) -> None:
    for folder in (ENGINES, ROOT / "examples"):
        (tmp_path / folder.name).symlink_to(folder)
    blocks = re.findall(r"^```bash\n(.*?)^```$", (ENGINES / "README.md").read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    assert len(blocks) == 4
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    for block in blocks:
        done = subprocess.run(
            ["bash", "-euc", block],
            cwd=tmp_path,
            env={**os.environ, "PATH": path},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, block + done.stdout + done.stderr
    assert {"tiny-llama.plan", "model.plan"} <= {file.name for file in tmp_path.iterdir()}


@pytest.mark.trt
@pytest.mark.parametrize(
    ("variables", "text"),
    [
        ({}, "TRT_KVCACHE_MODEL: expected this variable in the environment"),
        (
            {"TRT_KVCACHE_MODEL": str(MODEL), "TRT_KVCACHE_MAX_BATCH_SIZE": "many"},
            "TRT_KVCACHE_MAX_BATCH_SIZE: expected a number, got 'many'",
        ),
    ],
)
def test_a_wrong_environment_is_named(tmp_path: Path, variables: dict[str, str], text: str) -> None:
    done = _convert(ENGINES / "from_checkpoint.py", tmp_path / "out.plan", **variables)
    assert done.returncode != 0
    assert text in done.stdout + done.stderr
    assert not (tmp_path / "out.plan").exists()


@pytest.mark.trt
def test_the_weights_outlive_the_script(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network_script.polygraphy_config, "USE_TENSORRT_RTX", True)
    before = len(network_script._DEFINED)
    builder, network = NetworkScript(MODEL, **SIZES).load_network()
    gc.collect()
    build, definition = network_script._DEFINED[before]
    assert (definition.builder, definition.network) == (builder, network)
    assert build.checkpoint.tensor("model.norm.weight").any()
    assert [network.get_input(index).name for index in range(3)] == ["input_ids", "kvcache_start_index", "last_token_ids"]


@pytest.mark.trt
def test_options_are_checked_at_once_and_the_folder_when_it_is_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(network_script.polygraphy_config, "USE_TENSORRT_RTX", True)
    with pytest.raises(ConfigError, match="max_logits_per_slot"):
        NetworkScript(MODEL, max_batch_size=1, max_sequence_length=8, max_prefill_length=8, max_logits_per_slot=9)
    with pytest.raises(ConfigError, match="max_prefill_length"):
        NetworkScript(MODEL, max_batch_size=1, max_sequence_length=8, max_prefill_length=9)
    with pytest.raises(CheckpointError):
        NetworkScript(tmp_path, **SIZES).load_network()


@pytest.mark.trt
def test_the_configuration_is_that_of_the_builder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network_script.polygraphy_config, "USE_TENSORRT_RTX", True)
    script = NetworkScript(MODEL, **SIZES)
    builder, network = script.load_network()
    asked: list[Any] = []
    real = network_script.make_config
    monkeypatch.setattr(network_script, "make_config", lambda *arguments: asked.append(arguments) or real(*arguments))
    config = script.load_config(builder, network)
    assert config.num_optimization_profiles == 2
    tf32 = load("tensorrt_rtx").module.BuilderFlag.TF32
    assert builder.create_builder_config().get_flag(tf32), "TensorRT's default, which would round float32 to 10 bits"
    assert not config.get_flag(tf32)
    ((definition, options, _, _),) = asked
    assert definition.network is network
    assert options is script.options


def test_a_network_of_another_script_is_refused() -> None:
    with raises(BuildError, "load_config", expected="network that load_network of a NetworkScript returned"):
        NetworkScript(MODEL, **SIZES).load_config(None, object())


@pytest.mark.trt
def test_full_tensorrt_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network_script.polygraphy_config, "USE_TENSORRT_RTX", False)

    def not_here(flavour: str, *, error: type[Exception]) -> Any:
        raise error(f"TensorRT cannot be used. {flavour}: not installed.")

    monkeypatch.setattr(network_script, "load", not_here)
    with pytest.raises(BuildError, match=r"tensorrt: not installed\. Set POLYGRAPHY_USE_TENSORRT_RTX=1"):
        NetworkScript(MODEL, **SIZES).load_network()
