"""The PyTorch engine on a CPU beside Hugging Face transformers, and on a GPU beside the time that reading its bytes takes. Needs torch.

    python benchmarks/torch_engine.py [--out FILE] [--models qwen2-0.5b] [--layers N] [--runs 5] [--dtypes float32,bfloat16]
    python benchmarks/torch_engine.py --gpu [--out FILE] [--models qwen2-0.5b,llama-3-8b] [--transformers]

On a CPU: prefill of 128 tokens and the decode steps after it, with random weights of a model's shape, which both share. Calls of both take
turns, and the ratio is the median over neighbours. On a GPU: first the tests that compare with transformers' greedy tokens and with the
NumPy engine; then prefill of 512 tokens and decode steps with 1024 tokens past, with random weights that are made on the GPU, and the same
in transformers if that is asked for.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from clocks import DeviceClock
from environment import describe_environment, write_result
from random_model import BAMBA_9B, GEMMA_3_1B, LFM2_350M, LLAMA_3_8B, PHI_4_MINI, QWEN2_0_5B

from trt_kvcache import CudaMemory, HostMemory, InferenceSession, Memory
from trt_kvcache.cache.edge_llm import make_cache
from trt_kvcache.dtypes import itemsize
from trt_kvcache.engine.decoder_cache import decoder_cache_config
from trt_kvcache.model import ModelConfig
from trt_kvcache.model.tensor_shapes import embedding_name, tensor_shapes
from trt_kvcache.torch_engine import TorchEngine

HERE = Path(__file__).resolve().parent

MODELS = {
    "qwen2-0.5b": QWEN2_0_5B,
    "llama-3-8b": LLAMA_3_8B,
    "gemma-3-1b": GEMMA_3_1B,
    "phi-4-mini": PHI_4_MINI,
    "lfm2-350m": LFM2_350M,
    "bamba-9b": BAMBA_9B,
}

#: What transformers computes layers with states by, where it is installed; else by operations of torch.
THEIR_KERNELS = ("mamba_ssm", "causal_conv1d", "fla")

PROMPT, STEPS = 128, 16
GPU_PROMPT, GPU_PAST, GPU_BATCHES, GPU_STEPS = 512, 1024, (1, 8), 50

DECODE = 1  # profile


def opened_session(
    config: ModelConfig, load: Callable[[str], torch.Tensor], *, batch: int, length: int, prefill: int, dtype: str, memory: Memory
) -> InferenceSession:
    """Return a session of the torch engine over weights that are in memory already."""
    kv = decoder_cache_config(config, max_batch_size=batch, max_sequence_length=length, dtype=dtype)
    engine = TorchEngine(config, load, kv=kv, max_prefill_length=prefill, memory=memory)
    return InferenceSession(engine, make_cache(kv, memory=memory))


class Transformers:
    """A model of Hugging Face transformers with random weights, prefilled and stepped by hand."""

    def __init__(self, config: dict[str, Any], dtype: str, device: str = "cpu") -> None:
        import transformers

        self.version = transformers.__version__
        torch.manual_seed(0)
        fields = {name: value for name, value in config.items() if name != "model_type"}
        made = transformers.AutoConfig.for_model(config["model_type"], **fields)
        with torch.device(device):
            self.model = transformers.AutoModelForCausalLM.from_config(made, dtype=getattr(torch, dtype)).eval()
        self._cache: Any = None

    def prefill(self, rows: list[list[int]]) -> torch.Tensor:
        """Return the logits that follow prompts of equal length."""
        self._cache = None
        return self._run(rows)

    def decode(self, tokens: list[int]) -> torch.Tensor:
        """Return the logits that follow a token of each."""
        return self._run([[token] for token in tokens])

    @torch.inference_mode()
    def _run(self, rows: list[list[int]]) -> torch.Tensor:
        ids = torch.tensor(rows, device=self.model.device)
        found = self.model(input_ids=ids, past_key_values=self._cache, use_cache=True, logits_to_keep=1)
        self._cache = found.past_key_values
        return found.logits[:, -1].float().cpu()


# --- a CPU ---


class Ours:
    """The torch engine in a session, with the same methods."""

    def __init__(self, config: ModelConfig, dtype: str, weights: dict[str, torch.Tensor]) -> None:
        sizes = {"batch": 1, "length": PROMPT + STEPS, "prefill": PROMPT}
        self.session = opened_session(config, weights.__getitem__, **sizes, dtype=dtype, memory=HostMemory())

    def prefill(self, rows: list[list[int]]) -> torch.Tensor:
        """Return the logits that follow prompts."""
        return torch.from_numpy(self.session.prefill(rows).copy())

    def decode(self, tokens: list[int]) -> torch.Tensor:
        """Return the logits that follow a token of each."""
        return torch.from_numpy(self.session.decode(tokens).copy())


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    started = time.perf_counter()
    result = call()
    return time.perf_counter() - started, result


def measure_cpu(name: str, layers: int | None, dtypes: list[str], runs: int) -> dict[str, Any]:
    """Return the times of both, and how far apart their logits are."""
    shape = {**MODELS[name], **({} if layers is None else {"num_hidden_layers": layers})}
    ids = torch.randint(0, shape["vocab_size"], (PROMPT + STEPS,), generator=torch.Generator().manual_seed(1)).tolist()
    results: dict[str, Any] = {}
    for dtype in dtypes:
        theirs = Transformers(shape, dtype)
        config = ModelConfig.from_dict({**shape, "torch_dtype": dtype})
        both = {"transformers": theirs, "torch engine": Ours(config, dtype, theirs.model.state_dict())}
        times: dict[str, dict[str, list[float]]] = {name: {"prefill": [], "decode": []} for name in both}
        logits: dict[str, torch.Tensor] = {}
        for run in range(1 + runs):  # the first is a warm-up
            for what, token in (("prefill", 0), *(("decode", token) for token in ids[PROMPT:])):
                for name, one in both.items():  # in turns, so that what else the machine does slows both
                    seconds, logits[name] = timed(
                        partial(one.prefill, [ids[:PROMPT]]) if what == "prefill" else partial(one.decode, [token])
                    )
                    if run:
                        times[name][what].append(seconds)
        found = {
            name: {what: {"median_s": median(all_), "best_s": min(all_)} for what, all_ in part.items()} for name, part in times.items()
        }
        apart = (logits["torch engine"] - logits["transformers"]).abs().max() / logits["transformers"].abs().max()
        ratios = {
            what: median(theirs / ours for theirs, ours in zip(times["transformers"][what], times["torch engine"][what], strict=True))
            for what in ("prefill", "decode")
        }
        results[dtype] = {**found, "times_as_fast": ratios, "logits_apart": float(apart), "transformers_version": theirs.version}
        print(json.dumps({dtype: results[dtype]}), flush=True)
    return {"shape": shape, "prompt": PROMPT, "steps": STEPS, "threads": torch.get_num_threads(), "results": results}


# --- a GPU ---


def random_loader(config: ModelConfig, dtype: str, device: torch.device) -> Callable[[str], torch.Tensor]:
    """Return a function that makes weights on the device: norms near 1, the rest as in ``random_model.py``."""
    shapes, generator = tensor_shapes(config), torch.Generator(device).manual_seed(0)

    def load(name: str) -> torch.Tensor:
        mean, deviation = (1.0, 0.02) if name.endswith("norm.weight") else (0.0, config.hidden_size**-0.5)
        tensor = torch.empty(shapes[name], dtype=getattr(torch, dtype), device=device)
        return tensor.normal_(mean, deviation, generator=generator)

    return load


def step_nbytes(config: ModelConfig, dtype: str, batch: int, past: int) -> int:
    """Return the bytes that a decode step must move: weights but an embedding that is no head, live K and V, states read and written."""
    embedding = embedding_name(config)
    elements = sum(math.prod(shape) for name, shape in tensor_shapes(config).items() if name != embedding or config.tie_word_embeddings)
    live = 2 * sum(mixer.num_kv_heads * mixer.head_dim for mixer in config.attention_layers) * batch * past
    mamba = decoder_cache_config(config, max_batch_size=batch, max_sequence_length=past, dtype=dtype).mamba
    return (elements + live) * itemsize(dtype) + (0 if mamba is None else batch * mamba.slot_nbytes)  # both buffers


def measure_gpu(names: list[str], *, beside_transformers: bool) -> dict[str, Any]:
    """Return the times of prefill and decode steps for each model and batch size."""
    clock = DeviceClock()
    bandwidth = clock.copy_bytes_per_second(1 << 31)
    del clock
    print(json.dumps({"copy_bytes_per_s": bandwidth}), flush=True)
    rows = []
    for name in names:
        config = ModelConfig.from_dict(MODELS[name])
        for batch in GPU_BATCHES:
            memory = CudaMemory()
            device = torch.device("cuda", 0)
            load = random_loader(config, config.dtype, device)
            sizes = {"batch": batch, "length": 2 * GPU_PAST, "prefill": GPU_PROMPT}
            with opened_session(config, load, **sizes, dtype=config.dtype, memory=memory) as session:
                row = {"model": name, "batch": batch, **_times(session, memory, config, batch)}
            row["limit_ms"] = 1e3 * step_nbytes(config, config.dtype, batch, GPU_PAST) / bandwidth
            row["share_of_limit"] = row["limit_ms"] / row["decode_step_ms"]
            torch.cuda.empty_cache()
            if beside_transformers:
                row["transformers"] = _their_times(MODELS[name], config, batch)
            rows.append(row)
            print(json.dumps(row), flush=True)
            torch.cuda.empty_cache()
    return {"prompt": GPU_PROMPT, "past": GPU_PAST, "copy_bytes_per_s": bandwidth, "rows": rows}


def _times(session: InferenceSession, memory: CudaMemory, config: ModelConfig, batch: int) -> dict[str, float]:
    """Return milliseconds: of a prefill and of a whole decode call of the session, as the host sees them, and of steps back to back."""
    ids = torch.randint(0, config.vocab_size, (batch, GPU_PAST), generator=torch.Generator().manual_seed(batch)).tolist()
    prefills = []
    for _ in range(4):
        prefills.append(timed(lambda: session.prefill([row[:GPU_PROMPT] for row in ids]))[0])
    session.prefill(ids)
    calls = [timed(lambda: session.decode([1] * batch))[0] for _ in range(GPU_STEPS)]
    stream = memory.create_stream()
    session.engine.use_profile(DECODE)
    for _ in range(3):  # on this stream: eager, captured, replayed
        session.engine.enqueue(stream)
    memory.synchronize(stream)

    def steps() -> None:
        for _ in range(GPU_STEPS):
            session.engine.enqueue(stream)
        memory.synchronize(stream)

    back_to_back = median(timed(steps)[0] for _ in range(5)) / GPU_STEPS
    return {
        "prefill_ms": 1e3 * median(prefills[1:]),
        "decode_call_ms": 1e3 * median(calls[5:]),
        "decode_step_ms": 1e3 * back_to_back,
    }


def _their_times(shape: dict[str, Any], config: ModelConfig, batch: int) -> dict[str, Any]:
    """Return milliseconds of a prefill and of a decode call in transformers, eager, as the host sees them."""
    theirs = Transformers(shape, config.dtype, "cuda")
    ids = torch.randint(0, config.vocab_size, (batch, GPU_PAST), generator=torch.Generator().manual_seed(batch)).tolist()
    prefills = [timed(lambda: theirs.prefill([row[:GPU_PROMPT] for row in ids]))[0] for _ in range(4)]
    theirs.prefill(ids)
    calls = [timed(lambda: theirs.decode([1] * batch))[0] for _ in range(GPU_STEPS)]
    kernels = [name for name in THEIR_KERNELS if importlib.util.find_spec(name) is not None]
    return {
        "version": theirs.version,
        "kernels": kernels,
        "prefill_ms": 1e3 * median(prefills[1:]),
        "decode_call_ms": 1e3 * median(calls[5:]),
    }


def run_gpu_tests() -> int:
    """Run the tests of the engine that need a GPU; return the exit status."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", "tests/torch_engine"]
    required = {"TRT_KVCACHE_REQUIRE_GPU": "1", "TRT_KVCACHE_REQUIRE_TORCH": "1", "TRT_KVCACHE_TEST_DEVICE": "gpu"}
    return subprocess.run(command, cwd=HERE.parent, env={**os.environ, **required}, check=False).returncode


def main() -> int:
    """Measure, print, write the file; 1 if the engine is slower than transformers, or a test failed."""
    parser = argparse.ArgumentParser(description="The PyTorch engine")
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--layers", type=int, help="CPU: layers of the model, instead of all 24")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--models", help="one on a CPU, Qwen2-0.5B if left out; on a GPU any number, all if left out")
    parser.add_argument("--transformers", action="store_true", help="GPU: measure transformers too")
    parser.add_argument("--no-tests", action="store_true", help="GPU: measure only")
    arguments = parser.parse_args()
    which = "_gpu" if arguments.gpu else "" if arguments.models is None else f"_{arguments.models}"
    out = arguments.out or HERE / "results" / f"torch_engine{which}.json"
    environment = describe_environment(gpu=arguments.gpu)
    if arguments.gpu:
        failed = 0 if arguments.no_tests else run_gpu_tests()
        names = list(MODELS) if arguments.models is None else arguments.models.split(",")
        found = measure_gpu(names, beside_transformers=arguments.transformers)
        measured = {"tests_exit_status": None if arguments.no_tests else failed, **found}
        write_result(out, {**environment, **measured})
        return int(failed != 0)
    measured = measure_cpu(arguments.models or "qwen2-0.5b", arguments.layers, arguments.dtypes.split(","), arguments.runs)
    write_result(out, {**environment, **measured})
    return int(any(ratio < 1 for one in measured["results"].values() for ratio in one["times_as_fast"].values()))


if __name__ == "__main__":
    sys.exit(main())
