"""``decoder_profiles``: sizes of the enqueues that an engine takes, and of the logits that it returns."""

from functools import partial
from typing import Literal

from trt_kvcache._util.checks import int_in_range
from trt_kvcache.dtypes import itemsize
from trt_kvcache.engine.protocol import EngineProfile
from trt_kvcache.errors import ConfigError
from trt_kvcache.model import ModelConfig

#: Slots in the smallest enqueue of every profile.
MIN_BATCH_SIZE = 1

#: Logits that an engine without a plan has room for: new tokens per slot at most, and bytes.
_DEFAULT_LOGITS_PER_SLOT = 64
_DEFAULT_LOGITS_NBYTES = 64 << 20

#: New tokens per slot that the profile for verifying drafts is tuned for: a token and a draft of 16.
VERIFY_WIDTH = 17


def check_logits_per_slot(wanted: int | Literal["all"]) -> int | Literal["all"]:
    """Check a number of logits per slot that a caller gave, as far as possible without the length of a prefill."""
    if wanted == "all":
        return wanted
    if isinstance(wanted, str):
        raise ConfigError(f"max_logits_per_slot: expected a number of new tokens or 'all', got {wanted!r}.")
    return int_in_range("max_logits_per_slot", wanted, 1, error=ConfigError)


def logits_per_slot(wanted: int | Literal["all"], *, max_prefill_length: int) -> int:
    """Return the most new tokens per slot whose logits one enqueue returns; ``"all"`` stands for ``max_prefill_length``."""
    found = check_logits_per_slot(wanted)
    if found == "all":
        return max_prefill_length
    if found > max_prefill_length:
        raise ConfigError(
            f"max_logits_per_slot: expected at most max_prefill_length={max_prefill_length}, got {found}. "
            "Longer prompts are scored in chunks."
        )
    return found


def default_logits_per_slot(model: ModelConfig, *, max_batch_size: int, max_prefill_length: int) -> int:
    """Return the logits per slot of an engine without a plan, where no number was given: 64, or fewer to fit into 64 MiB."""
    fitting = _DEFAULT_LOGITS_NBYTES // (max_batch_size * model.vocab_size * itemsize("float32"))
    return min(max(fitting, 2), _DEFAULT_LOGITS_PER_SLOT, max_prefill_length)


def decoder_profiles(
    *, max_batch_size: int, max_prefill_length: int, max_logits_per_slot: int = 1, draft_tree: int | None = None
) -> tuple[EngineProfile, ...]:
    """Return the optimisation profiles: prefill, decode, and verify if the logits of more than one token per slot are wanted.

    Verify takes up to 17 new tokens, or the ``draft_tree`` tokens of a tree; it is left out where it would equal prefill.
    """
    profile = partial(EngineProfile, min_batch=MIN_BATCH_SIZE, min_width=1)
    profiles = (
        profile(name="prefill", max_batch=max_batch_size, max_width=max_prefill_length, max_logits=max_logits_per_slot),
        profile(name="decode", max_batch=max(2, max_batch_size), max_width=1),
    )
    width = min(max(VERIFY_WIDTH, draft_tree or 0), max_logits_per_slot)
    if not 1 < width < max_prefill_length:
        return profiles
    return (*profiles, profile(name="verify", max_batch=max_batch_size, max_width=width, max_logits=width))
