"""``BenchmarkCase``: the work of one row of a benchmark."""

from collections.abc import Sequence
from dataclasses import dataclass

from trt_kvcache._util.checks import int_in_range
from trt_kvcache.errors import CapacityError, ConfigError


@dataclass(frozen=True, kw_only=True)
class BenchmarkCase:
    """A prompt, decode steps after it, or both, in some slots at once.

    Parameters
    ----------
    prompt_tokens : int
        Tokens of the prompt of each slot. 0 measures decode steps alone: the prompt is one token, which is not counted.
    generate_tokens : int
        Decode steps after the first token, of one token per slot each. 0 measures the prompt alone.
    batch_size : int
        Number of slots.
    depth : int
        Tokens in each slot before the measurement.

    Raises
    ------
    ConfigError
        A number is out of range, or there is nothing to measure.

    Examples
    --------
    >>> from trt_kvcache.benchmarking import BenchmarkCase
    >>> BenchmarkCase(prompt_tokens=512, generate_tokens=128, depth=4096).name
    'pp512+tg128 @ d4096'
    """

    prompt_tokens: int = 0
    generate_tokens: int = 0
    batch_size: int = 1
    depth: int = 0

    def __post_init__(self) -> None:
        for name, least in (("prompt_tokens", 0), ("generate_tokens", 0), ("batch_size", 1), ("depth", 0)):
            int_in_range(f"BenchmarkCase.{name}", getattr(self, name), least, error=ConfigError)
        if not self.prompt_tokens and not self.generate_tokens:
            raise ConfigError("BenchmarkCase: expected prompt_tokens or generate_tokens above 0, got 0 for both.")

    @property
    def name(self) -> str:
        """Name in llama-bench: ``pp512``, ``tg128``, ``pp512+tg128``, followed by ``@ d4096`` for a depth."""
        parts = [f"pp{self.prompt_tokens}"] if self.prompt_tokens else []
        parts += [f"tg{self.generate_tokens}"] if self.generate_tokens else []
        return "+".join(parts) + (f" @ d{self.depth}" if self.depth else "")

    @property
    def prompt_length(self) -> int:
        """Tokens of the prompt in each slot, at least one."""
        return max(self.prompt_tokens, 1)

    @property
    def tokens_per_slot(self) -> int:
        """Tokens in each slot at the end."""
        return self.depth + self.prompt_length + self.generate_tokens


def check_cases(cases: Sequence[BenchmarkCase], *, max_batch_size: int, max_sequence_length: int) -> None:
    """Raise ConfigError if there is no case, CapacityError if one does not fit into the cache."""
    if not cases:
        raise ConfigError("cases: expected at least one, got none.")
    for case in cases:
        if case.batch_size > max_batch_size:
            raise CapacityError(f"{case.name}: expected a batch of at most {max_batch_size} (max_batch_size), got {case.batch_size}.")
        if case.tokens_per_slot > max_sequence_length:
            raise CapacityError(
                f"{case.name}: expected at most {max_sequence_length} tokens in a slot (max_sequence_length), got {case.tokens_per_slot}: "
                f"{case.depth} of the depth, {case.prompt_length} of the prompt, {case.generate_tokens} generated."
            )
