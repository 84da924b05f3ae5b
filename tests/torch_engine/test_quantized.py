"""Quantized weights in the PyTorch engine, and in the classes of transformers with the values that they stand for."""

from __future__ import annotations

import numpy as np
import pytest

from tests.helpers.assertions import assert_close
from tests.helpers.models import write_model
from tests.helpers.quantized_models import ALL_CASES, write_quantized, write_values
from tests.torch_engine.needs_torch import need_torch

need_torch()

from trt_kvcache import InferenceSession  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:(?s).*are not")

IDS = [5, 6, 7, 9, 3, 11]


def logits(folder, dtype):
    with InferenceSession.from_model(folder, engine="torch", dtype=dtype, max_sequence_length=16) as session:
        return session.prefill([IDS])


@pytest.fixture
def folders(request, tmp_path):
    """A quantized folder, and one with its values."""
    quantize, config = ALL_CASES[request.param]
    values = write_quantized(tmp_path / "quantized", "llama", quantize, config)
    return tmp_path / "quantized", write_values(tmp_path / "plain", tmp_path / "quantized", values)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("folders", ALL_CASES, indirect=True)
def test_as_with_the_values_in_the_dtype_of_the_engine(folders, dtype):
    quantized, plain = folders
    np.testing.assert_array_equal(logits(quantized, dtype), logits(plain, dtype))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("quantize", ["int8", "int4,embedding=int8,head=int8"])
def test_rounded_as_in_the_numpy_engine(tmp_path, quantize, dtype):
    model = write_model(tmp_path / "model", hidden_size=64, intermediate_size=96, head_dim=16, torch_dtype="bfloat16", scale=0.1)
    found, expected, plain = (
        InferenceSession.from_model(model, engine=engine, dtype=dtype, max_sequence_length=16, quantize=rounding)
        for engine, rounding in (("torch", quantize), ("reference", quantize), ("torch", None))
    )
    with found, expected, plain:
        logits = [session.prefill([IDS])[0] for session in (found, expected, plain)]
    tolerance = {"float32": 1e-5, "bfloat16": 0.03}[dtype]
    assert_close(logits[0], logits[1], tolerance=tolerance)
    assert np.abs(logits[2] - logits[1]).max() > 1e-3 * np.abs(logits[1]).max()


def test_interleaved_rows_are_rounded_as_in_the_numpy_engine(tmp_path):
    sizes = {"model_type": "ernie4_5", "hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
    model = write_model(tmp_path / "model", **sizes, torch_dtype="bfloat16", scale=0.1)
    found, expected = (
        InferenceSession.from_model(model, engine=engine, dtype="float32", max_sequence_length=16, quantize="int4")
        for engine in ("torch", "reference")
    )
    with found, expected:
        assert_close(found.prefill([IDS])[0], expected.prefill([IDS])[0], tolerance=1e-5)


@pytest.mark.parametrize("folders", ALL_CASES, indirect=True)
def test_as_the_class_of_transformers(folders):
    transformers = pytest.importorskip("transformers")
    import torch

    quantized, plain = folders
    model = transformers.AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        expected = model(torch.tensor([IDS])).logits[0, -1].numpy()
    assert_close(logits(quantized, "float32")[0], expected, tolerance=2e-5)
    with InferenceSession.from_model(quantized, engine="reference", dtype="float32", max_sequence_length=16) as session:
        assert_close(session.prefill([IDS])[0], expected, tolerance=2e-5)
