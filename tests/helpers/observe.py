"""What an operation may have changed in a cache or in its lengths, and rows to recognize."""

from contextlib import contextmanager

import numpy as np

from tests.helpers.cache_cases import whole
from trt_kvcache import Lengths
from trt_kvcache.errors import LengthsUnknown


def _observe(subject):
    """Everything that an operation could change: bytes with their padding, addresses, lengths, the mirror, live memory."""
    lengths = subject if isinstance(subject, Lengths) else subject.lengths
    tensors = [lengths.tensor]
    if lengths is not subject:
        tensors += [subject.get_combined_kv_cache(index) for index in range(subject.num_layers)]
        scales = [subject.get_kv_scales(index) for index in range(subject.num_layers)]
        tensors += [one for one in scales if one is not None]
    try:
        host = lengths.host
    except LengthsUnknown as error:
        host = str(error)
    return {
        "bytes": [whole(tensor).numpy().tobytes() for tensor in tensors],
        "addresses": [tensor.ptr for tensor in tensors],
        "active": (lengths.active_batch_size, lengths.active_tensor.shape, lengths.active_tensor.ptr),
        "mirror": (host, lengths.upper_bounds, lengths.all_empty),
        "live_nbytes": lengths.tensor.memory.live_nbytes,
    }


@contextmanager
def unchanged(subject):
    """Bytes and state of a K/V manager or a ``Lengths`` are afterwards as they were before."""
    before = _observe(subject)
    yield
    assert _observe(subject) == before


def fill_kv(cache, *, stream, value=None):
    """Overwrite all K/V bytes of a manager, padding included, and return what was written: one array per allocation."""
    written = {}
    for index in range(cache.num_layers):
        tensor = whole(cache.get_combined_kv_cache(index))
        if tensor.ptr not in written:
            random = np.random.default_rng(index).integers(0, 256, tensor.shape, np.uint8)
            written[tensor.ptr] = random if value is None else np.full(tensor.shape, value, np.uint8)
            cache.memory.upload(tensor, written[tensor.ptr], stream=stream)
    cache.memory.synchronize(stream)
    return list(written.values())
