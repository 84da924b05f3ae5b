"""What the benchmarks give FlashInfer is what ours is given, and its figures reach limits and tables."""

from __future__ import annotations

import importlib
import json
import sys
from types import SimpleNamespace

import pytest

from tests.paths import ROOT

torch = pytest.importorskip("torch")


@pytest.fixture
def benchmark(monkeypatch):
    """Import a benchmark by its name."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.setattr(sys, "path", [*sys.path])  # some put the root in front
    return importlib.import_module


class PagedWrapper:
    """Stands in for both wrappers of FlashInfer: causal attention over pages, as its documentation says what they hold."""

    def __init__(self, workspace, layout, **options):
        self.layout, self.options = layout, options

    def plan(self, *numbers, causal=False, q_data_type, kv_data_type):
        *rows, self.first, self.pages, self.last, self.heads, self.kv_heads, dim, self.page = numbers
        self.rows = rows[0] if rows else torch.arange(len(self.last) + 1)
        self.dtypes = q_data_type, kv_data_type
        assert causal == bool(rows)
        assert dim == 16

    def run(self, q, kv, *, out, k_scale=1.0):
        assert (q.dtype, kv[0].dtype) == self.dtypes
        for slot, last in enumerate(self.last.tolist()):
            pages = self.pages[self.first[slot] : self.first[slot + 1]].long()
            k, v = (one.float()[pages] for one in kv)  # [pages, page, heads, D] in NHD
            if self.layout == "HND":
                k, v = k.transpose(1, 2), v.transpose(1, 2)
            length = (len(pages) - 1) * self.page + last
            k, v = (
                one.reshape(-1, self.kv_heads, one.shape[-1])[:length].repeat_interleave(self.heads // self.kv_heads, 1) for one in (k, v)
            )
            rows = slice(int(self.rows[slot]), int(self.rows[slot + 1]))
            width = rows.stop - rows.start
            scores = torch.einsum("qhd,khd->hqk", q[rows].float(), k) * k_scale * q.shape[-1] ** -0.5
            future = torch.ones(width, length, dtype=torch.bool).triu(length - width + 1)
            out[rows] = torch.einsum("hqk,khd->qhd", scores.masked_fill(future, -torch.inf).softmax(-1), v)
        return out


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("dtype", ["float16", "float8_e4m3fn"])
@pytest.mark.parametrize(("width", "tokens"), [(1, 37), (1, 32), (5, 37), (3, 48)])
def test_pages_hold_the_keys_and_values_of_ours(benchmark, monkeypatch, width, tokens, dtype, layout):
    wrappers = {"BatchDecodeWithPagedKVCacheWrapper": PagedWrapper, "BatchPrefillWithPagedKVCacheWrapper": PagedWrapper}
    monkeypatch.setitem(sys.modules, "flashinfer", SimpleNamespace(**wrappers))
    torch.manual_seed(0)
    q = torch.randn(2, width, 6, 16).half()
    caches = [(torch.randn(2, 2, 3, tokens, 16) * 4).to(getattr(torch, dtype)) for _ in range(2)]
    both = [(cache[:, 0], cache[:, 1]) for cache in caches]
    calls = benchmark("attention_flashinfer").paged_calls(q, both, layout=layout, k_scale=0.25)
    assert len(calls) == 2
    scales = torch.tensor([[0.25], [1.0]]).expand(2, 3)
    for call, cache in zip(calls, caches, strict=True):
        lengths = torch.full((2,), tokens - width)
        assert benchmark("attention_quantized_cache").largest_error(call().view(q.shape), q, cache, scales, lengths) < 1e-3


def quantized_row(us, **others):
    kinds = ("float8_e4m3fn head", "int8 token")
    figures = {"kv_mb": dict.fromkeys(("16 bits", *kinds), 64.0), "of_copy": dict.fromkeys(("16 bits", *kinds), 0.9)}
    shape = {"batch": 1, "width": 1, "past": 1024, "group": 4, "head_dim": 128, "kv_heads": 8}
    return {**shape, **figures, "append_attention_us": us, "faster_than_16_bits": dict.fromkeys(kinds, 1.8), "peers_us": others}


def test_the_limit_is_the_fastest_of_flashinfer(benchmark):
    exceeded = benchmark("attention_quantized_decode").exceeded
    row = quantized_row(10.3, flashinfer=12.0, flashinfer_heads_first=10.0, flashinfer_cuda_cores="RuntimeError: no")
    shape = "batch 1 width 1 past 1024 group 4 head_dim 128 kv_heads 8"
    assert exceeded([row]) == [f"{shape}: float8_e4m3fn head 1.030 of the time of flashinfer_heads_first"]
    assert exceeded([quantized_row(10.2, flashinfer=10.0), quantized_row(10.3, flashinfer="RuntimeError: no"), quantized_row(10.3)]) == []


def test_the_table_of_quantized_attention_beside_flashinfer(benchmark):
    to_table, tables = benchmark("environment").to_table, benchmark("tables")
    few = {**quantized_row(10.0), "width": 2}
    large = [{**row, "kv_mb": dict.fromkeys(row["kv_mb"], 128.0)} for row in (quantized_row(9.0, flashinfer=12.0, other="no"), few)]
    content = {"limits": {"of_copy": 0.85, "of_16_bits": 1.7, "of_best_peer": 1.02}, "rows": to_table(large)}
    rows = [*tables._attention_quantized_decode(json.loads(json.dumps(content)))]
    label = "one new token, float8_e4m3fn K/V with a scale for each head: time / time of FlashInfer's fastest, without RoPE"
    assert [row for row in rows if "FlashInfer" in row[0]] == [(label, "0.750 to 0.750 (1 shapes)", "1.02")]
    old = [{name: part for name, part in row.items() if name not in ("append_attention_us", "peers_us")} for row in large]
    content = {"limits": {"of_copy": 0.85, "of_16_bits": 1.7}, "rows": to_table(old)}
    assert [*tables._attention_quantized_decode(content)] == [row for row in rows if "FlashInfer" not in row[0]]
