"""The weights of tokens, as integers: the definition of sampling, the same on host and device.

Floating-point sums depend on their order, which differs between a GPU and NumPy. So weights are integers, from single float32 operations
with rounding to nearest, which every CPU and GPU computes alike (``plugins/sampling/weights.cuh`` has the same):

1. The *class* of a token is ``(largest - logit) * scale``, rounded to an integer, where ``scale`` is ``2**16 * log2(e) / temperature``:
   the distance to the largest logit as a power of 2, in steps of ``2**-16``. Tokens of one class are equally likely.
2. The *weight* of a class is ``2**(33 - class / 2**16)``, rounded down to an integer: ``2**33`` for the largest logit. It falls
   with the class, down to 0, and sums over ``2**20`` tokens fit into 53 bits.
3. A random number u, 53 bits of Philox, chooses the first token for which the sum of the weights up to it exceeds
   ``floor(u * total / 2**53)``. Tokens are in the order of their ids; with top-p, the lowest classes are first, and within a class the
   lowest ids.
4. Top-k keeps the largest logits, of equal ones (0 and -0 are equal) the lowest ids. Top-p then keeps, lowest classes first, the fewest
   tokens with a sum of at least ``ceil(p * total)``, where p is a multiple of ``2**-53``, rounded up. Min-p then keeps weights of at least
   ``ceil(p * 2**33)``.

Rounding the class changes a weight by a factor of at most ``1 + 6e-6``. The weight is then rounded down: below ``2**-33`` of the
largest it is 0, so the token is never chosen.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np

from trt_kvcache.kernels.scratch import scratch

Float32 = np.ndarray[Any, np.dtype[np.float32]]

#: Fraction bits of a class, bits of the largest weight, and the first class with weight 0.
FRACTION_BITS, WEIGHT_BITS = 16, 33
NUM_CLASSES = (WEIGHT_BITS + 1) << FRACTION_BITS

#: Bits of a random number.
RANDOM_BITS = 53

_FLOAT32 = np.finfo(np.float32)

#: Of 2**(33 - x) for x from 0 to 1, the highest power first. The variable is 2**16 times x.
_POLYNOMIAL = tuple(
    np.float32(float.fromhex(coefficient))
    for coefficient in ("-0x1.ef66d0p-58", "0x1.2da7d4p-38", "-0x1.c4fef8p-20", "0x1.ebe392p-2", "-0x1.62e3bcp16", "0x1p33")
)

#: Tokens that are computed together: they stay in the L1 or L2 cache.
CHUNK = 1 << 16


def scale_of(temperature: float) -> float:
    """Return the factor of distances of logits, a float32, for a temperature above 0."""
    scale = math.ldexp(math.log2(math.e), FRACTION_BITS) / max(temperature, 1e-300)
    return float(np.float32(min(max(scale, float(_FLOAT32.tiny)), float(_FLOAT32.max))))


def top_p_bits(top_p: float) -> int:
    """Return ``top_p`` as a multiple of ``2**-53``, rounded up; 0 for 1, which keeps all."""
    return 0 if top_p >= 1 else math.ceil(Fraction(float(top_p)) * (1 << RANDOM_BITS))


def min_weight(min_p: float) -> int:
    """Return the smallest weight that ``min_p`` keeps."""
    return math.ceil(Fraction(float(min_p)) * (1 << WEIGHT_BITS))


def token_classes(
    logits: Float32, largest: Any, scale: float, *, out: np.ndarray[Any, np.dtype[np.int32]]
) -> np.ndarray[Any, np.dtype[np.int32]]:
    """Return the classes of tokens, in ``out``. Classes end at ``2 * NUM_CLASSES``."""
    for start in range(0, logits.size, CHUNK):
        part = slice(start, start + CHUNK)
        distances = out[part].view(np.float32)
        np.subtract(largest, logits[part], out=distances)
        np.multiply(distances, np.float32(scale), out=distances)
        if not distances.max() < _MAX_CLASS:
            np.minimum(distances, _MAX_CLASS, out=distances)
        np.rint(distances, out=distances)
        np.copyto(out[part], distances, casting="unsafe")
    return out


#: Up to this class a weight, before it is rounded down, has an exponent of float32.
_MAX_CLASS = np.float32(2 * NUM_CLASSES)


def class_weights(classes: np.ndarray[Any, np.dtype[np.int32]], *, out: Float32) -> Float32:
    """Return the weights of classes, in ``out``: integers as float32."""
    for start in range(0, classes.size, CHUNK):
        part = slice(start, start + CHUNK)
        _chunk_weights(classes[part], out[part])
    return out


def _chunk_weights(classes: np.ndarray[Any, np.dtype[np.int32]], out: Float32) -> None:
    fractions, shifts = (scratch.array(name, dtype, classes.size) for name, dtype in (("fractions", "float32"), ("shifts", "int32")))
    np.bitwise_and(classes, (1 << FRACTION_BITS) - 1, out=shifts)
    np.copyto(fractions, shifts, casting="unsafe")
    np.multiply(fractions, _POLYNOMIAL[0], out=out)
    np.add(out, _POLYNOMIAL[1], out=out)
    for coefficient in _POLYNOMIAL[2:]:
        np.multiply(out, fractions, out=out)
        np.add(out, coefficient, out=out)
    # Times 2 to the power of -(class >> 16), in the exponent of the float32.
    np.bitwise_xor(classes, shifts, out=shifts)
    np.left_shift(shifts, 23 - FRACTION_BITS, out=shifts)
    np.subtract(out.view(np.int32), shifts, out=out.view(np.int32))
    np.floor(out, out=out)


def token_weights(logits: Float32, largest: Any, scale: float, *, out: Float32) -> Float32:
    """Return the weights of tokens, in ``out``: integers as float32."""
    for start in range(0, logits.size, CHUNK):
        part = slice(start, start + CHUNK)
        classes = scratch.array("classes", "int32", logits[part].size)
        class_weights(token_classes(logits[part], largest, scale, out=classes), out=out[part])
    return out
