"""``trt-kvcache bench``: which cases it measures, what it prints, and what it refuses before anything runs."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from trt_kvcache.benchmarking import copy_speed, measure
from trt_kvcache.cli import bench as bench_module
from trt_kvcache.errors import CapacityError

from .conftest import SHIPPED, TOKEN_NBYTES, Run, change_json

FAST = ("--engine", "reference", "--runs", 2)
SMALL = (*FAST, "-p", 8, "-n", 3)


@pytest.fixture(autouse=True)
def small_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copy_speed, "_HOST_NBYTES", 1 << 16)
    monkeypatch.setattr(copy_speed, "_last_level_cache", lambda: 0)


@pytest.fixture
def nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object, **options: object) -> None:
        pytest.fail("a session was opened")

    monkeypatch.setattr("trt_kvcache.cli.session_flags.open_session", fail)


def test_the_table(run: Run):
    done = run("bench", SHIPPED, *SMALL, "-b", "1,2", "-d", "0,16", "--pg", "8+2")
    assert (done.code, done.err) == (0, "")
    tests = [line.split("│")[1].strip() for line in done.out.splitlines() if line.startswith("│")]
    assert tests == ["pp8", "tg3", "pp8+tg2", "pp8 @ d16", "tg3 @ d16", "pp8+tg2 @ d16"] * 2
    batches = [line.split("│")[2].strip() for line in done.out.splitlines() if line.startswith("│")]
    assert batches == ["1"] * 6 + ["2"] * 6
    assert done.out.startswith(f"{SHIPPED}\nReferenceEngine on ")
    for said in (
        "2 runs after 2 to warm up; prompts of random tokens, seed 0",
        "included: logits on the host, sampling (greedy), and their text",
        "a token needs weights, K and V of ",
        "limit: share of the speed of reading weights, K and V at ",
        "memory: ",
    ):
        assert said in done.out


def test_the_table_fits_a_terminal_of_80_columns(run: Run, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("trt_kvcache.cli.console._WIDTH_OF_A_PIPE", 80)
    ticks = count(0, 0.003)  # the widths of numbers are those of a machine that is not too slow
    monkeypatch.setattr(bench_module, "measure", partial(measure, clock=lambda: next(ticks)))
    done = run("bench", SHIPPED, *FAST, "-p", 256, "-n", 100, "-d", 32)
    lines = [line for line in done.out.splitlines() if line.startswith("│")]
    assert [line.split("│")[1].strip() for line in lines] == ["pp256 @ d32", "tg100 @ d32"]
    assert max(len(line) for line in lines) <= 80


def test_json(run: Run):
    done = run("bench", SHIPPED, *SMALL, "-b", 2, "--temperature", 0.8, "--top-p", 0.9, "--seed", 7, "--warmup", 0, "--json")
    assert (done.code, done.err) == (0, "")
    document = json.loads(done.out)
    assert (document["engine"], document["device"], document["dtype"]) == ("ReferenceEngine", "cpu", "float16")
    assert document["model"]["layers"] == [0, 0]
    assert document["includes"] == {"logits": True, "sampling": "temperature 0.8, top-p 0.9", "text": True}
    assert document["prompts"] == {"tokens": "random", "seed": 7}
    assert document["limit"]["weights_nbytes"] == document["limit"]["step_weights_nbytes"] > 0
    assert document["interrupted"] is False
    prompt, steps = document["rows"]
    assert (prompt["test"], prompt["inter_token_latency"], prompt["limit_share"]) == ("pp8", None, None)
    assert steps["case"] == {"prompt_tokens": 0, "generate_tokens": 3, "batch_size": 2, "depth": 0}
    assert set(steps["inter_token_latency"]) == {"median", "p95", "p99"}
    assert (steps["runs"], steps["warmup"], steps["limit_share"] > 0) == (2, 0, True)
    read = sum(TOKEN_NBYTES * tokens for tokens in (2, 3, 4))  # after a prompt of one token
    assert steps["token_nbytes"] == (3 * document["limit"]["step_weights_nbytes"] + 2 * read) // (2 * 3)
    assert prompt["token_nbytes"] is None
    # 8 tokens of the prompt fit, and no more
    assert (document["cache"]["max_batch_size"], document["cache"]["max_sequence_length"]) == (2, 8)


def test_csv(run: Run):
    done = run("bench", SHIPPED, *SMALL, "--csv")
    assert (done.code, done.err) == (0, "")
    prompt, steps = csv.DictReader(io.StringIO(done.out))
    assert (prompt["test"], steps["test"], steps["batch_size"]) == ("pp8", "tg3", "1")
    assert prompt["inter_token_latency_median"] == ""
    assert float(steps["inter_token_latency_median"]) > 0
    assert float(steps["tokens_per_second"]) > 0


def test_an_engine_folder(run: Run, engine: Path):
    done = run("bench", engine, *SMALL, "-b", 3, "--json")
    assert done.code == 0
    document = json.loads(done.out)
    assert (document["cache"]["max_batch_size"], document["cache"]["max_sequence_length"]) == (3, 38)
    assert [row["test"] for row in document["rows"]] == ["pp8", "tg3"]


def test_only_prompts_or_only_decode_steps(run: Run):
    for flags, expected in ((("-p", 8, "-n", 0), ["pp8"]), (("-p", 0, "-n", 2), ["tg2"]), (("-p", 0, "-n", 0, "--pg", "4+2"), ["pp4+tg2"])):
        document = json.loads(run("bench", SHIPPED, *FAST, *flags, "--json").out)
        assert [row["test"] for row in document["rows"]] == expected


def test_a_model_without_a_tokenizer_makes_no_text(run: Run, model: Path):
    (model / "tokenizer.json").unlink()
    done = run("bench", model, *SMALL)
    assert "sampling (greedy)\n" in done.out


@pytest.mark.usefixtures("nothing_runs")
class TestRefused:
    @pytest.mark.parametrize(
        ("flags", "complaint"),
        [
            (("-p", "8,x"), "Invalid value for --prompt-tokens: expected numbers of at least 0 with commas between them, got '8,x'."),
            (("-n", "-1"), "Invalid value for --generate-tokens: expected numbers of at least 0 with commas between them, got '-1'."),
            (("-b", "0"), "Invalid value for --batch-size: expected numbers of at least 1 with commas between them, got '0'."),
            (("-d", ""), "Invalid value for --depth: expected numbers of at least 0 with commas between them, got ''."),
            (("--pg", "512"), "Invalid value for --pg: expected pairs such as 512+128 with commas between them, got '512'."),
            (("-p", 0, "-n", 0), "expected something to measure: a number above 0 for --prompt-tokens or --generate-tokens, or --pg."),
            (("--json", "--csv"), "expected --json or --csv, got both."),
            (("--top-p", 0.5), "Invalid value for --top-p: expected --temperature above 0 with it, which draws tokens."),
            (("--temperature", -1), "Invalid value for --temperature: expected"),
            (
                ("-p", 400, "-n", 0, "-d", 200),
                "Invalid value for --prompt-tokens, --generate-tokens, --pg, --depth: pp400 @ d200: expected at most 512 tokens in a slot "
                "(max_sequence_length), got 600: 200 of the depth, 400 of the prompt, 0 generated. The model has no more positions.",
            ),
            (("-p", 9, "--max-sequence-length", 8), "got 9: 0 of the depth, 9 of the prompt, 0 generated. --max-sequence-length says so."),
            (
                ("-b", 4, "--max-batch-size", 3),
                "Invalid value for --batch-size: pp512: expected a batch of at most 3 (max_batch_size), got 4. --max-batch-size says so.",
            ),
        ],
        ids=str,
    )
    def test_wrong_usage(self, run: Run, flags: tuple[object, ...], complaint: str):
        done = run("bench", SHIPPED, "--engine", "reference", *flags)
        assert (done.code, done.out) == (2, "")
        assert complaint in done.complaint

    def test_a_batch_that_an_engine_was_not_built_for(self, run: Run, engine: Path):
        done = run("bench", engine, "-p", 8, "-n", 0, "-b", 4)
        assert (done.code, done.out) == (2, "")
        assert "pp8: expected a batch of at most 3 (max_batch_size), got 4. The engine was built for it." in done.complaint

    def test_lengths_that_an_engine_was_not_built_for(self, run: Run, engine: Path):
        done = run("bench", engine, "-p", 8, "-n", 38)
        assert (done.code, done.out) == (2, "")
        assert "got 39: 0 of the depth, 1 of the prompt, 38 generated. The engine was built for it." in done.complaint

    def test_a_folder_without_a_model(self, run: Run, tmp_path: Path):
        done = run("bench", tmp_path)
        assert (done.code, done.out) == (1, "")
        assert "config.json" in done.err


def test_a_model_that_cannot_be_read(run: Run, model: Path):
    change_json(model / "config.json", lambda config: config.update(model_type="unknown"))
    done = run("bench", model, *SMALL)
    assert (done.code, done.out) == (1, "")
    assert done.err.startswith("error: ")


@pytest.fixture
def stop_after(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, BaseException], None]:
    """Return a function that has an exception come after so many rows."""

    def set_rows(count: int, error: BaseException) -> None:
        measure = bench_module.measure

        def stopped(*arguments: Any, **options: Any) -> Iterator[Any]:
            for done, row in enumerate(measure(*arguments, **options)):
                if done == count:
                    raise error
                yield row

        monkeypatch.setattr(bench_module, "measure", stopped)

    return set_rows


class TestAnError:
    ERROR = CapacityError("cuda:0: no room for a step.")

    def test_the_rows_so_far_are_printed(self, run: Run, stop_after: Callable[[int, BaseException], None]):
        stop_after(1, self.ERROR)
        done = run("bench", SHIPPED, *SMALL)
        assert (done.code, done.err) == (1, "error: cuda:0: no room for a step.\n")
        assert "│pp8 " in done.out
        assert "tg3" not in done.out

    def test_json_says_that_it_is_not_complete(self, run: Run, stop_after: Callable[[int, BaseException], None]):
        stop_after(1, self.ERROR)
        document = json.loads(run("bench", SHIPPED, *SMALL, "--json").out)
        assert ([row["test"] for row in document["rows"]], document["interrupted"]) == (["pp8"], True)

    def test_before_the_first_row_nothing_is_printed(self, run: Run, stop_after: Callable[[int, BaseException], None]):
        stop_after(0, self.ERROR)
        done = run("bench", SHIPPED, *SMALL, "--json")
        assert (done.code, done.out) == (1, "")


class TestCtrlC:
    @pytest.fixture
    def interrupt_after(self, stop_after: Callable[[int, BaseException], None]) -> Callable[[int], None]:
        """Return a function that has Ctrl-C come after so many rows."""
        return lambda count: stop_after(count, KeyboardInterrupt())

    def test_the_rows_so_far_are_printed(self, run: Run, interrupt_after: Callable[[int], None]):
        interrupt_after(1)
        done = run("bench", SHIPPED, *SMALL)
        assert (done.code, done.err) == (130, "interrupted\n")
        assert "│pp8 " in done.out
        assert "tg3" not in done.out

    def test_json_says_that_it_is_not_complete(self, run: Run, interrupt_after: Callable[[int], None]):
        interrupt_after(1)
        done = run("bench", SHIPPED, *SMALL, "--json")
        assert (done.code, done.err) == (130, "interrupted\n")
        document = json.loads(done.out)
        assert ([row["test"] for row in document["rows"]], document["interrupted"]) == (["pp8"], True)

    def test_before_the_first_row_nothing_is_printed(self, run: Run, interrupt_after: Callable[[int], None]):
        interrupt_after(0)
        for form in ((), ("--csv",)):
            done = run("bench", SHIPPED, *SMALL, *form)
            assert (done.code, done.out, done.err) == (130, "", "interrupted\n")


def test_progress_says_which_case_runs_and_how_far_it_is(run: Run, monkeypatch: pytest.MonkeyPatch):
    seen: list[tuple[str, float | None]] = []

    @contextmanager
    def display() -> Iterator[Callable[[str, float | None], None]]:
        yield lambda stage, done: seen.append((stage, done))

    monkeypatch.setattr(bench_module, "progress_display", display)
    assert run("bench", SHIPPED, *SMALL, "-b", 2, "--warmup", 0).code == 0
    assert seen == [(f"{test}, batch 2", done) for test in ("pp8", "tg3") for done in (0.0, 0.5, 1.0)]


def test_drafts_are_counted(run: Run):
    done = run("bench", SHIPPED, *FAST, "-p", 0, "-n", 60, "--draft", "ngram", "--json")
    [row] = json.loads(done.out)["rows"]
    assert 0 < row["draft_tokens"] >= row["accepted_tokens"]
    table = run("bench", SHIPPED, *FAST, "-p", 0, "-n", 60, "--draft", "ngram")
    assert f"drafts: {row['accepted_tokens']} of {row['draft_tokens']} tokens accepted (" in table.out + table.err
    [fields] = csv.DictReader(io.StringIO(run("bench", SHIPPED, *FAST, "-p", 0, "-n", 60, "--draft", "ngram", "--csv").out))
    assert (fields["draft_tokens"], fields["accepted_tokens"]) == (str(row["draft_tokens"]), str(row["accepted_tokens"]))
    assert "drafts:" not in run("bench", SHIPPED, *SMALL).out
