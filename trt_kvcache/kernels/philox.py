"""Random numbers by index: Philox (Salmon et al., 2011) is counter-based, so any number is computed directly."""

from __future__ import annotations

import numpy as np

from trt_kvcache.kernels.token_weights import RANDOM_BITS

# A Philox generator produces four numbers per block, and can skip blocks.
_NUMBERS_PER_BLOCK = 4


def generator_at(seed: int, counter: int) -> np.random.Generator:
    """Return a generator of the random numbers of a seed, from index ``counter`` on."""
    blocks, rest = divmod(counter, _NUMBERS_PER_BLOCK)
    generator = np.random.Generator(np.random.Philox(key=seed).advance(blocks))
    generator.random(rest)
    return generator


def random_bits(seed: int, counter: int) -> int:
    """Return the number at index ``counter``, times ``2**53``: an integer."""
    return int(generator_at(seed, counter).random() * 2.0**RANDOM_BITS)
