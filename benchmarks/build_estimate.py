"""What ``estimate_build`` says beside what real builds took: plan, and peak memory of the host.

    python benchmarks/build_estimate.py [--out benchmarks/results/build_estimate.json]

Models with random weights in the shapes of Qwen2-0.5B and of a Llama with an LM head of its own, of 4 and 12 layers, are built with
TensorRT for RTX, each in a fresh process, whose peak is that of the build; with weights as they are, and rounded in several ways. Exit
code 1 if plan or peak is more than 10 % off.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from environment import describe_environment, to_table, write_result
from random_model import QWEN2_0_5B

from trt_kvcache import estimate_build
from trt_kvcache.doctor.random_model import write_random_model

LLAMA = {
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
}
MODELS = {"qwen2-0.5b": QWEN2_0_5B, "llama-2048": LLAMA, "llama-2048, float32": {**LLAMA, "torch_dtype": "float32"}}

#: Model, layers, attention, slots, dtype (None: that of the checkpoint); and where weights are rounded, how.
BUILDS = (
    ("qwen2-0.5b", 4, "native", 1, None),
    ("qwen2-0.5b", 4, "native", 8, None),
    ("qwen2-0.5b", 4, "mask", 8, None),
    ("qwen2-0.5b", 4, "plugin", 8, None),
    ("qwen2-0.5b", 4, "native", 8, "float16"),
    ("qwen2-0.5b", 4, "native", 8, "float32"),
    ("qwen2-0.5b", 12, "native", 8, None),
    ("qwen2-0.5b", 12, "plugin", 8, None),
    ("qwen2-0.5b", 24, "native", 1, None),
    ("llama-2048", 4, "native", 1, None),
    ("llama-2048", 4, "plugin", 8, None),
    ("llama-2048", 4, "native", 8, "float32"),
    ("llama-2048", 4, "native", 8, "float16"),
    ("llama-2048, float32", 4, "native", 8, None),
    ("llama-2048", 12, "native", 8, None),
    ("llama-2048", 12, "plugin", 8, None),
    ("qwen2-0.5b", 4, "native", 1, None, "int8,embedding=int8"),
    ("qwen2-0.5b", 4, "native", 1, None, "int4:128,embedding=int4"),
    ("qwen2-0.5b", 4, "plugin", 8, None, "int4"),
    ("qwen2-0.5b", 4, "plugin", 1, None, "int8,embedding=int8"),
    ("qwen2-0.5b", 24, "native", 1, None, "int4:128,embedding=int4"),
    ("llama-2048", 4, "native", 8, None, "int4:128"),
    ("llama-2048", 4, "plugin", 1, None, "int4:128"),
    ("llama-2048", 12, "native", 1, None, "int8"),
    ("llama-2048", 12, "plugin", 1, None, "int8"),
)
LIMIT = 0.1

_BUILD = """
import json, sys
from trt_kvcache import build_engine
model, engine, options = sys.argv[1:]
report = build_engine(model, engine, flavour="tensorrt_rtx", **json.loads(options))
print(json.dumps({"plan_nbytes": report.plan_nbytes, "host_peak_nbytes": report.peak_memory_nbytes}))
"""


def measure(name, layers, attention, slots, dtype, quantize=None):
    """Build once in a process of its own. Returns a row."""
    sizes = {"max_batch_size": slots, "max_sequence_length": 2048, "max_prefill_length": 512}
    options = {**sizes, "attention": attention, "dtype": dtype, "quantize": quantize}
    with tempfile.TemporaryDirectory(prefix="trt_kvcache-") as place:
        model = write_random_model(Path(place) / "model", {**MODELS[name], "num_hidden_layers": layers})
        command = [sys.executable, "-c", _BUILD, str(model), str(Path(place) / "engine"), json.dumps(options)]
        measured = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()[-1])
        estimate = estimate_build(model, **options)
    row = {
        "model": name,
        "layers": layers,
        "attention": attention,
        "slots": slots,
        "dtype": dtype or "as stored",
        "weights": quantize or "dense",
    }
    for what, nbytes in measured.items():
        row[what] = nbytes
        row[what.replace("nbytes", "estimate_over_measured")] = round(getattr(estimate, what) / nbytes, 3)
    return row


def main():
    """Measure, print, write the file; 1 if the limit is exceeded."""
    parser = argparse.ArgumentParser(description="Estimates of builds beside real builds")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "build_estimate.json")
    arguments = parser.parse_args()
    rows = []
    for build in BUILDS:
        rows.append(measure(*build))
        print(json.dumps(rows[-1]), flush=True)
    off = max(abs(value - 1) for row in rows for name, value in row.items() if name.endswith("estimate_over_measured"))
    print(f"at most {off:.1%} off (limit {LIMIT:.0%})")
    write_result(arguments.out, {**describe_environment(), "builds": to_table(rows), "largest_error": round(off, 3), "limit": LIMIT})
    return int(off > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
