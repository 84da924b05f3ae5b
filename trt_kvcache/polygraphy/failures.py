"""Errors and warnings of this package as Polygraphy's own: a message in its log, and a ``PolygraphyException``."""

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from polygraphy.logger import G_LOGGER

from trt_kvcache.errors import KVCacheError


@contextmanager
def as_polygraphy() -> Iterator[None]:
    """Have errors end and warnings be shown as those of Polygraphy, in which its tools expect them."""
    try:
        with warnings.catch_warnings(record=True) as caught:  # logged afterwards, as the logger may warn too
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
