"""``TensorRTEngine`` against a stand-in that records its calls; no GPU runs here."""

from __future__ import annotations

import gc
import os
import re
import subprocess
import sys
import time
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.assertions import raises
from tests.helpers.engine_files import PLAN, make_engine_folder
from tests.helpers.fake_tensorrt import (
    BATCH,
    IDENTITY,
    PREFILL,
    VOCAB,
    D,
    FakeGpuMemory,
    FakeLogger,
    FakeStream,
    FakeTensorRT,
    H,
    S,
    enqueue,
    install,
    make_ready,
    set_shapes,
    tensor,
)
from tests.helpers.models import write_model
from tests.paths import ROOT
from tests.trt.decoding import Decoding
from trt_kvcache import KVCacheManager
from trt_kvcache.checkpoint import Checkpoint
from trt_kvcache.engine.bindings import BindingPlan
from trt_kvcache.engine.names import DEFAULT_NAMES, TensorNames
from trt_kvcache.engine.protocol import EngineProfile, TensorMode, TensorSpec
from trt_kvcache.engine_folder.folder import EngineFolder
from trt_kvcache.engine_folder.records import FileRecord
from trt_kvcache.engine_folder.v_outputs import v_outputs
from trt_kvcache.errors import BindingError, ClosedError, EngineError, LayoutError, PlaceError
from trt_kvcache.memory.host_memory import HostMemory
from trt_kvcache.memory.tensor import DeviceTensor
from trt_kvcache.trt import graph_engine as execution, tensorrt_engine
from trt_kvcache.trt.tensorrt_engine import TensorRTEngine


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> EngineFolder:
    base = tmp_path_factory.mktemp("engine")
    return make_engine_folder(write_model(base / "model"), base / "engine")


@pytest.fixture
def memory() -> FakeGpuMemory:
    return FakeGpuMemory()


@pytest.fixture
def fake(folder: EngineFolder, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeTensorRT:
    """A TensorRT for RTX that knows the engine of the folder."""
    config = folder.config
    module = FakeTensorRT(list(config.tensors), list(config.profiles), plan=PLAN)
    install(module, monkeypatch, tmp_path / "caches")
    return module


def bind_all(engine: TensorRTEngine, memory: FakeGpuMemory) -> dict[str, DeviceTensor]:
    """Bind everything that a decode or prefill of three slots needs, in the profile in use."""
    bound = {
        "input_ids": tensor(memory, (BATCH * PREFILL,), "int32"),
        "kvcache_start_index": tensor(memory, (BATCH,), "int32"),
        "last_token_ids": tensor(memory, (BATCH, 1), "int32"),
        "k_cache_0": tensor(memory, (BATCH, H, S, D), "float16"),
        "v_cache_0": tensor(memory, (BATCH, H, S, D), "float16"),
        "logits": tensor(memory, (BATCH, VOCAB), "float32"),
    }
    bound |= {"present_k_cache_0": bound["k_cache_0"], "present_v_cache_0": bound["v_cache_0"]}
    for name, each in bound.items():
        engine.bind(name, each)
    return bound


def names_of(fake: FakeTensorRT) -> list[str]:
    return [call[0] for call in fake.calls]


def test_opening_creates_a_context_per_profile_over_one_shared_memory(
    fake: FakeTensorRT, folder: EngineFolder, memory: FakeGpuMemory
) -> None:
    with TensorRTEngine.open(folder.path, memory=memory) as engine:
        assert [call for call in fake.calls if call[0] != "create_execution_context"] == [
            ("Runtime",),
            ("deserialize_cuda_engine", PLAN),
            ("create_runtime_config",),
            ("set_execution_context_allocation_strategy", "USER_MANAGED"),
            ("create_runtime_cache",),
            ("set_runtime_cache",),
            ("create_runtime_config",),
            ("set_execution_context_allocation_strategy", "USER_MANAGED"),
            ("set_runtime_cache",),
            ("set_optimization_profile_async", 0, 0x1000),
            ("set_device_memory", 5000),
            ("set_optimization_profile_async", 1, 0x1000),
            ("set_device_memory", 5000),
        ]
        assert [context.profile for context in fake.contexts] == [0, 1]
        (first, second) = (context.memory for context in fake.contexts)
        assert first == second  # the larger of both, shared
        assert memory.live_nbytes == 5000
        assert memory.streams[0].synced == 1
        assert engine.memory is memory
        assert engine.config == folder.config
        assert engine.names == DEFAULT_NAMES
    assert memory.live_nbytes == 0


def test_tensors_come_from_the_engine_inputs_first(fake: FakeTensorRT, folder: EngineFolder, memory: FakeGpuMemory) -> None:
    with TensorRTEngine.open(folder.path, memory=memory) as engine:
        assert dict(engine.tensors) == {spec.name: spec for spec in folder.config.tensors}
        modes = [spec.mode for spec in engine.tensors.values()]
        assert modes == [TensorMode.INPUT] * 5 + [TensorMode.OUTPUT] * 3
        assert tuple(engine.profiles) == folder.config.profiles


def test_an_engine_can_be_opened_from_a_folder_a_path_a_plan_file_or_bytes(
    fake: FakeTensorRT, folder: EngineFolder, memory: FakeGpuMemory
) -> None:
    for source in (folder, folder.path, str(folder.path), folder.plan_path, PLAN):
        with TensorRTEngine.open(source, memory=memory) as engine:
            assert len(engine.tensors) == 8
            assert (engine.config is None) is (source in (folder.plan_path, PLAN))
            assert [profile.name for profile in engine.profiles] == ["prefill", "decode"]


def test_flavour_is_that_of_the_folder(
    folder: EngineFolder, fake: FakeTensorRT, memory: FakeGpuMemory, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked = install(fake, monkeypatch, tmp_path / "caches")
    TensorRTEngine.open(folder, memory=memory).close()
    TensorRTEngine.open(PLAN, memory=memory).close()
    TensorRTEngine.open(PLAN, memory=memory, flavour="tensorrt").close()
    assert asked == ["tensorrt_rtx", "auto", "tensorrt"]
    with raises(EngineError, "engine", expected="flavour tensorrt_rtx", got="tensorrt"):
        TensorRTEngine.open(folder, memory=memory, flavour="tensorrt")


def test_full_tensorrt_has_no_runtime_cache(
    folder: EngineFolder, fake: FakeTensorRT, memory: FakeGpuMemory, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    install(fake, monkeypatch, tmp_path / "caches", "tensorrt")
    with TensorRTEngine.open(PLAN, memory=memory):
        strategies = [call[1] for call in fake.calls if call[0] == "create_execution_context"]
        assert strategies == [fake.module.ExecutionContextAllocationStrategy.USER_MANAGED] * 2
    assert not {"create_runtime_config", "cache.serialize"} & set(names_of(fake))
    assert not (tmp_path / "caches").exists()


@pytest.mark.parametrize("carries", [True, False])
def test_an_engine_that_carries_a_plugin_library_brings_its_own_plugin(
    tmp_path: Path, memory: FakeGpuMemory, monkeypatch: pytest.MonkeyPatch, carries: bool
) -> None:
    library = FileRecord.of([b"library"]) if carries else None
    changes = {"segments": None, "tensorrt_flavour": "tensorrt", "plugin_library": library}
    folder = make_engine_folder(write_model(tmp_path / "model"), tmp_path / "engine", segmented=True, **changes)
    fake = FakeTensorRT(folder.config.tensors, folder.config.profiles, plan=PLAN)
    install(fake, monkeypatch, tmp_path / "caches", "tensorrt")
    monkeypatch.setattr(tensorrt_engine, "register", lambda tensorrt: fake.calls.append(("register", tensorrt)))
    with TensorRTEngine.open(folder, memory=memory):
        assert ("register", fake.loaded) in fake.calls or carries
        assert ("engine_host_code_allowed", True) in fake.calls or not carries
        assert {"register", "engine_host_code_allowed"} & set(names_of(fake)) == {"engine_host_code_allowed" if carries else "register"}


def test_a_plugin_library_that_tensorrt_does_not_register_is_for_another_process(
    tmp_path: Path, memory: FakeGpuMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {"segments": None, "tensorrt_flavour": "tensorrt", "plugin_library": FileRecord.of([b"library"])}
    folder = make_engine_folder(write_model(tmp_path / "model"), tmp_path / "engine", segmented=True, **changes)
    fake = FakeTensorRT(folder.config.tensors, folder.config.profiles, plan=PLAN)
    install(fake, monkeypatch, tmp_path / "caches", "tensorrt")
    fake.refuse.add("deserialize_cuda_engine")
    fake.errors["deserialize_cuda_engine"] = "KVCacheAttention, version 1, is already registered."
    with pytest.raises(EngineError, match=r"already registered\. The engine contains its plugin library\. .* in another process\.$"):
        TensorRTEngine.open(folder, memory=memory)
    assert memory.live_nbytes == 0


@pytest.mark.parametrize("flavour", ["tensorrt", "tensorrt_rtx"])
@pytest.mark.parametrize("alias_of", [None, lambda name: None, lambda name: ""], ids=["before 10.15", "None", "empty"])
def test_the_plugin_is_registered_before_an_engine_that_has_it_is_read(
    tmp_path: Path, memory: FakeGpuMemory, monkeypatch: pytest.MonkeyPatch, alias_of: Any, flavour: str
) -> None:
    changes = {"segments": None, "tensorrt_flavour": flavour}
    folder = make_engine_folder(write_model(tmp_path / "model"), tmp_path / "engine", segmented=True, **changes)
    fake = FakeTensorRT(folder.config.tensors, folder.config.profiles, plan=PLAN)
    fake.alias_of = alias_of  # TensorRT does not report what a plugin aliases: config.json says it
    install(fake, monkeypatch, tmp_path / "caches", flavour)
    monkeypatch.setattr(tensorrt_engine, "register", lambda tensorrt: fake.calls.append(("register", tensorrt)))
    with TensorRTEngine.open(folder, memory=memory) as engine:
        assert fake.calls[0] == ("register", fake.loaded)
        assert dict(engine.tensors) == {spec.name: spec for spec in folder.config.tensors}
        assert engine.tensors["present_key_values_0"].alias == "past_key_values_0"
        make_ready(engine, memory)
        engine.bind("present_key_values_0", elsewhere := tensor(memory, (BATCH, 2, H, S, D), "float16"))
        with raises(BindingError, "`present_key_values_0`", expected="address of `past_key_values_0`"):
            enqueue(engine)
        elsewhere.allocation.close()


class TestVOutputs:
    """V of plugin layers as outputs: the engine binds memory to each of them."""

    NBYTES = BATCH * PREFILL * H * 64 * 2  # of one layer, in the largest enqueue

    @pytest.fixture
    def folder(self, tmp_path: Path) -> EngineFolder:
        model = write_model(tmp_path / "model", head_dim=64, num_hidden_layers=3)
        specs = v_outputs(Checkpoint.read_config(model), "float16")
        return make_engine_folder(model, tmp_path / "engine", attention_variant="plugin", tensorrt_flavour="tensorrt", v_outputs=specs)

    @pytest.fixture
    def fake(self, folder: EngineFolder, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeTensorRT:
        config = folder.config
        module = FakeTensorRT([*config.tensors, *config.v_outputs], config.profiles, plan=PLAN)
        module.alias_of = lambda name: None
        install(module, monkeypatch, tmp_path / "caches", "tensorrt")
        monkeypatch.setattr(tensorrt_engine, "register", lambda tensorrt: None)
        return module

    def test_callers_do_not_see_them(self, fake: FakeTensorRT, folder: EngineFolder, memory: FakeGpuMemory) -> None:
        with TensorRTEngine.open(folder, memory=memory) as engine:
            assert dict(engine.tensors) == {spec.name: spec for spec in folder.config.tensors}
            cache = KVCacheManager(folder.config.cache, memory=memory)
            assert BindingPlan(engine, cache).max_width == PREFILL
            cache.close()
            with raises(BindingError, "`v_0`", says="has no such tensor"):
                engine.bind("v_0", tensor(memory, (BATCH, PREFILL, H, 64), "float16"))

    def test_each_has_memory_of_its_own_in_every_context(self, fake: FakeTensorRT, folder: EngineFolder, memory: FakeGpuMemory) -> None:
        with TensorRTEngine.open(folder, memory=memory):
            bound = [[context.addresses[f"v_{layer}"] for layer in range(3)] for context in fake.contexts]
            assert len(bound) == 2
            assert bound[0] == bound[1]
            assert bound[0] == [bound[0][0] + layer * self.NBYTES for layer in range(3)]
            assert bound[0][0] % 256 == self.NBYTES % 256 == 0
            assert memory.live_nbytes == 5000 + 3 * self.NBYTES
        assert memory.live_nbytes == 0

    def test_the_caller_binds_those_of_a_plan_without_its_folder(
        self, fake: FakeTensorRT, folder: EngineFolder, memory: FakeGpuMemory
    ) -> None:
        """And a session is refused: the aliases of plugin layers are in the folder alone."""
        with TensorRTEngine.open(PLAN, memory=memory, flavour="tensorrt") as engine:
            assert [name for name in engine.tensors if name.startswith("v_")] == ["v_0", "v_1", "v_2"]
            make_ready(engine, memory, width=PREFILL)
            enqueue(engine)
            bound = [fake.contexts[0].addresses[f"v_{layer}"] for layer in range(3)]
            assert bound == [engine._bindings.active.tensors[f"v_{layer}"].ptr for layer in range(3)]
            cache = KVCacheManager(folder.config.cache, memory=memory)
            with raises(BindingError, "`present_key_values_0`", says="past_key_values_0"):
                BindingPlan(engine, cache)
            cache.close()

    def test_steps_neither_bind_nor_allocate(self, fake: FakeTensorRT, folder: EngineFolder, memory: FakeGpuMemory) -> None:
        with TensorRTEngine.open(folder, memory=memory) as engine:
            make_ready(engine, memory, width=PREFILL)
            nbytes = memory.live_nbytes
            fake.calls.clear()
            enqueue(engine)
            enqueue(engine)
            assert [call[0] for call in fake.calls] == ["execute_async_v3"] * 2
            assert memory.live_nbytes == nbytes

    def test_graphs_write_into_the_same_memory(self, fake: FakeTensorRT, folder: EngineFolder, memory: FakeGpuMemory) -> None:
        with TensorRTEngine.open(folder, memory=memory) as engine:
            assert Decoding(engine, fake, memory).run(4)[-1] == "graph 1"
            _, working, own = fake.contexts
            assert own.addresses == working.addresses
            assert {"v_0", "v_1", "v_2"} < own.addresses.keys()

    def test_a_plan_without_them_is_refused(self, fake: FakeTensorRT, folder: EngineFolder, memory: FakeGpuMemory) -> None:
        del fake.specs["v_1"]
        with pytest.raises(EngineError, match=r"not the tensors of its config\.json: `v_1` is only in one of them"):
            TensorRTEngine.open(folder, memory=memory)
        assert memory.live_nbytes == 0

    def test_a_plan_with_others_is_refused(self, fake: FakeTensorRT, folder: EngineFolder, memory: FakeGpuMemory) -> None:
        fake.specs["v_1"] = replace(fake.specs["v_1"], dtype="float32")
        with pytest.raises(EngineError, match=r"expected output `v_1` float16 .*, got output `v_1` float32"):
            TensorRTEngine.open(folder, memory=memory)

    def test_an_address_that_tensorrt_refuses(self, fake: FakeTensorRT, folder: EngineFolder, memory: FakeGpuMemory) -> None:
        fake.refuse.add("set_tensor_address")
        with raises(EngineError, "the address of `v_0` was refused"):
            TensorRTEngine.open(folder, memory=memory)
        assert memory.live_nbytes == 0

    def test_a_plan_without_its_folder_shows_them(self, fake: FakeTensorRT, folder: EngineFolder, memory: FakeGpuMemory) -> None:
        with TensorRTEngine.open(folder.plan_path, memory=memory, flavour="tensorrt") as engine:
            assert engine.tensors["v_2"].shape == (-1, -1, H, 64)


def test_a_gpu_that_is_too_old_for_the_plugin_is_refused(
    tmp_path: Path, memory: FakeGpuMemory, fake: FakeTensorRT, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_engine_folder(write_model(tmp_path / "model"), tmp_path / "engine", segmented=True, segments=None)
    monkeypatch.setattr(memory, "arch", "sm_75", raising=False)
    with pytest.raises(EngineError, match=r"^TensorRTEngine: expected a GPU of compute capability 8\.0 or more, .* got sm_75\.$"):
        TensorRTEngine.open(folder, memory=memory)
    assert fake.calls == []


def test_host_memory_is_refused(fake: FakeTensorRT, folder: EngineFolder) -> None:
    with pytest.raises(PlaceError, match=r"expected the memory of a GPU \(CudaMemory\), got memory on cpu"):
        TensorRTEngine.open(folder, memory=HostMemory())
    assert fake.calls == []


def test_file_that_cannot_be_read(fake: FakeTensorRT, memory: FakeGpuMemory, tmp_path: Path) -> None:
    (tmp_path / "empty.plan").write_bytes(b"")
    for name in ("nowhere.plan", "empty.plan"):
        with raises(EngineError, name, expected="engine folder or a serialised engine, cannot read it"):
            TensorRTEngine.open(tmp_path / name, memory=memory)


class TestWhatAnEngineMayNotBe:
    def refused(
        self, folder: EngineFolder, memory: FakeGpuMemory, fake: FakeTensorRT, message: str, source: Any = None, **options: Any
    ) -> None:
        with pytest.raises(EngineError, match=message):
            TensorRTEngine.open(source or folder, memory=memory, **options)
        assert memory.live_nbytes == 0
        assert "execute_async_v3" not in names_of(fake)

    def test_a_runtime_that_cannot_start(self, folder: EngineFolder, memory: FakeGpuMemory, fake: FakeTensorRT) -> None:
        def start(logger: Any) -> Any:
            logger.log(FakeLogger.Severity.ERROR, "no CUDA driver")
            raise TypeError("factory function returned nullptr")

        fake.module.Runtime = start
        self.refused(folder, memory, fake, "tensorrt_rtx 1.7.1 cannot start. TensorRT says: no CUDA driver")

    def test_refused_by_tensorrt(self, folder: EngineFolder, memory: FakeGpuMemory, fake: FakeTensorRT) -> None:
        fake.refuse.add("deserialize_cuda_engine")
        fake.errors["deserialize_cuda_engine"] = "serialized with another version"
        self.refused(
            folder,
            memory,
            fake,
            r"tensorrt_rtx 1\.7\.1 refuses this engine built with tensorrt_rtx 1\.7\.1\. TensorRT says: serialized with another version",
        )

    def test_a_plan_without_a_folder_whose_plugin_is_not_registered(self, memory: FakeGpuMemory, fake: FakeTensorRT) -> None:
        fake.refuse.add("deserialize_cuda_engine")
        fake.errors["deserialize_cuda_engine"] = "Cannot find plugin: KVCacheAttention, version: 1, namespace: trt_kvcache."
        hint = r"namespace: trt_kvcache\. The engine has plugin layers of this package\. Open its engine folder, or, "
        hint += r"for a plan alone, first call trt_kvcache\.trt\.plugin\.register\(trt_kvcache\.trt\.module\.load\('tensorrt_rtx'\)\)\.$"
        self.refused(None, memory, fake, hint, PLAN)  # type: ignore[arg-type]

    @pytest.mark.parametrize(
        ("name", "change", "message"),
        [
            (
                "present_k_cache_0",
                {"alias": None},
                r"expected output `present_k_cache_0` .* sharing memory with `k_cache_0`, got output .*24\)\.$",
            ),
            ("present_v_cache_0", {"alias": "k_cache_0"}, r"sharing memory with `v_cache_0`, got .* sharing memory with `k_cache_0`"),
            ("k_cache_0", {"shape": (-1, 2, 40, 24)}, r"expected input `k_cache_0` float16 \(-1, 2, 38, 24\), got .*\(-1, 2, 40, 24\)"),
            ("logits", {"dtype": "float16"}, r"expected output `logits` float32 .*, got output `logits` float16"),
        ],
    )
    def test_not_what_its_config_says(
        self, folder: EngineFolder, memory: FakeGpuMemory, fake: FakeTensorRT, name: str, change: dict[str, Any], message: str
    ) -> None:
        fake.specs[name] = replace(fake.specs[name], **change)
        self.refused(folder, memory, fake, message)

    def test_other_tensors_than_its_config_says(self, folder: EngineFolder, memory: FakeGpuMemory, fake: FakeTensorRT) -> None:
        fake.specs["position_ids"] = TensorSpec(name="position_ids", shape=(-1,), dtype="int32", mode=TensorMode.INPUT)
        self.refused(
            folder, memory, fake, "the engine's tensors are not the tensors of its config.json: `position_ids` is only in one of them"
        )

    def test_other_profiles_than_its_config_says(self, folder: EngineFolder, memory: FakeGpuMemory, fake: FakeTensorRT) -> None:
        fake.profiles[0] = replace(fake.profiles[0], max_width=12)
        self.refused(
            folder, memory, fake, r"expected profiles \[\(1, 3, 1, 11, 1\), .*\] \(batch, width, logits\), got \[\(1, 3, 1, 12, 1\)"
        )

    def test_tensor_on_the_host(self, folder: EngineFolder, memory: FakeGpuMemory, fake: FakeTensorRT) -> None:
        fake.host_tensors.add("kvcache_start_index")
        self.refused(folder, memory, fake, "`kvcache_start_index`: expected a tensor in GPU memory, the engine has it on the host")

    def test_without_the_token_ids(self, folder: EngineFolder, memory: FakeGpuMemory, fake: FakeTensorRT) -> None:
        names = TensorNames(input_ids="tokens")
        self.refused(
            folder,
            memory,
            fake,
            r"`tokens`: the engine has no such input, it has `input_ids`, .* Pass the engine's names as TensorNames",
            PLAN,
            names=names,
        )

    def test_token_ids_of_one_dimension(self, folder: EngineFolder, memory: FakeGpuMemory, fake: FakeTensorRT) -> None:
        names = TensorNames(input_ids="kvcache_start_index", kvcache_start_index="start")
        self.refused(folder, memory, fake, r"`kvcache_start_index`: expected two dimensions .*, the engine has 1", PLAN, names=names)

    @pytest.mark.parametrize(
        ("call", "message"),
        [
            ("create_execution_context", "the execution context was refused. TensorRT says: out of memory"),
            ("set_optimization_profile_async", "profile 0 was refused. TensorRT says: out of memory"),
            ("set_runtime_cache", "the runtime cache was refused"),
            ("create_runtime_config", "the runtime configuration was refused"),
        ],
    )
    def test_call_that_fails(self, folder: EngineFolder, memory: FakeGpuMemory, fake: FakeTensorRT, call: str, message: str) -> None:
        fake.refuse.add(call)
        fake.errors[call] = "out of memory"
        self.refused(folder, memory, fake, message)

    @pytest.mark.parametrize("call", ["create_execution_context", "set_device_memory", "set_execution_context_allocation_strategy"])
    def test_error_that_is_only_logged(self, folder: EngineFolder, memory: FakeGpuMemory, fake: FakeTensorRT, call: str) -> None:
        fake.errors[call] = "quietly wrong"
        self.refused(folder, memory, fake, "TensorRT says: quietly wrong")

    def test_a_missing_driver_is_the_reason(self, folder: EngineFolder, memory: FakeGpuMemory, fake: FakeTensorRT) -> None:
        fake.refuse.add("deserialize_cuda_engine")
        fake.errors["deserialize_cuda_engine"] = "cudaError 35: CUDA driver version is insufficient"
        self.refused(folder, memory, fake, "TensorRT says: cudaError 35: CUDA driver version is insufficient")


class TestStep:
    @pytest.fixture
    def engine(self, fake: FakeTensorRT, folder: EngineFolder, memory: FakeGpuMemory) -> Any:
        with TensorRTEngine.open(folder, memory=memory) as engine:
            fake.calls.clear()
            yield engine

    def test_order_of_calls(self, engine: TensorRTEngine, fake: FakeTensorRT, memory: FakeGpuMemory) -> None:
        stream = FakeStream(0x77)
        engine.use_profile(1)
        bound = bind_all(engine, memory)
        assert fake.calls == [("set_tensor_address", 1, name, each.ptr) for name, each in bound.items()]
        fake.calls.clear()
        set_shapes(engine, 2, 1)
        assert fake.calls == [
            ("set_input_shape", 1, "input_ids", (2, 1)),
            ("set_input_shape", 1, "k_cache_0", (2, H, S, D)),
            ("set_input_shape", 1, "kvcache_start_index", (2,)),
            ("set_input_shape", 1, "last_token_ids", (2, 1)),
            ("set_input_shape", 1, "v_cache_0", (2, H, S, D)),
        ]
        fake.calls.clear()
        for _ in range(3):
            engine.enqueue(stream)
        step = ("execute_async_v3", 1, 0x77)
        assert fake.calls == [step, ("cache.serialize",), step, step]  # saved once
        assert stream.synced == 0  # a step does not wait

    def test_profiles_keep_their_bindings_and_shapes(self, engine: TensorRTEngine, fake: FakeTensorRT, memory: FakeGpuMemory) -> None:
        stream = FakeStream(0x77)
        for profile, width in ((0, 5), (1, 1)):
            engine.use_profile(profile)
            bind_all(engine, memory)
            set_shapes(engine, 3, width)
            engine.enqueue(stream)
        fake.calls.clear()
        for profile in (0, 1, 0):
            engine.use_profile(profile)
            engine.enqueue(stream)
        assert fake.calls == [("execute_async_v3", profile, 0x77) for profile in (0, 1, 0)]
        assert fake.contexts[0].shapes["input_ids"] == (3, 5)

    def test_bound_tensors_are_kept_alive_until_close(self, engine: TensorRTEngine, fake: FakeTensorRT, memory: FakeGpuMemory) -> None:
        logits = tensor(memory, (BATCH, VOCAB), "float32")
        alive = weakref.ref(logits.allocation)
        engine.bind("logits", logits)
        del logits
        gc.collect()
        assert alive() is not None
        engine.close()
        gc.collect()
        assert alive() is None

    def test_refused_bindings_change_nothing(self, engine: TensorRTEngine, fake: FakeTensorRT, memory: FakeGpuMemory) -> None:
        logits = tensor(memory, (BATCH, VOCAB), "float32")
        wide = tensor(memory, (BATCH, 2, VOCAB), "float32")
        strided = DeviceTensor(wide.allocation, shape=(BATCH, VOCAB), dtype="float32", strides=(2 * VOCAB, 1))
        shifted = DeviceTensor(wide.allocation, shape=(BATCH, VOCAB), dtype="float32", offset=16)
        other = FakeGpuMemory()
        other.create_stream()
        for name, each, error, message in (
            ("logit", logits, BindingError, "`logit`: the engine has no such tensor, it has `input_ids`, "),
            ("logits", tensor(memory, (3, 37), "float16"), BindingError, r"`logits` expects float32 \(-1, 37\), got float16 \(3, 37\)\."),
            ("logits", tensor(other, (3, 37), "float32"), BindingError, r"`logits`: expected a tensor in the engine's memory \(cuda:0\)"),
            ("logits", strided, LayoutError, r"`logits`: expected a contiguous view, got shape \(3, 37\) with strides \(74, 1\)"),
            ("logits", shifted, LayoutError, "`logits`: expected an address that is a multiple of 256, got 0x"),
        ):
            with pytest.raises(error, match=message):
                engine.bind(name, each)
        assert fake.calls == []

    def test_an_exception_of_the_bindings_is_a_refusal(
        self, engine: TensorRTEngine, fake: FakeTensorRT, memory: FakeGpuMemory, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse(self: Any, name: str, address: int) -> bool:
            raise ValueError("not an address")

        monkeypatch.setattr(type(fake.contexts[0]), "set_tensor_address", refuse)
        with pytest.raises(EngineError, match=r"the address of `logits` was refused. TensorRT says: not an address"):
            engine.bind("logits", tensor(memory, (BATCH, VOCAB), "float32"))

    def test_address_that_tensorrt_refuses(self, engine: TensorRTEngine, fake: FakeTensorRT, memory: FakeGpuMemory) -> None:
        fake.refuse.add("set_tensor_address")
        fake.errors["set_tensor_address"] = "bad address"
        with pytest.raises(EngineError, match=r"the address of `logits` was refused. TensorRT says: bad address"):
            engine.bind("logits", tensor(memory, (BATCH, VOCAB), "float32"))

    def test_shapes_outside_the_profile(self, engine: TensorRTEngine, fake: FakeTensorRT) -> None:
        engine.use_profile(0)
        for name, shape in (
            ("input_ids", (3, 12)),
            ("input_ids", (4, 11)),
            ("input_ids", (0, 1)),
            ("input_ids", (3,)),
            ("k_cache_0", (3, H, S - 1, D)),
            ("last_token_ids", (3, 2)),
        ):
            with raises(BindingError, f"`{name}`", expected=("(1", ") to (3", ") in this profile")):
                engine.set_input_shape(name, shape)
        engine.use_profile(1)
        with raises(BindingError, "`input_ids`", expected="(1, 1) to (3, 1) in this profile", got="(3, 2)"):
            engine.set_input_shape("input_ids", (3, 2))
        with raises(BindingError, "`logits`", expected="input"):
            engine.set_input_shape("logits", (3, VOCAB))
        with pytest.raises(BindingError, match="`position_ids`: the engine has no such tensor"):
            engine.set_input_shape("position_ids", (3, 1))
        assert fake.calls == []

    def test_profile_that_is_not_there(self, engine: TensorRTEngine) -> None:
        for index in (2, -1):
            with raises(BindingError, f"profile {index}", "0 <= index < 2"):
                engine.use_profile(index)

    def test_enqueue_with_something_missing(self, engine: TensorRTEngine, fake: FakeTensorRT, memory: FakeGpuMemory) -> None:
        stream = FakeStream(0x77)
        engine.use_profile(0)
        with pytest.raises(BindingError, match="`input_ids`: it is not bound in this profile"):
            engine.enqueue(stream)
        bound = bind_all(engine, memory)
        with pytest.raises(BindingError, match=r"`input_ids`: its shape \(-1, -1\) is not known"):
            engine.enqueue(stream)
        set_shapes(engine, 3, 11)
        engine.bind("input_ids", tensor(memory, (3 * 11 - 1,), "int32"))
        with pytest.raises(BindingError, match=r"`input_ids`: shape \(3, 11\) takes 132 bytes, the bound tensor has 128"):
            engine.enqueue(stream)
        engine.bind("input_ids", bound["input_ids"])
        engine.bind("logits", tensor(memory, (2, VOCAB), "float32"))
        with pytest.raises(BindingError, match=r"`logits`: shape \(3, 37\) takes 444 bytes, the bound tensor has 296"):
            engine.enqueue(stream)
        engine.bind("logits", bound["logits"])
        engine.bind("present_v_cache_0", bound["k_cache_0"])
        with raises(BindingError, "`present_v_cache_0`", expected="address of `v_cache_0`"):
            engine.enqueue(stream)
        assert "execute_async_v3" not in names_of(fake)
        engine.bind("present_v_cache_0", bound["v_cache_0"])
        engine.enqueue(stream)
        assert names_of(fake)[-1] == "execute_async_v3"

    def test_enqueue_checks_again_what_has_changed(self, engine: TensorRTEngine, fake: FakeTensorRT, memory: FakeGpuMemory) -> None:
        stream = FakeStream(0x77)
        engine.use_profile(0)
        bind_all(engine, memory)
        set_shapes(engine, 3, 1)
        engine.enqueue(stream)
        engine.bind("input_ids", tensor(memory, (3,), "int32"))
        engine.enqueue(stream)
        engine.set_input_shape("input_ids", (3, 2))
        with pytest.raises(BindingError, match=r"`input_ids`: shape \(3, 2\) takes 24 bytes, the bound tensor has 12"):
            engine.enqueue(stream)
        engine.set_input_shape("input_ids", (3, 1))
        engine.enqueue(stream)
        engine.bind("logits", tensor(memory, (2, VOCAB), "float32"))
        with pytest.raises(BindingError, match=r"`logits`: shape \(3, 37\)"):
            engine.enqueue(stream)
        assert names_of(fake).count("execute_async_v3") == 3

    def test_enqueue_that_fails(self, engine: TensorRTEngine, fake: FakeTensorRT, memory: FakeGpuMemory) -> None:
        stream = FakeStream(0x77)
        bind_all(engine, memory)
        set_shapes(engine, 3, 1)
        fake.errors["execute_async_v3"] = "illegal memory access"
        with pytest.raises(EngineError, match=r"^the step failed. TensorRT says: illegal memory access$"):
            engine.enqueue(stream)  # although it returned True
        fake.errors.clear()
        fake.refuse.add("execute_async_v3")
        with pytest.raises(EngineError, match=r"^the step failed. TensorRT says: nothing$"):
            engine.enqueue(stream)
        fake.refuse.clear()
        engine.enqueue(stream)  # an old error is not raised again

    def test_stream_of_the_host(self, engine: TensorRTEngine, fake: FakeTensorRT, memory: FakeGpuMemory) -> None:
        bind_all(engine, memory)
        set_shapes(engine, 3, 1)
        with raises(PlaceError, "stream", expected="CUDA stream or graph builder", got="HostStream"):
            engine.enqueue(HostMemory().create_stream())

    def test_close(self, engine: TensorRTEngine, fake: FakeTensorRT, memory: FakeGpuMemory) -> None:
        stream = FakeStream(0x77)
        bound = bind_all(engine, memory)
        set_shapes(engine, 3, 1)
        engine.enqueue(stream)
        engine.close()
        assert stream.synced == 1
        engine.close()
        assert stream.synced == 1
        for action in (
            lambda: engine.enqueue(stream),
            lambda: engine.bind("logits", bound["logits"]),
            lambda: engine.set_input_shape("input_ids", (3, 1)),
            lambda: engine.use_profile(0),
        ):
            with pytest.raises(ClosedError, match="this TensorRTEngine is closed"):
                action()

    def test_close_releases_everything_even_if_the_wait_fails(
        self, engine: TensorRTEngine, memory: FakeGpuMemory, fake: FakeTensorRT, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        bind_all(engine, memory)
        set_shapes(engine, 3, 1)
        engine.enqueue(FakeStream(0x77))
        before = memory.live_nbytes

        def broken(stream: Any) -> None:
            raise RuntimeError("sticky CUDA error")

        monkeypatch.setattr(memory, "synchronize", broken)
        with pytest.raises(RuntimeError, match="sticky CUDA error"):
            engine.close()
        assert memory.live_nbytes <= before - 5000


class TestRuntimeCache:
    def cache_files(self, tmp_path: Path) -> list[Path]:
        return sorted((tmp_path / "caches" / "trt_kvcache").glob("*.rtxcache"))

    def test_saved_at_close_while_the_contexts_live_and_loaded_at_open(
        self, fake: FakeTensorRT, folder: EngineFolder, memory: FakeGpuMemory, tmp_path: Path
    ) -> None:
        engine = TensorRTEngine.open(folder, memory=memory)
        assert "cache.deserialize" not in names_of(fake)
        assert not (tmp_path / "caches").exists()
        engine.close()
        (file,) = self.cache_files(tmp_path)
        assert file.read_bytes().endswith(b"compiled")
        before = file.stat().st_ino
        fake.calls.clear()
        TensorRTEngine.open(folder, memory=memory).close()
        assert ("cache.deserialize", b"compiled") in fake.calls
        names = names_of(fake)
        assert names.index("cache.deserialize") < names.index("set_runtime_cache") < names.index("create_execution_context")
        assert file.stat().st_ino == before  # nothing new was compiled

    def test_saved_after_the_first_decode(
        self, fake: FakeTensorRT, folder: EngineFolder, memory: FakeGpuMemory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        current: list[int] = []
        monkeypatch.setattr(memory, "make_current", lambda: current.append(len(fake.calls)), raising=False)
        with TensorRTEngine.open(folder, memory=memory) as engine:
            for profile in (0, 1):
                assert not (tmp_path / "caches").exists()
                engine.use_profile(profile)
                make_ready(engine, memory)
                enqueue(engine)
            deadline = time.monotonic() + 60  # a thread writes it
            while not self.cache_files(tmp_path) and time.monotonic() < deadline:
                time.sleep(0.01)
            (file,) = self.cache_files(tmp_path)
            assert file.read_bytes().endswith(b"compiled")
            fake.cache_content = b"compiled more"
        assert file.read_bytes().endswith(b"compiled more")
        serialized = [index for index, call in enumerate(fake.calls) if call[0] == "cache.serialize"]
        assert current == serialized, "the device is current"

    def test_two_builds_of_one_model_share_a_file(self, fake: FakeTensorRT, memory: FakeGpuMemory, tmp_path: Path) -> None:
        model = write_model(tmp_path / "model")
        for index, plan in enumerate((b"built today", b"built tomorrow")):
            fake.plan = plan
            TensorRTEngine.open(make_engine_folder(model, tmp_path / f"{index}", plan=plan), memory=memory).close()
        assert len(self.cache_files(tmp_path)) == 1
        TensorRTEngine.open(make_engine_folder(model, tmp_path / "other", plan=plan, tensorrt_version="1.8"), memory=memory).close()
        assert len(self.cache_files(tmp_path)) == 2

    def test_keyed_by_plan_gpu_driver_and_version(
        self, fake: FakeTensorRT, folder: EngineFolder, memory: FakeGpuMemory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        TensorRTEngine.open(folder, memory=memory).close()
        assert len(self.cache_files(tmp_path)) == 1
        for change in range(4):
            identity = list(IDENTITY)
            identity[change] += "1"
            with monkeypatch.context() as patch:
                patch.setattr(execution, "gpu_identity", lambda device, identity=identity: tuple(identity))
                TensorRTEngine.open(folder, memory=memory).close()
            assert len(self.cache_files(tmp_path)) == 2 + change
        fake.plan = b"a plan alone"
        TensorRTEngine.open(b"a plan alone", memory=memory).close()
        assert len(self.cache_files(tmp_path)) == 6

    def test_damaged_file_is_ignored(self, fake: FakeTensorRT, folder: EngineFolder, memory: FakeGpuMemory, tmp_path: Path) -> None:
        TensorRTEngine.open(folder, memory=memory).close()
        (file,) = self.cache_files(tmp_path)
        file.write_bytes(b"rubbish")
        fake.calls.clear()
        with pytest.warns(RuntimeWarning, match="runtime cache .* it is damaged"):
            engine = TensorRTEngine.open(folder, memory=memory)
        assert "cache.deserialize" not in names_of(fake)
        engine.close()
        assert file.read_bytes().endswith(b"compiled")

    def test_file_that_tensorrt_refuses_is_ignored_and_replaced(
        self, fake: FakeTensorRT, folder: EngineFolder, memory: FakeGpuMemory, tmp_path: Path
    ) -> None:
        TensorRTEngine.open(folder, memory=memory).close()
        (file,) = self.cache_files(tmp_path)
        inode = file.stat().st_ino
        fake.cache_refuses = True
        with pytest.warns(RuntimeWarning, match="runtime cache .* it was refused by TensorRT"):
            engine = TensorRTEngine.open(folder, memory=memory)
        engine.close()
        assert file.stat().st_ino != inode

    def test_nothing_serialised_is_nothing_saved(
        self, fake: FakeTensorRT, folder: EngineFolder, memory: FakeGpuMemory, tmp_path: Path
    ) -> None:
        fake.cache_content = None
        engine = TensorRTEngine.open(folder, memory=memory)
        with pytest.warns(RuntimeWarning, match="runtime cache .*: it could not be serialised by TensorRT"):
            engine.close()
        assert not (tmp_path / "caches").exists()
        assert memory.live_nbytes == 0

    def test_place_that_cannot_be_written(
        self, fake: FakeTensorRT, folder: EngineFolder, memory: FakeGpuMemory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "file").write_text("in the way")
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
        with pytest.warns(RuntimeWarning, match="it cannot be read"):
            engine = TensorRTEngine.open(folder, memory=memory)
        with pytest.warns(RuntimeWarning, match="it cannot be written"):
            engine.close()
        assert memory.live_nbytes == 0


def test_engine_that_this_package_did_not_build(memory: FakeGpuMemory, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One profile, other names, int64 ids, float16 logits, static batch of the logits' input: read from the engine itself."""
    names = TensorNames(
        input_ids="ids", kvcache_start_index="past", k_cache="pk.{i}", present_k_cache="nk.{i}", v_cache="pv.{i}", present_v_cache="nv.{i}"
    )
    kv = (-1, 2, 16, 8)
    specs = [
        TensorSpec(name="ids", shape=(-1, -1), dtype="int64", mode=TensorMode.INPUT),
        TensorSpec(name="past", shape=(-1,), dtype="int32", mode=TensorMode.INPUT),
        TensorSpec(name="table", shape=(16, 4), dtype="float32", mode=TensorMode.INPUT),
        TensorSpec(name="pk.0", shape=kv, dtype="bfloat16", mode=TensorMode.INPUT),
        TensorSpec(name="nk.0", shape=kv, dtype="bfloat16", mode=TensorMode.OUTPUT, alias="pk.0"),
        TensorSpec(name="logits", shape=(-1, 9), dtype="float16", mode=TensorMode.OUTPUT),
    ]
    fake = FakeTensorRT(
        specs,
        [EngineProfile(name="", min_batch=2, max_batch=5, min_width=1, max_width=7)],
    )
    install(fake, monkeypatch, tmp_path / "caches")
    with TensorRTEngine.open(b"plan", memory=memory, names=names) as engine:
        assert engine.names is names
        assert set(engine.tensors.values()) == set(specs)
        assert list(engine.profiles) == [EngineProfile(name="prefill", min_batch=2, max_batch=5, min_width=1, max_width=7)]
        engine.set_input_shape("table", (16, 4))
        with raises(BindingError, "`table`", expected="(16, 4) to (16, 4)"):
            engine.set_input_shape("table", (15, 4))
        with raises(BindingError, "`ids`", expected="(2, 1) to (5, 7)"):
            engine.set_input_shape("ids", (1, 1))


#: Opens an engine, and prints why that failed, and the bytes that are left.
OPEN = """
import sys
from tests.helpers.fake_tensorrt import FakeGpuMemory
from trt_kvcache.errors import EngineError
from trt_kvcache.trt.tensorrt_engine import TensorRTEngine
memory = FakeGpuMemory()
try:
    TensorRTEngine.open(sys.argv[1], memory=memory)
except EngineError as error:
    print(memory.live_nbytes, error)
"""


@pytest.mark.trt
def test_real_tensorrt_that_sees_no_gpu_says_why(tmp_path: Path) -> None:
    from trt_kvcache.builder.build_engine import build_engine

    build_engine(
        write_model(tmp_path / "model"),
        tmp_path / "engine",
        max_batch_size=2,
        max_sequence_length=30,
        max_prefill_length=5,
        flavour="tensorrt_rtx",
    )
    hidden = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}  # read when CUDA starts: in a process of its own
    done = subprocess.run(
        [sys.executable, "-c", OPEN, tmp_path / "engine"], cwd=ROOT, env=hidden, capture_output=True, text=True, check=True
    )
    assert re.match(r"0 .*tensorrt_rtx .* (cannot start|refuses this engine).* TensorRT says: .*CUDA", done.stdout, re.IGNORECASE), (
        done.stdout
    )
    assert os.listdir(tmp_path / "engine")
