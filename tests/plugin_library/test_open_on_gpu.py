"""Engines that carry the plugin library, opened on a GPU that TensorRT for RTX takes. **These tests have not run yet.**"""

import json
import subprocess
import sys

import pytest

from tests.helpers.models import write_model
from tests.helpers.rtx_gpu import need_rtx_gpu
from tests.paths import ROOT
from tests.plugin_library.build import build_library, embed_kernels, need_cmake

need_cmake()
pytestmark = [pytest.mark.gpu, pytest.mark.trt]

_BUILD = """
import sys
from trt_kvcache import build_engine
model, engine, library = sys.argv[1:]
sizes = {"max_batch_size": 3, "max_sequence_length": 200, "max_prefill_length": 64, "flavour": "tensorrt_rtx"}
build_engine(model, engine, **sizes, attention="plugin", plugin_library=library or None)
"""

_DECODE = """
import json, sys
from trt_kvcache import InferenceSession, SamplingParams
with InferenceSession.open(sys.argv[1], engine=sys.argv[2]) as session:
    prompts = [[5, 9, 3, 17, 2, 30, 11] * 9, [8, 1], [12]]
    events = session.generate(prompts, SamplingParams(max_new_tokens=20, ignore_eos=True))
    print(json.dumps([(event.index, event.token) for event in events]))
"""


def in_a_process(program, *arguments):
    """Return what a program prints last: a library stays loaded until its process ends."""
    done = subprocess.run([sys.executable, "-c", program, *map(str, arguments)], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1] if done.stdout else ""


@pytest.fixture(autouse=True)
def taken(memory):
    """Leave out GPUs that TensorRT for RTX does not take."""
    need_rtx_gpu(memory)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("models") / "model", head_dim=64, num_hidden_layers=2, max_position_embeddings=256)


@pytest.fixture(scope="module")
def expected(model, tmp_path_factory):
    """Tokens with the plugin in Python."""
    engine = tmp_path_factory.mktemp("engines") / "python"
    in_a_process(_BUILD, model, engine, "")
    return json.loads(in_a_process(_DECODE, engine, "tensorrt"))


@pytest.mark.parametrize("is_ptx", [False, True], ids=["machine code", "PTX"])
def test_an_engine_that_carries_the_library_gives_the_tokens_of_python(memory, model, expected, tmp_path, is_ptx):
    arch = embed_kernels().PTX_ARCH if is_ptx else memory.arch
    library = build_library(f"{arch}-gpu-{is_ptx}", [arch], ["float16-64"], [None], is_ptx=is_ptx)
    in_a_process(_BUILD, model, tmp_path / "engine", library)
    assert json.loads(in_a_process(_DECODE, tmp_path / "engine", "tensorrt")) == expected
