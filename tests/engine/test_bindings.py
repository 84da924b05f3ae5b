"""``BindingPlan``: every mismatch is an error with its text, before anything is bound; what is bound and set, and when."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.helpers.recording import VOCAB, Journal, RecordingCache, RecordingEngine, RecordingMemory, kv_config, recorded, two_profiles
from tests.paths import GOLDEN
from trt_kvcache import (
    BindingPlan,
    CacheConfig,
    HostMemory,
    HybridCacheManager,
    KVCacheConfig,
    KVCacheManager,
    KVLayerConfig,
    KVLayout,
    LinearKVCache,
    TensorNames,
)
from trt_kvcache.checkpoint import Checkpoint
from trt_kvcache.engine.decoder_cache import decoder_cache_config
from trt_kvcache.engine.protocol import EngineProfile, TensorMode, TensorSpec
from trt_kvcache.engine.step_buffers import StepBuffers
from trt_kvcache.errors import BindingError, ClosedError, KVCacheError, LayoutError, PlaceError
from trt_kvcache.reference import ReferenceEngine

# Dimensions all different: B=3, H=1 and 2, S=16, D=8; two layers.
KV = kv_config(head_dim=8)

#: Of an engine with the logits of more new tokens than one.
MORE_LOGITS = [
    EngineProfile(name="prefill", min_batch=1, max_batch=3, min_width=1, max_width=9, max_logits=5),
    EngineProfile(name="decode", min_batch=1, max_batch=3, min_width=1, max_width=1),
    EngineProfile(name="verify", min_batch=1, max_batch=3, min_width=1, max_width=3, max_logits=3),
]


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


def refuse(engine: RecordingEngine, cache: Any, kind: type[KVCacheError] = BindingError, **options: Any) -> str:
    """Make a plan that must fail, before anything was bound or allocated; return the text."""
    engine.memory.journal.take()
    before = cache.memory.live_nbytes
    with pytest.raises(kind) as error:
        BindingPlan(engine, cache, **options)
    assert engine.memory.journal.take() == []
    assert cache.memory.live_nbytes == before
    return str(error.value)


def test_engine_and_cache_that_fit(engine, cache):
    plan = BindingPlan(engine, cache)
    assert plan.vocab_size == VOCAB
    assert plan.max_width == 4


class TestNames:
    @pytest.mark.parametrize(
        "name",
        [
            "input_ids",
            "last_token_ids",
            "kvcache_start_index",
            "logits",
            "k_cache_1",
            "present_k_cache_0",
            "v_cache_0",
            "present_v_cache_1",
        ],
    )
    def test_a_missing_tensor(self, engine, cache, name):
        mode = engine.tensors.pop(name).mode.value
        known = ", ".join(f"`{other}`" for other in engine.tensors)
        assert refuse(engine, cache, BindingError) == (
            f"`{name}`: expected an {mode} of this name, the engine has {known}. Pass the engine's names as TensorNames."
        )

    def test_a_tensor_too_many(self, engine, cache):
        engine.tensors["position_ids"] = TensorSpec(name="position_ids", shape=(-1, -1), dtype="int32", mode=TensorMode.INPUT)
        engine.tensors["hidden"] = TensorSpec(name="hidden", shape=(-1, 8), dtype="float32", mode=TensorMode.OUTPUT)
        assert refuse(engine, cache, BindingError) == (
            "`position_ids`, `hidden`: the engine has tensors that nothing is bound to. "
            "More layers than the cache, or another kind of engine?"
        )

    def test_an_engine_with_more_layers(self, memory, cache):
        text = refuse(RecordingEngine(kv_config(head_dim=8, layers=3), memory), cache, BindingError)
        assert text.startswith("`k_cache_2`, `v_cache_2`, `present_k_cache_2`, `present_v_cache_2`: the engine has tensors that")

    def test_an_engine_with_fewer_layers(self, memory, cache):
        text = refuse(RecordingEngine(kv_config(head_dim=8, layers=1), memory), cache, BindingError)
        assert text.startswith("`k_cache_1`: expected an input of this name, the engine has `input_ids`, ")

    @pytest.mark.parametrize(
        ("name", "has"), [("input_ids", "output"), ("v_cache_0", "output"), ("logits", "input"), ("present_k_cache_1", "input")]
    )
    def test_the_wrong_mode(self, engine, cache, name, has):
        expected = "input" if has == "output" else "output"
        engine.tensors[name] = replace(engine.tensors[name], mode=TensorMode(has))
        assert refuse(engine, cache, BindingError) == f"`{name}`: expected an {expected}, the engine has an {has} of this name."

    def test_an_engine_with_other_names(self, memory, cache):
        names = TensorNames(
            input_ids="tokens",
            kvcache_start_index="past",
            last_token_ids="which",
            logits="scores",
            k_cache="k{i}",
            v_cache="v{i}",
            present_k_cache="k{i}_out",
            present_v_cache="v{i}_out",
        )
        engine = RecordingEngine(KV, memory, names=names)
        assert BindingPlan(engine, cache, names=names).vocab_size == VOCAB
        assert "`k_cache_0`: expected an input of this name, the engine has `tokens`, `past`, " in refuse(engine, cache, BindingError)


class TestCacheTensors:
    @pytest.mark.parametrize("name", ["k_cache_1", "v_cache_1", "present_k_cache_1", "present_v_cache_1"])
    @pytest.mark.parametrize(
        ("changes", "engine_has", "differences"),
        [
            ({"dtype": "float16"}, "float16 (-1, 2, 16, 8)", "dtype differs (engine float16, cache float32)"),
            ({"shape": (4, 2, 16, 8)}, "float32 (4, 2, 16, 8)", "max_batch_size differs (engine 4, cache 3)"),
            ({"shape": (-1, 5, 16, 8)}, "float32 (-1, 5, 16, 8)", "num_kv_heads differs (engine 5, cache 2)"),
            ({"shape": (-1, 2, 32, 8)}, "float32 (-1, 2, 32, 8)", "max_sequence_length differs (engine 32, cache 16)"),
            ({"shape": (-1, 2, 16, 64)}, "float32 (-1, 2, 16, 64)", "head_dim differs (engine 64, cache 8)"),
            (
                {"shape": (-1, 16, 2, 8)},
                "float32 (-1, 16, 2, 8)",
                "num_kv_heads differs (engine 16, cache 2); max_sequence_length differs (engine 2, cache 16)",
            ),
            ({"shape": (-1, 2, 16)}, "float32 (-1, 2, 16)", "the number of dimensions differs"),
            (
                {"dtype": "int8", "shape": (6, 16, 8)},
                "int8 (6, 16, 8)",
                "dtype differs (engine int8, cache float32); the number of dimensions differs",
            ),
        ],
    )
    def test_each_difference_is_named(self, engine, cache, name, changes, engine_has, differences):
        engine.tensors[name] = replace(engine.tensors[name], **changes)
        assert refuse(engine, cache, BindingError) == f"`{name}` expects {engine_has}, cache has float32 (3, 2, 16, 8): {differences}."

    def test_the_message_in_the_documentation(self, memory):
        layers = [KVLayerConfig(num_kv_heads=8, head_dim=64)]
        built = KVCacheConfig(layers=layers, max_batch_size=2, max_sequence_length=1024, dtype="float16", layout=KVLayout.SEPARATE)
        with RecordingCache(replace(built, max_sequence_length=512), memory=memory) as cache:
            assert refuse(RecordingEngine(built, memory), cache, BindingError) == (
                "`k_cache_0` expects float16 (-1, 8, 1024, 64), cache has float16 (2, 8, 512, 64): "
                "max_sequence_length differs (engine 1024, cache 512)."
            )

    def test_a_fixed_batch_of_the_right_size(self, engine, cache):
        for name, spec in engine.tensors.items():
            if "cache_" in name and len(spec.shape) == 4:
                engine.tensors[name] = replace(spec, shape=(3, *spec.shape[1:]))
        BindingPlan(engine, cache)

    @pytest.mark.parametrize(
        ("alias", "has"),
        [(None, "has separate memory"), ("v_cache_0", "shares memory with `v_cache_0`"), ("k_cache_1", "shares memory with `k_cache_1`")],
    )
    def test_an_output_that_is_not_in_place(self, engine, cache, alias, has):
        engine.tensors["present_k_cache_0"] = replace(engine.tensors["present_k_cache_0"], alias=alias)
        assert (
            refuse(engine, cache, BindingError)
            == f"`present_k_cache_0`: expected an output that shares memory with `k_cache_0`, the engine's {has}."
        )


class TestStepTensors:
    @pytest.mark.parametrize("name", ["input_ids", "last_token_ids"])
    @pytest.mark.parametrize("dtype", ["int32", "int64"])
    def test_either_index_dtype(self, engine, cache, name, dtype):
        engine.tensors[name] = replace(engine.tensors[name], dtype=dtype)
        assert getattr(BindingPlan(engine, cache), name).dtype == dtype

    @pytest.mark.parametrize(
        ("name", "dtype", "expected"),
        [
            ("input_ids", "float32", "int32 or int64"),
            ("last_token_ids", "int8", "int32 or int64"),
            ("kvcache_start_index", "int64", "int32"),
            ("logits", "int32", "float32 or float16 or bfloat16"),
        ],
    )
    def test_the_wrong_dtype(self, engine, cache, name, dtype, expected):
        engine.tensors[name] = replace(engine.tensors[name], dtype=dtype)
        assert refuse(engine, cache, BindingError) == f"`{name}`: expected {expected}, the engine has {dtype}."

    @pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
    @pytest.mark.parametrize("shape", [(-1, VOCAB), (3, VOCAB), (-1, 1, VOCAB), (-1, -1, VOCAB)])
    def test_logits_of_one_token(self, engine, cache, dtype, shape):
        engine.tensors["logits"] = replace(engine.tensors["logits"], dtype=dtype, shape=shape)
        assert BindingPlan(engine, cache).vocab_size == VOCAB

    @pytest.mark.parametrize(
        ("name", "shape", "expected"),
        [
            ("input_ids", (-1,), "(B, s)"),
            ("input_ids", (-1, -1, 1), "(B, s)"),
            ("kvcache_start_index", (-1, 1), "(B)"),
            ("last_token_ids", (-1,), "(B, 1)"),
            ("last_token_ids", (-1, 2), "(B, 1)"),
            ("logits", (VOCAB,), "(B, vocab) or (B, 1, vocab)"),
            ("logits", (-1, 4, VOCAB), "(B, vocab) or (B, 1, vocab)"),
            ("logits", (-1, -1), "(B, vocab) or (B, 1, vocab)"),
            ("logits", (-1, 1, 0), "(B, vocab) or (B, 1, vocab)"),
        ],
    )
    def test_the_wrong_shape(self, engine, cache, name, shape, expected):
        engine.tensors[name] = replace(engine.tensors[name], shape=shape)
        assert refuse(engine, cache, BindingError) == f"`{name}`: expected shape {expected}, the engine has {shape}."


class TestMemoryAndLayout:
    def test_another_memory(self, engine):
        with KVCacheManager(KV, memory=HostMemory()) as cache:
            assert refuse(engine, cache, PlaceError) == (
                "engine and cache: expected one memory, got an engine on cpu and a cache on another."
            )

    def test_a_combined_cache_is_not_dense(self, memory, engine):
        with RecordingCache(kv_config(head_dim=8, layout=KVLayout.COMBINED), memory=memory) as cache:
            assert refuse(engine, cache, LayoutError) == (
                "`k_cache_0`: a view of shape (3, 1, 16, 8) with strides (256, 128, 8, 1) is not contiguous, "
                "and TensorRT binds no others. Make the cache with KVLayout.SEPARATE."
            )

    def test_a_combined_cache_of_one_slot_is_dense(self, memory):
        kv = kv_config(head_dim=8, slots=1, layout=KVLayout.COMBINED)
        with RecordingCache(kv, memory=memory) as cache:
            BindingPlan(RecordingEngine(kv, memory), cache)

    def test_a_combined_cache_of_one_slot_whose_v_is_not_aligned(self, memory):
        kv = kv_config(head_dim=8, slots=1, limit=7, layout=KVLayout.COMBINED)
        with RecordingCache(kv, memory=memory) as cache:
            address = cache.get_separate_kv_cache(0)[1].ptr
            assert refuse(RecordingEngine(kv, memory), cache, LayoutError) == (
                f"`v_cache_0`: expected an address that is a multiple of 256, got {address:#x}."
            )

    def test_a_linear_cache(self, memory):
        config = CacheConfig(
            num_attention_layers=2,
            max_batch_size=3,
            max_sequence_length=7,
            num_kv_heads=2,
            head_dim=8,
            dtype="float32",
            layout=KVLayout.SEPARATE,
        )
        with LinearKVCache(config, memory=memory) as cache:
            BindingPlan(RecordingEngine(cache.kv_config, memory), cache)

    def test_a_closed_cache(self, memory, engine, cache):
        cache.close()
        assert refuse(engine, cache, ClosedError) == "this RecordingCache is closed."


class TestProfiles:
    def test_fewer_slots_than_the_cache(self, memory, cache):
        engine = RecordingEngine(KV, memory, profiles=two_profiles(2, 4))
        assert refuse(engine, cache, BindingError) == "max_batch_size: the engine takes 2 slots, the cache has 3. Make the cache with 2."

    def test_an_engine_without_profiles(self, memory, cache):
        engine = RecordingEngine(KV, memory, profiles=[])
        assert refuse(engine, cache, BindingError) == "max_batch_size: the engine takes 0 slots, the cache has 3. Make the cache with 0."

    def test_an_engine_without_a_decode_profile(self, memory, cache):
        profiles = [
            EngineProfile(name="prefill", min_batch=1, max_batch=3, min_width=2, max_width=4),
            EngineProfile(name="decode", min_batch=1, max_batch=2, min_width=1, max_width=1),
        ]
        assert refuse(RecordingEngine(KV, memory, profiles=profiles), cache, BindingError) == (
            "no optimisation profile takes a decode step: 3 slots of 1 new token. "
            "The engine has prefill: batch 1-3, width 2-4; decode: batch 1-2, width 1-1."
        )

    def test_the_largest_width_is_that_of_the_full_batch(self, memory, cache):
        wide = EngineProfile(name="wide", min_batch=1, max_batch=1, min_width=1, max_width=9)
        assert BindingPlan(RecordingEngine(KV, memory, profiles=[wide, *two_profiles(3, 4)]), cache).max_width == 4

    def test_the_narrowest_profile_that_fits(self, engine, cache):
        plan = BindingPlan(engine, cache)
        assert [engine.profiles[plan.profile_for(count, width)].name for count, width in [(3, 1), (1, 1), (3, 2), (2, 4)]] == [
            "decode",
            "decode",
            "prefill",
            "prefill",
        ]

    def test_the_narrowest_profile_that_has_the_logits(self, memory, cache):
        engine = RecordingEngine(KV, memory, profiles=MORE_LOGITS, more_logits=True)
        plan = BindingPlan(engine, cache)
        found = [engine.profiles[plan.profile_for(3, width, logits)].name for width, logits in [(1, 1), (2, 1), (3, 3), (4, 3), (9, 5)]]
        assert found == ["decode", "verify", "verify", "prefill", "prefill"]
        assert plan.max_logits_per_slot == 5
        with pytest.raises(BindingError) as error:
            plan.profile_for(3, 9, 6)
        assert str(error.value) == (
            "no optimisation profile takes 3 slots of 9 new tokens with the logits of 6. The engine has "
            "prefill: batch 1-3, width 1-9, logits 1-5; decode: batch 1-3, width 1-1; verify: batch 1-3, width 1-3, logits 1-3."
        )

    def test_one_token_has_logits_where_the_engine_has_no_more(self, memory, cache):
        profiles = [replace(profile, max_logits=5) for profile in MORE_LOGITS]
        assert BindingPlan(RecordingEngine(KV, memory, profiles=profiles), cache).max_logits_per_slot == 1

    @pytest.mark.parametrize(("count", "width"), [(3, 5), (4, 1)])
    def test_an_enqueue_that_no_profile_takes(self, engine, cache, count, width):
        with pytest.raises(BindingError) as error:
            BindingPlan(engine, cache).profile_for(count, width)
        assert str(error.value) == (
            f"no optimisation profile takes {count} slots of {width} new tokens. "
            "The engine has prefill: batch 1-3, width 1-4; decode: batch 1-3, width 1-1."
        )


class TestPrepare:
    @pytest.fixture
    def plan(self, engine, cache):
        return BindingPlan(engine, cache)

    @pytest.fixture
    def buffers(self, memory, plan):
        buffers = StepBuffers(
            memory, max_batch_size=3, max_width=4, vocab_size=VOCAB, index_dtypes=("int32", "int32"), logits_dtype="float32"
        )
        memory.journal.take()
        yield buffers
        buffers.close()

    def test_everything_is_bound_and_set_the_first_time(self, plan, cache, buffers, memory):
        plan.prepare(0, 2, 4, buffers)
        calls = memory.journal.take()
        views = [cache.get_separate_kv_cache(layer) for layer in (0, 1)]
        assert calls[0] == ("use_profile", 0)
        assert set(calls[1:]) == {
            *(("bind", f"{side}_cache_{layer}", view.ptr) for layer in (0, 1) for side, view in zip("kv", views[layer], strict=True)),
            *(
                ("bind", f"present_{side}_cache_{layer}", view.ptr)
                for layer in (0, 1)
                for side, view in zip("kv", views[layer], strict=True)
            ),
            ("bind", "input_ids", buffers.input_ids.ptr),
            ("bind", "last_token_ids", buffers.last_token_ids.ptr),
            ("bind", "kvcache_start_index", cache.lengths.tensor.ptr),
            ("bind", "logits", buffers.logits.ptr),
            ("set_input_shape", "input_ids", (2, 4)),
            ("set_input_shape", "last_token_ids", (2, 1)),
            ("set_input_shape", "kvcache_start_index", (2,)),
            *(("set_input_shape", f"{side}_cache_{layer}", (2, 1 + layer, 16, 8)) for layer in (0, 1) for side in "kv"),
        }
        assert len(calls) == 1 + 12 + 7

    def test_the_same_step_again_only_selects_the_profile(self, plan, buffers, memory):
        plan.prepare(0, 2, 1, buffers)
        memory.journal.take()
        plan.prepare(0, 2, 1, buffers)
        assert memory.journal.take() == [("use_profile", 1)]

    def test_another_width_sets_one_shape(self, plan, buffers, memory):
        plan.prepare(0, 2, 4, buffers)
        memory.journal.take()
        plan.prepare(0, 2, 3, buffers)
        assert memory.journal.take() == [("use_profile", 0), ("set_input_shape", "input_ids", (2, 3))]

    def test_another_number_of_logits_sets_one_shape_more(self, memory, cache):
        plan = BindingPlan(RecordingEngine(KV, memory, profiles=MORE_LOGITS, more_logits=True), cache)
        buffers = StepBuffers(
            memory,
            max_batch_size=3,
            max_width=9,
            vocab_size=VOCAB,
            index_dtypes=("int32", "int32"),
            logits_dtype="float32",
            max_logits_per_slot=5,
        )
        plan.prepare(0, 2, 6, buffers, logits=4)
        memory.journal.take()
        plan.prepare(0, 2, 6, buffers, logits=5)
        assert memory.journal.take() == [
            ("use_profile", 0),
            ("set_input_shape", "input_ids", (2, 6)),
            ("set_input_shape", "last_token_ids", (2, 5)),
        ]
        plan.prepare(0, 2, 6, buffers, logits=5)
        assert memory.journal.take() == [("use_profile", 0)]
        buffers.close()

    def test_another_batch_sets_the_shapes_and_binds_nothing(self, plan, buffers, memory):
        plan.prepare(0, 2, 4, buffers)
        memory.journal.take()
        plan.prepare(0, 3, 4, buffers)
        calls = memory.journal.take()
        assert {call[0] for call in calls[1:]} == {"set_input_shape"}
        assert len(calls) == 1 + 7

    def test_a_prefill_between_leaves_the_decode_step_as_it_was(self, plan, buffers, memory):
        plan.prepare(0, 2, 1, buffers)
        plan.prepare(0, 3, 4, buffers)
        memory.journal.take()
        plan.prepare(0, 2, 1, buffers)
        assert memory.journal.take() == [("use_profile", 1)]

    def test_a_run_of_slots_binds_views_that_start_there_and_its_own_start_index(self, plan, cache, buffers, memory):
        plan.prepare(1, 2, 4, buffers)
        bound = {call[1]: call[2] for call in memory.journal.take() if call[0] == "bind"}
        assert bound["kvcache_start_index"] == buffers.start_index.ptr != cache.lengths.tensor.ptr
        for layer in (0, 1):
            for side, view in zip("kv", cache.get_separate_kv_cache(layer), strict=True):
                assert bound[f"{side}_cache_{layer}"] == bound[f"present_{side}_cache_{layer}"] == view.ptr + (1 + layer) * 16 * 8 * 4
        plan.prepare(0, 2, 4, buffers)
        bound = {call[1]: call[2] for call in memory.journal.take() if call[0] == "bind"}
        assert bound["kvcache_start_index"] == cache.lengths.tensor.ptr
        assert bound["v_cache_1"] == cache.get_separate_kv_cache(1)[1].ptr

    @pytest.mark.parametrize("then", [(0, 2, 4), (1, 1, 3)], ids=["back", "again"])
    @pytest.mark.parametrize("failing", range(1, 20))
    def test_after_a_failure_everything_is_bound_and_set_that_was_not(self, plan, buffers, memory, failing, then):
        def in_force(calls):
            return {call[:2]: call[2] for call in calls if call[0] in ("bind", "set_input_shape")}

        plan.prepare(0, 2, 4, buffers)
        before = in_force(memory.journal.take())
        plan.prepare(1, 1, 3, buffers)
        wanted = before if then == (0, 2, 4) else {**before, **in_force(memory.journal.take())}
        plan.prepare(0, 2, 4, buffers)
        memory.journal.take()
        memory.journal.fail_at(failing, KeyboardInterrupt(), after=failing % 2 == 0)
        with pytest.raises(KeyboardInterrupt):
            plan.prepare(1, 1, 3, buffers)
        plan.prepare(*then, buffers)
        assert {**before, **in_force(memory.journal.take())} == wanted

    def test_a_shape_that_no_profile_takes_changes_nothing(self, plan, buffers, memory):
        with pytest.raises(BindingError):
            plan.prepare(0, 3, 5, buffers)
        assert memory.journal.take() == []


class TestAlignment:
    # 2 heads * 7 * 8 * 4 bytes = 448, and half of that: every fourth or eighth slot is aligned.
    @pytest.fixture
    def unaligned(self, memory):
        kv = kv_config(head_dim=8, slots=9, limit=7)
        with RecordingCache(kv, memory=memory) as cache:
            yield RecordingEngine(kv, memory), cache

    def test_which_slots_a_view_can_start_at(self, unaligned):
        plan = BindingPlan(*unaligned)
        assert [slot for slot in range(9) if plan.can_start_at(slot)] == [0, 8]

    def test_every_slot_is_aligned_if_its_bytes_are_a_multiple_of_256(self, engine, cache):
        plan = BindingPlan(engine, cache)
        assert all(plan.can_start_at(slot) for slot in range(3))

    def test_a_view_that_is_not_aligned_is_refused_and_nothing_bound(self, unaligned, memory):
        engine, cache = unaligned
        plan = BindingPlan(engine, cache)
        buffers = StepBuffers(
            memory, max_batch_size=9, max_width=4, vocab_size=VOCAB, index_dtypes=("int32", "int32"), logits_dtype="float32"
        )
        memory.journal.take()
        with pytest.raises(LayoutError) as error:
            plan.prepare(3, 2, 4, buffers)
        assert str(error.value) == (
            "slot 3: cache tensors have [224, 448] bytes per slot, so a view that starts there is not aligned to 256 bytes. "
            "Choose max_sequence_length so that H * S * D * itemsize (for K and V in one, twice that) is a multiple of 256."
        )
        assert memory.journal.take() == [("use_profile", 0)]
        plan.prepare(8, 1, 4, buffers)
        bound = {call[1]: call[2] for call in memory.journal.take() if call[0] == "bind"}
        assert bound["k_cache_1"] == cache.get_separate_kv_cache(1)[0].ptr + 8 * 448
        buffers.close()

    def test_states_that_are_not_aligned_are_not_a_matter_of_length(self):
        """64 channels * 3 inputs * 2 bytes = 384."""
        memory = HostMemory()
        with Checkpoint.open(GOLDEN / "lfm2") as checkpoint:
            config = decoder_cache_config(checkpoint.config, max_batch_size=3, max_sequence_length=32, dtype="float16")
            engine = ReferenceEngine(checkpoint, kv=config, max_prefill_length=4, memory=memory)
        with HybridCacheManager(config, memory=memory) as cache:
            plan = BindingPlan(engine, cache)
            assert [plan.can_start_at(slot) for slot in range(3)] == [True, False, True]
            buffers = StepBuffers(
                memory, max_batch_size=3, max_width=4, vocab_size=79, index_dtypes=("int32", "int32"), logits_dtype="float32"
            )
            with pytest.raises(LayoutError) as error:
                plan.prepare(1, 1, 4, buffers)
            assert str(error.value).endswith("not aligned to 256 bytes. States are as large as the model says: run the slots from 0 on.")
            buffers.close()


def change(engine, name, **changes):
    spec = engine.tensors[name] = replace(engine.tensors[name], **changes)
    return spec


def in_force(calls):
    return {call[:2]: call[2] for call in calls if call[0] in ("bind", "set_input_shape")}


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
    assert refuse(*recorded(KV, combined=True), LayoutError).endswith("binds no others. Make the cache with KVLayout.COMBINED.")
