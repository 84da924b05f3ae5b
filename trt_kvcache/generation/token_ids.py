"""Token ids as arrays, and common prefixes of two sequences: compared token by token, never by hash."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from trt_kvcache.errors import DTypeError, RangeError, ShapeError

TokenArray = npt.NDArray[np.int32]

_MAX_TOKEN_ID = int(np.iinfo(np.int32).max)


def token_array(what: str, tokens: Sequence[int] | npt.NDArray[Any]) -> TokenArray:
    """Return token ids as a new read-only int32 array ``(n,)``. ``what`` names the argument in errors."""
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
    if given.size and not 0 <= int(given.min()) <= int(given.max()) <= _MAX_TOKEN_ID:
        raise RangeError(f"{what}: expected token ids from 0 to {_MAX_TOKEN_ID}, got {int(given.min())} to {int(given.max())}.")
    array = np.array(given, np.int32)
    array.flags.writeable = False
    return array


def common_prefix(first: Sequence[int] | TokenArray, second: Sequence[int] | TokenArray) -> int:
    """Return the length of the common prefix of two sequences."""
    count = min(len(first), len(second))
    same = np.asarray(first[:count]) == np.asarray(second[:count])
    return count if same.all() else int(np.argmin(same))


def reusable_tokens(held: TokenArray, prompt: TokenArray, *, whole: bool) -> int:
    """Return the number of prompt tokens that need not run if the K and V of ``held`` exist: all but one at most, for the logits.

    ``whole``: all of ``held`` or nothing, since recurrent states exist after its last token only.
    """
    count = common_prefix(held, prompt[:-1])
    return 0 if whole and count < len(held) else count
