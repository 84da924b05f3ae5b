"""Host time of a decode step: what Python takes per step, with an engine that does nothing.

    python benchmarks/host_step.py [--out benchmarks/results/host_step.json] [--steps 10000]

A step is ``session.decode``: check and upload one token for each of 8 slots, enqueue, commit the lengths, write the tokens down, read
the logits. Nothing is sampled. The cache is in host memory, where copies are done by the host; so the vocabulary is small, and what
is left is bookkeeping. The layer counts take turns, so that a machine that changes its pace does not favour one.

Then the loop of ``session.generate``, which chooses tokens too: how long the host takes from one enqueue to the next, and how much of that
time comes after the tokens of a step have arrived. On a device it must be nothing: the next step was enqueued before. There, choosing is
the work of a kernel, which does nothing here, as the engine does; the launches of a GPU come on top.
"""

import argparse
import itertools
import statistics
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from unittest.mock import patch

from environment import describe_environment, write_result

from trt_kvcache import HostMemory, InferenceSession, KVCacheConfig, KVCacheManager, KVLayerConfig, KVLayout
from trt_kvcache.engine.names import DEFAULT_NAMES as NAMES
from trt_kvcache.engine.protocol import EngineProfile, TensorMode, TensorSpec
from trt_kvcache.generation import device_sampler
from trt_kvcache.generation.device_sampler import SampledTokens

BATCH, VOCAB, STEPS = 8, 512, 10_000
LAYERS = (16, 32, 64)
ROUNDS = 10

#: Longest median at 32 layers, in microseconds, and largest ratio of the medians at 64 and 16 layers.
LIMIT_MICROSECONDS, LIMIT_RATIO = 30.0, 1.2

#: Microseconds that any step of the loop on a device may wait for the host after its tokens are there; layers of that loop.
LIMIT_LATE, LIMIT_LAYERS = 0.0, 32


class NullEngine:
    """An engine of any number of layers that does nothing."""

    def __init__(self, kv, memory):
        self.memory = memory
        self.profiles = (
            EngineProfile(name="prefill", min_batch=1, max_batch=BATCH, min_width=1, max_width=16),
            EngineProfile(name="decode", min_batch=1, max_batch=BATCH, min_width=1, max_width=1),
        )
        self.tensors = {spec.name: spec for spec in _tensors(kv)}

    def bind(self, *arguments):
        """Do nothing."""

    use_profile = set_input_shape = enqueue = close = bind


def _tensors(kv):
    inputs = [(NAMES.input_ids, (-1, -1), "int32"), (NAMES.kvcache_start_index, (-1,), "int32"), (NAMES.last_token_ids, (-1, 1), "int32")]
    specs = [TensorSpec(name=name, shape=shape, dtype=dtype, mode=TensorMode.INPUT) for name, shape, dtype in inputs]
    specs.append(TensorSpec(name=NAMES.logits, shape=(-1, VOCAB), dtype="float32", mode=TensorMode.OUTPUT))
    for index, layer in enumerate(kv.layers):
        shape = (-1, layer.num_kv_heads, kv.max_sequence_length, layer.head_dim)
        for before, after in NAMES.cache_pairs(index):
            specs.append(TensorSpec(name=before, shape=shape, dtype=kv.dtype, mode=TensorMode.INPUT))
            specs.append(TensorSpec(name=after, shape=shape, dtype=kv.dtype, mode=TensorMode.OUTPUT, alias=before))
    return specs


class CheckingEngine(NullEngine):
    """A null engine that looks at what an enqueue would read, and answers with the token that it was given."""

    def __init__(self, kv, memory):
        super().__init__(kv, memory)
        self.bound = {}
        self.calls = []
        self.starts = []

    def bind(self, name, tensor):
        """Remember it."""
        self.bound[name] = tensor
        self.calls.append("bind")

    def set_input_shape(self, name, shape):
        """Count it."""
        self.calls.append("set_input_shape")

    def enqueue(self, stream):
        """Read the start index and the tokens, write logits."""
        self.calls.append("enqueue")
        array = self.memory.array
        self.starts.append(array(self.bound[NAMES.kvcache_start_index]).tolist())
        logits = array(self.bound[NAMES.logits])
        logits[...] = 0
        logits[range(BATCH), array(self.bound[NAMES.input_ids])[:BATCH]] = 1


def make_session(layers, engine=NullEngine):
    """Return a session of 8 slots that hold one token each."""
    memory = HostMemory()
    kv = KVCacheConfig(
        layers=(KVLayerConfig(num_kv_heads=1, head_dim=8),) * layers,
        max_batch_size=BATCH,
        max_sequence_length=2 * STEPS,
        dtype="float16",
        layout=KVLayout.SEPARATE,
    )
    session = InferenceSession(engine(kv, memory), KVCacheManager(kv, memory=memory))
    session.prefill([[1]] * BATCH)
    return session


def check(layers):
    """Check that steps do what they should: tokens in, lengths read and then counted, nothing bound or set again."""
    steps = 50
    with make_session(layers, CheckingEngine) as session:
        engine = session.engine
        engine.calls.clear()
        for step in range(steps):
            tokens = [(step * BATCH + slot) % VOCAB for slot in range(BATCH)]
            if session.decode(tokens).argmax(axis=1).tolist() != tokens:
                raise AssertionError(f"step {step}: the engine was given other tokens than {tokens}")
        found = (engine.calls, engine.starts[1:], session.cache.host_kv_cache_lengths, session.cache.kv_cache_lengths.numpy().tolist())
        expected = (["enqueue"] * steps, [[1 + step] * BATCH for step in range(steps)], (1 + steps,) * BATCH, [1 + steps] * BATCH)
        if found != expected:
            raise AssertionError(f"{layers} layers: expected {expected}, got {found}")


def time_steps(session, steps):
    """Return the seconds of each of some decode steps."""
    tokens = list(range(BATCH))
    clock, seconds = time.perf_counter, []
    for _ in range(steps):
        started = clock()
        session.decode(tokens)
        seconds.append(clock() - started)
    return seconds


def measure(steps):
    """Return median and 90th percentile, in microseconds, per number of layers."""
    sessions = {layers: make_session(layers) for layers in LAYERS}
    seconds = {layers: [] for layers in LAYERS}
    for session in sessions.values():
        time_steps(session, 500)
    for _ in range(ROUNDS):
        for layers, session in sessions.items():
            seconds[layers] += time_steps(session, steps // ROUNDS)
    return {
        layers: {"median_us": statistics.median(values) * 1e6, "p90_us": statistics.quantiles(values, n=10)[-1] * 1e6}
        for layers, values in seconds.items()
    }


class Clocks:
    """When steps were enqueued, and when what they end with was on the host."""

    def __init__(self):
        self.enqueued, self.there = [], []

    def after(self, call, times):
        """Return a function that does the same and writes down when it is done."""

        def timed(*arguments, **options):
            result = call(*arguments, **options)
            times.append(time.perf_counter())
            return result

        return timed


def measure_loop(steps, *, on_device):
    """Return the microseconds between two enqueues, and those from when tokens (or logits) are there to the next enqueue."""
    clocks = Clocks()
    with make_session(LIMIT_LAYERS) as session, ExitStack() as patches:
        session._decode_steps.on_device = on_device
        list(session.generate([[1]] * BATCH, max_new_tokens=50, temperature=0.0))  # what is made once
        session.engine.enqueue = clocks.after(session.engine.enqueue, clocks.enqueued)
        if on_device:
            patches.enter_context(patch.object(device_sampler, "choose_tokens_kernel", lambda *_: None))
            patches.enter_context(patch.object(SampledTokens, "read", clocks.after(SampledTokens.read, clocks.there)))
        else:
            session._runner.logits = clocks.after(session._runner.logits, clocks.there)
        list(session.generate([[1]] * BATCH, max_new_tokens=steps + 2, temperature=0.0))
    enqueued, there = clocks.enqueued[1:], clocks.there[-steps - 1 :]  # without the prefill
    between = [1e6 * (after - before) for before, after in itertools.pairwise(enqueued)]
    late = [1e6 * max(0.0, after - known) for after, known in zip(enqueued[1:], there[:-1], strict=True)]
    return {
        "between_enqueues_us": statistics.median(between),
        "after_tokens_us": statistics.median(late),
        "after_tokens_max_us": max(late),
    }


def main():
    """Check, measure, print, write the file; 1 if a limit is exceeded."""
    parser = argparse.ArgumentParser(description="Host time of a decode step")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "host_step.json")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"per number of layers, at least {ROUNDS}, at most {STEPS}")
    arguments = parser.parse_args()
    if not ROUNDS <= arguments.steps <= STEPS:
        parser.error(f"--steps: expected {ROUNDS} to {STEPS}, got {arguments.steps}")
    for layers in LAYERS:
        check(layers)
    results = measure(arguments.steps)
    for layers, result in results.items():
        print(f"{layers:2} layers: median {result['median_us']:.1f} us, 90 % under {result['p90_us']:.1f} us")
    median, ratio = results[32]["median_us"], results[64]["median_us"] / results[16]["median_us"]
    print(f"at 32 layers: {median:.1f} us (limit {LIMIT_MICROSECONDS}); 64 layers take {ratio:.2f} times 16 (limit {LIMIT_RATIO})")
    loop = {place: measure_loop(arguments.steps, on_device=place == "device") for place in ("host", "device")}
    for place, one in loop.items():
        times = f"{one['between_enqueues_us']:.1f} us between enqueues, {one['after_tokens_us']:.1f} us of them with the tokens there"
        print(f"tokens chosen on the {place}: {times}")
    late = loop["device"]["after_tokens_max_us"]
    print(f"on the device at most {late:.1f} us in any step (limit {LIMIT_LATE})")
    content = {
        **describe_environment(),
        "batch_size": BATCH,
        "vocab_size": VOCAB,
        "steps": arguments.steps,
        "layers": {str(layers): result for layers, result in results.items()},
        "ratio_64_to_16": ratio,
        "loop": loop,
        "limits": {"median_us_at_32_layers": LIMIT_MICROSECONDS, "ratio_64_to_16": LIMIT_RATIO, "after_tokens_us": LIMIT_LATE},
    }
    write_result(arguments.out, content)
    return int(median > LIMIT_MICROSECONDS or ratio > LIMIT_RATIO or late > LIMIT_LATE)


if __name__ == "__main__":
    sys.exit(main())
