"""A network script for any model: the Hugging Face folder and the sizes come from the environment. README.md shows its use."""

import os

from trt_kvcache import ConfigError, NetworkScript


def _variable(name: str, default: str | None = None) -> str:
    value = os.environ.get(name, default)
    if not value:
        raise ConfigError(f"{name}: expected this variable in the environment, it is not set. See engines/README.md.")
    return value


def _number(name: str, default: str) -> int:
    value = _variable(name, default)
    if not value.isdecimal():
        raise ConfigError(f"{name}: expected a number, got {value!r}.")
    return int(value)


_SCRIPT = NetworkScript(
    _variable("TRT_KVCACHE_MODEL"),
    max_batch_size=_number("TRT_KVCACHE_MAX_BATCH_SIZE", "4"),
    max_sequence_length=_number("TRT_KVCACHE_MAX_SEQUENCE_LENGTH", "1024"),
    max_prefill_length=_number("TRT_KVCACHE_MAX_PREFILL_LENGTH", "256"),
    dtype=os.environ.get("TRT_KVCACHE_DTYPE"),
    attention=_variable("TRT_KVCACHE_ATTENTION", "auto"),
)

load_network = _SCRIPT.load_network
load_config = _SCRIPT.load_config
