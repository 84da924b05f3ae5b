"""Greedy tokens of an engine, compared with the NumPy engine."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from trt_kvcache.doctor.cases import CheckFailure
from trt_kvcache.session.session import InferenceSession


def check_greedy(
    what: str,
    tokens: Sequence[Sequence[int]],
    prompts: Sequence[Sequence[int]],
    reference: InferenceSession,
    tolerance: float,
) -> int:
    """Check that each token is the most likely one of the reference, given the tokens before it; return the number of ties.

    In a tie another token's logit differs by less than the tolerance, relative to the largest logit.
    """
    ties = 0
    for index, (prompt, generated) in enumerate(zip(prompts, tokens, strict=True)):
        for place, token in enumerate(generated):
            logits = reference.prefill([[*prompt, *generated[:place]]])[0] if not place else reference.decode([generated[place - 1]])[0]
            best = int(logits.argmax())
            if token == best:
                continue
            margin = float(logits[best] - logits[token]) / float(np.abs(logits).max())
            if margin > tolerance:
                raise CheckFailure(
                    f"{what}: prompt {index}, token {place}: expected {best}, got {token}, "
                    f"whose logit is lower by {margin:.3g} of the largest (tolerance {tolerance:g})"
                )
            ties += 1
    return ties
