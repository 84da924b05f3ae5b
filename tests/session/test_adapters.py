"""Sessions with a merged adapter: logits of PEFT, snapshots and folders of other adapters."""

from __future__ import annotations

from pathlib import Path

import huggingface_hub
import numpy as np
import pytest

from tests.helpers.adapters import tensors_of, write_adapter
from tests.helpers.assertions import assert_close, raises
from tests.helpers.engine_files import make_engine_folder
from tests.helpers.models import write_model
from tests.paths import GOLDEN
from tests.reference.test_golden import TOLERANCE
from trt_kvcache import InferenceSession, load
from trt_kvcache.errors import ConfigError, SnapshotError

ADAPTERS = sorted(path.name for path in (GOLDEN / "adapters").iterdir())

ENGINE = "numpy"


@pytest.mark.parametrize("name", ADAPTERS)
def test_logits_are_those_of_peft(name: str) -> None:
    assert_logits_of_peft(name, ENGINE)


def assert_logits_of_peft(name: str, engine: str) -> None:
    """Compare logits: PEFT adds the products next to the base layers; in float32 the merge rounds nothing."""
    golden = tensors_of(GOLDEN / "adapters" / name, "golden.safetensors")
    ids, expected = golden["input_ids"], golden["logits"]
    options = {"engine": engine, "dtype": "float32", "max_sequence_length": len(ids)}
    with InferenceSession.from_model(GOLDEN / name, adapter=GOLDEN / "adapters" / name, **options) as session:
        steps = [session.prefill([ids[:14].tolist()]), *(session.decode([token]) for token in ids[14:].tolist())]
        assert_close(np.concatenate(steps), expected[13:], TOLERANCE)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model", num_hidden_layers=2)


def test_snapshots_know_the_adapter(base: Path, tmp_path: Path) -> None:
    adapters = [None, write_adapter(tmp_path / "a"), write_adapter(tmp_path / "b", seed=1)]
    options = {"engine": ENGINE, "max_sequence_length": 16}
    for index, adapter in enumerate(adapters):
        with load(base, adapter=adapter, **options) as session:
            session.prefill([[5, 6, 7]])
            session.save_snapshot(tmp_path / f"{index}.kv")
    for index, adapter in enumerate(adapters):
        with load(base, adapter=adapter, **options) as session:
            session.load_snapshots(tmp_path / f"{index}.kv")
            for other in {0, 1, 2} - {index}:
                with pytest.raises(SnapshotError):
                    session.load_snapshots(tmp_path / f"{other}.kv")


def test_an_engine_folder_has_its_adapter_from_the_build(base: Path, tmp_path: Path) -> None:
    engine, adapter = make_engine_folder(base, tmp_path / "engine"), write_adapter(tmp_path / "adapter")
    with raises(ConfigError, "adapter", "a Hugging Face folder", says="engine folder"):
        load(engine.path, engine=ENGINE, adapter=adapter)


def test_an_adapter_may_be_of_the_hub(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    adapter = write_adapter(tmp_path / "adapter")
    asked = []

    def download(hub_id: str, **options: object) -> str:
        asked.append((hub_id, options["allow_patterns"]))
        return str(adapter)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.chdir(tmp_path)
    for place in ("some-org/lora", "adapter", "./adapter", str(adapter)):
        with load(base, adapter=place, engine=ENGINE) as session, load(base, adapter=adapter, engine=ENGINE) as expected:
            np.testing.assert_array_equal(session.prefill([[5, 6]]), expected.prefill([[5, 6]]))
    assert asked == [("some-org/lora", ["adapter_config.json", "adapter_model.safetensors"])]


@pytest.mark.parametrize("adapter", [3, ""])
def test_an_adapter_is_a_folder(base: Path, adapter: object) -> None:
    with raises(ConfigError, "adapter", "a folder of PEFT", repr(adapter)):
        load(base, engine=ENGINE, adapter=adapter)
