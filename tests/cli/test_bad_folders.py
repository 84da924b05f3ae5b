import shutil

import pytest

from .conftest import change_json

RUNNING, READING_MODELS = ["generate", "chat", "compare"], ["generate", "chat", "compare", "build"]
PROMPTED = ["generate", "compare"]
WEIGHTS = "model.safetensors"


def change(file, edit):
    """Return a function that changes the bytes of a file in a folder."""
    return lambda folder: (folder / file).write_bytes(edit((folder / file).read_bytes()))


def half(content):
    return content[: len(content) // 2]


def config(**values):
    return lambda folder: change_json(folder / "config.json", lambda data: data.update(values))


def check(run, folder, commands, complaint, tmp_path):
    for command in commands:
        before = sorted(tmp_path.iterdir())
        options = ["-o", tmp_path / "new"] if command == "build" else ["--prompt-ids", "1"] if command in PROMPTED else []
        done = run(command, folder, *options, *(["--engine", "reference"] if command in RUNNING else []))
        assert (done.code, done.out, done.err.count("\n")) == (1, "", 1), command
        assert done.err.startswith("error: "), command
        assert complaint in done.err, command
        assert sorted(tmp_path.iterdir()) == before, command


@pytest.mark.parametrize(
    ("damage", "commands", "complaint"),
    [
        (change(WEIGHTS, half), READING_MODELS, "model.safetensors: expected a whole safetensors file, got "),
        (shutil.rmtree, READING_MODELS, "model: expected a model folder, got nothing there."),
    ],
)
def test_a_damaged_model(run, model, tmp_path, damage, commands, complaint):
    damage(model)
    check(run, model, commands, complaint, tmp_path)


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (config(format=3), "format: this package reads up to 2, got 3. A newer trt-kvcache built the engine: upgrade."),
        (change("engine.plan", half), "engine.plan: expected 31 bytes by config.json, got 15. Build it anew."),
    ],
)
def test_a_damaged_engine_folder(run, engine, tmp_path, damage, complaint):
    damage(engine)
    check(run, engine, [*RUNNING, "memory", "inspect"], complaint, tmp_path)


def test_an_engine_whose_checkpoint_was_changed_or_is_gone(run, engine, model, tmp_path):
    change(WEIGHTS, lambda content: content[:-1] + bytes([content[-1] ^ 1]))(model)
    check(run, engine, RUNNING, f"{model}: this checkpoint was changed since engine {engine} was built from it", tmp_path)
    model.rename(tmp_path / "elsewhere")
    check(run, engine, RUNNING, f"is neither at {model}, where it was at the build, nor at {engine}/checkpoint.", tmp_path)
    assert run("inspect", engine).code == run("memory", engine).code == 0
