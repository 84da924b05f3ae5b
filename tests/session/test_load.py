"""``trt_kvcache.load``: folders of both kinds, and models of a Hub that is faked on this machine."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import errors

import trt_kvcache
from tests.helpers.assertions import raises
from tests.helpers.engine_files import make_engine_folder
from tests.paths import ROOT
from tests.session.hub import fake_hub
from trt_kvcache import InferenceSession
from trt_kvcache.engine_folder.folder import EngineFolder
from trt_kvcache.errors import CheckpointError, ConfigError, EngineError
from trt_kvcache.session.model_location import locate_model
from trt_kvcache.session.session_source import SessionSource

MODEL = ROOT / "examples" / "tiny-llama"
HUB_ID = "some-org/tiny.llama_1"
PROGRAM = """
import sys, trt_kvcache
for name, revision in (argument.split("@") for argument in sys.argv[1:]):
    try:
        with trt_kvcache.load(name, revision=revision or None, engine="reference", max_sequence_length=32) as session:
            print(session.vocab_size, session.max_sequence_length, session.tokenizer is not None)
    except trt_kvcache.KVCacheError as error:
        print(type(error).__name__, error)
"""


@pytest.fixture(scope="module")
def engine_folder(tmp_path_factory):
    return make_engine_folder(MODEL, tmp_path_factory.mktemp("load") / "engine").path


@pytest.fixture
def no_network(monkeypatch):
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: pytest.fail("it asks the Hub"))


@pytest.fixture
def failing_hub(monkeypatch):
    """Have the Hub's library raise an error."""

    def fail(error):
        def download(*_, **__):
            raise error

        monkeypatch.setattr(huggingface_hub, "snapshot_download", download)

    return fail


class TestFolders:
    pytestmark = pytest.mark.usefixtures("no_network")

    def test_a_model_folder(self):
        with trt_kvcache.load(MODEL, engine="reference", max_sequence_length=32) as session:
            assert session.max_sequence_length == 32

    def test_an_engine_folder(self, engine_folder):
        with trt_kvcache.load(str(engine_folder), engine="reference") as session:
            assert session.cache.kv_config == EngineFolder.open(engine_folder).config.cache

    def test_the_home_folder(self, tmp_path, monkeypatch):
        monkeypatch.setenv("HOME", str(tmp_path))
        shutil.copytree(MODEL, tmp_path / "model")
        options = {"engine": "reference", "max_sequence_length": 32}
        for opened in (trt_kvcache.load, InferenceSession.from_model):
            with opened("~/model", **options) as session:
                list(session.generate([5, 6], max_new_tokens=2))
                session.save_snapshot("~/a.kv")
                session.load_snapshots(["~/a.kv"])
                session.plot("~/a.svg")
        assert {"model", "a.kv", "a.svg"} <= {path.name for path in tmp_path.iterdir()}

    def test_a_folder_takes_precedence_over_a_model_of_the_hub(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        shutil.copytree(MODEL, tmp_path / "some-org" / "model")
        trt_kvcache.load("some-org/model", engine="reference").close()

    def test_a_revision_is_for_the_hub(self):
        with raises(ConfigError, "revision", expected=f"with an id of the Hugging Face Hub only; {MODEL} is a folder here"):
            trt_kvcache.load(MODEL, revision="main")

    @pytest.mark.parametrize("name", ["nothing", "/no/where", "a/b/c", "../x/y", "~/x", "-a/b", "a/", "ä/b", Path("some-org/model")])
    def test_what_is_neither_a_folder_nor_an_id(self, name):
        with raises(
            CheckpointError,
            str(Path(name).expanduser()),
            expected=("model folder", "engine folder", "Hugging Face Hub"),
            got="nothing there",
        ):
            trt_kvcache.load(name)

    def test_each_kind_of_folder_names_the_call_for_the_other(self, engine_folder):
        with raises(ConfigError, engine_folder, expected="model folder", got="engine folder"):
            InferenceSession.from_model(engine_folder)
        with raises(EngineError, MODEL, expected="engine folder", says="engine.plan"):
            InferenceSession.open(MODEL)


class TestHub:
    def test_what_is_needed_is_downloaded_once_and_then_found_without_a_network(self, tmp_path):
        served = tmp_path / "served"
        shutil.copytree(MODEL, served)
        for unneeded in ("pytorch_model.bin", "original/model.safetensors", "consolidated.safetensors", "onnx/model.onnx"):
            (served / unneeded).parent.mkdir(exist_ok=True)
            (served / unneeded).write_text("large")
        home = {"HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_DISABLE_XET": "1", "NO_PROXY": "127.0.0.1"}
        found = "320 32 True"
        with fake_hub(HUB_ID, served) as (address, downloaded):
            lines = self.run(home | {"HF_ENDPOINT": address}, f"{HUB_ID}@", f"{HUB_ID}@", f"{HUB_ID}@nope", "some-org/other@")
            assert lines[:2] == [found] * 2
            assert sorted(downloaded) == [
                "config.json",
                "generation_config.json",
                "model.safetensors",
                "tokenizer.json",
                "tokenizer_config.json",
            ]
            assert "the model has no revision nope on the Hub." in lines[2]
            assert "the Hub has no such model, or it is private" in lines[3] or "the model has no revision None" in lines[3]
        both = "some-org/other: expected a folder, or a model of the Hugging Face Hub. There is no folder "
        gone = home | {"HF_ENDPOINT": address}
        for environment, reason in (
            (gone, "the model is not in the local cache of the Hub, which cannot be reached."),
            (gone | {"HF_HUB_OFFLINE": "1"}, "the model is not in the local cache of the Hub; HF_HUB_OFFLINE forbids to download it."),
        ):
            cached, missing = self.run(environment, f"{HUB_ID}@", "some-org/other@")
            assert cached == found
            assert missing == f"CheckpointError {both}{ROOT / 'some-org/other'}, and {reason}"

    def run(self, environment, *arguments):
        command, environment = [sys.executable, "-W", "ignore", "-c", PROGRAM, *arguments], {**os.environ, **environment}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    def test_a_session_source_may_be_a_model_of_the_hub(self, monkeypatch):
        monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda hub_id, **_: str(MODEL) if hub_id == HUB_ID else None)
        SessionSource(HUB_ID, engine="reference")().close()

    @pytest.mark.parametrize(
        ("error", "reason"),
        [
            (ConnectionError("no route"), "the model is not in the local cache of the Hub, which cannot be reached."),
            (OSError(28, "No space left on device"), "the download failed: OSError: [Errno 28] No space left on device"),
            (ValueError("odd\nlines"), "the download failed: ValueError: odd"),
            (errors.LocalEntryNotFoundError("x"), "the model is not in the local cache of the Hub, which cannot be reached."),
        ],
    )
    def test_why_it_cannot_be_downloaded(self, failing_hub, error, reason):
        failing_hub(error)
        with pytest.raises(CheckpointError) as raised:
            locate_model(HUB_ID)
        assert str(raised.value).endswith(f", and {reason}")
        assert raised.value.__cause__ is error

    def test_without_the_library_the_extra_is_named(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "huggingface_hub", None)
        with pytest.raises(ConfigError) as error:
            trt_kvcache.load(HUB_ID)
        assert str(error.value) == (
            f"{HUB_ID}: there is no such folder here. To load it from the Hugging Face Hub: pip install 'trt-kvcache[models]'."
        )
