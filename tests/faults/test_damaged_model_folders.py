"""Model folders with damaged files: refused with an error of ours, or opened as the model that the files describe."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest

from tests.faults.mutations import damage_bytes, damaged_json
from tests.faults.watch import Findings, begin_peak, peak_growth
from tests.paths import ROOT
from trt_kvcache import InferenceSession
from trt_kvcache.model import ModelConfig

FILES = ("config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json")

#: Fields of config.json, and what we call them.
FIELDS = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_hidden_layers": "num_layers",
    "max_position_embeddings": "max_position_embeddings",
    "tie_word_embeddings": "tie_word_embeddings",
    "model_type": "family",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(ROOT / "examples" / "tiny-llama", tmp_path / "model"))


def run_model(folder: Path) -> None:
    """Open a folder as the commands do, and run two tokens. What was opened is what the files say."""
    with InferenceSession.from_model(folder, engine="reference", max_sequence_length=16) as session:
        tokenizer = session.tokenizer
        if tokenizer is not None:
            if tokenizer.has_chat_template:
                tokenizer.apply_chat_template([{"role": "user", "content": "Hello"}])
            tokenizer.decode(tokenizer.encode("The rabbit"))
        for _ in session.generate([[5, 6, 7]], max_new_tokens=2, temperature=0.0):
            pass
    data = json.loads((folder / "config.json").read_bytes())
    config = ModelConfig.from_dict(data, default_dtype="float32")
    for field, name in FIELDS.items():
        if data.get(field) is not None:
            assert getattr(config, name) == data[field]


def damage_folder(folder: Path, seed: int, names: tuple[str, ...]) -> None:
    chance = random.Random(seed)
    name = names[seed % len(names)]
    path = folder / name
    path.write_bytes(damaged_json(path.read_bytes() if path.exists() else b'{"chat_template": "{{ messages }}"}', chance))


def cases(folder: Path, seeds: range, names: tuple[str, ...]) -> None:
    findings, before = Findings(), begin_peak()
    for seed in seeds:
        name = names[seed % len(names)]
        original = (folder / name).read_bytes() if (folder / name).exists() else None
        damage_folder(folder, seed, names)
        findings.run(f"{name} {seed}", lambda: run_model(folder))
        (folder / name).unlink() if original is None else (folder / name).write_bytes(original)
    findings.check()
    assert findings.refused
    assert peak_growth(before) < 1 << 30


def test_damaged_json_files(folder: Path) -> None:
    cases(folder, range(40), FILES[:3])


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_thousands_of_damaged_json_files(folder: Path, part: int) -> None:
    cases(folder, range(1000 + 1500 * part, 2500 + 1500 * part), FILES[:3])


def weights_case(folder: Path, content: bytes, seed: int) -> None:
    """Damage the header of the weights, or any byte of them."""
    chance = random.Random(seed)
    size = int.from_bytes(content[:8], "little")
    header, payload = content[8 : 8 + size], content[8 + size :]
    if seed % 3 == 0:
        content = damage_bytes(content, chance)
    else:
        header = damaged_json(header, chance)
        length = len(header) if chance.random() < 0.9 else chance.choice([0, 1, len(header) + 8, 2**40, 2**63])
        content = length.to_bytes(8, "little") + header + payload
    (folder / "model.safetensors").write_bytes(content)


def damaged_weights(folder: Path, seeds: range) -> None:
    original = (folder / "model.safetensors").read_bytes()
    findings = Findings()
    for seed in seeds:
        weights_case(folder, original, seed)
        findings.run(f"model.safetensors {seed}", lambda: run_model(folder))
    findings.check()
    assert findings.refused


def test_damaged_weights(folder: Path) -> None:
    damaged_weights(folder, range(20))


@pytest.mark.slow
def test_thousands_of_damaged_weights(folder: Path) -> None:
    damaged_weights(folder, range(1000, 4000))


SHARDED = ROOT / "tests" / "golden" / "qwen3-sharded"


def damaged_indices(folder: Path, seeds: range) -> None:
    index = folder / "model.safetensors.index.json"
    original = index.read_bytes()
    findings = Findings()
    for seed in seeds:
        index.write_bytes(damaged_json(original, random.Random(seed)))
        findings.run(f"{index.name} {seed}", lambda: run_model(folder))
    findings.check()
    assert findings.refused


def test_damaged_shard_indices(tmp_path: Path) -> None:
    damaged_indices(Path(shutil.copytree(SHARDED, tmp_path / "model")), range(20))


@pytest.mark.slow
def test_thousands_of_damaged_shard_indices(tmp_path: Path) -> None:
    damaged_indices(Path(shutil.copytree(SHARDED, tmp_path / "model")), range(1000, 4000))
