"""Folders that are missing something, damaged or changed: every command that reads them says so in one line."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.numpy import load_file, save_file

from tests.helpers.fake_tensorrt import FakeGpuMemory
from trt_kvcache.session import open_model as opening

from .conftest import GOLDEN, MIXER, Run, change_json

READING_A_MODEL = {
    "generate": ["--engine", "reference", "--prompt-ids", "1"],
    "chat": ["--engine", "reference"],
    "compare": ["--engine", "reference", "--prompt-ids", "1"],
    "build": ["-o", "{tmp_path}/new-engine"],
}
READING_AN_ENGINE = {**{name: READING_A_MODEL[name] for name in ("generate", "chat", "compare")}, "memory": [], "inspect": []}
SIZING_A_BUILD = {"build": ["-o", "{tmp_path}/new-engine", "--dry-run"], "memory": ["--engine"]}
READING_ITS_CHECKPOINT = {name: READING_A_MODEL[name] for name in ("generate", "chat", "compare")}


def check(run: Run, folder: Path, commands: dict[str, list[str]], complaint: str, tmp_path: Path) -> None:
    for command, options in commands.items():
        before = sorted(tmp_path.iterdir())
        done = run(command, folder, *(option.format(tmp_path=tmp_path) for option in options))
        assert (done.code, done.out, done.err.count("\n")) == (1, "", 1), command
        assert done.err.startswith("error: "), command
        assert complaint in done.err, command
        assert sorted(tmp_path.iterdir()) == before, command


def truncate(file: Path) -> None:
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (lambda model: truncate(model / "model.safetensors"), "model.safetensors: expected a whole safetensors file, got "),
        (lambda model: (model / "model.safetensors").write_bytes(b""), "expected a whole safetensors file, got 0 bytes"),
        (lambda model: (model / "model.safetensors").unlink(), "model.safetensors"),
        (lambda model: (model / "config.json").unlink(), "config.json: expected a file, got nothing there."),
        (lambda model: (model / "config.json").write_bytes(b"\xff{"), "config.json: cannot be read: 'utf-8' codec"),
        (lambda model: (model / "config.json").write_text("[]"), "config.json: expected a JSON object, got list."),
        (lambda model: change_json(model / "config.json", lambda config: config.update(vocab_size=767)), "model.embed_tokens.weight"),
        (lambda model: change_json(model / "config.json", lambda config: config.update(model_type="gpt2", architectures=None)), "gpt2"),
    ],
    ids=["truncated", "empty weights", "no weights", "no config", "not UTF-8", "not an object", "other shapes", "other family"],
)
def test_a_damaged_model(run: Run, model: Path, tmp_path: Path, damage: Callable[[Path], object], complaint: str):
    damage(model)
    check(run, model, READING_A_MODEL, complaint, tmp_path)
    if (model / "model.safetensors").exists():
        check(run, model, SIZING_A_BUILD, complaint, tmp_path)


@pytest.mark.parametrize("file", ["pytorch_model.bin", "pytorch_model.bin.index.json", "tf_model.h5", "consolidated.00.pth"])
def test_weights_in_another_format(run: Run, model: Path, tmp_path: Path, file: str):
    (model / "model.safetensors").rename(model / file)
    complaint = f"index.json, got {file}. Weights in another format (pytorch_model.bin) must be converted"
    check(run, model, READING_A_MODEL, complaint, tmp_path)
    check(run, model, SIZING_A_BUILD, complaint, tmp_path)


def test_a_link_to_nothing(run: Run, model: Path, tmp_path: Path):
    (model / "model.safetensors").unlink()
    (model / "model.safetensors").symlink_to(tmp_path / "gone")
    check(run, model, READING_A_MODEL, "index.json, got model.safetensors, which is no file. ", tmp_path)
    check(run, model, SIZING_A_BUILD, "index.json, got model.safetensors, which is no file. ", tmp_path)


def test_defaults_of_generation_that_are_damaged(run: Run, model: Path, tmp_path: Path):
    (model / "generation_config.json").write_text("[1")
    complaint = "generation_config.json: expected JSON, got a syntax error"
    check(run, model, {name: READING_A_MODEL[name] for name in ("generate", "build")}, complaint, tmp_path)
    check(run, model, SIZING_A_BUILD, complaint, tmp_path)


def test_memory_names_the_file(run: Run, model: Path):
    change_json(model / "config.json", lambda config: config.update(vocab_size=12.5))
    for options in ([], ["--engine"], ["--fit", "1GB"]):
        done = run("memory", model, *options)
        assert (done.code, done.out) == (1, "")
        assert done.err == f"error: {model / 'config.json'}: vocab_size: expected a positive integer, got 12.5.\n"


def test_tensors_that_are_missing(run: Run, model: Path, tmp_path: Path):
    tensors = load_file(model / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, model / "model.safetensors")
    complaint = "1 tensor(s) of a llama model are missing: model.norm.weight."
    check(run, model, READING_A_MODEL, complaint, tmp_path)
    check(run, model, SIZING_A_BUILD, complaint, tmp_path)


def test_a_missing_shard(run: Run, tmp_path: Path):
    folder = Path(shutil.copytree(GOLDEN / "qwen3-sharded", tmp_path / "model"))
    shutil.copy(GOLDEN / "llama" / "config.json", folder / "tokenizer.json")  # chat asks for one first
    (folder / "model-00002-of-00003.safetensors").unlink()
    complaint = "model-00002-of-00003.safetensors: expected a shard that model.safetensors.index.json names, got nothing there."
    check(run, folder, READING_A_MODEL, complaint, tmp_path)
    check(run, folder, SIZING_A_BUILD, complaint, tmp_path)


def test_an_index_without_any_shard(run: Run, tmp_path: Path):
    folder = Path(shutil.copytree(GOLDEN / "qwen3-sharded", tmp_path / "model"))
    for shard in folder.glob("*.safetensors"):
        shard.unlink()
    complaint = "model-00001-of-00003.safetensors: expected a shard that model.safetensors.index.json names, got nothing there."
    check(run, folder, SIZING_A_BUILD, complaint, tmp_path)


def test_a_damaged_tokenizer(run: Run, model: Path, tmp_path: Path):
    truncate(model / "tokenizer.json")
    check(run, model, READING_ITS_CHECKPOINT, "tokenizer.json: expected a tokenizer, got an error", tmp_path)


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (lambda path: None, "model folder, an engine folder, or an id of the Hugging Face Hub such as Qwen/Qwen3-0.6B, got nothing there."),
        (lambda path: path.touch(), "model folder, got a file that is no GGUF file."),
    ],
    ids=["nothing", "file"],
)
def test_a_missing_folder(run: Run, tmp_path: Path, make: Callable[[Path], object], complaint: str):
    make(tmp_path / "model")
    check(run, tmp_path / "model", READING_A_MODEL, f"model: expected a {complaint}", tmp_path)


def test_an_unreadable_folder(run: Run, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """As far as a test can tell that may be run by root, who can read everything."""

    def refuse(self: Path, *arguments: object, **options: object) -> bool:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "is_file", refuse)
    check(run, model, READING_A_MODEL, "Permission denied", tmp_path)


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (
            lambda engine: change_json(engine / "config.json", lambda config: config.update(format=9)),
            "format: this package reads 8, got 9. A newer trt-kvcache built the engine: upgrade.",
        ),
        (
            lambda engine: change_json(engine / "config.json", lambda config: config["kv_cache"]["layers"][1].update(num_kv_heads=3)),
            "kv_cache.layers: expected",
        ),
        (
            lambda engine: change_json(engine / "config.json", lambda config: config["kv_cache"].update(max_sequence_length=39)),
            f"tensor `k_cache_0`: expected input `k_cache_0` float16 (-1, {MIXER.num_kv_heads}, 39, {MIXER.head_dim}) for this model",
        ),
        (
            lambda engine: change_json(engine / "config.json", lambda config: config["kv_cache"].update(max_batch_size=4)),
            "profile prefill: expected max_batch 4 as in kv_cache, got 3.",
        ),
        (lambda engine: truncate(engine / "config.json"), "config.json: cannot be read as JSON"),
        (lambda engine: (engine / "config.json").unlink(), "expected an engine folder, but it has no config.json."),
        (lambda engine: truncate(engine / "engine.plan"), "engine.plan: expected 31 bytes as config.json records, got 15. Build it again."),
    ],
    ids=["newer format", "other heads", "other length", "other batch", "truncated config", "no config", "truncated plan"],
)
def test_a_damaged_engine_folder(run: Run, engine: Path, tmp_path: Path, damage: Callable[[Path], object], complaint: str):
    damage(engine)
    check(run, engine, READING_AN_ENGINE, complaint, tmp_path)


def test_an_engine_whose_checkpoint_is_gone(run: Run, engine: Path, model: Path, tmp_path: Path):
    model.rename(tmp_path / "elsewhere")
    check(
        run, engine, READING_ITS_CHECKPOINT, f"it is neither at {model}, where it was at the build, nor at {engine}/checkpoint.", tmp_path
    )
    assert run("inspect", engine).code == run("memory", engine).code == 0


def test_an_engine_whose_checkpoint_was_changed(run: Run, engine: Path, model: Path, tmp_path: Path):
    weights = bytearray((model / "model.safetensors").read_bytes())
    weights[-3] ^= 1
    (model / "model.safetensors").write_bytes(weights)
    complaint = f"{model}: this checkpoint was changed since engine {engine} was built from it"
    check(run, engine, READING_ITS_CHECKPOINT, complaint, tmp_path)


@pytest.mark.trt
def test_a_plan_that_was_changed(run: Run, engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(opening, "CudaMemory", lambda device, **_: FakeGpuMemory())
    plan = bytearray((engine / "engine.plan").read_bytes())
    plan[5] ^= 1
    (engine / "engine.plan").write_bytes(plan)
    commands = {"generate": ["--engine", "tensorrt", "--prompt-ids", "1"], "compare": ["--engine", "tensorrt", "--prompt-ids", "1"]}
    check(run, engine, commands, "engine.plan: it was changed since the build", tmp_path)


def test_an_engine_folder_is_refused_as_a_model(run: Run, engine: Path, tmp_path: Path):
    check(run, engine, {"build": READING_A_MODEL["build"]}, "expected a Hugging Face folder, got an engine folder.", tmp_path)
