"""Token ids as arrays, and how much of a prompt is already there. Compared token by token."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from trt_kvcache.errors import DTypeError, RangeError, ShapeError

TokenArray = npt.NDArray[np.int32]

_LARGEST = int(np.iinfo(np.int32).max)


def token_array(what: str, tokens: Sequence[int] | npt.NDArray[Any]) -> TokenArray:
    """Return token ids as a read-only array of their own.

    Raises ShapeError, DTypeError or RangeError: not a sequence of integers from 0 to the largest int32.

    ``what``: For messages.
    ``tokens``: sequence of int, or NumPy integer array (n,).

    Returns
    -------
    ndarray int32 (n,)
    """
    if isinstance(tokens, str | bytes) or not isinstance(tokens, Sequence | np.ndarray):
        raise ShapeError(f"{what}: expected a sequence of token ids, got {type(tokens).__name__}.")
    try:
        given = np.asarray(tokens)
    except ValueError:
        given = np.empty((0, 0))
    if given.ndim != 1:
        raise ShapeError(f"{what}: expected one sequence of token ids (n,), got a nested one.")
    if given.size and given.dtype.kind not in "iu":
        raise DTypeError(f"{what}: expected token ids that are integers of at most 64 bits, got {given.dtype}.")
    if given.size and not 0 <= int(given.min()) <= int(given.max()) <= _LARGEST:
        raise RangeError(f"{what}: expected token ids from 0 to {_LARGEST}, got {int(given.min())} to {int(given.max())}.")
    array = np.array(given, np.int32)
    array.flags.writeable = False
    return array


def common_prefix(first: Sequence[int] | TokenArray, second: Sequence[int] | TokenArray) -> int:
    """Return how many tokens two sequences begin with alike."""
    count = min(len(first), len(second))
    same = np.asarray(first[:count]) == np.asarray(second[:count])
    return count if same.all() else int(np.argmin(same))


def reusable_tokens(held: TokenArray, prompt: TokenArray, *, whole: bool) -> int:
    """Return how many tokens of a prompt need not be run where those of ``held`` are there.

    ``held``, ``prompt``: ndarray int32 (n,), (m,).
    ``whole``: Only all of ``held`` or nothing: recurrent states are those after its last token, and cannot go back.

    Returns
    -------
    int
        At most ``m - 1``: one token at least is run, for its logits.
    """
    count = common_prefix(held, prompt[:-1])
    return 0 if whole and count < len(held) else count
