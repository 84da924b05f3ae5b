"""Snapshots: what comes back, from which file, and that any other file is refused with the cache as it was."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cache_cases import Image, Unchanged, fill_all, kv_config, make_cache, mamba_config
from hybrid_model import HybridModel, hybrid_cache
from safetensors import safe_open
from safetensors.numpy import save_file
from slot_cases import SEQUENCE_KINDS, cache_holding, move

from trt_kvcache import HostMemory, HybridCacheConfig, HybridCacheManager, KVCacheConfig, KVCacheManager, KVLayerConfig, KVLayout, LayerType
from trt_kvcache.checkpoint import RopeConfig
from trt_kvcache.errors import CapacityError, ConfigError, RangeError, SlotError, SnapshotError
from trt_kvcache.prompt_cache import PromptCache
from trt_kvcache.snapshot import Snapshot, load_snapshot, save_snapshot
from trt_kvcache.snapshot_records import ModelIdentity, SamplerState

MODEL = ModelIdentity(fingerprint="5f" * 32, rope=RopeConfig(kind="linear", theta=5e5, factor=4.0).to_dict())
SAMPLER = SamplerState(seed=(1 << 63) - 1, counter=12)
OTHER = {KVLayout.COMBINED: KVLayout.SEPARATE, KVLayout.SEPARATE: KVLayout.COMBINED}
TOKENS = [7, 0, 2147483647, 3, 11]


# --- there and back ---


@pytest.mark.parametrize("kind", SEQUENCE_KINDS)
@pytest.mark.parametrize("layout", list(KVLayout), ids=lambda layout: layout.value)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float8_e4m3fn", "int8"])
def test_a_slot_comes_back_in_another_cache(tmp_path, memory, stream, kind, layout, dtype):
    path = tmp_path / "a.safetensors"
    with cache_holding(kind, memory, stream, 1, 5, layout=layout, dtype=dtype) as source:
        taken = Image(source)
        saved = save_snapshot(path, source, 1, tokens=TOKENS, model=MODEL, pending=[9], sampler=SAMPLER, stream=stream)
        taken.check(source)
    with cache_holding(kind, memory, stream, 2, 3, layout=OTHER[layout], dtype=dtype, max_sequence_length=9) as target:
        expected = Image(target)
        loaded = load_snapshot(path, target, 4, model=MODEL, stream=stream)
        move(expected, 4, taken, 1, 5)
        expected.check(target)
        assert target.host_kv_cache_lengths == (2, 3)
    assert loaded.reused_tokens == 5
    for snapshot in (saved, loaded.snapshot):
        assert (snapshot.tokens, snapshot.pending, snapshot.sampler, snapshot.model) == (tuple(TOKENS), (9,), SAMPLER, MODEL)
    assert os.listdir(tmp_path) == ["a.safetensors"]


def test_nothing_is_a_sequence_too(tmp_path, memory, stream):
    with cache_holding("hybrid", memory, stream, 0) as cache:
        save_snapshot(tmp_path / "a", cache, 0, tokens=[], model=MODEL, pending=[4, 5], stream=stream)
        with Unchanged(cache):
            loaded = load_snapshot(tmp_path / "a", cache, 1, model=MODEL, stream=stream)
    assert (loaded.reused_tokens, loaded.snapshot.tokens, loaded.snapshot.pending, loaded.snapshot.sampler) == (0, (), (4, 5), None)


@pytest.mark.parametrize("kind", SEQUENCE_KINDS)
@pytest.mark.parametrize("place", ["cache", "host"])
def test_an_entry_of_a_prompt_cache(tmp_path, memory, stream, kind, place):
    path = tmp_path / "entry"
    with cache_holding(kind, memory, stream, 5) as source:
        taken = Image(source)
        prompts = PromptCache(source, max_bytes=1 << 20, place=place)
        Snapshot.of_entry(prompts, prompts.insert(TOKENS, 0, stream=stream), model=MODEL, stream=stream).write(path)
    with cache_holding(kind, memory, stream, 0) as target:
        prompts = PromptCache(target, max_bytes=1 << 20, place=place)
        with Unchanged(target), pytest.raises(SnapshotError, match="fingerprint"):
            Snapshot.read(path).restore_entry(prompts, model=ModelIdentity(fingerprint="other"), stream=stream)
        entry = Snapshot.read(path).restore_entry(prompts, model=MODEL, stream=stream)
        assert (entry.tokens.tolist(), prompts.nbytes) == (TOKENS, entry.nbytes)
        expected = Image(target)
        prompts.restore(prompts.find([*TOKENS, 1]), 2, stream=stream)
        move(expected, 2, taken, 0, 5)
        expected.check(target)
        assert Snapshot.read(path).restore_entry(PromptCache(target), model=MODEL, stream=stream) is None  # it is off


def test_what_a_prompt_shares_with_it_is_restored(tmp_path, memory, stream):
    for kind, cases in {
        "manager": {(7, 0, 2147483647, 4): 3, (7, 0): 1, tuple(TOKENS): 4, (*TOKENS, 6): 5, (0, 7): 0, (): 0},
        "linear": {(7, 0, 2147483647, 4): 0, (7, 0): 0, tuple(TOKENS): 0, (*TOKENS, 6): 5, (0, 7): 0, (): 0},
    }.items():
        with cache_holding(kind, memory, stream, 5) as cache:
            save_snapshot(tmp_path / kind, cache, 0, tokens=TOKENS, model=MODEL, stream=stream)
            taken = Image(cache)
            for prompt, reused in cases.items():
                fill_all(cache, stream, 3)
                expected = Image(cache)
                loaded = load_snapshot(tmp_path / kind, cache, 2, model=MODEL, prompt=prompt, stream=stream)
                move(expected, 2, taken, 0, reused)
                expected.check(cache)
                assert (loaded.reused_tokens, loaded.snapshot.reusable(prompt)) == (reused, reused)


GO_ON = """
import json, sys
from hybrid_model import HybridModel, hybrid_cache
from trt_kvcache import HostMemory, KVLayout
from trt_kvcache.snapshot import load_snapshot
from trt_kvcache.snapshot_records import ModelIdentity

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
    tests, root = Path(__file__).parent, Path(__file__).parent.parent
    environment = {**os.environ, "PYTHONPATH": f"{root}{os.pathsep}{tests}", "OMP_NUM_THREADS": "1"}
    run = [sys.executable, "-c", GO_ON, str(tmp_path / "a")]
    result = subprocess.run(run, capture_output=True, text=True, timeout=60, check=False, env=environment)
    assert result.returncode == 0, result.stderr
    assert len(set(expected)) > 3
    assert json.loads(result.stdout) == [expected, [row.tobytes().hex() for row in logits], False]


# --- the file ---


def test_any_reader_of_safetensors_can_look_at_it(tmp_path):
    memory = HostMemory()
    stream = memory.create_stream()
    path = tmp_path / "a.safetensors"
    with cache_holding("hybrid", memory, stream, 5) as cache:
        save_snapshot(path, cache, 0, tokens=TOKENS, model=MODEL, pending=[1], sampler=SAMPLER, stream=stream)
        kv = [tensor.numpy() for tensor in cache.capture_kv_cache(0, 5, stream=stream)]
        recurrent = [tensor.numpy()[np.newaxis] for tensor in cache.capture_recurrent_states(0, stream=stream)]
    with safe_open(path, framework="numpy") as file:
        counts = {"k_cache": 3, "v_cache": 3, "recurrent_state": 2, "conv_state": 2}
        names = {f"{name}_{index}" for name, count in counts.items() for index in range(count)}
        assert set(file.keys()) == {"tokens", "pending_tokens", "sha256", *names}
        assert file.get_tensor("tokens").tolist() == TOKENS
        for name, arrays in (("k_cache", [k for k, _ in kv]), ("v_cache", [v for _, v in kv]), ("recurrent_state", recurrent)):
            for index, array in enumerate(arrays):
                found = file.get_tensor(f"{name}_{index}")
                assert (found.dtype, found.shape, found.tobytes()) == (array.dtype, array.shape, array.tobytes())
        metadata = file.metadata()
    assert metadata["trt_kvcache_snapshot"] == "1"
    description = json.loads(metadata["description"])
    assert description["model"] == {"fingerprint": MODEL.fingerprint, "rope": {"rope_type": "linear", "rope_theta": 5e5, "factor": 4.0}}
    assert description["sampler"] == {"seed": SAMPLER.seed, "counter": 12}
    assert description["slot"] == {"kv": kv_config().to_dict(), "mamba": mamba_config().to_dict()}
    content = path.read_bytes()
    assert content[-32:] == hashlib.sha256(content[:-32]).digest()
    odd = mamba_config(num_layers=1, num_heads=1, recurrent_dtype="float16", conv_dtype="float32")
    with HybridCacheManager(HybridCacheConfig(layer_types=[LayerType.MAMBA], mamba=odd), memory=memory) as cache:
        cache.reset_for_new_sequences([0], stream=stream)
        save_snapshot(path, cache, 0, tokens=[], model=MODEL, stream=stream)
    saved = Snapshot.read(path).contents.saved
    assert all(array.flags.aligned and not array.flags.writeable for array in [*saved.rows, *saved.states])


def test_every_bit_counts(tmp_path):
    """800 flipped bits, from the first byte to the last, 200 truncations and some additions: all refused, nothing restored."""
    memory = HostMemory()
    stream = memory.create_stream()
    path, damaged = tmp_path / "a", tmp_path / "b"
    with cache_holding("linear", memory, stream, 5) as cache:
        save_snapshot(path, cache, 0, tokens=TOKENS, model=MODEL, sampler=SAMPLER, stream=stream)
        content = path.read_bytes()
        bits = {*np.linspace(0, 8 * len(content) - 1, 760).astype(int).tolist(), *range(16, 60)}
        versions = [content[:size] for size in np.linspace(0, len(content) - 1, 200).astype(int)]
        versions += [content + more for more in (b"\0", content[-32:], content)]
        for bit in bits:
            flipped = bytearray(content)
            flipped[bit // 8] ^= 1 << bit % 8
            versions.append(bytes(flipped))
        assert len(versions) >= 1000
        with Unchanged(cache):
            for version in versions:
                damaged.write_bytes(version)
                with pytest.raises(SnapshotError):
                    load_snapshot(damaged, cache, 1, model=MODEL, stream=stream)
        damaged.write_bytes(content)
        assert load_snapshot(damaged, cache, 1, model=MODEL, stream=stream).reused_tokens == 5


def rewritten(content: bytes, change: Any) -> bytes:
    """A file whose header was changed, with a hash that is right."""
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    change(header)
    text = json.dumps(header).encode()
    body = len(text).to_bytes(8, "little") + text + content[start:-32]
    return body + hashlib.sha256(body).digest()


def set_description(*path: Any, value: Any) -> Any:
    def change(header: dict[str, Any]) -> None:
        description = json.loads(header["__metadata__"]["description"])
        inner = description
        for key in path[:-1]:
            inner = inner[key]
        inner[path[-1]] = value
        header["__metadata__"]["description"] = json.dumps(description)

    return change


def set_header(*path: Any, value: Any) -> Any:
    def change(header: dict[str, Any]) -> None:
        for key in path[:-1]:
            header = header[key]
        header[path[-1]] = value

    return change


FORMAT = ("__metadata__", "trt_kvcache_snapshot")
DISAGREES = "expected a snapshot, got a file that disagrees with itself"
CHANGES = [
    (set_header(*FORMAT, value="2"), "format: this package reads up to 1, got 2. A newer trt-kvcache saved it: upgrade."),
    (set_header(*FORMAT, value="0"), "format: expected a number of 1 or more, got '0'."),
    (set_header(*FORMAT, value="one"), "format: expected a number of 1 or more, got 'one'."),
    (set_header(*FORMAT, value="9" * 5000), "format: expected a number of 1 or more, got '9999"),
    (lambda header: header["__metadata__"].pop("trt_kvcache_snapshot"), "expected a snapshot that trt-kvcache saved, got "),
    (set_header("__metadata__", value=None), "expected a snapshot that trt-kvcache saved, got "),
    (lambda header: header["__metadata__"].pop("description"), DISAGREES),
    (set_header("__metadata__", "description", value="[]"), DISAGREES),
    (set_header("tokens", "dtype", value="F32"), DISAGREES),
    (set_header("tokens", "dtype", value="F64"), DISAGREES),
    (set_header("tokens", "shape", value=[1, 5]), DISAGREES),
    (set_header("tokens", "shape", value=[-5]), DISAGREES),
    (set_header("tokens", "shape", value=5), DISAGREES),
    (set_header("tokens", "shape", value=[1 << 70]), DISAGREES),
    (set_header("tokens", "data_offsets", value=[4, 24]), DISAGREES),
    (set_header("tokens", value=None), DISAGREES),
    (lambda header: header.pop("sha256"), DISAGREES),
    (lambda header: header.update(extra=header.pop("sha256")), DISAGREES),
    (lambda header: header.update(k_cache_9=header.pop("k_cache_0")), DISAGREES),
    (set_description("sampler", value={"seed": "x", "counter": 1}), DISAGREES),
    (set_description("sampler", value=7), DISAGREES),
    (set_description("model", value={"fingerprint": ""}), DISAGREES),
    (set_description("model", "rope", value="linear"), DISAGREES),
    (set_description("slot", value={}), DISAGREES),
    (set_description("slot", "mamba", value=None), DISAGREES),
    (set_description("slot", "kv", "dtype", value="bfloat16"), DISAGREES),
    (set_description("slot", "kv", "layers", 1, "num_kv_heads", value=3), DISAGREES),
    (set_description("slot", "mamba", "num_layers", value=10**15), DISAGREES),
]


def test_foreign_files(tmp_path):
    memory = HostMemory()
    stream = memory.create_stream()
    path, other = tmp_path / "a", tmp_path / "b"
    (tmp_path / "folder").mkdir()
    with cache_holding("hybrid", memory, stream, 5) as cache:
        save_snapshot(path, cache, 0, tokens=TOKENS, model=MODEL, sampler=SAMPLER, stream=stream)
        content = path.read_bytes()
        other.write_bytes(rewritten(content, lambda header: None))
        assert Snapshot.read(other).tokens == tuple(TOKENS)
        for change, text in CHANGES:
            other.write_bytes(rewritten(content, change))
            with Unchanged(cache), pytest.raises(SnapshotError) as caught:
                load_snapshot(other, cache, 1, model=MODEL, stream=stream)
            assert str(caught.value).startswith(f"{other}: {text}")
        other.write_bytes(rewritten(content + bytes(32), lambda header: None))
        with Unchanged(cache), pytest.raises(SnapshotError, match="disagrees with itself"):
            load_snapshot(other, cache, 1, model=MODEL, stream=stream)
        save_file({"x": np.ones(100, np.float32)}, other)
        (tmp_path / "deep").write_bytes((50000).to_bytes(8, "little") + b"[" * 50000 + bytes(32))
        (tmp_path / "text").write_text("something else altogether, and long enough to be a header.")
        (tmp_path / "empty").touch()
        for name, text in [
            ("b", "expected a snapshot that trt-kvcache saved, got "),
            ("deep", "expected a snapshot that trt-kvcache saved, got 50040 bytes"),
            ("text", "expected a snapshot that trt-kvcache saved, got 58 bytes"),
            ("empty", "expected a snapshot that trt-kvcache saved, got 0 bytes"),
            ("folder", "cannot be read: "),
            ("nothing", "cannot be read: "),
        ]:
            with Unchanged(cache), pytest.raises(SnapshotError) as caught:
                load_snapshot(tmp_path / name, cache, 1, model=MODEL, stream=stream)
            assert str(caught.value).startswith(f"{tmp_path / name}: {text}")


def test_other_models_and_caches(tmp_path):
    memory = HostMemory()
    stream = memory.create_stream()
    path = tmp_path / "a"
    scaled = [KVLayerConfig(num_kv_heads=1, head_dim=16, k_scale=scale) for scale in (0.5, 2.0)]

    def hybrid(heads: Any = ((2, 16),), dtype: str = "float16", **mamba: Any) -> Any:
        types = [LayerType.ATTENTION] * len(heads) + [LayerType.MAMBA] * 2
        return HybridCacheManager(
            HybridCacheConfig(layer_types=types, kv=kv_config(heads, dtype=dtype), mamba=mamba_config(**mamba)), memory=memory
        )

    def scaled_cache(layer: KVLayerConfig, dtype: str) -> Any:
        return KVCacheManager(KVCacheConfig(layers=[layer], max_batch_size=5, max_sequence_length=7, dtype=dtype), memory=memory)

    with hybrid() as cache:
        cache.reset_for_new_sequences([5], stream=stream)
        save_snapshot(path, cache, 0, tokens=TOKENS, model=MODEL, stream=stream)
    with hybrid() as cache:
        for model, text in [
            (
                ModelIdentity(fingerprint="0" * 64, rope=MODEL.rope),
                "fingerprint: expected that of the model, 000000000000..., got 5f5f5f5f5f5f.... It ",
            ),
            (ModelIdentity(fingerprint=MODEL.fingerprint), "rope: expected None as the model has, got {'rope_type': 'linear', "),
            (ModelIdentity(fingerprint=MODEL.fingerprint, rope={**MODEL.rope, "factor": 8.0}), "rope: expected {"),
        ]:
            with Unchanged(cache), pytest.raises(SnapshotError) as caught:
                load_snapshot(path, cache, 1, model=model, stream=stream)
            assert str(caught.value).startswith(f"snapshot: {text}")
    for make, text in [
        (lambda: hybrid(((2, 16), (2, 16))), "attention layers: expected 2, got 1"),
        (lambda: hybrid(((3, 16),)), "num_kv_heads of attention layer 0: expected 3, got 2"),
        (lambda: hybrid(((2, 32),)), "head_dim of attention layer 0: expected 32, got 16"),
        (lambda: hybrid(dtype="bfloat16"), "dtype of K and V: expected bfloat16, got float16"),
        (lambda: hybrid(state_size=4), "state_size of recurrent layers: expected 4, got 5"),
        (lambda: hybrid(conv_dtype="float32"), "conv_dtype of recurrent layers: expected float32, got float16"),
        (lambda: make_cache("manager", memory), "attention layers: expected 3, got 1"),
        (lambda: cache_holding("states", memory, stream), "attention layers: expected 0, got 1"),
        (lambda: KVCacheManager(kv_config([(2, 16)]), memory=memory), "recurrent layers: expected 0, got 2"),
    ]:
        with make() as cache:
            cache.reset_for_new_sequences([3, 4], stream=stream)
            fill_all(cache, stream)
            with Unchanged(cache), pytest.raises(SnapshotError) as caught:
                load_snapshot(path, cache, 1, model=MODEL, stream=stream)
            assert str(caught.value) == f"snapshot: {text}. It was saved from another cache."
    with hybrid(ping_pong=True) as cache:
        assert load_snapshot(path, cache, 1, model=MODEL, stream=stream).reused_tokens == 5
    for dtype, fits in (("float16", True), ("int8", False)):
        with scaled_cache(scaled[0], dtype) as cache:
            cache.reset_for_new_sequences([5], stream=stream)
            save_snapshot(path, cache, 0, tokens=TOKENS, model=MODEL, stream=stream)
            assert load_snapshot(path, cache, 1, model=MODEL, stream=stream).reused_tokens == 5
        with scaled_cache(scaled[1], dtype) as cache:
            if fits:
                assert load_snapshot(path, cache, 1, model=MODEL, stream=stream).reused_tokens == 5
                continue
            with Unchanged(cache), pytest.raises(SnapshotError, match=r"k_scale of attention layer 0: expected 2\.0, got 0\.5"):
                load_snapshot(path, cache, 1, model=MODEL, stream=stream)


def test_arguments_that_change_nothing(tmp_path, memory, stream):
    path = tmp_path / "a"
    with cache_holding("manager", memory, stream, 5) as cache:
        save_snapshot(path, cache, 0, tokens=TOKENS, model=MODEL, stream=stream)
        for slot in (5, -1):
            with Unchanged(cache), pytest.raises(SlotError):
                load_snapshot(path, cache, slot, model=MODEL, stream=stream)
        for call, error in [
            (lambda: save_snapshot(path, cache, 1, tokens=TOKENS, model=MODEL, stream=stream), SlotError),
            (lambda: save_snapshot(path, cache, 0, tokens=[*TOKENS, 1], model=MODEL, stream=stream), RangeError),
            (lambda: save_snapshot(path, cache, 0, tokens=[1], pending=[-1], model=MODEL, stream=stream), RangeError),
            (lambda: ModelIdentity(fingerprint=""), ConfigError),
            (lambda: ModelIdentity(fingerprint="x", rope="linear"), ConfigError),
            (lambda: SamplerState(seed=-1, counter=0), RangeError),
            (lambda: SamplerState(seed=0, counter=True), RangeError),
        ]:
            with Unchanged(cache), pytest.raises(error):
                call()
        assert Snapshot.read(path).tokens == tuple(TOKENS)
    with KVCacheManager(kv_config(max_sequence_length=4), memory=memory) as short:
        with Unchanged(short), pytest.raises(CapacityError) as caught:
            load_snapshot(path, short, 0, model=MODEL, stream=stream)
        assert str(caught.value) == "snapshot: it holds 5 tokens, max_sequence_length is 4. Nothing was changed."
        assert load_snapshot(path, short, 0, model=MODEL, prompt=TOKENS[:3], stream=stream).reused_tokens == 2
        for place in ("cache", "host"):
            prompts = PromptCache(short, max_bytes=1 << 20, place=place)
            Snapshot.read(path).restore_entry(prompts, model=MODEL, stream=stream)
            match = prompts.find([*TOKENS, 1])
            with Unchanged(short), pytest.raises(RangeError, match=r"^tokens to restore: expected an integer from 0 to 4, got 5\.$"):
                prompts.restore(match, 0, stream=stream)


@pytest.mark.parametrize("at", ["fsync", "replace"])
def test_a_file_appears_complete_or_not_at_all(tmp_path, monkeypatch, at):
    memory = HostMemory()
    stream = memory.create_stream()
    path = tmp_path / "a"
    with cache_holding("manager", memory, stream, 5) as cache:
        save_snapshot(path, cache, 0, tokens=TOKENS, model=MODEL, stream=stream)
        before = path.read_bytes()

        def fail(*_: Any) -> None:
            raise OSError("no space left")

        with monkeypatch.context() as patch:
            patch.setattr(os, at, fail)
            with pytest.raises(OSError, match="no space left"):
                save_snapshot(path, cache, 0, tokens=TOKENS[:3], model=MODEL, stream=stream)
        assert (os.listdir(tmp_path), path.read_bytes()) == (["a"], before)
        save_snapshot(path, cache, 0, tokens=TOKENS[:3], model=MODEL, stream=stream)
        assert Snapshot.read(path).tokens == tuple(TOKENS[:3])
