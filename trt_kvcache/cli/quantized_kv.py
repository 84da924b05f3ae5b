"""What commands say of quantized K and V."""


def kv_format(dtype: str, scales: str | None) -> str:
    """Return what K and V of a cache are stored as."""
    if scales is None:
        return dtype
    return f"{dtype}, {'scales by token' if scales == 'token' else f'static scales by {scales}'}"
