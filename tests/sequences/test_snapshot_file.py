"""The file of a snapshot: what any reader finds in it, and that every other file is refused with the cache as it was."""

import hashlib
import json
import os

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from tests.helpers.caches import Unchanged, kv_config, mamba_config
from tests.sequences.snapshots import MODEL, SAMPLER, TOKENS, host_cache, load, refused, rewritten, save
from trt_kvcache import HostMemory, HybridCacheConfig, HybridCacheManager, LayerType, __version__
from trt_kvcache.errors import SnapshotError
from trt_kvcache.sequences import snapshot_file
from trt_kvcache.sequences.snapshot import Snapshot
from trt_kvcache.sequences.snapshot_file import SnapshotFile


@pytest.fixture
def path(tmp_path):
    return tmp_path / "a.safetensors"


class TestAnyReader:
    """Of safetensors, without this package."""

    @pytest.fixture
    def saved(self, path):
        """The arrays of a snapshot of three attention and two recurrent layers, by name."""
        with host_cache("hybrid", 5) as cache:
            arrays = save(path, cache, pending=[1], sampler=SAMPLER).contents.arrays
        names = [f"{name}_{layer}" for layer in range(3) for name in ("k_cache", "v_cache")]
        names += [f"{name}_{layer}" for name in ("recurrent_state", "conv_state") for layer in range(2)]
        return dict(zip(names, arrays, strict=True))

    def test_finds_the_tensors_by_name(self, path, saved):
        with safe_open(path, framework="numpy") as file:
            assert set(file.keys()) == {"tokens", "pending_tokens", "sha256", *saved}

    def test_reads_them_bit_for_bit(self, path, saved):
        with safe_open(path, framework="numpy") as file:
            for name, array in saved.items():
                found = file.get_tensor(name)
                assert (found.dtype, found.shape, found.tobytes()) == (array.dtype, array.shape, array.tobytes())

    @pytest.mark.usefixtures("saved")
    def test_reads_the_tokens(self, path):
        with safe_open(path, framework="numpy") as file:
            assert (file.get_tensor("tokens").tolist(), file.get_tensor("pending_tokens").tolist()) == (TOKENS, [1])

    @pytest.mark.usefixtures("saved")
    def test_reads_what_it_is_of(self, path):
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata()
        description = json.loads(metadata["description"])
        assert description.pop("producer") == {"name": "trt-kvcache", "version": __version__}
        assert (metadata["trt_kvcache_snapshot"], description) == (
            "2",
            {
                "model": {"fingerprint": MODEL.fingerprint, "rope": {"rope_type": "linear", "rope_theta": 5e5, "factor": 4.0}},
                "sampler": {"seed": SAMPLER.seed, "counter": 12, "generated": 0},
                "slot": {"kv": kv_config().to_dict(), "mamba": mamba_config(max_sequence_length=7).to_dict()},
            },
        )

    @pytest.mark.usefixtures("saved")
    def test_finds_the_hash_of_all_before_it(self, path):
        content = path.read_bytes()
        assert content[-32:] == hashlib.sha256(content[:-32]).digest()


class TestArrays:
    @pytest.fixture
    def arrays(self, path):
        """Of odd sizes and of two dtypes, so that not every order aligns them."""
        odd = mamba_config(num_layers=1, num_heads=1, recurrent_dtype="float16", conv_dtype="float32")
        with HybridCacheManager(HybridCacheConfig(layer_types=[LayerType.MAMBA], mamba=odd), memory=HostMemory()) as cache:
            cache.reset_for_new_sequences([0], stream=cache.memory.create_stream())
            save(path, cache, tokens=[])
        return Snapshot.read(path).contents.arrays

    def test_are_aligned(self, arrays):
        assert all(array.flags.aligned for array in arrays)

    def test_are_read_only(self, arrays):
        assert not any(array.flags.writeable for array in arrays)


def test_it_may_hold_no_array(path):
    SnapshotFile({"any": [1, "x"]}, {}).write(path)
    assert SnapshotFile.read(path) == SnapshotFile({"any": [1, "x"]}, {})


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.int8, np.uint8, np.int32])
def test_arrays_come_back(path, dtype):
    arrays = {"a": np.arange(6).astype(dtype).reshape(2, 3), "b": np.zeros((0, 2), dtype), "c": np.arange(8).astype(dtype)[::2]}
    SnapshotFile({}, arrays).write(path)
    found = SnapshotFile.read(path).arrays
    assert {name: (array.dtype, array.tolist()) for name, array in found.items()} == {
        name: (array.dtype, array.tolist()) for name, array in arrays.items()
    }


class TestDamage:
    """Every bit counts, from the first byte to the last."""

    @pytest.fixture
    def cache(self):
        with host_cache("linear", 5) as cache:
            yield cache

    @pytest.fixture
    def content(self, path, cache):
        save(path, cache, sampler=SAMPLER)
        return path.read_bytes()

    def check(self, path, cache, versions):
        with Unchanged(cache):
            for version in versions:
                path.write_bytes(version)
                with pytest.raises(SnapshotError):
                    load(path, cache)

    def test_flipped_bits(self, path, cache, content):
        """Some of everywhere, and all of the first bytes, which say how long the header is."""
        versions = []
        for bit in {*np.linspace(0, 8 * len(content) - 1, 150).astype(int).tolist(), *range(16, 60)}:
            flipped = bytearray(content)
            flipped[bit // 8] ^= 1 << bit % 8
            versions.append(bytes(flipped))
        self.check(path, cache, versions)

    def test_truncations(self, path, cache, content):
        self.check(path, cache, [content[:size] for size in np.linspace(0, len(content) - 1, 60).astype(int)])

    def test_additions(self, path, cache, content):
        self.check(path, cache, [content + more for more in (b"\0", content[-32:], content)])

    def test_the_file_as_it_was_is_loaded(self, path, cache, content):
        path.write_bytes(content)
        assert load(path, cache).reused_tokens == 5


@pytest.fixture(scope="module")
def content(tmp_path_factory):
    """The bytes of a snapshot of a hybrid."""
    path = tmp_path_factory.mktemp("snapshot") / "a"
    with host_cache("hybrid", 5) as cache:
        save(path, cache, sampler=SAMPLER)
    return path.read_bytes()


@pytest.fixture
def target():
    with host_cache("hybrid", 5) as cache:
        yield cache


FORMAT = "__metadata__/trt_kvcache_snapshot"
UNKNOWN = "expected a snapshot that trt-kvcache saved, got "
CONTRADICTS = "expected a snapshot, got a file with contradicting contents"

CHANGES = [
    (FORMAT, "3", "format: this package reads up to 2, got 3. A newer trt-kvcache saved it: upgrade."),
    (FORMAT, "0", "format: expected a number of 1 or more, got '0'"),
    (FORMAT, "one", "format: expected a number of 1 or more, got 'one'"),
    (FORMAT, "9" * 5000, "format: expected a number of 1 or more, got '9999"),
    (FORMAT, 1, "format: expected a number of 1 or more, got 1"),
    (FORMAT, "del", UNKNOWN),
    ("__metadata__", None, UNKNOWN),
    ("__metadata__/description", "del", CONTRADICTS),
    ("__metadata__/description", "[]", CONTRADICTS),
    ("tokens/dtype", "F32", CONTRADICTS),
    ("tokens/dtype", "F64", CONTRADICTS),
    ("tokens/shape", [1, 5], CONTRADICTS),
    ("tokens/shape", [-5], CONTRADICTS),
    ("tokens/shape", 5, CONTRADICTS),
    ("tokens/shape", [1 << 70], CONTRADICTS),
    ("tokens/data_offsets", [4, 24], CONTRADICTS),
    ("tokens", None, CONTRADICTS),
    ("sha256", "del", CONTRADICTS),
    ("k_cache_0", "del", CONTRADICTS),
    ("description/sampler", {"seed": "x", "counter": 1}, CONTRADICTS),
    ("description/sampler", 7, CONTRADICTS),
    ("description/model", {"fingerprint": ""}, CONTRADICTS),
    ("description/model/rope", "linear", CONTRADICTS),
    ("description/slot", {}, CONTRADICTS),
    ("description/slot/mamba", None, CONTRADICTS),
    ("description/slot/kv/dtype", "bfloat16", CONTRADICTS),
    ("description/slot/kv/layers/1/num_kv_heads", 3, CONTRADICTS),
    ("description/slot/mamba/num_layers", 10**15, CONTRADICTS),
]


class TestForeignFiles:
    """With a hash that is right: somebody made them so."""

    def test_a_header_that_is_only_written_differently(self, path, content):
        path.write_bytes(rewritten(content, FORMAT, "2"))
        assert Snapshot.read(path).tokens == tuple(TOKENS)

    def test_format_1_does_not_know_which_scales_there_are(self, path, content, target):
        path.write_bytes(rewritten(rewritten(content, FORMAT, "1"), "description/slot/kv/scales", "del"))
        assert load(path, target).reused_tokens == 5

    @pytest.mark.parametrize(("place", "value", "text"), CHANGES, ids=[f"{place}={value!r:.20}" for place, value, _ in CHANGES])
    def test_a_header_that_says_something_else(self, path, content, target, place, value, text):
        path.write_bytes(rewritten(content, place, value))
        refused(f"{path}: {text}", path, target)

    def test_bytes_that_no_tensor_has(self, path, content, target):
        path.write_bytes(rewritten(content + bytes(32), FORMAT, "2"))
        refused(f"{path}: {CONTRADICTS}", path, target)

    def test_safetensors_of_somebody_else(self, path, target):
        save_file({"x": np.ones(100, np.float32)}, path)
        refused(f"{path}: {UNKNOWN}", path, target)

    @pytest.mark.parametrize(
        ("foreign", "count"),
        [
            ((50000).to_bytes(8, "little") + b"[" * 50000 + bytes(32), 50040),
            (b"something else altogether, and long enough to be a header.", 58),
            (b"", 0),
        ],
        ids=["nested too deep", "text", "nothing"],
    )
    def test_what_is_no_safetensors(self, path, target, foreign, count):
        path.write_bytes(foreign)
        refused(f"{path}: {UNKNOWN}{count} bytes", path, target)

    def test_a_folder(self, tmp_path, target):
        refused(f"{tmp_path}: cannot be read: ", tmp_path, target)

    def test_a_file_that_is_missing(self, path, target):
        refused(f"{path}: cannot be read: ", path, target)


class TestWriting:
    @pytest.fixture
    def cache(self):
        with host_cache("manager", 5) as cache:
            yield cache

    @pytest.mark.parametrize("step", ["fsync", "replace"])
    def test_a_failure_leaves_the_old_file(self, path, cache, monkeypatch, step):
        def fail(*_):
            raise OSError("no space left")

        save(path, cache)
        before = path.read_bytes()
        with monkeypatch.context() as patch:
            patch.setattr(os, step, fail)
            with pytest.raises(OSError, match="no space left"):
                save(path, cache, tokens=TOKENS[:3])
        assert (os.listdir(path.parent), path.read_bytes()) == ([path.name], before)

    def test_a_file_that_is_there_is_replaced(self, path, cache):
        save(path, cache)
        save(path, cache, tokens=TOKENS[:3])
        assert Snapshot.read(path).tokens == tuple(TOKENS[:3])

    @pytest.mark.parametrize("target", ["", ".", "/"])
    def test_a_folder_is_no_target(self, tmp_path, cache, target):
        with Unchanged(cache), pytest.raises(IsADirectoryError):
            save(target or tmp_path, cache)

    def test_a_file_that_becomes_shorter_while_it_is_read(self, path, cache, monkeypatch):
        save(path, cache)
        real = os.fstat

        def longer(number):
            class Status:
                st_size, st_mode = real(number).st_size + 7, real(number).st_mode

            return Status()

        monkeypatch.setattr(os, "fstat", longer)
        refused(f"{path}: cannot be read: it became shorter while it was read", path, cache)


class TestWhatIsNoFile:
    """Nothing is read, waited for or allocated."""

    def test_a_sparse_file_of_a_terabyte(self, path):
        with path.open("wb") as file:
            file.truncate(1 << 43)
        with host_cache("manager", 5, 0) as cache:
            refused(f"{path}: cannot be read: it has {1 << 43} bytes, and the memory of this machine ", path, cache)

    def test_a_file_that_memory_has_no_room_for(self, path, monkeypatch):
        def no_room(*_):
            raise MemoryError

        with host_cache("manager", 5, 0) as cache:
            save(path, cache)
            with monkeypatch.context() as patch:
                patch.setattr(snapshot_file.np, "empty", no_room)
                with pytest.raises(SnapshotError) as caught:
                    SnapshotFile.read(path)
        assert str(caught.value) == f"{path}: cannot be read: there is not enough memory."

    @pytest.mark.parametrize("kind", ["a named pipe", "a device", "a folder"])
    def test_something_else(self, path, kind):
        if kind == "a named pipe":
            os.mkfifo(path)
        elif kind == "a device":
            path.symlink_to("/dev/zero")
        else:
            path.mkdir()
        with host_cache("manager", 5, 0) as cache:
            refused(f"{path}: cannot be read: expected a regular file, got {kind}.", path, cache)
