"""Converts errors and warnings of this package to Polygraphy's: a ``PolygraphyException`` and messages in its log."""

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from polygraphy.logger import G_LOGGER

from trt_kvcache.errors import KVCacheError


@contextmanager
def as_polygraphy() -> Iterator[None]:
    """Raise a KVCacheError or OSError as ``PolygraphyException`` with the same text, and log warnings by Polygraphy."""
    try:
        with warnings.catch_warnings(record=True) as caught:  # logged afterwards, since the logger may warn itself
            warnings.simplefilter("always", UserWarning)
            try:
                yield
            finally:
                seen = list(caught)
    except (KVCacheError, OSError) as error:
        _log(seen)
        G_LOGGER.critical(str(error))
    _log(seen)


def _log(caught: Iterable[warnings.WarningMessage]) -> None:
    for warning in caught:
        G_LOGGER.warning(str(warning.message))
