"""Checks D and E: layers of TensorRT alone, with planted mistakes in the place of an engine."""

import ctypes

import numpy as np
import pytest

from tests.helpers.assertions import raises
from tests.helpers.fake_tensorrt import FakeGpuMemory, FakeTensorRT
from trt_kvcache.doctor import single_layer
from trt_kvcache.doctor.cases import CheckFailure
from trt_kvcache.doctor.checks import attention_layer, cache_update
from trt_kvcache.doctor.checks.attention_layer import LARGE, STEPS, AttentionLayer, attended, run_step
from trt_kvcache.doctor.checks.cache_update import WRITES, CacheUpdate, run_write, write_rows
from trt_kvcache.doctor.single_layer import NumPyRunner
from trt_kvcache.engine.protocol import EngineProfile, TensorSpec
from trt_kvcache.errors import EngineError


class PlantedUpdate(CacheUpdate):
    def __init__(self, mistake):
        self.mistake = mistake

    def compute(self, tensors):
        cache, rows, starts = tensors["present_k_cache"], tensors["rows"], tensors["start"].tolist()
        if self.mistake == "nothing is written":
            return
        if self.mistake == "rows beyond S wrap":
            for slot, start in enumerate(starts):
                for index in range(rows.shape[2]):
                    cache[slot, :, (start + index) % cache.shape[2]] = rows[slot, :, index]
            return
        if self.mistake == "rows beyond S are clamped":
            starts = [min(start, cache.shape[2] - rows.shape[2]) for start in starts]
        if self.mistake == "one row late":
            starts = [start + 1 for start in starts]
        write_rows(cache, rows, starts)
        if self.mistake == "an old row too":
            cache[1, 1, 60, 2] = 3


def failures(runs):
    found = []
    for run in runs:
        try:
            run()
        except CheckFailure as failure:
            found.append(str(failure))
    return found


@pytest.mark.parametrize(
    "mistake", ["nothing is written", "rows beyond S wrap", "rows beyond S are clamped", "one row late", "an old row too"]
)
def test_wrong_update_fails(mistake):
    runner = NumPyRunner(PlantedUpdate(mistake))
    found = failures([lambda write=write: run_write(runner, write) for write in WRITES])
    assert found
    assert "expected equal bytes" in found[0]


def test_right_update_passes():
    for write in WRITES:
        run_write(NumPyRunner(CacheUpdate()), write)


def test_bytes_around_the_cache_are_compared():
    class Outside(CacheUpdate):
        def compute(self, tensors):
            super().compute(tensors)
            cache = tensors["present_k_cache"]
            whole = np.lib.stride_tricks.as_strided(cache, (4, *cache.shape[1:]), cache.strides)
            whole[3, 1, 5, 2] = 9

    with pytest.raises(CheckFailure, match=r"at \[4, 1, 5, 2\]"):
        run_write(NumPyRunner(Outside()), WRITES[0])


@pytest.mark.parametrize(("alias", "passes"), [("k_cache", True), (None, False), ("rows", False)])
def test_alias_that_the_engine_reports(settings, log, monkeypatch, alias, passes):
    runner = NumPyRunner(CacheUpdate())
    runner.tensors = {"present_k_cache": TensorSpec.output("present_k_cache", (-1, 2, 128, 64), "float16", alias=alias)}

    class Opened:
        def __enter__(self):
            return runner

        def __exit__(self, *error):
            pass

    monkeypatch.setattr(cache_update, "opened", lambda *arguments: Opened())
    cache_update.check(settings, log)
    assert [case.status for case in log.cases] == ["passed" if passes else "failed", "passed", "passed", "passed"]


class PlantedAttention(AttentionLayer):
    def __init__(self, variant, mistake):
        super().__init__(variant, "float16")
        self.mistake = mistake

    def compute(self, tensors):
        q, keys, values = tensors["q"], tensors["keys"], tensors["values"]
        width, tokens = q.shape[2], keys.shape[2]
        ends = (tensors["key_lengths"] if self.variant == "native" else tensors["position_ids"][:, 0] + width).tolist()
        if self.mistake == "all rows are read":
            tensors["attended"][...] = attended(q, keys, values, [tokens] * len(ends))
        elif self.mistake == "the mask is aligned to the upper left":
            out = np.stack([attended(q[:, :, i : i + 1], keys, values, [i + 1] * len(ends))[:, :, 0] for i in range(width)], axis=2)
            tensors["attended"][...] = out
        elif self.mistake == "one length for all slots":
            tensors["attended"][...] = attended(q, keys, values, [ends[1]] * len(ends))
        elif self.mistake == "heads are taken in turns":
            order = [0, 2, 1, 3]
            tensors["attended"][...] = attended(q[:, order], keys, values, ends)[:, order]
        elif self.mistake == "dead rows are multiplied by zero":  # as TensorRT does
            out = attended(q, keys, values, ends)
            for slot, end in enumerate(ends):
                out[slot] += (0 * values[slot, :, end:].astype(np.float32)).sum()
            tensors["attended"][...] = out
        else:
            tensors["attended"][...] = attended(q, keys, values, ends)


MISTAKES = ("all rows are read", "the mask is aligned to the upper left", "one length for all slots", "heads are taken in turns")


@pytest.mark.parametrize("variant", ["native", "mask"])
@pytest.mark.parametrize("mistake", MISTAKES)
def test_wrong_attention_fails(variant, mistake):
    runner = NumPyRunner(PlantedAttention(variant, mistake))
    for poison in (0.0, LARGE):
        found = failures([lambda step=step, p=poison: run_step(runner, variant, "float16", step, p) for step in STEPS])
        assert found, poison


def test_large_stale_rows_fail_where_they_are_added():
    class Adds(AttentionLayer):
        def compute(self, tensors):
            super().compute(tensors)
            values = tensors["values"]
            tensors["attended"][0, 0] += np.float16(1e-4) * values[0, 0, tensors["key_lengths"][0] :].astype(np.float32).sum(axis=0) / 2000

    runner = NumPyRunner(Adds("native", "float16"))
    run_step(runner, "native", "float16", STEPS[0], 0.0)
    with pytest.raises(CheckFailure):
        run_step(runner, "native", "float16", STEPS[0], LARGE)


@pytest.mark.parametrize("mistake", ["none", "dead rows are multiplied by zero"])
def test_nan_in_dead_rows_is_told_and_fails_nothing(settings, log, monkeypatch, mistake):
    class Opened:
        def __init__(self, settings, layer, variant):
            self.runner = NumPyRunner(PlantedAttention(variant, mistake))

        def __enter__(self):
            return self.runner

        def __exit__(self, *error):
            pass

    monkeypatch.setattr(attention_layer, "opened", Opened)
    monkeypatch.setattr(attention_layer, "DTYPES", ("float16",))
    attention_layer.check(settings, log)
    statuses = {case.status for case in log.cases}
    assert "failed" not in statuses
    notes = [case for case in log.cases if case.status == "noted"]
    assert bool(notes) == (mistake != "none")
    assert all("reaches the results of: decode at 1, 17 and S" in note.text for note in notes)


@pytest.mark.trt
@pytest.mark.parametrize("module", [cache_update, pytest.param(attention_layer, marks=pytest.mark.slow)])
def test_tensorrt_builds_the_layers(settings, log, module):
    module.check(settings, log)
    assert {case.status for case in log.cases} == {"passed"}


def array_at(address, shape, dtype):
    nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return np.frombuffer((ctypes.c_char * nbytes).from_address(address), dtype).reshape(shape)


@pytest.fixture
def fake_engine(monkeypatch, tmp_path):
    """Return a function that makes a runner over a stand-in for TensorRT."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return make_fake_engine


def make_fake_engine(compute):
    """Return a runner whose step computes over the addresses and shapes that the stand-in was given, and the stand-in."""
    specs = [
        TensorSpec.input("k_cache", (-1, 2, 128, 64), "float16"),
        TensorSpec.input("rows", (-1, 2, -1, 64), "float16"),
        TensorSpec.input("start", (-1,), "int32"),
        TensorSpec.output("present_k_cache", (-1, 2, 128, 64), "float16", alias="k_cache"),
    ]
    profile = EngineProfile(name="all", min_batch=1, max_batch=3, min_width=1, max_width=8)
    fake = FakeTensorRT(specs, [profile])

    def run(context):
        shapes = {**context.shapes, "present_k_cache": context.shapes["k_cache"]}
        dtypes = {spec.name: spec.dtype for spec in specs}
        compute({name: array_at(address, shapes[name], dtypes[name]) for name, address in context.addresses.items()})

    fake.run = run
    return single_layer._PlanRunner(fake.tensorrt("tensorrt_rtx"), b"plan", FakeGpuMemory()), fake


def test_engine_of_tensorrt_gets_shapes_and_addresses(fake_engine):
    runner, fake = fake_engine(CacheUpdate().compute)
    assert runner.tensors["present_k_cache"].alias == "k_cache"
    for write in WRITES:
        run_write(runner, write)
    assert len([call for call in fake.calls if call[0] == "execute_async_v3"]) == len(WRITES)
    runner.close()


def test_engine_of_tensorrt_that_writes_a_copy_fails(fake_engine):
    runner, _ = fake_engine(lambda tensors: CacheUpdate().compute({**tensors, "present_k_cache": tensors["present_k_cache"].copy()}))
    with raises(CheckFailure, "the allocation around the cache", "equal bytes"):
        run_write(runner, WRITES[0])
    runner.close()


def test_engine_that_tensorrt_refuses_releases_its_memory():
    memory = FakeGpuMemory()
    fake = FakeTensorRT([TensorSpec.input("x", (1,), "float16")], [])
    fake.refuse.add("deserialize_cuda_engine")
    with pytest.raises(EngineError, match="refuses this engine"):
        single_layer._PlanRunner(fake.tensorrt("tensorrt_rtx"), b"plan", memory)
    assert memory.live_nbytes == 0
