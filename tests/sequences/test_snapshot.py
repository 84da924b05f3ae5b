"""Snapshots: what comes back, from which file, and that any other file is refused with the cache as it was."""

import hashlib
import json
import os
import subprocess
import sys
from functools import partial

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from tests.helpers.cache_cases import SEQUENCE_KINDS, Image, Unchanged, cache_holding, fill_all, kv_config, make_cache, mamba_config
from tests.helpers.hybrid_model import HybridModel, hybrid_cache
from tests.paths import ROOT
from trt_kvcache import HostMemory, HybridCacheConfig, HybridCacheManager, KVCacheConfig, KVCacheManager, KVLayerConfig, KVLayout, LayerType
from trt_kvcache.checkpoint import RopeConfig
from trt_kvcache.errors import CapacityError, ConfigError, RangeError, ShapeError, SlotError, SnapshotError
from trt_kvcache.generation.sampler_state import SamplerState
from trt_kvcache.sequences.model_identity import ModelIdentity
from trt_kvcache.sequences.prompt_cache import PromptCache
from trt_kvcache.sequences.snapshot import Snapshot, load_snapshot, save_snapshot
from trt_kvcache.session.resume_snapshots import read_snapshots

MODEL = ModelIdentity(fingerprint="5f" * 32, rope=RopeConfig(kind="linear", theta=5e5, factor=4.0).to_dict())
SAMPLER = SamplerState(seed=(1 << 63) - 1, counter=12)
TOKENS = [7, 0, 2147483647, 3, 11]


def save(path, cache, slot=0, **given):
    return save_snapshot(path, cache, slot, **{"tokens": TOKENS, "model": MODEL, "stream": cache.memory.create_stream(), **given})


def load(path, cache, slot=1, **given):
    return load_snapshot(path, cache, slot, **{"model": MODEL, "stream": cache.memory.create_stream(), **given})


def refused(text, path, cache, **given):
    with Unchanged(cache), pytest.raises(SnapshotError) as caught:
        load(path, cache, **given)
    assert str(caught.value).startswith(text)


def host_cache(kind, *lengths, **changes):
    memory = HostMemory()
    return cache_holding(kind, memory, memory.create_stream(), *lengths, **changes)


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
        with pytest.raises(ConfigError, match=r"^model: expected a ModelIdentity, got 'x'\.$"):
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


def test_any_reader_of_safetensors_can_look_at_it(tmp_path):
    path = tmp_path / "a.safetensors"
    with host_cache("hybrid", 5) as cache:
        saved = save(path, cache, pending=[1], sampler=SAMPLER).contents
    counts = {"k_cache": 3, "v_cache": 3, "recurrent_state": 2, "conv_state": 2}
    arrays = dict(zip([f"{name}_{index}" for index in range(3) for name in ("k_cache", "v_cache")], saved.arrays[:6], strict=True))
    with safe_open(path, framework="numpy") as file:
        names = {f"{name}_{index}" for name, count in counts.items() for index in range(count)}
        assert set(file.keys()) == {"tokens", "pending_tokens", "sha256", *names}
        assert file.get_tensor("tokens").tolist() == TOKENS
        for name, array in (*arrays.items(), ("recurrent_state_1", saved.arrays[7])):
            found = file.get_tensor(name)
            assert (found.dtype, found.shape, found.tobytes()) == (array.dtype, array.shape, array.tobytes())
        metadata = file.metadata()
    description = json.loads(metadata["description"])
    del description["producer"]
    assert (metadata["trt_kvcache_snapshot"], description) == (
        "1",
        {
            "model": {"fingerprint": MODEL.fingerprint, "rope": {"rope_type": "linear", "rope_theta": 5e5, "factor": 4.0}},
            "sampler": {"seed": SAMPLER.seed, "counter": 12},
            "slot": {"kv": kv_config().to_dict(), "mamba": mamba_config().to_dict()},
        },
    )
    content = path.read_bytes()
    assert content[-32:] == hashlib.sha256(content[:-32]).digest()
    odd = mamba_config(num_layers=1, num_heads=1, recurrent_dtype="float16", conv_dtype="float32")
    with HybridCacheManager(HybridCacheConfig(layer_types=[LayerType.MAMBA], mamba=odd), memory=HostMemory()) as cache:
        cache.reset_for_new_sequences([0], stream=cache.memory.create_stream())
        save(path, cache, tokens=[])
    arrays = Snapshot.read(path).contents.arrays
    assert all(array.flags.aligned and not array.flags.writeable for array in arrays)


def test_every_bit_counts(tmp_path):
    """800 flipped bits, from the first byte to the last, 200 truncations and some additions: all refused, nothing restored."""
    path = tmp_path / "a"
    with host_cache("linear", 5) as cache:
        save(path, cache, sampler=SAMPLER)
        content = path.read_bytes()
        versions = [content[:size] for size in np.linspace(0, len(content) - 1, 200).astype(int)]
        versions += [content + more for more in (b"\0", content[-32:], content)]
        for bit in {*np.linspace(0, 8 * len(content) - 1, 760).astype(int).tolist(), *range(16, 60)}:
            flipped = bytearray(content)
            flipped[bit // 8] ^= 1 << bit % 8
            versions.append(bytes(flipped))
        assert len(versions) >= 1000
        with Unchanged(cache):
            for version in versions:
                path.write_bytes(version)
                with pytest.raises(SnapshotError):
                    load(path, cache)
        path.write_bytes(content)
        assert load(path, cache).reused_tokens == 5


def rewritten(content, place, value):
    """A file whose header has another value at a place, or none for a value ``del``, with a hash that is right."""
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    description = json.loads(header["__metadata__"]["description"])
    *path, last = place.split("/")
    inner = {"header": header, "description": description}
    for key in path:
        inner = inner[int(key) if isinstance(inner, list) else key]
    if value == "del":
        del inner[last]
    else:
        inner[last] = value
    if path[0] == "description":
        header["__metadata__"]["description"] = json.dumps(description)
    text = json.dumps(header).encode()
    body = len(text).to_bytes(8, "little") + text + content[start:-32]
    return body + hashlib.sha256(body).digest()


FORMAT = "header/__metadata__/trt_kvcache_snapshot"
UNKNOWN, DISAGREES = "expected a snapshot that trt-kvcache saved, got ", "expected a snapshot, got a file with contradicting contents"

CHANGES = [
    (FORMAT, "2", "format: this package reads up to 1, got 2. A newer trt-kvcache saved it: upgrade."),
    *((FORMAT, value, f"format: expected a number of 1 or more, got '{value[:4]}") for value in ("0", "one", "9" * 5000)),
    *((place, value, UNKNOWN) for place, value in ((FORMAT, "del"), ("header/__metadata__", None))),
    ("header/__metadata__/description", "del", DISAGREES),
    ("header/__metadata__/description", "[]", DISAGREES),
    *(("header/tokens/dtype", value, DISAGREES) for value in ("F32", "F64")),
    *(("header/tokens/shape", value, DISAGREES) for value in ([1, 5], [-5], 5, [1 << 70])),
    ("header/tokens/data_offsets", [4, 24], DISAGREES),
    ("header/tokens", None, DISAGREES),
    ("header/sha256", "del", DISAGREES),
    ("header/k_cache_0", "del", DISAGREES),
    ("description/sampler", {"seed": "x", "counter": 1}, DISAGREES),
    ("description/sampler", 7, DISAGREES),
    ("description/model", {"fingerprint": ""}, DISAGREES),
    ("description/model/rope", "linear", DISAGREES),
    ("description/slot", {}, DISAGREES),
    ("description/slot/mamba", None, DISAGREES),
    ("description/slot/kv/dtype", "bfloat16", DISAGREES),
    ("description/slot/kv/layers/1/num_kv_heads", 3, DISAGREES),
    ("description/slot/mamba/num_layers", 10**15, DISAGREES),
]


def test_foreign_files(tmp_path):
    path = tmp_path / "a"
    with host_cache("hybrid", 5) as cache:
        save(path, cache, sampler=SAMPLER)
        content = path.read_bytes()
        path.write_bytes(rewritten(content, FORMAT, "1"))
        assert Snapshot.read(path).tokens == tuple(TOKENS)
        save_file({"x": np.ones(100, np.float32)}, tmp_path / "b")
        foreign = (tmp_path / "b").read_bytes()
        for version, text in (
            *((rewritten(content, place, value), text) for place, value, text in CHANGES),
            (rewritten(content + bytes(32), FORMAT, "1"), DISAGREES),
            (foreign, UNKNOWN),
            ((50000).to_bytes(8, "little") + b"[" * 50000 + bytes(32), f"{UNKNOWN}50040 bytes"),
            (b"something else altogether, and long enough to be a header.", f"{UNKNOWN}58 bytes"),
            (b"", f"{UNKNOWN}0 bytes"),
        ):
            path.write_bytes(version)
            refused(f"{path}: {text}", path, cache)
        for other in (tmp_path, tmp_path / "nothing"):
            refused(f"{other}: cannot be read: ", other, cache)


def hybrid(heads=((2, 16),), dtype="float16", **mamba):
    types = [LayerType.ATTENTION] * len(heads) + [LayerType.MAMBA] * 2
    config = HybridCacheConfig(layer_types=types, kv=kv_config(heads, dtype=dtype), mamba=mamba_config(**mamba))
    return HybridCacheManager(config, memory=HostMemory())


def reset(cache, *lengths):
    stream = cache.memory.create_stream()
    cache.reset_for_new_sequences(lengths, stream=stream)
    fill_all(cache, stream)


def test_other_models_and_caches(tmp_path):
    path = tmp_path / "a"
    with hybrid() as cache:
        reset(cache, 5)
        save(path, cache)
        other = "fingerprint: expected that of the model, 000000000000..., got 5f5f5f5f5f5f.... It "
        for fingerprint, rope, text in (
            ("0" * 64, MODEL.rope, other),
            (MODEL.fingerprint, None, "rope: expected None as the model has, got {'rope_type': 'linear', "),
            (MODEL.fingerprint, {**MODEL.rope, "factor": 8.0}, "rope: expected {"),
        ):
            refused(f"snapshot: {text}", path, cache, model=ModelIdentity(fingerprint=fingerprint, rope=rope))
    for cache, text in [
        (hybrid(((2, 16), (2, 16))), "attention layers: expected 2, got 1"),
        (hybrid(((3, 16),)), "num_kv_heads of attention layer 0: expected 3, got 2"),
        (hybrid(((2, 32),)), "head_dim of attention layer 0: expected 32, got 16"),
        (hybrid(dtype="bfloat16"), "dtype of K and V: expected bfloat16, got float16"),
        (hybrid(state_size=4), "state_size of recurrent layers: expected 4, got 5"),
        (hybrid(conv_dtype="float32"), "conv_dtype of recurrent layers: expected float32, got float16"),
        (make_cache("manager", HostMemory()), "attention layers: expected 3, got 1"),
        (host_cache("states"), "attention layers: expected 0, got 1"),
        (KVCacheManager(kv_config([(2, 16)]), memory=HostMemory()), "recurrent layers: expected 0, got 2"),
    ]:
        reset(cache, 3, 4)
        refused(f"snapshot: {text}. It was saved from another cache.", path, cache)
    with hybrid(ping_pong=True) as cache:
        assert load(path, cache).reused_tokens == 5
    for dtype, fits in (("float16", True), ("int8", False)):
        caches = []
        for scale in (0.5, 2.0):
            layers = [KVLayerConfig(num_kv_heads=1, head_dim=16, k_scale=scale)]
            config = KVCacheConfig(layers=layers, max_batch_size=5, max_sequence_length=7, dtype=dtype)
            caches.append(KVCacheManager(config, memory=HostMemory()))
        reset(caches[0], 5)
        save(path, caches[0])
        for cache in caches:
            if fits or cache is caches[0]:
                assert load(path, cache).reused_tokens == 5
            else:
                refused("snapshot: k_scale of attention layer 0: expected 2.0, got 0.5", path, cache)


def test_arguments_that_change_nothing(tmp_path, memory, stream):
    path = tmp_path / "a"
    with cache_holding("manager", memory, stream, 5) as cache:
        save(path, cache)
        for call, error in [
            (partial(load, path, cache, 5), SlotError),
            (partial(load, path, cache, -1), SlotError),
            (partial(save, path, cache, 1), SlotError),
            (partial(save, path, cache, tokens=[*TOKENS, 1]), RangeError),
            (partial(save, path, cache, tokens=[1], pending=[-1]), RangeError),
            (partial(ModelIdentity, fingerprint=""), ConfigError),
            *((partial(ModelIdentity, fingerprint="x", rope=rope), ConfigError) for rope in ("linear", {"a": {1}}, {"a": np.inf})),
            (partial(SamplerState, seed=-1, counter=0), RangeError),
            (partial(SamplerState, seed=1 << 63, counter=0), RangeError),
            (partial(SamplerState, seed=None, counter=0), RangeError),
            (partial(SamplerState, seed=0, counter=True), RangeError),
            (partial(save, path, cache, model="x"), ConfigError),
            (partial(save, path, cache, sampler=(1, 2)), ConfigError),
            (partial(load, path, cache, model="x"), ConfigError),
            (partial(load_snapshot, path, cache, 1, model=None, stream=stream), ConfigError),
            *((partial(save, other, cache), IsADirectoryError) for other in (tmp_path, ".", "/")),
            *((partial(read_snapshots, given, cache, MODEL), ShapeError) for given in (None, 3, b"a", [], [path, 3], [path] * 6)),
        ]:
            with Unchanged(cache), pytest.raises(error):
                call()
        assert [one.tokens for one in read_snapshots((path, str(path)), cache, MODEL)] == [tuple(TOKENS)] * 2
        assert os.listdir(tmp_path) == ["a"]
        assert Snapshot.read(path).tokens == tuple(TOKENS)
        model = ModelIdentity(fingerprint="x", rope={"a": (1, 2), 3: None})
        save(path, cache, model=model)
        assert load(path, cache, model=model).snapshot.model == model == ModelIdentity(fingerprint="x", rope={"a": [1, 2], "3": None})
        save(path, cache)
    with KVCacheManager(kv_config(max_sequence_length=4), memory=memory) as short:
        with Unchanged(short), pytest.raises(CapacityError) as caught:
            load(path, short, 0)
        assert str(caught.value) == "snapshot: it holds 5 tokens, max_sequence_length is 4. Nothing was changed."
        assert load(path, short, 0, prompt=TOKENS[:3]).reused_tokens == 2
        for place in ("cache", "host"):
            prompts = PromptCache(short, max_bytes=1 << 20, place=place)
            Snapshot.read(path).restore_entry(prompts, model=MODEL, stream=stream)
            match = prompts.find([*TOKENS, 1])
            with Unchanged(short), pytest.raises(RangeError, match=r"^tokens to restore: expected an integer from 0 to 4, got 5\.$"):
                prompts.restore(match, 0, stream=stream)


@pytest.mark.parametrize("at", ["fsync", "replace"])
def test_a_file_appears_complete_or_not_at_all(tmp_path, monkeypatch, at):
    path = tmp_path / "a"
    with host_cache("manager", 5) as cache:
        save(path, cache)
        before = path.read_bytes()

        def fail(*_):
            raise OSError("no space left")

        with monkeypatch.context() as patch:
            patch.setattr(os, at, fail)
            with pytest.raises(OSError, match="no space left"):
                save(path, cache, tokens=TOKENS[:3])
        assert (os.listdir(tmp_path), path.read_bytes()) == (["a"], before)
        save(path, cache, tokens=TOKENS[:3])
        assert Snapshot.read(path).tokens == tuple(TOKENS[:3])


GO_ON = """
import json, sys
from tests.helpers.hybrid_model import HybridModel, hybrid_cache
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


def test_another_process_goes_on_with_the_same_tokens(tmp_path):
    with hybrid_cache(HostMemory()) as cache:
        model = HybridModel(cache)
        cache.reset_for_new_sequences([0, 0, 0], stream=model.stream)
        model.run(1, [9, 9])
        tokens, _ = model.generate(2, [3, 17, 5, 29, 11], 4)
        identity = ModelIdentity(fingerprint="hybrid")
        held = [3, 17, 5, 29, 11, *tokens[:3]]
        with pytest.raises(RangeError, match=r"^tokens: slot 2 holds 9; expected exactly as many"):
            save_snapshot(tmp_path / "a", cache, 2, tokens=held, model=identity, stream=model.stream)
        save_snapshot(tmp_path / "a", cache, 2, tokens=[*held, tokens[3]], model=identity, pending=[30], stream=model.stream)
        expected, logits = model.generate(2, [30], 6)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    run = [sys.executable, "-c", GO_ON, str(tmp_path / "a")]
    result = subprocess.run(run, capture_output=True, text=True, timeout=60, check=False, env=environment)
    assert result.returncode == 0, result.stderr
    assert len(set(expected)) > 3
    assert json.loads(result.stdout) == [expected, [row.tobytes().hex() for row in logits], False]
