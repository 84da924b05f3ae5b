"""``WIDTH_BUCKETS``: the widths of the enqueues of TensorRT engines, so that a new prompt length is no new shape.

TensorRT for RTX compiles kernels for each shape, so there are few widths. By operations and bytes, an enqueue of up to 100 to 300 rows
takes about the time to read the weights. So the widths from 64 to 512 are at most an eighth apart: with powers of two alone, and padding of
at most one row in eight, a prompt of 65 to 256 tokens would run as two or three enqueues, in up to twice the time. This is an estimate; no
TensorRT engine has run on a GPU.
"""

from trt_kvcache.engine.close_widths import eighths
from trt_kvcache.memory.shapes import MAX_DIMENSION

#: Up to here, all of an enqueue may be padding but one row.
_LAST_FEW = 64
#: Above, a longer prompt is cut at powers of two: each of these enqueues takes far longer than the time to read the weights.
_LAST_CLOSE = 512

_POWERS = [1 << exponent for exponent in range(MAX_DIMENSION.bit_length())]

WIDTH_BUCKETS: tuple[int, ...] = (
    *(width for width in _POWERS if width <= _LAST_FEW),
    *eighths(*(width for width in _POWERS if _LAST_FEW <= width < _LAST_CLOSE)),
    *(width for width in _POWERS if width > _LAST_CLOSE),
)
