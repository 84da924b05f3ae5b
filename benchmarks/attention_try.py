"""Attention on a GPU: first whether it is right, then how fast it is. Needs torch.

python benchmarks/attention_try.py [--only decode|prefill] [--quick] [--peers] [--tiles WARPS=8,STAGES=3,TOKENS=16,BLOCKS=1]
python benchmarks/attention_try.py --trials decode|prefill [--dims 64,96,128,256]    (compact rows: every tile set beside each other)
"""

from __future__ import annotations

import argparse
import json
import sys
import traceback
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from kernels import attention as cases  # noqa: E402

from trt_kvcache.cuda_memory import CudaMemory  # noqa: E402
from trt_kvcache.kernels import AttentionWorkspace, attend, attention_tiles  # noqa: E402
from trt_kvcache.kernels.cuda import attention as launcher  # noqa: E402
from trt_kvcache.kernels.cuda import launch as launching  # noqa: E402
from trt_kvcache.tensor import DeviceTensor  # noqa: E402

L2_NBYTES = 200 << 20
KV_HEADS = 8


class Gpu:
    def __init__(self) -> None:
        self.memory = CudaMemory()
        self.stream = self.memory.create_stream()
        self.torch_stream = torch.cuda.ExternalStream(int(self.stream.handle))
        torch.cuda.set_stream(self.torch_stream)

    def tensor(self, shape: tuple[int, ...], dtype: str) -> tuple[DeviceTensor, torch.Tensor]:
        size = {"float16": 2, "bfloat16": 2, "float32": 4, "int32": 4}[dtype]
        nbytes = size
        for n in shape:
            nbytes *= n
        mine = DeviceTensor(self.memory.allocate(nbytes, stream=self.stream), shape=shape, dtype=dtype)
        return mine, torch.from_dlpack(mine)

    def random(self, shape: tuple[int, ...], dtype: str) -> tuple[DeviceTensor, torch.Tensor]:
        mine, view = self.tensor(shape, dtype)
        view.normal_()
        return mine, view

    def seconds(self, calls: list[Any], repeats: int) -> float:
        """Seconds of one call, captured in a graph: `calls` in turn, `repeats` times."""
        for call in calls[:1]:
            call(self.stream)
        self.memory.synchronize(self.stream)
        builder = self.stream.create_graph_builder()
        builder.begin_building()
        for _ in range(repeats):
            for call in calls:
                call(builder)
        graph = builder.end_building().complete()
        return self._time(lambda: graph.launch(self.stream)) / (repeats * len(calls))

    def torch_seconds(self, calls: list[Any], repeats: int) -> float:
        calls[0]()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(repeats):
                for call in calls:
                    call()
        return self._time(graph.replay) / (repeats * len(calls))

    def _time(self, launch: Any) -> float:
        times = []
        for _ in range(7):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            launch()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / 1000)
        return sorted(times[1:])[2]


def copy_bandwidth() -> float:
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda").fill_(1)
    to = torch.empty_like(source)
    best = 1e9
    for _ in range(10):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        to.copy_(source)
        end.record()
        end.synchronize()
        best = min(best, begin.elapsed_time(end) / 1000)
    return 2 * source.numel() / best


def right_small(gpu: Gpu, which: str) -> int:
    failed = 0
    for name, case in getattr(cases, f"{which.upper()}_CASES", {}).items():
        for dtype in ("float16", "bfloat16"):
            try:
                cases.check(cases.replace(case, dtype=dtype), gpu.memory, gpu.stream)
                print(f"right: {which} {name} {dtype}", flush=True)
            except Exception:
                failed += 1
                print(f"WRONG: {which} {name} {dtype}\n{traceback.format_exc(limit=3)}", flush=True)
    return failed


def call_of(gpu: Gpu, q: Any, k: Any, v: Any, cache: Any, lengths: Any, out: Any, workspace: Any, cos_sin: Any) -> Any:
    return lambda stream: attend(q, k, v, cache, lengths, out=out, workspace=workspace, cos_sin=cos_sin, stream=stream)


def shapes(gpu: Gpu, batch: int, width: int, past: int, group: int, dim: int, copies: int, rope: bool, dtype: str = "float16") -> Any:
    """Return the calls over `copies` caches, and the torch tensors of the first."""
    tokens = past + width
    workspace = AttentionWorkspace(
        gpu.memory, max_batch_size=batch, num_heads=KV_HEADS * group, num_kv_heads=KV_HEADS, head_dim=dim, stream=gpu.stream
    )
    q = gpu.random((batch, width, KV_HEADS * group, dim), dtype)
    k, v = (gpu.random((batch, width, KV_HEADS, dim), dtype) for _ in range(2))
    out = gpu.tensor(q[0].shape, dtype)
    lengths = gpu.tensor((batch,), "int32")
    lengths[1].fill_(past)
    table = gpu.tensor((tokens, 2, dim // 2), "float32")
    angle = torch.rand((tokens, dim // 2), device="cuda")
    table[1].copy_(torch.stack([angle.cos(), angle.sin()], 1))
    caches = [gpu.random((batch, 2, KV_HEADS, tokens, dim), dtype) for _ in range(copies)]
    calls = [call_of(gpu, q[0], k[0], v[0], cache[0], lengths[0], out[0], workspace, table[0] if rope else None) for cache in caches]
    return calls, {
        "q": q[1],
        "k": k[1],
        "v": v[1],
        "out": out[1],
        "caches": [cache[1] for cache in caches],
        "lengths": lengths[1],
        "keep": (table, lengths),
    }


def worst_error(t: Any, past: int) -> float:
    """Against float32 on the GPU, without RoPE: max|error| / max|reference| over slots and heads."""
    q, cache, worst = t["q"], t["caches"][0], 0.0
    width, group = q.shape[1], q.shape[2] // KV_HEADS
    for slot in range(q.shape[0]):
        n = int(t["lengths"][slot]) + width
        mask = torch.ones(width, n, dtype=torch.bool, device="cuda").tril(n - width)
        for head in range(0, q.shape[2], max(1, q.shape[2] // 4)):
            keys, values = cache[slot, :, head // group, :n].float()
            scores = (q[slot, :, head].float() @ keys.T) * q.shape[3] ** -0.5
            expected = scores.masked_fill(~mask, -1e30).softmax(-1) @ values
            error = (t["out"][slot, :, head].float() - expected).abs().max() / expected.abs().max()
            worst = max(worst, float(error)) if not error.isnan() else float("inf")
    return worst


def right_large(gpu: Gpu, which: str) -> int:
    failed = 0
    grid = {
        "decode": [
            (5, 1, 40000, 4, 128),
            (3, 1, 9000, 16, 256),
            (70, 1, 3000, 8, 64),
            (9, 1, 5000, 1, 128),
            (1, 1, 131000, 8, 128),
            (4, 1, 6000, 7, 80),
        ],
        "prefill": [
            (2, 1500, 0, 4, 128),
            (2, 333, 2100, 4, 128),
            (1, 600, 77, 2, 256),
            (2, 1000, 500, 1, 64),
            (2, 700, 10, 4, 96),
            (1, 500, 0, 8, 80),
        ],
    }[which]
    for dtype in ("float16", "bfloat16"):
        for batch, width, past, group, dim in grid:
            calls, t = shapes(gpu, batch, width, past, group, dim, 1, False, dtype)
            t["lengths"].copy_(torch.randint(0, past + 1, (batch,), device="cuda"))
            for slot in range(batch):
                t["caches"][0][slot, :, :, int(t["lengths"][slot]) :] = float("nan")
            calls[0](gpu.stream)
            calls[0](gpu.stream)
            torch.cuda.synchronize()
            error = worst_error(t, past)
            ok = error <= cases.TOLERANCE[dtype]
            failed += not ok
            print(
                f"{'right' if ok else 'WRONG'}: {which} {dtype} B={batch} s={width} past<={past} G={group} D={dim}: {error:.2e}", flush=True
            )
    return failed


def peer_call(q: Any, keys: Any, values: Any, causal: bool, backend: Any) -> Any:
    from torch.nn.attention import sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    def call() -> None:
        with sdpa_kernel(backend):
            scaled_dot_product_attention(q, keys, values, is_causal=causal, enable_gqa=q.shape[1] != keys.shape[1])

    return call


def time_decode(gpu: Gpu, copy: float, quick: bool, peers: bool) -> None:
    lengths = (1024, 8192, 32768) if quick else (1024, 4096, 8192, 32768, 131072)
    grid = [(b, n, g, 128) for g in ((4,) if quick else (1, 4, 8)) for b in (1, 8, 32) for n in lengths]
    grid += [] if quick else [(8, n, 4, d) for d in (64, 256) for n in (1024, 8192, 32768)]
    for batch, past, group, dim in grid:
        nbytes = batch * 2 * KV_HEADS * (past + 1) * dim * 2
        copies = max(2, min(64, -(-L2_NBYTES // nbytes)))
        if copies * nbytes > 90e9:
            continue
        row = {"batch": batch, "length": past, "group": group, "head_dim": dim, "kv_mb": round(nbytes / 2**20, 1)}
        for name, rope in (("rope", True), ("plain", False)):
            calls, t = shapes(gpu, batch, 1, past, group, dim, copies, rope)
            seconds = gpu.seconds(calls, max(1, 32 // copies))
            row |= {f"{name}_us": round(seconds * 1e6, 2), f"{name}_share": round(nbytes / seconds / copy, 3)}
            if rope is False and peers:
                from torch.nn.attention import SDPBackend

                q = t["q"].transpose(1, 2)
                for peer in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
                    try:
                        other = [peer_call(q, c[:, 0].contiguous(), c[:, 1].contiguous(), False, peer) for c in t["caches"][:4]]
                        row[peer.name] = round(gpu.torch_seconds(other, 4) * 1e6, 2)
                    except Exception as error:
                        row[peer.name] = str(error)[:80]
            del calls, t
            torch.cuda.empty_cache()
        print(json.dumps(row), flush=True)


def time_prefill(gpu: Gpu, quick: bool, peers: bool) -> None:
    from torch.nn.attention import SDPBackend

    grid = [(1, 2048, 4, 128), (1, 8192, 4, 128)] if quick else [
        (b, n, g, d) for g, d in ((4, 128), (1, 128), (4, 64), (4, 256), (4, 96)) for b, n in ((8, 512), (4, 2048), (1, 4096), (1, 16384), (1, 32768))
    ]  # fmt: skip
    for batch, width, group, dim in grid:
        flop = 4 * batch * KV_HEADS * group * width * (width + 1) / 2 * dim
        row: dict[str, Any] = {"batch": batch, "width": width, "group": group, "head_dim": dim}
        for name, rope in (("rope", True), ("plain", False)):
            calls, t = shapes(gpu, batch, width, 0, group, dim, 1, rope)
            seconds = gpu.seconds(calls, 4)
            row |= {f"{name}_us": round(seconds * 1e6, 1), f"{name}_tflops": round(flop / seconds / 1e12, 1)}
            if not rope:
                q, keys, values = (x.transpose(1, 2).contiguous() for x in (t["q"], t["k"], t["v"]))
                for peer in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION)[: 2 if peers else 1]:
                    try:
                        row[peer.name] = round(flop / gpu.torch_seconds([peer_call(q, keys, values, True, peer)], 4) / 1e12, 1)
                    except Exception as error:
                        row[peer.name] = str(error)[:80]
            del calls, t
            torch.cuda.empty_cache()
        print(json.dumps(row), flush=True)


class Tiles:
    """One set of macros in use; kernels are kept for each."""

    def __init__(self, which: str) -> None:
        self.which, self.now, self.kernels = which, "", {}
        self.make = launching._kernel.__wrapped__
        launching._kernel = self.kernel

    def kernel(self, source: str, name: str, arch: str) -> Any:
        key = (self.now, source, name)
        if key not in self.kernels:
            self.kernels[key] = self.make(source, name, arch)
        return self.kernels[key]

    def use(self, text: str) -> None:
        self.now, tiles = text, {name: int(value) for name, value in (pair.split("=") for pair in text.split(","))}
        for module in (attention_tiles, launcher):
            setattr(module, f"{self.which}_tiles", lambda head_dim, arch: tiles)
        attention_tiles._TILES[f"attention_{self.which}"] = lambda head_dim, arch: tiles


def _decode_sets(dim: int) -> list[str]:
    sets = {
        64: [(8, 3, 32), (8, 2, 32), (8, 4, 16), (8, 3, 16)],
        80: [(8, 4, 16), (8, 3, 16), (8, 2, 16)],
        96: [(8, 4, 16), (8, 3, 16), (8, 2, 16)],
        128: [(8, 3, 16), (8, 2, 16)],
        256: [(4, 3, 16), (4, 2, 16)],
    }[dim]
    rest = [(4, 8, 2)] if dim != 128 else [(4, 8, 2), (8, 8, 2), (2, 8, 2), (4, -9999, 2), (4, 0, 2), (4, 32, 2), (4, 8, 1), (4, 8, 4)]
    return [
        f"WARPS={w},STAGES={s},TOKENS={t},BLOCKS=1,LEAST={least},CROSSING={crossing},CHAINS={chains}"
        for n, (w, s, t) in enumerate(sets)
        for least, crossing, chains in (rest if n == 0 else rest[:1])
    ]


def _prefill_sets(dim: int, limit: int) -> list[str]:
    grid = [
        (w, m, k, stages, b)
        for w, m, k, stages, b in (
            (4, 1, 64, 2, 2), (4, 1, 64, 2, 3), (4, 1, 128, 2, 2), (4, 2, 64, 2, 1), (4, 2, 64, 2, 2), (8, 1, 64, 2, 1),
            (8, 1, 128, 2, 1), (8, 2, 64, 2, 1), (8, 1, 64, 3, 1), (4, 1, 32, 2, 2), (8, 1, 32, 2, 1), (8, 1, 32, 3, 1), (4, 1, 64, 2, 1),
        )
        if b * ((16 * w * m + 2 * stages * k) * 2 * dim + 1024) <= limit + 1024 and k * dim // 8 % (32 * w) == 0
    ]  # fmt: skip
    grid = [x for x in grid if dim < 256 or x[1] == 1]
    return [f"WARPS={w},MATRICES={m},KEYS={k},STAGES={s},BLOCKS={b}" for w, m, k, s, b in grid]


def _name(text: str) -> str:
    return "".join(pair[0] + pair.split("=")[1] for pair in text.replace("CROSSING", "X").replace("CHAINS", "H").split(","))


def trials(gpu: Gpu, which: str, dims: list[int], copy: float) -> int:
    """Print a row for each shape: microseconds of every tile set; the error of each, without RoPE, is checked first."""
    from torch.nn.attention import SDPBackend

    tiles, failed = Tiles(which), 0
    decode = which == "decode"
    peers = (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION)
    for dim in dims:
        sets = _decode_sets(dim) if decode else _prefill_sets(dim, attention_tiles.shared_limit(gpu.memory.arch))
        good = []
        for text in sets:
            tiles.use(text)
            try:
                worst = 0.0
                for batch, width, past, group in ((3, 1, 5000, 4), (5, 1, 900, 16)) if decode else ((2, 333, 700, 2), (1, 600, 0, 1)):
                    calls, t = shapes(gpu, batch, width, past, group, dim, 1, False)
                    t["lengths"].copy_(torch.randint(0, past + 1, (batch,), device="cuda"))
                    for slot in range(batch):
                        t["caches"][0][slot, :, :, int(t["lengths"][slot]) :] = float("nan")
                    calls[0](gpu.stream)
                    calls[0](gpu.stream)
                    torch.cuda.synchronize()
                    worst = max(worst, worst_error(t, past))
                print(f"{'right' if worst <= 1e-3 else 'WRONG'} {worst:.1e} D{dim} {_name(text)}", flush=True)
                failed += worst > 1e-3
                good += [text] if worst <= 1e-3 else []
            except Exception as error:
                print(f"no: D{dim} {text}: {str(error)[:200]}", flush=True)
        print(f"D{dim}: shape | " + " | ".join(map(_name, good)), flush=True)
        grid = (
            [(1, 16, 4), (1, 256, 4), (1, 1024, 4), (1, 4096, 4), (1, 8192, 4), (1, 16384, 4), (1, 32768, 4), (8, 1024, 4), (8, 2048, 4),
             (8, 4096, 4), (8, 8192, 4), (32, 512, 4), (32, 1024, 4), (32, 8192, 4)] + ([(8, 2048, g) for g in (1, 8, 16)] if dim == 128 else [])
            if decode else [(1, 512, 4), (1, 2048, 4), (4, 2048, 4), (1, 8192, 4), (1, 32768, 4)]
        )  # fmt: skip
        for batch, tokens, group in grid:
            past, width = (tokens, 1) if decode else (0, tokens)
            nbytes = batch * 2 * KV_HEADS * (past + 1) * dim * 2
            copies = max(2, min(64, -(-L2_NBYTES // nbytes))) if decode else 1
            flop = 4 * batch * KV_HEADS * group * width * (width + 1) / 2 * dim
            figures = []
            for text in good:
                tiles.use(text)
                if not figures:
                    calls, t = shapes(gpu, batch, width, past, group, dim, copies, True)
                seconds = gpu.seconds(calls, max(1, 32 // copies) if decode else 3)
                figures.append(f"{seconds * 1e6:.2f}" if decode else f"{flop / seconds / 1e12:.0f}")
            others = []
            for peer in peers:
                try:
                    if decode:
                        q = t["q"].transpose(1, 2)
                        other = [peer_call(q, c[:, 0].contiguous(), c[:, 1].contiguous(), False, peer) for c in t["caches"][: max(4, copies // 2)]]
                        others.append(f"{gpu.torch_seconds(other, max(1, 32 // len(other))) * 1e6:.2f}")
                    else:
                        q, keys, values = (x.transpose(1, 2).contiguous() for x in (t["q"], t["k"], t["v"]))
                        others.append(f"{flop / gpu.torch_seconds([peer_call(q, keys, values, True, peer)], 3) / 1e12:.0f}")
                except Exception:
                    others.append("-")
                    torch.cuda.synchronize()
            aim = f"{nbytes / copy / 0.85 * 1e6:.1f} us" if decode else "TFLOP/s"
            print(f"B{batch}x{tokens} G{group} {nbytes / 2**20:.0f}MB ({aim}) flash {others[0]} cudnn {others[1]} | " + " ".join(figures), flush=True)
            del calls, t
            torch.cuda.empty_cache()
    return failed


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", choices=("decode", "prefill"))
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--peers", action="store_true")
    parser.add_argument("--skip-right", action="store_true")
    parser.add_argument("--tiles", help="of the kernel that --only names")
    parser.add_argument("--trials", choices=("decode", "prefill"))
    parser.add_argument("--dims", default="128,64,96,256")
    options = parser.parse_args()
    gpu = Gpu()
    if options.trials:
        copy = copy_bandwidth()
        print(torch.cuda.get_device_name(), f"copy: {copy / 1e9:.0f} GB/s", flush=True)
        print(trials(gpu, options.trials, [int(dim) for dim in options.dims.split(",")], copy), "wrong")
        return
    if options.tiles:
        tiles = {name: int(value) for name, value in (pair.split("=") for pair in options.tiles.split(","))}

        def chosen(head_dim: int, arch: str) -> dict[str, int]:
            return tiles

        attention_tiles._TILES[f"attention_{options.only}"] = chosen
        for module in (attention_tiles, launcher):
            setattr(module, f"{options.only}_tiles", chosen)
    print(torch.cuda.get_device_name(), torch.__version__, f"options {vars(options)}")
    failed = 0
    for which in (options.only,) if options.only else ("decode", "prefill"):
        if not options.skip_right:
            failed += right_small(gpu, which) + right_large(gpu, which)
        copy = copy_bandwidth()
        print(f"copy: {copy / 1e9:.0f} GB/s", flush=True)
        if which == "decode":
            time_decode(gpu, copy, options.quick, options.peers)
        else:
            time_prefill(gpu, options.quick, options.peers)
    print(f"{failed} wrong")


if __name__ == "__main__":
    main()
