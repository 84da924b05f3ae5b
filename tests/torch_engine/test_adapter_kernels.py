"""Updates of several adapters next to products by our kernels, on the emulated device, against the reference engine."""

from __future__ import annotations

import numpy as np
import pytest

from tests.helpers.adapters import write_two_adapters
from tests.helpers.assertions import assert_close
from tests.helpers.gguf_files import write_q4_k_m
from tests.helpers.models import write_model
from tests.helpers.quantized_models import write_gptq
from tests.simt.standin import needs_standin
from tests.torch_engine.needs_torch import need_torch

need_torch()

from tests.torch_engine.test_kernels import PACKED_SIZES, TOLERANCES, calls  # noqa: E402, F401
from trt_kvcache import InferenceSession, KVCacheManager  # noqa: E402
from trt_kvcache.checkpoint import Checkpoint  # noqa: E402
from trt_kvcache.checkpoint.adapters.adapter_set import AdapterSet  # noqa: E402
from trt_kvcache.engine.decoder_cache import cache_config  # noqa: E402
from trt_kvcache.torch_engine import TorchEngine, kernel_adapted_projections  # noqa: E402

pytestmark = [needs_standin, pytest.mark.device]

SIZES = {"max_batch_size": 3, "max_sequence_length": 24}
NAMES = ("sql", None, "poems")


def write(folder, kind):
    """Write a model of a kind of weights, with rows and columns that its kernels take."""
    sizes = {**PACKED_SIZES, "head_dim": 64, "intermediate_size": 96, "torch_dtype": "bfloat16"}
    if kind == "Q4_K":
        write_q4_k_m(folder)
        return folder
    if kind.startswith("act-order"):
        return write_gptq(folder, 32, one_order=kind == "act-order", **sizes)
    return write_model(folder, **sizes)


def logits_of(session, adapters):
    found = [session.prefill([[5, 6, 7, 8, 9, 10, 11, 12], [3], [4, 5]], adapter=adapters)]
    found += [session.decode([token, 30 - token, 7]) for token in (8, 9)]
    return np.stack([*found, session.append([[8, 9, 10], [7], [5, 6]])])


#: Formats of weights that take adapters as "act-order" does.
SLOW_KINDS = ("int4", "act-order of each matrix", "Q4_K")


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", ["16 bits", "act-order", *(pytest.param(kind, marks=pytest.mark.slow) for kind in SLOW_KINDS)])
@pytest.mark.parametrize(("max_rows", "steps"), [(64, 5), (5, 3)])
def test_sessions_agree_with_the_reference_engine(memory, calls, tmp_path, monkeypatch, kind, max_rows, steps):  # noqa: F811
    """Steps of more rows than the kernels of adapters take run by torch: here the first chunk of the prompts and the second turns."""
    monkeypatch.setattr(kernel_adapted_projections, "MAX_ADAPTER_ROWS", max_rows)
    folder, quantize = write(tmp_path / "model", kind), "int4" if kind == "int4" else None
    with Checkpoint.open(folder, quantize=quantize) as checkpoint:
        folders = write_two_adapters(tmp_path, checkpoint.config)
        kv, adapters = cache_config(checkpoint.config, **SIZES, dtype="bfloat16"), AdapterSet.open(checkpoint.config, folders)
        ours = TorchEngine.open(checkpoint, kv=kv, max_prefill_length=7, memory=memory, adapters=adapters)
    options = {"dtype": "bfloat16", "quantize": quantize, "adapters": folders, **SIZES}
    with (
        InferenceSession(ours, KVCacheManager(kv, memory=memory)) as session,
        InferenceSession.from_model(folder, engine="reference", **options) as reference,
    ):
        found, expected = (logits_of(one, NAMES) for one in (session, reference))
        assert_close(found, expected, TOLERANCES["bfloat16"])
        assert calls["linear" if kind == "16 bits" else "packed_linear"] > 0
        gated = "linear_gated_mul silu" if kind == "16 bits" else "packed_linear_gated_mul silu"
        assert calls[gated] == 0, "an update is added before the activation"
        assert calls["adapter_ranks"] == calls["adapter_outputs"] == steps * 4 * kv.num_layers, "four products a layer"
        assert_close(logits_of(session, None), logits_of(reference, None), TOLERANCES["bfloat16"])
        assert calls[gated] > 0 or kind == "act-order of each matrix"
