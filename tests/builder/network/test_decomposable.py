"""The rule for decomposable attention, and that it is TensorRT's: fused up to it, refused one step beyond."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.helpers.models import write_model
from trt_kvcache.builder.definition import define_decoder
from trt_kvcache.builder.network import decoder
from trt_kvcache.builder.network.decomposable import attention_layer_config
from trt_kvcache.builder.options import BuildOptions
from trt_kvcache.builder.resolved_options import ResolvedOptions
from trt_kvcache.builder.serialization import make_config, serialize
from trt_kvcache.checkpoint import Checkpoint
from trt_kvcache.engine.attention_variants import AttentionLayerConfig
from trt_kvcache.errors import BuildError
from trt_kvcache.trt.module import TensorRT

FUSED = {"dtype": "float16", "num_attention_heads": 4, "head_dim": 24, "min_batch_size": 1, "max_sequence_length": 24552}


def test_fused_at_the_limits() -> None:
    assert attention_layer_config(3, "mask", **FUSED) == AttentionLayerConfig(layer=3, variant="mask", decomposable=False, reason="")
    assert not attention_layer_config(0, "native", **{**FUSED, "num_attention_heads": 2, "min_batch_size": 2}).decomposable


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dtype": "float32"}, "no fused attention in float32"),
        ({"num_attention_heads": 3}, "no fused decode attention for fewer than 4 query heads in the smallest batch (batch 1 x 3 heads)"),
        ({"max_sequence_length": 24553}, "no fused decode attention for max_sequence_length + head_dim above 24576 (24553 + 24)"),
    ],
)
def test_decomposable_beyond_them(change: dict, reason: str) -> None:
    choice = attention_layer_config(0, "native", **{**FUSED, **change})
    assert choice.decomposable
    assert choice.reason == reason


@pytest.mark.parametrize("variant", ["native", "mask"])
def test_every_layer_in_full_tensorrt_whose_limits_are_not_known(variant: str) -> None:
    choice = attention_layer_config(0, variant, is_rtx=False, **FUSED)
    assert choice.decomposable
    assert choice.reason == "full TensorRT decides: its limits of fused attention are not known"
    assert not attention_layer_config(0, "plugin", is_rtx=False, **FUSED).decomposable


def build(rtx: TensorRT, model: Path, length: int, attention: str) -> None:
    given = BuildOptions(max_batch_size=2, max_sequence_length=length, max_prefill_length=5, attention=attention)
    with Checkpoint.open(model) as checkpoint, rtx.log.collect(ignore_missing_driver=True) as messages:
        options = ResolvedOptions.of_model(given, checkpoint.config)
        definition = define_decoder(checkpoint, options, options.cache_for(checkpoint.config), rtx, messages)
        serialize(definition, make_config(definition, options, rtx, messages), options, rtx, messages, lambda done: None)


@pytest.mark.trt
@pytest.mark.parametrize("attention", ["native", "mask"])
@pytest.mark.parametrize(
    ("heads", "length", "dtype"), [(4, 24552, "float16"), (3, 40, "bfloat16"), (4, 24553, "float16"), (4, 40, "float32")]
)
def test_what_is_chosen_builds(rtx: TensorRT, tmp_path: Path, heads: int, length: int, dtype: str, attention: str) -> None:
    changes = {"num_attention_heads": heads, "num_key_value_heads": 1, "max_position_embeddings": 1 << 15, "torch_dtype": dtype}
    build(rtx, write_model(tmp_path / "model", **changes), length, attention)


@pytest.mark.trt
@pytest.mark.parametrize("attention", ["native", "mask"])
@pytest.mark.parametrize(("heads", "length", "dtype"), [(3, 40, "bfloat16"), (4, 24553, "float16"), (4, 40, "float32")])
def test_what_is_made_decomposable_would_be_refused_otherwise(
    rtx: TensorRT, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, heads: int, length: int, dtype: str, attention: str
) -> None:
    def fused(layer: int, variant: str, **_: Any) -> AttentionLayerConfig:
        return AttentionLayerConfig(layer=layer, variant=variant, decomposable=False)

    monkeypatch.setattr(decoder, "attention_layer_config", fused)
    changes = {"num_attention_heads": heads, "num_key_value_heads": 1, "max_position_embeddings": 1 << 15, "torch_dtype": dtype}
    with pytest.raises(BuildError, match=r"the engine could not be built. TensorRT says: .*not supported by a dedicated kernel"):
        build(rtx, write_model(tmp_path / "model", **changes), length, attention)
