"""``Snapshot``: a sequence with all that is needed to go on with it in another process."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trt_kvcache._version import __version__
from trt_kvcache.dtypes import dtype_name
from trt_kvcache.errors import CapacityError, KVCacheError, SnapshotError
from trt_kvcache.generation.sampler_state import SamplerState
from trt_kvcache.generation.token_ids import reusable_tokens, token_array
from trt_kvcache.sequences.model_identity import ModelIdentity, check_type
from trt_kvcache.sequences.prompt_cache import PromptCache, PromptEntry
from trt_kvcache.sequences.slot_copy import SlotCopy
from trt_kvcache.sequences.slot_format import AnyCache, SlotFormat
from trt_kvcache.sequences.snapshot_file import SnapshotFile

_TOKENS, _PENDING = "tokens", "pending_tokens"


@dataclass(frozen=True, kw_only=True, eq=False)
class Snapshot:
    """A sequence on the host: made from a slot, a prompt-cache entry or a file, and good for any of them.

    Wrong arguments, capturing streams and closed objects raise as :mod:`trt_kvcache.errors` says.

    Parameters
    ----------
    tokens : tuple of int
        Whose K and V, and the states after which, are in ``contents``.
    pending : tuple of int
        Tokens that come next but were not run yet, usually the last one that was generated.
    """

    tokens: tuple[int, ...]
    pending: tuple[int, ...]
    sampler: SamplerState | None
    model: ModelIdentity
    contents: SlotCopy

    @property
    def slot_format(self) -> SlotFormat:
        """What the slots of the cache hold that it was taken from."""
        return self.contents.slot_format

    @classmethod
    def of_slot(
        cls,
        cache: AnyCache,
        slot: int,
        *,
        tokens: Sequence[int],
        model: ModelIdentity,
        pending: Sequence[int] = (),
        sampler: SamplerState | None = None,
        stream: Any,
    ) -> Snapshot:
        """Copy a slot to the host. Waits for ``stream``.

        Raises ConfigError, LengthsUnknown, CapacityError.

        Parameters
        ----------
        cache : KVCacheManager, LinearKVCache or HybridCacheManager
        slot
            An active one.
        tokens : sequence of int (n,)
            The tokens that it begins with; with recurrent layers all that it holds.
        pending : sequence of int
        stream : cuda.core.Stream
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
        """Copy an entry of a prompt cache to the host: as :meth:`of_slot`, with nothing pending."""
        check_type("model", model, ModelIdentity)
        return cls(
            tokens=tuple(entry.tokens.tolist()), pending=(), sampler=None, model=model, contents=prompts.copy_to_host(entry, stream=stream)
        )

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write a safetensors file, which appears complete or not at all. One that is there is replaced.

        Raises OSError: it cannot be written. A file that was there is as it was.
        """
        description = {
            "producer": {"name": "trt-kvcache", "version": __version__},
            "model": asdict(self.model),
            "slot": self.slot_format.to_dict(),
            "sampler": None if self.sampler is None else asdict(self.sampler),
        }
        names = self.slot_format.tensors(len(self.tokens))
        arrays: dict[str, npt.NDArray[Any]] = {_TOKENS: np.array(self.tokens, np.int32), _PENDING: np.array(self.pending, np.int32)}
        arrays.update(zip(names, self.contents.arrays, strict=True))
        SnapshotFile(description, arrays).write(Path(path))

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Snapshot:
        """Read a file that :meth:`write` wrote.

        Raises SnapshotError: it cannot be read, is no snapshot, is truncated or altered, or a newer package wrote it.
        """
        stored = SnapshotFile.read(Path(path))
        try:
            return cls._of_file(stored)
        except (KVCacheError, KeyError, TypeError, ValueError, AttributeError) as error:
            raise SnapshotError(f"{path}: expected a snapshot, got a file that disagrees with itself ({error}).") from error

    @classmethod
    def _of_file(cls, stored: SnapshotFile) -> Snapshot:
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

    def check_fits(self, cache: AnyCache, model: ModelIdentity) -> None:
        """Check that the bytes mean the same in a cache: same model, same layers, same dtypes. Sizes and layout may differ.

        Raises SnapshotError, ConfigError.
        """
        check_type("model", model, ModelIdentity)
        if model.fingerprint != self.model.fingerprint:
            raise SnapshotError(
                f"snapshot: fingerprint: expected that of the model, {_short(model.fingerprint)}, got {_short(self.model.fingerprint)}. "
                "It was saved with another model."
            )
        if model.rope != self.model.rope:
            raise SnapshotError(f"snapshot: rope: expected {model.rope} as the model has, got {self.model.rope}.")
        difference = SlotFormat.of(cache).difference(self.slot_format)
        if difference is not None:
            raise SnapshotError(f"snapshot: {difference}. It was saved from another cache.")

    def reusable(self, prompt: Sequence[int]) -> int:
        """Return how many tokens of a prompt need not be run with this snapshot: at most all but one.

        With recurrent layers it is all ``tokens`` or none. Raises :class:`ShapeError`, :class:`DTypeError` or
        :class:`RangeError` for what is no prompt.
        """
        held = token_array(_TOKENS, self.tokens)
        return reusable_tokens(held, token_array("prompt", prompt), whole=self.slot_format.has_states)

    def restore_slot(self, cache: AnyCache, slot: int, *, model: ModelIdentity, prompt: Sequence[int] | None = None, stream: Any) -> int:
        """Copy the sequence to the front of a slot. Lengths stay as they are: commit what is returned afterwards.

        Raises SnapshotError: another model or other layers: see :meth:`check_fits`. CapacityError: the tokens are more than
        ``max_sequence_length``. ConfigError.

        Parameters
        ----------
        cache
            Of the same layers; sizes, layout and memory may be others.
        slot
            Active or not. Resetting an active slot to length 0 zeroes its states: do that before.
        model
            The one that runs on the cache.
        prompt : sequence of int, optional
            What will be continued instead of ``tokens`` and ``pending``: only what they share is restored.
        stream : cuda.core.Stream
            Waits for it.

        Returns
        -------
        int
            Tokens restored: all ``tokens``, or what :meth:`reusable` says of ``prompt``. With 0 nothing was changed.
        """
        self.check_fits(cache, model)
        length = len(self.tokens) if prompt is None else self.reusable(prompt)
        longest = cache.lengths.max_sequence_length
        if length > longest:
            raise CapacityError(f"snapshot: it holds {length} tokens, max_sequence_length is {longest}. Nothing was changed.")
        if length:
            self.contents.restore(cache, slot, length, stream=stream)
        return length

    def restore_entry(self, prompts: PromptCache, *, model: ModelIdentity, stream: Any) -> PromptEntry | None:
        """Put the sequence into a prompt cache.

        Raises SnapshotError: another model or other layers. ConfigError.

        Returns
        -------
        PromptEntry or None
            As :meth:`PromptCache.insert <trt_kvcache.sequences.prompt_cache.PromptCache.insert>`.
        """
        self.check_fits(prompts.cache, model)
        return prompts.insert_copy(self.tokens, self.contents, stream=stream)


@dataclass(frozen=True)
class LoadedSnapshot:
    """A snapshot that was restored into a slot.

    Parameters
    ----------
    reused_tokens
        Tokens that the slot begins with now.
    """

    snapshot: Snapshot
    reused_tokens: int


def save_snapshot(
    path: str | os.PathLike[str],
    cache: AnyCache,
    slot: int,
    *,
    tokens: Sequence[int],
    model: ModelIdentity,
    pending: Sequence[int] = (),
    sampler: SamplerState | None = None,
    stream: Any,
) -> Snapshot:
    """Write a slot to a file: see :meth:`Snapshot.of_slot` and :meth:`Snapshot.write`."""
    snapshot = Snapshot.of_slot(cache, slot, tokens=tokens, model=model, pending=pending, sampler=sampler, stream=stream)
    snapshot.write(path)
    return snapshot


def load_snapshot(
    path: str | os.PathLike[str], cache: AnyCache, slot: int, *, model: ModelIdentity, prompt: Sequence[int] | None = None, stream: Any
) -> LoadedSnapshot:
    """Read a file and restore it into a slot: see :meth:`Snapshot.read` and :meth:`Snapshot.restore_slot`."""
    snapshot = Snapshot.read(path)
    return LoadedSnapshot(snapshot, snapshot.restore_slot(cache, slot, model=model, prompt=prompt, stream=stream))


def _short(fingerprint: str) -> str:
    return fingerprint if len(fingerprint) <= 16 else f"{fingerprint[:12]}..."
