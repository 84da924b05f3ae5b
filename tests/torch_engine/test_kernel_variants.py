"""The variants of kernels that are compiled while weights are read."""

from types import SimpleNamespace

from tests.torch_engine.needs_torch import need_torch
from trt_kvcache.kernels.sources import source_names

need_torch()

from trt_kvcache.torch_engine.kernel_variants import decoder_variants  # noqa: E402


def test_decode_kernels_of_layers_that_store_and_of_those_that_read():
    heads = [(64, True), (256, True), (256, False), (512, True), (512, False), (128, False)]
    mixers = [SimpleNamespace(head_dim=head_dim, stores_kv=stores) for head_dim, stores in heads]
    found = list(decoder_variants(SimpleNamespace(attention_layers=mixers, layers=()), "bfloat16", "int8"))
    assert len(found) == len(set(found))
    assert set(found) <= set(source_names())
    ends = ("128-int8-shared", "256-int8", "256-int8-shared", "64-int8")
    for source in ("attention_decode", "attention_decode_few"):
        assert sorted(name for name in found if name.startswith(f"{source}-")) == [f"{source}-bfloat16-{end}" for end in ends]
    assert {f"attention_prefill-bfloat16-{head_dim}-int8" for head_dim in (64, 128, 256, 512)} <= set(found)
