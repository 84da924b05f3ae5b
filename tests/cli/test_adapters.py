"""``--adapter``: the commands that open or build a model folder, and ``inspect`` of a folder that was built with one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.helpers.adapters import write_adapter
from tests.helpers.engine_files import make_engine_folder
from tests.helpers.models import write_model

from .conftest import Run

PROMPT = ("--prompt-ids", "5,6,7", "--engine", "reference")


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model", num_hidden_layers=2)


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    return write_adapter(tmp_path / "adapter")


def test_generate_and_score_run_with_the_adapter(run: Run, base: Path, adapter: Path) -> None:
    for command in (("generate", base, *PROMPT, "--max-new-tokens", 4, "--json"), ("score", base, *PROMPT, "--json")):
        plain, adapted = run(*command), run(*command, "--adapter", adapter)
        assert plain.code == adapted.code == 0
        assert plain.out != adapted.out


def test_compare_runs_all_paths_with_the_adapter(run: Run, base: Path, adapter: Path) -> None:
    done = run("compare", base, *PROMPT, "--steps", 2, "--adapter", adapter)
    assert done.code == 0, done.err


def test_compare_runs_all_paths_with_one_of_several_adapters(run: Run, base: Path, several: list[str]) -> None:
    command = ("compare", base, *PROMPT, "--steps", 2)
    for chosen in ((), ("--adapter", "sql")):
        done = run(*command, *several, *chosen)
        assert done.code == 0, done.err
    refused = run(*command, *several, "--adapter", "other")
    assert refused.code != 0
    assert "expected one of sql, poems, or None, got 'other'" in refused.complaint


def test_a_dry_run_of_a_build_checks_the_adapter(run: Run, base: Path, adapter: Path, tmp_path: Path) -> None:
    command = ("build", base, "-o", tmp_path / "engine", "--dry-run", "--adapter")
    assert run(*command, adapter).code == 0
    write_adapter(adapter, lora_bias=True)
    refused = run(*command, adapter)
    assert refused.code != 0
    assert "lora_bias" in refused.complaint


def test_a_folder_that_is_absent_is_named_with_the_flag(run: Run, base: Path, tmp_path: Path) -> None:
    done = run("generate", base, *PROMPT, "--adapter", tmp_path / "none")
    assert done.code != 0
    assert "--adapter: expected a folder of PEFT" in done.complaint


def test_inspect_names_the_adapter(run: Run, base: Path, adapter: Path, tmp_path: Path) -> None:
    engine = make_engine_folder(base, tmp_path / "engine", adapter=adapter).path
    found = json.loads(run("inspect", engine, "--json").out)["checkpoint"]
    assert found["adapter"] == str(adapter)
    shown = "".join(run("inspect", engine).out.split())
    assert f"mergedadapter:{adapter},fingerprint{found['adapter_fingerprint'][:16]}" in shown
    assert "merged adapter" not in run("inspect", make_engine_folder(base, tmp_path / "plain").path).out


# --- several ---


@pytest.fixture
def several(tmp_path: Path) -> list[str]:
    return [f"--adapters={name}={write_adapter(tmp_path / name, seed=seed)}" for seed, name in enumerate(("sql", "poems"), start=1)]


@pytest.mark.parametrize("command", ["generate", "score"])
def test_a_command_uses_one_of_several_adapters(command: str, run: Run, base: Path, several: list[str], tmp_path: Path) -> None:
    call = (command, base, *PROMPT, "--json", *(("--max-new-tokens", 4) if command == "generate" else ()))
    for name in ("sql", "poems"):
        chosen, merged = run(*call, *several, "--adapter", name), run(*call, "--adapter", tmp_path / name)
        assert chosen.code == merged.code == 0, chosen.err
        found, expected = (json.loads(done.out)["answers" if command == "generate" else "texts"] for done in (chosen, merged))
        assert found[0]["tokens"] == expected[0]["tokens"]
        assert "adapters: sql, poems, " in chosen.err
        assert chosen.out != run(*call, *several).out
    plain, unused = run(*call), run(*call, *several)
    key = "answers" if command == "generate" else "texts"
    assert json.loads(plain.out)[key] == json.loads(unused.out)[key]


def test_lines_of_a_file_name_their_adapters(run: Run, base: Path, several: list[str], tmp_path: Path) -> None:
    names = ["poems", None, "sql", "default"]
    lines = [
        {"prompt": [5, 6, 7], "max_new_tokens": 5, "ignore_eos": True, **({} if name == "default" else {"adapter": name})} for name in names
    ]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    command = ("serve-file", base, tmp_path / "prompts.jsonl", "--engine", "reference", "-o", "-")
    done = run(*command, *several, "--adapter", "poems")
    assert done.code == 0, done.err
    answers = {answer["index"]: answer for answer in map(json.loads, done.out.splitlines())}
    assert [answers[index].get("adapter", "default") for index in range(4)] == names
    assert answers[0]["tokens"] == answers[3]["tokens"]
    assert len({str(answers[index]["tokens"]) for index in range(3)}) == 3
    lines[1]["adapter"] = "other"
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    refused = run(*command, *several)
    assert refused.code != 0
    assert "prompts.jsonl:2: adapter: expected one of sql, poems, or None, got 'other'" in refused.complaint
    assert run(*command).code == 0, "without adapters, the field is one of those that come back"


def test_bench_counts_the_bytes_of_adapters(run: Run, base: Path, several: list[str]) -> None:
    command = ("bench", base, "--engine", "reference", "-p", 0, "-n", 2, "-r", 1, "--warmup", 0, "--json")
    with_depth = (*command, "-d", 3)
    plain, unused, used = (json.loads(run(*command, *more).out) for more in ((), several, (*several, "--adapter", "sql")))
    limits = [found["limit"]["step_weights_nbytes"] for found in (plain, unused, used)]
    assert limits == [limits[0], limits[0], limits[0] + 2 * 2 * 3 * (96 + 40 + 40 + 28)]
    assert run(*with_depth, *several, "--adapter", "sql").code == 0


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--adapters", "sql"], "expected NAME=ADAPTER, got sql"),
        (["--adapters", "=x"], "expected NAME=ADAPTER, got =x"),
        (["--adapters", "a=x", "--adapters", "a=y"], "expected each name once, got a twice"),
        (["--adapters", "a b=x"], "adapters: expected names of letters"),
        (["--adapters", "a=none"], "expected a folder of PEFT, got none"),
    ],
)
def test_adapters_that_are_refused(flags: list[str], text: str, run: Run, base: Path) -> None:
    done = run("generate", base, *PROMPT, *flags)
    assert done.code != 0
    assert text in done.complaint


def test_a_name_that_is_none_of_them(run: Run, base: Path, several: list[str]) -> None:
    done = run("generate", base, *PROMPT, *several, "--adapter", "other")
    assert done.code != 0
    assert "expected one of sql, poems, or None, got 'other'" in done.complaint
