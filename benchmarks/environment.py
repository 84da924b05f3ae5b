"""What a result was measured on: device, driver, versions, commit, command."""

import importlib.metadata
import json
import os
import platform
import shlex
import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path

from trt_kvcache.memory.cuda_driver import find_gpu

_PACKAGES = (
    "numpy",
    "ml_dtypes",
    "tensorrt-rtx",
    "tensorrt",
    "cuda-core",
    "cuda-bindings",
    "polygraphy",
    "safetensors",
    "torch",
    "llama-cpp-python",
    "gguf",
)


def describe_environment(*, gpu=False):
    """Return what stands at the head of every file in ``benchmarks/results``."""
    described = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "cpu": _cpu_name(),
        "python": platform.python_version(),
        "platform": platform.platform(terse=True),
        "versions": _versions(),
        "commit": _commit(),
        "command": shlex.join(["python", *sys.argv]),
    }
    return {**described, **_gpu()} if gpu else described


def write_result(path, content):
    """Write a result as JSON, an object that fits in 500 characters on one line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(_lines(content) + "\n", encoding="utf-8")


def _lines(value, indent=""):
    text = json.dumps(value, separators=(",", ":"), default=str)
    if not isinstance(value, dict) or (len(text) <= 500 and indent):
        return text
    inner = indent + " "
    return "{" + ",".join(f"\n{inner}{json.dumps(str(key))}:{_lines(part, inner)}" for key, part in value.items()) + "}"


def _cpu_name():
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _versions():
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _commit():
    """Return the commit that is measured; ``TRT_KVCACHE_COMMIT`` names it where the files were copied without their history."""
    given = os.environ.get("TRT_KVCACHE_COMMIT")
    if given:
        return given
    return commit_of(Path(__file__).resolve().parent.parent)


def commit_of(checkout):
    """Return the commit of a checkout, and whether files were changed since; ``"unknown"`` where they were copied without their history."""
    if not (checkout / ".git").exists():  # or a repository that it was copied into would answer
        return "unknown"
    try:
        commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=checkout, capture_output=True, text=True, check=True).stdout.strip()
        changed = subprocess.run(["git", "status", "--porcelain"], cwd=checkout, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{commit}{' with changes' if changed else ''}"


def _gpu():
    reason = find_gpu()
    if reason is not None:
        sys.exit(f"no GPU: {reason}")
    query = ["nvidia-smi", "--query-gpu=name,compute_cap,driver_version,memory.total", "--format=csv,noheader"]
    try:
        line = subprocess.run(query, capture_output=True, text=True, check=True, timeout=30).stdout.splitlines()[0]
    except (OSError, subprocess.SubprocessError, IndexError) as error:
        return {"device": f"unknown ({error})"}
    name, capability, driver, memory = (part.strip() for part in line.split(","))
    return {"device": name, "compute_capability": capability, "driver": driver, "device_memory": memory}


def to_table(rows):
    """Return rows of figures, nested by one level at most, with names written once, and "" for the text above: a fourth of the bytes."""
    flat = [{(key, *inner): value for key, part in row.items() for inner, value in _parts(part)} for row in rows]
    columns = list(dict.fromkeys(column for row in flat for column in row))
    rows = [[row.get(column) for column in columns] for row in flat]
    texts = [
        ["" if isinstance(one, str) and one == above else one for one, above in zip(*two, strict=True)]
        for two in zip(rows[1:], rows, strict=False)
    ]
    return {"columns": columns, "rows": rows[:1] + texts}


def of_table(table):
    """Return the rows of :func:`to_table`."""
    rows, values = [], [None] * len(table["columns"])
    for said in table["rows"]:
        rows.append(row := {})
        values = [above if one == "" else one for one, above in zip(said, values, strict=True)]
        for (key, *inner), value in zip(table["columns"], values, strict=True):
            if inner:
                row.setdefault(key, {}).update({} if value is None else {inner[0]: value})
            elif value is not None:
                row[key] = value
    return rows


def _parts(part):
    return [((name,), value) for name, value in part.items()] if isinstance(part, dict) else [((), part)]
