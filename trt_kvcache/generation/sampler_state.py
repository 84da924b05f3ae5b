"""``SamplerState``: the state of a sampler, for another process to continue with."""

from dataclasses import dataclass

from trt_kvcache._util.checks import as_int, int_in_range
from trt_kvcache.generation.sampling import SamplingParams


@dataclass(frozen=True, kw_only=True)
class SamplerState:
    """The whole state of a ``Sampler``.

    Parameters
    ----------
    seed : int
        The seed of the request, from 0 to ``2**63 - 1``.
    counter : int
        Tokens that were chosen with this seed so far, 0 or more.
    generated : int
        Number of tokens at the end of the sequence that the request has generated: presence and frequency penalties count these.

    Raises
    ------
    RangeError
        A value is out of the range that :class:`~trt_kvcache.generation.sampling.SamplingParams` accepts.

    Examples
    --------
    A request that continues where another one stopped:

    >>> from trt_kvcache import SamplerState, SamplingParams
    >>> state = SamplerState(seed=7, counter=12)
    >>> params = SamplingParams(temperature=0.8, seed=state.seed, counter=state.counter)
    >>> params.seed, params.counter
    (7, 12)
    """

    seed: int
    counter: int
    generated: int = 0

    def __post_init__(self) -> None:
        for name in ("seed", "counter"):
            object.__setattr__(self, name, as_int(f"SamplerState.{name}", getattr(self, name)))
        object.__setattr__(self, "generated", int_in_range("SamplerState.generated", self.generated, 0))
        SamplingParams(seed=self.seed, counter=self.counter)
