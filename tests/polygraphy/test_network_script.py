"""The network scripts in ``engines/``, run by the real ``polygraphy convert`` where TensorRT for RTX is."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.paths import ROOT
from trt_kvcache.checkpoint import Checkpoint
from trt_kvcache.errors import BuildError
from trt_kvcache.polygraphy import network_script
from trt_kvcache.polygraphy.network_script import NetworkScript
from trt_kvcache.trt.module import load

ENGINES = ROOT / "engines"
MODEL = ROOT / "tests" / "golden" / "llama"
SIZES = {"max_batch_size": 3, "max_sequence_length": 24, "max_prefill_length": 8}


def run(command, folder, **environment):
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    variables = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", **environment}
    done = subprocess.run(["bash", "-euc", command], cwd=folder, env=variables, capture_output=True, text=True, timeout=300, check=False)
    return done.returncode, done.stdout + done.stderr


def has_weight(plan, model):
    """Tell whether a plan holds the model's embedding, byte by byte."""
    with Checkpoint.open(model) as checkpoint:
        return checkpoint.tensor("model.embed_tokens.weight").tobytes() in plan.read_bytes()


@pytest.mark.trt
def test_the_commands_of_the_readme_run(tmp_path):
    for folder in (ENGINES, ROOT / "examples"):
        (tmp_path / folder.name).symlink_to(folder)
    blocks = re.findall(r"^```bash\n(.*?)^```$", (ENGINES / "README.md").read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    assert len(blocks) == 4
    for block in blocks:
        status, text = run(block, tmp_path)
        assert status == 0, block + text
        assert "2 profile(s)" in text or "convert" not in block
    assert (tmp_path / "model.plan").exists()
    assert has_weight(tmp_path / "tiny-llama.plan", ROOT / "examples" / "tiny-llama")


@pytest.mark.trt
def test_a_wrong_environment_is_named(tmp_path):
    script = ENGINES / "from_checkpoint.py"
    command = f"polygraphy convert {script} --model-type trt-network-script --trt-config-script {script}:load_config -o out.plan"
    variables = {"POLYGRAPHY_USE_TENSORRT_RTX": "1", "TRT_KVCACHE_MODEL": str(MODEL), "TRT_KVCACHE_MAX_BATCH_SIZE": "many"}
    status, text = run(command, tmp_path, **variables)
    assert status != 0
    assert "TRT_KVCACHE_MAX_BATCH_SIZE: expected a number, got 'many'" in text
    assert not (tmp_path / "out.plan").exists()


@pytest.mark.trt
def test_the_configuration_is_that_of_the_builder(monkeypatch):
    monkeypatch.setattr(network_script.polygraphy_config, "USE_TENSORRT_RTX", True)
    script = NetworkScript(MODEL, **SIZES)
    builder, network = script.load_network()
    config = script.load_config(builder, network)
    assert config.num_optimization_profiles == 2
    tf32 = load("tensorrt_rtx").module.BuilderFlag.TF32
    assert builder.create_builder_config().get_flag(tf32), "TensorRT's default, which would round float32 to 10 bits"
    assert not config.get_flag(tf32)
    with pytest.raises(BuildError, match="load_config: expected the network that load_network of a NetworkScript returned"):
        script.load_config(None, object())
