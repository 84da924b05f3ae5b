"""Write the table of results into benchmarks/README.md, and some into README.md and docs/quantization.md, from benchmarks/results.

    python benchmarks/tables.py [--check]

``--check`` writes nothing; exit code 1 says that the table is not that of the files.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import end_to_end_report
from environment import of_table

HERE = Path(__file__).parent
README = HERE / "README.md"
BEGIN, END = "<!-- results: benchmarks/tables.py -->", "<!-- end of results -->"
FIGURE_BEGIN, FIGURE_END = "<!-- figure: benchmarks/tables.py -->", "<!-- end of figure -->"
MAIN_README = HERE.parent / "README.md"
QUANTIZATION = HERE.parent / "docs" / "quantization.md"
PERPLEXITY = HERE / "results" / "perplexity.json"
END_TO_END = HERE / "results" / "end_to_end.json"
#: Runs that have the side of llama.cpp too.
BESIDE_LLAMA = [HERE / "results" / f"end_to_end_{name}.json" for name in ("llama", "int8", "q4_0")]
LLAMA_BEGIN, LLAMA_END = "<!-- llama.cpp: benchmarks/tables.py -->", "<!-- end of llama.cpp -->"

_MIB = 2**20


def table(results: Path) -> str:
    """Return the table of all results in a folder, one line per figure. Machine and commit are on the line where they change."""
    lines = ["| result | measured | limit | on | commit |", "|---|---|---|---|---|"]
    for name, rows in _FILES.items():
        path = results / f"{name}.json"
        if path.is_file():
            content = json.loads(path.read_text(encoding="utf-8"))
            place = f"{content.get('device', content['cpu'])}, {content['date'][:10]} | {_short(content['commit'])}"
            for i, (what, value, limit) in enumerate(rows(content)):
                bound = limit if not limit[:1].isdigit() else f"at most {limit}"
                lines.append(f"| {what} | {value} | {bound} | {' | ' if i else place} |")
    return "\n".join(lines)


def _host_step(content: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    limits = content["limits"]
    for layers, times in content["layers"].items():
        limit = f"{limits['median_us_at_32_layers']:g} us" if layers == "32" else ""
        yield f"host time of a decode step, {layers} layers, B = {content['batch_size']}", f"{times['median_us']:.1f} us", limit
    yield "the same, 64 layers / 16 layers", f"{content['ratio_64_to_16']:.2f}", f"{limits['ratio_64_to_16']:g}"
    for place, times in content["loop"].items():
        yield (
            f"host time from one enqueue of `generate` to the next, tokens chosen on the {place}",
            f"{times['between_enqueues_us']:.1f} us",
            "",
        )
        limit = f"{limits['after_tokens_us']:g} us in any step" if place == "device" else ""
        yield "part of it after the step's tokens (or logits) have arrived", f"{times['after_tokens_us']:.1f} us", limit


def _sampling(content: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    rows = [row for row in content["host_us"] if row["vocab"] == content["limit_vocab"]]
    for name in (name for name in rows[0] if name not in ("vocab", "logits")):
        times = ", ".join(f"{row[name]:.0f} ({row['logits']})" for row in rows)
        yield f"sampling on the host, a row of {content['limit_vocab']}, {name}", f"{times} us", f"{content['limit_us']:g} us"


def _sampling_gpu(content: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    yield "sampling on a GPU: rows with the same tokens as on the host", f"{content['checked_rows']}", "all"
    for row in content["gpu_us"]:
        times = [value for kind in ("peaked", "flat") for value in row[kind].values()]
        limit = "30 us" if (row["vocab"], row["batch"]) == (151_936, 8) else ""
        yield f"sampling on a GPU, batch {row['batch']}, vocabulary {row['vocab']}", f"{min(times):.1f} to {max(times):.1f} us", limit


def _build(content: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    for name in ("bare", "ours"):
        result = content["results"][name]
        yield f"build of a 0.5B Qwen2-shaped engine, {content['dtype']}, {name}", f"{result['seconds']:.1f} s", ""
        yield f"peak memory of it, {name}", f"{result['peak_nbytes'] / _MIB:.0f} MiB", ""
    beyond = content["peak_beyond_bare_in_weights"]
    yield "additional peak memory over the bare build / weights", f"{round(beyond, 2) + 0.0:.2f}", f"{content['limit']:g}"


def _build_packed(content: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    for name, found in content["packed"].items():
        peaks = {which: result["peak_nbytes"] / _MIB for which, result in found["results"].items()}
        weights = found["results"]["ours"]["weights_nbytes"] / _MIB
        what = f"build of a 0.5B Qwen2-shaped engine, {name}, {weights:.0f} MiB of weights"
        yield f"{what}: peak memory, bare and ours", f"{peaks['bare']:.0f} and {peaks['ours']:.0f} MiB", ""
        yield (
            "additional peak memory over the bare build / packed weights (below 0: less memory than the bare build)",
            f"{found['peak_beyond_bare_in_weights']:.2f}",
            f"{content['limit']:g}",
        )


def _perplexity(content: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    for which, label in (("shipped", "the shipped model"), ("random", "a random model of four layers")):
        dense, *packed = of_table(content[which])
        yield f"perplexity of {label}, {dense['format']}", f"{dense['perplexity']:.4g}", ""
        for row in packed:
            yield f"the same, {row['format']} / {dense['format']}", f"{row['perplexity'] / dense['perplexity']:.4f}", ""


def _short(commit: str) -> str:
    """Return the first digits of a commit, with a mark if files had been changed since."""
    digits, *changed = commit.split(maxsplit=1)
    return " ".join([digits[:8], *changed])


def formats_table(content: dict[str, Any]) -> str:
    """Return the table of perplexities by format, for the page on quantization."""
    lines = [f"`{content['command']}`, {content['date'][:10]}, commit {_short(content['commit'])}:", ""]
    lines += [
        "| weights | bytes / 16-bit bytes (random model) | perplexity / 16-bit perplexity: shipped model | the same: random model |",
        "|---|---|---|---|",
    ]
    tables = {which: {row["format"]: row for row in of_table(content[which])} for which in ("shipped", "random")}
    dense = {which: next(iter(rows.values())) for which, rows in tables.items()}
    for name, row in list(tables["random"].items())[1:]:
        of_small = f"{tables['shipped'][name]['perplexity'] / dense['shipped']['perplexity']:.4f}"
        nbytes = row["weights_nbytes"] / dense["random"]["weights_nbytes"]
        label = f"`--quantize {name}`" if name.startswith("int") else name
        lines.append(f"| {label} | {nbytes:.2f} | {of_small} | {row['perplexity'] / dense['random']['perplexity']:.3f} |")
    return "\n".join(lines)


def _build_estimate(content: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    yield "estimates of plan size and peak memory of a build: largest error", f"{content['largest_error']:.1%}", f"{content['limit']:.0%}"


def _import_time(content: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    for modules, result in content["results"].items():
        limit = f"{content['limit_s']:g} s" if modules == "trt_kvcache" else ""
        statement = modules if modules.startswith("from ") else f"import {modules}"
        yield f"`{statement}`, median", f"{result['median_s']:.3f} s", limit


def _moves(content: dict[str, Any], device: str = "host") -> Iterator[tuple[str, str, str]]:
    limits = content["limits"]
    yield "plain copy, bytes read and written", f"{content['copy_gb_per_second']:.1f} GB/s", ""
    shares: dict[str, list[float]] = {}
    rows = of_table(content["cases"])
    for row in rows:
        if not row["launch_bound"]:
            shares.setdefault(row["move"], []).append(row["of_copy"])
    for name, found in shares.items():
        spread = f"{min(found):.2f} to {max(found):.2f} of a copy ({len(found)} shapes)"
        fresh = name == "capture" and device == "host"
        label = f"{name} with its allocation / copy with an allocation" if fresh else name
        yield f"{label}, above 64 MB", spread, "" if fresh else f"at least {limits[device]:g}"
    launches = [row["us"] for row in rows if row["launch_bound"]]
    if launches:
        yield "compaction, capture or restore of less than 64 MB", f"{min(launches):.0f} to {max(launches):.0f} us", ""
    yield (
        "compaction of 1024 tokens, S = 32768 / S = 2048",
        f"{content['by_max_sequence_length']['ratio']:.2f}",
        f"{limits['length_ratio']:g}",
    )
    for what in ("save", "load"):
        yield (
            f"{what} of a snapshot: its speed / that of the slower of SHA-256 and disk",
            f"{content['snapshots'][f'{what}_of_slower']:.2f}",
            "",
        )
    times = content["host_time"]
    for what, label in (("commit_scalar_us", "commit of a number"), ("commit_values_us", "commit per slot"), ("reset_us", "reset")):
        yield f"{label}, host time, B = {times['batch_size']}", f"{times[what]:.1f} us", f"{limits['host_us']:g} us"


def _state_steps(content: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Decode steps by layer, as a share of the copy bandwidth."""
    rows = _rows(content, "rows")
    for layer in dict.fromkeys(row["layer"] for row in rows):
        # States are read and written.
        large = [row["of_copy"] for row in rows if row["layer"] == layer and row["width"] == 1 and 2 * row["state_mb"] >= 64]
        if large:
            shapes = f"{min(large):.2f} to {max(large):.2f} ({len(large)} shapes)"
            yield f"{layer}, decode from 64 MB of states: share of the copy bandwidth", shapes, f"at least {content['limits']['of_copy']:g}"


def _state_prefill(content: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Prefill by layer, compared with other implementations."""
    rows = [row for row in _rows(content, "rows") if row["width"] > 1]
    for layer in dict.fromkeys(row["layer"] for row in rows):
        mine = [row for row in rows if row["layer"] == layer]
        for other in dict.fromkeys(name for row in mine for name in row.get("others_us", {})):
            pairs = [(row["us"], row.get("others_us", {}).get(other)) for row in mine]
            times = [ours / one for ours, one in pairs if isinstance(one, float)]
            if times:
                shapes = f"{min(times):.3f} to {max(times):.3f} ({len(times)} shapes)"
                yield f"{layer}, several new tokens: time / time of {other}", shapes, f"{content['limits']['of_best_other']:g}"


def _attention(content: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Both rows of the limits: with RoPE and append over a copy and in microseconds, without them beside others."""
    limits, rope, flash = content["limits"], "rope_append_attention", "FLASH_ATTENTION"
    dims = {row["head_dim"] for part in ("decode", "chunks", "prefill") for row in _rows(content, part)}
    title = f"attention, heads of {min(dims)}" if len(dims) == 1 else "attention"
    least, large, best, small = [], [], [], []
    times = {}
    for row in _rows(content, "decode"):
        times[row["group"], row["head_dim"], row["batch"], row["past"]] = row["us"]["attention"]
        others = _peer_times(row)
        if row["kv_mb"] >= 64:
            (large if row["kv_mb"] >= 65 else least).append(row["of_copy"][rope])
            best += [row["us"]["attention"] / min(others)] if others else []
        elif row["kv_mb"] <= 8:
            small.append(row["us"][rope])
    chunks = _rows(content, "chunks")
    one = {_but_width(row): row["us"][rope] for row in chunks if row["width"] == 1}
    of_one = [(row["width"], row["us"][rope] / one[_but_width(row)], row["kv_mb"]) for row in chunks]
    to_8, to_16 = ([times for n, times, mb in of_one if low <= n <= high and mb > 8] for low, high in ((2, 8), (16, 16)))
    more = [row["us"][rope] - one[_but_width(row)] for row in chunks if 2 <= row["width"] <= 16 and row["kv_mb"] <= 8]
    flashes = [(row["us"]["attention"], row.get("peers_us", {}).get(flash)) for row in chunks if row["width"] > 1]
    of_flash = [ours / other for ours, other in flashes if isinstance(other, float)]
    paged = [(row["us"]["attention"], _peer_times(row, "flashinfer")) for row in chunks if row["width"] > 1]
    of_flashinfer = [ours / min(others) for ours, others in paged if others]
    rows = [(row["us"]["attention"], row.get("peers_us", {}).get(flash)) for row in _rows(content, "prefill")]
    shares = [other / ours for ours, other in rows if isinstance(other, float)]
    eight = [time / times[(1, *shape)] for (group, *shape), time in times.items() if group == 8 and (1, *shape) in times]
    for what, found, unit, limit in (
        ("decode, 64 MB of K and V: share of the copy bandwidth", least, "", f"at least {limits['of_copy']:g}"),
        ("decode, more than 64 MB: share of the copy bandwidth", large, "", f"at least {limits['of_copy']:g}"),
        ("decode from 64 MB: time / time of the fastest other", best, "", f"{limits['of_best_peer']:g}"),
        ("decode, 8 query heads per K/V head: time / time with 1", eight, "", f"{limits['group_8_of_1']:g}"),
        ("decode up to 8 MB", small, " us", f"{limits['small_us']:g} us"),
        ("2 to 8 new tokens, more than 8 MB: time / time of 1", to_8, "", f"{limits.get('8_of_1', 0):g}"),
        ("16 new tokens, more than 8 MB: time / time of 1", to_16, "", f"{limits.get('16_of_1', 0):g}"),
        ("2 to 16 new tokens, up to 8 MB: time above that of 1", more, " us", f"{limits.get('small_more_us', 0):g} us"),
        (f"2 to 512 new tokens: time / time of torch's {flash}", of_flash, "", f"{limits.get('chunk_of_best_peer', 0):g}"),
        ("2 to 512 new tokens: time / time of FlashInfer's fastest", of_flashinfer, "", f"{limits.get('chunk_of_best_peer', 0):g}"),
        (f"prefill: speed / speed of torch's {flash}", shares, "", f"at least {limits['of_flash']:g}"),
    ):
        if found:
            digits = 3 if "time / time" in what else 2
            yield f"{title}, {what}", f"{min(found):.{digits}f} to {max(found):.{digits}f}{unit} ({len(found)} shapes)", limit


def _peer_times(row: dict[str, Any], name: str = "") -> list[float]:
    """Return the times of peers by name prefix, without the peers that have a reason in place of a time."""
    return [one for other, one in row.get("peers_us", {}).items() if isinstance(one, float) and other.startswith(name)]


def _rows(content: dict[str, Any], which: str) -> list[dict[str, Any]]:
    return list(of_table(content[which])) if which in content else []


def _but_width(row: dict[str, Any]) -> tuple[int, ...]:
    """Return the shape of a row without its new tokens."""
    return tuple(row[key] for key in ("batch", "past", "group", "head_dim", "kv_heads"))


def _compare_kernels(content: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    ratios: dict[str, list[float]] = {}
    for row in of_table(content["cases"]):
        ratios.setdefault(row["kind"], []).append(row["new_over_old"])
    label = f"attention kernels, time / time of commit {content['old_commit'][:8]}"
    for kind, found in ratios.items():
        spread = f"{min(found):.3f} to {max(found):.3f} ({len(found)} shapes)"
        yield f"{label}: {kind}", spread, f"{content['limits']['new_over_old']:g}"
    if ratios:
        yield f"{label}: geometric mean", f"{content['geometric_mean']:.3f}", ""


def _segments(content: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    yield f"segments: host time of a layer, launches {content['launches']}", f"{content['eager_us_per_layer']:.1f} us", ""
    for layers, time in content["graph_us"].items():
        yield f"segments: host time of the graph of a decode step, {layers} layers", f"{time:.1f} us", ""
    for mode, times in content.get("one_piece_us", {}).items():
        limit = f"{content['limits']['one_piece_us']:g} us"
        spread = f"{min(times.values()):.1f} to {max(times.values()):.1f} us"
        yield f"one plan: host time of `TensorRTEngine.enqueue`, {', '.join(times)} layers, {mode}{_load(content)}", spread, limit


def _plugin_layers(content: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    for row in content["rows"]:
        plans = "1 plan" if row["plans"] == 1 else f"{row['plans']} plans"
        beside = (row["plan_nbytes"] + row["constants_nbytes"] - row["weights_nbytes"]) / _MIB
        sizes = f"{plans}, {row['plan_nbytes'] / _MIB:.0f} MiB in all; plans and constants minus weights: {beside:.0f} MiB"
        time = f"peak {row['peak_nbytes'] / _MIB:.0f} MiB, {row['seconds']:.0f} s"
        yield f"build with TensorRT for RTX, {row['build']}{_load(content)}", f"{sizes}; {time}", ""


def _load(content: dict[str, Any]) -> str:
    """Return the load of a busy machine in words: times are then longer than they need be."""
    load = content.get("load_average") or 0
    return f" (two busy cores, load average {load:.0f})" if load >= 2 else ""


def _gpu(content: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    for name, stage in content["stages"].items():
        result = stage["result"]
        if not stage["ok"]:
            yield name, "no", ""
        elif name == "cache: compaction, capture, restore":
            yield from _moves(result, "gpu")
        elif name == "segments: host time":
            yield from _segments(result)
        elif name.startswith("kernels: "):
            yield f"{name}, {len(result)} files of tests", "no error" if stage["ok"] else "errors", ""
        elif isinstance(result, str):
            yield name, result, ""
        elif isinstance(result, dict) and "tokens_per_second" in result:
            yield name, f"{result['tokens_per_second']} tokens/s", ""


def _torch_engine(content: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    for dtype, result in content["results"].items():
        for what, ratio in result["times_as_fast"].items():
            yield f"PyTorch engine on a CPU, 0.5B Qwen2, {dtype}, {what}: time of transformers / ours", f"{ratio:.2f}", "at least 1"


def _torch_engine_gpu(content: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    for row in content["rows"]:
        share = f"{row['share_of_limit']:.2f} ({row['decode_step_ms']:.2f} ms)"
        yield (
            f"`torch_engine.py --gpu`, decode step of {row['model']}, batch {row['batch']}: share of the memory bandwidth limit",
            share,
            "",
        )


def _serving(content: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    for row in content["rows"]:
        at_once = f"{row['at_once']} at once" if row["at_once"] > 1 else "one at a time"
        limit = f"at least {content['limit']:g}" if row["at_once"] == content["slots"] else ""
        what = f"tokens per second of the server / of `submit` and `step`, {at_once}"
        yield f"{what}, streams", f"{row['stream_over_session']:.2f} ({row['stream']['tokens_per_second']:.0f})", limit
        yield "the same, whole answers", f"{row['whole_over_session']:.2f} ({row['whole']['tokens_per_second']:.0f})", limit
        first = f"{row['stream']['first_token_ms']:.0f} ms, session {row['session']['first_token_ms']:.0f} ms"
        yield f"first token at the client, {at_once}", first, ""


def _drafts(content: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    texts = {
        "edit": f"a text to be edited ({content['model']}), prompt lookup",
        "free": "free text, prompt lookup",
        "silent": "free text, a drafter that proposes nothing",
    }
    for row in content["rows"]:
        what = texts.get(row["what"], f"random weights, draft tokens that are {row['what']} of the time")
        limit = f"at least {content['limit']:g}" if row["what"] in ("free", "silent") else ""
        accepted = f"{row['accepted_tokens']} of {row['draft_tokens']} accepted"
        yield f"tokens per second with drafts / without: {what}", f"{row['ratio']:.2f} ({row['with_drafts']:.0f}; {accepted})", limit


def _draft_models(content: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    drafters = {"eagle3": "an EAGLE-3 head", "model": "a draft model of 1B"}
    for drafter, rows in content["rows"].items():
        for row in rows:
            which = f"drafts of up to {row['length']}" if row["length"] else "drafts of the length that the session chooses"
            slots = "1 sequence" if row["batch"] == 1 else f"{row['batch']} sequences"
            what = f"Llama-3-8B with {drafters[drafter]}, {slots}, {which}, {row['rate']:g} of their tokens right"
            limit = f"at least {content['limit']:g}" if (row["batch"], row["length"], row["rate"]) == (1, 4, 0.8) else ""
            yield f"tokens per second with drafts / without: {what}", f"{row['ratio']:.2f} ({row['with_drafts']:.0f})", limit


def _draft_trees(content: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    for row in content["verify"]:
        slots = "1 sequence" if row["batch"] == 1 else f"{row['batch']} sequences"
        what = f"`verify` of a tree of {row['tokens']} tokens / of one token, Llama-3-8B, {slots}"
        yield what, f"{row['tree_ms'] / row['decode_ms']:.2f} ({row['tree_ms']:.2f} ms; a chain {row['chain_ms']:.2f} ms)", ""
    for row in content["propose"]:
        slots = "1 sequence" if row["batch"] == 1 else f"{row['batch']} sequences"
        yield f"an EAGLE-3 head generates a tree of {row['tokens']} tokens, {slots}", f"{row['propose_ms']:.1f} ms", ""


def _adapters(content: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    which = f"Llama-3-8B with {content['adapters']} adapters of rank {content['rank']}"
    for row in content["rows"]:
        slots = "1 sequence" if row["batch"] == 1 else f"{row['batch']} sequences"
        value = f"{row['adapted_over_base']:.2f} ({row['adapted_ms']:.2f} ms)"
        yield f"time of a token of {which}, {slots} / of a session without", value, f"at most {content['limit']:g}"
        yield "the same in a step in which no slot has an adapter", f"{row['none_ms'] / row['base_ms']:.2f} ({row['none_ms']:.2f} ms)", ""


def _llama_cpp(content: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    same, limits = content["correctness"], content["correctness"]["limits"]
    yield "compared with llama.cpp: prompts with the same token ids", f"{same['prompts_with_the_same_ids']} of {same['prompts']}", "all"
    what = f"log-probabilities of {same['forced_tokens']} teacher-forced tokens"
    value, limit = same["float32_over_largest_logit"], limits["float32_over_largest_logit"]
    yield f"{what}, file in float32: largest difference / largest logit", f"{value:.1e}", f"{limit:g}"
    value, limit = same["quantized_largest"], limits["quantized_largest"]
    yield f"{what}, {content['model']}: largest difference", f"{value:.2f} (mean {same['quantized_mean']:.3f})", f"{limit:g}"
    for row in content["rows"]:
        what = f"{row['side']}, threads: {content['threads']}, {row['weights']}: tokens per second of prefill, of decode"
        yield what, f"{row['prefill_tokens_per_second']:.0f}, {row['decode_tokens_per_second']:.1f}", ""


def _server_attacks(content: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    for name, what in (("bodies", "bodies of 4 MiB"), ("headers", "long headers and 300 connections"), ("grammars", "hostile grammars")):
        rows = [row for row in content[name]["rows"] if "health_s" in row]
        longest = max(row["health_s"] for row in rows)
        yield (
            f"{what}, {len(rows)} attacks: longest wait of `/health`",
            f"{longest * 1e3:.0f} ms",
            f"{content[name]['limits']['health_s'] * 1e3:.0f} ms",
        )
    left, limit = content["bodies"]["memory_left_mib"], content["bodies"]["limits"]["memory_left_mib"]
    yield "memory that all bodies together leave allocated", f"{left} MiB", f"{limit} MiB"
    slow = next(row for row in content["grammars"]["rows"] if row.get("beside") == "three slow grammars")
    yield (
        "tokens of others next to three slow grammars: time / time without them",
        f"{slow['ratio']:.2f}",
        f"{content['grammars']['limits']['beside_slow']}",
    )
    row = content["fairness"]["rows"][0]
    what = f"of {row['requests']} requests of one client: ended before the only request of another one"
    yield what, f"{row['ended_before']}", f"{content['fairness']['limits']['ended_before']}"


def _attention_quantized_decode(content: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    limits, rows = content["limits"], of_table(content["rows"])
    for what, chosen in (
        ("one new token", [row for row in rows if row["width"] == 1]),
        ("2 to 8 new tokens", [row for row in rows if row["width"] > 1]),
    ):
        for name in chosen[0]["faster_than_16_bits"]:
            kind, scales = name.split()
            label = f"{what}, {kind} K/V with a scale for each {scales}"
            shares = [row["of_copy"][name] for row in chosen if row["kv_mb"][name] >= 64]
            yield (
                f"{label}: share of the copy bandwidth, from 64 MB",
                f"{min(shares):.2f} to {max(shares):.2f}",
                f"at least {limits['of_copy']}",
            )
            times = [row["faster_than_16_bits"][name] for row in chosen if row["kv_mb"]["16 bits"] >= 128]
            yield (
                f"{label}: speed / speed of 16-bit K/V, from 128 MB of these",
                f"{min(times):.2f} to {max(times):.2f}",
                f"at least {limits['of_16_bits']}",
            )
        times = [row["append_attention_us"] / min(others) for row in chosen if (others := _peer_times(row))]
        if times:
            label = f"{what}, float8_e4m3fn K/V with a scale for each head: time / time of FlashInfer's fastest, without RoPE"
            yield label, f"{min(times):.3f} to {max(times):.3f} ({len(times)} shapes)", f"{limits['of_best_peer']:g}"


def _attention_quantized_prefill(content: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    limits, rows = content["limits"], of_table(content["rows"])
    for what, chosen, limit in (
        ("prompts of 512 tokens", [row for row in rows if not row["past"] and row["width"] < 2048], ""),
        ("prompts of 2048 tokens and more", [row for row in rows if not row["past"] and row["width"] >= 2048], f"{limits['prefill']:.2f}"),
        ("16 to 512 tokens after a prefix", [row for row in rows if row["past"]], f"{limits['chunk']:.2f}"),
    ):
        for scales in ("head", "token"):
            shares = [share for row in chosen for name, share in row["of_16_bits"].items() if name.endswith(scales)]
            yield (
                f"{what}, quantized K/V with a scale for each {scales}: time / time of 16-bit K/V",
                f"{min(shares):.2f} to {max(shares):.2f}",
                limit,
            )


def _linear(content: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    limits, products, layers = content["limits"], of_table(content["products"]), of_table(content["layers"])
    for row in layers:
        ours, others = (row["of_copy"][side] for side in ("ours", "torch"))
        what = f"layers of {row['model']}, batch {row['rows']}, 1024 past: share of the copy bandwidth (with products of torch)"
        yield what, f"{ours:.2f} ({others:.2f})", f"at least {limits['layers_of_copy']}" if row["mb"] >= 64 else ""
    few, many = ([row for row in products if (row["rows"] <= 8) == is_few] for is_few in (True, False))
    shares = [row["of_copy"]["ours"] for row in few if row["mb"] >= 64]
    if shares:
        yield (
            "matrix products of up to 8 rows alone, from 64 MB: share of the copy bandwidth",
            f"{min(shares):.2f} to {max(shares):.2f}",
            f"at least {limits['of_copy']}",
        )
    for what, rows, limit in (("up to 8 rows", few, f"{limits['of_torch']}"), ("16 rows", many, "")):
        ratios = [row["us"]["ours"] / row["us"]["torch"] for row in rows]
        if ratios:
            yield (
                f"matrix products of {what} alone: time / time of torch",
                f"{min(ratios):.2f} to {max(ratios):.2f} ({len(ratios)} shapes)",
                limit,
            )


def _steps(content: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    limits = content["limits"]
    yield "steps of every width: logits of small models, difference from the NumPy engine", f"{max(content['compared'].values()):.1e}", ""
    for name, model in content["models"].items():
        rows = of_table(model["rows"])
        if not rows:  # no time was left
            continue
        token = rows[0]
        for batch in dict.fromkeys(row["batch"] for row in rows):
            for call in ("decode", "verify", "append", "prefill"):
                found = [row for row in rows if (row["call"], row["batch"]) == (call, batch)]
                if found:
                    past = "" if call == "prefill" else f", {content['past']} past"
                    widths = ", ".join(str(row["width"]) for row in found)
                    yield f"{name}, batch {batch}{past}: `{call}` of {widths} tokens", _milliseconds(found, "call_ms"), ""
                    yield (
                        "the same enqueue back to back, so the time of the GPU; the first call; the second, which captures",
                        "; ".join(_milliseconds(found, times) for times in ("engine_ms", "first_ms", "second_ms")),
                        "",
                    )
        of_widths = {(row["call"], row["width"]): row for row in rows if row["batch"] == 1}
        drafts = [row["engine_ms"] / token["engine_ms"] for (call, width), row in of_widths.items() if call == "verify" and width <= 8]
        if drafts:
            limit = limits["verify_over_decode"].get(name)
            yield f"{name}: time of the GPU to verify up to 8 tokens / for one token", f"{max(drafts):.2f}", _at_most(limit)
        if ("append", 16) in of_widths:
            ratio = of_widths["append", 16]["call_ms"] / token["call_ms"]
            yield f"{name}: `append` of 16 / `decode`", f"{ratio:.2f}", _at_most(limits["append_16_over_decode"].get(name))
        prompts = [row for (call, _), row in of_widths.items() if call == "prefill"]
        if prompts:
            apart = max((row["call_ms"] - limits["prefill_ms_apart"]) / row["exact_engine_ms"] for row in prompts)
            what = f"{name}: `prefill`, without {limits['prefill_ms_apart']} ms, / time of the GPU for the exact width"
            yield what, f"{apart:.2f}", _at_most(limits["prefill_over_exact"])
        for width, us in (model["eager_us_per_layer"] or {}).items():
            what = f"{name}: host time of a layer of {width} tokens that is not captured"
            yield what, f"{us:.0f} us", _at_most(limits["eager_us_per_layer"], " us")
        if model["graphs"] is not None:
            used = model["graphs"]
            yield f"{name}: memory of {used['graphs']} graphs", f"{used['mib']:.0f} MiB", _at_most(round(used["budget_mib"]), " MiB")
        steps = model["queue"][-1]
        times = f"{steps['decode_step_ms']:.2f}; {steps['admitting_step_ms']:.2f}; {steps['longest_step_ms']:.2f} ms"
        yield f"{name}: steps of a queue: median of those that decode, of those that run prompts too, longest", times, ""


def _milliseconds(rows: list[dict[str, Any]], times: str) -> str:
    return ", ".join(f"{row[times]:.2f}" for row in rows) + " ms"


def _at_most(limit: float | None, unit: str = "") -> str:
    return "" if limit is None else f"{limit:g}{unit}"


def _packed_linear(content: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    for row in of_table(content["layers"]):
        what = f"products of a layer of {row['model']}, packed weights ({row['scheme']}), {row['rows']} row(s): share of the copy bandwidth"
        yield what, f"{row['of_copy']:.2f}; {row['speedup']:.2f} times as fast as in 16 bits", ""
    for row in of_table(content["pairs"]) if "pairs" in content else ():  # results before these kernels have none
        what = (
            f"q and k, and v, of {row['model']} ({row['schemes']}), {row['rows']} row(s): time of two launches and a concatenation / time"
        )
        yield what, f"{row['us']['two and cat'] / row['us']['one launch']:.2f}", ""
    large = [row for row in of_table(content["products"]) if row["rows"] == 1 and row["product"] in ("gate_up", "head")]
    for scheme in dict.fromkeys(row["scheme"] for row in large):
        shares = [row["of_copy"] for row in large if row["scheme"] == scheme]
        what = f"largest matrices alone, packed weights ({scheme}), 1 row: share of the copy bandwidth"
        yield what, f"{min(shares):.2f} to {max(shares):.2f}", f"at least {content['limits']['of_copy']}"
    for row in of_table(content["many"]):
        ratio = row["us"]["packed"] / row["us"]["16 bits"]
        yield (
            f"{row['product']}, packed weights ({row['scheme']}), {row['rows']} rows: time / time in 16 bits",
            f"{ratio:.2f}",
            "at most 1.5",
        )


def _experts(content: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    for row in of_table(content["rows"]):
        if row["launch"] != "both":
            continue
        what = f"chosen experts of a layer of {row['model']} in {row['format']}, {row['rows']} row(s): share of the copy bandwidth"
        value = f"{row['of_copy']['ours']:.2f}"
        if "torch" in row["us"]:
            what, value = f"{what}; time of torch / time", f"{value}; {row['us']['torch'] / row['us']['engine']:.1f}"
        yield what, value, f"at least {content['limits']['of_copy']}" if row["mb"] >= content["limits"]["mb"] else ""


def _expert_prompts(content: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    for row in of_table(content["rows"]):
        what = f"{row['rows']} rows of a prompt with the experts of a layer of {row['model']} in {row['format']}"
        times, share = row["us"], row["of_least"]["tiles"]
        sides = f"{times['tiles']:.0f} us; {share:.2f}; {times['grouped'] / times['tiles']:.1f}"
        yield f"{what}: time; share of the least time; time of grouped products in 16 bits / time", sides, ""


def _end_to_end_experts(content: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    for cell in content["cells"].values():
        if not cell["ok"]:
            continue
        at = f"{cell['model']} in {cell['format']}, batch {cell['batch']}, {cell['past']} tokens past"
        value = f"{cell['step_ms']['median']:.2f} ms, {cell['of_limit']:.2f}; {cell['first_token_ms']:.0f} ms"
        least = f"at least {content['limits']['of_limit_batch_1']} of the bound" if cell["batch"] == 1 else ""
        yield f"{at}: a decode step, share of the bound; the prompt before it", value, least


def _packed_end_to_end(content: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    for cell in content["cells"].values():
        weights = f"weights in {content['weights'] or '16 bits'}"
        what = f"{cell['model']}, {weights}, batch {cell['batch']}, {cell['past']} tokens past: a decode step"
        if cell["side"] == "llama":
            yield f"{what} of llama.cpp ({cell['block_type']})", f"{cell['step_ms']['median']:.2f} ms", ""
        else:
            yield what, f"{cell['step_ms']['median']:.2f} ms ({cell['of_limit']:.2f} of the bound)", ""


def _serving_load(content: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    limits = content["limits"]
    for row in content["rows"]:
        at = f"server, {row['model']}, {row['clients']} client(s), chunks of {content['prefill_chunk']} prompt tokens"
        server, session = row["server"], row["session"]
        speeds = f"{server['tokens_per_second']:.0f}; {row['over_session']:.2f} ({session['tokens_per_second']:.0f})"
        yield f"{at}: tokens per second; over those of the session", speeds, f"at least {limits['over_session']}"
        times = [f"{side['ttft_ms']['median']:.0f} and {side['ttft_ms']['p99']:.0f}" for side in (server, session)]
        yield f"{at}: TTFT, p50 and p99; of the session", f"{times[0]} ms; {times[1]} ms", ""
        times = [f"{side['itl_ms']['median']:.1f} and {side['itl_ms']['p99']:.1f}" for side in (server, session)]
        most = f"p99 at most {limits['itl_p99_over_median']:g} times p50"
        yield f"{at}: ITL, p50 and p99; of the session", f"{times[0]} ms; {times[1]} ms", most
        if "transformers" in row:
            peer = row["transformers"]
            speed = f"{peer['tokens_per_second']:.0f}; {server['tokens_per_second'] / peer['tokens_per_second']:.2f}"
            latencies = [f"{peer[name]['median']:.1f} and {peer[name]['p99']:.1f} ms" for name in ("ttft_ms", "itl_ms")]
            what = "continuous batching of transformers in its process: tokens per second; those of the server / these"
            yield f"{at}: {what}; TTFT and ITL of transformers", f"{speed}; {latencies[0]}; {latencies[1]}", ""


def _opening(content: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    for row in content["rows"]:
        start, first = row["start"], row["first_start"]
        limit = f"copy of the file: {row['limit_seconds']:.2f} s" if "limit_seconds" in row else ""
        what = "from the start of Python to the model; to a first token; to a first token with kernels to compile"
        yield (
            f"{row['model']}, {row['format']}: {what}",
            f"{start['opened']:.1f}; {start['first_token']:.1f}; {first['first_token']:.1f} s",
            limit,
        )


_FILES = {
    "opening": _opening,
    "host_step": _host_step,
    "sampling": _sampling,
    "sampling_gpu": _sampling_gpu,
    "serving": _serving,
    "serving_load": _serving_load,
    "serving_load_transformers": _serving_load,
    "server_attacks": _server_attacks,
    "drafts": _drafts,
    "drafts_host": _drafts,
    "draft_models": _draft_models,
    "draft_models_chosen": _draft_models,
    "draft_trees": _draft_trees,
    "draft_trees_batch_1": _draft_trees,
    "adapters": _adapters,
    "build": _build,
    "build_packed": _build_packed,
    "build_estimate": _build_estimate,
    "perplexity": _perplexity,
    "import_time": _import_time,
    "moves_host": _moves,
    "segments": _segments,
    "plugin_layers": _plugin_layers,
    "torch_engine": _torch_engine,
    "torch_engine_gpu": _torch_engine_gpu,
    "llama_cpp": _llama_cpp,
    "attention": _attention,
    "attention_chunks": _attention,
    "attention_prefill": _attention,
    "attention_512_decode": _attention,
    "attention_512_chunks": _attention,
    "attention_quantized_decode": _attention_quantized_decode,
    "attention_quantized_prefill": _attention_quantized_prefill,
    "linear": _linear,
    "packed_linear": _packed_linear,
    "packed_linear_fp4": _packed_linear,
    "packed_linear_k": _packed_linear,
    "packed_linear_pairs": _packed_linear,
    "experts": _experts,
    "expert_prompts": _expert_prompts,
    "end_to_end_experts": _end_to_end_experts,
    "end_to_end_llama": _packed_end_to_end,
    "end_to_end_q4_0": _packed_end_to_end,
    "end_to_end_int8": _packed_end_to_end,
    "end_to_end_int4": _packed_end_to_end,
    "end_to_end_q4_k_m": _packed_end_to_end,
    "steps": _steps,
    "states": _state_steps,
    "states_prefill": _state_prefill,
    "compare_kernels": _compare_kernels,
    "gpu": _gpu,
    "end_to_end": end_to_end_report.rows,
    "end_to_end_gemma_4": end_to_end_report.rows,
}


def main() -> int:
    """Write what the files say, or with ``--check`` compare it."""
    wanted = {README: with_block(README.read_text(encoding="utf-8"), table(HERE / "results"))}
    if PERPLEXITY.is_file():
        content = json.loads(PERPLEXITY.read_text(encoding="utf-8"))
        wanted[QUANTIZATION] = with_block(QUANTIZATION.read_text(encoding="utf-8"), formats_table(content))
    if END_TO_END.is_file():
        content = json.loads(END_TO_END.read_text(encoding="utf-8"))
        readme = with_block(MAIN_README.read_text(encoding="utf-8"), end_to_end_report.readme_block(content))
        beside_llama = end_to_end_report.llama_block([json.loads(path.read_text(encoding="utf-8")) for path in BESIDE_LLAMA])
        readme = with_block(readme, beside_llama, LLAMA_BEGIN, LLAMA_END)
        wanted[MAIN_README] = with_block(readme, end_to_end_report.readme_sentence(content), FIGURE_BEGIN, FIGURE_END)
        wanted[HERE.parent / end_to_end_report.IMAGE] = end_to_end_report.picture(content)
    if "--check" in sys.argv[1:]:
        return int(any(not path.is_file() or path.read_text(encoding="utf-8") != text for path, text in wanted.items()))
    for path, text in wanted.items():
        path.write_text(text, encoding="utf-8")
    return 0


def with_block(text: str, block: str, begin: str = BEGIN, end: str = END) -> str:
    """Return a page with another text between two marks."""
    return f"{text[: text.index(begin) + len(begin)]}\n{block}\n{text[text.index(end) :]}"


if __name__ == "__main__":
    sys.exit(main())
