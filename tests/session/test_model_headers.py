"""Sizes of models of the Hub, whose weights are not downloaded: a Hub library that has a folder of this machine for each id."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.helpers.models import write_model
from tests.helpers.quantized_models import ALL_CASES, GPTQ_CONFIG, gptq, write_quantized
from tests.paths import GOLDEN, SHIPPED
from trt_kvcache import estimate_build, what_fits
from trt_kvcache.cli import main
from trt_kvcache.errors import CheckpointError
from trt_kvcache.session.model_headers import model_headers
from trt_kvcache.session.model_location import locate_model

HUB_ID = "some-org/some-model"


class Hub:
    """What is used of ``huggingface_hub``, over a folder."""

    def __init__(self, folder: Path, cache: Path) -> None:
        self.folder, self.cache, self.offline = folder, cache, False
        cache.mkdir()

    def snapshot_download(self, hub_id: str, *, allow_patterns: list[str], **_: Any) -> str:
        assert hub_id == HUB_ID
        for file in self.folder.iterdir():
            if any(file.match(pattern) for pattern in allow_patterns):
                (self.cache / file.name).write_bytes(file.read_bytes())
        return str(self.cache)

    def list_repo_files(self, hub_id: str) -> list[str]:
        if self.offline:
            raise ConnectionError("no network here")
        return sorted(file.name for file in self.folder.iterdir())

    def get_safetensors_metadata(self, hub_id: str) -> SimpleNamespace:
        index = self.folder / "model.safetensors.index.json"
        files = {file.name: SimpleNamespace(tensors=self._tensors(file)) for file in self.folder.glob("*.safetensors")}
        weight_map = json.loads(index.read_text())["weight_map"] if index.is_file() else {}
        return SimpleNamespace(sharded=index.is_file(), weight_map=weight_map, files_metadata=files)

    def _tensors(self, file: Path) -> dict[str, Any]:
        content = file.read_bytes()
        (length,) = struct.unpack("<Q", content[:8])
        entries = json.loads(content[8 : 8 + length])
        entries.pop("__metadata__", None)
        return {name: SimpleNamespace(**{**one, "data_offsets": tuple(one["data_offsets"])}) for name, one in entries.items()}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that makes a folder the model of the Hub."""

    def serve(folder: Path) -> Hub:
        made = Hub(folder, tmp_path / "cache")
        for name in ("snapshot_download", "list_repo_files", "get_safetensors_metadata"):
            monkeypatch.setattr(f"huggingface_hub.{name}", getattr(made, name))
        return made

    return serve


def quantized(folder: Path, tmp_path: Path) -> None:
    model = write_model(tmp_path / "dense", hidden_size=128, intermediate_size=256, head_dim=64, num_hidden_layers=2)
    write_quantized(folder, str(model), gptq(group_size=32), {**GPTQ_CONFIG, "group_size": 32})


def test_a_quantized_model_has_the_sizes_of_its_folder(hub: Any, tmp_path: Path) -> None:
    quantized(tmp_path / "served", tmp_path)
    served = hub(tmp_path / "served")
    with model_headers(HUB_ID) as folder:
        assert estimate_build(folder, quantize=None) == estimate_build(tmp_path / "served")
        assert what_fits(folder, 10**8) == what_fits(tmp_path / "served", 10**8)
    assert not folder.exists()
    assert not list(served.cache.glob("*.safetensors"))


def test_static_scales_of_k_and_v_are_there(hub: Any, tmp_path: Path) -> None:
    quantize, config = ALL_CASES["compressed-int8"]
    model = write_model(tmp_path / "dense", hidden_size=128, intermediate_size=256, head_dim=64)
    scheme = {"kv_cache_scheme": {"num_bits": 8, "type": "float", "dynamic": False}}
    write_quantized(tmp_path / "served", str(model), quantize, {**config, **scheme})
    tensors = load_file(tmp_path / "served" / "model.safetensors")
    scales = {f"model.layers.0.self_attn.{side}_scale": np.full((2,), 0.5, np.float32) for side in "kv"}
    save_file({**tensors, **scales}, tmp_path / "served" / "model.safetensors")
    hub(tmp_path / "served")
    with model_headers(HUB_ID) as folder:
        assert what_fits(folder, 10**8) == what_fits(tmp_path / "served", 10**8)


def test_shards(hub: Any) -> None:
    hub(GOLDEN / "qwen3-sharded")
    with model_headers(HUB_ID) as folder:
        assert estimate_build(folder) == estimate_build(GOLDEN / "qwen3-sharded")


def test_an_index_that_names_other_folders_is_refused(hub: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    served = hub(GOLDEN / "qwen3-sharded")
    file = next(served.folder.glob("*.safetensors"))
    tensors, outside = served._tensors(file), "../outside-of-the-folder.safetensors"
    weight_map = dict.fromkeys(tensors, outside)
    metadata = SimpleNamespace(sharded=True, weight_map=weight_map, files_metadata={outside: SimpleNamespace(tensors=tensors)})
    monkeypatch.setattr("huggingface_hub.get_safetensors_metadata", lambda hub_id: metadata)
    with model_headers(HUB_ID) as folder:
        assert not (folder / outside).exists()
        with pytest.raises(CheckpointError, match=r"expected shards next to the index, got '\.\./outside"):
            estimate_build(folder)


def test_what_modelopt_says_of_weights_is_downloaded(hub: Any, tmp_path: Path) -> None:
    quantized(tmp_path / "served", tmp_path)
    (tmp_path / "served" / "hf_quant_config.json").write_text("{}")
    hub(tmp_path / "served")
    assert (locate_model(HUB_ID) / "hf_quant_config.json").is_file()


def test_weights_that_were_downloaded_are_used(hub: Any, tmp_path: Path) -> None:
    served = hub(SHIPPED)
    for file in SHIPPED.iterdir():
        (served.cache / file.name).write_bytes(file.read_bytes())
    served.offline = True
    with model_headers(HUB_ID) as folder:
        assert folder == served.cache


@pytest.mark.parametrize(
    ("files", "complaint"),
    [
        (
            ["a-Q4_0.gguf", "b-Q8_0.gguf"],
            "expected weights in safetensors, got a-Q4_0.gguf, b-Q8_0.gguf. A GGUF file is read where it is on this machine",
        ),
        (["pytorch_model.bin"], "expected weights in safetensors, got pytorch_model.bin."),
        ([], "expected weights in safetensors, got none."),
    ],
    ids=str,
)
def test_weights_in_another_format_are_not_counted_as_16_bits(hub: Any, tmp_path: Path, files: list[str], complaint: str) -> None:
    served = tmp_path / "served"
    served.mkdir()
    (served / "config.json").write_bytes((SHIPPED / "config.json").read_bytes())
    for name in files:
        (served / name).touch()
    hub(served)
    with pytest.raises(CheckpointError) as caught, model_headers(HUB_ID):
        pass
    assert str(caught.value).startswith(f"{HUB_ID}: {complaint}")


def test_without_a_network_there_is_a_warning(hub: Any) -> None:
    hub(SHIPPED).offline = True
    complaint = "the headers of its weights cannot be read from the Hub .ConnectionError: no network here"
    with pytest.warns(UserWarning, match=complaint), model_headers(HUB_ID) as folder:
        estimate = estimate_build(folder)
    assert estimate == estimate_build(SHIPPED)


@pytest.mark.parametrize(
    "command", [["memory", HUB_ID, "--engine"], ["memory", HUB_ID, "--fit", "1GB"], ["build", HUB_ID, "-o", "engine", "--dry-run"]], ids=str
)
def test_commands_download_no_weights(
    hub: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    quantized(tmp_path / "served", tmp_path)
    served = hub(tmp_path / "served")
    monkeypatch.chdir(tmp_path)
    said = []
    for model in (HUB_ID, str(tmp_path / "served")):
        assert main([model if one == HUB_ID else one for one in command]) == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1]
    assert not list(served.cache.glob("*.safetensors"))
