"""The server beside ``submit`` and ``step`` of a session in the same process: tokens per second, and how long clients wait.

    python benchmarks/serving.py [--quick] [--rounds 5] [--out FILE]

Both answer the same prompts with the same greedy tokens, 32 at once and one at a time, in turns. The session runs the NumPy engine on a
model with random weights and one BLAS thread, so that a core is left for the event loop, as when a GPU runs the model. Clients are
sockets of another process, which reads events. Tokens are compared first.
"""

from __future__ import annotations

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # before NumPy is imported

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from environment import describe_environment, write_result

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent))

from trt_kvcache import InferenceSession, SessionSource  # noqa: E402
from trt_kvcache.doctor.random_model import write_random_model  # noqa: E402
from trt_kvcache.server import AsyncEngine  # noqa: E402
from trt_kvcache.server.http import ServerOptions, make_app  # noqa: E402
from trt_kvcache.server.http.serving import Server, address_of, bound_socket  # noqa: E402

#: Smallest tokens per second of the server over those of the session, with as many requests at once as there are slots.
LIMIT, SLOTS = 0.9, 32

MODEL = {
    "model_type": "llama",
    "vocab_size": 8192,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
}
PROMPT_TOKENS = 16

#: Reads lines of host, port and clients, each a list of bodies. A client sends its next body after the end of its last answer. Prints for
#: each answer the times of its events, that of its end, and how many ends it has.
CLIENT = """
import asyncio, json, sys, time
async def ask(host, port, body):
    content = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\\r\\nHost: localhost\\r\\nContent-Type: application/json\\r\\nConnection: close\\r\\n"
    reader, writer = await asyncio.open_connection(host, port, limit=1 << 24)
    begin = time.perf_counter()
    writer.write(f"{head}Content-Length: {len(content)}\\r\\n\\r\\n".encode() + content)
    times, parts = [], []
    while part := await reader.read(1 << 20):
        parts.append(part)
        times += [time.perf_counter() - begin] * part.count(b'"text":')
    writer.close()
    return [times, time.perf_counter() - begin, b"".join(parts).decode().count('"finish_reason":"length"')]
async def client(host, port, bodies):
    return [await ask(host, port, body) for body in bodies]
async def main(host, port, clients):
    return sum(await asyncio.gather(*[client(host, port, bodies) for bodies in clients]), [])
for line in sys.stdin:
    print(json.dumps(asyncio.run(main(*json.loads(line)))), flush=True)
"""


class Clients:
    """A process of clients."""

    def __init__(self, host: str, port: int) -> None:
        self._address = host, port
        self._process = subprocess.Popen([sys.executable, "-c", CLIENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, clients: list[list[dict[str, Any]]]) -> list[Any]:
        """Run clients at once, each with its bodies in turn. Return the times of the events of each answer, and of its end."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(json.dumps([*self._address, clients]) + "\n")
        stdin.flush()
        found: list[Any] = json.loads(stdout.readline())
        assert all(ended == 1 for *_, ended in found), "an answer did not end as it should"
        return found

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


def prompts(count: int) -> list[list[int]]:
    return [[(7 * index + place) % 8000 + 3 for place in range(PROMPT_TOKENS)] for index in range(count)]


def direct(session: InferenceSession, count: int, tokens: int) -> dict[str, Any]:
    """Return seconds to the first tokens and to the last one, and the tokens."""
    begin = time.perf_counter()
    handles = [session.submit(prompt, max_new_tokens=tokens, ignore_eos=True) for prompt in prompts(count)]
    first = []
    while session.step():
        if len(first) < count:
            first = [time.perf_counter() - begin for handle in handles if handle.tokens]
    return {"seconds": time.perf_counter() - begin, "first": first, "tokens": [handle.tokens for handle in handles]}


def served(clients: Clients, count: int, tokens: int, *, stream: bool) -> dict[str, Any]:
    """Return the same of the server, as its clients see it."""
    options = {"max_tokens": tokens, "ignore_eos": True, "temperature": 0, "stream": stream}
    found = clients.ask([[{"prompt": prompt, **options}] for prompt in prompts(count)])
    return {"seconds": max(whole for _, whole, _ in found), "first": [times[0] if stream else whole for times, whole, _ in found]}


def check(expected: Sequence[Sequence[str]], url: str) -> None:
    """Check that the server answers :func:`prompts` with the tokens of the session, which are given as the server writes them."""
    import urllib.request

    for prompt, tokens in zip(prompts(len(expected)), expected, strict=True):
        body = json.dumps({"prompt": prompt, "max_tokens": len(tokens), "ignore_eos": True, "temperature": 0, "logprobs": 0}).encode()
        asked = urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
        answer = json.load(urllib.request.urlopen(asked))["choices"][0]["logprobs"]["tokens"]
        assert answer == list(tokens), f"the server answers with {answer}, the session with {tokens}"


def run_server(source: Callable[[], InferenceSession], body: Callable[[str, int, str], None]) -> None:
    """Call a function with host, port and URL of a server that runs."""
    options = ServerOptions()
    engine = AsyncEngine(source, model="model", max_queue=SLOTS)
    server = Server(make_app(engine, options), engine)
    with bound_socket("127.0.0.1", 0, options) as bound:
        thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[bound])))
        thread.start()
        try:
            while not server.started:
                assert thread.is_alive()
                time.sleep(0.01)
            body(*bound.getsockname()[:2], address_of(bound))
        finally:
            server.should_exit = True
            thread.join()


def row(count: int, tokens: int, runs: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Return medians over the rounds. Ratios are those of each round, whose sides ran one after the other."""
    total = count * tokens
    found: dict[str, Any] = {"at_once": count, "tokens": tokens}
    for name, rounds in runs.items():
        found[name] = {
            "tokens_per_second": round(statistics.median(total / one["seconds"] for one in rounds), 1),
            "first_token_ms": round(statistics.median(statistics.median(one["first"]) for one in rounds) * 1e3, 2),
        }
    for name in ("stream", "whole"):
        ratios = [mine["seconds"] / theirs["seconds"] for mine, theirs in zip(runs["session"], runs[name], strict=True)]
        found[f"{name}_over_session"] = round(statistics.median(ratios), 3)
    return found


def main() -> int:
    """Measure, write the result; exit code 1 says that the limit is not met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "serving.json")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    model = {**MODEL, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2} if arguments.quick else MODEL
    tokens = 8 if arguments.quick else 64
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        write_random_model(Path(folder) / "model", model)
        source = SessionSource(Path(folder) / "model", engine="reference", max_batch_size=SLOTS, max_sequence_length=128)

        def measure(host: str, port: int, url: str) -> None:
            clients = Clients(host, port)
            with source() as session:
                check([[f"token_id:{token}" for token in found] for found in direct(session, 2, tokens)["tokens"]], url)
                for count in (1, SLOTS):
                    runs: dict[str, list[dict[str, Any]]] = {"session": [], "stream": [], "whole": []}
                    for _ in range(arguments.rounds):
                        runs["session"].append(direct(session, count, tokens))
                        runs["stream"].append(served(clients, count, tokens, stream=True))
                        runs["whole"].append(served(clients, count, tokens, stream=False))
                    rows.append(row(count, tokens, runs))
                    print(json.dumps(rows[-1]), flush=True)
            clients.close()

        run_server(source, measure)
    result = {**describe_environment(), "model": model, "slots": SLOTS, "rounds": arguments.rounds, "limit": LIMIT, "rows": rows}
    write_result(arguments.out, result)
    return int(rows[-1]["stream_over_session"] < LIMIT)


if __name__ == "__main__":
    sys.exit(main())
