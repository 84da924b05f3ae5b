"""The definition of a sampled token, computed as it is written, one token after another: the oracle of the host and of the device."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np

COEFFICIENTS = ("-0x1.ef66d0p-11", "0x1.2da7d4p-7", "-0x1.c4fef8p-5", "0x1.ebe392p-3", "-0x1.62e3bcp-1", "0x1p0")


def plain_classes(logits, temperature):
    """The class of each token; those that have no weight have the same one."""
    scale = np.float32(min(max(2**16 * math.log2(math.e) / max(temperature, 1e-300), 2.0**-126), float(np.finfo(np.float32).max)))
    with np.errstate(over="ignore"):
        distances = (logits.max() - logits) * scale
    return [34 * 2**16 if distance >= 34 * 2**16 else round(float(distance)) for distance in distances]


def plain_weight(token_class):
    """The weight of a class: an integer."""
    whole, fraction = divmod(token_class, 2**16)
    power, x = np.float32(0), np.float32(fraction / 2**16)
    for coefficient in COEFFICIENTS:
        power = power * x + np.float32(float.fromhex(coefficient))
    return int(float(power) * 2**33) >> whole


def plain_distribution(logits, *, temperature, top_k=0, top_p=1.0, min_p=0.0):
    """The tokens that are kept, in the order in which they are chosen, and their weights."""
    logits = logits + np.float32(0)
    tokens = range(len(logits))
    if top_k:
        tokens = sorted(sorted(tokens, key=lambda token: -logits[token])[:top_k])
    classes = plain_classes(logits, temperature)
    weights = {token_class: plain_weight(token_class) for token_class in set(classes)}
    if top_p < 1:
        wanted = math.ceil(Fraction(math.ceil(Fraction(top_p) * 2**53), 2**53) * sum(weights[classes[token]] for token in tokens))
        kept, so_far = [], 0
        for token in sorted(tokens, key=lambda token: classes[token]):
            if so_far >= wanted:
                break
            kept.append(token)
            so_far += weights[classes[token]]
        tokens = kept
    tokens = [token for token in tokens if weights[classes[token]] >= Fraction(min_p) * 2**33]
    return tokens, [weights[classes[token]] for token in tokens]


def place_in(tokens, weights, uniform):
    """The token of a distribution that a random number chooses."""
    target, so_far = int(uniform * 2**53) * sum(weights) // 2**53, 0
    for token, weight in zip(tokens, weights, strict=True):
        so_far += weight
        if so_far > target:
            return token
    raise AssertionError("no token")


def plain_choice(logits, *, uniform, **options):
    """The token that a random number chooses."""
    return place_in(*plain_distribution(logits, **options), uniform)
