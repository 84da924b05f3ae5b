"""``BindingPlan``: every mismatch is an error with its text, before anything is bound; what is bound and set, and when."""

from dataclasses import replace

import pytest

from tests.helpers.fakes import VOCAB, Journal, RecordingCache, RecordingEngine, RecordingMemory, kv_config, recorded, two_profiles
from trt_kvcache import BindingPlan, HostMemory, KVCacheManager, KVLayout
from trt_kvcache.engine.protocol import EngineProfile, TensorMode, TensorSpec
from trt_kvcache.engine.step_buffers import StepBuffers
from trt_kvcache.errors import BindingError, ClosedError, LayoutError, PlaceError

# Dimensions all different: B=3, H=1 and 2, S=16, D=8; two layers.
KV = kv_config(head_dim=8)


@pytest.fixture
def memory():
    return RecordingMemory(Journal())


@pytest.fixture
def cache(memory):
    with RecordingCache(KV, memory=memory) as cache:
        yield cache


@pytest.fixture
def engine(memory):
    return RecordingEngine(KV, memory)


def refuse(engine, cache, kind=BindingError):
    """Make a plan that must fail, before anything was bound or allocated; return the text."""
    engine.memory.journal.take()
    before = cache.memory.live_nbytes
    with pytest.raises(kind) as error:
        BindingPlan(engine, cache)
    assert (engine.memory.journal.take(), cache.memory.live_nbytes) == ([], before)
    return str(error.value)


def change(engine, name, **changes):
    spec = engine.tensors[name] = replace(engine.tensors[name], **changes)
    return spec


@pytest.mark.parametrize("name", ["input_ids", "last_token_ids", "kvcache_start_index", "logits", "v_cache_1", "present_k_cache_0"])
def test_a_missing_tensor_or_a_wrong_mode(engine, cache, name):
    spec = engine.tensors[name]
    has = "output" if spec.mode is TensorMode.INPUT else "input"
    change(engine, name, mode=TensorMode(has))
    assert refuse(engine, cache) == f"`{name}`: expected an {spec.mode.value}, the engine has an {has} of this name."
    del engine.tensors[name]
    known = ", ".join(f"`{other}`" for other in engine.tensors)
    assert refuse(engine, cache) == (
        f"`{name}`: expected an {spec.mode.value} of this name, the engine has {known}. Give its names as TensorNames."
    )


def test_tensors_too_many(memory, cache, engine):
    engine.tensors["position_ids"] = TensorSpec.input("position_ids", (-1, -1), "int32")
    engine.tensors["hidden"] = TensorSpec.output("hidden", (-1, 8), "float32")
    left = "the engine has tensors that nothing is bound to. More layers than the cache, or another kind of engine?"
    assert refuse(engine, cache) == f"`position_ids`, `hidden`: {left}"
    text = refuse(RecordingEngine(kv_config(head_dim=8, layers=3), memory), cache)
    assert text == f"`k_cache_2`, `v_cache_2`, `present_k_cache_2`, `present_v_cache_2`: {left}"


IN_PLACE = ": expected an output in place of `k_cache_0`, the engine's"
DIFFERENCES = [
    ({"dtype": "float16"}, "dtype differs (engine float16, cache float32)"),
    ({"shape": (4, 2, 16, 8)}, "max_batch_size differs (engine 4, cache 3)"),
    ({"shape": (-1, 2, 16, 64)}, "head_dim differs (engine 64, cache 8)"),
    ({"shape": (-1, 16, 2, 8)}, "num_kv_heads differs (engine 16, cache 2); max_sequence_length differs (engine 2, cache 16)"),
    ({"dtype": "int8", "shape": (6, 16, 8)}, "dtype differs (engine int8, cache float32); the number of dimensions differs"),
]


TENSORS = [
    *(
        (name, changes, f" expects {{0.dtype}} {{0.shape}}, cache has float32 (3, 2, 16, 8): {differences}")
        for name in ("k_cache_1", "v_cache_1", "present_k_cache_1", "present_v_cache_1")
        for changes, differences in DIFFERENCES
    ),
    *(
        (name, {what: got}, f": expected {want}, the engine has {got}")
        for name, what, got, want in (
            ("input_ids", "dtype", "float32", "int32 or int64"),
            ("kvcache_start_index", "dtype", "int64", "int32"),
            ("logits", "dtype", "int32", "float32 or float16 or bfloat16"),
            ("input_ids", "shape", (-1,), "shape (B, s)"),
            ("kvcache_start_index", "shape", (-1, 1), "shape (B)"),
            ("last_token_ids", "shape", (-1, 2), "shape (B, 1)"),
            *(("logits", "shape", got, "shape (B, vocab) or (B, 1, vocab)") for got in ((-1, 4, VOCAB), (-1, -1))),
        )
    ),
    ("present_k_cache_0", {"alias": None}, f"{IN_PLACE} has memory of its own"),
    *(("present_k_cache_0", {"alias": of}, f"{IN_PLACE} shares memory with `{of}`") for of in ("v_cache_0", "k_cache_1")),
]


@pytest.mark.parametrize(("name", "changes", "text"), TENSORS)
def test_a_tensor_that_differs(engine, cache, name, changes, text):
    spec = change(engine, name, **changes)
    assert refuse(engine, cache) == f"`{name}`{text.format(spec)}."


@pytest.mark.parametrize("shape", [(-1, VOCAB), (3, VOCAB), (-1, 1, VOCAB), (-1, -1, VOCAB)])
@pytest.mark.parametrize("dtypes", [("int32", "int64", "float32"), ("int64", "int32", "float16"), ("int32", "int32", "bfloat16")])
def test_dtypes_and_shapes_that_fit(engine, cache, dtypes, shape):
    for name, spec in engine.tensors.items():
        if "cache_" in name and len(spec.shape) == 4:
            change(engine, name, shape=(3, *spec.shape[1:]))
    for name, dtype in zip(("input_ids", "last_token_ids", "logits"), dtypes, strict=True):
        change(engine, name, dtype=dtype)
    change(engine, "logits", shape=shape)
    plan = BindingPlan(engine, cache)
    assert (plan.input_ids.dtype, plan.last_token_ids.dtype, plan.logits.dtype) == dtypes
    assert plan.vocab_size == VOCAB


def test_caches_that_cannot_be_bound(engine, cache):
    with KVCacheManager(KV, memory=HostMemory()) as other:
        text = refuse(engine, other, PlaceError)
        assert text == "engine and cache: expected one memory, got an engine on cpu and a cache on another."
    cache.close()
    assert refuse(engine, cache, ClosedError) == "this RecordingCache is closed."
    assert refuse(*recorded(replace(KV, layout=KVLayout.COMBINED)), LayoutError) == (
        "`k_cache_0`: a view of shape (3, 1, 16, 8) with strides (256, 128, 8, 1) is not dense, "
        "and TensorRT binds dense tensors only. Make the cache with KVLayout.SEPARATE."
    )
    one = replace(KV, layout=KVLayout.COMBINED, max_batch_size=1)
    BindingPlan(*recorded(one))
    engine, cache = recorded(replace(one, max_sequence_length=7))
    address = cache.get_separate_kv_cache(0)[1].ptr
    assert refuse(engine, cache, LayoutError) == f"`v_cache_0`: expected an address that is a multiple of 256, got {address:#x}."


def profile(name, max_batch, min_width, max_width):
    return EngineProfile(name=name, min_batch=1, max_batch=max_batch, min_width=min_width, max_width=max_width)


@pytest.mark.parametrize(
    ("profiles", "text"),
    [
        (two_profiles(2, 4), "max_batch_size: the engine takes 2 slots, the cache has 3. Make the cache with 2."),
        (
            [profile("prefill", 3, 2, 4), profile("decode", 2, 1, 1)],
            "no optimisation profile takes a decode step: 3 slots of 1 new token. "
            "The engine has prefill: batch 1-3, width 2-4; decode: batch 1-2, width 1-1.",
        ),
    ],
)
def test_profiles_that_do_not_fit(memory, cache, profiles, text):
    assert refuse(RecordingEngine(KV, memory, profiles=profiles), cache) == text


def test_the_narrowest_profile_that_fits(memory, cache):
    plan = BindingPlan(RecordingEngine(KV, memory, profiles=[profile("wide", 1, 1, 9), *two_profiles(3, 4)]), cache)
    assert plan.max_width == 4
    assert [plan.profile_for(count, width) for count, width in [(3, 1), (1, 1), (3, 2), (2, 4), (1, 5)]] == [2, 2, 1, 1, 0]
    for count, width in [(3, 5), (4, 1)]:
        with pytest.raises(BindingError, match=rf"^no optimisation profile takes {count} slots of {width} new tokens\. The engine has"):
            plan.profile_for(count, width)


class Prepared:
    """A plan with its buffers; calling it prepares an enqueue and returns what was called since the last one."""

    def __init__(self, engine, cache):
        slots = cache.kv_config.max_batch_size
        self.plan, self.journal = BindingPlan(engine, cache), cache.memory.journal
        self.buffers = StepBuffers(
            cache.memory, max_batch_size=slots, max_width=4, vocab_size=VOCAB, index_dtypes=("int32", "int32"), logits_dtype="float32"
        )
        self.journal.take()

    def __call__(self, first_slot, count, width):
        self.plan.prepare(first_slot, count, width, self.buffers)
        return self.journal.take()


@pytest.fixture
def prepare(engine, cache):
    return Prepared(engine, cache)


def in_force(calls):
    return {call[:2]: call[2] for call in calls if call[0] in ("bind", "set_input_shape")}


@pytest.mark.parametrize("first", [0, 1], ids=["all slots", "a run with its own start index"])
def test_everything_is_set_the_first_time(prepare, cache, first):
    calls = prepare(first, 2, 4)
    buffers = prepare.buffers
    bound = {name: getattr(buffers, name).ptr for name in ("input_ids", "last_token_ids", "logits")}
    bound["kvcache_start_index"] = (buffers.start_index if first else cache.lengths.tensor).ptr
    shapes = {"input_ids": (2, 4), "last_token_ids": (2, 1), "kvcache_start_index": (2,)}
    for layer in (0, 1):
        for side, view in zip("kv", cache.get_separate_kv_cache(layer), strict=True):
            address = view.ptr + first * (1 + layer) * 16 * 8 * 4
            bound[f"{side}_cache_{layer}"] = bound[f"present_{side}_cache_{layer}"] = address
            shapes[f"{side}_cache_{layer}"] = (2, 1 + layer, 16, 8)
    want = {("bind", name): bound[name] for name in bound} | {("set_input_shape", name): shapes[name] for name in shapes}
    assert calls[0] == ("use_profile", 0)
    assert in_force(calls) == want
    assert len(calls) == 1 + len(want)
    back = in_force(prepare(1 - first, 2, 4))
    assert len(back) == 12  # all is bound again, no shape is set
    assert back["bind", "kvcache_start_index"] == (cache.lengths.tensor if first else buffers.start_index).ptr


def test_afterwards_only_what_differs_is_set(prepare):
    prepare(0, 2, 1)
    assert prepare(0, 2, 1) == [("use_profile", 1)]
    prepare(0, 2, 4)
    assert prepare(0, 2, 3) == [("use_profile", 0), ("set_input_shape", "input_ids", (2, 3))]
    calls = prepare(0, 3, 3)
    assert [call[0] for call in calls] == ["use_profile"] + ["set_input_shape"] * 7
    assert prepare(0, 2, 1) == [("use_profile", 1)]  # a prefill between leaves the decode step as it was
    with pytest.raises(BindingError):
        prepare(0, 3, 5)
    assert prepare.journal.take() == []


@pytest.mark.parametrize("then", [(0, 2, 4), (1, 1, 3)], ids=["back", "again"])
@pytest.mark.parametrize("failing", range(1, 20))
def test_after_a_failure_what_was_not_set_is(prepare, failing, then):
    before = in_force(prepare(0, 2, 4))
    wanted = {**before, **in_force(prepare(1, 1, 3))} if then == (1, 1, 3) else before
    prepare(0, 2, 4)
    prepare.journal.fail_at(failing, KeyboardInterrupt(), after=failing % 2 == 0)
    with pytest.raises(KeyboardInterrupt):
        prepare(1, 1, 3)
    assert {**before, **in_force(prepare(*then))} == wanted


@pytest.mark.parametrize(("combined", "fitting", "sizes"), [(False, [0, 8], [224, 448]), (True, [0, 4, 8], [448, 896])])
def test_slots_that_a_view_can_start_at(engine, cache, combined, fitting, sizes):
    assert all(BindingPlan(engine, cache).can_start_at(slot) for slot in range(3))
    # 2 heads * 7 * 8 * 4 bytes = 448, and half of that: every fourth or eighth slot is aligned; K and V in one: every second or fourth.
    layout = KVLayout.COMBINED if combined else KVLayout.SEPARATE
    engine, cache = recorded(kv_config(head_dim=8, slots=9, limit=7, layout=layout), combined=combined)
    prepare = Prepared(engine, cache)
    assert [slot for slot in range(9) if prepare.plan.can_start_at(slot)] == fitting
    with pytest.raises(LayoutError) as error:
        prepare(3, 2, 4)
    assert str(error.value).startswith(f"slot 3: cache tensors have {sizes} bytes per slot, so a view that starts there is not aligned")
    name = "past_key_values_1" if combined else "k_cache_1"
    assert in_force(prepare(8, 1, 4))["bind", name] == cache.get_separate_kv_cache(1)[0].ptr + 8 * sizes[1]


def test_an_engine_whose_k_and_v_are_one_tensor():
    kv = replace(KV, layout=KVLayout.COMBINED)
    engine, cache = recorded(kv, combined=True)
    prepare = Prepared(engine, cache)
    done = in_force(prepare(1, 2, 4))
    for layer, heads in enumerate((1, 2)):
        address = cache.get_combined_kv_cache(layer).ptr + 2 * heads * 16 * 8 * 4
        assert [done["bind", name] for name in prepare.plan.names.combined_pair(layer)] == [address] * 2
        assert done["set_input_shape", f"past_key_values_{layer}"] == (2, 2, heads, 16, 8)
    assert not any("k_cache" in name for _, name in done)
    change(engine, "present_key_values_1", alias=None)
    assert "`present_key_values_1`" in refuse(engine, cache)
    engine, cache = recorded(kv, combined=True)
    change(engine, "past_key_values_1", shape=(-1, 3, 2, 17, 8))
    assert refuse(engine, cache).endswith(
        "the number of sides differs (engine 3, cache 2); max_sequence_length differs (engine 17, cache 16)."
    )
    assert refuse(*recorded(KV, combined=True), LayoutError).endswith("binds dense tensors only. Make the cache with KVLayout.COMBINED.")
