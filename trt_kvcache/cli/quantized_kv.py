"""What commands say of quantized K and V."""


def kv_format(dtype: str, scales: str | None) -> str:
    """Return what K and V of a cache are stored as.

    Parameters
    ----------
    dtype : str
        Of the cache.
    scales : str or None
        What shares a scale: see :class:`~trt_kvcache.KVCacheConfig`. None where K and V are not quantized.
    """
    if scales is None:
        return dtype
    return f"{dtype}, {'scales by token' if scales == 'token' else f'static scales by {scales}'}"
