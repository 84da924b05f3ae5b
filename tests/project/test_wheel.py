"""What a wheel installs: one top-level name, with the CUDA sources and the model of doctor inside it."""

import shutil
import subprocess
import sys
import zipfile

from tests.paths import ROOT


def test_the_wheel_has_one_top_level_name(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    for name in ("trt_kvcache", "plugins", "engines", "examples"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--quiet", "-w", str(tmp_path), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"trt_kvcache"}
    assert {"trt_kvcache/py.typed", "trt_kvcache/builder/network/decoder.py"} <= set(names)
    sources = {path.relative_to(ROOT / "plugins").as_posix() for path in (ROOT / "plugins").rglob("*.cu*")}
    assert {f"trt_kvcache/_plugins/{source}" for source in sources} <= set(names)
    model = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
    assert {f"trt_kvcache/_models/tiny-chat/{name}" for name in model} <= set(names)
    assert not [name for name in names if name.startswith("trt_kvcache/_models") and name.endswith(".py")]
    assert wheel.stat().st_size < 4 << 20
