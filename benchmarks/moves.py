"""Speeds of compaction, capture and restore relative to a plain copy of the same memory, and what does not depend on a copy.

    python benchmarks/moves.py [--device host|gpu] [--max-bytes 1500000000] [--out benchmarks/results/moves_host.json]

For the K/V shapes of models of 1B, 3B and 8B parameters, in float16: bytes read plus written per second. What is smaller than
64 MB is bound by launches on a GPU, and stands apart. Then: whether a compaction depends on ``max_sequence_length``; snapshots
relative to the slower of SHA-256 and the disk; reset and commit on the host. Exit code 1 if a limit is exceeded.
"""

import argparse
import hashlib
import os
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import numpy as np
from clocks import DeviceClock, HostClock
from environment import describe_environment, to_table, write_result

from trt_kvcache import KVCacheConfig, KVCacheManager, KVLayerConfig, KVLayout, Lengths, ModelIdentity, Snapshot
from trt_kvcache.kernels import KVLayerInfos, save_kv_cache_batched

HERE = Path(__file__).parent

#: Attention layers, K/V heads and head dim.
MODELS = {"1B": (16, 8, 64), "3B": (28, 8, 128), "8B": (32, 8, 128)}
BATCHES, LENGTHS = (1, 8, 32), (1024, 8192, 32768)
ONE_LONG = [32768, *[1024] * 7]

LAUNCH_BOUND = 64e6
SHORT, LONG = 2048, 32768
COPIES = (("copy_gb_per_second", False), ("fresh_copy_gb_per_second", True))
_MOST_COPIED = 1 << 31
LIMITS = {"host": 0.7, "gpu": 0.9, "length_ratio": 1.1, "host_us": 15.0}


def cases():
    """Name, model and lengths of each case."""
    for model in MODELS:
        for batch in BATCHES:
            for length in LENGTHS:
                yield f"{model}, B = {batch}, {length} tokens", model, [length] * batch
        yield f"{model}, one of 32768 and 7 of 1024 tokens", model, ONE_LONG


def make_cache(clock, model, slots, longest):
    """Return a cache of a model, SEPARATE, float16."""
    layers, heads, head_dim = MODELS[model]
    config = KVCacheConfig(
        layers=[KVLayerConfig(num_kv_heads=heads, head_dim=head_dim)] * layers,
        max_batch_size=slots,
        max_sequence_length=longest,
        dtype="float16",
        layout=KVLayout.SEPARATE,
    )
    return KVCacheManager(config, memory=clock.memory)


def touch(cache, tokens=None):
    """Write host memory once, so that it is there: unwritten pages are read from nowhere."""
    for layer in range(cache.num_layers):
        for view in cache.get_separate_kv_cache(layer):
            np.from_dlpack(view)[:, :, :tokens] = 1


def check(clock):
    """Compare what is measured with what it must do."""
    with make_cache(clock, "1B", 3, 32) as cache:
        view = cache.get_separate_kv_cache(5)[1]
        values = np.random.default_rng(0).integers(0, 2**15, view.shape).astype(np.int16).view(np.float16)
        clock.memory.upload(view, values, stream=clock.stream)
        cache.reset_for_new_sequences([32, 7, 20], stream=clock.stream)
        cache.compact_batch([1, 2, 0], 3, 3, stream=clock.stream)
        saved = cache.capture_kv_cache(0, 20, stream=clock.stream)
        cache.restore_kv_cache(saved, 2, stream=clock.stream)
        clock.memory.synchronize(clock.stream)
        moved = view.numpy().view(np.int16)
        expected = values.view(np.int16)
        for slot, (source, length) in enumerate([(2, 20), (0, 32), (2, 20)]):
            assert (moved[slot, :, :length] == expected[source, :, :length]).all(), f"slot {slot} is wrong: nothing is measured"


def moves(clock, model, lengths):
    """Measure one case, and copies of as many bytes. Captures go to memory that is allocated for them: so does their copy."""
    result = {}
    stream = clock.stream
    with make_cache(clock, model, len(lengths), max(lengths)) as cache:
        if isinstance(clock, HostClock):
            touch(cache)
        cache.reset_for_new_sequences(lengths, stream=stream)
        token = cache.config.nbytes // len(lengths) // max(lengths)
        live, longest = 2 * sum(lengths) * token, 2 * max(lengths) * token
        around = [(slot + 1) % len(lengths) for slot in range(len(lengths))]
        saved = cache.capture_kv_cache(0, lengths[0], stream=stream)
        into = [KVLayerInfos([saved[layer] for layer in group.attn_layer_indices], stream=stream) for group in cache.kv_head_dim_groups]

        def save():
            for group, infos in zip(cache.kv_head_dim_groups, into, strict=True):
                save_kv_cache_batched(group.layer_infos, infos, 0, lengths[0], stream=stream)

        calls = [
            ("capture", longest, lambda: cache.capture_kv_cache(0, lengths[0], stream=stream)),
            ("capture into tensors that are there", longest, save),
            ("restore", longest, lambda: cache.restore_kv_cache(saved, 0, stream=stream)),
        ]
        if len(lengths) > 1:
            compact = ("compaction", live, lambda: cache.compact_batch(around, len(lengths), len(lengths), stream=stream))
            calls.insert(0, compact)
        for name, nbytes, call in calls:
            seconds = clock.seconds(call, lambda: cache.reset_for_new_sequences(lengths, stream=stream))
            copied = min(max(nbytes // 2, clock.least_copied), _MOST_COPIED)
            limit = clock.copy_bytes_per_second(copied, fresh=name == "capture")
            result[name] = {
                "mb": round(nbytes / 1e6, 1),
                "us": round(seconds * 1e6, 1),
                "of_copy": round(nbytes / seconds / limit, 3),
                "launch_bound": nbytes // 2 < LAUNCH_BOUND and isinstance(clock, DeviceClock),
            }
    return result


def by_max_sequence_length(clock, model, slots):
    """Compact 1024 live tokens per slot in a short and in a long cache, by turns."""
    around, lengths = [(slot + 1) % slots for slot in range(slots)], [1024] * slots
    with make_cache(clock, model, slots, SHORT) as short, make_cache(clock, model, slots, LONG) as long:
        times = {SHORT: [], LONG: []}
        for cache in (short, long):
            cache.reset_for_new_sequences(lengths, stream=clock.stream)
            if isinstance(clock, HostClock):
                touch(cache, 1024)
        for _ in range(3):
            for longest, cache in ((SHORT, short), (LONG, long)):
                times[longest].append(clock.seconds(lambda c=cache: c.compact_batch(around, slots, slots, stream=clock.stream)))
    micros = {longest: round(median(found) * 1e6, 1) for longest, found in times.items()}
    return {"model": model, "slots": slots, "us": micros, "ratio": round(micros[LONG] / micros[SHORT], 3)}


def snapshots(clock, tokens):
    """Write and read a slot as a file; beside it SHA-256 of as many bytes, and a plain file."""
    with tempfile.TemporaryDirectory() as folder, make_cache(clock, "1B", 1, tokens) as cache:
        path, plain = Path(folder) / "slot.kv", Path(folder) / "plain"
        if isinstance(clock, HostClock):
            touch(cache)
        cache.reset_for_new_sequences([tokens], stream=clock.stream)
        payload = np.ones(cache.config.nbytes, np.uint8)
        options = {"model": ModelIdentity(fingerprint="benchmark"), "stream": clock.stream}
        taken = Snapshot.of_slot(cache, 0, tokens=range(tokens), **options)

        def write_plain():
            with plain.open("wb") as file:
                file.write(payload)
                file.flush()
                os.fsync(file.fileno())

        seconds = {
            "hash": _wall(lambda: hashlib.sha256(payload).digest()),
            "disk write": _wall(write_plain),
            "disk read": _wall(lambda: plain.read_bytes()),
            "save": _wall(lambda: taken.write(path)),
            "load": _wall(lambda: Snapshot.read(path)),
        }
    result = {"mb": round(payload.nbytes / 1e6, 1), "seconds": {name: round(one, 4) for name, one in seconds.items()}}
    result["save_of_slower"] = round(max(seconds["hash"], seconds["disk write"]) / seconds["save"], 3)
    result["load_of_slower"] = round(max(seconds["hash"], seconds["disk read"]) / seconds["load"], 3)
    return result


def host_time(clock, calls=10_000):
    """Measure what reset and commit cost on the host, B = 8: the calls do not wait for the device."""
    lengths = Lengths(8, calls + 1, memory=clock.memory)
    stream = clock.stream
    lengths.reset([0] * 8, stream=stream)
    result = {"batch_size": 8, "calls": calls}
    for name, call in (
        ("commit_scalar_us", lambda: lengths.commit(1, stream=stream)),
        ("reset_us", lambda: lengths.reset([0] * 8, stream=stream)),
        ("commit_values_us", lambda: lengths.commit([1] * 8, stream=stream)),
    ):
        times = []
        for index in range(calls):
            started = time.perf_counter()
            call()
            times.append(time.perf_counter() - started)
            if index % 500 == 499:
                clock.memory.synchronize(stream)  # the queue of launches never fills up
        result[name] = round(median(times) * 1e6, 2)
    assert tuple(lengths.tensor.numpy()) == lengths.host == (calls,) * 8
    return result


def measure(clock, max_bytes, *, quick=False):
    """Run it all; cases that do not fit into ``max_bytes`` are named and left out."""
    check(clock)
    on_host = isinstance(clock, HostClock)
    copied = 1 << (24 if quick else 28 if on_host else 30)
    speeds = {name: round(clock.copy_bytes_per_second(copied, fresh=fresh) / 1e9, 2) for name, fresh in COPIES}
    measured, left_out = {}, []
    for name, model, lengths in cases():
        layers, heads, head_dim = MODELS[model]
        nbytes = layers * 2 * heads * head_dim * 2 * max(lengths) * (len(lengths) + 2)  # and two captures
        if nbytes > max_bytes:
            left_out.append(name)
        else:
            measured[name] = moves(clock, model, lengths)
    calls = 200 if quick else 10_000
    return {
        "limits": LIMITS,
        **speeds,
        "cases": measured,
        "left_out": left_out,
        "by_max_sequence_length": by_max_sequence_length(clock, "1B" if on_host else "8B", 2 if quick else 4),
        "snapshots": snapshots(clock, 64 if quick else 8192),
        "host_time": host_time(clock, calls),
    }


def limited(name, least):
    """Tell whether a row has a limit: on the host, a capture with its allocation is mostly the system's work."""
    return name != "capture" or least != LIMITS["host"]


def exceeded(result, least):
    """Return the limits that a result does not keep."""
    slow = [
        f"{case}: {name} {one['of_copy']}"
        for case, shown in result["cases"].items()
        for name, one in shown.items()
        if not one["launch_bound"] and one["of_copy"] < least and limited(name, least)
    ]
    if result["by_max_sequence_length"]["ratio"] > LIMITS["length_ratio"]:
        slow.append(f"compaction, S = 32768 over 2048: {result['by_max_sequence_length']['ratio']}")
    return slow + [f"{name}: {one}" for name, one in result["host_time"].items() if name.endswith("_us") and one > LIMITS["host_us"]]


def show(result, least):
    """Print what was measured, limits beside."""
    for case, found in result["cases"].items():
        for name, one in found.items():
            limit = "bound by the launch" if one["launch_bound"] else f"at least {least}" if limited(name, least) else "with its allocation"
            print(f"{case}: {name}: {one['us']} us, {one['of_copy']} of a copy ({limit})")
    print(f"compaction, S = {LONG} over {SHORT}: {result['by_max_sequence_length']['ratio']} (at most {LIMITS['length_ratio']})")
    print(
        f"snapshots over the slower of SHA-256 and disk: {result['snapshots']['save_of_slower']}, {result['snapshots']['load_of_slower']}"
    )
    print(f"host time: {result['host_time']} (at most {LIMITS['host_us']} us)")


def tabled(result):
    """Return a result as it is written: its cases as a table."""
    return {
        **result,
        "cases": to_table({"case": case, "move": name, **one} for case, found in result["cases"].items() for name, one in found.items()),
    }


def _wall(call):
    times = []
    for _ in range(5):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return median(times)


def main():
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("host", "gpu"), default="host")
    parser.add_argument("--max-bytes", type=float, default=1.5e9, help="of K and V at once")
    parser.add_argument("--quick", action="store_true", help="small cases only: to try the script")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    clock = HostClock() if arguments.device == "host" else DeviceClock()
    result = measure(clock, 1.2e8 if arguments.quick else arguments.max_bytes, quick=arguments.quick)
    slow = exceeded(result, LIMITS[arguments.device])
    show(result, LIMITS[arguments.device])
    for line in slow:
        print(f"over the limit: {line}")
    content = {**describe_environment(gpu=arguments.device == "gpu"), **tabled(result), "exceeded": slow}
    out = arguments.out or HERE / "results" / f"moves_{arguments.device}.json"
    write_result(out, content)
    return 1 if slow else 0


if __name__ == "__main__":
    sys.exit(main())
