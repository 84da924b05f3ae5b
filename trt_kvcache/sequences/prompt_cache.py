"""``PromptCache``: copies of sequences, so that a prompt which begins like an earlier one need not be run from its start."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy.typing as npt

from trt_kvcache._util.checks import int_in_range, one_of
from trt_kvcache.cache.slot_cache import Closable
from trt_kvcache.errors import CapacityError, ClosedError, ShapeError
from trt_kvcache.generation.token_ids import TokenArray, common_prefix, reusable_tokens, token_array
from trt_kvcache.memory.graph_capture import refuse_capture
from trt_kvcache.sequences.slot_copy import HostSlotCopy, SlotCopy, check_capture
from trt_kvcache.sequences.slot_format import AnyCache, SlotFormat

#: Where the copies are: in the memory of the cache, or on the host (page-locked for a device).
Place = Literal["cache", "host"]

Tokens = Sequence[int] | npt.NDArray[Any]


@dataclass(frozen=True, eq=False)
class PromptEntry:
    """A sequence that a :class:`PromptCache` holds, or held.

    Parameters
    ----------
    tokens : ndarray int32 (n,)
        Read-only.
    nbytes
        Bytes of K, V and states, as allocated in the cache's memory.
    """

    tokens: TokenArray
    nbytes: int


@dataclass(frozen=True)
class PromptMatch:
    """What a :class:`PromptCache` has of a prompt.

    Parameters
    ----------
    length
        Tokens at the start of the prompt that are the entry's too.
    """

    entry: PromptEntry
    length: int


class PromptCache(Closable):
    """Copies of sequences, the least recently used one dropped first. Not thread-safe.

    Tokens are compared one by one. At least one token of a prompt is never taken from here, so that there are logits.

    Recurrent states cannot go back to an earlier token. Where there are recurrent layers, an entry is used whole or not at
    all: insert a sequence at the token counts from which others will go on, such as all but the last token of a prompt.

    Wrong arguments, capturing streams and closed objects raise as :mod:`trt_kvcache.errors` says.

    Raises ConfigError or RangeError: not a cache with slots, or an argument out of range.

    Parameters
    ----------
    cache : KVCacheManager, LinearKVCache or HybridCacheManager
        Whose slots are copied. It stays its owner's to close.
    max_bytes
        Most bytes of all copies together; token ids are not counted. 0, the default, keeps nothing.
    place : {"cache", "host"}
        Where the copies are: in the cache's memory, or on the host, page-locked for a device; then the calls wait.
    """

    def __init__(self, cache: AnyCache, *, max_bytes: int = 0, place: Place = "cache") -> None:
        self._format = SlotFormat.of(cache)
        self._cache: AnyCache = cache
        self._max_bytes = int_in_range("PromptCache.max_bytes", max_bytes, 0)
        one_of("PromptCache.place", place, get_args(Place))
        self._on_host = place == "host"
        self._copies: dict[PromptEntry, SlotCopy | HostSlotCopy] = {}
        self._hits = self._misses = self._reused_tokens = 0
        self._closed = False

    @property
    def cache(self) -> AnyCache:
        """Whose slots are copied."""
        return self._cache

    @property
    def max_bytes(self) -> int:
        """Most bytes of all copies together; 0 if it is off."""
        return self._max_bytes

    @property
    def nbytes(self) -> int:
        """Bytes of all copies together, as allocated."""
        return sum(entry.nbytes for entry in self._copies)

    @property
    def entries(self) -> tuple[PromptEntry, ...]:
        """What it holds, the least recently used entry first."""
        return tuple(self._copies)

    @property
    def hits(self) -> int:
        """Calls of :meth:`restore`: what :meth:`find` found but nobody used is neither a hit nor a miss."""
        return self._hits

    @property
    def misses(self) -> int:
        """Calls of :meth:`find` that found nothing. While it is off, none is counted."""
        return self._misses

    @property
    def reused_tokens(self) -> int:
        """Tokens restored so far."""
        return self._reused_tokens

    def insert(self, tokens: Tokens, slot: int, *, stream: Any) -> PromptEntry | None:
        """Copy the first tokens of a slot, if it can be done within ``max_bytes``.

        Without recurrent layers, an entry that the new one begins with is dropped: it serves no prompt that the new one does
        not. The copy is made first, unless ``max_bytes`` or the memory has no room for both: then as few are dropped before as
        make room, such entries first. If the memory still has none when the dropped ones were as large as the new one, no more
        are dropped: those that were are lost.

        Raises LengthsUnknown.

        Parameters
        ----------
        tokens : sequence of int (n,)
            The tokens whose K and V the slot begins with, at least one; with recurrent layers all that it holds.
        slot
            An active one.
        stream : cuda.core.Stream
            The copies are ordered on it. The call waits only if others are dropped, or for ``place="host"``.

        Returns
        -------
        PromptEntry or None
            The entry that holds the tokens, which may have been there before; None if there is no room for it.
        """
        self._check_open()
        if not self._max_bytes:
            return None
        array = self._tokens(tokens)
        check_capture(self._cache, slot, len(array), stream=stream)
        kind = HostSlotCopy if self._on_host else SlotCopy
        return self._keep(array, lambda: kind.capture(self._cache, slot, len(array), stream=stream))

    def insert_copy(self, tokens: Tokens, copy: HostSlotCopy, *, stream: Any) -> PromptEntry | None:
        """Take in a sequence that is on the host: as :meth:`insert`.

        Parameters
        ----------
        tokens : sequence of int (n,)
        copy
            Of those tokens, and of the same layers, dtypes and scales.
        stream : cuda.core.Stream
        """
        self._check_open()
        if not self._max_bytes:
            return None
        array = self._tokens(tokens)
        if len(array) != copy.length:
            raise ShapeError(f"tokens: expected {copy.length}, as many as were copied, got {len(array)}.")
        difference = self._format.difference(copy.slot_format)
        if difference is not None:
            raise ShapeError(f"copy: {difference}. It was made of another cache.")
        memory = self._cache.memory
        refuse_capture(memory, "inserting a copy", stream)
        return self._keep(array, lambda: copy if self._on_host else SlotCopy.of_host(copy, memory, stream=stream))

    def _tokens(self, tokens: Tokens) -> TokenArray:
        array = token_array("tokens", tokens)
        if not len(array):
            raise ShapeError("tokens: expected at least one, got none.")
        return array

    def _keep(self, tokens: TokenArray, make_copy: Callable[[], SlotCopy | HostSlotCopy]) -> PromptEntry | None:
        for entry in self.entries:
            if self._covers(entry.tokens, tokens):
                self._touch(entry)
                return entry
        new = PromptEntry(tokens, self._format.nbytes(len(tokens)))
        if new.nbytes > self._max_bytes:
            return None
        covered = {entry for entry in self._copies if self._covers(tokens, entry.tokens)}
        going = sorted(self._copies, key=lambda entry: entry not in covered)
        before = self.nbytes
        while self.nbytes + new.nbytes > self._max_bytes or (copy := _or_none(make_copy)) is None:
            if not going or before - self.nbytes >= new.nbytes:  # more would not help either
                return None
            del self._copies[going.pop(0)]
        for entry in covered & self._copies.keys():
            del self._copies[entry]
        self._copies[new] = copy
        return new

    def _covers(self, longer: TokenArray, shorter: TokenArray) -> bool:
        """Tell whether an entry of ``longer`` serves every prompt that one of ``shorter`` does."""
        if self._format.has_states and len(longer) != len(shorter):
            return False
        return common_prefix(longer, shorter) == len(shorter)

    def _touch(self, entry: PromptEntry) -> None:
        self._copies[entry] = self._copies.pop(entry)

    def find(self, tokens: Tokens) -> PromptMatch | None:
        """Look for the entry that saves most of a prompt, and make it the most recently used one.

        Parameters
        ----------
        tokens : sequence of int (n,)
            The whole prompt.

        Returns
        -------
        PromptMatch or None
            At most ``n - 1`` tokens; with recurrent layers all tokens of an entry. None if there is none to reuse.
        """
        self._check_open()
        if not self._max_bytes:
            return None
        prompt = token_array("tokens", tokens)
        best, most = None, 0
        for entry in self._copies:
            count = reusable_tokens(entry.tokens, prompt, whole=self._format.has_states)
            if count > most:
                best, most = entry, count
        if best is None:
            self._misses += 1
            return None
        self._touch(best)
        return PromptMatch(best, most)

    def restore(self, match: PromptMatch, slot: int, *, stream: Any) -> None:
        """Copy what was found to the front of a slot. Lengths stay as they are: commit ``match.length`` afterwards.

        Parameters
        ----------
        match
            Of :meth:`find`, and not dropped since.
        slot
            Active or not. Resetting an active slot to length 0 zeroes its states: do that before.
        stream : cuda.core.Stream
            The copies are ordered on it. The call does not wait, but for ``place="host"``.
        """
        self._check_open()
        self._copy(match.entry).restore(self._cache, slot, match.length, stream=stream)
        self._hits += 1
        self._reused_tokens += match.length

    def copy_to_host(self, entry: PromptEntry, *, stream: Any) -> HostSlotCopy:
        """Return the copy of an entry on the host, where it is already for ``place="host"``. Waits for the device."""
        self._check_open()
        copy = self._copy(entry)
        refuse_capture(self._cache.memory, "copying an entry to the host", stream)
        return copy if isinstance(copy, HostSlotCopy) else copy.to_host()

    def _copy(self, entry: PromptEntry) -> SlotCopy | HostSlotCopy:
        if entry not in self._copies:
            raise ClosedError("this entry is not held here: it was dropped since it was found, or found in another PromptCache. Call find.")
        return self._copies[entry]

    def clear(self) -> None:
        """Drop all entries. The counters stay."""
        self._copies.clear()

    def close(self) -> None:
        """Drop all entries for good. Idempotent."""
        self._closed = True
        self.clear()


def _or_none(make_copy: Callable[[], SlotCopy | HostSlotCopy]) -> SlotCopy | HostSlotCopy | None:
    try:
        return make_copy()
    except CapacityError:
        return None
