"""Draft heads with engines of their own, on a GPU that TensorRT for RTX takes. **This test has not run on a GPU yet.**"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.helpers import eagle3, mtp
from tests.helpers.rtx_gpu import need_rtx_gpu
from tests.helpers.sessions import always_drafting, by_prompt
from trt_kvcache import InferenceSession, SamplingParams, build_engine

pytestmark = [pytest.mark.gpu, pytest.mark.trt]


@pytest.mark.parametrize("attention", ["native", "mask", "plugin"])
@pytest.mark.parametrize("kind", ["eagle3", "mtp"])
def test_a_head_that_is_right_is_accepted(memory: Any, tmp_path: Path, kind: str, attention: str) -> None:
    """And the tokens are those of NumPy without drafts: in steps that become graphs, of batches that grow and shrink."""
    need_rtx_gpu(memory)
    sizes = {"head_dim": 64} if attention == "plugin" else {}
    if kind == "mtp":
        model, head = mtp.write_ring_model(tmp_path / "model", **sizes), "mtp"
    else:
        model = eagle3.write_ring_model(tmp_path / "model", **sizes)
        head = str(eagle3.write_ring_head(tmp_path / "head", model, **sizes))
    options: dict[str, Any] = {"max_batch_size": 3, "max_sequence_length": 64, "max_prefill_length": 20, "dtype": "float16"}
    prompts, asked = mtp.ring_prompts(5), [SamplingParams(max_new_tokens=count, ignore_eos=True) for count in (40, 9, 33, 40, 21)]
    with InferenceSession.from_model(model, engine="numpy", **options) as plain:
        expected = by_prompt(plain.generate(prompts, asked))
    build_engine(model, tmp_path / "engine", flavour="tensorrt_rtx", attention=attention, draft_head=head, **options)
    with InferenceSession.open(tmp_path / "engine", engine="tensorrt", draft=head) as session:
        always_drafting(session)
        for _ in range(3):
            assert by_prompt(session.generate(prompts, asked)) == expected
        assert session.statistics.acceptance_rate > 0.9
