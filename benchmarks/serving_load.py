"""The server under load with the PyTorch engine, beside ``submit`` and ``step``: prompts of many lengths, which share beginnings.

    python benchmarks/serving_load.py [--models Qwen2-0.5B] [--clients 1,8,32] [--sides ours,transformers] [--device cpu] [--quick]
                                      [--max-seconds 300] [--out FILE]

Models of real shapes get random weights on the device. As many clients as ``--clients`` says each send their next prompt after their last
answer; on the side of the session, as many requests are outstanding. Every other prompt begins like one before. Tokens of the server are
compared with those of the session first. TTFT is the time to the first token, ITL the time between two tokens of one answer. With the side
``transformers``, its continuous batching runs the same prompts in this process, as many at once. Needs torch, transformers and the extra
``serve``.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

from end_to_end_models import MODELS, RandomModel, tiny
from environment import describe_environment, write_result
from serving import Clients, check, direct, run_server

from trt_kvcache import CudaMemory, HostMemory, InferenceSession
from trt_kvcache.benchmarking import Percentiles
from trt_kvcache.session.session_options import DEFAULT_PREFILL_CHUNK

HERE = Path(__file__).resolve().parent

#: Least tokens per second of the server over those of the session, and largest p99 of ITL over its median.
LIMITS = {"over_session": 0.93, "itl_p99_over_median": 2.0}

SHORTEST, LONGEST, NEW_TOKENS, EACH_CLIENT = 200, 2000, 64, 4
QUICK = {"shortest": 4, "longest": 24, "new_tokens": 6}

Load = list[list[list[int]]]


def main() -> int:
    """Compare, measure, write. Exit code 1: a limit is not met."""
    options = _options()
    memory = HostMemory() if options.device == "cpu" else CudaMemory()
    result: dict[str, Any] = {
        **describe_environment(gpu=options.device != "cpu"),
        "limits": LIMITS,
        "prefill_chunk": options.prefill_chunk,
        "rows": [],
    }
    deadline = time.monotonic() + options.max_seconds
    for name in options.models:
        with tempfile.TemporaryDirectory() as folder:
            model = RandomModel(tiny(MODELS[name]) if options.quick else MODELS[name], options.device, Path(folder))
            for clients in options.clients:
                if time.monotonic() < deadline:
                    result["rows"].append({"model": name, **measured(model, memory, clients, options)})
                    write_result(options.out, result)
                    print(json.dumps(result["rows"][-1]), flush=True)
    return int(not all(meets_limits(row) for row in result["rows"]))


def meets_limits(row: dict[str, Any]) -> bool:
    """Return True if the server is nearly as fast as the session, and no token waits long for the prompts of others."""
    itl = row["server"]["itl_ms"]
    return row["over_session"] >= LIMITS["over_session"] and itl["p99"] <= LIMITS["itl_p99_over_median"] * itl["median"]


def measured(model: RandomModel, memory: Any, clients: int, options: argparse.Namespace) -> dict[str, Any]:
    """Measure one number of clients on both sides, after runs of each that capture graphs."""
    sizes = QUICK if options.quick else {"shortest": SHORTEST, "longest": LONGEST, "new_tokens": NEW_TOKENS}
    count = sizes["new_tokens"]
    open_session = partial(
        model.session,
        memory,
        slots=clients,
        length=sizes["longest"] + count,
        width=min(sizes["longest"], max(64, 16384 // clients)),
        prefill_chunk=options.prefill_chunk,
    )
    loads = [load(model, clients, seed, sizes["shortest"], sizes["longest"]) for seed in range(options.warm_up + 1)]
    with open_session() as session:
        [tokens] = direct(session, 1, min(16, count))["tokens"]  # alone, so that sums have one order
        of_session = [run_session(session, one, count) for one in loads]
    of_server: list[dict[str, Any]] = []

    def ask(host: str, port: int, url: str) -> None:
        check([[written(model, token) for token in tokens]], url)
        asking = Clients(host, port)
        of_server.extend(run_server_load(asking, one, count) for one in loads)
        asking.close()

    run_server(open_session, ask)
    session_side, server_side = (summary(runs[-1], count) for runs in (of_session, of_server))
    ratio = server_side["tokens_per_second"] / session_side["tokens_per_second"]
    row = {
        "clients": clients,
        "requests": clients * EACH_CLIENT,
        "warm_up": options.warm_up,
        "session": session_side,
        "server": server_side,
        "over_session": ratio,
    }
    if "transformers" in options.sides:
        row["transformers_version"] = version("transformers")
        row["transformers"] = summary(run_transformers(model, loads, count)[-1], count)
    return row


def written(model: RandomModel, token: int) -> str:
    """Return a token as the server writes it: its text, or its number if that is no whole text."""
    text = model.tokenizer.decode([token])
    return f"token_id:{token}" if "\ufffd" in text else text


def load(model: RandomModel, clients: int, seed: int, shortest: int, longest: int) -> Load:
    """Return the prompts of each client. Lengths are even in their logarithm."""
    random = Random(seed)
    prompts: list[list[int]] = []
    for index in range(clients * EACH_CLIENT):
        length = round(math.exp(random.uniform(math.log(shortest), math.log(longest))))
        [prompt] = model.prompts(1, length, seed=1000 * seed + index)
        if index % 2:
            shared = random.choice(prompts)
            kept = min(len(shared), length) // 2
            prompt[:kept] = shared[:kept]
        prompts.append(prompt)
    random.shuffle(prompts)
    return [prompts[client::clients] for client in range(clients)]


def run_session(session: InferenceSession, prompts: Load, count: int) -> dict[str, Any]:
    """Keep one request of each client outstanding; return the times of the tokens of each request since its submission, and all seconds."""
    begin = time.perf_counter()
    answers: list[list[float]] = []
    waiting = [list(reversed(of_client)) for of_client in prompts]
    running: list[Any] = [None] * len(prompts)
    while any(waiting) or any(running):
        for client, one in enumerate(running):
            if one is None and waiting[client]:
                handle = session.submit(waiting[client].pop(), max_new_tokens=count, ignore_eos=True, temperature=0)
                running[client] = (handle, time.perf_counter(), [])
        session.step()
        now = time.perf_counter()
        for client, one in enumerate(running):
            if one is not None:
                handle, submitted, times = one
                times += [now - submitted] * (len(handle.tokens) - len(times))
                if handle.finished:
                    answers.append(times)
                    running[client] = None
    return {"seconds": time.perf_counter() - begin, "answers": answers}


def run_server_load(clients: Clients, prompts: Load, count: int) -> dict[str, Any]:
    """Return the same, as clients of the server see it."""
    fixed = {"max_tokens": count, "ignore_eos": True, "temperature": 0, "stream": True}
    begin = time.perf_counter()
    found = clients.ask([[{"prompt": prompt, **fixed} for prompt in of_client] for of_client in prompts])
    return {"seconds": time.perf_counter() - begin, "answers": [times for times, *_ in found]}


def run_transformers(model: RandomModel, loads: Sequence[Load], count: int) -> list[dict[str, Any]]:
    """Return the same for each load, of continuous batching in transformers. Its graphs are captured first."""
    from transformers import GenerationConfig

    config = GenerationConfig(max_new_tokens=count, do_sample=False, eos_token_id=-1, pad_token_id=0)
    found = []
    with model.peer.continuous_batching_context_manager(generation_config=config) as manager:
        for prompts in loads:
            begin = time.perf_counter()
            answers: list[list[float]] = []
            waiting = [list(reversed(of_client)) for of_client in prompts]
            running: dict[str, tuple[int, float]] = {}
            idle = list(range(len(prompts)))
            while any(waiting) or running:
                for client in idle:
                    if waiting[client]:
                        submitted = time.perf_counter()
                        name = manager.add_request(waiting[client].pop(), max_new_tokens=count, record_timestamps=True, eos_token_id=-1)
                        running[name] = (client, submitted)
                output = manager.get_result(timeout=60)
                assert output is not None, "transformers has stopped"
                assert output.error is None, output.error
                assert len(output.generated_tokens) == len(output.timestamps) == count
                client, submitted = running.pop(output.request_id)
                answers.append([moment - submitted for moment in output.timestamps])
                idle = [client]
            found.append({"seconds": time.perf_counter() - begin, "answers": answers})
    return found


def summary(run: dict[str, Any], count: int) -> dict[str, Any]:
    """Return tokens per second, and how long clients waited."""
    answers: Sequence[Sequence[float]] = run["answers"]
    between = [(after - before) * 1e3 for times in answers for before, after in pairwise(times)]
    return {
        "tokens_per_second": count * len(answers) / run["seconds"],
        "ttft_ms": vars(Percentiles.of([times[0] * 1e3 for times in answers])),
        "itl_ms": vars(Percentiles.of(between)),
    }


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--models", type=lambda text: text.split(","), default=list(MODELS), help=", ".join(MODELS))
    parser.add_argument("--clients", type=lambda text: [int(part) for part in text.split(",")], default=[1, 8, 32])
    parser.add_argument("--sides", type=lambda text: text.split(","), default=["ours"], help="ours, transformers")
    parser.add_argument("--warm-up", type=int, default=4, help="runs before the one that counts: they capture graphs")
    parser.add_argument("--prefill-chunk", type=int, default=DEFAULT_PREFILL_CHUNK)
    parser.add_argument("--quick", action="store_true", help="tiny models: tries the script, measures nothing of use")
    parser.add_argument("--max-seconds", type=float, default=300.0, help="begin no measurement after so long")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "serving_load.json")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
