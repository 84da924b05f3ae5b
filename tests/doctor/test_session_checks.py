"""Checks F to K: sessions, with planted mistakes in the place of an engine."""

from dataclasses import replace

import numpy as np
import pytest

from tests.paths import ROOT
from trt_kvcache.cache.layout import KVLayout
from trt_kvcache.doctor import stale_rows, subjects
from trt_kvcache.doctor.cases import Case, NotHere
from trt_kvcache.doctor.checks import compilation, engines, first_steps, graphs, greedy, memory, sessions, timing
from trt_kvcache.doctor.models import shipped_model, shipped_model_folder, tiny_model, wide_model
from trt_kvcache.doctor.results import CheckResult
from trt_kvcache.doctor.settings import Settings
from trt_kvcache.doctor.subjects import TENSORRT, Subject, case_name, open_reference
from trt_kvcache.engine_folder.folder import EngineFolder
from trt_kvcache.errors import BuildError, EngineError


def compare(settings, subject):
    model = tiny_model(settings)
    with open_reference(model, "float32") as reference:
        return sessions.Expected(model, "float32", reference).compare(settings, subject)


def test_equal_sessions_pass(settings, plant):
    figures = compare(settings, plant())
    assert (figures["worst_relative_error"], figures["ties"], figures["steps"]) == (0.0, 0, 10)


def wrong_prefill(session, prompts):
    logits = session.prefill(prompts)
    logits[1, 5] += 0.1 * np.abs(logits).max()
    return logits


def wrong_append(session, turns):
    return session.append([[*turn[:-1], turn[-1] ^ 1] if turn else turn for turn in turns])


def late_wrong_decode():
    calls = []

    def decode(session, tokens):
        calls.append(tokens)
        logits = session.decode(tokens)
        return logits[::-1] if len(calls) == 3 else logits

    return decode


def wrong_queue():
    def submit(session, prompt, **options):
        return session.submit([*prompt[:-1], prompt[-1] ^ 1], **options)

    return submit


@pytest.mark.parametrize(
    ("methods", "step"),
    [
        ({"prefill": wrong_prefill}, "ragged prefill"),
        ({"append": wrong_append}, "second turn"),
        ({"decode": late_wrong_decode()}, "decode 3"),
        ({"submit": wrong_queue()}, "requests in a queue"),
        ({"prefill": lambda session, prompts: np.full_like(session.prefill(prompts), np.nan)}, "ragged prefill"),
    ],
    ids=["prefill", "append", "decode", "queue", "NaN"],
)
def test_wrong_session_fails_and_its_step_is_named(settings, plant, log, methods, step):
    subject = plant(**methods)
    log.run("session", lambda: compare(settings, subject))
    assert log.cases[-1].status == "failed"
    assert log.cases[-1].text.startswith(step)


def test_full_slot_that_is_overwritten_fails(settings, plant, log):
    def append(session, turns):
        logits = session.append(turns)
        if not turns[0]:  # the idle slot is full, and is the first
            logits = logits.copy()
            logits[1] += 1
        return logits

    log.run("session", lambda: compare(settings, plant(append=append)))
    assert log.cases[-1].text.startswith("1 new beside a full slot")


def test_replay_with_other_bits_fails(settings, plant, log):
    calls = []

    def decode(session, tokens):
        logits = session.decode(tokens)
        calls.append(tokens)
        if len(calls) == 3:
            logits.view(np.uint32)[0, 0] ^= 1
        return logits

    model = wide_model(settings)
    with plant().open(settings, model, "float16") as session:
        graphs.repeated_steps(session, model)
    with plant(decode=decode).open(settings, model, "float16") as session:
        log.run("graphs", lambda: graphs.repeated_steps(session, model))
    assert "logits of repetition 2: expected equal bytes, got 1 of" in log.cases[-1].text


def test_allocation_in_each_round_of_decode_fails(settings, plant, log):
    kept = []

    def decode(session, tokens):
        kept.append(session.cache.memory.allocate(512, stream=session.cache.memory.create_stream()))
        return session.decode(tokens)

    model = tiny_model(settings)
    log.run("right", lambda: memory.memory_of(settings, plant(), model, "float32"))
    log.run("leak", lambda: memory.memory_of(settings, plant(decode=decode), model, "float32"))
    assert [case.status for case in log.cases] == ["passed", "failed"]
    assert "expected no allocation, got at least 0 bytes more on the device, and 1024 in" in log.cases[-1].text


def test_times_of_both_lengths(settings, plant):
    figures = timing.decode_times(settings, plant(), tiny_model(settings), "float32")
    assert {"graph_host_us_at_16", "graph_step_us_at_16", "graph_step_us_at_48", "long_over_short"} <= set(figures)
    assert all(value > 0 for value in figures.values())


class Shifted:
    """A stream whose tokens from the third on are others."""

    def __init__(self, stream):
        self._tokens = list(stream)

    def __iter__(self):
        return (one if index < 2 else replace(one, token=one.token ^ 1) for index, one in enumerate(self._tokens))


def test_wrong_greedy_token_fails(settings, plant, log):
    model = shipped_model()
    with open_reference(model, "float16") as reference:
        log.run("right", lambda: greedy._generate(settings, plant(), model, "float16", reference))
        subject = plant(generate=lambda session, *arguments, **options: Shifted(session.generate(*arguments, **options)))
        log.run("wrong", lambda: greedy._generate(settings, subject, model, "float16", reference))
    assert [case.status for case in log.cases] == ["passed", "failed"]
    assert log.cases[0].figures["tokens"] == 12
    assert "prompt 0, token 2: expected" in log.cases[-1].text


def test_shipped_model_is_small():
    folder = shipped_model_folder()
    assert folder == ROOT / "examples" / "tiny-chat"
    assert sum(path.stat().st_size for path in folder.iterdir() if path.is_file()) < 3 << 20


def test_refusal_of_the_gpu_leaves_tensorrt_out(tmp_path, log, monkeypatch):
    class FakeTensorRT:
        version, is_rtx, release = "1.7", True, (1, 7)

        def supports(self, variant):
            return True

    opened = []

    def refuse(self, settings, model, dtype, *, cuda_graphs=True):
        opened.append(self.variant)
        raise EngineError(
            "tensorrt_rtx refuses this engine. TensorRT says: compute capability 9.0. Supported compute capabilities: 8.0 8.6"
        )

    monkeypatch.setattr(engines, "usable_tensorrt", lambda settings: FakeTensorRT())
    monkeypatch.setattr(engines, "engine_folder", lambda *arguments: "folder")
    monkeypatch.setattr(engines, "_figures", lambda folder: {})
    monkeypatch.setattr(Subject, "open", refuse)
    engines.check(Settings(scratch=str(tmp_path)), log)
    assert opened == ["native"], "the others would get the same answer"
    assert log.cases[-1].name == TENSORRT
    assert log.cases[-1].status == "not here"
    assert "Supported compute capabilities: 8.0 8.6" in log.cases[-1].text
    assert CheckResult("C", "", tuple(log.cases), 0).status != "failed"


def test_failed_build_is_a_failure_of_its_variant_alone(settings, log, monkeypatch):
    class FakeTensorRT:
        is_rtx, release = False, (10, 3)

        def supports(self, variant):
            return variant.name != "mask"

        def __str__(self):
            return "tensorrt 10.3"

    def build(settings, model, dtype, variant):
        if variant == "native":
            raise BuildError("MyelinCheckException: Expected 3 live inputs, got 4")
        return "folder"

    monkeypatch.setattr(engines, "usable_tensorrt", lambda settings: FakeTensorRT())
    monkeypatch.setattr(engines, "engine_folder", build)
    monkeypatch.setattr(engines, "_figures", lambda folder: {})
    monkeypatch.setattr(Subject, "open", lambda self, settings, model, dtype: open_reference(model, dtype))
    engines.check(settings, log)
    statuses = {case.name: case.status for case in log.cases}
    model = wide_model(settings)
    assert statuses[case_name("native", model, "float16")] == "failed"
    assert statuses[case_name("mask", model, "float16")] == "not here"
    assert statuses[case_name("plugin", model, "float16")] == "passed"
    assert statuses[case_name("segments", model, "float16")] == "not here", "they are for TensorRT for RTX"


@pytest.mark.trt
@pytest.mark.parametrize(("variant", "count"), [("plugin", 1), ("segments", 3)])
def test_both_forms_of_plugin_attention_are_built(settings, variant, count):
    """The dry run opens them with the NumPy engine."""
    with Subject("tensorrt", variant).open(settings, wide_model(settings), "float16") as session:
        assert session.cache_config.kv.layout is KVLayout.COMBINED
    config = EngineFolder.open(subjects.engine_folder(settings, wide_model(settings), "float16", variant)).config
    assert (1 if config.segments is None else len(config.segments.plans)) == count


def test_engine_that_check_c_refused_is_left_out(settings):
    model = wide_model(settings)
    left_out = settings.changed(left_out={case_name("native", model, "float16"): "check C: it failed", TENSORRT: ""})
    with pytest.raises(NotHere, match="check C: it failed"):
        Subject("tensorrt", "native").open(left_out, model, "float16")
    with pytest.raises(NotHere, match="not on this GPU"):
        Subject("tensorrt", "mask").open(settings.changed(left_out={TENSORRT: "not on this GPU"}), model, "float16")


def test_compilation_is_timed_in_two_processes_with_one_cache(settings, log, monkeypatch):
    seen = []

    def result(check, settings, *, environment, own_group):
        seen.append((check.module, environment["XDG_CACHE_HOME"], own_group))
        folder = settings.folder / "cache-of-compilation"
        folder.mkdir(exist_ok=True)
        (folder / "kernel").write_bytes(b"12345")
        return CheckResult("H", check.title, (Case("torch", "passed", figures={"open": 1.0}, variant="torch"),), 1.0)

    monkeypatch.setattr(compilation, "run_in_child", result)
    compilation.check(settings, log)
    assert seen == [("trt_kvcache.doctor.checks.first_steps", str(settings.folder / "cache-of-compilation"), False)] * 2
    assert [case.name for case in log.cases] == [
        *("first process: torch", "cache after the first process"),
        *("second process: torch", "cache after the second process"),
    ]
    assert log.cases[1].figures == {"nbytes": 5}


def test_first_steps_are_timed(settings, plant):
    figures = first_steps._seconds(settings, plant(), tiny_model(settings)._replace(length=64), "float32")
    assert {"open", "first prefill", "the same again", "another width", "two slots", "first decode", "close"} <= set(figures)


def poisoned(reads):
    """Return a session whose logits depend on rows that are not live, if these are read."""

    def decode(session, tokens):
        k, _ = session.cache.get_separate_kv_cache(0)
        dead = np.float32(k.numpy()[0, 0, -1, 0])
        return session.decode(tokens) + reads * dead

    return decode


@pytest.mark.parametrize(
    ("variant", "reads", "statuses"),
    [
        ("torch", 0.0, ["passed", "failed"]),  # 0 x NaN
        ("torch", 1e-3, ["failed", "failed"]),
        ("segments", 0.0, ["passed", "failed"]),
        ("native", 0.0, ["passed", "passed", "noted"]),
        ("native", 1e-3, ["failed", "passed", "noted"]),
    ],
)
def test_stale_rows_that_are_read(settings, plant, log, monkeypatch, variant, reads, statuses):
    plant(decode=poisoned(np.float32(reads)))
    monkeypatch.setattr(stale_rows, "SUBJECTS", (Subject("tensorrt" if variant == "native" else "torch", variant),))
    model = tiny_model(settings)
    with open_reference(model, "float32") as reference:
        stale_rows.check_stale_rows(settings, log, model, "float32", reference)
    assert sorted(case.status for case in log.cases) == sorted(statuses)


def test_stale_rows_that_are_not_read_pass(settings, plant, log):
    plant()
    model = tiny_model(settings)
    with open_reference(model, "float32") as reference:
        stale_rows.check_stale_rows(settings, log, model, "float32", reference)
    assert {case.status for case in log.cases} == {"passed"}
    assert len(log.cases) == 10
