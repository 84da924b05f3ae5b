"""Registers, shared memory and occupancy of the compiled kernels: ``python benchmarks/kernel_resources.py``. Needs NVRTC, and no GPU.

Results go to ``benchmarks/results/kernel_resources.json``, and ``python docs/kernels_table.py`` makes a page of them. Sources that are
compiled in variants have one or a few here: K and V of 16 and of 8 bits, a head dim of 128.
"""

import argparse
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

from cubin import KernelResources, kernel_resources
from environment import describe_environment, to_table, write_result

from trt_kvcache.kernels.attention_tiles import decode_block_nbytes, decode_tiles, few_tiles, prefill_variant
from trt_kvcache.kernels.compile import cubin, nvrtc_version
from trt_kvcache.kernels.delta_rule_kernels import delta_rule_plan
from trt_kvcache.kernels.launch import THREADS_PER_BLOCK
from trt_kvcache.kernels.mamba2_kernels import mamba2_plan

HERE = Path(__file__).resolve().parent
HEAD_DIM = 128

VARIANTS = (
    *(f"attention_{source}-float16-{HEAD_DIM}{kv}" for source in ("decode", "decode_few", "prefill") for kv in ("", "-int8")),
    f"attention_decode-float16-{HEAD_DIM}-shared",
    *(
        f"attention_prefill-float16-{HEAD_DIM}-tree",
        "linear-float16-8",
        "linear-float16-16",
        "linear_adapters",
        "decoder_layer",
        "embedding",
    ),
    *("linear_experts-bfloat16-8", "linear_packed_experts-bfloat16-8-e2m1-uint8", "router"),
    *("linear_packed_experts-bfloat16-8-e2m1-float8_e4m3fn", "linear_packed_expert_tiles-bfloat16-64-e2m1-float8_e4m3fn"),
    *("linear_expert_tiles-bfloat16-64", "linear_packed_expert_tiles-bfloat16-64-e2m1-uint8", "expert_order"),
    *(f"linear_packed-bfloat16-{rows}-{stored}" for rows in (8, 16) for stored in ("int4-float16", "int8-bfloat16", "e4m3-float32")),
    *(f"linear_packed-bfloat16-{rows}-e2m1-float8_e4m3fn" for rows in (8, 16)),
    *(f"linear_{source}-bfloat16-8-{kind}" for source in ("super_blocks", "super_block_experts") for kind in ("q4_k", "q6_k")),
    *(f"linear_packed_pairs-bfloat16-{rows}-{kinds}" for rows in (8, 16) for kinds in ("q4_k-q6_k", "q4_k-int8")),
    *(f"recurrent_{source}-float16-float32" for source in ("causal_conv1d", "mamba2", "delta_rule")),
    *("recurrent_gated_norm", "kv", "states", "lengths", "drafts", "draft_trees", "sampling_choose", "sampling_logprobs", "sampling_rows"),
)


class Multiprocessor(NamedTuple):
    """Limits of a multiprocessor."""

    warps: int
    blocks: int
    shared_nbytes: int


#: From the CUDA programming guide.
MULTIPROCESSORS = {"sm_86": Multiprocessor(48, 16, 100 << 10), "sm_90": Multiprocessor(64, 32, 228 << 10)}
REGISTERS, WARP, RESERVED_NBYTES = 65536, 32, 1024


def resident_blocks(arch, resources, threads, shared_nbytes):
    """Return the blocks of a kernel that a multiprocessor holds at once."""
    limits, warps = MULTIPROCESSORS[arch], threads // WARP
    of_warp = -(-resources.registers * WARP // 256) * 256  # registers are allocated in units of 256 for a warp
    by_registers = REGISTERS // (of_warp * warps)
    by_shared = limits.shared_nbytes // (shared_nbytes + RESERVED_NBYTES)
    return min(limits.blocks, limits.warps // warps, by_registers, by_shared)


def dynamic_nbytes(name, kernel, arch):
    """Return the bytes of dynamic shared memory of a launch. Rows of recurrent states have 128 values."""
    source, _, variant = name.partition("-")
    quantized, size = variant.endswith("-int8"), kernel.rpartition("_")[2]
    if source == "attention_prefill":
        return 0 if kernel == "attention_append" else prefill_variant(HEAD_DIM, arch, size, quantized).shared_nbytes
    if source.startswith("attention"):
        tiles = (few_tiles if source.endswith("few") else decode_tiles)(HEAD_DIM, arch, quantized=quantized)
        return decode_block_nbytes(HEAD_DIM, int(size), tiles, quantized=quantized)
    plans = {"recurrent_mamba2": mamba2_plans, "recurrent_delta_rule": delta_rule_plans}.get(source, lambda arch: ())
    return next((plan.shared_nbytes for plan in plans(arch) if plan.name == kernel), 0)


def mamba2_plans(arch):
    """Return the plans of some calls, of all kernels."""
    for width in (2, 64):
        for size in (128, 64):
            yield mamba2_plan(SimpleNamespace(x=_tensor(1, width, 1, 64), b=_tensor(1, width, 1, size)), arch)


def delta_rule_plans(arch):
    """The same for the gated delta rule: with many multiprocessors a block has fewer warps."""
    for width in (2, 64):
        for size in (128, 64):
            for multiprocessors in (1, 132):
                q, state = _tensor(1, width, 1, size), SimpleNamespace(dtype="float32")
                yield delta_rule_plan(SimpleNamespace(q=q, v=_tensor(1, width, 1, 128), past=state), arch, multiprocessors)


def _tensor(*shape):
    return SimpleNamespace(shape=shape, dtype="float16")


def measure(arch):
    """Yield a row for each kernel of an architecture."""
    for name in VARIANTS:
        source, _, variant = name.partition("-")
        found: dict[str, KernelResources] = kernel_resources(cubin(name, arch), arch)
        for kernel, resources in sorted(found.items()):
            threads, dynamic = resources.threads or THREADS_PER_BLOCK, dynamic_nbytes(name, kernel, arch)
            blocks = resident_blocks(arch, resources, threads, resources.static_nbytes + dynamic)
            occupancy = round(blocks * threads / WARP / MULTIPROCESSORS[arch].warps, 3)
            yield {
                **{"arch": arch, "source": source, "variant": variant or "-", "kernel": kernel},
                **resources._asdict(),
                **{"threads": threads, "dynamic_nbytes": dynamic, "blocks": blocks, "occupancy": occupancy},
            }


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--arch", action="append", choices=sorted(MULTIPROCESSORS), help="may be repeated; default: all of them")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "kernel_resources.json")
    options = parser.parse_args()
    rows = [row for arch in options.arch or MULTIPROCESSORS for row in measure(arch)]
    write_result(options.out, {**describe_environment(), "nvrtc": nvrtc_version(), "kernels": to_table(rows)})


if __name__ == "__main__":
    main()
