"""``RecurrentCache``: the operations on recurrent and conv states. Seeds 001 and 003 have them under different names."""

from collections.abc import Sequence
from typing import Any

from trt_kvcache._util.checks import int_in_range, layer_index, slot_index
from trt_kvcache.cache.mamba_config import MambaCacheConfig
from trt_kvcache.cache.recurrent_states import RecurrentStates, StateKind
from trt_kvcache.cache.slot_cache import SlotCache
from trt_kvcache.errors import ConfigError, RangeError, ShapeError
from trt_kvcache.memory.graph_capture import refuse_capture
from trt_kvcache.memory.tensor import DeviceTensor


class RecurrentCache(SlotCache):
    """A cache with the states of recurrent layers, of which there may be none. Not thread-safe.

    An enqueue reads the current states and writes the next ones. Without ``ping_pong`` they are the same. With it they are two
    buffers: after an enqueue over all active slots call :meth:`swap`, after one over some of them :meth:`copy_back`.
    Everything else acts on the current states. A CUDA graph holds the addresses of one :attr:`parity`.

    Notes
    -----
    Memory, shared lengths and errors: see :class:`~trt_kvcache.cache.slot_cache.SlotCache`. Here are operations only, and the
    states that a constructor of a subclass has set; without states they have nothing to do.
    """

    _states: RecurrentStates | None = None

    def _set_states(self, config: MambaCacheConfig, stream: Any) -> None:
        self._states = RecurrentStates(config, self._resources, stream=stream)
        self._contents.append(self._states)

    @property
    def mamba_config(self) -> MambaCacheConfig | None:
        """The recurrent layers, in their order; None if the cache has none."""
        return None if self._states is None else self._states.config

    @property
    def states(self) -> RecurrentStates | None:
        """The states of the recurrent layers; None if the cache has none."""
        return self._states

    @property
    def num_recurrent_layers(self) -> int:
        """Recurrent layers."""
        return 0 if self._states is None else self._states.num_layers

    def get_recurrent_state(self, recurrent_layer_idx: int) -> DeviceTensor:
        """Return the current recurrent state of one layer, which the next enqueue reads.

        Parameters
        ----------
        recurrent_layer_idx : int
            Index among the recurrent layers, from 0.

        Returns
        -------
        DeviceTensor ``[B, num_heads, head_dim, state_size]``
            Contiguous.

        Raises
        ------
        LayerIndexError
            There is no such layer.
        ConfigError
            The layers keep a conv state only.
        """
        return self._state(StateKind.RECURRENT, recurrent_layer_idx)

    def get_conv_state(self, recurrent_layer_idx: int) -> DeviceTensor:
        """Return the current conv state of one layer, which the next enqueue reads.

        Parameters
        ----------
        recurrent_layer_idx : int
            Index among the recurrent layers, from 0.

        Returns
        -------
        DeviceTensor ``[B, conv_dim, conv_kernel]``
            Contiguous.

        Raises
        ------
        LayerIndexError
            There is no such layer.
        """
        return self._state(StateKind.CONV, recurrent_layer_idx)

    def get_next_recurrent_state(self, recurrent_layer_idx: int) -> DeviceTensor:
        """Return the recurrent state of one layer that the next enqueue writes; without ``ping_pong`` it is the current one.

        Parameters
        ----------
        recurrent_layer_idx : int
            Index among the recurrent layers, from 0.

        Returns
        -------
        DeviceTensor ``[B, num_heads, head_dim, state_size]``
            Contiguous.

        Raises
        ------
        LayerIndexError
            There is no such layer.
        ConfigError
            The layers keep a conv state only.
        """
        return self._state(StateKind.RECURRENT, recurrent_layer_idx, of_next=True)

    def get_next_conv_state(self, recurrent_layer_idx: int) -> DeviceTensor:
        """Return the conv state of one layer that the next enqueue writes; without ``ping_pong`` it is the current one.

        Parameters
        ----------
        recurrent_layer_idx : int
            Index among the recurrent layers, from 0.

        Returns
        -------
        DeviceTensor ``[B, conv_dim, conv_kernel]``
            Contiguous.

        Raises
        ------
        LayerIndexError
            There is no such layer.
        """
        return self._state(StateKind.CONV, recurrent_layer_idx, of_next=True)

    def _state(self, kind: StateKind, recurrent_layer_idx: int, *, of_next: bool = False) -> DeviceTensor:
        self._check_open()
        index = layer_index(recurrent_layer_idx, self.num_recurrent_layers, name="recurrent_layer_idx")
        assert self._states is not None  # it has this layer
        if kind not in self._states.kinds:
            raise ConfigError(f"the recurrent layers have no {kind.value} state: num_heads is 0 in their configuration.")
        return (self._states.next if of_next else self._states.current)(kind).layers[index]

    @property
    def parity(self) -> int:
        """Which of the two buffers of ``ping_pong`` is current, 0 or 1; always 0 without."""
        return 0 if self._states is None else self._states.parity

    def swap(self) -> None:
        """Make the next states current, after an enqueue over *all* active slots. Without ``ping_pong`` nothing changes.

        The host swaps two addresses; nothing is ordered on a stream.
        """
        self._check_open()
        if self._states is not None:
            self._states.swap()

    def copy_back(self, slot: int, count: int, *, stream: Any) -> None:
        """Make the next states of some active slots current, after an enqueue over these slots alone.

        Parameters
        ----------
        slot : int
            The first of the slots.
        count : int
            How many slots, from ``slot`` on. All of them are active.
        stream : cuda.core.Stream or GraphBuilder
            The copies are ordered on it, one launch per kind; the call neither waits nor allocates, and can be captured. Without
            ``ping_pong`` nothing is copied.

        Raises
        ------
        SlotError, RangeError
            The slots are not all active.
        """
        self._check_open()
        first = slot_index(slot, self.active_batch_size, of="active slots")
        number = int_in_range("count", count, 0)
        if first + number > self.active_batch_size:
            raise RangeError(f"count: expected at most {self.active_batch_size - first} active slots from slot {first} on, got {number}.")
        self._memory.check_stream(stream)
        if self._states is not None:
            self._states.copy_back(first, number, stream=stream)

    def keep_states(self, slot: int, *, stream: Any) -> None:
        """Copy the current states of a slot that leaves the active batch to the next ones, so that :meth:`swap` does not lose them.

        Parameters
        ----------
        slot : int
            Any slot, active or not.
        stream : cuda.core.Stream
            The copies are ordered on it, one launch per kind; the call neither waits nor allocates. Without ``ping_pong`` nothing
            is copied.

        Raises
        ------
        SlotError
            There is no such slot.
        CaptureError
            The stream is capturing.
        """
        self._check_open()
        index = slot_index(slot, self.max_batch_size)
        refuse_capture(self._memory, "keep_states", stream, because="what is replayed later keeps nothing now")
        if self._states is not None:
            self._states.keep(index, stream=stream)

    def clear_mamba_states(self, *, stream: Any) -> None:
        """Zero the current states of all layers and slots, as after a warm-up. Lengths stay as they are.

        Parameters
        ----------
        stream : cuda.core.Stream or GraphBuilder
            The writes are ordered on it; the call neither waits nor allocates.

        Notes
        -----
        ``clearMambaStates`` of seed 001.
        """
        self._check_open()
        self._memory.check_stream(stream)
        if self._states is not None:
            self._states.clear(stream=stream)

    def capture_recurrent_states(self, slot: int, *, stream: Any) -> list[DeviceTensor]:
        """Copy the current recurrent states of a slot into new tensors. This allocates.

        Parameters
        ----------
        slot : int
            Any slot, active or not.
        stream : cuda.core.Stream
            The copies are ordered on it, in one launch; the call does not wait.

        Returns
        -------
        list of DeviceTensor ``[num_heads, head_dim, state_size]``
            One per recurrent layer, contiguous. They share one allocation. None if the layers keep a conv state only.

        Raises
        ------
        SlotError
            There is no such slot.
        CapacityError
            The memory has no room for the copy.
        CaptureError
            The stream is capturing.

        Notes
        -----
        ``captureRecurrentStates`` of seed 003, ``captureSSMStates`` of seed 001.
        """
        return self._capture(StateKind.RECURRENT, slot, stream)

    def capture_conv_states(self, slot: int, *, stream: Any) -> list[DeviceTensor]:
        """Copy the current conv states of a slot into new tensors. This allocates.

        Parameters
        ----------
        slot : int
            Any slot, active or not.
        stream : cuda.core.Stream
            The copies are ordered on it, in one launch; the call does not wait.

        Returns
        -------
        list of DeviceTensor ``[conv_dim, conv_kernel]``
            One per recurrent layer, contiguous. They share one allocation.

        Raises
        ------
        SlotError
            There is no such slot.
        CapacityError
            The memory has no room for the copy.
        CaptureError
            The stream is capturing.

        Notes
        -----
        ``captureConvStates`` of seeds 001 and 003.
        """
        return self._capture(StateKind.CONV, slot, stream)

    def restore_recurrent_states(self, saved: Sequence[DeviceTensor], slot: int, *, stream: Any) -> None:
        """Copy captured recurrent states into the current ones of a slot. Lengths stay as they are.

        Parameters
        ----------
        saved : sequence of DeviceTensor ``[num_heads, head_dim, state_size]``
            What ``capture_recurrent_states`` returned. The tensors must stay open until the copies are done.
        slot : int
            Any slot, active or not.
        stream : cuda.core.Stream
            The copies are ordered on it, in one launch; the call neither waits nor allocates.

        Raises
        ------
        SlotError
            There is no such slot.
        ShapeError, DTypeError, PlaceError, LayoutError, ClosedError
            The tensors do not fit the layers, are not contiguous, or are closed.
        CaptureError
            The stream is capturing.
        """
        self._restore(StateKind.RECURRENT, saved, slot, stream)

    def restore_conv_states(self, saved: Sequence[DeviceTensor], slot: int, *, stream: Any) -> None:
        """Copy captured conv states into the current ones of a slot. Lengths stay as they are.

        Parameters
        ----------
        saved : sequence of DeviceTensor ``[conv_dim, conv_kernel]``
            What ``capture_conv_states`` returned. The tensors must stay open until the copies are done.
        slot : int
            Any slot, active or not.
        stream : cuda.core.Stream
            The copies are ordered on it, in one launch; the call neither waits nor allocates.

        Raises
        ------
        SlotError
            There is no such slot.
        ShapeError, DTypeError, PlaceError, LayoutError, ClosedError
            The tensors do not fit the layers, are not contiguous, or are closed.
        CaptureError
            The stream is capturing.
        """
        self._restore(StateKind.CONV, saved, slot, stream)

    def _capture(self, kind: StateKind, slot: int, stream: Any) -> list[DeviceTensor]:
        self._check_open()
        index = slot_index(slot, self.max_batch_size)
        refuse_capture(self._memory, f"capture_{kind.value}_states", stream)
        return [] if self._states is None else self._states.capture(kind, index, stream=stream)

    def _restore(self, kind: StateKind, saved: Sequence[DeviceTensor], slot: int, stream: Any) -> None:
        self._check_open()
        index = slot_index(slot, self.max_batch_size)
        refuse_capture(self._memory, f"restore_{kind.value}_states", stream)
        if self._states is not None:
            self._states.restore(kind, saved, index, stream=stream)
        elif saved:
            raise ShapeError(f"saved: expected no tensor, as there is no recurrent layer, got {len(saved)}.")
