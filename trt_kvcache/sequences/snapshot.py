"""``Snapshot``: a sequence on the host or in a file, which another process can continue."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trt_kvcache._version import __version__
from trt_kvcache.cache.cache import Cache
from trt_kvcache.dtypes import dtype_name
from trt_kvcache.errors import CapacityError, ConfigError, KVCacheError, SnapshotError
from trt_kvcache.generation.sampler_state import SamplerState
from trt_kvcache.generation.token_ids import reusable_tokens, token_array
from trt_kvcache.sequences.model_identity import ModelIdentity, check_type
from trt_kvcache.sequences.prompt_cache import PromptCache, PromptEntry
from trt_kvcache.sequences.slot_copy import SlotCopy
from trt_kvcache.sequences.slot_format import SlotFormat
from trt_kvcache.sequences.snapshot_file import SnapshotFile

# Names of the tensors of token ids in a file.
_TOKENS, _PENDING = "tokens", "pending_tokens"


@dataclass(frozen=True, kw_only=True, eq=False)
class Snapshot:
    """A sequence on the host, with everything that another process needs to continue it.

    It is made from a slot (:meth:`of_slot`), an entry of a prompt cache (:meth:`of_entry`) or a file (:meth:`read`), and goes to any
    of them (:meth:`restore_slot`, :meth:`restore_entry`, :meth:`write`).

    Parameters
    ----------
    tokens : tuple of int
        The tokens whose K and V are in ``contents``, with the states after the last of them.
    pending : tuple of int
        Tokens that follow but were not computed yet, usually the last generated one.
    sampler : SamplerState or None
        Seed and counter of the sampler; None if the tokens were not sampled.
    model : ModelIdentity
        The model that computed the contents.
    contents : SlotCopy
        K, V and states, on the host.

    Examples
    --------
    A slot of one cache is restored into another one, of other sizes:

    >>> import tempfile
    >>> from pathlib import Path
    >>> from trt_kvcache import HostMemory, KVCacheConfig, KVCacheManager, KVLayerConfig, ModelIdentity, Snapshot
    >>> memory = HostMemory()
    >>> stream = memory.create_stream()
    >>> layers = [KVLayerConfig(num_kv_heads=2, head_dim=8)]
    >>> cache = KVCacheManager(KVCacheConfig(layers=layers, max_batch_size=2, max_sequence_length=16), memory=memory)
    >>> cache.reset_for_new_sequences([0], stream=stream)
    >>> cache.commit_sequence_length(3, stream=stream)           # after an engine has written K and V of 3 tokens
    >>> model = ModelIdentity(fingerprint="5f3a")
    >>> snapshot = Snapshot.of_slot(cache, 0, tokens=[11, 12, 13], pending=[14], model=model, stream=stream)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     snapshot.write(Path(folder) / "chat.safetensors")
    ...     loaded = Snapshot.read(Path(folder) / "chat.safetensors")
    >>> loaded.tokens, loaded.pending
    ((11, 12, 13), (14,))
    >>> other = KVCacheManager(KVCacheConfig(layers=layers, max_batch_size=1, max_sequence_length=8), memory=memory)
    >>> other.reset_for_new_sequences([0], stream=stream)
    >>> other.commit_sequence_length(loaded.restore_slot(other, 0, model=model, stream=stream), stream=stream)
    >>> other.host_kv_cache_lengths
    (3,)

    Only the common prefix with a new prompt can be used, and at least one token of the prompt is always computed:

    >>> loaded.reusable([11, 12, 99]), loaded.reusable([11, 12, 13])
    (2, 2)
    >>> cache.close(), other.close()
    (None, None)
    """

    tokens: tuple[int, ...]
    pending: tuple[int, ...]
    sampler: SamplerState | None
    model: ModelIdentity
    contents: SlotCopy

    def __repr__(self) -> str:
        nbytes = sum(array.nbytes for array in self.contents.arrays)
        return f"Snapshot(tokens={len(self.tokens)}, pending={len(self.pending)}, sampler={self.sampler}, nbytes={nbytes})"

    @property
    def slot_format(self) -> SlotFormat:
        """The layers, dtypes and scales of the cache that it was taken from."""
        return self.contents.slot_format

    @classmethod
    def of_slot(
        cls,
        cache: Cache,
        slot: int,
        *,
        tokens: Sequence[int],
        model: ModelIdentity,
        pending: Sequence[int] = (),
        sampler: SamplerState | None = None,
        stream: Any,
    ) -> Snapshot:
        """Copy a slot to the host.

        Parameters
        ----------
        cache : KVCacheManager, LinearKVCache or HybridCacheManager
            Its lengths must be known to the host.
        slot : int
            An active slot.
        tokens : sequence of int (n,)
            The first tokens of the slot; with recurrent layers all of its tokens.
        model : ModelIdentity
            The model that runs on the cache.
        pending : sequence of int (m,)
            Tokens that follow but were not computed yet.
        sampler : SamplerState, optional
            Seed and counter of the sampler of the sequence.
        stream : cuda.core.Stream
            The copies are ordered on it; the call waits.

        Returns
        -------
        Snapshot
            On the host; for a device in page-locked memory.

        Raises
        ------
        ConfigError
            ``model``, ``sampler`` or ``cache`` is of another type.
        SlotError, ShapeError, DTypeError, RangeError
            The slot is not active, ``tokens`` or ``pending`` are not token ids, or the slot holds fewer tokens (with recurrent layers:
            not exactly these).
        LengthsUnknown
            Only the device knows the lengths.
        CapacityError
            The host has no room.
        PlaceError, CaptureError, ClosedError
            The stream is of another memory or captured in a CUDA graph, or the cache is closed.
        """
        check_type("model", model, ModelIdentity)
        if sampler is not None:
            check_type("sampler", sampler, SamplerState)
        held, following = token_array(_TOKENS, tokens), token_array(_PENDING, pending)
        return cls(
            tokens=tuple(held.tolist()),
            pending=tuple(following.tolist()),
            sampler=sampler,
            model=model,
            contents=SlotCopy.capture(cache, slot, len(held), place="host", stream=stream),
        )

    @classmethod
    def of_entry(cls, prompts: PromptCache, entry: PromptEntry, *, model: ModelIdentity, stream: Any) -> Snapshot:
        """Copy an entry of a prompt cache to the host, without pending tokens and sampler.

        Parameters
        ----------
        prompts : PromptCache
            The cache of prompts.
        entry : PromptEntry
            Held there.
        model : ModelIdentity
            The model that runs on the cache.
        stream : cuda.core.Stream
            The copies are ordered on it; the call waits.

        Returns
        -------
        Snapshot
            On the host.

        Raises
        ------
        ConfigError
            ``model`` is of another type, or only one of ``model`` and ``entry`` has an adapter.
        CapacityError
            The host has no room.
        ClosedError
            The entry was dropped, or something is closed.
        PlaceError, CaptureError
            The stream is of another memory or captured in a CUDA graph.
        """
        check_type("model", model, ModelIdentity)
        _check_adapter(model, entry.adapter)
        return cls(
            tokens=tuple(entry.tokens.tolist()), pending=(), sampler=None, model=model, contents=prompts.copy_to_host(entry, stream=stream)
        )

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write a safetensors file, which appears complete or not at all.

        Parameters
        ----------
        path : path-like
            A file that is there is replaced.

        Raises
        ------
        OSError
            The file cannot be written. One that was there is unchanged.
        """
        description = {
            "producer": {"name": "trt-kvcache", "version": __version__},
            # A model alone is written without the field, as versions that do not know adapters read it.
            "model": {name: value for name, value in asdict(self.model).items() if name != "adapter" or value is not None},
            "slot": self.slot_format.to_dict(),
            "sampler": None if self.sampler is None else asdict(self.sampler),
        }
        names = self.slot_format.tensors(len(self.tokens))
        arrays: dict[str, npt.NDArray[Any]] = {_TOKENS: np.array(self.tokens, np.int32), _PENDING: np.array(self.pending, np.int32)}
        arrays.update(zip(names, self.contents.arrays, strict=True))
        SnapshotFile(description, arrays).write(Path(path))

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Snapshot:
        """Read a file that :meth:`write` has written.

        Parameters
        ----------
        path : path-like
            The file.

        Returns
        -------
        Snapshot
            On the host, in memory that is not page-locked.

        Raises
        ------
        SnapshotError
            The file cannot be read, is not a snapshot, is truncated or altered, or was written by a newer version of this package.
        """
        stored = SnapshotFile.read(Path(path))
        try:
            return cls._of_file(stored)
        except (KVCacheError, KeyError, TypeError, ValueError, AttributeError, OverflowError, MemoryError, RecursionError) as error:
            raise SnapshotError(f"{path}: expected a snapshot, got a file with contradicting contents ({error!s:.300}).") from error

    @classmethod
    def _of_file(cls, stored: SnapshotFile) -> Snapshot:
        """Return the snapshot of a file, after checking that its tensors fit its format."""
        description, arrays = stored.description, dict(stored.arrays)
        tokens, pending = (token_array(name, arrays.pop(name)) for name in (_TOKENS, _PENDING))
        slot_format = SlotFormat.from_dict(description["slot"])
        if slot_format.num_layers > len(arrays):
            raise SnapshotError(f"expected the tensors of {slot_format.num_layers} layers, got {len(arrays)} tensors")
        expected = slot_format.tensors(len(tokens))
        found = {name: (array.shape, dtype_name(array.dtype)) for name, array in arrays.items()}
        if found != expected:
            name = next(name for name in [*expected, *found] if found.get(name) != expected.get(name))
            raise SnapshotError(f"{name}: expected {expected.get(name)}, got {found.get(name)}")
        sampler = description["sampler"]
        return cls(
            tokens=tuple(tokens.tolist()),
            pending=tuple(pending.tolist()),
            sampler=None if sampler is None else SamplerState(**sampler),
            model=ModelIdentity(**description["model"]),
            contents=SlotCopy(slot_format, len(tokens), tuple(arrays[name] for name in expected)),
        )

    def check_fits(self, cache: Cache, model: ModelIdentity) -> None:
        """Check that the contents mean the same in a cache. Its sizes and layout may differ.

        Parameters
        ----------
        cache : KVCacheManager, LinearKVCache or HybridCacheManager
            Its layers, dtypes and scales are compared.
        model : ModelIdentity
            The model that runs on the cache.

        Raises
        ------
        SnapshotError
            The model, its adapter, its RoPE, or the layers, dtypes or scales differ.
        ConfigError
            ``model`` or ``cache`` is of another type.
        """
        check_type("model", model, ModelIdentity)
        if model.fingerprint != self.model.fingerprint:
            raise SnapshotError(
                f"snapshot: fingerprint: expected {_short(model.fingerprint)} as the model has, got {_short(self.model.fingerprint)}. "
                "It was saved with another model."
            )
        if model.adapter != self.model.adapter:
            expected, got = ("no adapter" if one.adapter is None else f"adapter {_short(one.adapter)}" for one in (model, self.model))
            raise SnapshotError(f"snapshot: adapter: expected {expected}, got {got}. It was saved with another adapter.")
        if model.rope != self.model.rope:
            raise SnapshotError(f"snapshot: rope: expected {model.rope} as the model has, got {self.model.rope}.")
        difference = SlotFormat.of(cache).difference(self.slot_format)
        if difference is not None:
            raise SnapshotError(f"snapshot: {difference}. It was saved from another cache.")

    def reusable(self, prompt: Sequence[int]) -> int:
        """Return how many tokens of a prompt can be taken from this snapshot.

        Parameters
        ----------
        prompt : sequence of int (n,)
            The whole prompt.

        Returns
        -------
        int
            At most ``n - 1``, because one token must be computed; with recurrent layers all ``tokens`` of the snapshot or 0.

        Raises
        ------
        ShapeError, DTypeError, RangeError
            ``prompt`` are not token ids.
        """
        held = token_array(_TOKENS, self.tokens)
        return reusable_tokens(held, token_array("prompt", prompt), whole=self.slot_format.has_states)

    def restore_slot(self, cache: Cache, slot: int, *, model: ModelIdentity, prompt: Sequence[int] | None = None, stream: Any) -> int:
        """Copy the sequence to the front of a slot. Its length stays as it is: commit the returned number of tokens afterwards.

        Parameters
        ----------
        cache : KVCacheManager, LinearKVCache or HybridCacheManager
            Of the same layers, dtypes and scales; its sizes, layout and memory may differ.
        slot : int
            Any slot, active or not. Reset it before, because a reset to length 0 zeroes the states that are restored here.
        model : ModelIdentity
            The model that runs on the cache.
        prompt : sequence of int (n,), optional
            A prompt that will be continued instead of ``tokens`` and ``pending``: only the common prefix is restored.
        stream : cuda.core.Stream
            The copies are ordered on it; the call waits.

        Returns
        -------
        int
            Tokens that were restored: all ``tokens``, or :meth:`reusable` of ``prompt``. With 0 nothing was changed.

        Raises
        ------
        SnapshotError
            The model or the layers differ: see :meth:`check_fits`. Nothing was changed.
        CapacityError
            The tokens are more than ``max_sequence_length``. Nothing was changed.
        ConfigError, SlotError, ShapeError, DTypeError, RangeError
            An argument does not fit. Nothing was changed.
        PlaceError, CaptureError, ClosedError
            The stream is of another memory or captured in a CUDA graph, or the cache is closed. Nothing was changed.
        """
        self.check_fits(cache, model)
        length = len(self.tokens) if prompt is None else self.reusable(prompt)
        longest = cache.lengths.max_sequence_length
        if length > longest:
            raise CapacityError(f"snapshot: it holds {length} tokens, max_sequence_length is {longest}. Nothing was changed.")
        if length:
            self.contents.restore(cache, slot, length, stream=stream)
        return length

    def restore_entry(self, prompts: PromptCache, *, model: ModelIdentity, adapter: str | None = None, stream: Any) -> PromptEntry | None:
        """Insert the sequence into a prompt cache.

        Parameters
        ----------
        prompts : PromptCache
            Over a cache of the same layers, dtypes and scales.
        model : ModelIdentity
            The model that runs on that cache.
        adapter : str, optional
            Name in the prompt cache of the adapter of ``model``, if it has one.
        stream : cuda.core.Stream
            The copies are ordered on it; the call waits.

        Returns
        -------
        PromptEntry or None
            As :meth:`PromptCache.insert <trt_kvcache.sequences.prompt_cache.PromptCache.insert>`.

        Raises
        ------
        SnapshotError
            The model or the layers differ: see :meth:`check_fits`. Nothing was changed.
        ShapeError
            The snapshot has no tokens. Nothing was changed.
        ConfigError
            ``model`` is of another type, or only one of ``model`` and ``adapter`` has an adapter.
        PlaceError, CaptureError, ClosedError
            The stream is of another memory or captured in a CUDA graph, or something is closed. Nothing was changed.
        """
        self.check_fits(prompts.cache, model)
        _check_adapter(model, adapter)
        return prompts.insert_copy(self.tokens, self.contents, adapter=adapter, stream=stream)


@dataclass(frozen=True)
class LoadedSnapshot:
    """A snapshot that was restored into a slot."""

    snapshot: Snapshot
    #: Tokens with which the slot begins now.
    reused_tokens: int


def save_snapshot(
    path: str | os.PathLike[str],
    cache: Cache,
    slot: int,
    *,
    tokens: Sequence[int],
    model: ModelIdentity,
    pending: Sequence[int] = (),
    sampler: SamplerState | None = None,
    stream: Any,
) -> Snapshot:
    """Write a slot to a file.

    Parameters
    ----------
    path : path-like
        The file, which appears complete or not at all. One that is there is replaced.
    cache : KVCacheManager, LinearKVCache or HybridCacheManager
        Its lengths must be known to the host.
    slot : int
        An active slot.
    tokens : sequence of int (n,)
        The first tokens of the slot; with recurrent layers all of its tokens.
    model : ModelIdentity
        The model that runs on the cache.
    pending : sequence of int (m,)
        Tokens that follow but were not computed yet.
    sampler : SamplerState, optional
        Seed and counter of the sampler of the sequence.
    stream : cuda.core.Stream
        The copies are ordered on it; the call waits.

    Returns
    -------
    Snapshot
        The snapshot that was written.

    Raises
    ------
    OSError
        The file cannot be written. One that was there is unchanged.
    KVCacheError
        As :meth:`Snapshot.of_slot`.

    Examples
    --------
    >>> import tempfile
    >>> from trt_kvcache import HostMemory, KVCacheConfig, KVCacheManager, KVLayerConfig, ModelIdentity, load_snapshot, save_snapshot
    >>> memory = HostMemory()
    >>> stream = memory.create_stream()
    >>> config = KVCacheConfig(layers=[KVLayerConfig(num_kv_heads=2, head_dim=8)], max_batch_size=2, max_sequence_length=16)
    >>> cache = KVCacheManager(config, memory=memory)
    >>> cache.reset_for_new_sequences([0, 0], stream=stream)
    >>> cache.commit_sequence_length([3, 0], stream=stream)      # after an engine has written K and V of 3 tokens to slot 0
    >>> model = ModelIdentity(fingerprint="5f3a")
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     saved = save_snapshot(f"{folder}/chat", cache, 0, tokens=[11, 12, 13], model=model, stream=stream)
    ...     loaded = load_snapshot(f"{folder}/chat", cache, 1, model=model, stream=stream)
    >>> cache.commit_sequence_length([0, loaded.reused_tokens], stream=stream)
    >>> cache.host_kv_cache_lengths
    (3, 3)
    >>> cache.close()
    """
    snapshot = Snapshot.of_slot(cache, slot, tokens=tokens, model=model, pending=pending, sampler=sampler, stream=stream)
    snapshot.write(path)
    return snapshot


def load_snapshot(
    path: str | os.PathLike[str], cache: Cache, slot: int, *, model: ModelIdentity, prompt: Sequence[int] | None = None, stream: Any
) -> LoadedSnapshot:
    """Read a file and restore it into a slot. Its length stays as it is: commit ``reused_tokens`` afterwards.

    Parameters
    ----------
    path : path-like
        A file that :func:`save_snapshot` has written; there is an example there.
    cache : KVCacheManager, LinearKVCache or HybridCacheManager
        Of the same layers, dtypes and scales; its sizes, layout and memory may differ.
    slot : int
        Any slot, active or not. Reset it before, because a reset to length 0 zeroes the states that are restored here.
    model : ModelIdentity
        The model that runs on the cache.
    prompt : sequence of int (n,), optional
        A prompt that will be continued instead of the tokens of the file: only the common prefix is restored.
    stream : cuda.core.Stream
        The copies are ordered on it; the call waits.

    Returns
    -------
    LoadedSnapshot
        The snapshot, and how many of its tokens are in the slot now.

    Raises
    ------
    SnapshotError
        The file cannot be read, is not a snapshot, is truncated or altered, was written by a newer version of this package, or is of
        another model or of other layers. The cache is unchanged.
    KVCacheError
        As :meth:`Snapshot.restore_slot`. The cache is unchanged.
    """
    snapshot = Snapshot.read(path)
    return LoadedSnapshot(snapshot, snapshot.restore_slot(cache, slot, model=model, prompt=prompt, stream=stream))


def _check_adapter(model: ModelIdentity, adapter: str | None) -> None:
    """Check that a model has an adapter if an entry of a prompt cache has one."""
    if (model.adapter is None) is not (adapter is None):
        expected = "no adapter" if adapter is None else f"the hash of adapter {adapter!r}"
        raise ConfigError(f"model: expected {expected} as the entry of the prompt cache, got {model.adapter}.")


def _short(fingerprint: str) -> str:
    """Return a fingerprint as error messages show it."""
    return fingerprint if len(fingerprint) <= 16 else f"{fingerprint[:12]}..."
