"""``TensorRTEngine`` against a stand-in that records its calls; no GPU runs here."""

import gc
import hashlib
import os
import weakref
from dataclasses import replace

import numpy as np
import pytest

from tests.helpers.engine_files import PLAN, make_engine_folder
from tests.helpers.fake_tensorrt import FakeGpuMemory, FakeStream, FakeTensorRT
from tests.helpers.small_model import write_model
from trt_kvcache.engine.names import DEFAULT_NAMES, TensorNames
from trt_kvcache.engine.protocol import EngineProfile, TensorMode, TensorSpec
from trt_kvcache.errors import BindingError, ClosedError, EngineError, PlaceError
from trt_kvcache.memory.host_memory import HostMemory
from trt_kvcache.ops.segments import shape_at
from trt_kvcache.trt import loaded_plan, tensorrt_engine
from trt_kvcache.trt.tensorrt_engine import TensorRTEngine

H, S, D, VOCAB, BATCH, PREFILL = 2, 38, 24, 37, 3, 11
IDENTITY = ("GPU", "uuid", "8.9", "13000")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    base = tmp_path_factory.mktemp("engine")
    return make_engine_folder(write_model(base / "model"), base / "engine")


@pytest.fixture
def memory():
    return FakeGpuMemory()


def install(fake, monkeypatch, caches, flavour="tensorrt_rtx"):
    """Make ``load`` give this TensorRT; return the list of flavours that it is asked for."""
    loaded, asked = fake.tensorrt(flavour), []
    monkeypatch.setattr(tensorrt_engine, "load", lambda wanted: asked.append(wanted) or loaded)
    monkeypatch.setattr(loaded_plan, "gpu_identity", lambda device: IDENTITY)
    monkeypatch.setenv("XDG_CACHE_HOME", str(caches))
    return asked


@pytest.fixture
def caches(tmp_path):
    return tmp_path / "caches"  # of runtime caches


@pytest.fixture
def fake(folder, monkeypatch, caches):
    config = folder.config
    made = FakeTensorRT(config.tensors, config.profiles, plan=PLAN)
    made.asked = install(made, monkeypatch, caches)
    return made


@pytest.fixture
def opens(fake, folder, memory):
    return lambda source=folder, **options: TensorRTEngine.open(source, memory=memory, **options)


@pytest.fixture
def engine(opens, fake):
    with opens() as engine:
        fake.calls.clear()
        yield engine


def refuses(error, message, call, *args, **options):
    with pytest.raises(error, match=message):
        call(*args, **options)


def tensor(memory, shape, dtype):
    return memory.to_device(np.zeros(shape, dtype), stream=memory.streams[0])


def make_ready(engine, memory, batch=BATCH, width=1):
    """Bind what a step needs in the profile in use, and set the shapes; return what is bound."""
    bound = {}
    for spec in engine.tensors.values():
        bound[spec.name] = bound[spec.alias] if spec.alias else tensor(memory, shape_at(spec.shape, BATCH, PREFILL), spec.dtype)
        engine.bind(spec.name, bound[spec.name])
    set_shapes(engine, batch, width)
    return bound


def enqueue(engine):
    engine.enqueue(FakeStream(0x77))


def set_shapes(engine, batch, width=1):
    for spec in engine.tensors.values():
        if spec.mode is TensorMode.INPUT:
            engine.set_input_shape(spec.name, shape_at(spec.shape, batch, width))


def names_of(fake):
    return [name for name, *_ in fake.calls]


def test_opening_makes_contexts_over_one_memory(opens, fake, folder, memory):
    with opens(folder.path) as engine:
        assert [call for call in fake.calls if call[0] != "create_execution_context"] == [
            ("Runtime",),
            ("deserialize_cuda_engine", PLAN),
            ("create_runtime_config",),
            ("set_execution_context_allocation_strategy", "USER_MANAGED"),
            ("create_runtime_cache",),
            ("set_runtime_cache",),
            ("set_optimization_profile_async", 0, 0x1000),
            ("set_device_memory", 5000),
            ("set_optimization_profile_async", 1, 0x1000),
            ("set_device_memory", 5000),
        ]
        assert [context.profile for context in fake.contexts] == [0, 1]
        assert len({context.memory for context in fake.contexts}) == 1  # the larger of both, shared
        assert memory.live_nbytes == 5000
        assert memory.streams[0].synced == 1
        assert (engine.memory, engine.config, engine.names) == (memory, folder.config, DEFAULT_NAMES)
        assert dict(engine.tensors) == {spec.name: spec for spec in folder.config.tensors}
        assert [spec.mode for spec in engine.tensors.values()] == [TensorMode.INPUT] * 5 + [TensorMode.OUTPUT] * 3
        assert tuple(engine.profiles) == folder.config.profiles
    assert memory.live_nbytes == 0


def test_folder_object_path_plan_file_and_bytes(opens, folder, monkeypatch):
    keys, real = [], loaded_plan.RuntimeCacheFile
    monkeypatch.setattr(loaded_plan, "RuntimeCacheFile", lambda key: keys.append(key) or real(key))
    for source in (folder, str(folder.path), folder.plan_path, PLAN):
        with opens(source) as engine:
            assert len(engine.tensors) == 8
            assert (engine.config is None) is (source in (folder.plan_path, PLAN))
            assert [profile.name for profile in engine.profiles] == ["prefill", "decode"]
    assert keys == [(hashlib.sha256(PLAN).hexdigest(), *IDENTITY, "tensorrt_rtx", "1.7.1")] * 4  # of runtime caches


def test_flavour_is_that_of_the_folder(opens, fake):
    opens().close()
    opens(PLAN).close()
    opens(PLAN, flavour="tensorrt").close()
    assert fake.asked == ["tensorrt_rtx", "auto", "tensorrt"]
    refuses(EngineError, r"engine: expected flavour tensorrt_rtx, which built this engine, got tensorrt\.", opens, flavour="tensorrt")


def test_full_tensorrt_has_no_runtime_cache(opens, fake, monkeypatch, caches):
    install(fake, monkeypatch, caches, "tensorrt")
    with opens(PLAN):
        strategies = [call[1] for call in fake.calls if call[0] == "create_execution_context"]
        assert strategies == [fake.module.ExecutionContextAllocationStrategy.USER_MANAGED] * 2
    assert not {"create_runtime_config", "cache.serialize"} & set(names_of(fake))
    assert not caches.exists()


def test_full_tensorrt_knows_the_plugin_first(tmp_path, memory, monkeypatch, caches):
    changes = {"segments": None, "tensorrt_flavour": "tensorrt"}
    folder = make_engine_folder(write_model(tmp_path / "model"), tmp_path / "engine", segmented=True, **changes)
    fake = FakeTensorRT(folder.config.tensors, folder.config.profiles, plan=PLAN)
    install(fake, monkeypatch, caches, "tensorrt")
    monkeypatch.setattr(tensorrt_engine, "register", lambda tensorrt: fake.calls.append(("register", tensorrt)))
    with TensorRTEngine.open(folder, memory=memory) as engine:
        assert fake.calls[0] == ("register", fake.loaded)
        assert engine.tensors["present_key_values_0"].alias == "past_key_values_0"


def test_sources_and_places_that_cannot_be(opens, fake, folder, tmp_path):
    refuses(PlaceError, r"expected the memory of a GPU \(CudaMemory\), got memory on cpu", TensorRTEngine.open, folder, memory=HostMemory())
    (tmp_path / "empty.plan").write_bytes(b"")
    for name in ("nowhere.plan", "empty.plan"):
        refuses(EngineError, rf"{name}: expected an engine folder or a serialised engine, cannot read it", opens, tmp_path / name)
    assert fake.calls == []


def spec_with(name, **change):
    return lambda fake: fake.specs.update({name: replace(fake.specs[name], **change)})


def failing(call, *, refuse=True, text="out of memory"):
    def prepare(fake):
        fake.errors[call] = text
        fake.refuse |= {call} if refuse else set()

    return prepare


REFUSED = [
    (
        failing("deserialize_cuda_engine", text="cudaError 35: CUDA driver"),  # the reason, and not left out
        r"tensorrt_rtx 1\.7\.1 refuses this engine built with tensorrt_rtx 1\.7\.1\. TensorRT says: cudaError 35: CUDA",
    ),
    (spec_with("present_k_cache_0", alias=None), r"expected output `present_k_cache_0` .* in place of `k_cache_0`, got output .*24\)\.$"),
    (spec_with("present_v_cache_0", alias="k_cache_0"), r"in place of `v_cache_0`, got .* in place of `k_cache_0`"),
    (spec_with("k_cache_0", shape=(-1, 2, 40, 24)), r"expected input `k_cache_0` float16 \(-1, 2, 38, 24\), got .*\(-1, 2, 40, 24\)"),
    (spec_with("logits", dtype="float16"), r"expected output `logits` float32 .*, got output `logits` float16"),
    (
        lambda fake: fake.specs.update(position_ids=TensorSpec.input("position_ids", (-1,), "int32")),
        "the engine's tensors are not those of its config.json: `position_ids` is only in one of them",
    ),
    (
        lambda fake: fake.profiles.insert(0, replace(fake.profiles.pop(0), max_width=12)),
        r"expected profiles \[\(1, 3, 1, 11\), \(1, 3, 1, 1\)\] \(batch, width\), got \[\(1, 3, 1, 12\)",
    ),
    (
        lambda fake: fake.host_tensors.add("kvcache_start_index"),
        "`kvcache_start_index`: expected a tensor in GPU memory, the engine has it on the host",
    ),
    (failing("create_execution_context"), "the execution context was refused. TensorRT says: out of memory"),
    (failing("set_optimization_profile_async"), "profile 0 was refused. TensorRT says: out of memory"),
    (failing("set_runtime_cache"), "the runtime cache was refused"),
    (failing("create_runtime_config"), "the runtime configuration was refused"),
    (failing("set_device_memory", refuse=False), "TensorRT says: out of memory"),  # only logged
]


@pytest.mark.parametrize(("prepare", "message"), REFUSED)
def test_a_refused_engine_leaves_nothing(opens, fake, memory, prepare, message):
    prepare(fake)
    refuses(EngineError, message, opens)
    assert memory.live_nbytes == 0


def test_a_plan_without_token_ids_is_refused(opens, memory):
    with pytest.raises(EngineError, match=r"`tokens`: the engine has no such input, it has `input_ids`, .* Give its names as TensorNames"):
        opens(PLAN, names=TensorNames(input_ids="tokens"))
    with pytest.raises(EngineError, match=r"`kvcache_start_index`: expected two dimensions .*, the engine has 1"):
        opens(PLAN, names=TensorNames(input_ids="kvcache_start_index", kvcache_start_index="start"))
    assert memory.live_nbytes == 0


def test_order_of_calls(engine, fake, memory):
    stream = FakeStream(0x77)
    engine.use_profile(1)
    bound = make_ready(engine, memory, 2)
    for _ in range(3):
        engine.enqueue(stream)
    caches, ids = (2, H, S, D), (2, 1)
    shapes = {"input_ids": ids, "k_cache_0": caches, "kvcache_start_index": (2,), "last_token_ids": ids, "v_cache_0": caches}
    assert fake.calls == [
        *(("set_tensor_address", 1, name, each.ptr) for name, each in bound.items()),
        *(("set_input_shape", 1, *given) for given in shapes.items()),
        *[("execute_async_v3", 1, 0x77)] * 3,
    ]
    assert stream.synced == 0  # a step does not wait


def test_profiles_keep_their_bindings_and_shapes(engine, fake, memory):
    for profile, width in ((0, 5), (1, 1)):
        engine.use_profile(profile)
        make_ready(engine, memory, 3, width)
    fake.calls.clear()
    for profile in (0, 1, 0):
        engine.use_profile(profile)
        enqueue(engine)
    assert fake.calls == [("execute_async_v3", profile, 0x77) for profile in (0, 1, 0)]
    assert fake.contexts[0].shapes["input_ids"] == (3, 5)


def test_bound_tensors_are_kept_alive_and_let_go(engine, memory):
    logits = tensor(memory, (BATCH, VOCAB), "float32")
    alive = weakref.ref(logits.allocation)
    engine.bind("logits", logits)
    del logits
    gc.collect()
    assert alive() is not None
    engine.close()
    gc.collect()
    assert alive() is None


def test_refused_bindings_change_nothing(engine, fake, memory):
    logits = tensor(memory, (BATCH, VOCAB), "float32")
    refuses(BindingError, "`logit`: the engine has no such tensor, it has `input_ids`, ", engine.bind, "logit", logits)
    with pytest.raises(BindingError, match=r"`logits` expects float32 \(-1, 37\), got float16 \(3, 37\)\."):
        engine.bind("logits", tensor(memory, (3, 37), "float16"))
    assert fake.calls == []
    fake.refuse.add("set_tensor_address")
    fake.errors["set_tensor_address"] = "bad address"
    refuses(EngineError, r"the address of `logits` was refused. TensorRT says: bad address", engine.bind, "logits", logits)


@pytest.mark.parametrize(
    ("profile", "name", "shape", "message"),
    [
        *(
            (0, name, shape, rf"`{name}`: expected a shape from \(1,.*\) to \(3,.*\) in this profile, got ")
            for name, shape in (*(("input_ids", wrong) for wrong in ((3, 12), (4, 11), (0, 1), (3,))), ("k_cache_0", (3, H, S - 1, D)))
        ),
        (1, "input_ids", (3, 2), r"`input_ids`: expected a shape from \(1, 1\) to \(3, 1\) in this profile, got \(3, 2\)"),
        (1, "logits", (3, VOCAB), "`logits`: expected an input, it is an output"),
        (1, "position_ids", (3, 1), "`position_ids`: the engine has no such tensor"),
    ],
)
def test_shapes_outside_the_profile(engine, fake, profile, name, shape, message):
    engine.use_profile(profile)
    for index in (2, -1):
        refuses(BindingError, rf"profile {index}: expected 0 <= index < 2", engine.use_profile, index)
    refuses(BindingError, message, engine.set_input_shape, name, shape)
    assert fake.calls == []


def test_enqueue_checks_what_is_bound(engine, fake, memory):
    refuses(BindingError, "`input_ids`: it is not bound in this profile", enqueue, engine)
    ids = tensor(memory, (3 * 11 - 1,), "int32")
    engine.bind("input_ids", ids)
    refuses(BindingError, r"`input_ids`: its shape \(-1, -1\) is not known", enqueue, engine)
    bound = make_ready(engine, memory, 3, 11)
    for name, other, message in (
        ("input_ids", ids, r"`input_ids`: shape \(3, 11\) takes 132 bytes, what is bound has 128"),
        ("logits", tensor(memory, (2, VOCAB), "float32"), r"`logits`: shape \(3, 37\) takes 444 bytes, what is bound has 296"),
        ("present_v_cache_0", bound["k_cache_0"], "`present_v_cache_0`: expected the address of `v_cache_0`, whose memory it shares"),
    ):
        enqueue(engine)
        engine.bind(name, other)
        refuses(BindingError, message, enqueue, engine)
        engine.bind(name, bound[name])
    engine.bind("input_ids", tensor(memory, (3,), "int32"))
    engine.set_input_shape("input_ids", (3, 1))
    enqueue(engine)
    engine.set_input_shape("input_ids", (3, 2))
    refuses(BindingError, r"`input_ids`: shape \(3, 2\) takes 24 bytes, what is bound has 12", enqueue, engine)
    assert names_of(fake).count("execute_async_v3") == 4


def test_enqueue_that_fails(engine, fake, memory):
    make_ready(engine, memory)
    fake.errors["execute_async_v3"] = "illegal memory access"
    with pytest.raises(EngineError, match=r"^the step failed. TensorRT says: illegal memory access$"):
        enqueue(engine)  # although it returned True
    fake.errors.clear()
    fake.refuse.add("execute_async_v3")
    refuses(EngineError, r"^the step failed. TensorRT says: nothing$", enqueue, engine)
    fake.refuse.clear()
    enqueue(engine)  # an old error is not raised again
    refuses(PlaceError, "stream: expected a CUDA stream or graph builder, got HostStream", engine.enqueue, HostMemory().create_stream())


def test_close(engine, memory):
    stream = FakeStream(0x77)
    bound = make_ready(engine, memory)
    engine.enqueue(stream)
    for _ in range(2):
        engine.close()
        assert stream.synced == 1
    for action, args in (
        (engine.enqueue, (stream,)),
        (engine.bind, ("logits", bound["logits"])),
        (engine.set_input_shape, ("input_ids", (3, 1))),
        (engine.use_profile, (0,)),
    ):
        refuses(ClosedError, "this TensorRTEngine is closed", action, *args)


def test_wait_that_fails_still_lets_go(engine, memory, monkeypatch):
    make_ready(engine, memory)
    enqueue(engine)
    before = memory.live_nbytes

    def broken(stream):
        raise RuntimeError("sticky CUDA error")

    monkeypatch.setattr(memory, "synchronize", broken)
    refuses(RuntimeError, "sticky CUDA error", engine.close)
    assert memory.live_nbytes <= before - 5000


def test_runtime_cache_is_saved_and_loaded(opens, fake, memory, caches):
    fake.cache_content, content = None, fake.cache_content
    engine = opens()
    with pytest.warns(RuntimeWarning, match="runtime cache .*: it could not be serialised by TensorRT"):
        engine.close()
    assert memory.live_nbytes == 0
    fake.cache_content = content
    engine = opens()
    assert "cache.deserialize" not in names_of(fake)
    assert not caches.exists()
    engine.close()
    (file,) = (caches / "trt_kvcache").iterdir()
    assert file.read_bytes().endswith(b"compiled")
    before = file.stat()
    fake.calls.clear()
    opens().close()
    assert ("cache.deserialize", b"compiled") in fake.calls
    names = names_of(fake)
    assert names.index("cache.deserialize") < names.index("set_runtime_cache") < names.index("create_execution_context")
    assert file.stat().st_mtime_ns == before.st_mtime_ns  # nothing new was compiled
    fake.refuse.add("cache.deserialize")
    with pytest.warns(RuntimeWarning, match="runtime cache .* it was refused by TensorRT"):
        engine = opens()
    engine.close()
    assert file.stat().st_ino != before.st_ino  # and it was replaced


def test_engine_that_this_package_did_not_build(memory, monkeypatch, caches):
    """One profile, other names, int64 ids, float16 logits, static batch of the logits' input: read from the engine itself."""
    names = TensorNames(
        input_ids="ids", kvcache_start_index="past", k_cache="pk.{i}", present_k_cache="nk.{i}", v_cache="pv.{i}", present_v_cache="nv.{i}"
    )
    kv = (-1, 2, 16, 8)
    tensors = {"ids": ((-1, -1), "int64"), "past": ((-1,), "int32"), "table": ((16, 4), "float32"), "pk.0": (kv, "bfloat16")}
    specs = [TensorSpec.input(name, shape, dtype) for name, (shape, dtype) in tensors.items()]
    specs.append(TensorSpec.output("nk.0", kv, "bfloat16", alias="pk.0"))
    specs.append(TensorSpec.output("logits", (-1, 9), "float16"))
    profile = EngineProfile(name="", min_batch=2, max_batch=5, min_width=1, max_width=7)
    install(FakeTensorRT(specs, [profile]), monkeypatch, caches)
    with TensorRTEngine.open(b"plan", memory=memory, names=names) as engine:
        assert engine.names is names
        assert set(engine.tensors.values()) == set(specs)
        assert list(engine.profiles) == [replace(profile, name="prefill")]
        engine.set_input_shape("table", (16, 4))
        refuses(BindingError, r"`table`: expected a shape from \(16, 4\) to \(16, 4\)", engine.set_input_shape, "table", (15, 4))
        refuses(BindingError, r"`ids`: expected a shape from \(2, 1\) to \(5, 7\)", engine.set_input_shape, "ids", (1, 1))


@pytest.mark.trt
def test_real_tensorrt_without_a_gpu_says_why(tmp_path, memory):
    from trt_kvcache.builder.build_engine import build_engine

    sizes = {"max_batch_size": 2, "max_sequence_length": 30, "max_prefill_length": 5}
    build_engine(write_model(tmp_path / "model"), tmp_path / "engine", **sizes, flavour="tensorrt_rtx")
    with pytest.raises(EngineError, match=r"tensorrt_rtx .* (cannot start|refuses this engine).* TensorRT says: .*[Cc][Uu][Dd][Aa]"):
        TensorRTEngine.open(tmp_path / "engine", memory=memory)
    assert memory.live_nbytes == 0
    assert os.listdir(tmp_path / "engine")
