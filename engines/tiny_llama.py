"""A network script for the shipped model, for four sequences of up to 256 tokens. How to run it: README.md."""

from pathlib import Path

from trt_kvcache import NetworkScript

_SCRIPT = NetworkScript(
    Path(__file__).resolve().parents[1] / "examples" / "tiny-llama",
    max_batch_size=4,
    max_sequence_length=256,
    max_prefill_length=64,
)

load_network = _SCRIPT.load_network
load_config = _SCRIPT.load_config
