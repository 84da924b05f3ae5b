"""The exceptions of this package. They have one root, and each is also the builtin exception that a caller would expect.

Every message names the object, the expected and the given value, and a hint if there is one. An error is raised before
anything has changed, unless its message says otherwise.

A wrong argument raises the matching error class (:class:`RangeError`, :class:`ShapeError`, :class:`DTypeError`, :class:`PlaceError`,
:class:`SlotError`, :class:`LayerIndexError`, :class:`SequenceError`, :class:`MappingError`). A call that cannot be captured in a
CUDA graph raises :class:`CaptureError` while its stream is capturing. Everything raises :class:`ClosedError` once it, or the cache
that it works on, is closed.

Examples
--------
>>> from trt_kvcache import KVLayerConfig
>>> from trt_kvcache.errors import KVCacheError
>>> try:
...     KVLayerConfig(num_kv_heads=0, head_dim=64)
... except KVCacheError as error:
...     print(error, isinstance(error, ValueError))
KVLayerConfig.num_kv_heads: expected an integer from 1 to 2147483647, got 0. True
"""


class KVCacheError(Exception):
    """Root of every error that this package raises on purpose."""


class ConfigError(KVCacheError, ValueError):
    """A configuration that is not supported: a field is out of range, or fields contradict each other."""


class CheckpointError(KVCacheError, ValueError):
    """A model folder that is missing a part, is damaged, or holds a model that is not supported."""


class RangeError(KVCacheError, ValueError):
    """A number outside its range: a batch size, a length, an increment, a sampling parameter."""


class ShapeError(KVCacheError, ValueError):
    """An array or tensor of the wrong shape, or a slice outside its dimension."""


class PlaceError(KVCacheError, ValueError):
    """A tensor or stream of another memory: of the host instead of the device, or of another device."""


class LayoutError(KVCacheError, ValueError):
    """A view that is not contiguous, or not aligned, although TensorRT requires it."""


class MappingError(KVCacheError, ValueError):
    """A batch mapping that is not a compaction."""


class SnapshotError(KVCacheError, ValueError):
    """A snapshot that is foreign, truncated, altered or newer than this package."""


class DTypeError(KVCacheError, TypeError):
    """An array or tensor of the wrong dtype, or a dtype that the operation does not know."""


class SlotError(KVCacheError, IndexError):
    """A batch slot out of range. Slots never wrap: a negative one is an error."""


class LayerIndexError(KVCacheError, IndexError):
    """A layer index out of range, or of a layer of another type. Indices never wrap."""


class SequenceError(KVCacheError, KeyError):
    """An unknown or destroyed sequence handle."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class CapacityError(KVCacheError, RuntimeError):
    """The cache or the memory has not enough room."""


class QueueFullError(KVCacheError, RuntimeError):
    """The queue of waiting requests is full.

    Attributes
    ----------
    retry_after : float
        Seconds after which there may be room.
    """

    retry_after: float = 1.0


class BindingError(KVCacheError, RuntimeError):
    """An engine tensor and its view do not fit: name, shape, dtype, alias or memory."""


class BuildError(KVCacheError, RuntimeError):
    """An engine could not be built; the text has TensorRT's log messages."""


class EngineError(KVCacheError, RuntimeError):
    """An engine could not be loaded or enqueued; the text has TensorRT's log messages."""


class ProcessorError(KVCacheError, RuntimeError):
    """A logits processor raised or did not return logits, or the options of a request exclude all tokens.

    Attributes
    ----------
    request : int or None
        Index of the request: of a prompt of ``generate``, or of a handle. Cancel that handle to continue with the other requests.
    """

    request: int | None = None


class CaptureError(KVCacheError, RuntimeError):
    """An operation that cannot be captured in a CUDA graph was called while capturing."""


class LengthsUnknown(KVCacheError, RuntimeError):
    """The host does not know the exact lengths; ``sync_lengths`` reads them from the device."""


class ClosedError(KVCacheError, RuntimeError):
    """An object was used after ``close()``."""


class ThreadError(KVCacheError, RuntimeError):
    """An object that one thread may use at a time was used by a second one, while the first was in a call."""


class CudaError(KVCacheError, RuntimeError):
    """The CUDA driver or NVRTC refused a call, or is not there."""
