"""``PromptCache``: prefix caching. Copies of sequences, from which the common prefix of a later prompt is restored."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import numpy.typing as npt

from trt_kvcache._util.checks import int_in_range, one_of
from trt_kvcache._util.lifetime import Closable
from trt_kvcache.cache.cache import Cache
from trt_kvcache.errors import CapacityError, ClosedError, ShapeError
from trt_kvcache.generation.token_ids import TokenArray, common_prefix, reusable_tokens, token_array
from trt_kvcache.memory.graph_capture import refuse_capture
from trt_kvcache.sequences.slot_copy import Place, SlotCopy, check_capture
from trt_kvcache.sequences.slot_format import SlotFormat

#: Token ids on the host, ``(n,)``.
Tokens = Sequence[int] | npt.NDArray[Any]


@dataclass(frozen=True, eq=False)
class PromptEntry:
    """A sequence that a :class:`PromptCache` holds, or held.

    Parameters
    ----------
    tokens : ndarray int32 (n,)
        Its tokens; read-only.
    nbytes : int
        Bytes of K, V and states, as allocated in the memory of the cache.
    adapter : str or None
        Name of the adapter with which they were computed; None for the base model.
    """

    tokens: TokenArray
    nbytes: int
    adapter: str | None = None


@dataclass(frozen=True)
class PromptMatch:
    """The longest prefix of a prompt in a :class:`PromptCache`.

    Parameters
    ----------
    entry : PromptEntry
        The entry with the longest usable prefix of the prompt.
    length : int
        Tokens of that prefix.
    """

    entry: PromptEntry
    length: int


class PromptCache(Closable):
    """A prefix cache: copies of sequences, from which prompts with a common prefix are restored. Not thread-safe.

    The least recently used entry is dropped first.

    Parameters
    ----------
    cache : KVCacheManager, LinearKVCache or HybridCacheManager
        The cache whose slots are copied. Its owner closes it.
    max_bytes : int
        Limit of the bytes of all copies; token ids are not counted. With 0, the default, nothing is kept.
    place : {"cache", "host"}
        Location of the copies: the memory of the cache, or the host (page-locked for a device). With ``"host"`` calls wait.

    Raises
    ------
    ConfigError
        ``cache`` or ``place`` is none of these.
    RangeError
        ``max_bytes`` is negative or not an integer.

    Notes
    -----
    Tokens are compared one by one, never by a hash alone. At least one token of a prompt is always computed, because its logits are
    needed. K and V of one adapter are never used for another one.

    Recurrent states cannot go back to an earlier token. With recurrent layers an entry is therefore used whole or not at all: insert
    a sequence at the lengths from which others will continue, such as a prompt without its last token.

    Examples
    --------
    The first four tokens of a prompt are in slot 0. Another prompt has three of them in common, which are restored from the copy:

    >>> from trt_kvcache import HostMemory, KVCacheConfig, KVCacheManager, KVLayerConfig, PromptCache
    >>> memory = HostMemory()
    >>> stream = memory.create_stream()
    >>> config = KVCacheConfig(layers=[KVLayerConfig(num_kv_heads=2, head_dim=8)], max_batch_size=2, max_sequence_length=16)
    >>> cache = KVCacheManager(config, memory=memory)
    >>> cache.reset_for_new_sequences([0, 0], stream=stream)
    >>> cache.commit_sequence_length([4, 0], stream=stream)      # after an engine has written K and V of 4 tokens to slot 0
    >>> prompts = PromptCache(cache, max_bytes=1 << 20)
    >>> entry = prompts.insert([11, 12, 13, 14], 0, stream=stream)
    >>> match = prompts.find([11, 12, 13, 99, 98])
    >>> match.length
    3
    >>> prompts.restore(match, 1, stream=stream)
    >>> cache.commit_sequence_length([0, match.length], stream=stream)
    >>> cache.host_kv_cache_lengths, prompts.reused_tokens
    ((4, 3), 3)
    >>> prompts.find([50, 51]) is None, prompts.misses
    (True, 1)
    >>> prompts.close()
    >>> cache.close()
    """

    def __init__(self, cache: Cache, *, max_bytes: int = 0, place: Place = "cache") -> None:
        self._format = SlotFormat.of(cache)
        super().__init__(cache=cache)
        self._cache: Cache = cache
        self._max_bytes = int_in_range("PromptCache.max_bytes", max_bytes, 0)
        one_of("PromptCache.place", place, get_args(Place))
        self._place: Place = place
        self._copies: dict[PromptEntry, SlotCopy] = {}
        self._hits = self._misses = self._reused_tokens = 0

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"entries={len(self._copies)}, nbytes={self.nbytes} of {self._max_bytes}"
        return f"PromptCache({state}, hits={self._hits}, misses={self._misses})"

    @property
    def cache(self) -> Cache:
        """The cache whose slots are copied."""
        return self._cache

    @property
    def max_bytes(self) -> int:
        """Limit of the bytes of all copies; with 0 nothing is kept."""
        return self._max_bytes

    @property
    def nbytes(self) -> int:
        """Bytes of all copies together, as allocated."""
        return sum(entry.nbytes for entry in self._copies)

    @property
    def entries(self) -> tuple[PromptEntry, ...]:
        """All entries, the least recently used one first."""
        return tuple(self._copies)

    @property
    def hits(self) -> int:
        """Calls of :meth:`restore`. A match that is not restored is neither a hit nor a miss."""
        return self._hits

    @property
    def misses(self) -> int:
        """Calls of :meth:`find` that found nothing. With ``max_bytes=0`` none is counted."""
        return self._misses

    @property
    def reused_tokens(self) -> int:
        """Tokens restored so far."""
        return self._reused_tokens

    def insert(self, tokens: Tokens, slot: int, *, adapter: str | None = None, stream: Any) -> PromptEntry | None:
        """Copy the first tokens of a slot, if the copy fits into ``max_bytes``.

        Parameters
        ----------
        tokens : sequence of int (n,)
            The first tokens of the slot, at least one; with recurrent layers all of its tokens.
        slot : int
            An active slot.
        adapter : str, optional
            Name of the adapter with which the slot was computed.
        stream : cuda.core.Stream
            The copies are ordered on it. The call waits only if entries are dropped, or for ``place="host"``.

        Returns
        -------
        PromptEntry or None
            The entry that holds the tokens, new or not; None if there is no room for it.

        Raises
        ------
        SlotError, ShapeError, DTypeError, RangeError
            An argument does not fit, or the slot holds fewer tokens (with recurrent layers: not exactly these). Nothing was changed.
        LengthsUnknown
            Only the device knows the lengths. Nothing was changed.
        PlaceError, CaptureError, ClosedError
            The stream is of another memory or captured in a CUDA graph, or something is closed. Nothing was changed.

        Notes
        -----
        Without recurrent layers, entries that are a prefix of the new one are dropped, because the new one serves every prompt that they
        serve.

        The copy is made before anything is dropped, unless ``max_bytes`` or the memory has no room for both. Then as few entries as
        necessary are dropped first: prefixes of the new one, then the least recently used ones. If the memory has no room even after
        entries as large as the new one were dropped, no more are dropped, and None is returned.
        """
        self._check_open()
        if not self._max_bytes:
            return None
        array = self._tokens(tokens)
        check_capture(self._cache, slot, len(array), stream=stream)
        return self._keep(array, adapter, lambda: SlotCopy.capture(self._cache, slot, len(array), place=self._place, stream=stream))

    def insert_copy(self, tokens: Tokens, copy: SlotCopy, *, adapter: str | None = None, stream: Any) -> PromptEntry | None:
        """Insert a sequence that was copied before.

        Parameters
        ----------
        tokens : sequence of int (n,)
            The tokens of the copy, at least one.
        copy : SlotCopy
            On the host, of all these tokens, from a cache of the same layers, dtypes and scales.
        adapter : str, optional
            Name of the adapter with which the copy was computed.
        stream : cuda.core.Stream
            The copies are ordered on it, and waited for.

        Returns
        -------
        PromptEntry or None
            As :meth:`insert`, by the same rules.

        Raises
        ------
        ShapeError, DTypeError, RangeError
            ``tokens`` and ``copy`` do not fit each other, or the copy is of another format. Nothing was changed.
        PlaceError, CaptureError, ClosedError
            The stream is of another memory or captured in a CUDA graph, or something is closed. Nothing was changed.
        """
        self._check_open()
        if not self._max_bytes:
            return None
        array = self._tokens(tokens)
        if len(array) != copy.length:
            raise ShapeError(f"tokens: expected {copy.length}, the length of the copy, got {len(array)}.")
        difference = self._format.difference(copy.slot_format)
        if difference is not None:
            raise ShapeError(f"copy: {difference}. It was made of another cache.")
        refuse_capture(self._cache.memory, "inserting a copy", stream)
        return self._keep(array, adapter, lambda: copy if self._place == "host" else copy.to_cache(self._cache, stream=stream))

    def _tokens(self, tokens: Tokens) -> TokenArray:
        array = token_array("tokens", tokens)
        if not len(array):
            raise ShapeError("tokens: expected at least one, got none.")
        return array

    def _keep(self, tokens: TokenArray, adapter: str | None, make_copy: Callable[[], SlotCopy]) -> PromptEntry | None:
        new = PromptEntry(tokens, self._format.nbytes(len(tokens)), adapter)
        for entry in self.entries:
            if self._covers(entry, new):
                self._mark_used(entry)
                return entry
        if new.nbytes > self._max_bytes:
            return None
        covered = {entry for entry in self._copies if self._covers(new, entry)}
        candidates = sorted(self._copies, key=lambda entry: entry not in covered)
        before = self.nbytes
        while self.nbytes + new.nbytes > self._max_bytes or (copy := _or_none(make_copy)) is None:
            if not candidates or before - self.nbytes >= new.nbytes:  # dropping more would not help
                return None
            del self._copies[candidates.pop(0)]
        for entry in covered & self._copies.keys():
            del self._copies[entry]
        self._copies[new] = copy
        return new

    def _covers(self, longer: PromptEntry, shorter: PromptEntry) -> bool:
        """Return True if an entry can replace a ``shorter`` one for every prompt."""
        if longer.adapter != shorter.adapter or (self._format.has_states and len(longer.tokens) != len(shorter.tokens)):
            return False
        return common_prefix(longer.tokens, shorter.tokens) == len(shorter.tokens)

    def _mark_used(self, entry: PromptEntry) -> None:
        """Make an entry the most recently used one."""
        self._copies[entry] = self._copies.pop(entry)

    def find(self, tokens: Tokens, adapter: str | None = None) -> PromptMatch | None:
        """Find the entry with the longest usable prefix of a prompt. It becomes the most recently used one.

        Parameters
        ----------
        tokens : sequence of int (n,)
            The whole prompt.
        adapter : str, optional
            Name of the adapter that will run it. Entries of others are not used.

        Returns
        -------
        PromptMatch or None
            At most ``n - 1`` tokens, because one must be computed; with recurrent layers all tokens of the entry. None if no entry
            can be used.

        Raises
        ------
        ShapeError, DTypeError, RangeError
            ``tokens`` are not token ids.
        ClosedError
            This object or its cache is closed.
        """
        self._check_open()
        if not self._max_bytes:
            return None
        prompt = token_array("tokens", tokens)
        best, most = None, 0
        for entry in (entry for entry in self._copies if entry.adapter == adapter):
            count = reusable_tokens(entry.tokens, prompt, whole=self._format.has_states)
            if count > most:
                best, most = entry, count
        if best is None:
            self._misses += 1
            return None
        self._mark_used(best)
        return PromptMatch(best, most)

    def restore(self, match: PromptMatch, slot: int, *, stream: Any) -> None:
        """Copy the tokens of a match to the front of a slot. Its length stays as it is: commit ``match.length`` afterwards.

        Parameters
        ----------
        match : PromptMatch
            From :meth:`find`; its entry must not have been dropped since.
        slot : int
            Any slot, active or not. Reset it before, because a reset to length 0 zeroes the states that are restored here.
        stream : cuda.core.Stream
            The copies are ordered on it. The call waits only for ``place="host"``, and allocates nothing.

        Raises
        ------
        SlotError, RangeError
            The slot is out of range, or it is too short for the match. Nothing was changed.
        PlaceError, CaptureError
            The stream is of another memory or captured in a CUDA graph. Nothing was changed.
        ClosedError
            The entry was dropped, or something is closed. Nothing was changed.
        """
        self._check_open()
        self._copy_of(match.entry).restore(self._cache, slot, match.length, stream=stream)
        self._hits += 1
        self._reused_tokens += match.length

    def copy_to_host(self, entry: PromptEntry, *, stream: Any) -> SlotCopy:
        """Copy an entry to the host.

        Parameters
        ----------
        entry : PromptEntry
            Held here.
        stream : cuda.core.Stream
            The copies are ordered on it, and waited for.

        Returns
        -------
        SlotCopy
            On the host; for ``place="host"`` the one that is held here.

        Raises
        ------
        PlaceError, CaptureError
            The stream is of another memory or captured in a CUDA graph.
        CapacityError
            The host has no room.
        ClosedError
            The entry was dropped, or something is closed.
        """
        self._check_open()
        copy = self._copy_of(entry)
        refuse_capture(self._cache.memory, "copying an entry to the host", stream)
        return copy.to_host(self._cache, stream=stream)

    def _copy_of(self, entry: PromptEntry) -> SlotCopy:
        if entry not in self._copies:
            raise ClosedError(
                "this prompt cache does not hold the entry: it was dropped since it was found, or found in another PromptCache. Call find."
            )
        return self._copies[entry]

    def clear(self) -> None:
        """Drop all entries. The counters of hits, misses and reused tokens stay."""
        self._copies.clear()

    def close(self) -> None:
        """Drop all entries and refuse new ones. The cache stays open. Idempotent."""
        super().close()

    def _release(self) -> None:
        self.clear()


def _or_none(make_copy: Callable[[], SlotCopy]) -> SlotCopy | None:
    """Return the copy, or None if there is no room for it."""
    try:
        return make_copy()
    except CapacityError:
        return None
