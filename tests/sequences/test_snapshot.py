"""Snapshots: what comes back of a slot or an entry of a prompt cache, and into which caches. The file: test_snapshot_file.py."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from functools import partial

import pytest

from tests.helpers.assertions import raises
from tests.helpers.caches import SEQUENCE_KINDS, Image, Unchanged, cache_holding, fill_all, kv_config, make_cache, mamba_config
from tests.paths import ROOT
from tests.sequences.hybrid_model import HybridModel, hybrid_cache
from tests.sequences.snapshots import MODEL, SAMPLER, TOKENS, host_cache, load, refused, save
from trt_kvcache import HostMemory, HybridCacheConfig, HybridCacheManager, KVCacheManager, KVLayerConfig, KVLayout, LayerType
from trt_kvcache.errors import CapacityError, ConfigError, RangeError, SlotError, SnapshotError
from trt_kvcache.sequences.model_identity import ModelIdentity
from trt_kvcache.sequences.prompt_cache import PromptCache
from trt_kvcache.sequences.snapshot import Snapshot, save_snapshot
from trt_kvcache.sequences.snapshot_file import SnapshotFile


@pytest.mark.parametrize("kind", SEQUENCE_KINDS)
@pytest.mark.parametrize(("layout", "other"), [tuple(KVLayout), tuple(KVLayout)[::-1]], ids=["to separate", "to combined"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float8_e4m3fn", "int8"])
def test_a_slot_comes_back_in_another_cache(tmp_path, memory, stream, kind, layout, other, dtype):
    path = tmp_path / "a.safetensors"
    with cache_holding(kind, memory, stream, 1, 5, layout=layout, dtype=dtype) as source:
        taken = Image(source)
        saved = save(path, source, 1, pending=[9], sampler=SAMPLER)
        taken.check(source)
    with cache_holding(kind, memory, stream, 2, 3, layout=other, dtype=dtype, max_sequence_length=9) as target:
        expected = Image(target)
        loaded = load(path, target, 4)
        expected.move(4, taken, 1, 5)
        expected.check(target)
        assert (target.host_kv_cache_lengths, loaded.reused_tokens) == ((2, 3), 5)
    for snapshot in (saved, loaded.snapshot):
        assert (snapshot.tokens, snapshot.pending, snapshot.sampler, snapshot.model) == (tuple(TOKENS), (9,), SAMPLER, MODEL)
    assert os.listdir(tmp_path) == ["a.safetensors"]


def test_nothing_is_a_sequence_too(tmp_path, memory, stream):
    with cache_holding("hybrid", memory, stream, 0) as cache:
        save(tmp_path / "a", cache, tokens=[], pending=[4, 5])
        with Unchanged(cache):
            loaded = load(tmp_path / "a", cache)
    assert (loaded.reused_tokens, loaded.snapshot.tokens, loaded.snapshot.pending, loaded.snapshot.sampler) == (0, (), (4, 5), None)


@pytest.mark.parametrize("kind", SEQUENCE_KINDS)
@pytest.mark.parametrize("place", ["cache", "host"])
def test_an_entry_of_a_prompt_cache(tmp_path, memory, stream, kind, place):
    path = tmp_path / "entry"
    with cache_holding(kind, memory, stream, 5) as source:
        taken = Image(source)
        prompts = PromptCache(source, max_bytes=1 << 20, place=place)
        of_entry = partial(Snapshot.of_entry, prompts, prompts.insert(TOKENS, 0, stream=stream), stream=stream)
        of_entry(model=MODEL).write(path)
        with raises(ConfigError, "model", expected="ModelIdentity", got="'x'"):
            of_entry(model="x")
    restore_entry = partial(Snapshot.read(path).restore_entry, stream=stream)
    with cache_holding(kind, memory, stream, 0) as target:
        prompts = PromptCache(target, max_bytes=1 << 20, place=place)
        with Unchanged(target), pytest.raises(SnapshotError, match="fingerprint"):
            restore_entry(prompts, model=ModelIdentity(fingerprint="other"))
        entry = restore_entry(prompts, model=MODEL)
        assert (entry.tokens.tolist(), prompts.nbytes) == (TOKENS, entry.nbytes)
        expected = Image(target)
        prompts.restore(prompts.find([*TOKENS, 1]), 2, stream=stream)
        expected.move(2, taken, 0, 5)
        expected.check(target)
        assert restore_entry(PromptCache(target), model=MODEL) is None  # it is off


def test_an_entry_of_an_adapter(tmp_path, memory, stream):
    """The prompt cache knows an adapter by its name, a snapshot by its hash."""
    adapted = replace(MODEL, adapter="a3f1")
    with cache_holding("manager", memory, stream, 5) as source:
        prompts = PromptCache(source, max_bytes=1 << 20)
        of_entry = partial(Snapshot.of_entry, prompts, prompts.insert(TOKENS, 0, adapter="sql", stream=stream), stream=stream)
        with raises(ConfigError, "model", expected=("adapter", "'sql'"), got="None"):
            of_entry(model=MODEL)
        of_entry(model=adapted).write(tmp_path / "entry")
    restore_entry = partial(Snapshot.read(tmp_path / "entry").restore_entry, stream=stream)
    with cache_holding("manager", memory, stream, 0) as target:
        prompts = PromptCache(target, max_bytes=1 << 20)
        with raises(SnapshotError, "snapshot", expected="no adapter", got="a3f1"):
            restore_entry(prompts, model=MODEL)
        with raises(SnapshotError, "snapshot", expected="b", got="a3f1"):
            restore_entry(prompts, model=replace(MODEL, adapter="b"))
        with raises(ConfigError, "model", expected="no adapter", got="a3f1"):
            restore_entry(prompts, model=adapted)
        assert restore_entry(prompts, model=adapted, adapter="poems").adapter == "poems"
        assert prompts.find([*TOKENS, 1]) is None


def test_a_snapshot_without_adapter_is_written_as_before(tmp_path, memory, stream):
    """Earlier versions, which do not know the field, read it."""
    with cache_holding("manager", memory, stream, 5) as cache:
        for adapter in (None, "a3f1"):
            Snapshot.of_slot(cache, 0, tokens=TOKENS, model=replace(MODEL, adapter=adapter), stream=stream).write(tmp_path / "a")
            assert ("adapter" in SnapshotFile.read(tmp_path / "a").description["model"]) is (adapter is not None)
            assert Snapshot.read(tmp_path / "a").model.adapter == adapter


@pytest.mark.parametrize(("kind", "reused"), [("manager", [3, 1, 4, 5, 0, 0]), ("linear", [0, 0, 0, 5, 0, 0])])
def test_what_a_prompt_shares_with_it_is_restored(tmp_path, memory, stream, kind, reused):
    with cache_holding(kind, memory, stream, 5) as cache:
        save(tmp_path / "a", cache)
        taken = Image(cache)
        for prompt, count in zip([[*TOKENS[:3], 4], [7, 0], TOKENS, [*TOKENS, 6], [0, 7], []], reused, strict=True):
            fill_all(cache, stream, 3)
            expected = Image(cache)
            loaded = load(tmp_path / "a", cache, 2, prompt=prompt)
            expected.move(2, taken, 0, count)
            expected.check(cache)
            assert (loaded.reused_tokens, loaded.snapshot.reusable(prompt)) == (count, count)


def hybrid(heads=((2, 16),), dtype="float16", **mamba):
    types = [LayerType.ATTENTION] * len(heads) + [LayerType.MAMBA] * 2
    config = HybridCacheConfig(layer_types=types, kv=kv_config(heads, dtype=dtype), mamba=mamba_config(**mamba))
    return HybridCacheManager(config, memory=HostMemory())


def reset(cache, *lengths):
    stream = cache.memory.create_stream()
    cache.reset_for_new_sequences(lengths, stream=stream)
    fill_all(cache, stream)


class TestOtherModels:
    """The cache would fit; the model says that its K and V mean something else."""

    @pytest.fixture
    def path(self, tmp_path):
        with hybrid() as cache:
            reset(cache, 5)
            save(tmp_path / "a", cache)
        return tmp_path / "a"

    @pytest.mark.parametrize(
        ("fingerprint", "rope", "text"),
        [
            ("0" * 64, MODEL.rope, "fingerprint: expected 000000000000... as the model has, got 5f5f5f5f5f5f.... It "),
            (MODEL.fingerprint, None, "rope: expected None as the model has, got {'rope_type': 'linear', "),
            (MODEL.fingerprint, {**MODEL.rope, "factor": 8.0}, "rope: expected {"),
        ],
        ids=["fingerprint", "no RoPE", "another RoPE"],
    )
    def test_are_refused(self, path, fingerprint, rope, text):
        with hybrid() as cache:
            reset(cache, 3, 4)
            refused(f"snapshot: {text}", path, cache, model=ModelIdentity(fingerprint=fingerprint, rope=rope))

    @pytest.mark.parametrize(
        ("make", "text"),
        [
            (lambda: hybrid(((2, 16), (2, 16))), "attention layers: expected 2, got 1"),
            (lambda: hybrid(((3, 16),)), "num_kv_heads of attention layer 0: expected 3, got 2"),
            (lambda: hybrid(((2, 32),)), "head_dim of attention layer 0: expected 32, got 16"),
            (lambda: hybrid(dtype="bfloat16"), "dtype of K and V: expected bfloat16, got float16"),
            (lambda: hybrid(state_size=4), "state_size of recurrent layers: expected 4, got 5"),
            (lambda: hybrid(conv_dtype="float32"), "conv_dtype of recurrent layers: expected float32, got float16"),
            (lambda: make_cache("manager", HostMemory()), "attention layers: expected 3, got 1"),
            (lambda: host_cache("states"), "attention layers: expected 0, got 1"),
            (lambda: KVCacheManager(kv_config([(2, 16)]), memory=HostMemory()), "recurrent layers: expected 0, got 2"),
        ],
    )
    def test_caches_of_other_layers_are_refused(self, path, make, text):
        with make() as cache:
            reset(cache, 3, 4)
            refused(f"snapshot: {text}. It was saved from another cache.", path, cache)

    def test_a_cache_with_another_number_of_buffers_is_not_another_one(self, path):
        with hybrid(ping_pong=True) as cache:
            assert load(path, cache).reused_tokens == 5


class TestScales:
    def make(self, dtype, scale):
        layers = [KVLayerConfig(num_kv_heads=1, head_dim=16, k_scale=scale)]
        cache = KVCacheManager(kv_config(layers=layers, dtype=dtype), memory=HostMemory())
        reset(cache, 5)
        return cache

    def test_of_a_dtype_that_has_them_must_be_the_same(self, tmp_path):
        save(tmp_path / "a", self.make("int8", 0.5))
        refused("snapshot: k_scale of attention layer 0: expected 2.0, got 0.5", tmp_path / "a", self.make("int8", 2.0))

    def test_of_a_dtype_that_has_none_mean_nothing(self, tmp_path):
        save(tmp_path / "a", self.make("float16", 0.5))
        assert load(tmp_path / "a", self.make("float16", 2.0)).reused_tokens == 5


@pytest.fixture
def saved(tmp_path, memory, stream):
    """A cache, and the file of a snapshot of its first slot."""
    with cache_holding("manager", memory, stream, 5) as cache:
        save(tmp_path / "a", cache)
        yield cache, tmp_path / "a"


class TestArguments:
    @pytest.mark.parametrize("slot", [5, -1])
    def test_slots_out_of_range_are_not_loaded(self, saved, slot):
        cache, path = saved
        with Unchanged(cache), raises(SlotError, f"slot {slot}", expected="0 <= slot < 5 (batch slots)"):
            load(path, cache, slot)

    @pytest.mark.parametrize(
        ("given", "error"),
        [
            ({"slot": 1}, SlotError),
            ({"tokens": [*TOKENS, 1]}, RangeError),
            ({"tokens": [1], "pending": [-1]}, RangeError),
            ({"model": "x"}, ConfigError),
            ({"sampler": (1, 2)}, ConfigError),
        ],
        ids=["a slot that is not active", "more tokens than it holds", "pending tokens", "model", "sampler"],
    )
    def test_what_cannot_be_saved_leaves_the_file_alone(self, saved, given, error):
        cache, path = saved
        before = path.read_bytes()
        with Unchanged(cache), pytest.raises(error):
            save(path, cache, **given)
        assert (os.listdir(path.parent), path.read_bytes()) == (["a"], before)

    @pytest.mark.parametrize("model", [None, "x"])
    def test_a_snapshot_is_loaded_for_a_model(self, saved, model):
        cache, path = saved
        with Unchanged(cache), raises(ConfigError, "model", expected="ModelIdentity", got=repr(model)):
            load(path, cache, model=model)

    def test_the_rope_of_a_model_is_compared_as_it_is_stored(self, saved):
        cache, path = saved
        model = ModelIdentity(fingerprint="x", rope={"a": (1, 2), 3: None})
        save(path, cache, model=model)
        assert load(path, cache, model=model).snapshot.model == model


class TestIntoAShorterCache:
    """A cache whose slots hold four tokens; the snapshot has five."""

    @pytest.fixture
    def short(self, memory):
        with KVCacheManager(kv_config(max_sequence_length=4), memory=memory) as cache:
            yield cache

    def test_more_tokens_than_a_slot_holds(self, saved, short):
        with Unchanged(short), pytest.raises(CapacityError) as caught:
            load(saved[1], short, 0)
        assert str(caught.value) == "snapshot: it holds 5 tokens, max_sequence_length is 4. Nothing was changed."

    def test_what_a_prompt_shares_may_fit(self, saved, short):
        assert load(saved[1], short, 0, prompt=TOKENS[:3]).reused_tokens == 2

    @pytest.mark.parametrize("place", ["cache", "host"])
    def test_an_entry_of_a_prompt_cache_is_restored_as_far_as_it_fits(self, saved, short, stream, place):
        prompts = PromptCache(short, max_bytes=1 << 20, place=place)
        Snapshot.read(saved[1]).restore_entry(prompts, model=MODEL, stream=stream)
        match = prompts.find([*TOKENS, 1])
        with Unchanged(short), raises(RangeError, "tokens to restore", expected="0 to 4", got=5):
            prompts.restore(match, 0, stream=stream)


GO_ON = """
import json, sys
from tests.sequences.hybrid_model import HybridModel, hybrid_cache
from trt_kvcache import HostMemory, KVLayout
from trt_kvcache.sequences.snapshot import load_snapshot
from trt_kvcache.sequences.model_identity import ModelIdentity

cache = hybrid_cache(HostMemory(), slots=2, limit=31, layout=KVLayout.COMBINED)
model = HybridModel(cache)
cache.reset_for_new_sequences([0, 0], stream=model.stream)
loaded = load_snapshot(sys.argv[1], cache, 1, model=ModelIdentity(fingerprint="hybrid"), stream=model.stream)
cache.commit_sequence_length([0, loaded.reused_tokens], stream=model.stream)
tokens, logits = model.generate(1, loaded.snapshot.pending, 6)
print(json.dumps([tokens, [row.tobytes().hex() for row in logits], "safetensors" in sys.modules]))
"""


def test_with_states_all_tokens_of_a_slot_are_saved(tmp_path, memory, stream):
    with cache_holding("hybrid", memory, stream, 5) as cache:
        with Unchanged(cache), raises(RangeError, "tokens: slot 0 holds 5", expected="exactly 5"):
            save(tmp_path / "a", cache, tokens=TOKENS[:4])
        assert os.listdir(tmp_path) == []


def test_another_process_goes_on_with_the_same_tokens(tmp_path):
    with hybrid_cache(HostMemory()) as cache:
        model = HybridModel(cache)
        cache.reset_for_new_sequences([0, 0, 0], stream=model.stream)
        model.run(1, [9, 9])
        tokens, _ = model.generate(2, [3, 17, 5, 29, 11], 4)
        identity = ModelIdentity(fingerprint="hybrid")
        held = [3, 17, 5, 29, 11, *tokens]
        save_snapshot(tmp_path / "a", cache, 2, tokens=held, model=identity, pending=[30], stream=model.stream)
        expected, logits = model.generate(2, [30], 6)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    run = [sys.executable, "-c", GO_ON, str(tmp_path / "a")]
    result = subprocess.run(run, capture_output=True, text=True, timeout=60, check=False, env=environment)
    assert result.returncode == 0, result.stderr
    assert len(set(expected)) > 3
    assert json.loads(result.stdout) == [expected, [row.tobytes().hex() for row in logits], False]
