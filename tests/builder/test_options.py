"""Options that cannot be served are refused before anything is made."""

from dataclasses import replace

import pytest

from tests.helpers.small_model import SMALL
from tests.helpers.tensorrt_modules import fake_module
from trt_kvcache.builder.options import BuildOptions
from trt_kvcache.checkpoint import ModelConfig
from trt_kvcache.errors import ConfigError
from trt_kvcache.trt.log import TensorRTLog
from trt_kvcache.trt.module import TensorRT

MODEL = ModelConfig.from_dict(SMALL)


def options(**changes):
    return BuildOptions(**{"max_batch_size": 3, "max_sequence_length": 40, "max_prefill_length": 11, **changes})


def full_tensorrt(version):
    module = fake_module(version)
    return TensorRT(module=module, flavour="tensorrt", version=version, log=TensorRTLog(module))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        *((name, 0, "expected at least 1, got 0.") for name in ("max_batch_size", "max_sequence_length", "max_prefill_length")),
        ("max_batch_size", True, "expected an integer, got True."),
        ("max_sequence_length", "40", "expected an integer, got '40'."),
        (
            "max_prefill_length",
            41,
            "expected at most max_sequence_length=40, got 41. Longer prompts are prefilled in chunks of this length.",
        ),
        ("dtype", "int8", "expected one of float16, bfloat16, float32, got 'int8'."),
        ("attention", "causal", "expected one of native, mask, plugin, got 'causal'."),
        ("flavour", "rtx", "expected one of auto, tensorrt, tensorrt_rtx, got 'rtx'."),
        *(("compute_capabilities", value, f'expected a sequence such as ("8.6", "12.0"), got {value!r}.') for value in ("8.6", (), (8.6,))),
        ("compute_capabilities", ("8.6", "8.6"), "expected each one once, got 8.6, 8.6."),
    ],
)
def test_refused_at_once(name, value, message):
    with pytest.raises(ConfigError) as raised:
        options(**{name: value})
    assert str(raised.value) == f"{name}: {message}"


@pytest.mark.parametrize(
    ("changes", "head_dim", "message"),
    [
        *(
            ({}, n, rf"^head_dim: expected a multiple of 8 from 16 to 256, the model has {n}\. .* the reference engine runs it")
            for n in (8, 20, 264)
        ),
        (
            {"max_sequence_length": 65},
            24,
            r"max_sequence_length: expected at most 64, the positions that the model was made for .*, got 65",
        ),
        (
            {"dtype": "bfloat16", "compute_capabilities": ("8.6", "7.5")},
            24,
            r"dtype: GPUs of compute capability 7\.5 have no bfloat16\. Build with dtype float16\.",
        ),
    ],
)
def test_models_that_cannot_be_served(changes, head_dim, message):
    with pytest.raises(ConfigError, match=message):
        options(**changes).cache_for(replace(MODEL, head_dim=head_dim))


def test_what_full_tensorrt_cannot_do():
    with pytest.raises(ConfigError, match=r"attention: expected mask, got native: TensorRT 10\.15\.2 has no causal attention over a cache"):
        options().check_tensorrt(full_tensorrt("10.15.2"))
    options(attention="mask").check_tensorrt(full_tensorrt("10.15.2"))
    with pytest.raises(ConfigError, match=r"got native: TensorRT 10\.16\.1 has no causal attention over a cache \(11\.0 has\)\.$"):
        options().check_tensorrt(full_tensorrt("10.16.1"))
    options().check_tensorrt(full_tensorrt("11.0.0"))
    with pytest.raises(ConfigError, match=r"attention: KVCacheAttention: expected TensorRT 10\.3 or newer, got tensorrt 8\.6\.1"):
        options(attention="plugin").check_tensorrt(full_tensorrt("8.6.1"))
    with pytest.raises(ConfigError, match="compute_capabilities: full TensorRT builds for the GPU it runs on"):
        options(compute_capabilities=("8.6",)).check_tensorrt(full_tensorrt("11.4.0"))
